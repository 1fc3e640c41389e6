"""Draft trees against golden arrays, brute-force enumeration and a slow heap."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import mark_ancestors
from hypothesis import given, settings
from hypothesis import strategies as st
from weavers import golden_group, jit_quickly, load_weaver, round_inputs, target_matrices

from pallas_kernels.xla_growth import NewNodes
from tfm_jax.errors import TfmError
from tfm_jax.growth import best_first_tree, default_width
from tfm_jax.sampling import node_choices, walk
from tfm_jax.tree import DraftTree, ancestor_mask, chain_tree, conv_taps, ddtree, top_candidates
from tfm_jax.verifiers import accept
from tfm_jax.weaver import residual

WEAVER_TREES = {
    "w1": ("b8_e8_w1", "b16_e8_w1", "b24_e8_w2", "b64_e8_w4", "b64_e8_w1", "b64_e8_w8", "b64_e4_w4", "b128_e8_w8"),
    "w1_two_layers": ("b16_e8_w1", "b64_e8_w4"),
    "w2": ("b16_e8_w1", "b64_e8_w4"),
}
EXHAUSTED = ("pool1", "pool2_depth3", "pool2_depth15", "half_negative", "depth1")
MARGINAL_TREES = ("d15/b4", "d15/b16", "d15/b32", "d15/b64", "d15/b128", "d7/b8", "d7/b24", "d7/b64")
VOCAB = 7


def build_golden(weaver: str, inputs: dict[str, np.ndarray], **options: int | None) -> DraftTree:
    model = load_weaver(weaver)
    candidates = (jnp.asarray(inputs[name])[None] for name in ("root", "cand_ids", "cand_scores"))
    root, ids, scores = candidates
    return model.run("build_tree", root, *round_inputs(inputs), ids, scores, model.tables, **options)


def assert_tree(tree: DraftTree, golden: dict[str, np.ndarray]) -> None:
    assert golden["margin"] > 1e-4  # so that nothing hangs on rounding
    ours = {"token": tree.tokens, "parent": tree.parents, "depth": tree.depths, "valid": tree.valid}
    ours |= {"ancestor": tree.ancestors, "conv_taps": conv_taps(tree.parents, 4)}
    for name, value in ours.items():
        np.testing.assert_array_equal(value[0], golden[name], err_msg=name)
        assert value.dtype == golden[name].dtype
    np.testing.assert_allclose(tree.scores[0], golden["score"], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(golden["committed"] + tree.depths[0], golden["positions"])


@pytest.mark.parametrize(
    ("weaver", "group"), [(name, group) for name, groups in WEAVER_TREES.items() for group in groups]
)
def test_weaver_tree_matches_golden(weaver: str, group: str) -> None:
    golden = golden_group(f"tree_{weaver}", group)
    budget, expand, width = (int(part[1:]) for part in group.split("_"))
    assert (int(golden["expand"]), int(golden["width"])) == (expand, width)
    tree = build_golden(f"weaver_{weaver}", golden_group(f"tree_{weaver}"), budget=budget, width=width, expand=expand)
    assert_tree(tree, golden)


@pytest.mark.parametrize("group", EXHAUSTED)
def test_exhausted_frontier_matches_golden(group: str) -> None:
    """Unused slots in the middle of the array; expand and width are the defaults."""
    golden = golden_group("tree_exhausted", group)
    assert int(golden["width"]) == default_width(int(golden["budget"]))
    assert_tree(build_golden("weaver_w1", golden, budget=int(golden["budget"])), golden)
    assert not golden["valid"].all()


@pytest.mark.parametrize("group", MARGINAL_TREES)
def test_marginal_tree_matches_golden(group: str) -> None:
    golden = golden_group("tree_ddtree", group)
    inputs = golden_group("tree_ddtree", group.partition("/")[0])
    budget = len(golden["token"]) - 1
    logits = jnp.asarray(inputs["logits"])[None]

    @jit_quickly
    def build(root: jax.Array, logits: jax.Array) -> DraftTree:
        candidates = top_candidates(logits, min(budget, logits.shape[-1]))
        return ddtree(root, candidates.ids, candidates.log_probs, budget)

    assert_tree(build(jnp.asarray(inputs["root"])[None], logits), golden)


def test_default_width_at_the_documented_budgets() -> None:
    assert [default_width(budget) for budget in (1, 7, 16, 17, 63, 64, 128, 255)] == [1, 1, 1, 2, 4, 4, 8, 16]


# --- the marginal tree against enumeration ------------------------------------------------------------------


@functools.cache
def compile_ddtree(budget: int) -> Any:  # noqa: ANN401 - a compiled function
    return jit_quickly(functools.partial(ddtree, budget=budget))


def enumerate_products(log_probs: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
    """Every prefix of ranks with its product of marginals, best first."""
    depth, pool = log_probs.shape
    prefixes = itertools.chain.from_iterable(itertools.product(range(pool), repeat=d) for d in range(1, depth + 1))
    scored = [(sum(float(log_probs[d, rank]) for d, rank in enumerate(prefix)), prefix) for prefix in prefixes]
    return sorted(scored, key=lambda item: (-item[0], len(item[1]), item[1]))


def node_paths(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """Tokens from below the root to each node; () for the root, None for unused slots."""
    tokens, parents, valid = (np.asarray(x[row]) for x in (tree.tokens, tree.parents, tree.valid))
    paths: list = [()]
    for slot in range(1, len(tokens)):
        paths.append((*paths[parents[slot]], int(tokens[slot])) if valid[slot] else None)
    return paths


def assert_well_formed(tree: DraftTree, row: int = 0) -> None:
    tokens, parents, depths, valid, scores, ancestors = (np.asarray(getattr(tree, name)[row]) for name in FIELDS)
    assert (parents[0], depths[0], valid[0], scores[0]) == (-1, 0, True, 0)
    np.testing.assert_array_equal(ancestors, mark_ancestors(parents, valid))
    for slot in range(1, len(tokens)):
        if valid[slot]:
            assert parents[slot] < slot
            assert valid[parents[slot]]
            assert depths[slot] == depths[parents[slot]] + 1
            assert scores[slot] <= scores[parents[slot]] + 1e-6
        else:
            assert (tokens[slot], parents[slot], depths[slot], scores[slot]) == (0, -1, 0, -np.inf)
    siblings = [(parents[slot], tokens[slot]) for slot in np.flatnonzero(valid)]
    assert len(set(siblings)) == len(siblings)


FIELDS = ("tokens", "parents", "depths", "valid", "scores", "ancestors")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([1, 6, 20, 120]), st.booleans())
def test_marginal_tree_is_the_best_by_enumeration(seed: int, budget: int, ties: bool) -> None:  # noqa: FBT001
    """All prefixes of 4 tokens over 3 depths are scored; with `ties`, many of them have equal scores or are sure."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 2, (3, 4)) * np.log(2.0) if ties else rng.standard_normal((3, 4))
    log_probs = -np.sort(-(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).astype(np.float32)
    if ties:
        log_probs[1] = np.array([0, -1, -1, -np.inf], np.float32)
    ids = np.argsort(rng.random((3, VOCAB)))[:, :4].astype(np.int32)
    tree = compile_ddtree(budget)(jnp.array([3]), jnp.asarray(ids)[None], jnp.asarray(log_probs)[None])
    assert_well_formed(tree)
    expected = [item for item in enumerate_products(log_probs) if item[0] > -np.inf][:budget]
    scores = np.asarray(tree.scores[0])
    assert (scores[1:] <= scores[:-1]).all()  # the heap's pop order
    np.testing.assert_allclose(scores[1 : len(expected) + 1], [score for score, _ in expected], atol=1e-6)
    assert tree.valid[0].sum() == len(expected) + 1
    if not ties:
        assert node_paths(tree)[1 : len(expected) + 1] == [
            tuple(int(ids[d, rank]) for d, rank in enumerate(prefix)) for _, prefix in expected
        ]


# --- best-first against a slow heap -------------------------------------------------------------------------


def table_step(table: jax.Array) -> Any:  # noqa: ANN401 - a node step
    """Conditionals that depend on the node's depth and token only: logits [depth, token, pool]."""
    return lambda carry, nodes: (carry + 1, table[nodes.depths, nodes.tokens])


def slow_best_first(root: int, ids: np.ndarray, table: np.ndarray, budget: int, width: int, expand: int) -> list:
    """Node paths and scores from a heap of single children, group by group; a short group leaves slots unused."""
    depth = len(ids)
    frontier: list = []
    order = itertools.count()

    def expand_node(path: tuple[int, ...], score: float) -> None:
        if len(path) == depth:
            return
        logits = table[len(path), path[-1] if path else root].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum())
        for child in np.argsort(-log_probs, kind="stable")[:expand]:
            if ids[len(path), child] >= 0:
                heapq.heappush(
                    frontier, (-(score + log_probs[child]), next(order), (*path, int(ids[len(path), child])))
                )

    nodes: list = []
    expand_node((), 0.0)
    while len(nodes) < budget and frontier:
        size = min(width, budget - len(nodes))
        group = [heapq.heappop(frontier) for _ in range(min(size, len(frontier)))]
        nodes += [(path, -score) for score, _, path in group]
        nodes += [(None, -np.inf)] * (size - len(group))
        for score, _, path in group:
            expand_node(path, -score)
    return nodes


