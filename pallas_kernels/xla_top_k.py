"""`top_k` in jnp: two selections, for rows so long that the first one pays."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

GROUP = 128  # elements


def top_k(logits: Float[Array, "rows vocab"], *, k: int) -> tuple[Array, Array]:
    """Top-k inside the k groups of neighbours with the largest maxima.

    An element outside of them is beaten by one element of each: by a larger one, or by an equal one of a lower id,
    because groups hold neighbours and the lower group wins a tie. The groups stay in their order, so that the second
    selection sees ids in theirs.
    """
    logits = logits.astype(jnp.float32)
    rows, vocab = logits.shape
    groups = -(-vocab // GROUP)
    if groups <= 2 * k:  # nothing to gain
        values, ids = lax.top_k(logits, k)
        return values, ids.astype(jnp.int32)
    padded = jnp.pad(logits, ((0, 0), (0, groups * GROUP - vocab)), constant_values=-jnp.inf)
    padded = padded.reshape(rows, groups, GROUP)
    best = jnp.sort(lax.top_k(jnp.max(padded, axis=-1), k)[1], axis=-1)
    kept = jnp.take_along_axis(padded, best[..., None], axis=1, mode="promise_in_bounds")
    values, index = lax.top_k(kept.reshape(rows, -1), k)
    group = jnp.take_along_axis(best, index // GROUP, axis=1, mode="promise_in_bounds")
    return values, (group * GROUP + index % GROUP).astype(jnp.int32)
