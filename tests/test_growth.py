"""Pruned trees against a slow oracle, spines, trees cut short, and drafts that know the target's noise."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from goldens import loop_engine, modules_of, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import VOCAB, assert_well_formed, jit_quickly, node_paths, table_step

from tfm_jax.decode import propose
from tfm_jax.errors import TfmError
from tfm_jax.growth import best_first_tree
from tfm_jax.sampling import gumbel_noise
from tfm_jax.tree import DraftTree, ddtree, drop_nodes, first_nodes

pytestmark = pytest.mark.slow

DEPTH, POOL = 4, 5


def random_round(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of every depth, and conditionals that depend on a node's depth and token."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((DEPTH, VOCAB)))[:, :POOL].astype(np.int32)
    return ids, rng.standard_normal((DEPTH, VOCAB, POOL)).astype(np.float32) * 3


@functools.cache
def compile_growth(**options: int) -> Any:  # noqa: ANN401 - a compiled function
    return jit_quickly(lambda root, ids, table: best_first_tree(root, ids, table_step(table), jnp.int32(0), **options))


def grow(ids: np.ndarray, table: np.ndarray, **options: int) -> DraftTree:
    return compile_growth(**options)(jnp.array([1]), jnp.asarray(ids)[None], jnp.asarray(table))


def children(ids: np.ndarray, table: np.ndarray, path: tuple[int, ...], expand: int) -> list[tuple[float, tuple]]:
    """Best children of a path: edge log-probability and path."""
    if len(path) == DEPTH:
        return []
    logits = table[len(path), path[-1] if path else 1].astype(np.float64)
    edges = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-edges, kind="stable")[:expand]
    return [(edges[child], (*path, int(ids[len(path), child]))) for child in best]


def slow_pruned(ids: np.ndarray, table: np.ndarray, budget: int, width: int, steps: int) -> list[tuple[tuple, float]]:
    """Expands the root and then `steps` − 1 groups, and keeps the best of all that were ever scored."""
    frontier: list = []
    seen: list = []
    order = itertools.count()

    def expand(path: tuple[int, ...], score: float) -> None:
        for edge, child in children(ids, table, path, POOL):
            heapq.heappush(frontier, (-(score + edge), next(order), child))
            seen.append((child, score + edge))

    expand((), 0.0)
    for _ in range(steps - 1):
        group = [heapq.heappop(frontier) for _ in range(min(width, len(frontier)))]
        for score, _, path in group:
            expand(path, -score)
    return sorted(seen, key=lambda node: -node[1])[:budget]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([(9, 2, 3), (17, 3, 5), (20, 6, 1), (5, 1, 8)]))
def test_pruned_tree_keeps_the_best_of_all_that_was_scored(seed: int, shape: tuple[int, int, int]) -> None:
    budget, width, steps = shape
    ids, table = random_round(seed)
    tree = grow(ids, table, budget=budget, width=width, steps=steps, expand=POOL)
    expected = slow_pruned(ids, table, budget, width, steps)
    assert_well_formed(tree)
    assert node_paths(tree)[1 : len(expected) + 1] == [path for path, _ in expected]
    np.testing.assert_allclose(tree.scores[0, 1 : len(expected) + 1], [score for _, score in expected], atol=1e-5)
    assert tree.valid[0].sum() == len(expected) + 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([(1, 1, None), (3, 1, None), (9, 2, None), (9, 1, 4), (12, 3, 6)]))
def test_spine_is_the_greedy_chain(seed: int, shape: tuple[int, int, int | None]) -> None:
    """Whole where the budget allows it, else its beginning; without a spine best-first leaves it."""
    budget, width, steps = shape
    ids, table = random_round(seed)
    table[1:] *= 0.01  # undecided below the root: breadth looks better than depth
    chain: tuple[int, ...] = ()
    for _ in range(min(budget, DEPTH)):
        chain = children(ids, table, chain, 1)[0][1]
    spined = grow(ids, table, budget=budget, width=width, steps=steps, expand=POOL, spine=True)
    plain = grow(ids, table, budget=budget, width=width, steps=steps, expand=POOL)
    assert_well_formed(spined)
    assert chain in node_paths(spined)
    assert spined.valid[0].sum() == plain.valid[0].sum()
    if budget == 3:
        assert chain not in node_paths(plain)


def test_ddtree_spine_is_every_depths_best() -> None:
    ids = np.stack([np.random.default_rng(0).permutation(VOCAB)[:POOL] for _ in range(DEPTH)])
    log_probs = np.tile(np.log([0.21, 0.2, 0.2, 0.2, 0.19]).astype(np.float32), (DEPTH, 1))
    arguments = (jnp.array([3]), jnp.asarray(ids, jnp.int32)[None], jnp.asarray(log_probs)[None])
    for budget in (2, 4, 7):
        spined, plain = ddtree(*arguments, budget, spine=True), ddtree(*arguments, budget)
        assert_well_formed(spined)
        assert tuple(ids[: min(budget, DEPTH), 0].tolist()) in node_paths(spined)
        assert tuple(ids[:DEPTH, 0].tolist()) not in node_paths(plain)


def test_too_few_steps_for_a_spine_are_refused() -> None:
    ids, table = random_round(0)
    with pytest.raises(TfmError, match="A spine of 4 nodes needs as many steps, not 2"):
        grow(ids, table, budget=9, width=5, spine=True)
    with pytest.raises(TfmError, match="steps are 0"):
        grow(ids, table, budget=9, width=5, steps=0)


@pytest.mark.parametrize("kept", [0, 3, 9])
def test_first_nodes_are_a_tree_and_dropping_the_others_gives_the_same(kept: int) -> None:
    ids, table = random_round(7)
    tree = grow(ids, table, budget=9, width=2, steps=4, expand=POOL)
    cut, dropped = first_nodes(tree, kept), drop_nodes(tree, jnp.arange(10) <= kept)
    assert_well_formed(dropped)
    assert node_paths(cut) == node_paths(tree)[: kept + 1]
    for name in ("tokens", "parents", "depths", "valid", "scores"):
        np.testing.assert_array_equal(getattr(dropped, name)[:, : kept + 1], getattr(cut, name))
    np.testing.assert_array_equal(dropped.ancestors[:, : kept + 1, : kept + 1], cut.ancestors)
    assert not dropped.ancestors[:, kept + 1 :].any()


def test_shared_noise_is_the_targets_own() -> None:
    """The drafted chain is argmax(drafter's logits + temperature · G) with G at the positions of the target's draws."""
    engine, temperature = loop_engine("loop_qwen3_5"), [0.7, 0.0, 1.5, 1.0]
    seeds = [5, 6, 7, 8]
    options = {"method": "chain", "budget": 15, "max_new_tokens": 8, "temperature": temperature, "seed": seeds}
    shared = engine.prefill(prompts("loop_qwen3_5"), **options)
    plain = engine.prefill(prompts("loop_qwen3_5"), draft_noise="none", **options)
    modules = modules_of(engine)
    drafter = modules.drafter
    masks = jnp.full((4, drafter.config.depth), drafter.config.mask_token_id, jnp.int32)
    block = modules.target.embed(jnp.concatenate([shared.root[:, None], masks], axis=1))
    logits = modules.target.logits(drafter.draft(block, shared.target.lengths, shared.drafter)[:, 1:])
    positions = jnp.array([len(prompt) for prompt in prompts("loop_qwen3_5")])[:, None] + jnp.arange(logits.shape[1])
    noise = gumbel_noise(jnp.array(seeds), positions, logits.shape[-1])
    expected = jnp.argmax(logits + jnp.array(temperature)[:, None, None] * noise, axis=-1)
    np.testing.assert_array_equal(propose(modules, engine.params, shared).tokens[:, 1:], expected)
    np.testing.assert_array_equal(propose(modules, engine.params, plain).tokens[:, 1:], jnp.argmax(logits, axis=-1))
    assert dataclasses.replace(shared.plan.tree, shared_noise=False) == plain.plan.tree


def test_only_target_only_shares_noise() -> None:
    engine = loop_engine("loop_qwen3_5")
    for options, shares in (({}, True), ({"verifier": "traversal"}, False), ({"temperature": 0.0}, False)):
        state = engine.prefill([[1, 2]], **{"temperature": 1.0, "max_new_tokens": 2, "budget": 15} | options)
        assert state.plan.tree.shared_noise is shares
