"""Draft trees: two builders with fixed shapes, and the index tables that verification reads.

Conventions. A tree has `budget + 1` slots; slot 0 is the root (the last emitted token, depth 0) and parents have
smaller slots than their children. Row d of the candidates holds the possible children of depth-d nodes, the same set
for every node of that depth. A score is the sum of a node's edge log-probabilities from the root, in float32. Slots for
which no candidate was left stay unused, anywhere in the array: token 0, parent −1, depth 0, valid false, score −inf.

Parents and depths that a caller made are checked where their numbers are at hand, outside of `jax.jit`. Where they are
traced nothing is looked at, and a parent that is no earlier slot gives rows that mean nothing.

A builder is a deterministic function of its inputs, also when the target samples: nothing is drawn while drafting, so
accepting the target's own token at every node keeps the target's law (see `tfm_jax.sampling`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import top_k
from pallas_kernels.checks import concrete
from pallas_kernels.xla_growth import padded_top_k, pick_rows, take_best
from tfm_jax.errors import TfmError
from tfm_jax.state import pytree_dataclass

MAX_BUDGET = 255


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


def top_candidates(logits: Float[Array, "batch depth vocab"], pool: int) -> Candidates:
    """The `pool` best tokens of every depth, exactly; the lower id wins a tie."""
    scores, ids = top_k(logits, pool)
    log_probs = scores - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
    return Candidates(ids, scores, jnp.minimum(log_probs, 0.0))


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
    check_budget(budget)
    batch, depth, _ = ids.shape
    log_probs = jnp.minimum(log_probs[..., :budget].astype(jnp.float32), 0.0)
    log_probs = jnp.where(ids[..., :budget] >= 0, log_probs, -jnp.inf)
    pool = log_probs.shape[-1]

    scores, tokens, parents = [], [], []  # of the prefixes kept at each depth; parents index those of the depth before
    prefix_scores = jnp.zeros((batch, 1), jnp.float32)
    for level in range(depth):
        extended = prefix_scores[:, :, None] + log_probs[:, level, None, :]
        prefix_scores, index = padded_top_k(extended.reshape(batch, -1), budget)
        scores.append(prefix_scores)
        tokens.append(pick_rows(ids[:, level], index % pool))
        parents.append(index // pool)

    flat_scores = jnp.concatenate(scores, axis=1)
    on_spine = jnp.arange(depth * budget) % budget == 0 if spine else None
    best, flat = take_best(flat_scores, on_spine, budget)
    valid = best > -jnp.inf
    slots = jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), flat.shape)
    slot_of = jnp.zeros((batch, depth * budget), jnp.int32).at[jnp.arange(batch)[:, None], flat].set(slots)
    level = flat // budget
    parent_flat = (level - 1) * budget + pick_rows(jnp.concatenate(parents, axis=1), flat)
    parent_slots = jnp.where(level > 0, pick_rows(slot_of, jnp.maximum(parent_flat, 0)), 0)
    return finish_tree(
        root,
        tokens=jnp.where(valid, pick_rows(jnp.concatenate(tokens, axis=1), flat), 0),
        parents=jnp.where(valid, parent_slots, -1),
        depths=jnp.where(valid, level + 1, 0),
        scores=best,
        max_depth=depth,
    )


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

    Raises:
        TfmError: a parent that is not traced is no earlier slot and not −1.
    """
    _check_parents(parents)
    nodes = parents.shape[1]
    slots = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), parents.shape)
    taps = [slots]
    for _ in range(width - 1):
        above = pick_rows(jnp.maximum(parents, 0), jnp.maximum(slots, 0))
        slots = jnp.where(slots > 0, above, slots - 1)
        taps.append(slots)
    return jnp.stack(taps, axis=-1)


def ancestor_mask(
    parents: Int[Array, "batch nodes"], valid: Bool[Array, "batch nodes"], max_depth: int
) -> Bool[Array, "batch nodes nodes"]:
    """Row i is true at node i and its ancestors, none below `max_depth`; rows of unused slots are all false.

    A traced node that is deeper misses the uppermost of its ancestors.

    Raises:
        TfmError: parents that are not traced are no earlier slots, or put a node below `max_depth`.
    """
    check_depths(_depths(parents, valid), max_depth)
    path = conv_taps(parents, max_depth + 1)
    return (path[..., None] == jnp.arange(parents.shape[1])).any(axis=2) & valid[..., None]


def finish_tree(
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


def check_depths(depths: Int[Array | np.ndarray, "batch nodes"] | None, max_depth: int) -> None:
    """Refuses a tree that is deeper than what is computed of it; traced depths pass, and None.

    Raises:
        TfmError: a node is below `max_depth`.
    """
    rows = None if depths is None else concrete(depths)
    if rows is not None and (rows > max_depth).any():
        row, slot = np.argwhere(rows > max_depth)[0]
        message = f"Slot {slot} of tree {row} is at depth {rows[row, slot]}; use at most {max_depth}, the depth given."
        raise TfmError(message)


def _check_parents(parents: Int[Array, "batch nodes"]) -> np.ndarray | None:
    """The parents unless they are traced."""
    rows = concrete(parents)
    if rows is not None:
        wrong = (rows < -1) | (rows >= np.arange(rows.shape[1]))
        if wrong.any():
            row, slot = np.argwhere(wrong)[0]
            message = f"Slot {slot} of tree {row} has parent {rows[row, slot]}; use an earlier slot, or -1 for none."
            raise TfmError(message)
    return rows


def _depths(parents: Int[Array, "batch nodes"], valid: Bool[Array, "batch nodes"]) -> np.ndarray | None:
    """Depths by walking down, 0 at unused slots; None if anything is traced."""
    above, used = _check_parents(parents), concrete(valid)
    if above is None or used is None:
        return None
    depths = np.zeros(above.shape, np.int32)
    for slot in range(1, above.shape[1]):
        depths[:, slot] = np.where(used[:, slot], depths[np.arange(len(depths)), above[:, slot]] + 1, 0)
    return depths


def check_budget(budget: int) -> None:
    """Refuses a number of draft nodes that is out of range.

    Raises:
        TfmError: it is.
    """
    if not 1 <= budget <= MAX_BUDGET:
        message = f"The budget is {budget}; use 1 to {MAX_BUDGET} draft nodes."
        raise TfmError(message)
