"""Acceptance: which path of a draft tree the target would have written itself, and where it goes on from there.

Losslessness in one sentence: at a node the target draws its own next token x; if x is a child of the node the walk goes
on there, otherwise x is emitted as it is. The tree decides how far one pass gets, never what is written.

At temperature 0, x is the argmax. Above it, x = argmax(logits / temperature + G), with standard Gumbel noise
G(seed, position, token), is an exact draw from the softmax (Gumbel-max). The noise is a fixed field, so what is written
depends on the seed alone, not on the tree. Nodes of the same depth share their noise; that is harmless because a walk
visits one node per depth. `target_only` is the same rule driven by given uniforms.

All arithmetic is float32 (`target_only`: its input's dtype).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from tfm_jax.tree import DraftTree


class AcceptedPath(NamedTuple):
    """Outcome of one verification.

    Entries of `path` and `tokens` at and beyond `count` are 0, which for `path` is a valid slot (the root): gather
    first, mask by `count` afterwards.
    """

    path: Int[Array, "batch steps"]  # accepted slots, the root first; steps = depth + 1
    count: Int[Array, " batch"]  # slots on the path, at least 1; as many tokens are emitted
    tokens: Int[Array, "batch steps"]  # emitted tokens: those of path[1:], then the bonus
    bonus: Int[Array, " batch"]  # last emitted token, the next round's root


class Cut(NamedTuple):
    """How much of a round's tokens is emitted."""

    count: Int[Array, " batch"]
    done: Bool[Array, " batch"]


def gumbel_noise(
    seed: Int[Array, " batch"], positions: Int[Array, "batch nodes"], vocab: int
) -> Float[Array, "batch nodes vocab"]:
    """Standard Gumbel noise, a pure function of (seed, position, token) whatever the batch and the vocabulary's size.

    The words come from Threefry, keyed by seed and position and counted by token.

    Args:
        seed: seed of each row.
        positions: absolute position of the token after which the next one is drawn.
        vocab: tokens; a prefix of a larger vocabulary gets the same noise.
    """

    def words(seed: Int[Array, ""], position: Int[Array, ""]) -> UInt32[Array, " vocab"]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    return words_to_gumbel(jax.vmap(jax.vmap(words, in_axes=(None, 0)))(seed, positions))


