"""Losslessness: exact laws by enumeration, path-wise equality with plain sampling, and the noise field itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import Draws, Outcomes, SmallTree, choice_draws, make_small_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trees import GROUPS, assert_lossless, draft_tree, load_tree
from weavers import golden_group, jit_quickly

from tfm_jax.sampling import (
    AcceptedPath,
    cut_at_stop,
    gumbel_noise,
    node_choices,
    walk,
    words_to_gumbel,
)
from tfm_jax.tree import DraftTree

NODES, VOCAB, DEPTH = 9, 4, 4  # of random trees: one shape, one compilation
Rule = Callable[[DraftTree, jax.Array], AcceptedPath]


def run_choices(rule: Rule, small: SmallTree, draws: Draws) -> Outcomes:
    """One batch row per combination of choices."""
    tree = draft_tree(small.tokens, small.parents, batch=len(draws.values))
    accepted = jit_quickly(rule)(tree, jnp.asarray(draws.values, jnp.int32))
    return Outcomes(np.asarray(accepted.tokens), np.asarray(accepted.count), draws.weights)


# --- exact laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True], ids=["independent", "shared_per_depth"])
@pytest.mark.parametrize("group", GROUPS)
def test_walk_has_the_target_law(group: str, share: bool) -> None:  # noqa: FBT001
    """The Gumbel form: the walk follows one draw per node. Nodes of a depth may share their randomness."""
    small = load_tree(group)
    outcomes = run_choices(walk_rule(small), small, choice_draws(small, share=share))
    assert_lossless(small, outcomes)
    accepted = np.sum(outcomes.weights * (outcomes.count - 1))
    np.testing.assert_allclose(accepted, golden_group("acceptance", group)["target_only/mean_accepted"], atol=1e-10)


def walk_rule(small: SmallTree) -> Rule:
    return functools.partial(walk, max_depth=small.length - 1)


def test_broken_walk_is_caught() -> None:
    """A walk that takes any node of the next depth with the right token, whoever its parent is."""
    small = make_small_tree(
        np.array([0, 0, 1, 1]), np.array([-1, 0, 0, 1]), np.zeros((4, 2)), np.random.default_rng(0).dirichlet([1, 1], 7)
    )
    small = small._replace(node_rows=small.prefix_rows[[0, 1, 2, 4]])  # after "", 0, 1, 01

    def careless(tree: DraftTree, choices: jax.Array) -> AcceptedPath:
        deeper = tree.depths[:, None, :] == tree.depths[:, :, None] + 1
        match = deeper & (tree.tokens[:, None, :] == choices[:, :, None])
        following = jnp.where(match.any(-1), jnp.argmax(match, axis=-1), -1)
        path, tokens = [jnp.zeros_like(choices[:, 0])], []
        for _ in range(3):
            tokens.append(jnp.take_along_axis(choices, path[-1][:, None], axis=1)[:, 0])
            path.append(jnp.take_along_axis(following, path[-1][:, None], axis=1)[:, 0])
        alive = jnp.cumprod(jnp.stack(path, axis=1) >= 0, axis=1)[:, :3]
        count = alive.sum(axis=1).astype(jnp.int32)
        steps = [jnp.stack(rows, axis=1).astype(jnp.int32) for rows in (path[:3], tokens)]
        return AcceptedPath(steps[0], count, steps[1], steps[1][:, 0])

    draws = choice_draws(small, share=False)
    assert_lossless(small, run_choices(walk_rule(small), small, draws))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_lossless(small, run_choices(careless, small, draws))


# --- the walk ---------------------------------------------------------------------------------------------------------


@st.composite
def drafted_trees(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, parents and validity of NODES slots, unused ones anywhere, siblings distinct, depth at most DEPTH."""
    tokens, parents, valid, depths = [0], [-1], [True], [0]
    while len(tokens) < NODES:
        taken = set(zip(parents, tokens, strict=True))
        free = [
            (slot, token)
            for slot in range(len(tokens))
            for token in range(VOCAB)
            if valid[slot] and depths[slot] < DEPTH and (slot, token) not in taken
        ]
        used = draw(st.integers(0, 5)) > 0
        parent, token = draw(st.sampled_from(free)) if used else (-1, 0)
        tokens.append(token)
        parents.append(parent)
        valid.append(used)
        depths.append(depths[parent] + 1 if used else 0)
    return np.array(tokens), np.array(parents), np.array(valid)


