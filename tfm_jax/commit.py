"""Commit: the accepted path enters the caches, once, and nothing else does.

Verification wrote nothing, so there is nothing to roll back: rejected nodes simply never arrive here.
"""

from __future__ import annotations

from jaxtyping import Array, Int

from pallas_kernels import commit_rows, commit_states
from tfm_jax.state import DeltaState, DeltaTape, KVCache, KVRows, TargetState


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
    pairs = list(zip(state.layers, values, strict=True))
    deltas = [(cache, tape) for cache, tape in pairs if isinstance(cache, DeltaState) and isinstance(tape, DeltaTape)]
    attention = [(cache, rows) for cache, rows in pairs if isinstance(cache, KVCache) and isinstance(rows, KVRows)]
    if len(deltas) + len(attention) < len(pairs):
        names = sorted({f"{type(cache).__name__} with {type(rows).__name__}" for cache, rows in pairs})
        message = f"these layers and values do not belong together: {', '.join(names)}"
        raise TypeError(message)
    states = commit_states(
        tuple(cache.recurrent for cache, _ in deltas),
        tuple(tape.key for _, tape in deltas),
        tuple(tape.update for _, tape in deltas),
        tuple(tape.path_decay for _, tape in deltas),
        path,
        count,
    )
    windows, caches = commit_rows(
        tuple(cache.conv for cache, _ in deltas),
        tuple(tape.inputs for _, tape in deltas),
        taps,
        tuple(x for cache, _ in attention for x in (cache.keys, cache.values)),
        tuple(x for _, rows in attention for x in (rows.keys, rows.values)),
        state.lengths,
        path,
        count,
    )
    new_deltas = map(DeltaState, states, windows)
    new_attention = map(KVCache, caches[::2], caches[1::2])
    layers = tuple(next(new_deltas if isinstance(cache, DeltaState) else new_attention) for cache, _ in pairs)
    return TargetState(state.lengths + count, layers)
