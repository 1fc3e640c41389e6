"""Steps of the Weaver's tree: guesses that they expand too, and what a kernel that makes them all returns."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_growth import DEPTH, POOL, children, grow, random_round
from test_tree import assert_well_formed, jit_quickly, node_paths, table_step

from pallas_kernels import TreeGrowth
from pallas_kernels.constants import PATH
from tfm_jax.config import WeaverConfig
from tfm_jax.errors import TfmError
from tfm_jax.growth import Grown, grow_as_worth, grow_in_a_loop, grow_in_branches, grown_tree, growth_stops
from tfm_jax.tree import DraftTree
from tfm_jax.weaver import Weaver, WeaverTables

VOCAB = 211


def slow_growth(
    ids: np.ndarray, table: np.ndarray, width: int, steps: int, ahead: int
) -> tuple[TreeGrowth, dict[tuple, float]]:
    """Node by node in Python; also the score of everything that was ever scored, by path."""
    frontier: list = []  # (−score, order, slot of the parent, place among its children, path)
    order = itertools.count()
    rows = width * (1 + ahead)
    slots = steps * rows + width
    growth = TreeGrowth(
        tokens=np.zeros(slots, np.int32),
        parents=np.full(slots, -1, np.int32),
        depths=np.zeros(slots, np.int32),
        scores=np.full(slots, -np.inf, np.float32),
        lineage=np.full((slots, PATH), -1, np.int32),
        frontier_scores=np.full((steps * rows, POOL), -np.inf, np.float32),
        frontier_tokens=np.zeros((steps * rows, POOL), np.int32),
    )
    scored: dict[tuple, float] = {}

    def place(slot: int, parent: int, path: tuple[int, ...], score: float) -> None:
        above = growth.lineage[parent][growth.lineage[parent] >= 0] if path else []
        growth.tokens[slot], growth.parents[slot] = path[-1] if path else 1, parent
        growth.depths[slot], growth.scores[slot] = len(path), score
        growth.lineage[slot, : len(path) + 1] = [*above, slot]

    def expand(slot: int, path: tuple[int, ...], score: float) -> None:
        for place_, (edge, child) in enumerate(children(ids, table, path, POOL)):
            scored[child] = score + edge
            growth.frontier_tokens[slot, place_], growth.frontier_scores[slot, place_] = child[-1], score + edge
            heapq.heappush(frontier, (-(score + edge), next(order), slot, place_, child))

    def take(path: tuple[int, ...] | None) -> tuple:
        """The frontier entry of a path, or the best."""
        entry = min(frontier) if path is None else next(entry for entry in frontier if entry[-1] == path)
        frontier.remove(entry)
        growth.frontier_scores[entry[2], entry[3]] = -np.inf
        return entry

    taken: list = [(-0.0, 0, -1, 0, ())]
    for step in range(steps):
        chains = 1 if step == 0 else width
        for number, entry in enumerate(taken):
            chain = [entry]
            for slot in range(step * rows + number, (step + 1) * rows if ahead else step * rows + number + 1, chains):
                score, _, parent, _, path = chain[-1]
                place(slot, parent, path, -score)
                expand(slot, path, -score)
                if len(path) == DEPTH or slot + chains >= (step + 1) * rows or not ahead:
                    break
                chain.append(take((*path, int(ids[len(path), 0]))))
        taken = [take(None) for _ in range(min(width, len(frontier)))]
    for number, (score, _, parent, _, path) in enumerate(taken):
        place(steps * rows + number, parent, path, -score)
    return growth, scored


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([(9, 2, 3, 1), (17, 3, 4, 2), (20, 4, 2, 1), (5, 1, 5, 3)]))
def test_a_step_expands_its_guesses(seed: int, shape: tuple[int, int, int, int]) -> None:
    budget, width, steps, ahead = shape
    ids, table = random_round(seed)
    tree = grow(ids, table, budget=budget, width=width, steps=steps, expand=POOL, ahead=ahead)
    _, scored = slow_growth(ids, table, width, steps, ahead)
    expected = sorted(scored.items(), key=lambda node: -node[1])[:budget]
    assert_well_formed(tree)
    assert node_paths(tree)[1 : len(expected) + 1] == [path for path, _ in expected]
    np.testing.assert_allclose(tree.scores[0, 1 : len(expected) + 1], [score for _, score in expected], atol=1e-5)


@functools.cache
def compile_choice(**options: int) -> Any:  # noqa: ANN401 - a compiled function
    def choose(root: jax.Array, ids: jax.Array, table: jax.Array, guesses: jax.Array, index: jax.Array) -> Grown:
        step = table_step(table)
        return grow_as_worth(root, ids, step, jnp.int32(0), lambda _: index, guess_scores=guesses, **options)

    return jit_quickly(choose)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([(9, 2, 6, 0), (20, 6, 5, 0), (9, 2, 6, 1), (20, 2, 5, 2)]))
def test_a_choice_of_steps_gives_the_tree_of_so_many(seed: int, shape: tuple[int, int, int, int]) -> None:
    """And is made from what the third step would expand, guesses by their parents' scores and what is known of them."""
    budget, width, steps, ahead = shape
    ids, table = random_round(seed)
    known = np.linspace(-0.5, -2, DEPTH, dtype=np.float32)
    choose = compile_choice(budget=budget, width=width, steps=steps, expand=POOL, ahead=ahead)
    begun, _ = slow_growth(ids, table, width, 2, ahead)
    expected, depths = begun.scores[-width:].copy(), begun.depths[-width:]
    waiting = [np.where(depths < DEPTH, expected, -np.inf)]
    for level in range(1, 1 + ahead):
        expected += known[np.minimum(depths + level - 1, DEPTH - 1)]
        waiting.append(np.where(depths + level < DEPTH, expected, -np.inf))
    for index, made in enumerate(growth_stops(steps)):
        whole = grow(ids, table, budget=budget, width=width, steps=made, expand=POOL, ahead=ahead)
        grown = choose(jnp.array([1]), jnp.asarray(ids)[None], jnp.asarray(table), known[None], jnp.int32(index))
        assert int(grown.steps) == made
        for name, rows in dataclasses.asdict(whole).items():
            np.testing.assert_array_equal(getattr(grown.tree, name), rows)
        np.testing.assert_allclose(grown.waiting[0], np.concatenate(waiting), atol=1e-5)