def words_to_gumbel(words: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard Gumbel noise from uniform 32-bit words; decreasing in the word.

    With u = (word + ½) 2⁻³² near 0, G = −log(−log(1 − u)) ≈ −log u is large: the upper tail, where the winners are, has
    the fine end of the floats and is resolved down to probabilities of 2⁻³². The customary −log(−log u) rounds u near 1
    to steps of 2⁻²⁴, and a rarer token then wins far too often or never. Every value is finite.
    """
    u = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def node_choices(
    logits: Float[Array, "batch nodes vocab"],
    depths: Int[Array, "batch nodes"],
    lengths: Int[Array, " batch"],
    temperature: Float[Array, " batch"],
    seed: Int[Array, " batch"],
    *,
    max_depth: int,
    sample: bool,
) -> Int[Array, "batch nodes"]:
    """The token that the target writes after every node; the lowest id wins a tie.

    argmax(logits + temperature · G) is the draw of the module's docstring for temperature > 0 and exactly the greedy
    choice for 0, so that one batch may hold both.

    Args:
        logits: the target's logits after each node.
        depths: depth of each node, at most `max_depth`.
        lengths: absolute position of the root, i.e. the committed length.
        temperature: 0 means greedy.
        seed: seed of the row's noise.
        max_depth: depth of the tree, static; noise is drawn once per depth.
        sample: static; False promises that every temperature is 0 and draws no noise.
    """
    logits = logits.astype(jnp.float32)
    if sample:
        positions = lengths[:, None] + jnp.arange(max_depth + 1, dtype=jnp.int32)
        noise = gumbel_noise(seed, positions, logits.shape[-1]) * temperature[:, None, None]
        logits = logits + jax.vmap(lambda rows, index: rows[index])(noise, depths)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def walk(tree: DraftTree, choices: Int[Array, "batch nodes"], *, max_depth: int) -> AcceptedPath:
    """Follows the target's choices from the root for as long as they are in the tree.

    A node is reached if it and all its ancestors are their parents' choice. Siblings have distinct tokens, so at most
    one node per depth is reached, and all steps of the walk can be taken at once.

    Args:
        tree: the verified tree.
        choices: the target's token after each node.
        max_depth: depth of the tree, static.
    """
    parents_choice = jnp.take_along_axis(choices, jnp.maximum(tree.parents, 0), axis=1)
    missed = (tree.parents >= 0) & (tree.tokens != parents_choice)
    reached = tree.valid & ~jnp.any(tree.ancestors & missed[:, None, :], axis=-1)
    steps = jnp.arange(max_depth + 1, dtype=jnp.int32)
    at_depth = reached[:, None, :] & (tree.depths[:, None, :] == steps[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    count = jnp.sum(jnp.any(at_depth, axis=-1), axis=1, dtype=jnp.int32)
    tokens = jnp.where(steps < count[:, None], jnp.take_along_axis(choices, path, axis=1), 0)
    bonus = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)[:, 0]
    return AcceptedPath(path, count, tokens, bonus)


def target_only(
    tree: DraftTree,
    probabilities: Float[Array, "batch nodes vocab"],
    uniforms: Float[Array, "batch coins"],
    *,
    max_depth: int,
) -> AcceptedPath:
    """The `target_only` rule of trymirai/sglang (`tree_sampling.py`), driven by given uniforms in [0, 1).

    At node n, coin n goes to the first child, in slot order, whose running sum of target probabilities exceeds it; if
    none does, the walk ends and the last coin draws the bonus from the row with the children's tokens removed. Both
    comparisons are strict, so a coin of 0 never picks a token of probability 0. If rounding leaves nothing beside the
    children, the last child with positive probability is taken.

    Args:
        tree: the verified tree.
        probabilities: the target's law after each node, any float dtype.
        uniforms: one coin per node, then the bonus coin: coins = nodes + 1.
        max_depth: depth of the tree, static.
    """
    nodes = tree.tokens.shape[1]
    child = (tree.parents[:, None, :] == jnp.arange(nodes)[:, None]) & tree.valid[:, None, :]
    mass = jnp.where(child, _columns(probabilities, tree.tokens), 0.0)
    taken = child & (uniforms[:, :nodes, None] < jnp.cumsum(mass, axis=-1))
    first_taken = jnp.argmax(taken, axis=-1)

    is_child_token = jax.vmap(_mark_tokens, in_axes=(0, 0, None))(child, tree.tokens, probabilities.shape[-1])
    cumulative = jnp.cumsum(jnp.where(is_child_token, 0.0, probabilities), axis=-1)
    rest = cumulative[..., -1]
    bonus = jnp.argmax(cumulative > uniforms[:, nodes, None, None] * rest[..., None], axis=-1)
    last_positive = nodes - 1 - jnp.argmax((mass > 0)[..., ::-1], axis=-1)

    moves = jnp.any(taken, axis=-1)
    slot = jnp.where(moves, first_taken, last_positive)
    must_move = (rest <= 0) & jnp.any(mass > 0, axis=-1)
    choices = jnp.where(moves | must_move, jnp.take_along_axis(tree.tokens, slot, axis=1), bonus)
    return walk(tree, choices.astype(jnp.int32), max_depth=max_depth)


def cut_at_stop(
    tokens: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    stop_ids: Int[Array, " stops"],
    remaining: Int[Array, " batch"],
) -> Cut:
    """Shortens what a round emits to the first stop token, which is kept, and to the tokens still wanted.

    Args:
        tokens: emitted tokens, `AcceptedPath.tokens`.
        count: how many of them are real.
        stop_ids: tokens that end a text; may be empty.
        remaining: tokens still wanted; 0 for finished rows.
    """
    count = jnp.minimum(count, remaining)
    steps = jnp.arange(tokens.shape[1])
    stops = (tokens[..., None] == stop_ids).any(axis=-1) & (steps < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    return Cut(count, stopped | (count >= remaining))


def _columns(
    probabilities: Float[Array, "batch nodes vocab"], tokens: Int[Array, "batch nodes"]
) -> Float[Array, "batch nodes nodes"]:
    """Entry (n, c): probability of node c's token after node n."""
    return jax.vmap(lambda rows, columns: rows[:, columns])(probabilities, tokens)


def _mark_tokens(
    child: Bool[Array, "nodes nodes"], tokens: Int[Array, " nodes"], vocab: int
) -> Bool[Array, "nodes vocab"]:
    """Row n is true at the tokens of n's children."""
    return jnp.zeros((child.shape[0], vocab), bool).at[:, tokens].max(child)