@functools.cache
def target_rows(seed: int) -> np.ndarray:
    """Logits of a made-up target after every prefix, indexed as in `exact.SmallTree`."""
    prefixes = (VOCAB ** (2 * DEPTH) - 1) // (VOCAB - 1)
    return np.random.default_rng(seed).standard_normal((prefixes, VOCAB)).astype(np.float32) * 2


def prefix_index(prefix: list[int]) -> int:
    number = 0
    for token in prefix:
        number = number * VOCAB + token
    return (VOCAB ** len(prefix) - 1) // (VOCAB - 1) + number


choose = jit_quickly(node_choices, static_argnames=("max_depth", "sample"))
follow = jit_quickly(walk, static_argnames=("max_depth",))
LENGTH = 21  # absolute position of the root


def write_plainly(rows: np.ndarray, temperature: float, seed: int, count: int) -> list[int]:
    """Autoregressive sampling, a token at a time."""
    text: list[int] = []
    for step in range(count):
        logits = jnp.asarray(rows[prefix_index(text)])[None, None]
        token = choose(
            logits,
            jnp.zeros((1, 1), jnp.int32),
            jnp.array([LENGTH + step]),
            jnp.array([temperature], jnp.float32),
            jnp.array([seed]),
            max_depth=0,
            sample=True,
        )
        text.append(int(token[0, 0]))
    return text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(drafted_trees(), st.integers(0, 3), st.sampled_from([0.0, 0.7, 1.0]), st.integers(-(2**31), 2**31 - 1))
def test_any_tree_emits_what_plain_sampling_writes(
    drafted: tuple[np.ndarray, np.ndarray, np.ndarray], target: int, temperature: float, seed: int
) -> None:
    """Path-wise, not only in law: the tokens depend on the seed alone. And the walk goes as far as the tree allows."""
    tokens, parents, valid = drafted
    tree, rows = draft_tree(tokens, parents, valid), target_rows(target)
    paths: list[list[int]] = [[]]
    for slot in range(1, NODES):
        paths.append([*paths[parents[slot]], int(tokens[slot])] if valid[slot] else [])
    logits = jnp.asarray(rows[[prefix_index(path) for path in paths]])[None]
    choices = choose(
        logits,
        tree.depths,
        jnp.array([LENGTH]),
        jnp.array([temperature], jnp.float32),
        jnp.array([seed]),
        max_depth=DEPTH,
        sample=True,
    )
    accepted = follow(tree, choices, max_depth=DEPTH)
    count = int(accepted.count[0])
    text = write_plainly(rows, temperature, seed, DEPTH + 1)
    assert accepted.tokens[0].tolist() == text[:count] + [0] * (DEPTH + 1 - count)
    assert int(accepted.bonus[0]) == text[count - 1]
    path = accepted.path[0, :count].tolist()
    assert [paths[slot] for slot in path] == [text[:step] for step in range(count)]
    assert text[:count] not in [path for path, used in zip(paths, valid, strict=True) if used]  # nothing more to accept


def test_greedy_choice_ignores_noise_and_takes_the_lowest_id() -> None:
    logits = jnp.array([[[1.0, 3.0, 3.0, -jnp.inf]], [[1.0, 3.0, 3.0, 3.0]], [[5.0, 1.0, 5.0, 0.0]]])
    depths, lengths, seeds = jnp.zeros((3, 1), jnp.int32), jnp.array([4, 5, 6]), jnp.array([1, 2, 3])
    greedy = choose(logits, depths, lengths, jnp.zeros(3), seeds, max_depth=0, sample=False)
    np.testing.assert_array_equal(greedy[:, 0], [1, 1, 0])
    mixed = choose(logits, depths, lengths, jnp.array([0.0, 50.0, 0.0]), seeds, max_depth=0, sample=True)
    np.testing.assert_array_equal(mixed[::2, 0], [1, 0])
    text = str(
        jax.make_jaxpr(functools.partial(node_choices, max_depth=0, sample=False))(
            logits, depths, lengths, jnp.zeros(3), seeds
        )
    )
    assert "random" not in text


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "remaining", "stops", "kept", "done"),
    [
        (4, 9, [], 4, False),
        (4, 9, [3], 2, True),  # the stop token is kept
        (4, 9, [5, 3], 2, True),  # the first of several
        (1, 9, [3], 1, False),  # beyond what was accepted
        (4, 2, [5], 2, True),  # the length limit comes first
        (4, 3, [5], 3, True),  # both at once
        (4, 4, [9], 4, True),
        (4, 0, [7], 0, True),  # a finished row emits nothing
    ],
)
def test_cut_at_stop(count: int, remaining: int, stops: list[int], kept: int, done: bool) -> None:  # noqa: FBT001
    tokens = jnp.array([[7, 3, 5, 3, 0]])
    cut = cut_at_stop(tokens, jnp.array([count]), jnp.array(stops, jnp.int32), jnp.array([remaining]))
    assert (int(cut.count[0]), bool(cut.done[0])) == (kept, done)


