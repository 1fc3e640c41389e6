"""Growth of a tree from the best entries of its frontier, in jnp; the step that evaluates nodes is the caller's.

A tree is a row of slots. Expanded ones have frontier entries, their children that are no slots yet; a growing tree
takes the best entries into new slots, may guess children of these, and expands all of them in one call of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped


class NewNodes(NamedTuple):
    """Consecutive slots that were just filled and are to be expanded."""

    first_slot: Int[Array, ""]  # 0 in the first call, for the root and whatever unused slots fill the width
    tokens: Int[Array, "batch width"]
    depths: Int[Array, "batch width"]  # clamped to the last candidate row; nodes at the depth limit get no children
    ancestors: Bool[Array, "batch width nodes"]  # strict: a node is not its own ancestor; guesses: new nodes among them


type NodeStep[Carry] = Callable[[Carry, NewNodes], tuple[Carry, Float[Array, "batch width pool"]]]


class Growth(NamedTuple):
    """A growing tree; `tip` is the deepest slot of the chain of best children.

    Frontier entries slot · expand … + expand − 1 are the children of `slot`, best first; −inf means taken.
    """

    tokens: Int[Array, "batch nodes"]
    parents: Int[Array, "batch nodes"]
    depths: Int[Array, "batch nodes"]
    scores: Float[Array, "batch nodes"]
    ancestors: Bool[Array, "batch nodes nodes"]
    frontier_tokens: Int[Array, "batch entries"]
    frontier_scores: Float[Array, "batch entries"]
    tip: Int[Array, " batch"]


def start_growth(root: Int[Array, " batch"], nodes: int, expand: int) -> Growth:
    """The root alone in slot 0."""
    batch = root.shape[0]
    return Growth(
        tokens=jnp.zeros((batch, nodes), jnp.int32).at[:, 0].set(root),
        parents=jnp.full((batch, nodes), -1, jnp.int32),
        depths=jnp.zeros((batch, nodes), jnp.int32),
        scores=jnp.full((batch, nodes), -jnp.inf, jnp.float32).at[:, 0].set(0.0),
        ancestors=jnp.zeros((batch, nodes, nodes), bool).at[:, 0, 0].set(True),
        frontier_tokens=jnp.zeros((batch, nodes * expand), jnp.int32),
        frontier_scores=jnp.full((batch, nodes * expand), -jnp.inf, jnp.float32),
        tip=jnp.zeros((batch,), jnp.int32),
    )


def take_entries(growth: Growth, first: Int[Array, ""], width: int, *, spine: bool) -> Growth:
    """Moves the `width` best frontier entries, best first but after the spine's, into the slots from `first` on."""
    batch, nodes = growth.tokens.shape
    expand = growth.frontier_scores.shape[1] // nodes
    on_spine = jnp.arange(nodes * expand) == growth.tip[:, None] * expand if spine else None
    scores, entries = take_best(growth.frontier_scores, on_spine, width)
    valid = scores > -jnp.inf
    parents = jnp.where(valid, entries // expand, 0)
    lineage = pick_rows(growth.ancestors, parents)
    own = jnp.arange(nodes) == first + jnp.arange(width)[:, None]

    def write(rows: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(rows, new, first, axis=1)

    return Growth(
        tokens=write(growth.tokens, jnp.where(valid, pick_rows(growth.frontier_tokens, entries), 0)),
        parents=write(growth.parents, jnp.where(valid, parents, -1)),
        depths=write(growth.depths, jnp.where(valid, pick_rows(growth.depths, parents) + 1, 0)),
        scores=write(growth.scores, scores),
        ancestors=write(growth.ancestors, (lineage | own) & valid[..., None]),
        frontier_tokens=growth.frontier_tokens,
        frontier_scores=growth.frontier_scores.at[jnp.arange(batch)[:, None], entries].set(-jnp.inf),
        tip=jnp.where(valid[:, 0] & (entries[:, 0] == growth.tip * expand), first, growth.tip),
    )


def guess_children(
    growth: Growth, first: Int[Array, ""], width: int, candidate_ids: Int[Array, "batch depth pool"]
) -> Growth:
    """Writes a child of each of the `width` slots before `first` from there on; scores follow in `expand_nodes`."""
    batch, nodes = growth.tokens.shape
    depth = candidate_ids.shape[1]
    parents = jnp.broadcast_to(first - width + jnp.arange(width, dtype=jnp.int32), (batch, width))
    depths = pick_rows(growth.depths, parents)
    tokens = pick_rows(candidate_ids[..., 0], jnp.minimum(depths, depth - 1))
    lineage = pick_rows(growth.ancestors, parents)
    used = (lineage & (jnp.arange(nodes) == parents[..., None])).any(axis=-1) & (depths < depth) & (tokens >= 0)
    own = jnp.arange(nodes) == first + jnp.arange(width)[:, None]

    def write(rows: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(rows, new, first, axis=1)

    return growth._replace(
        tokens=write(growth.tokens, jnp.where(used, tokens, 0)),
        parents=write(growth.parents, jnp.where(used, parents, -1)),
        depths=write(growth.depths, jnp.where(used, depths + 1, 0)),
        ancestors=write(growth.ancestors, (lineage | own) & used[..., None]),
    )


def take_chains(
    growth: Growth,
    first: Int[Array, ""],
    width: int,
    candidate_ids: Int[Array, "batch depth pool"],
    *,
    ahead: int,
    spine: bool,
) -> Growth:
    """`take_entries` with `ahead` guessed descendants behind each: all first guesses, then and so on."""
    growth = take_entries(growth, first, width, spine=spine)
    for level in range(1, 1 + ahead):
        growth = guess_children(growth, first + level * width, width, candidate_ids)
    return growth


def guess_chain(growth: Growth, length: int, candidate_ids: Int[Array, "batch depth pool"]) -> Growth:
    """Guesses behind the root until there is a chain of so many slots."""
    for slot in range(1, length):
        growth = guess_children(growth, jnp.int32(slot), 1, candidate_ids)
    return growth


def expand_nodes[Carry](
    growth: Growth,
    carry: Carry,
    first: Int[Array, ""],
    width: int,
    candidate_ids: Int[Array, "batch depth pool"],
    step: NodeStep[Carry],
    nodes: int,
    *,
    chains: int,
) -> tuple[Growth, Carry]:
    """Adds the best children of `width` slots to the frontier; `step` sees only the first `nodes` slots.

    The first `chains` slots are followed by a guessed child of each, and so on; their scores are set here.
    """
    batch, slots = growth.tokens.shape
    depth = candidate_ids.shape[1]
    expand = growth.frontier_scores.shape[1] // slots

    def new(rows: Array) -> Array:
        return lax.dynamic_slice_in_dim(rows, first, width, axis=1)

    own = jnp.arange(nodes) == first + jnp.arange(width)[:, None]
    row = jnp.minimum(new(growth.depths), depth - 1)
    carry, logits = step(carry, NewNodes(first, new(growth.tokens), row, new(growth.ancestors)[..., :nodes] & ~own))
    ids = pick_rows(candidate_ids, row)
    logits = jnp.where(ids >= 0, logits, -jnp.inf)
    best, index = lax.top_k(logits, expand)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    edges = jnp.minimum(best - total, 0.0)  # rounding could lift it above 0
    if chains < width:
        guessed = jnp.minimum(logits[..., 0] - total[..., 0], 0.0)
        used = new(growth.parents) >= 0
        levels = [new(growth.scores)[:, :chains]]
        for level in range(chains, width, chains):
            above = levels[-1] + guessed[:, level - chains : level]
            levels.append(jnp.where(used[:, level : level + chains], above, -jnp.inf))
        scores = lax.dynamic_update_slice_in_dim(growth.scores, jnp.concatenate(levels, axis=1), first, axis=1)
        growth = growth._replace(scores=scores)
        has_guess = jnp.pad(used[:, chains:], ((0, 0), (0, chains)))
        best = jnp.where(has_guess[..., None] & (index == 0), -jnp.inf, best)  # it is a node already
    parent_scores = new(growth.scores)[..., None]
    # The depth limit, unused parents and missing candidates all give −inf; `where` also hides −inf − (−inf).
    open_edge = (best > -jnp.inf) & (parent_scores > -jnp.inf) & (new(growth.depths) < depth)[..., None]
    scores = jnp.where(open_edge, parent_scores + edges, -jnp.inf)

    def publish(frontier: Array, children: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(frontier, children.reshape(batch, -1), first * expand, axis=1)

    tokens = jnp.take_along_axis(ids, index, axis=-1, mode="promise_in_bounds")
    growth = growth._replace(
        frontier_tokens=publish(growth.frontier_tokens, tokens), frontier_scores=publish(growth.frontier_scores, scores)
    )
    return growth, carry


def pick_rows(
    rows: Shaped[Array, "batch slots *rest"], index: Int[Array, "batch picks"]
) -> Shaped[Array, "batch picks *rest"]:
    """Rows at valid indices, batch by batch."""
    index = index.reshape(*index.shape, *(1,) * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")


def take_best(
    scores: Float[Array, "batch entries"], on_spine: Bool[Array, "... entries"] | None, count: int
) -> tuple[Array, Array]:
    """Scores and indices of the `count` best entries, best first; open ones on the spine before all others."""
    order = scores if on_spine is None else jnp.where(on_spine & (scores > -jnp.inf), jnp.inf, scores)
    best, index = padded_top_k(order, count)
    if on_spine is None:
        return best, index
    return jnp.where(best > -jnp.inf, pick_rows(scores, jnp.minimum(index, scores.shape[1] - 1)), best), index


def padded_top_k(scores: Float[Array, "batch entries"], count: int) -> tuple[Array, Array]:
    """`lax.top_k` that also works with fewer than `count` entries: the missing ones score −inf."""
    missing = max(count - scores.shape[1], 0)
    best, index = lax.top_k(jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf), count)
    return best, index.astype(jnp.int32)
