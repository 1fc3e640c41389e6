"""The Weaver against golden arrays of an independent implementation that re-runs every root-to-node chain from scratch.

Gates: 1e-4 on logits, 1e-5 on the prompt's keys and values. A tanh GELU moves these logits by 7e-4.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import mark_ancestors
from flax import nnx
from weavers import (
    GoldenWeaver,
    bind_weaver,
    compile_method,
    golden_group,
    jit_quickly,
    load_weaver,
    round_inputs,
    target_matrices,
)

from tfm_jax.config import WeaverConfig
from tfm_jax.errors import TfmError
from tfm_jax.layers import dot
from tfm_jax.weaver import NodeCache, Weaver, residual

NAMES = (
    "weaver_w1",
    "weaver_w1_fused_qkv",
    "weaver_w1_two_layers",
    "weaver_w1_short_block",
    "weaver_w2",
    "weaver_w2_two_layers",
)


class Case(NamedTuple):
    model: GoldenWeaver
    golden: dict[str, np.ndarray]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(load_weaver(request.param), golden_group(request.param.removesuffix("_fused_qkv")))


def step_one_by_one(case: Case, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> dict[str, np.ndarray]:
    """r, own keys and own values of every node, each in a call of its own, ancestors read from the cache."""
    model, golden = case
    nodes, positions = len(tokens), jnp.asarray(depths)[None]
    config = model.config
    strict = strict_ancestors(parents)[None]
    prompt = model.run("prompt", *round_inputs(golden))
    empty = jnp.zeros((1, nodes, config.layers, config.heads, config.head_dim))
    cache, rows = NodeCache(empty, empty), []
    for node in range(nodes):
        inputs = model.tables.inputs[tokens[node]][None, None]
        output = model.run("step", inputs, positions[:, node : node + 1], prompt, cache, strict[:, node : node + 1])
        cache = NodeCache(
            cache.keys.at[:, node].set(output.keys[:, 0]), cache.values.at[:, node].set(output.values[:, 0])
        )
        rows.append(output.r[0, 0])
    return {"r": np.stack(rows), "k": np.asarray(cache.keys[0]), "v": np.asarray(cache.values[0])}


def strict_ancestors(parents: np.ndarray) -> jnp.ndarray:
    """Row i is true at the ancestors of node i."""
    return jnp.asarray(mark_ancestors(parents) & ~np.eye(len(parents), dtype=bool))


def assert_logits(case: Case, r: np.ndarray, depths: np.ndarray, prefix: str) -> None:
    """Residual, logits and log-probabilities over each node's candidates."""
    ids, scores = (case.golden[name][depths] for name in ("cand_ids", "cand_scores"))
    rows = case.model.tables.heads[np.maximum(ids, 0)]
    added = np.asarray(residual(jnp.asarray(r)[None], rows[None])[0])
    real = ids >= 0
    np.testing.assert_allclose(added[real], case.golden[f"{prefix}_residual"][real], atol=1e-4, rtol=0)
    logits = np.where(real, scores + added, -np.inf)
    np.testing.assert_allclose(logits, case.golden[f"{prefix}_logits"], atol=1e-4, rtol=0)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(log_probs, case.golden[f"{prefix}_logprobs"], atol=1e-4, rtol=0)