# --- the noise field --------------------------------------------------------------------------------------------------


draw_noise = jit_quickly(gumbel_noise, static_argnames=("vocab",))


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    seeds, positions = jnp.array([3, -5, 3]), jnp.array([[0, 9], [9, 0], [9, 2**31 - 1]])
    noise = draw_noise(seeds, positions, 40)
    np.testing.assert_array_equal(noise[0, 1], noise[2, 0])
    np.testing.assert_array_equal(noise[1, 1], draw_noise(seeds[1:2], positions[1:2, 1:], 40)[0, 0])
    np.testing.assert_array_equal(noise[..., :17], draw_noise(seeds, positions, 17))
    different = np.asarray(noise).reshape(6, 40)[[0, 1, 2, 3, 5]]
    assert len(np.unique(different)) == different.size


def test_noise_resolves_the_upper_tail() -> None:
    """G from extreme words equals float64 arithmetic; noise from a 24-bit uniform near 1 could not exceed 17.4."""
    words = np.concatenate([np.arange(64), 2 ** np.arange(6, 32), [2**32 - 1], 2**32 - 2 ** np.arange(1, 9)])
    noise = np.asarray(words_to_gumbel(jnp.asarray(words, jnp.uint32)))
    exact = -np.log(-np.log1p(-(words + 0.5) / 2.0**32))
    upper = words < 2**31
    np.testing.assert_allclose(noise[upper], exact[upper], rtol=1e-6, atol=1e-6)
    assert np.isfinite(noise).all()
    assert len(set(noise[:64].tolist())) == 64
    np.testing.assert_allclose(noise[0], 33 * np.log(2), rtol=1e-6)
    assert (np.abs(noise[~upper] - exact[~upper])[noise[~upper] > -2]).max() < 1e-2  # never the winner's part


def test_noise_has_the_gumbel_law() -> None:
    noise = np.sort(np.asarray(draw_noise(jnp.arange(8), jnp.arange(32)[None].repeat(8, 0), 4096)).ravel())
    size = noise.size
    distribution = np.exp(-np.exp(-noise.astype(np.float64)))
    distance = np.abs(distribution - (np.arange(size) + 0.5) / size).max()
    assert distance * np.sqrt(size) < 1.63  # Kolmogorov-Smirnov, 1 %
    for threshold in (6.0, 9.0, 11.0):  # a tail that rounding would distort
        expected = -np.expm1(-np.exp(-threshold)) * size
        assert abs((noise > threshold).sum() - expected) < 4 * np.sqrt(expected)


def test_noise_is_uncorrelated_across_seeds_positions_and_tokens() -> None:
    vocab = 8192
    noise = np.asarray(draw_noise(jnp.array([0, 1, 2, 1 << 30]), jnp.array([[0, 1, 2, 5000]]).repeat(4, 0), vocab))
    rows = noise.reshape(16, vocab)
    correlation = np.corrcoef(np.concatenate([rows, np.roll(rows, 1, axis=1)]))
    off_diagonal = correlation[~np.eye(32, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(vocab)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("field", ["positions", "seeds"])
def test_choices_have_the_softmax_law(field: str, temperature: float) -> None:
    """Chi-square over 60,000 draws that differ in their position or in their seed only."""
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0], np.float32)
    draws = 60_000
    index, zero = jnp.arange(draws), jnp.zeros(draws, jnp.int32)
    lengths, seeds = (index, zero + 7) if field == "positions" else (zero + 7, index)
    choices = choose(
        jnp.broadcast_to(logits, (draws, 1, 6)),
        zero[:, None],
        lengths,
        jnp.full(draws, temperature),
        seeds,
        max_depth=0,
        sample=True,
    )
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum() * draws
    observed = np.bincount(np.asarray(choices[:, 0]), minlength=6)
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom, 0.1 %
