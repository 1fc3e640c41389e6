"""What narrows the target's law before a token is drawn: penalties, logit bias, temperature, top-k, top-p, min-p.

The law of a row of logits is made in this order:

    penalties        on the raw logits, from the text so far: the node's own root path included
    logit bias       added
    temperature      divides
    sequential       top-k, top-p of what is left, min-p     (the order of Hugging Face; the default)
    joint            top-p of the whole law, top-k, min-p    (the order of flashinfer's joint sampling)

and renormalised at the end. Tokens are ranked by their logit, the lower id first among equals, so every filter keeps
exactly what its name says even where logits tie. Top-p keeps a token iff the mass ranked before it is below `top_p`.
The best token always stays: temperature 0 is greedy whatever the filters.

Every function is pure and works in the dtype of its logits, float32 at least. No row is sorted: the boundary of a rank
is found exactly, bit by bit, by as many masked sums of the row as its dtype has bits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from tfm_jax.state import Filters, Penalties


def filter_logits(
    logits: Float[Array, "batch nodes vocab"], temperature: Float[Array, " batch"], filters: Filters
) -> Float[Array, "batch nodes vocab"]:
    """Logits, not yet divided by the temperature, with the bias added and −inf where a filter drops a token.

    Args:
        logits: the target's logits after each node, in any float dtype; the result is float32 or wider.
        temperature: of each row; for 0, filters read the law at temperature 1.
        filters: those that are None cost nothing.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if filters.bias is not None:
        logits = logits + filters.bias[:, None].astype(logits.dtype)
    if filters.top_k is None and filters.top_p is None and filters.min_p is None:
        return logits
    kept = kept_tokens(logits, jnp.exp(_scale(logits, temperature)), filters)
    return jnp.where(kept, logits, -jnp.inf)


def kept_tokens(
    scores: Float[Array, "batch nodes vocab"], weights: Float[Array, "batch nodes vocab"], filters: Filters
) -> Bool[Array, "batch nodes vocab"]:
    """Where top-k, top-p and min-p keep a token; the bias is not looked at.

    Args:
        scores: what tokens are ranked by.
        weights: probabilities up to a factor per row, ranked as the scores are.
        filters: one value a row of the batch; see `Filters` for what switches one off.
    """
    vocab, dtype = scores.shape[-1], weights.dtype
    ranks = _rank_keys(scores)
    kept = jnp.ones(scores.shape, bool)
    if filters.top_k is not None:
        limit = jnp.where(filters.top_k > 0, filters.top_k, vocab)
        kept = _lead(ranks, jnp.ones(scores.shape, jnp.int32), jnp.broadcast_to(limit[:, None], scores.shape[:2]))
    if filters.top_p is not None:
        mass = weights if filters.joint else jnp.where(kept, weights, 0)
        total = jnp.sum(mass, axis=-1)
        top_p = filters.top_p.astype(dtype)[:, None]
        limit = jnp.where(top_p < 1, jnp.maximum(top_p * total, jnp.finfo(dtype).tiny), jnp.inf)
        kept &= _lead(ranks, mass, limit)
    if filters.min_p is not None:
        least = filters.min_p.astype(dtype)[:, None] * jnp.max(weights, axis=-1)
        kept &= weights >= least[..., None]
    return kept


def node_laws(
    logits: Float[Array, "batch nodes vocab"], temperature: Float[Array, " batch"]
) -> Float[Array, "batch nodes vocab"]:
    """Probabilities of the tokens after each node, from `filter_logits`; for temperature 0 all on the argmax."""
    weights = jnp.exp(_scale(logits, temperature))
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    law = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(temperature[:, None, None] > 0, law, greedy)


def log_laws(
    logits: Float[Array, "batch nodes vocab"], temperature: Float[Array, " batch"]
) -> Float[Array, "batch nodes vocab"]:
    """Logarithms of `node_laws`, except that temperature 0 stands for 1: a law of one token says nothing."""
    return jax.nn.log_softmax(_scale(logits, temperature), axis=-1)


