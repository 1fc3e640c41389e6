"""Slow oracles in numpy: one token at a time, one state per node, one dense softmax per row.

They are written from the recurrences, not from the chunked algebra of the fast forms, and compute in the precision of
their first argument (float64 stays float64, everything narrower is float32). They cannot be traced, and the arrays in
their results are numpy's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from pallas_kernels.constants import MIN_LOG_DECAY, NORM_EPS
from pallas_kernels.containers import GdnChunkResult, GdnTreeResult, Prefix


def l2_normalise(x: Float[np.ndarray, "... key"]) -> Float[np.ndarray, "... key"]:
    """Unit vectors along the last axis, x / √(Σ x² + 1e-6)."""
    (x,) = _promote(x)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(NORM_EPS))


def gdn_tree_verify(
    query: Float[np.ndarray, "batch nodes key_heads key"],
    key: Float[np.ndarray, "batch nodes key_heads key"],
    value: Float[np.ndarray, "batch nodes value_heads value"],
    log_decay: Float[np.ndarray, "batch nodes value_heads"],
    beta: Float[np.ndarray, "batch nodes value_heads"],
    ancestors: Bool[np.ndarray, "batch nodes nodes"],
    state: Float[np.ndarray, "batch value_heads key value"],
) -> GdnTreeResult:
    """One state per node, each made from its parent's by a single step of the gated delta rule."""
    query, key, value, log_decay, beta, state = _promote(query, key, value, log_decay, beta, state)
    q, k, g = _queries(query, value), _keys(key, value), np.maximum(log_decay, MIN_LOG_DECAY)
    output, update, path_decay = np.zeros_like(value), np.zeros_like(value), np.zeros_like(g)
    for row in range(value.shape[0]):
        node_states: list[np.ndarray] = []
        for node in range(value.shape[1]):
            older = np.flatnonzero(ancestors[row, node, :node])
            parent = older[-1] if older.size else None  # ancestors have smaller indices; the nearest one is the parent
            before = state[row] if parent is None else node_states[parent]
            path_decay[row, node] = g[row, node] + (0 if parent is None else path_decay[row, parent])
            step = _delta_step(before, q[row, node], k[row, node], value[row, node], g[row, node], beta[row, node])
            output[row, node], update[row, node] = step.output, step.update
            node_states.append(step.state)
    return GdnTreeResult(output, update, path_decay)  # pyrefly: ignore[bad-argument-type]


def commit_states(
    states: tuple[Float[np.ndarray, "batch value_heads key value"], ...],
    keys: tuple[Float[np.ndarray, "batch nodes key_heads key"], ...],
    updates: tuple[Float[np.ndarray, "batch nodes value_heads value"], ...],
    path_decays: tuple[Float[np.ndarray, "batch nodes value_heads"], ...],
    path: Int[np.ndarray, "batch steps"],
    count: Int[np.ndarray, " batch"],
) -> tuple[Float[np.ndarray, "batch value_heads key value"], ...]:
    """Walk the accepted path from the root in every layer, S ← e^{G_j − G_parent} S + k_j u_jᵀ."""
    committed = []
    for layer in zip(states, keys, updates, path_decays, strict=True):
        state, key, update, path_decay = _promote(*layer)
        k, state = _keys(key, update), state.copy()
        for row in range(state.shape[0]):
            before = np.zeros_like(path_decay[row, 0])
            for node in path[row, : count[row]]:
                decay = np.exp(path_decay[row, node] - before)
                state[row] = decay[:, None, None] * state[row] + k[row, node][:, :, None] * update[row, node][:, None]
                before = path_decay[row, node]
        committed.append(state)
    return tuple(committed)