@functools.cache
def compile_table_tree(budget: int, width: int, expand: int) -> Any:  # noqa: ANN401 - a compiled function
    def build(root: jax.Array, ids: jax.Array, table: jax.Array) -> DraftTree:
        return best_first_tree(root, ids, table_step(table), jnp.int32(0), budget=budget, width=width, expand=expand)

    return jit_quickly(build)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([(1, 1, 5), (17, 1, 3), (20, 6, 5), (9, 1, 1)]))
def test_best_first_tree_equals_slow_heap(seed: int, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(seed)
    ids = np.stack([np.argsort(rng.random((4, VOCAB)))[:, :5] for _ in range(2)]).astype(np.int32)
    table = rng.standard_normal((4, VOCAB, 5)).astype(np.float32) * 3
    root = np.array([1, 6], np.int32)
    tree = compile_table_tree(*shape)(jnp.asarray(root), jnp.asarray(ids), jnp.asarray(table))
    for row in range(2):
        assert_well_formed(tree, row)
        expected = slow_best_first(root[row], ids[row], table, *shape)
        assert node_paths(tree, row)[1 : len(expected) + 1] == [path for path, _ in expected]
        np.testing.assert_allclose(tree.scores[row, 1 : len(expected) + 1], [score for _, score in expected], atol=1e-5)
        assert tree.valid[row].sum() == sum(path is not None for path, _ in expected) + 1


def test_step_sees_strict_ancestors_and_every_expanded_node_once() -> None:
    """The contract between the builder and a step that caches its nodes."""
    budget, width = 10, 3
    ids = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (1, 3, 4))
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 4)), jnp.float32)

    def step(seen: jax.Array, nodes: NewNodes) -> tuple[jax.Array, jax.Array]:
        seen = jax.lax.dynamic_update_slice_in_dim(seen, nodes.ancestors, nodes.first_slot, axis=1)
        return seen, jnp.broadcast_to(logits, (1, width, 4)) + 0 * nodes.tokens[..., None]

    captured = {}

    def recording_step(seen: jax.Array, nodes: NewNodes) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda first, rows: captured.update({int(first): np.asarray(rows)}), nodes.first_slot, seen)
        return step(seen, nodes)

    tree = best_first_tree(
        jnp.array([2]), ids, recording_step, jnp.zeros((1, budget + 1, budget + 1), bool), budget=budget, width=width
    )
    jax.effects_barrier()
    assert sorted(captured) == [0, 1, 4, 7]  # slot 10, the last group, is not expanded
    strict = np.asarray(tree.ancestors[0]) & ~np.eye(budget + 1, dtype=bool)
    np.testing.assert_array_equal(captured[7][0][:7], strict[:7])


