"""Draft trees: three builders with fixed shapes, and the index tables that verification reads.

Conventions. A tree has `budget + 1` slots; slot 0 is the root (the last emitted token, depth 0) and parents have
smaller slots than their children. Row d of the candidates holds the possible children of depth-d nodes, the same set
for every node of that depth. A score is the sum of a node's edge log-probabilities from the root, in float32. Slots for
which no candidate was left stay unused, anywhere in the array: token 0, parent −1, depth 0, valid false, score −inf.

A builder is a deterministic function of its inputs, also when the target samples: nothing is drawn while drafting, so
accepting the target's own token at every node keeps the target's law (see `tfm_jax.sampling`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import top_k
from tfm_jax.errors import TfmError
from tfm_jax.state import pytree_dataclass

MAX_BUDGET = 255
MAX_WIDTH = 32


@pytree_dataclass
class DraftTree:
    """Draft tokens to verify in one pass of the target; the module's docstring has the conventions."""

    tokens: Int[Array, "batch nodes"]
    parents: Int[Array, "batch nodes"]  # −1 for the root and for unused slots
    depths: Int[Array, "batch nodes"]
    valid: Bool[Array, "batch nodes"]
    scores: Float[Array, "batch nodes"]
    ancestors: Bool[Array, "batch nodes nodes"]  # row i is true at i and its ancestors; unused rows are all false


class Candidates(NamedTuple):
    """The best tokens of every draft depth, best first."""

    ids: Int[Array, "batch depth pool"]
    scores: Float[Array, "batch depth pool"]  # raw logits, float32
    log_probs: Float[Array, "batch depth pool"]  # normalised over the whole vocabulary, never above 0


class NewNodes(NamedTuple):
    """Consecutive slots that `best_first_tree` has just filled and wants expanded."""

    first_slot: Int[Array, ""]  # 0 in the first call, for the root and whatever unused slots fill the width
    tokens: Int[Array, "batch width"]
    depths: Int[Array, "batch width"]  # clamped to the last candidate row; nodes at the depth limit get no children
    ancestors: Bool[Array, "batch width nodes"]  # strict: a node is not its own ancestor


type NodeStep[Carry] = Callable[[Carry, NewNodes], tuple[Carry, Float[Array, "batch width pool"]]]


def top_candidates(logits: Float[Array, "batch depth vocab"], pool: int) -> Candidates:
    """The `pool` best tokens of every depth, exactly; the lower id wins a tie."""
    scores, ids = top_k(logits, pool)
    log_probs = scores - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
    return Candidates(ids, scores, jnp.minimum(log_probs, 0.0))


