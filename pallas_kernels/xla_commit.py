"""Commit of an accepted path into the caches of all layers, in jnp: what leaves no trace of the rejected nodes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.xla import gdn_commit, take_nodes


def commit_states(
    states: tuple[Float[Array, "batch value_heads key value"], ...],
    keys: tuple[Float[Array, "batch nodes key_heads key"], ...],
    updates: tuple[Float[Array, "batch nodes value_heads value"], ...],
    path_decays: tuple[Float[Array, "batch nodes value_heads"], ...],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
) -> tuple[Float[Array, "batch value_heads key value"], ...]:
    """One layer after the other."""
    layers = zip(states, keys, updates, path_decays, strict=True)
    return tuple(gdn_commit(*layer, path, count) for layer in layers)


def commit_rows(
    windows: tuple[Float[Array, "batch window channels"], ...],
    inputs: tuple[Float[Array, "batch nodes channels"], ...],
    taps: Int[Array, "batch nodes width"],
    caches: tuple[Shaped[Array, "batch kv_heads capacity head"], ...],
    rows: tuple[Shaped[Array, "batch nodes kv_heads head"], ...],
    lengths: Int[Array, " batch"],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Gathers along the path; a window becomes what the leaf's successor would read, its taps window − 1 … 0."""
    leaf = jnp.take_along_axis(path, jnp.maximum(count - 1, 0)[:, None], axis=1)

    def advance(window: Array, channels: Array) -> Array:
        newest_first = take_nodes(taps, leaf)[:, 0, : window.shape[1]]
        history = jnp.concatenate([window, channels], axis=1)
        advanced = take_nodes(history, newest_first[:, ::-1] + window.shape[1])
        return jnp.where(count[:, None, None] > 0, advanced, window)

    return (
        tuple(advance(*layer) for layer in zip(windows, inputs, strict=True)),
        tuple(
            write_rows(cache, take_nodes(new, path), lengths, count) for cache, new in zip(caches, rows, strict=True)
        ),
    )


def write_rows(
    cache: Shaped[Array, "batch kv_heads capacity head"],
    rows: Shaped[Array, "batch steps kv_heads head"],
    start: Int[Array, " batch"],
    count: Int[Array, " batch"],
) -> Shaped[Array, "batch kv_heads capacity head"]:
    """Writes the first `count` rows at `start`; the others write back what is there, so that the cache stays in place.

    A scatter that drops them by an index out of bounds would, for a single row, become a selection between two whole
    caches. Rows beyond the capacity, such as a prompt's padding, fall on the last row, which is never valid.
    """
    batch, steps = rows.shape[:2]
    step = jnp.arange(steps)
    index = (jnp.arange(batch)[:, None], slice(None), jnp.minimum(start[:, None] + step, cache.shape[2] - 1))
    kept = jnp.where((step < count[:, None])[..., None, None], rows, cache[index])
    return cache.at[index].set(kept, mode="promise_in_bounds")
