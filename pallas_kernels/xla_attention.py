"""Attention of a block of nodes over themselves and a long committed prefix, in jnp.

The prefix is read block by block with an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), so temporaries
do not grow with the capacity of the cache. Query heads that share a key/value head are grouped, [batch, kv_heads,
group, nodes, head], and no key or value is repeated.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.containers import Prefix

PREFIX_BLOCK = 512


@functools.partial(jax.jit, static_argnames="window")  # one trace for all layers of a model
def tree_attention(
    query: Float[Array, "batch nodes heads head"],
    key: Float[Array, "batch nodes kv_heads head"],
    value: Float[Array, "batch nodes kv_heads head"],
    mask: Bool[Array, "batch nodes nodes"],
    prefix: Prefix | None,
    *,
    window: int = 0,
) -> Float[Array, "batch nodes heads head"]:
    """The nodes first, then the prefix blocks that hold a visible row, folded into one running softmax."""
    batch, nodes, heads, head = query.shape
    kv_heads = key.shape[2]
    q = query.reshape(batch, nodes, kv_heads, heads // kv_heads, head).transpose(0, 2, 3, 1, 4)
    softmax = _fold(_empty_softmax(q), q, key.swapaxes(1, 2), value.swapaxes(1, 2), mask)
    if prefix is not None:
        softmax = _fold_prefix(softmax, q, prefix, window)
    weight = jnp.where(softmax.weight > 0, softmax.weight, 1.0)[..., None]
    output = (softmax.weighted / weight).transpose(0, 3, 1, 2, 4)
    return output.reshape(query.shape).astype(query.dtype)


class _Softmax(NamedTuple):
    """Running softmax: largest score, sum of e^{score − largest}, and the values weighted by the same; all float32."""

    largest: Float[Array, "batch kv_heads group nodes"]
    weight: Float[Array, "batch kv_heads group nodes"]
    weighted: Float[Array, "batch kv_heads group nodes head"]


def _empty_softmax(q: Array) -> _Softmax:
    zeros = jnp.zeros(q.shape, jnp.float32)
    return _Softmax(jnp.full(q.shape[:-1], -jnp.inf), zeros[..., 0], zeros)


def _fold_prefix(softmax: _Softmax, q: Array, prefix: Prefix, window: int) -> _Softmax:
    capacity = prefix.keys.shape[2]
    if capacity <= PREFIX_BLOCK:
        return _fold(softmax, q, prefix.keys, prefix.values, _visible(prefix, jnp.arange(capacity), window))

    def fold_block(index: Int[Array, ""], softmax: _Softmax) -> _Softmax:
        # The last block of a capacity that is no multiple starts early; rows that an earlier block has read are masked.
        first = index * PREFIX_BLOCK
        start = jnp.minimum(first, capacity - PREFIX_BLOCK)
        keys, values = (lax.dynamic_slice_in_dim(x, start, PREFIX_BLOCK, axis=2) for x in (prefix.keys, prefix.values))
        rows = start + jnp.arange(PREFIX_BLOCK)
        return _fold(softmax, q, keys, values, _visible(prefix, rows, window) & (rows >= first))

    first_row = jnp.maximum(jnp.min(prefix.positions) - window + 1, 0) if window else 0
    last_block = -(-jnp.max(prefix.lengths) // PREFIX_BLOCK)
    return lax.fori_loop(first_row // PREFIX_BLOCK, last_block, fold_block, softmax)


def _visible(prefix: Prefix, rows: Int[Array, " rows"], window: int) -> Bool[Array, "batch nodes rows"]:
    seen = rows < prefix.lengths[:, None, None]
    if window:
        seen &= prefix.positions[:, :, None] - rows < window
    return seen


def _fold(softmax: _Softmax, q: Array, keys: Array, values: Array, visible: Array) -> _Softmax:
    """Add one block of keys and values to a running softmax; an all-masked row stays as it was."""
    scores = _einsum("bhgnd,bhtd->bhgnt", q, keys) * q.shape[-1] ** -0.5
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    # The result does not depend on the shift, so no gradient flows through it.
    largest = lax.stop_gradient(jnp.maximum(softmax.largest, jnp.max(scores, axis=-1)))
    shift = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = jnp.exp(scores - shift[..., None])
    kept = jnp.exp(softmax.largest - shift)
    return _Softmax(
        largest,
        kept * softmax.weight + jnp.sum(weights, axis=-1),
        kept[..., None] * softmax.weighted + _einsum("bhgnt,bhtd->bhgnd", weights.astype(values.dtype), values),
    )


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    """Products in the operands' dtype, sums in float32; float32 operands are not rounded to tf32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