def default_width(budget: int) -> int:
    """Nodes that `best_first_tree` takes in one step: ⌈budget / 16⌉, so that a tree needs 16 steps, at most 32."""
    return max(1, min(-(-budget // 16), budget, MAX_WIDTH))


def default_steps(budget: int) -> int:
    """Calls of the reference's schedule, ⌈budget / width⌉: 16 at multiples of 16."""
    return -(-budget // default_width(budget))


def chain_tree(
    root: Int[Array, " batch"],
    ids: Int[Array, "batch depth pool"],
    log_probs: Float[Array, "batch depth pool"],
    length: int,
) -> DraftTree:
    """One branch of the first `length` depths' best candidates: the DFlash block without a tree.

    Args:
        root: last emitted token.
        ids: candidates, best first; only the first of every depth is read.
        log_probs: their log-probabilities.
        length: draft tokens to keep; 0 leaves the root alone, as in plain decoding.

    Raises:
        TfmError: `length` exceeds the number of depths.
    """
    if not 0 <= length <= ids.shape[1]:
        message = f"The chain's length is {length}; use 0 to {ids.shape[1]}, the depths that the drafter predicts."
        raise TfmError(message)
    batch = root.shape[0]
    depths = jnp.arange(length + 1, dtype=jnp.int32)
    scores = jnp.pad(jnp.cumsum(log_probs[:, :length, 0], axis=1), ((0, 0), (1, 0)))

    def rows(x: Array) -> Array:
        return jnp.broadcast_to(x, (batch, *x.shape))

    return DraftTree(
        tokens=jnp.concatenate([root[:, None], ids[:, :length, 0]], axis=1).astype(jnp.int32),
        parents=rows(depths - 1),
        depths=rows(depths),
        valid=jnp.ones((batch, length + 1), bool),
        scores=scores,
        ancestors=rows(depths[:, None] >= depths),
    )


def ddtree(
    root: Int[Array, " batch"],
    ids: Int[Array, "batch depth pool"],
    log_probs: Float[Array, "batch depth pool"],
    budget: int,
    *,
    spine: bool = False,
) -> DraftTree:
    """The `budget` most probable prefixes under the product of the marginals (DDTree, arXiv 2604.12989), best first.

    DDTree pops a heap of single nodes. Here every depth is one top-k over (kept prefixes) × (candidates), then one
    top-k over all depths takes the tree; the result is the same. A depth needs only its `budget` best prefixes: more
    could not enter the tree. They all extend prefixes kept one depth before, because if `budget` prefixes beat a
    parent, the same `budget` prefixes with the child's token added beat the child. An edge never has a positive
    log-probability, so a child's rounded score never exceeds its parent's, and the stable top-k, which sees shallow
    prefixes first, puts parents before children even when the scores are equal. Slots therefore come in the heap's
    pop order, by descending score; a spine comes first.

    Args:
        root: last emitted token.
        ids: candidates of every depth, best first; at most the first `budget` of them can matter.
        log_probs: their log-probabilities over the whole vocabulary, −inf where there is no candidate.
        budget: draft nodes, the root not counted.
        spine: keep the chain of every depth's best candidate, as far as the budget reaches.

    Raises:
        TfmError: `budget` is out of range.
    """
    _check_budget(budget)
    batch, depth, _ = ids.shape
    log_probs = jnp.minimum(log_probs[..., :budget].astype(jnp.float32), 0.0)
    log_probs = jnp.where(ids[..., :budget] >= 0, log_probs, -jnp.inf)
    pool = log_probs.shape[-1]

    scores, tokens, parents = [], [], []  # of the prefixes kept at each depth; parents index those of the depth before
    prefix_scores = jnp.zeros((batch, 1), jnp.float32)
    for level in range(depth):
        extended = prefix_scores[:, :, None] + log_probs[:, level, None, :]
        prefix_scores, index = _padded_top_k(extended.reshape(batch, -1), budget)
        scores.append(prefix_scores)
        tokens.append(_pick(ids[:, level], index % pool))
        parents.append(index // pool)

    flat_scores = jnp.concatenate(scores, axis=1)
    on_spine = jnp.arange(depth * budget) % budget == 0 if spine else None
    best, flat = _take_best(flat_scores, on_spine, budget)
    valid = best > -jnp.inf
    slots = jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), flat.shape)
    slot_of = jnp.zeros((batch, depth * budget), jnp.int32).at[jnp.arange(batch)[:, None], flat].set(slots)
    level = flat // budget
    parent_flat = (level - 1) * budget + _pick(jnp.concatenate(parents, axis=1), flat)
    parent_slots = jnp.where(level > 0, _pick(slot_of, jnp.maximum(parent_flat, 0)), 0)
    return _finish(
        root,
        tokens=jnp.where(valid, _pick(jnp.concatenate(tokens, axis=1), flat), 0),
        parents=jnp.where(valid, parent_slots, -1),
        depths=jnp.where(valid, level + 1, 0),
        scores=best,
        max_depth=depth,
    )


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
) -> DraftTree:
    """Grows a tree from its most probable frontier nodes, `width` at a time, under conditionals that `step` computes.

    Trees from Marginals, arXiv 2607.06763, and `dflash_tfm.py` of trymirai/sglang. The root is expanded first. Then,
    until the budget is spent, the `width` best frontier entries become nodes, best first, and are expanded in one call;
    the last group, cut to the budget, is not expanded. Expanding keeps the `expand` best children, normalised over the
    whole pool. A child of a node taken in the same group waits for the next one: only `width` 1 is exact best-first.

    With `steps` the tree is pruned: after `steps` calls the `budget` best of all nodes and frontier entries are kept,
    in the order of their scores. So a node does not have to be expanded to get children, nor kept because it was, and
    the number of dependent calls no longer follows from the budget (grow-and-prune, `uzu_tree.py` of trymirai/sglang).

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

    Raises:
        TfmError: `budget`, `width`, `expand` or `steps` is out of range, or too few steps for a spine.
    """
    _check_budget(budget)
    depth, pool = candidate_ids.shape[1:]
    width = default_width(budget) if width is None else width
    expand = min(8, pool) if expand is None else expand
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
    seen = expanded_slots(budget, width, steps)

    def grow(group: Int[Array, ""], state: tuple[_Growth, Carry]) -> tuple[_Growth, Carry]:
        # Slots 1 .. width − 1, expanded together with the root, are still unused then and add nothing to the frontier.
        growth, carry = state
        last = jnp.maximum(1 + (group - 1) * width, 0)
        growth, carry = _expand(growth, carry, last, width, candidate_ids, step, seen)
        return _take(growth, 1 + group * width, width, spine=spine), carry

    growth, _ = lax.fori_loop(0, groups, grow, (_start(root, 1 + groups * width, expand), carry))
    if steps is not None:
        return _prune(growth, budget, depth, spine=spine)
    tokens, parents, depths, scores, ancestors = (rows[:, : budget + 1] for rows in growth[:5])
    return DraftTree(tokens, parents, depths, scores > -jnp.inf, scores, ancestors[..., : budget + 1])


def expanded_slots(budget: int, width: int, steps: int | None) -> int:
    """Slots that `best_first_tree` shows to its `step`, the root's among them: those that may be expanded."""
    return budget + 1 if steps is None else 1 + max(steps - 1, 1) * width


class _Growth(NamedTuple):
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


def _start(root: Int[Array, " batch"], nodes: int, expand: int) -> _Growth:
    batch = root.shape[0]
    return _Growth(
        tokens=jnp.zeros((batch, nodes), jnp.int32).at[:, 0].set(root),
        parents=jnp.full((batch, nodes), -1, jnp.int32),
        depths=jnp.zeros((batch, nodes), jnp.int32),
        scores=jnp.full((batch, nodes), -jnp.inf, jnp.float32).at[:, 0].set(0.0),
        ancestors=jnp.zeros((batch, nodes, nodes), bool).at[:, 0, 0].set(True),
        frontier_tokens=jnp.zeros((batch, nodes * expand), jnp.int32),
        frontier_scores=jnp.full((batch, nodes * expand), -jnp.inf, jnp.float32),
        tip=jnp.zeros((batch,), jnp.int32),
    )


def _take(growth: _Growth, first: Int[Array, ""], width: int, *, spine: bool) -> _Growth:
    """Moves the `width` best frontier entries, best first but after the spine's, into the slots from `first` on."""
    batch, nodes = growth.tokens.shape
    expand = growth.frontier_scores.shape[1] // nodes
    on_spine = jnp.arange(nodes * expand) == growth.tip[:, None] * expand if spine else None
    scores, entries = _take_best(growth.frontier_scores, on_spine, width)
    valid = scores > -jnp.inf
    parents = jnp.where(valid, entries // expand, 0)
    lineage = _pick(growth.ancestors, parents)
    own = jnp.arange(nodes) == first + jnp.arange(width)[:, None]

    def write(rows: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(rows, new, first, axis=1)

    return _Growth(
        tokens=write(growth.tokens, jnp.where(valid, _pick(growth.frontier_tokens, entries), 0)),
        parents=write(growth.parents, jnp.where(valid, parents, -1)),
        depths=write(growth.depths, jnp.where(valid, _pick(growth.depths, parents) + 1, 0)),
        scores=write(growth.scores, scores),
        ancestors=write(growth.ancestors, (lineage | own) & valid[..., None]),
        frontier_tokens=growth.frontier_tokens,
        frontier_scores=growth.frontier_scores.at[jnp.arange(batch)[:, None], entries].set(-jnp.inf),
        tip=jnp.where(valid[:, 0] & (entries[:, 0] == growth.tip * expand), first, growth.tip),
    )


def _prune(growth: _Growth, budget: int, max_depth: int, *, spine: bool) -> DraftTree:
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
    depths = jnp.concatenate([growth.depths, _pick(growth.depths, above) + 1], axis=1)
    on_spine = None
    if spine:
        chain = _pick(growth.ancestors, growth.tip[:, None])[:, 0]
        on_spine = jnp.pad(chain, ((0, 0), (0, nodes * expand)))
    best, picked = _take_best(scores, on_spine, budget)
    valid = best > -jnp.inf
    slots = jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), picked.shape)
    rows = jnp.arange(batch)[:, None]
    slot_of = jnp.zeros(scores.shape, jnp.int32).at[rows, picked].set(slots).at[:, 0].set(0)
    new_parents = _pick(slot_of, jnp.maximum(_pick(parents, picked), 0))
    return _finish(
        growth.tokens[:, 0],
        tokens=jnp.where(valid, _pick(tokens, picked), 0),
        parents=jnp.where(valid, new_parents, -1),
        depths=jnp.where(valid, _pick(depths, picked), 0),
        scores=best,
        max_depth=max_depth,
    )


def _expand[Carry](
    growth: _Growth,
    carry: Carry,
    first: Int[Array, ""],
    width: int,
    candidate_ids: Int[Array, "batch depth pool"],
    step: NodeStep[Carry],
    nodes: int,
) -> tuple[_Growth, Carry]:
    """Adds the best children of `width` slots to the frontier; `step` sees only the first `nodes` slots."""
    batch, slots = growth.tokens.shape
    depth = candidate_ids.shape[1]
    expand = growth.frontier_scores.shape[1] // slots

    def new(rows: Array) -> Array:
        return lax.dynamic_slice_in_dim(rows, first, width, axis=1)

    own = jnp.arange(nodes) == first + jnp.arange(width)[:, None]
    row = jnp.minimum(new(growth.depths), depth - 1)
    carry, logits = step(carry, NewNodes(first, new(growth.tokens), row, new(growth.ancestors)[..., :nodes] & ~own))
    ids = _pick(candidate_ids, row)
    logits = jnp.where(ids >= 0, logits, -jnp.inf)
    best, index = lax.top_k(logits, expand)
    edges = jnp.minimum(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)  # rounding could lift it above 0
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


def first_nodes(tree: DraftTree, budget: int) -> DraftTree:
    """The root and the first `budget` nodes: a tree of its own, since parents come before children."""
    shorter = jax.tree.map(lambda rows: rows[:, : budget + 1], tree)
    return dataclasses.replace(shorter, ancestors=shorter.ancestors[..., : budget + 1])


def drop_nodes(tree: DraftTree, kept: Bool[Array, " nodes"]) -> DraftTree:
    """The tree with the other slots unused; `kept` must hold every kept node's parent."""
    valid = tree.valid & kept
    return DraftTree(
        tokens=jnp.where(kept, tree.tokens, 0),
        parents=jnp.where(kept, tree.parents, -1),
        depths=jnp.where(kept, tree.depths, 0),
        valid=valid,
        scores=jnp.where(kept, tree.scores, -jnp.inf),
        ancestors=tree.ancestors & kept[:, None] & kept,
    )


def conv_taps(parents: Int[Array, "batch nodes"], width: int) -> Int[Array, "batch nodes width"]:
    """Rows that a causal convolution of `width` taps reads at every node.

    Entry j is the slot of the node's j-th ancestor, 0 being the node itself. Past the root it goes on in the committed
    inputs: −1 is the newest of them, −2 the one before. Unused slots hang below the root.
    """
    nodes = parents.shape[1]
    slots = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), parents.shape)
    taps = [slots]
    for _ in range(width - 1):
        above = _pick(jnp.maximum(parents, 0), jnp.maximum(slots, 0))
        slots = jnp.where(slots > 0, above, slots - 1)
        taps.append(slots)
    return jnp.stack(taps, axis=-1)