def test_choices_of_steps_lie_ever_further_apart() -> None:
    assert [growth_stops(steps) for steps in (1, 2, 5, 9)] == [(1,), (2,), (2, 3, 4, 5), (2, 3, 4, 6, 9)]


@pytest.mark.parametrize("form", [grow_in_branches, grow_in_a_loop])
def test_the_chosen_stop_is_reached_on_every_platform(form: Callable[..., jax.Array]) -> None:
    """From 2 on: step i turns x into 3 x + i, so that a step too many, too few or out of order shows."""

    def grow_to(stop: int | jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(2, stop, lambda i, x: 3 * x + i, x)

    stops, x = growth_stops(9), 1
    reached = []
    for i in range(2, 10):
        reached.append(x)
        x = 3 * x + i
    found = [int(jax.jit(functools.partial(form, grow_to, stops))(index, 1)) for index in range(len(stops))]
    assert found == [reached[stop - 2] for stop in stops]


@pytest.mark.parametrize("options", [{"steps": 4}, {"steps": 3, "ahead": 1}, {}])
def test_a_kernels_growth_becomes_the_same_tree(options: dict[str, int]) -> None:
    ids, table = random_round(5)
    expected = grow(ids, table, budget=9, width=2, expand=POOL, **options)
    growth, _ = slow_growth(ids, table, 2, options.get("steps", 5), options.get("ahead", 0))
    tree = grown_tree(jax.tree.map(jnp.asarray, growth), budget=9, max_depth=DEPTH, pruned="steps" in options)
    for name in ("tokens", "parents", "depths", "valid", "ancestors"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(tree.scores, expected.scores, atol=1e-5)


def test_guesses_need_steps_and_no_spine() -> None:
    ids, table = random_round(0)
    for options in ({"ahead": 1}, {"ahead": -1, "steps": 3}, {"ahead": 1, "steps": 9, "spine": True}):
        with pytest.raises(TfmError, match="ahead is"):
            grow(ids, table, budget=9, width=2, expand=POOL, **options)


# --- with a Weaver ---------------------------------------------------------------------------------------------------


def make_weaver(rank: int, pool: int, depth: int, dtype: str, batch: int) -> tuple:
    """A random Weaver and the arguments of `build_tree`."""
    config = WeaverConfig(
        generation="w1", hidden_size=64, embed_size=64, rank=rank, layers=1, heads=4, mlp_size=rank, max_depth=depth,
        pool_size=pool,
    )  # fmt: skip
    weaver = Weaver(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    tables = WeaverTables(draw(VOCAB, rank), draw(VOCAB, rank, scale=2 * rank**-0.5), weaver.kernel_weights())
    scores, ids = jax.lax.top_k(jnp.asarray(rng.standard_normal((batch, depth, VOCAB)) * 2, jnp.float32), pool)
    ids = ids.astype(jnp.int32).at[0, 2, pool // 2 :].set(-1)
    root = jnp.arange(3, 3 + batch, dtype=jnp.int32)
    return weaver, (root, draw(batch, 64), draw(batch, depth, 64), ids, scores, tables)


def scores_by_path(tree: DraftTree) -> dict[tuple, float]:
    valid = np.asarray(tree.valid[0])
    paths = itertools.compress(node_paths(tree), valid)
    return dict(zip(paths, np.asarray(tree.scores[0])[valid].tolist(), strict=True))


def test_a_guess_is_scored_like_any_other_node() -> None:
    """A node's score depends on its path alone, so trees of different schedules agree where they overlap."""
    weaver, arguments = make_weaver(rank=32, pool=8, depth=5, dtype="float32", batch=2)
    build = nnx.jit(Weaver.build_tree, static_argnames=("budget", "width", "steps", "ahead"))
    plain = build(weaver, *arguments, budget=30, width=3, steps=8)
    guessed = build(weaver, *arguments, budget=30, width=2, steps=6, ahead=2)
    first, second = scores_by_path(plain), scores_by_path(guessed)
    common = first.keys() & second.keys()
    assert len(common) > 20
    np.testing.assert_allclose([first[path] for path in common], [second[path] for path in common], atol=1e-5)
