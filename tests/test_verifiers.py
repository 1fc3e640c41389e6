"""Every verifier keeps the target's law, filtered or not: exact enumeration in float64; and biased rules are caught."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import (
    EDGE,
    Draws,
    Outcomes,
    SmallTree,
    choice_paths,
    coin_draws,
    emitted_masses,
    make_small_tree,
    prefix_errors,
    scan_release,
    scan_target_only,
    sequence_law,
    target_law,
    traversal_draws,
)
from filter_cases import CASES, FilterCase, filtered_law
from small_trees import GROUPS, assert_lossless, compiled, draft_tree, load_tree, tree_shapes
from weavers import golden_group, jit_quickly

from tfm_jax.filters import filter_logits, node_laws
from tfm_jax.sampling import walk
from tfm_jax.tree import DraftTree
from tfm_jax.verifiers import Noise, Verdict, chain_rejection, target_only, traversal

pytestmark = pytest.mark.slow

NODES, VOCAB = 7, 8  # up to 6 draft nodes beside the root; wide enough for 6 siblings
SMALL_BATCH, BATCH = 64, 512  # rows of a call: two compilations for all shapes
Rule = Callable[[DraftTree, jax.Array, Noise], Verdict]


class Case(NamedTuple):
    """A tree with scores, its laws by the oracle (in `small`) and by the code under test."""

    small: SmallTree
    scores: np.ndarray
    rows: np.ndarray


def run_rule(rule: Rule, case: Case, draws: Draws, keys: np.ndarray | None = None) -> np.ndarray:
    """`emitted_masses` of a rule in float64: a batch row per combination of random numbers, padded to full batches."""
    small, nodes = case.small, len(case.small.tokens)
    batch = SMALL_BATCH if len(draws.values) <= SMALL_BATCH else BATCH
    pad = NODES - nodes
    tokens, parents, valid, scores = (
        np.pad(values, (0, pad), constant_values=fill)
        for values, fill in ((small.tokens, 0), (small.parents, -1), (np.ones(nodes, bool), 0), (case.scores, 0))
    )
    rows = np.pad(case.rows, ((0, pad), (0, VOCAB - small.vocab)))
    coins = np.pad(draws.values, ((0, 0), (0, pad)), constant_values=0.5)
    keys = np.zeros_like(coins) if keys is None else np.pad(keys, ((0, 0), (0, pad)))
    masses = np.zeros((NODES, VOCAB))
    with jax.enable_x64(True):  # noqa: FBT003 - jax has no keyword for it
        tree = draft_tree(tokens, parents, valid, batch, scores)
        batch_rows = jnp.broadcast_to(rows, (batch, *rows.shape))
        for begin in range(0, len(coins), batch):
            part = np.arange(begin, begin + batch) % len(coins)
            verdict = compiled(rule, NODES - 1)(
                tree, batch_rows, Noise(jnp.asarray(keys[part]), jnp.asarray(coins[part]))
            )
            path, count, rest = map(np.asarray, verdict)
            leaf = np.take_along_axis(path, count[:, None] - 1, axis=1)[:, 0]
            weights = np.where(begin + np.arange(batch) < len(coins), draws.weights[part], 0)
            np.add.at(masses, leaf, weights[:, None] * rest / rest.sum(axis=1, keepdims=True))
    return masses[:nodes, : small.vocab]


def check_coins(rule: Rule, case: Case) -> np.ndarray:
    for draws in coin_draws(case.small):
        masses = run_rule(rule, case, draws)
        assert_lossless(case.small, masses)
    return masses


def check_traversal(rule: Rule, case: Case) -> np.ndarray:
    draws, keys = traversal_draws(case.small, case.scores)
    for draw in draws:
        masses = run_rule(rule, case, draw, keys)
        assert_lossless(case.small, masses)
    return masses


def mean_accepted(small: SmallTree, masses: np.ndarray) -> float:
    return float(masses.sum(axis=1) @ small.depths)


# --- every shape, every filter ----------------------------------------------------------------------------------------


@functools.cache
def cases(filters: FilterCase) -> tuple[Case, ...]:
    """A tree of every shape with random tokens, scores and logits; a child's token is likely to be a probable one."""
    rng = np.random.default_rng(5)
    shapes = tree_shapes(NODES)
    logits = rng.standard_normal((len(shapes), NODES, VOCAB)) * 2
    with jax.enable_x64(True):  # noqa: FBT003
        laws = jit_quickly(lambda logits: filtered(logits, filters))(jnp.asarray(logits))
    made = []
    for shape, row, law in zip(shapes, logits, np.asarray(laws), strict=True):
        parents, nodes = np.array(shape), len(shape)
        tokens, scores = np.zeros(nodes, int), np.zeros(nodes)
        for node in range(nodes):
            children = np.flatnonzero(parents == node)
            likely = np.argsort(-row[node] - 1.5 * rng.standard_normal(VOCAB))
            tokens[children] = likely[: len(children)]
            scores[children] = scores[node] + np.log(rng.dirichlet(np.ones(len(children) + 1))[:-1])
        oracle = np.array([filtered_law(row[node], filters) for node in range(nodes)])
        made.append(Case(make_small_tree(tokens, parents, oracle), scores, law[:nodes]))
    return tuple(made)


