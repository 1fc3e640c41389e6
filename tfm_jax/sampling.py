"""Acceptance: which path of a draft tree the target would have written itself, and where it goes on from there.

Losslessness in one sentence: at a node the target draws its own next token x; if x is a child of the node the walk goes
on there, otherwise x is emitted as it is. The tree decides how far one pass gets, never what is written.

At temperature 0, x is the argmax. Above it, x = argmax(logits / temperature + G), with standard Gumbel noise
G(seed, position, token), is an exact draw from the softmax (Gumbel-max). The noise is a fixed field, so what is written
depends on the seed alone, not on the tree. Nodes of the same depth share their noise; that is harmless because a walk
visits one node per depth. `tfm_jax.verifiers` has the same rule driven by coins, and other rules.

All arithmetic is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from tfm_jax.tree import DraftTree, check_depths


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


class Logprobs(NamedTuple):
    """Log-probabilities of emitted tokens, and of the likeliest tokens in their places, best first."""

    chosen: Float[Array, "batch steps"]
    top_ids: Int[Array, "batch steps top"]
    top: Float[Array, "batch steps top"]


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

    Raises:
        TfmError: depths exceed `max_depth`; traced ones are not looked at and must not.
    """
    check_depths(depths, max_depth)
    logits = logits.astype(jnp.float32)
    if sample:
        noise = scaled_noise(seed, lengths, temperature, max_depth=max_depth, vocab=logits.shape[-1])
        logits = logits + jax.vmap(lambda rows, index: rows[index])(noise, depths)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def scaled_noise(
    seed: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    temperature: Float[Array, " batch"],
    *,
    max_depth: int,
    vocab: int,
) -> Float[Array, "batch steps vocab"]:
    """Temperature · G for the choices after nodes of depth 0 .. `max_depth`: what is added to the target's logits.

    Drafting with shared noise adds the same to the drafter's logits. Where the two models agree, so do then their
    choices, and what is written stays a function of target and noise alone (`shared_gumbel.py` of trymirai/sglang has
    the idea; there the noise picks a node's children only, here it also orders the frontier).
    """
    positions = lengths[:, None] + jnp.arange(max_depth + 1, dtype=jnp.int32)
    return gumbel_noise(seed, positions, vocab) * temperature[:, None, None]


def walk(tree: DraftTree, choices: Int[Array, "batch nodes"], *, max_depth: int) -> AcceptedPath:
    """Follows the target's choices from the root for as long as they are in the tree.

    A node is reached if it and all its ancestors are their parents' choice. Siblings have distinct tokens, so at most
    one node per depth is reached, and all steps of the walk can be taken at once.

    Args:
        tree: the verified tree.
        choices: the target's token after each node.
        max_depth: depth of the tree, static.

    Raises:
        TfmError: depths exceed `max_depth`; traced ones are not looked at and must not.
    """
    check_depths(tree.depths, max_depth)
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


def token_logprobs(
    log_laws: Float[Array, "batch steps vocab"], tokens: Int[Array, "batch steps"], top: int
) -> Logprobs:
    """Log-probabilities of given tokens and of the `top` likeliest; the lower id comes first among equals."""
    best, ids = lax.top_k(log_laws, top)
    chosen = jnp.take_along_axis(log_laws, tokens[..., None], axis=-1)[..., 0]
    return Logprobs(chosen, ids.astype(jnp.int32), best)


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
