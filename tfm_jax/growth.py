"""Best-first trees under conditionals: grown in groups, pruned to the best nodes, ended where a step is not worth it.

The conventions of trees are those of `tfm_jax.tree`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import TreeGrowth
from pallas_kernels.xla_growth import (
    Growth,
    NodeStep,
    expand_nodes,
    guess_chain,
    pick_rows,
    start_growth,
    take_best,
    take_chains,
)
from tfm_jax.errors import TfmError
from tfm_jax.tree import DraftTree, check_budget, finish_tree

MAX_WIDTH = 32
FIRST_STEPS = 2  # that are made before it is known how many more are worth their time


class Grown(NamedTuple):
    """A pruned tree, and how far it was grown."""

    tree: DraftTree
    steps: Int[Array, ""]  # calls of `step` that were made
    waiting: Float[Array, "batch rows"]  # what the choice of steps was made from


type ChooseSteps = Callable[[Float[Array, "batch rows"]], Int[Array, ""]]


def default_width(budget: int) -> int:
    """Nodes that `best_first_tree` takes in one step: ⌈budget / 16⌉, so that a tree needs 16 steps, at most 32."""
    return max(1, min(-(-budget // 16), budget, MAX_WIDTH))


def default_steps(budget: int) -> int:
    """Calls of the reference's schedule, ⌈budget / width⌉: 16 at multiples of 16."""
    return -(-budget // default_width(budget))


class Schedule(NamedTuple):
    """How `best_first_tree` grows a tree; see its arguments."""

    width: int
    steps: int | None


class PrunedSchedule(NamedTuple):
    """The same of a pruned tree with guesses."""

    width: int
    steps: int
    ahead: int


def pruned_schedule(budget: int) -> PrunedSchedule:
    """Nine steps of four nodes (more above a budget of 64) and a guess behind each; fewer for few nodes.

    At budgets of 15, 31 and 63 as good as sixteen steps without guesses (`docs/trees.md`).
    """
    return PrunedSchedule(min(max(4, default_width(budget)), budget), min(9, 1 + budget // 2), 1)


def best_first_tree[Carry](
    root: Int[Array, " batch"],
    candidate_ids: Int[Array, "batch depth pool"],
    step: NodeStep[Carry],
    carry: Carry,
    *,
    budget: int,
    width: int | None = None,
    expand: int | None = None,
    steps: int | None = None,
    spine: bool = False,
    ahead: int = 0,
) -> DraftTree:
    """Grows a tree from its most probable frontier nodes, `width` at a time, under conditionals that `step` computes.

    Trees from Marginals, arXiv 2607.06763, and `dflash_tfm.py` of trymirai/sglang. The root is expanded first. Then,
    until the budget is spent, the `width` best frontier entries become nodes, best first, and are expanded in one call;
    the last group, cut to the budget, is not expanded. Expanding keeps the `expand` best children, normalised over the
    whole pool. A child of a node taken in the same group waits for the next one: only `width` 1 is exact best-first.

    With `steps` the tree is pruned: after `steps` calls the `budget` best of all nodes and frontier entries are kept,
    in the order of their scores. So a node does not have to be expanded to get children, nor kept because it was, and
    the number of dependent calls no longer follows from the budget (grow-and-prune, `uzu_tree.py` of trymirai/sglang).

    With `ahead` a call also expands a guessed child of each of its nodes, a guessed child of that one, and so on, so
    that fewer calls reach as deep: the guess is the first candidate of the depth, and the first call is one chain of
    guesses from the root. A guess is a node like any other once its parent's conditionals are known.

    Args:
        root: last emitted token.
        candidate_ids: possible children of the nodes of each depth; −1 means no candidate.
        step: `step(carry, new_nodes)` returns the carry and, per new node, float32 logits over its depth's candidates.
            Unused slots are among the nodes; what it says of them is ignored.
        carry: whatever `step` has to remember of earlier nodes, for example their keys and values.
        budget: draft nodes, the root not counted.
        width: nodes per step, `default_width(budget)` if None.
        expand: children per node, at most 8 if None.
        steps: calls of `step` before the tree is pruned; None prunes nothing.
        spine: keep the chain of best children from the root, as far as the budget reaches: its next node is in every
            group, so that it takes a step a node.
        ahead: guesses behind each of the `width` nodes of a call; needs `steps`, and excludes a spine.

    Raises:
        TfmError: `budget`, `width`, `expand`, `steps` or `ahead` is out of range, or too few steps for a spine.
    """
    shape = _Shape(budget, width, expand, steps, spine=spine, ahead=ahead)
    (grown, _), _ = _grow(root, candidate_ids, step, carry, None, shape)
    if steps is not None:
        return _prune(grown, budget, candidate_ids.shape[1], spine=spine)
    tokens, parents, depths, scores, ancestors = (rows[:, : budget + 1] for rows in grown[:5])
    return DraftTree(tokens, parents, depths, scores > -jnp.inf, scores, ancestors[..., : budget + 1])


def grow_as_worth[Carry](
    root: Int[Array, " batch"],
    candidate_ids: Int[Array, "batch depth pool"],
    step: NodeStep[Carry],
    carry: Carry,
    choose: ChooseSteps,
    *,
    budget: int,
    width: int | None = None,
    expand: int | None = None,
    steps: int,
    ahead: int = 0,
    guess_scores: Float[Array, "batch depth"] | None = None,
) -> Grown:
    """The pruned tree of `best_first_tree` with a number of steps that is chosen once the first of them are made.

    Args:
        root: as there.
        candidate_ids: as there.
        step: as there.
        carry: as there.
        choose: `choose(waiting)` is an index into `growth_stops`, from the scores of the nodes that another step would
            expand: −inf where there is none or it can have no children. One answer for the whole batch.
        budget: as there.
        width: as there.
        expand: as there.
        steps: most calls of `step`.
        ahead: as there.
        guess_scores: what is known of the log-probability of the first candidate of each depth before the tree grows:
            in `waiting` a guess has it added to its parent's score. Needed with `ahead`.

    Raises:
        TfmError: as there.
    """
    depth = candidate_ids.shape[1]
    stops = growth_stops(steps)
    levels = [] if guess_scores is None else [guess_scores] * ahead
    shape = _Shape(budget, width, expand, steps, spine=False, ahead=ahead)
    width = default_width(budget) if width is None else width
    begun, grow_to = _grow(root, candidate_ids, step, carry, stops[0], shape)
    waiting = _waiting(begun[0], _first_slot(jnp.int32(stops[0]), width, ahead), width, depth, levels)
    index = choose(waiting)
    growth = lax.platform_dependent(
        index,
        begun,
        cuda=functools.partial(grow_in_branches, grow_to, stops),
        default=functools.partial(grow_in_a_loop, grow_to, stops),
    )
    return Grown(_prune(growth, budget, depth, spine=False), jnp.asarray(stops)[index], waiting)


def grow_in_branches[State, Result](
    grow_to: Callable[[int | Array, State], Result], stops: tuple[int, ...], index: Int[Array, ""], state: State
) -> Result:
    """`grow_to(stops[index], state)` in a branch for every stop: a GPU need not ask the host before each step."""
    return lax.switch(index, [functools.partial(grow_to, stop) for stop in stops], state)


def grow_in_a_loop[State, Result](
    grow_to: Callable[[int | Array, State], Result], stops: tuple[int, ...], index: Int[Array, ""], state: State
) -> Result:
    """The same in a loop that does not know its end, so that a step is compiled once."""
    return grow_to(jnp.asarray(stops)[index], state)


class _Shape(NamedTuple):
    """What `best_first_tree` is told of a tree's size."""

    budget: int
    width: int | None
    expand: int | None
    steps: int | None
    spine: bool
    ahead: int = 0


def _grow[Carry](
    root: Int[Array, " batch"],
    candidate_ids: Int[Array, "batch depth pool"],
    step: NodeStep[Carry],
    carry: Carry,
    first: int | None,
    shape: _Shape,
) -> tuple[tuple[Growth, Carry], Callable[[int | Array, tuple[Growth, Carry]], Growth]]:
    """The growth after `first` steps, or all, and what takes it from there to more of them."""
    budget, width, expand, steps, spine, ahead = shape
    depth, pool = candidate_ids.shape[1:]
    width = default_width(budget) if width is None else width
    expand = min(8, pool) if expand is None else expand
    check_growth(
        budget=budget, depth=depth, pool=pool, width=width, expand=expand, steps=steps, spine=spine, ahead=ahead
    )
    groups = -(-budget // width) if steps is None else steps
    seen = expanded_slots(budget, width, steps, ahead)
    rows = width * (1 + ahead)

    def grow(group: Int[Array, ""], state: tuple[Growth, Carry], chains: int = width) -> tuple[Growth, Carry]:
        growth, carry = state
        slot = _first_slot(group, width, ahead)
        growth, carry = expand_nodes(growth, carry, slot, rows, candidate_ids, step, seen, chains=chains)
        following = _first_slot(group + 1, width, ahead)
        return take_chains(growth, following, width, candidate_ids, ahead=ahead, spine=spine), carry

    growth, made = start_growth(root, expanded_slots(budget, width, groups + 1, ahead), expand), 0
    if ahead:
        growth = guess_chain(growth, rows, candidate_ids)
        growth, carry = grow(jnp.int32(0), (growth, carry), chains=1)
        made = 1
    first = groups if first is None else first
    begun = lax.fori_loop(made, first, grow, (growth, carry))
    return begun, lambda end, state: lax.fori_loop(first, end, grow, state)[0]


def _first_slot(group: Int[Array, ""], width: int, ahead: int) -> Int[Array, ""]:
    """Slot of the first node of a step.

    Without guesses the slots behind the root that fill the first step are those of the second.
    """
    rows = width * (1 + ahead)
    return group * rows if ahead else jnp.maximum(group * rows - (rows - 1), 0)


def _waiting(
    growth: Growth, first: Int[Array, ""], width: int, depth: int, levels: list[Float[Array, "batch depth"]]
) -> Float[Array, "batch rows"]:
    """Scores of the nodes from slot `first` on, which were taken last, and of levels of guesses behind them."""

    def new(rows: Array) -> Array:
        return lax.dynamic_slice_in_dim(rows, first, width, axis=1)

    depths, scores = new(growth.depths), new(growth.scores)
    waiting = [jnp.where(depths < depth, scores, -jnp.inf)]
    for level, guesses in enumerate(levels):
        scores += pick_rows(guesses, jnp.minimum(depths + level, depth - 1))
        waiting.append(jnp.where(depths + level + 1 < depth, scores, -jnp.inf))
    return jnp.concatenate(waiting, axis=1)


def growth_stops(steps: int) -> tuple[int, ...]:
    """Numbers of calls among which `grow_as_worth` lets choose: from two on ever further apart, the last is `steps`.

    They are chosen from once, since a GPU waits for the host at each choice, which takes it a good part of a step.
    """
    first = min(FIRST_STEPS, steps)
    later = (first + (1 << doublings) for doublings in range(steps.bit_length()))
    return (first, *(stop for stop in later if stop < steps), *([steps] if steps > first else []))


def check_growth(
    *, budget: int, depth: int, pool: int, width: int, expand: int, steps: int | None, spine: bool, ahead: int
) -> None:
    """Whether `best_first_tree` can grow such a tree.

    Raises:
        TfmError: it cannot.
    """
    check_budget(budget)
    if not 1 <= width <= min(budget, MAX_WIDTH):
        message = f"The tree's width is {width}; use 1 to {min(budget, MAX_WIDTH)}."
        raise TfmError(message)
    if not 1 <= expand <= pool:
        message = f"The tree's expand is {expand}; use 1 to {pool}, the candidates of each depth."
        raise TfmError(message)
    groups = -(-budget // width) if steps is None else steps
    if spine and groups < min(budget, depth):
        message = f"A spine of {min(budget, depth)} nodes needs as many steps, not {groups}; use a smaller width."
        raise TfmError(message)
    if groups < 1:
        message = f"The tree's steps are {groups}; use at least 1."
        raise TfmError(message)
    if ahead < 0 or (ahead and (steps is None or spine)):
        message = f"The tree's ahead is {ahead}; use 0, or more in a tree with steps and without a spine."
        raise TfmError(message)


def grown_tree(growth: TreeGrowth, *, budget: int, max_depth: int, pruned: bool) -> DraftTree:
    """What `best_first_tree` makes of the growth of a batch of one; unpruned only without guessed nodes."""
    slots = jnp.arange(len(growth.tokens))
    missing = len(slots) - len(growth.frontier_scores)
    ancestors = (growth.lineage[..., None] == slots).any(axis=1) & (growth.scores > -jnp.inf)[:, None]
    frontier = jnp.pad(growth.frontier_scores, ((0, missing), (0, 0)), constant_values=-jnp.inf)
    rows = Growth(
        tokens=growth.tokens,
        parents=growth.parents,
        depths=growth.depths,
        scores=growth.scores,
        ancestors=ancestors,
        frontier_tokens=jnp.pad(growth.frontier_tokens, ((0, missing), (0, 0))).reshape(-1),
        frontier_scores=frontier.reshape(-1),
        tip=jnp.zeros((), jnp.int32),
    )
    rows = jax.tree.map(lambda x: x[None], rows)
    if pruned:
        return _prune(rows, budget, max_depth, spine=False)
    unused = missing - 1  # behind the root
    tokens, parents, depths, scores, ancestors = (
        jnp.concatenate([x[:, :1], x[:, 1 + unused : 1 + unused + budget]], axis=1) for x in rows[:5]
    )
    ancestors = jnp.concatenate([ancestors[..., :1], ancestors[..., 1 + unused : 1 + unused + budget]], axis=2)
    parents = jnp.where(parents > 0, parents - unused, parents)
    return DraftTree(tokens, parents, depths, scores > -jnp.inf, scores, ancestors)


def expanded_slots(budget: int, width: int, steps: int | None, ahead: int = 0) -> int:
    """Slots that `best_first_tree` shows to its `step`, the root's among them: those that may be expanded."""
    if ahead:
        return width * (1 + ahead) * (steps or 1)
    return budget + 1 if steps is None else 1 + max(steps - 1, 1) * width


def _prune(growth: Growth, budget: int, max_depth: int, *, spine: bool) -> DraftTree:
    """The `budget` best of nodes and frontier, best first.

    A child's score is never above its parent's and nodes come before the frontier, parents before children: the stable
    top-k keeps no child without its parent and puts parents first.
    """
    batch, nodes = growth.tokens.shape
    expand = growth.frontier_scores.shape[1] // nodes
    above = jnp.broadcast_to(jnp.repeat(jnp.arange(nodes), expand), growth.frontier_scores.shape)
    scores = jnp.concatenate([growth.scores.at[:, 0].set(-jnp.inf), growth.frontier_scores], axis=1)
    tokens = jnp.concatenate([growth.tokens, growth.frontier_tokens], axis=1)
    parents = jnp.concatenate([growth.parents, above], axis=1)
    depths = jnp.concatenate([growth.depths, pick_rows(growth.depths, above) + 1], axis=1)
    on_spine = None
    if spine:
        chain = pick_rows(growth.ancestors, growth.tip[:, None])[:, 0]
        on_spine = jnp.pad(chain, ((0, 0), (0, nodes * expand)))
    best, picked = take_best(scores, on_spine, budget)
    valid = best > -jnp.inf
    slots = jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), picked.shape)
    rows = jnp.arange(batch)[:, None]
    slot_of = jnp.zeros(scores.shape, jnp.int32).at[rows, picked].set(slots).at[:, 0].set(0)
    new_parents = pick_rows(slot_of, jnp.maximum(pick_rows(parents, picked), 0))
    return finish_tree(
        growth.tokens[:, 0],
        tokens=jnp.where(valid, pick_rows(tokens, picked), 0),
        parents=jnp.where(valid, new_parents, -1),
        depths=jnp.where(valid, pick_rows(depths, picked), 0),
        scores=best,
        max_depth=max_depth,
    )