def filtered(logits: jax.Array, filters: FilterCase) -> jax.Array:
    temperature = jnp.full(logits.shape[0], filters.temperature)
    return node_laws(filter_logits(logits, temperature, filters.batch(logits.shape[0], logits.shape[-1])), temperature)


def test_there_are_85_shapes() -> None:
    """Rooted trees of 1 to 7 nodes: 1 + 1 + 2 + 4 + 9 + 20 + 48 (OEIS A000081)."""
    assert len(tree_shapes(NODES)) == 85


@pytest.mark.parametrize("filters", CASES, ids=str)
def test_target_only_keeps_every_law_on_every_shape(filters: FilterCase) -> None:
    for case in cases(filters):
        check_coins(target_only, case)


@pytest.mark.parametrize("filters", CASES, ids=str)
def test_traversal_keeps_every_law_on_every_shape(filters: FilterCase) -> None:
    """And accepts as much as `target_only`, which no rule can beat on such trees, only with equal siblings' laws."""
    for case in cases(filters):
        masses = check_traversal(traversal, case)
        reached = np.ones(len(case.small.tokens))
        for node in range(1, len(reached)):
            parent = case.small.parents[node]
            reached[node] = reached[parent] * case.small.node_rows[parent, case.small.tokens[node]]
        assert mean_accepted(case.small, masses) <= reached[1:].sum() + 1e-10


@pytest.mark.parametrize("filters", CASES, ids=str)
def test_gumbel_form_keeps_every_law_on_every_shape(filters: FilterCase) -> None:
    for case in cases(filters):
        small, pad = case.small, NODES - len(case.small.tokens)
        for fill in (0, VOCAB - 1):
            draws = choice_paths(small, fill)
            index = np.arange(SMALL_BATCH) % len(draws.weights)
            valid = np.arange(NODES) < len(small.tokens)
            tree = draft_tree(np.pad(small.tokens, (0, pad)), np.pad(small.parents, (0, pad)), valid, SMALL_BATCH)
            accepted = compiled(walk, NODES - 1)(
                tree, jnp.asarray(np.pad(draws.values[index], ((0, 0), (0, pad))), jnp.int32)
            )
            kept = slice(len(draws.weights))
            outcomes = Outcomes(np.asarray(accepted.tokens)[kept], np.asarray(accepted.count)[kept], draws.weights)
            assert_lossless(small, outcomes)


@pytest.mark.parametrize("filters", CASES, ids=str)
def test_rejection_keeps_every_law_on_chains_that_were_not_drawn(filters: FilterCase) -> None:
    chains = [case for case in cases(filters) if np.array_equal(case.small.parents, np.arange(len(case.scores)) - 1)]
    assert len(chains) == NODES
    for case in chains:
        check_coins(chain_rejection, case)


@pytest.mark.parametrize("filters", CASES, ids=str)
@pytest.mark.parametrize(("vocab", "length"), [(3, 2), (2, 6)])
def test_rejection_keeps_every_law_on_drawn_chains(vocab: int, length: int, filters: FilterCase) -> None:
    small, outcomes = draw_chains(vocab, length, filters)
    for outcome in outcomes:
        assert_sequence_law(small, outcome)


def assert_sequence_law(small: SmallTree, outcomes: Outcomes) -> None:
    np.testing.assert_allclose(sequence_law(small, outcomes), target_law(small), atol=1e-10, rtol=0)


