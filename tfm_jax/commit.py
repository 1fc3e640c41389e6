"""Commit: the accepted path enters the caches, once, and nothing else does.

Verification wrote nothing, so there is nothing to roll back: rejected nodes simply never arrive here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels import gdn_commit
from tfm_jax.state import DeltaState, DeltaTape, KVCache, KVRows, TargetState, write_rows


def commit_path(
    state: TargetState,
    values: tuple[KVRows | DeltaTape, ...],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    taps: Int[Array, "batch nodes width"],
) -> TargetState:
    """Advances every cache along the first `count` nodes of `path`; rows with count 0 stay bit for bit as they were.

    Args:
        state: state at the committed length.
        values: per layer, what `Target.verify` returned.
        path: accepted nodes, root first; entries at and beyond `count` are ignored but must be valid indices.
        count: accepted nodes, the root included; 0 for finished rows.
        taps: as given to `Target.verify`.
    """

    def commit(cache: KVCache | DeltaState, rows: KVRows | DeltaTape) -> KVCache | DeltaState:
        if isinstance(cache, DeltaState) and isinstance(rows, DeltaTape):
            return _commit_delta(cache, rows, path, count, taps)
        if isinstance(cache, KVCache) and isinstance(rows, KVRows):
            accepted = KVRows(take_nodes(rows.keys, path), take_nodes(rows.values, path))
            return write_rows(cache, accepted, state.lengths, count)
        message = f"a layer with a {type(cache).__name__} cannot commit {type(rows).__name__}"
        raise TypeError(message)

    layers = tuple(commit(cache, rows) for cache, rows in zip(state.layers, values, strict=True))
    return TargetState(state.lengths + count, layers)


def take_nodes(
    x: Shaped[Array, "batch nodes *rest"], path: Int[Array, "batch steps"]
) -> Shaped[Array, "batch steps *rest"]:
    """Rows of the nodes on a path."""
    return jax.vmap(lambda rows, index: rows[index])(x, path)


def _commit_delta(
    state: DeltaState,
    tape: DeltaTape,
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    taps: Int[Array, "batch nodes width"],
) -> DeltaState:
    recurrent = gdn_commit(state.recurrent, tape.key, tape.update, tape.path_decay, path, count)
    window = state.conv.shape[1]
    # The new window is what the leaf's successor would read: taps window−1 .. 0 of the leaf, oldest first.
    leaf = jnp.take_along_axis(path, jnp.maximum(count - 1, 0)[:, None], axis=1)
    newest_first = take_nodes(taps, leaf)[:, 0, :window]
    history = jnp.concatenate([state.conv, tape.inputs], axis=1)
    advanced = take_nodes(history, newest_first[:, ::-1] + window)
    return DeltaState(recurrent, jnp.where(count[:, None, None] > 0, advanced, state.conv))