def ancestor_mask(
    parents: Int[Array, "batch nodes"], valid: Bool[Array, "batch nodes"], max_depth: int
) -> Bool[Array, "batch nodes nodes"]:
    """Row i is true at node i and its ancestors, none below `max_depth`; rows of unused slots are all false."""
    path = conv_taps(parents, max_depth + 1)
    return (path[..., None] == jnp.arange(parents.shape[1])).any(axis=2) & valid[..., None]


def _finish(
    root: Int[Array, " batch"],
    *,
    tokens: Int[Array, "batch budget"],
    parents: Int[Array, "batch budget"],
    depths: Int[Array, "batch budget"],
    scores: Float[Array, "batch budget"],
    max_depth: int,
) -> DraftTree:
    """Puts the root in front."""

    def prepend(value: Array | int, rows: Array) -> Array:
        first = jnp.broadcast_to(jnp.asarray(value, rows.dtype), root.shape)
        return jnp.concatenate([first[:, None], rows], axis=1)

    parents = prepend(-1, parents)
    scores = prepend(0, scores)
    valid = scores > -jnp.inf
    return DraftTree(
        prepend(root, tokens), parents, prepend(0, depths), valid, scores, ancestor_mask(parents, valid, max_depth)
    )


def _pick(
    rows: Shaped[Array, "batch slots *rest"], index: Int[Array, "batch picks"]
) -> Shaped[Array, "batch picks *rest"]:
    """Rows at valid indices, batch by batch."""
    index = index.reshape(*index.shape, *(1,) * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")


def _take_best(
    scores: Float[Array, "batch entries"], on_spine: Bool[Array, "... entries"] | None, count: int
) -> tuple[Array, Array]:
    """Scores and indices of the `count` best entries, best first; open ones on the spine before all others."""
    order = scores if on_spine is None else jnp.where(on_spine & (scores > -jnp.inf), jnp.inf, scores)
    best, index = _padded_top_k(order, count)
    if on_spine is None:
        return best, index
    return jnp.where(best > -jnp.inf, _pick(scores, jnp.minimum(index, scores.shape[1] - 1)), best), index


def _padded_top_k(scores: Float[Array, "batch entries"], count: int) -> tuple[Array, Array]:
    """`lax.top_k` that also works with fewer than `count` entries: the missing ones score −inf."""
    missing = max(count - scores.shape[1], 0)
    best, index = lax.top_k(jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf), count)
    return best, index.astype(jnp.int32)


def _check_budget(budget: int) -> None:
    if not 1 <= budget <= MAX_BUDGET:
        message = f"The budget is {budget}; use 1 to {MAX_BUDGET} draft nodes."
        raise TfmError(message)