def draw_chains(vocab: int, length: int, filters: FilterCase) -> tuple[SmallTree, tuple[Outcomes, Outcomes]]:
    """All chains that may be drawn, times all decisions about them, at either end of the coins' cells.

    The tree that comes back holds the target's law; its own nodes mean nothing.
    """
    rng = np.random.default_rng(vocab * 10 + length)
    prefixes = (vocab ** (length + 1) - 1) // (vocab - 1)
    target, draft = (rng.standard_normal((1, rows, vocab)) * 1.5 for rows in (prefixes, length + 1))
    with jax.enable_x64(True):  # noqa: FBT003
        laws, drafted = (np.asarray(filtered(jnp.asarray(logits), filters))[0] for logits in (target, draft))
    oracle = np.array([filtered_law(row, filters) for row in target[0]])

    chains = np.array(list(itertools.product(range(vocab), repeat=length)))
    numbers = [chains[:, :n] @ vocab ** np.arange(n)[::-1] for n in range(length + 1)]
    rows = np.stack([(vocab**n - 1) // (vocab - 1) + number for n, number in enumerate(numbers)], axis=1)
    q = drafted[np.arange(length), chains]
    p = np.take_along_axis(oracle[rows[:, :-1]], chains[..., None], axis=2)[..., 0]
    threshold = np.where(q > 0, np.minimum(p / np.where(q > 0, q, 1), 1), 0)

    decisions = np.array(list(itertools.product([False, True], repeat=length)))
    chance = np.where(decisions, threshold[:, None], 1 - threshold[:, None]).prod(axis=2)
    weights = (q.prod(axis=1)[:, None] * chance).ravel()
    lower = np.where(decisions, EDGE, np.minimum(threshold[:, None] + EDGE, 1 - EDGE))
    upper = np.where(decisions, np.maximum(threshold[:, None] - EDGE, 0), 1 - EDGE)
    many, batch = len(decisions), len(weights)

    tokens = np.pad(chains, ((0, 0), (1, 0))).repeat(many, axis=0)
    results = []
    with jax.enable_x64(True):  # noqa: FBT003
        tree = draft_tree(tokens[0], np.arange(length + 1) - 1, batch=batch)
        tree = dataclasses.replace(tree, tokens=jnp.asarray(tokens, jnp.int32))
        probabilities = jnp.asarray(laws[rows].repeat(many, axis=0))
        q_rows = jnp.broadcast_to(drafted, probabilities.shape)
        for ends in (lower, upper):
            coins = np.pad(ends.reshape(batch, length), ((0, 0), (0, 1)))
            noise = Noise(jnp.zeros_like(coins), jnp.asarray(coins))
            verdict = compiled(chain_rejection, length)(tree, probabilities, noise, drafted=q_rows)
            count, rest = np.asarray(verdict.count), np.asarray(verdict.rest)
            law = rest / rest.sum(axis=1, keepdims=True) * weights[:, None]
            emitted = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))[:, None].repeat(vocab, axis=1)
            emitted[np.arange(batch), :, count - 1] = np.arange(vocab)
            results.append(Outcomes(emitted.reshape(-1, length + 1), count.repeat(vocab), law.ravel()))
    return make_small_tree(tokens[0], np.arange(length + 1) - 1, laws[rows[0]], oracle), tuple(results)


# --- rules that must not pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["target_only", "traversal", "WRONG_release", "WRONG_raw_bonus"])
@pytest.mark.parametrize("group", GROUPS)
def test_stored_laws_pass_and_wrong_ones_fail(group: str, rule: str) -> None:
    """The check itself: it accepts both right rules of the golden file and refuses the two biased ones."""
    small, golden = load_tree(group), golden_group("acceptance", f"{group}/{rule}")
    emitted = golden["emitted"]
    outcomes = Outcomes(emitted, (emitted >= 0).sum(axis=1), golden["prob"])
    masses = emitted_masses(small, outcomes)
    if not rule.startswith("WRONG"):
        assert_lossless(small, outcomes)
        assert_lossless(small, masses)
        return
    for biased in (outcomes, masses):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_lossless(small, biased)
    error = np.abs(sequence_law(small, outcomes) - target_law(small)).max()
    np.testing.assert_allclose(error, golden["max_abs_law_error"], atol=1e-9)