def test_prompt_matches_golden(case: Case) -> None:
    model, golden = case
    prompt = model.run("prompt", *round_inputs(golden))
    np.testing.assert_allclose(prompt.keys[:, 0], golden["prompt_k"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(prompt.values[:, 0], golden["prompt_v"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_nodes_match_golden(case: Case, shape: str) -> None:
    golden = case.golden
    tokens = golden[f"{shape}_tokens"]
    depths = np.arange(len(tokens), dtype=np.int32) if shape == "chain" else golden["tree_depth"]
    parents = depths - 1 if shape == "chain" else golden["tree_parent"]
    rows = step_one_by_one(case, tokens, parents, depths)
    for name in ("r", "k", "v"):
        np.testing.assert_allclose(rows[name], golden[f"{shape}_{name}"], atol=1e-5, rtol=0)
    assert_logits(case, rows["r"], depths, shape)


def test_training_chain_equals_golden_and_inference(case: Case) -> None:
    model, golden = case
    embedding, head = target_matrices()
    r = model.run("chain", *round_inputs(golden), embedding[golden["chain_tokens"]][None])
    np.testing.assert_allclose(r[0], golden["chain_r"], atol=1e-5, rtol=0)
    # Training multiplies query_out · r with raw head rows, serving r with projected rows.
    rows = head[np.maximum(golden["cand_ids"], 0)]
    trained = jnp.einsum("dh,dph->dp", model.run("query", r[0]), rows, precision="highest")
    served = residual(r, model.tables.heads[np.maximum(golden["cand_ids"], 0)][None])[0]
    np.testing.assert_allclose(trained, served, atol=1e-5, rtol=0)
    assert_logits(case, np.asarray(r[0]), np.arange(r.shape[1]), "chain")


def test_one_batched_step_equals_single_steps() -> None:
    """Siblings stepped together do not see each other, and batch rows do not either."""
    case = Case(load_weaver("weaver_w2_two_layers"), golden_group("weaver_w2_two_layers"))
    model, golden = case
    level = np.flatnonzero(golden["tree_depth"] == 2)
    strict = strict_ancestors(golden["tree_parent"])
    feature, hidden = round_inputs(golden)
    prompt = model.run(
        "prompt", jnp.concatenate([feature[:, ::-1], feature]), jnp.concatenate([hidden[:, ::-1], hidden])
    )
    cache = NodeCache(*(jnp.stack([jnp.ones_like(golden[name]), golden[name]]) for name in ("tree_k", "tree_v")))
    inputs = model.tables.inputs[golden["tree_tokens"][level]]
    output = model.run(
        "step",
        jnp.stack([inputs[::-1], inputs]),
        jnp.full((2, len(level)), 2),
        prompt,
        cache,
        jnp.broadcast_to(strict[level], (2, len(level), strict.shape[1])),
    )
    assert len(level) > 1
    np.testing.assert_allclose(output.r[1], golden["tree_r"][level], atol=1e-5, rtol=0)
    np.testing.assert_allclose(output.keys[1], golden["tree_k"][level], atol=1e-5, rtol=0)


def test_deep_nodes_use_the_last_position() -> None:
    """Nodes at the depth limit are stepped with the rest of their group; their position is clamped."""
    model, golden = load_weaver("weaver_w1_short_block"), golden_group("weaver_w1_short_block")
    prompt = model.run("prompt", *round_inputs(golden))
    shape = (1, 3, model.config.layers, model.config.heads, model.config.head_dim)
    inputs = jnp.broadcast_to(model.tables.inputs[5], (1, 3, model.config.rank))
    empty = NodeCache(jnp.zeros(shape), jnp.zeros(shape))
    r = model.run("step", inputs, jnp.array([[5, 6, 7]]), prompt, empty, jnp.zeros((1, 3, 3), bool)).r[0]
    np.testing.assert_array_equal(r[1], r[2])
    assert np.abs(r[0] - r[1]).max() > 1e-2


@pytest.mark.parametrize("generation", ["w1", "w2"])
def test_fresh_weaver_returns_the_marginals(generation: Literal["w1", "w2"]) -> None:
    """query_out starts at zero, so the first training step begins from the drafter's own logits."""
    config = WeaverConfig(generation, 24, 24, 16, 1, 2, 20, 3, 8, rope_base=100.0 if generation == "w2" else 0.0)
    params = jit_quickly(
        lambda: nnx.to_pure_dict(nnx.state(Weaver(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(1))))
    )()
    feature, hidden, embeddings = np.random.default_rng(0).standard_normal((3, 2, 3, 24), np.float32)
    r = compile_method(config, "chain")(
        params, jnp.asarray(feature[:, 0]), jnp.asarray(hidden), jnp.asarray(embeddings)
    )
    assert jnp.abs(r).max() > 0.1
    np.testing.assert_array_equal(compile_method(config, "query")(params, r), 0)
    np.testing.assert_array_equal(compile_method(config, "head_table")(params, jnp.asarray(embeddings[0])), 0)


def test_gradients_reach_every_parameter_and_respect_causality() -> None:
    model, golden = load_weaver("weaver_w1_two_layers"), golden_group("weaver_w1_two_layers")
    rows = target_matrices()[0][golden["chain_tokens"]][None]

    def third_output(params: dict, embeddings: jax.Array) -> jax.Array:
        weaver = bind_weaver(model.config, params)
        r = weaver.chain(*round_inputs(golden), embeddings)
        return jnp.sum(jnp.sin(weaver.query(r[:, 2])))

    by_params, by_tokens = jit_quickly(jax.grad(third_output, argnums=(0, 1)))(model.params, rows)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(by_params))
    np.testing.assert_array_equal(by_tokens[0, 3:], 0)  # later tokens of the chain are invisible
    assert all(np.abs(by_tokens[0, :3]).max(axis=-1) > 0)


def test_bfloat16_stays_close() -> None:
    """The serving dtype: norms, softmax and logits are float32 inside."""
    case = Case(load_weaver("weaver_w1"), golden_group("weaver_w1"))
    model, golden = case
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    rows = target_matrices()[0][golden["chain_tokens"]][None]
    inputs = (x.astype(jnp.bfloat16) for x in (*round_inputs(golden), rows))
    r = compile_method(model.config, "chain")(params, *inputs)
    assert r.dtype == jnp.bfloat16
    added = residual(r, model.tables.heads.astype(jnp.bfloat16)[np.maximum(golden["cand_ids"], 0)][None])[0]
    assert added.dtype == jnp.float32
    logits = golden["cand_scores"] + np.asarray(added)
    overlap = [
        len(np.intersect1d(np.argsort(-ours)[:8], np.argsort(-theirs)[:8]))
        for ours, theirs in zip(logits, golden["chain_logits"], strict=True)
    ]
    assert np.mean(overlap) > 7.5


def test_block_deeper_than_the_position_table_is_refused() -> None:
    model = load_weaver("weaver_w1_two_layers")
    hidden = jnp.zeros((1, 8, model.config.hidden_size))
    with pytest.raises(TfmError, match="predicts 7 depths, not 8"):
        model.run("prompt", hidden[:, 0], hidden)


def test_head_table_is_the_product_of_head_and_query() -> None:
    model = load_weaver("weaver_w2")
    head = target_matrices()[1]
    r = jnp.asarray(np.random.default_rng(3).standard_normal((5, model.config.rank), np.float32))
    np.testing.assert_allclose(dot(r, model.tables.heads.T), dot(model.run("query", r), head.T), atol=1e-4, rtol=0)