def penalise(
    logits: Float[Array, "batch nodes vocab"],
    tokens: Int[Array, "batch slots"],
    ancestors: Bool[Array, "batch nodes slots"],
    penalties: Penalties | None,
) -> Float[Array, "batch nodes vocab"]:
    """Logits after the penalties, exact at every node: it counts the committed text and the node's own root path.

    A token that the text or the prompt holds has a positive logit divided, a negative one multiplied by `repetition`.
    Then `frequency` times its count in the new text is subtracted, and `presence` if the count is not 0.

    Args:
        logits: the target's logits after each node; the result is float32 or wider.
        tokens: tokens of the tree, the root (the last emitted token) included; none before the first token.
        ancestors: row n is true at node n and its ancestors.
        penalties: factors and the counts of the text, the root not among them; None leaves the logits as they are.
    """
    if penalties is None:
        return logits
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    batch, nodes, vocab = logits.shape
    repetition, frequency, presence = (
        factor.astype(logits.dtype)[:, None, None]
        for factor in (penalties.repetition, penalties.frequency, penalties.presence)
    )

    def rule(
        logit: Float[Array, "batch nodes some"],
        count: Int[
            Array,
            (
                batch  # nodes some
            ),
        ],
        seen: Bool[Array, ...],
    ) -> Float[Array, "batch nodes some"]:
        logit = jnp.where(seen, jnp.where(logit > 0, logit / repetition, logit * repetition), logit)
        return logit - frequency * count - jnp.where(count > 0, presence, 0)

    counts = penalties.counts[:, None]
    committed = rule(logits, counts, penalties.prompted[:, None] | (counts > 0))
    if tokens.shape[1] == 0:
        return committed
    # Only the path's own tokens differ from the committed text's: their logits are worked out once more, and replaced.
    index = jnp.broadcast_to(tokens[:, None], ancestors.shape)
    same = (tokens[:, :, None] == tokens[:, None]).astype(jnp.int32)
    on_path = jnp.take_along_axis(penalties.counts, tokens, axis=1)[:, None] + ancestors.astype(jnp.int32) @ same
    replaced = rule(jnp.take_along_axis(logits, index, axis=-1), on_path, jnp.ones(ancestors.shape, bool))
    where = (jnp.arange(batch)[:, None, None], jnp.arange(nodes)[:, None], jnp.where(ancestors, index, vocab))
    return committed.at[where].set(replaced, mode="drop")


def count_tokens(
    penalties: Penalties | None, tokens: Int[Array, "batch steps"], count: Int[Array, " batch"]
) -> Penalties | None:
    """Adds the first `count` tokens of every row to the text."""
    if penalties is None:
        return None
    new = (jnp.arange(tokens.shape[1]) < count[:, None]).astype(jnp.int32)
    counts = penalties.counts.at[jnp.arange(tokens.shape[0])[:, None], tokens].add(new)
    return dataclasses.replace(penalties, counts=counts)


def _scale(
    logits: Float[Array, "batch nodes vocab"], temperature: Float[Array, " batch"]
) -> Float[Array, "batch nodes vocab"]:
    """(logits − their maximum) / temperature; 1 stands in for 0. Subtracting first keeps a tiny temperature finite."""
    divisor = jnp.where(temperature > 0, temperature, 1).astype(logits.dtype)[:, None, None]
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor


def _rank_keys(scores: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Unsigned integers in the scores' order; the two zeros are one."""
    bits = 8 * scores.dtype.itemsize
    words = lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), jnp.dtype(f"uint{bits}"))
    sign = jnp.asarray(1 << (bits - 1), words.dtype)
    return jnp.where(words >= sign, ~words, words | sign)


def _lead(
    ranks: UInt[Array, "batch nodes vocab"], amounts: Shaped[Array, "batch nodes vocab"], limit: Shaped[Array, ...]
) -> Bool[Array, "batch nodes vocab"]:
    """Where the amounts ranked before a token, equal ranks in the order of their ids, sum to less than `limit`.

    The boundary is the smallest number t for which the tokens ranked above t stay below the limit. Rounding cannot make
    the search inconsistent: a sum in a fixed order does not grow when some of its terms, none negative, become 0.
    """
    bits = 8 * ranks.dtype.itemsize

    def above(threshold: UInt[Array, "batch nodes"]) -> Shaped[Array, "batch nodes"]:
        return jnp.sum(jnp.where(ranks > threshold[..., None], amounts, 0), axis=-1, dtype=amounts.dtype)

    def settle_bit(step: Int[Array, ""], threshold: UInt[Array, "batch nodes"]) -> UInt[Array, "batch nodes"]:
        bit = jnp.left_shift(jnp.ones((), ranks.dtype), jnp.asarray(bits - 1 - step, ranks.dtype))
        return jnp.where(above(threshold | (bit - 1)) < limit, threshold, threshold | bit)

    boundary = lax.fori_loop(0, bits, settle_bit, jnp.zeros(ranks.shape[:2], ranks.dtype))
    tied = jnp.where(ranks == boundary[..., None], amounts, 0)
    before = above(boundary)[..., None] + jnp.cumsum(tied, axis=-1, dtype=amounts.dtype) - tied
    return (ranks > boundary[..., None]) | ((ranks == boundary[..., None]) & (before < limit[..., None]))
