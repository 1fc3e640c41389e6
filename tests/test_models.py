"""Target and drafter against the golden arrays, in float32, within the gates of the goldens' README."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import arrays, largest_difference, load_engine, modules_of

import tfm_jax
from tfm_jax.commit import commit_path
from tfm_jax.config import TargetConfig
from tfm_jax.decode import bind
from tfm_jax.dflash import empty_caches
from tfm_jax.state import DeltaState, TargetState, write_rows
from tfm_jax.target import Target, VerifyOutput, empty_target_state
from tfm_jax.tree import conv_taps

TARGETS = ["qwen3_5_untied", "qwen3_5_vl_tied", "qwen3_untied", "qwen3_tied"]
HYBRIDS = ["qwen3_5_untied", "qwen3_5_vl_tied"]
DRAFTERS = {
    "dflash_on_qwen3_untied": "qwen3_untied",
    "dflash_on_qwen3_5_untied": "qwen3_5_untied",
    "dflash_swa_on_qwen3_5_untied": "qwen3_5_untied",
}
GATE, LONG_GATE = 1e-4, 5e-4
CAPACITY = 64


def run(engine: tfm_jax.Engine, tokens: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, final hidden states and the outputs of all layers [layers, batch, tokens, hidden]."""
    layers = len(engine.models.target.layer_types)

    @jax.jit
    def forward(params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        target = bind(engine.models, params).target
        output = target.sequence(tokens, jnp.ones(tokens.shape, bool), tap_layers=tuple(range(layers)))
        taps = jnp.moveaxis(output.taps.reshape(*tokens.shape, layers, -1), 2, 0)
        return target.logits(output.hidden), output.hidden, taps

    return forward({"target": engine.params["target"]}, jnp.asarray(tokens, jnp.int32))


@pytest.mark.parametrize("name", TARGETS)
def test_whole_sequences_match(name: str) -> None:
    golden, engine = arrays(name), load_engine(name)
    logits, hidden, taps = run(engine, golden["input_ids"])
    embedded = modules_of(engine).target.embed(jnp.asarray(golden["input_ids"], jnp.int32))
    assert largest_difference(logits, golden["logits"]) < GATE
    assert largest_difference(hidden, golden["final_hidden"]) < GATE
    assert largest_difference(jnp.concatenate([embedded[None], taps]), golden["hidden_states"]) < GATE
    logits, _, _ = run(engine, golden["long_input_ids"])
    assert largest_difference(logits[:, 142:150], golden["long_logits_tail"]) < LONG_GATE
    assert largest_difference(logits[:, :150:10], golden["long_logits_stride10"]) < LONG_GATE
    logits, _, _ = run(engine, golden["greedy_ids"][:, :41])
    assert largest_difference(logits[:, 8:41], golden["teacher_logits"]) < GATE
    assert np.array_equal(np.argmax(logits[0, 8:40], -1), golden["greedy_ids"][0, 9:])


def prefilled(engine: tfm_jax.Engine, tokens: np.ndarray, padding: int = 0) -> TargetState:
    """State after a prompt that stands in a row with `padding` unused places of another token."""
    padded = np.pad(tokens, ((0, 0), (0, padding)), constant_values=7)
    valid = np.arange(padded.shape[1]) < np.full((len(tokens), 1), tokens.shape[1])
    empty = empty_target_state(engine.models.target, len(tokens), CAPACITY, jnp.float32)
    return _prefill(engine.models, engine.params, jnp.asarray(padded, jnp.int32), jnp.asarray(valid), empty)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
    models: tfm_jax.Models, params: dict, tokens: jax.Array, valid: jax.Array, state: TargetState
) -> TargetState:
    return bind(models, params).target.prefill(tokens, valid, state).state