def commit_rows(
    windows: tuple[Float[np.ndarray, "batch window channels"], ...],
    inputs: tuple[Float[np.ndarray, "batch nodes channels"], ...],
    taps: Int[np.ndarray, "batch nodes width"],  # noqa: ARG001 - the path says it too
    caches: tuple[Shaped[np.ndarray, "batch kv_heads capacity head"], ...],
    rows: tuple[Shaped[np.ndarray, "batch nodes kv_heads head"], ...],
    lengths: Int[np.ndarray, " batch"],
    path: Int[np.ndarray, "batch steps"],
    count: Int[np.ndarray, " batch"],
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """One node after the other: a window drops its oldest row for the node's, a cache gets the node's row."""
    windows, caches = (tuple(x.copy() for x in group) for group in (windows, caches))
    for row in range(len(count)):
        for step, node in enumerate(path[row, : count[row]]):
            for window, channels in zip(windows, inputs, strict=True):
                window[row] = np.concatenate([window[row, 1:], channels[row, node][None]])
            for cache, new in zip(caches, rows, strict=True):
                cache[row, :, min(lengths[row] + step, cache.shape[2] - 1)] = new[row, node]
    return windows, caches


def gdn_chunk(
    query: Float[np.ndarray, "batch tokens key_heads key"],
    key: Float[np.ndarray, "batch tokens key_heads key"],
    value: Float[np.ndarray, "batch tokens value_heads value"],
    log_decay: Float[np.ndarray, "batch tokens value_heads"],
    beta: Float[np.ndarray, "batch tokens value_heads"],
    valid: Bool[np.ndarray, "batch tokens"],
    state: Float[np.ndarray, "batch value_heads key value"],
) -> GdnChunkResult:
    """The recurrence, token by token; invalid tokens neither decay nor write."""
    query, key, value, log_decay, beta, state = _promote(query, key, value, log_decay, beta, state)
    q, k, g = _queries(query, value), _keys(key, value), np.maximum(log_decay, MIN_LOG_DECAY)
    output, state = np.zeros_like(value), state.copy()
    g, beta = g * valid[..., None], beta * valid[..., None]
    for row, token in np.ndindex(*valid.shape):
        step = _delta_step(state[row], q[row, token], k[row, token], value[row, token], g[row, token], beta[row, token])
        state[row], output[row, token] = step.state, step.output
    return GdnChunkResult(output, state)  # pyrefly: ignore[bad-argument-type]


def tree_conv(
    inputs: Float[np.ndarray, "batch nodes channels"],
    window: Float[np.ndarray, "batch window channels"],
    kernel: Float[np.ndarray, "width channels"],
    taps: Int[np.ndarray, "batch nodes width"],
    *,
    widths: tuple[int, ...],
) -> tuple[Float[np.ndarray, "batch nodes _"], ...]:
    """SiLU of the sum over taps; a negative tap counts back from the end of the window."""
    x, committed, weight = _promote(inputs, window, kernel)
    width, result = kernel.shape[0], np.zeros_like(x)
    for row, node in np.ndindex(*inputs.shape[:2]):
        for tap, slot in enumerate(taps[row, node]):
            source = x[row, slot] if slot >= 0 else committed[row, slot]
            result[row, node] += weight[width - 1 - tap] * source
    activated = (result / (1 + np.exp(-result))).astype(inputs.dtype)
    return tuple(np.split(activated, np.cumsum(widths[:-1]), axis=-1))


def tree_attention(
    query: Float[np.ndarray, "batch nodes heads head"],
    key: Float[np.ndarray, "batch nodes kv_heads head"],
    value: Float[np.ndarray, "batch nodes kv_heads head"],
    mask: Bool[np.ndarray, "batch nodes nodes"],
    prefix: Prefix | None,
    *,
    window: int = 0,
) -> Float[np.ndarray, "batch nodes heads head"]:
    """One dense softmax per row and head over the visible prefix rows followed by the visible nodes."""
    q, k, v = _promote(query, key, value)
    batch, nodes, heads, head = q.shape
    group, result = heads // k.shape[2], np.zeros_like(q)
    for row, node, h in np.ndindex(batch, nodes, heads):
        kept = mask[row, node]
        keys, values = k[row, kept, h // group], v[row, kept, h // group]
        if prefix is not None:
            rows = np.arange(prefix.keys.shape[2])
            seen = rows < prefix.lengths[row]
            if window:
                seen &= prefix.positions[row, node] - rows < window
            keys = np.concatenate([prefix.keys[row, h // group, seen].astype(q.dtype), keys])
            values = np.concatenate([prefix.values[row, h // group, seen].astype(q.dtype), values])
        if len(keys):
            scores = keys @ q[row, node, h] * q.dtype.type(head**-0.5)
            weights = np.exp(scores - scores.max())
            result[row, node, h] = weights @ values / weights.sum()
    return result.astype(query.dtype)


def top_k(
    logits: Float[np.ndarray, "rows vocab"], *, k: int
) -> tuple[Float[np.ndarray, "rows k"], Int[np.ndarray, "rows k"]]:
    """A stable sort by the bits of the float32 values, the largest first."""
    values = logits.astype(np.float32)
    bits = values.view(np.int32).astype(np.int64)
    keys = np.where(bits < 0, -(2**31) - bits - 1, bits)
    ids = np.argsort(-keys, axis=-1, kind="stable")[:, :k].astype(np.int32)
    return np.take_along_axis(values, ids, axis=-1), ids


def _promote(*arrays: np.ndarray) -> list[np.ndarray]:
    """Every array in float64 when the first one is, else in float32."""
    dtype = np.float64 if arrays[0].dtype == np.float64 else np.float32
    return [np.asarray(array).astype(dtype) for array in arrays]


def _queries(query: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Normalised, scaled queries, one per value head."""
    return _keys(query, value) * query.dtype.type(query.shape[-1] ** -0.5)


def _keys(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Normalised keys, one per value head: value head h reads key head h // (value_heads / key_heads)."""
    return np.repeat(l2_normalise(key), value.shape[2] // key.shape[2], axis=2)


class _Step(NamedTuple):
    state: np.ndarray
    output: np.ndarray
    update: np.ndarray


def _delta_step(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> _Step:
    """S ← e^g S; u = β (v − Sᵀk); S ← S + k uᵀ; o = Sᵀq, for every value head (Yang et al. 2024, arXiv 2412.06464)."""
    state = np.exp(g)[:, None, None] * state
    update = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * update[:, None, :]
    return _Step(state, np.einsum("hkv,hk->hv", state, q), update)