@pytest.mark.parametrize(
    ("row", "weights", "law", "accepted"),
    [
        ([0.55, 0.25, 0.20], [0.7, 0.3], [0.8741, 0.0938, 0.0321], 0.8393),
        ([0.20, 0.50, 0.30], [0.5, 0.5], [0.46, 0.45, 0.09], 0.70),
        ([0.4, 0.3, 0.2, 0.1], [0.2, 0.3, 0.5], [1, 0, 0, 0], 1.0),
        ([0.1, 0.2, 0.3, 0.4], [0.6, 0.3, 0.1], [0.2094, 0.3078, 0.3117, 0.1711], 0.5722),
    ],
)
def test_first_published_traversal_fails_and_ours_passes(
    row: list[float], weights: list[float], law: list[float], accepted: float
) -> None:
    """Roots with leaf children: the old kernel's laws are known in closed form (four decimals)."""
    tokens, children = np.arange(-1, len(weights)), len(weights)
    rows = np.array([row, *[[1 / len(row)] * len(row)] * children])
    small = make_small_tree(np.maximum(tokens, 0), np.array([-1, *[0] * children]), rows)
    masses = scan_release(np.array(row), tokens[1:], np.array(weights))
    first = masses[0].copy()
    first[tokens[1:]] += masses[1:].sum(axis=1)
    np.testing.assert_allclose(first, law, atol=6e-5)
    np.testing.assert_allclose(mean_accepted(small, masses), accepted, atol=6e-5)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_lossless(small, masses)
    case = Case(small, np.log([1, *weights]), rows)
    np.testing.assert_allclose(mean_accepted(small, check_traversal(traversal, case)), sum(row[:children]), atol=1e-10)
    check_coins(target_only, case)


def raw_bonus(tree: DraftTree, rows: jax.Array, noise: Noise, *, max_depth: int) -> Verdict:
    """Broken on purpose: the next token comes from the whole row."""
    verdict = target_only(tree, rows, noise, max_depth=max_depth)
    leaf = jnp.take_along_axis(verdict.path, verdict.count[:, None] - 1, axis=1)
    return verdict._replace(rest=jnp.take_along_axis(rows, leaf[..., None], axis=1)[:, 0])


def stop_at_root(tree: DraftTree, rows: jax.Array, noise: Noise, *, max_depth: int) -> Verdict:
    """Broken on purpose: the walk ends at the root with a token from the rest of the row."""
    return target_only(tree, rows, noise._replace(coins=jnp.full_like(noise.coins, 1 - 1e-13)), max_depth=max_depth)


def shifted_coin(tree: DraftTree, rows: jax.Array, noise: Noise, *, max_depth: int) -> Verdict:
    """Broken on purpose, a little: thresholds are off by 1e-9."""
    return target_only(tree, rows, noise._replace(coins=noise.coins - 1e-9), max_depth=max_depth)


@pytest.mark.parametrize("broken", [raw_bonus, stop_at_root, shifted_coin])
def test_broken_target_only_is_caught(broken: Rule) -> None:
    case = golden_case("chain_and_branches")
    check_coins(target_only, case)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_coins(broken, case)


def raw_traversal(tree: DraftTree, rows: jax.Array, noise: Noise, *, max_depth: int) -> Verdict:
    """Broken on purpose: the next token comes from the raw row, not the one that refusals changed."""
    verdict = traversal(tree, rows, noise, max_depth=max_depth)
    leaf = jnp.take_along_axis(verdict.path, verdict.count[:, None] - 1, axis=1)
    return verdict._replace(rest=jnp.take_along_axis(rows, leaf[..., None], axis=1)[:, 0])


def ordered_traversal(tree: DraftTree, rows: jax.Array, noise: Noise, *, max_depth: int) -> Verdict:
    """Broken on purpose: siblings come in slot order, whatever was drawn."""
    slots = -10.0 * jnp.arange(tree.tokens.shape[1])
    order = jnp.where(tree.valid, slots - tree.scores, 0)
    return traversal(tree, rows, noise._replace(order=order), max_depth=max_depth)


@pytest.mark.parametrize("broken", [raw_traversal, ordered_traversal])
@pytest.mark.parametrize("group", ["two_children_published", "chain_and_branches", "seven_nodes"])
def test_broken_traversal_is_caught(group: str, broken: Rule) -> None:
    case = golden_case(group)
    check_traversal(traversal, case)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_traversal(broken, case)


def test_scores_of_a_chain_that_was_not_drawn_are_no_law() -> None:
    """The likeliest token, accepted as if it had been drawn, biases the text."""
    row, q = np.array([0.2, 0.3, 0.5]), np.array([0.1, 0.7, 0.2])
    small = make_small_tree(np.array([0, 1]), np.array([-1, 0]), np.array([row, [1 / 3] * 3]))
    case = Case(small, np.zeros(2), small.node_rows)
    drafted = jnp.zeros((SMALL_BATCH, NODES, VOCAB)).at[:, 0, :3].set(q)
    threshold = row[1] / q[1]
    draws = Draws(np.array([[threshold / 2, 0], [(1 + threshold) / 2, 0]]), np.array([threshold, 1 - threshold]))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_lossless(small, run_rule(functools.partial(chain_rejection, drafted=drafted), case, draws))
    check_coins(chain_rejection, case)