def chain(tokens: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parents, depths and ancestor mask of a path without branches."""
    nodes = tokens.shape[1]
    index = jnp.arange(nodes, dtype=jnp.int32)
    ancestors = jnp.broadcast_to(index[:, None] >= index, (len(tokens), nodes, nodes))
    return jnp.broadcast_to(index - 1, tokens.shape), jnp.broadcast_to(index, tokens.shape), ancestors


def verify_chain(
    engine: tfm_jax.Engine, tokens: np.ndarray, state: TargetState, commit: int
) -> tuple[jax.Array, TargetState]:
    """Logits of consecutive tokens in one verify, and the state after committing the first `commit` of them."""
    parents, depths, ancestors = chain(tokens)
    return _verify(
        engine.models, engine.params, jnp.asarray(tokens, jnp.int32), parents, depths, ancestors, state, commit
    )


@functools.partial(jax.jit, static_argnums=0)
def _verify(
    models: tfm_jax.Models,
    params: dict,
    tokens: jax.Array,
    parents: jax.Array,
    depths: jax.Array,
    ancestors: jax.Array,
    state: TargetState,
    commit: jax.Array,
) -> tuple[jax.Array, TargetState]:
    target = bind(models, params).target
    taps = conv_taps(parents, max(models.target.conv_width, 1))
    output: VerifyOutput = target.verify(tokens, state.lengths[:, None] + depths, ancestors, taps, state)
    count = jnp.full((tokens.shape[0],), commit, jnp.int32)
    return target.logits(output.hidden), commit_path(state, output.values, depths, count, taps)


def check_state(state: TargetState, golden: np.lib.npyio.NpzFile, prefix: str, *, caches: bool) -> None:
    """Every golden state under `prefix` agrees with ours."""
    for index, layer in enumerate(state.layers):
        at = f"{prefix}/layer{index}"
        if isinstance(layer, DeltaState):
            assert largest_difference(layer.recurrent, golden[f"{at}/recurrent"]) < GATE
            assert largest_difference(jnp.swapaxes(layer.conv, 1, 2), golden[f"{at}/conv"][..., -3:]) < GATE
        elif caches:
            length = golden[f"{at}/k"].shape[2]
            assert largest_difference(layer.keys[:, :, :length], golden[f"{at}/k"]) < GATE
            assert largest_difference(layer.values[:, :, :length], golden[f"{at}/v"]) < GATE


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("padding", [0, 5])
def test_prefill_fills_the_caches_and_ignores_right_padding(name: str, padding: int) -> None:
    golden = arrays(name)
    state = prefilled(load_engine(name), golden["input_ids"], padding)
    assert state.lengths.tolist() == [9]
    check_state(state, golden, "cache_after_prefill", caches=True)


@pytest.mark.parametrize("name", TARGETS)
def test_single_steps_and_blocks_continue_from_the_cache(name: str) -> None:
    golden, engine = arrays(name), load_engine(name)
    tokens = golden["greedy_ids"]
    state = start = prefilled(engine, golden["input_ids"], 5)
    for step in range(16):
        logits, state = verify_chain(engine, tokens[:, 9 + step : 10 + step], state, 1)
        assert largest_difference(logits[:, 0], golden["cached_step_logits"][:, step + 1]) < GATE
    check_state(state, golden, "cache_after_16_steps", caches=False)
    logits, _ = verify_chain(engine, tokens[:, 9:17], start, 8)
    assert largest_difference(logits, golden["cached_block8_logits"]) < GATE


@pytest.mark.parametrize("name", HYBRIDS)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    golden, engine = arrays(name), load_engine(name)
    committed = int(golden["rollback/committed"])
    state = prefilled(engine, golden["input_ids"])
    logits, state = verify_chain(engine, golden["rollback/block_ids"], state, committed)
    assert largest_difference(logits, golden["rollback/block_logits"]) < GATE
    check_state(state, golden, "rollback/state_after_commit", caches=False)
    logits, _ = verify_chain(engine, golden["rollback/next_id"].reshape(1, 1), state, 1)
    assert (
        largest_difference(logits.reshape(golden["rollback/next_logits"].shape), golden["rollback/next_logits"]) < GATE
    )
    wrong = golden["rollback/next_logits_hf_crop_WRONG"]
    assert largest_difference(logits.reshape(wrong.shape), wrong) > 1.0  # what a state that keeps rejected tokens gives


def test_layer_internals_match() -> None:
    golden, engine = arrays("qwen3_5_untied"), load_engine("qwen3_5_untied")
    config, target = engine.models.target, modules_of(engine).target
    delta, x = target.layers[0].mixer, jnp.asarray(golden["taps/gdn0/input_layernorm"])
    projected = delta.in_proj(x)
    names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    parts = jnp.split(projected, np.cumsum([golden[f"taps/gdn0/{name}"].shape[-1] for name in names])[:-1].tolist(), -1)
    for name, part in zip(names, parts, strict=True):
        assert largest_difference(part, golden[f"taps/gdn0/{name}"]) < GATE
    attention = target.layers[3].mixer
    x_in = jnp.asarray(golden["hidden_states"][3])
    split = jnp.split(attention.qkv(target.layers[3].input_norm(x_in)), np.cumsum(attention.widths)[:-1].tolist(), -1)
    assert [part.shape[-1] for part in split] == [128, 128, 64, 64]
    assert config.rotary_dim == 8


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(
    models: tfm_jax.Models, pieces: tuple[int, ...], params: dict, features: jax.Array, block_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Block outputs and logits after the context came in pieces."""
    modules = bind(models, params)
    caches, length = empty_caches(models.drafter, 1, CAPACITY, jnp.float32), 0
    for piece in pieces:
        positions = length + jnp.arange(piece, dtype=jnp.int32)[None]
        rows = modules.drafter.context_rows(features[:, length : length + piece], positions)
        start, count = jnp.full((1,), length, jnp.int32), jnp.full((1,), piece, jnp.int32)
        caches = tuple(write_rows(cache, new, start, count) for cache, new in zip(caches, rows, strict=True))
        length += piece
    hidden = modules.drafter.draft(modules.target.embed(block_ids), jnp.full((1,), length, jnp.int32), caches)
    return hidden, modules.target.logits(hidden[:, 1:])


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_matches(name: str) -> None:
    golden, engine = arrays(name), load_engine(DRAFTERS[name], name)
    drafter = modules_of(engine).drafter
    features, block_ids = jnp.asarray(golden["context_features"]), jnp.asarray(golden["block_ids"], jnp.int32)
    assert largest_difference(drafter.fc(features), golden["draft/fc"]) < GATE
    assert largest_difference(drafter.hidden_norm(drafter.fc(features)), golden["draft/hidden_norm"]) < GATE
    for pieces in ((9,), (5, 4)):
        hidden, logits = _draft(engine.models, pieces, engine.params, features, block_ids)
        assert largest_difference(hidden, golden["draft_hidden"]) < GATE
        assert largest_difference(hidden, golden["draft_hidden_cached_2piece"]) < GATE
        assert largest_difference(logits, golden["draft_logits"]) < GATE


@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_in_training_equal_blocks_in_decoding(name: str) -> None:
    golden, engine = arrays(name), load_engine(DRAFTERS[name], name)

    @jax.jit
    def blocks(params: dict, features: jax.Array, block_ids: jax.Array) -> jax.Array:
        modules = bind(engine.models, params)
        return modules.drafter.blocks(
            modules.target.embed(block_ids[:, None]), jnp.full((1, 1), 9, jnp.int32), features
        )

    features, block_ids = jnp.asarray(golden["context_features"]), jnp.asarray(golden["block_ids"], jnp.int32)
    at_once = blocks(engine.params, features, block_ids)
    assert largest_difference(at_once[:, 0], golden["draft_hidden"]) < GATE
    future = jnp.concatenate([features, 1e3 * jnp.ones_like(features)], axis=1)  # features at and beyond the anchor
    assert largest_difference(blocks(engine.params, future, block_ids)[:, 0], golden["draft_hidden"]) < GATE


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_reads_the_layers_that_its_config_names(name: str) -> None:
    golden, engine = arrays(name), load_engine(DRAFTERS[name], name)
    _, _, outputs = run(engine, arrays(DRAFTERS[name])["input_ids"])
    layers = engine.models.drafter.target_layers
    taps = jnp.concatenate([outputs[layer] for layer in layers], axis=-1)
    shifted = jnp.concatenate([outputs[layer + 1] for layer in layers], axis=-1)
    assert largest_difference(taps, golden["context_features"]) < GATE
    assert largest_difference(shifted, golden["context_features"]) > 100 * GATE


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)])
def test_tree_rows_equal_separate_paths(heads: tuple[int, int]) -> None:
    """Siblings do not see each other: every node of a tree equals the last row of its own root-to-node chain."""
    config = TargetConfig(
        family="qwen3_5", vocab_size=40, hidden_size=24, intermediate_size=32,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        heads=4, kv_heads=2, head_dim=16, rotary_dim=8, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=False,
        max_positions=256, key_heads=heads[0], value_heads=heads[1], key_dim=16, value_dim=8, conv_width=4,
    )  # fmt: skip
    target = Target(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.graphdef(target), nnx.to_pure_dict(nnx.state(target))
    rng = np.random.default_rng(0)
    prompt = jnp.asarray(rng.integers(0, 40, (1, 11)), jnp.int32)
    parents = np.array([-1, 0, 0, 1, 1, 2, 3, 3, 6, 8])
    nodes = len(parents)
    tokens = rng.integers(0, 40, nodes)
    paths = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[parents[node]], node])

    @jax.jit
    def prefill(params: dict) -> TargetState:
        empty = empty_target_state(config, 1, 32, jnp.float32)
        return nnx.merge(graph, params).prefill(prompt, jnp.ones((1, 11), bool), empty).state

    @jax.jit
    def verify(params: dict, state: TargetState, *tree: jax.Array) -> jax.Array:
        tokens, parents, depths, ancestors = (x[None] for x in tree)
        positions = state.lengths[:, None] + depths
        return nnx.merge(graph, params).verify(tokens, positions, ancestors, conv_taps(parents, 4), state).hidden[0]

    def run_tree(tokens: np.ndarray, parents: np.ndarray, paths: list[list[int]]) -> jax.Array:
        """Hidden states of a tree in the first rows; the rest of the rows is unused."""
        arrays = [np.zeros(nodes, np.int32), np.full(nodes, -1, np.int32), np.zeros(nodes, np.int32)]
        ancestors = np.zeros((nodes, nodes), bool)
        arrays[0][: len(tokens)], arrays[1][: len(tokens)] = tokens, parents
        for node, path in enumerate(paths):
            arrays[2][node] = len(path) - 1
            ancestors[node, path] = True
        return verify(params, state, *map(jnp.asarray, (*arrays, ancestors)))

    state = prefill(params)
    whole = run_tree(tokens, parents, paths)
    for node, path in enumerate(paths):
        steps = list(range(len(path)))
        alone = run_tree(tokens[path], np.array(steps) - 1, [steps[: step + 1] for step in steps])
        assert largest_difference(whole[node], np.asarray(alone[len(path) - 1])) < 1e-5