def test_weaver_chain_is_the_greedy_path() -> None:
    """With expand 1, width 1, budget depth: every node is its parent's best child."""
    golden = golden_group("tree_w2")
    depth = golden["cand_ids"].shape[0]
    tree = build_golden("weaver_w2", golden, budget=depth, width=1, expand=1)
    np.testing.assert_array_equal(tree.parents[0], np.arange(-1, depth))
    model = load_weaver("weaver_w2")
    rows = target_matrices()[0][tree.tokens[:, :depth]]
    r = model.run("chain", *round_inputs(golden), rows)
    logits = golden["cand_scores"] + residual(r, model.tables.heads[golden["cand_ids"]][None])[0]
    best = np.take_along_axis(golden["cand_ids"], np.argmax(logits, axis=-1)[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(tree.tokens[0, 1:], best)


def test_batch_rows_do_not_interact() -> None:
    golden = golden_group("tree_w1")
    model = load_weaver("weaver_w1")
    feature, hidden = round_inputs(golden)
    ids, scores = (jnp.asarray(golden[name])[None] for name in ("cand_ids", "cand_scores"))
    other = (feature[:, ::-1], hidden[:, ::-1], ids[:, :, ::-1], scores)
    both = [jnp.concatenate(pair) for pair in zip((feature, hidden, ids, scores), other, strict=True)]
    roots = jnp.array([int(golden["root"]), 77])
    tree = model.run("build_tree", roots, *both, model.tables, budget=16)
    single = golden_group("tree_w1", "b16_e8_w1")
    np.testing.assert_array_equal(tree.tokens[0], single["token"])
    np.testing.assert_array_equal(tree.parents[0], single["parent"])
    swapped = model.run("build_tree", roots[::-1], *(x[::-1] for x in both), model.tables, budget=16)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(tree, name), getattr(swapped, name)[::-1])


# --- chains, candidates and index tables --------------------------------------------------------------------


def test_chain_tree_is_one_branch_of_best_candidates() -> None:
    ids = jnp.array([[[4, 1], [2, 3], [5, 0]], [[1, 0], [1, 2], [6, 4]]], jnp.int32)
    log_probs = jnp.log(jnp.array([[[0.5, 0.1], [0.25, 0.1], [0.5, 0.2]]] * 2, jnp.float32))
    tree = chain_tree(jnp.array([9, 8]), ids, log_probs, 2)
    np.testing.assert_array_equal(tree.tokens, [[9, 4, 2], [8, 1, 1]])
    np.testing.assert_allclose(jnp.exp(tree.scores), [[1, 0.5, 0.125]] * 2, rtol=1e-6)
    for row in range(2):
        assert_well_formed(tree, row)
    alone = chain_tree(jnp.array([9, 8]), ids, log_probs, 0)
    np.testing.assert_array_equal(alone.tokens, [[9], [8]])
    assert alone.ancestors.all()


def test_top_candidates_are_exact_and_normalised_over_the_vocabulary() -> None:
    logits = np.array([[[0, 2, 1, 2, -1, 2]]], np.float32)
    candidates = top_candidates(jnp.asarray(logits), 4)
    np.testing.assert_array_equal(candidates.ids[0, 0], [1, 3, 5, 2])  # ties: lowest id first
    np.testing.assert_array_equal(candidates.scores[0, 0], [2, 2, 2, 1])
    expected = candidates.scores - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(candidates.log_probs, expected, atol=1e-6)
    sure = top_candidates(jnp.array([[[80.0, -20.0, -30.0]]], jnp.bfloat16), 1)
    assert sure.scores.dtype == jnp.float32
    assert sure.log_probs[0, 0, 0] == 0


@st.composite
def parent_arrays(draw: st.DrawFn) -> np.ndarray:
    """Parents of 12 slots, some unused; parents come before children."""
    parents = [-1]
    for slot in range(1, 12):
        used = [i for i in range(slot) if i == 0 or parents[i] >= 0]
        parents.append(draw(st.sampled_from([-1, *used])))
    return np.array(parents, np.int32)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(parent_arrays())
def test_index_tables_equal_walking_up(parents: np.ndarray) -> None:
    valid = parents >= 0
    valid[0] = True
    mask = ancestor_mask(jnp.asarray(parents)[None], jnp.asarray(valid)[None], 11)
    np.testing.assert_array_equal(mask[0], mark_ancestors(parents, valid))
    expected = []
    for slot in range(12):
        node, row = slot, []
        for _ in range(5):
            row.append(node)
            node = max(parents[node], 0) if node > 0 else node - 1
        expected.append(row)
    np.testing.assert_array_equal(conv_taps(jnp.asarray(parents)[None], 5)[0], expected)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slot", "parent"), [(0, 0), (2, 2), (1, 3), (3, -2)])
def test_parents_that_are_no_earlier_slots_are_refused(slot: int, parent: int) -> None:
    parents = jnp.array([[-1, 0, 1, 2], [-1, 0, 1, 2]], jnp.int32).at[1, slot].set(parent)
    sentence = f"Slot {slot} of tree 1 has parent {parent}; use an earlier slot, or -1 for none."
    for build in (lambda x: conv_taps(x, 4), lambda x: ancestor_mask(x, jnp.ones((2, 4), bool), 3)):
        with pytest.raises(TfmError, match=sentence):
            build(parents)
        assert jax.jit(build)(parents).shape == (2, 4, 4)  # traced: not looked at


def test_a_tree_below_the_depth_given_is_refused() -> None:
    parents, valid = jnp.array([[-1, 0, 1, 2]], jnp.int32), jnp.ones((1, 4), bool)
    with pytest.raises(TfmError, match="Slot 3 of tree 0 is at depth 3; use at most 2, the depth given"):
        ancestor_mask(parents, valid, 2)
    expected = np.tril(np.ones((4, 4), bool))
    np.testing.assert_array_equal(ancestor_mask(parents, valid, 3)[0], expected)
    expected[3, 0] = False  # where it is traced, the uppermost ancestor is missing
    np.testing.assert_array_equal(jax.jit(ancestor_mask, static_argnums=2)(parents, valid, 2)[0], expected)
    expected[3] = False
    expected[3, 0] = False
    np.testing.assert_array_equal(ancestor_mask(parents, valid.at[0, 3].set(False), 2)[0], expected)


def test_choices_and_walks_below_the_depth_given_are_refused() -> None:
    ids, log_probs = jnp.zeros((1, 3, 1), jnp.int32), jnp.zeros((1, 3, 1))
    tree, one = chain_tree(jnp.array([5]), ids, log_probs, 3), jnp.ones((1,), jnp.int32)
    logits, temperature = jnp.zeros((1, 4, 7)), jnp.ones((1,))
    calls: tuple[Callable, ...] = (
        lambda depth: walk(tree, jnp.zeros((1, 4), jnp.int32), max_depth=depth),
        lambda depth: node_choices(logits, tree.depths, one, temperature, one, max_depth=depth, sample=True),
        lambda depth: accept(tree, logits, one, temperature, one, verifier="traversal", max_depth=depth, sample=True),
    )
    for call in calls:
        call(3)
        with pytest.raises(TfmError, match="Slot 3 of tree 0 is at depth 3; use at most 2"):
            call(2)


@pytest.mark.parametrize("budget", [0, 256, -1])
def test_budget_out_of_range_is_refused(budget: int) -> None:
    ids, log_probs = jnp.zeros((1, 2, 3), jnp.int32), jnp.zeros((1, 2, 3))
    with pytest.raises(TfmError, match=f"budget is {budget}; use 1 to 255"):
        ddtree(jnp.array([0]), ids, log_probs, budget)
    with pytest.raises(TfmError, match=f"budget is {budget}; use 1 to 255"):
        best_first_tree(jnp.array([0]), ids, table_step(jnp.zeros((2, 1, 3))), jnp.int32(0), budget=budget)


@pytest.mark.parametrize(
    ("options", "words"), [({"width": 0}, "width is 0"), ({"width": 9}, "width is 9"), ({"expand": 4}, "expand is 4")]
)
def test_width_and_expand_out_of_range_are_refused(options: dict[str, int], words: str) -> None:
    ids = jnp.zeros((1, 2, 3), jnp.int32)
    with pytest.raises(TfmError, match=words):
        best_first_tree(jnp.array([0]), ids, table_step(jnp.zeros((2, 1, 3))), jnp.int32(0), budget=8, **options)


def test_chain_longer_than_the_block_is_refused() -> None:
    with pytest.raises(TfmError, match="length is 3; use 0 to 2"):
        chain_tree(jnp.array([0]), jnp.zeros((1, 2, 3), jnp.int32), jnp.zeros((1, 2, 3)), 3)