# --- golden trees -----------------------------------------------------------------------------------------------------


def golden_case(group: str) -> Case:
    """A golden tree with the drafter's probabilities among siblings as scores; its rows are those of the file."""
    small, draft = load_tree(group), golden_group("acceptance", group)["draft_prob"]
    scores = np.zeros(len(draft))
    for node in range(1, len(draft)):
        scores[node] = scores[small.parents[node]] + np.log(draft[node])
    return Case(small, scores, small.node_rows)


@pytest.mark.parametrize("group", GROUPS)
def test_golden_trees(group: str) -> None:
    """Laws, mean accepted and first tokens; no lossless rule accepts more of a tree that nothing was drawn for."""
    case, golden = golden_case(group), golden_group("acceptance", group)
    np.testing.assert_allclose(target_law(case.small), golden["target_law"], atol=1e-12)
    for rule, check in ((target_only, check_coins), (traversal, check_traversal)):
        stored = golden_group("acceptance", f"{group}/{rule.__name__}")
        masses = check(rule, case)
        np.testing.assert_allclose(mean_accepted(case.small, masses), stored["mean_accepted"], atol=1e-10)
        emitted = Outcomes(stored["emitted"], (stored["emitted"] >= 0).sum(axis=1), stored["prob"])
        np.testing.assert_allclose(masses, emitted_masses(case.small, emitted), atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("group", GROUPS)
def test_target_only_replays_golden_coins(group: str, dtype: str) -> None:
    small, golden = load_tree(group), golden_group("acceptance", f"{group}/replay")
    with jax.enable_x64(dtype == "float64"):
        tree = draft_tree(small.tokens, small.parents, batch=len(golden["u"]))
        rows = jnp.broadcast_to(jnp.asarray(small.node_rows, dtype), (len(golden["u"]), *small.node_rows.shape))
        coins = jnp.asarray(golden["u"], dtype)
        noise = Noise(jnp.zeros_like(coins[:, :-1]), coins[:, :-1])
        path, count, rest = map(np.asarray, compiled(target_only, small.length - 1)(tree, rows, noise))
    np.testing.assert_array_equal(np.where(np.arange(small.length) < count[:, None], path, -1), golden["path"])
    cumulative = np.cumsum(rest, axis=1)
    bonus = np.argmax(cumulative > np.asarray(coins[:, -1:]) * cumulative[:, -1:], axis=1)
    np.testing.assert_array_equal(bonus, golden["bonus"])


# --- many random trees -----------------------------------------------------------------------------------------------


def test_target_only_equals_a_scan() -> None:
    """512 random draws: trees with zero-probability tokens, children that take everything, coins of 0."""
    rng = np.random.default_rng(20260724)
    trees, rows, coins, expected = [], [], [], []
    for _ in range(512):
        tokens, parents = random_tree(rng, 9, 4)
        row = rng.dirichlet([0.3] * 4, 9) * (rng.random((9, 4)) < 0.8)
        row[:, 0] += 1e-3
        small = make_small_tree(tokens, parents, row / row.sum(1, keepdims=True))
        coin = rng.random(9) * (rng.random(9) < 0.9)
        trees.append(draft_tree(tokens, parents))
        rows.append(small.node_rows)
        coins.append(coin)
        expected.append(scan_target_only(small, coin))
    with jax.enable_x64(True):  # noqa: FBT003
        tree = jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)
        verdict = compiled(target_only, 8)(tree, jnp.array(rows), Noise(jnp.zeros((512, 9)), jnp.array(coins)))
    for row, (path, rest) in enumerate(expected):
        assert list(verdict.path[row, : verdict.count[row]]) == path
        np.testing.assert_allclose(verdict.rest[row], rest, atol=1e-15)


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and parents of a full random tree whose siblings differ."""
    parents, tokens = [-1], [0]
    while len(parents) < nodes:
        parent, token = int(rng.integers(len(parents))), int(rng.integers(vocab))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return np.array(tokens), np.array(parents)


def test_the_check_itself_sees_small_errors() -> None:
    """`prefix_errors` is linear: moving 1e-9 of mass from one token to another shows as 1e-9."""
    case = golden_case("seven_nodes")
    masses = check_coins(target_only, case)
    x, y = np.argsort(case.small.node_rows[0])[-2:]
    masses[0, x] += 1e-9
    masses[0, y] -= 1e-9
    np.testing.assert_allclose(np.abs(prefix_errors(case.small, masses)[0]).max(), 1e-9, rtol=1e-5)
