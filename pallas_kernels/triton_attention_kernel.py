"""Device code of `triton_attention`: partial softmaxes over shares of the visible rows, and their merger.

It imports Triton, so only `triton_attention` imports it, when a kernel is wanted. Rows of a program are (node, query
head) pairs of one key/value head, heads first, so that each key and value is read once for all of them. Scores are in
units of log 2.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# `no_type_check` keeps run-time shape checkers off: Triton reads the source and needs the plain function.


@triton.jit
@no_type_check
def attend_share(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    mask: tl.tensor,
    prefix_keys: tl.tensor,
    prefix_values: tl.tensor,
    lengths: tl.tensor,
    positions: tl.tensor,
    outputs: tl.tensor,
    largest: tl.tensor,
    weights: tl.tensor,
    nodes: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head: tl.constexpr,
    capacity: tl.constexpr,
    shares: tl.constexpr,
    window: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    node_block: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """Share 0 holds the nodes themselves, the others split the prefix.

    The shares are the grid's slowest axis: the first, a short one, then starts first and not when the others end.
    """
    row_block, pair, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    index = row_block * rows + tl.arange(0, rows)
    node = index // group
    inside = index < nodes * group
    dims = tl.arange(0, head)
    query_at = (batch * nodes + node) * (kv_heads * group) + kv_head * group + index % group
    q = tl.load(query + query_at[:, None] * head + dims[None, :], mask=inside[:, None], other=0.0)
    m = tl.full([rows], float("-inf"), tl.float32)
    w = tl.zeros([rows], tl.float32)
    o = tl.zeros([rows, head], tl.float32)
    scale = head**-0.5 * 1.4426950408889634

    if share == 0:
        for own_start in range(0, nodes, node_block):
            slot = own_start + tl.arange(0, node_block)
            own_at = ((batch * nodes + slot) * kv_heads + kv_head)[:, None] * head + dims[None, :]
            k_own = tl.load(key + own_at, mask=(slot < nodes)[:, None], other=0.0)
            v_own = tl.load(value + own_at, mask=(slot < nodes)[:, None], other=0.0)
            mask_at = (batch * nodes + node)[:, None] * nodes + slot[None, :]
            visible = tl.load(mask + mask_at, mask=inside[:, None] & (slot < nodes)[None, :], other=0) != 0
            s_own = tl.where(visible, _scores(q, k_own, form) * scale, float("-inf"))
            m, w, o = _fold(m, w, o, s_own, v_own, form)
    else:
        length = tl.load(lengths + batch)
        first = 0
        position = index * 0
        if window > 0:
            position = tl.load(positions + batch * nodes + node, mask=inside, other=2147483647)
            first = tl.maximum(tl.min(position, axis=0) - window + 1, 0) // block
        blocks = tl.maximum((length + block - 1) // block - first, 0)
        each = (blocks + shares - 1) // shares
        begin = (first + (share - 1) * each) * block
        end = tl.minimum(begin + each * block, length)
        cache_at = (batch * kv_heads + kv_head) * capacity * head
        for start in range(begin, end, block):
            other = start + tl.arange(0, block)
            at = cache_at + other[:, None] * head + dims[None, :]
            k = tl.load(prefix_keys + at, mask=(other < length)[:, None], other=0.0)
            s = _scores(q, k, form) * scale
            seen = (other < length)[None, :]
            if window > 0:
                seen = seen & (position[:, None] - other[None, :] < window)
            s = tl.where(seen, s, float("-inf"))
            v = tl.load(prefix_values + at, mask=(other < length)[:, None], other=0.0)
            m, w, o = _fold(m, w, o, s, v, form)

    part = (pair.to(tl.int64) * (shares + 1) + share) * (nodes * group) + index
    tl.store(outputs + part[:, None] * head + dims[None, :], o, mask=inside[:, None])
    tl.store(largest + part, m, mask=inside)
    tl.store(weights + part, w, mask=inside)


@triton.jit
@no_type_check
def merge_shares(
    outputs: tl.tensor,
    largest: tl.tensor,
    weights: tl.tensor,
    merged: tl.tensor,
    nodes: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head: tl.constexpr,
    parts: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Weighs the shares of one row by their log-sum-exp; 0 where it sees nothing."""
    row, column_block, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    part = tl.arange(0, padded)
    inside = part < parts
    columns = column_block * block + tl.arange(0, block)
    at = (pair.to(tl.int64) * parts + part) * (nodes * group) + row
    m = tl.load(largest + at, mask=inside, other=float("-inf"))
    top = tl.max(m, axis=0)
    scale = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(scale * tl.load(weights + at, mask=inside, other=0.0), axis=0)
    o = tl.load(outputs + at[:, None] * head + columns[None, :], mask=inside[:, None], other=0.0)
    mean = tl.sum(scale[:, None] * o, axis=0) / tl.where(total > 0.0, total, 1.0)
    merged_at = (batch * nodes + row // group) * (kv_heads * group) + kv_head * group + row % group
    tl.store(merged + merged_at * head + columns, mean.to(merged.dtype.element_ty))


@triton.jit
@no_type_check
def _scores(q: tl.tensor, k: tl.tensor, form: tl.constexpr) -> tl.tensor:
    return tl.dot(q, tl.trans(k), input_precision=form) if q.dtype == tl.float32 else tl.dot(q, tl.trans(k))


@triton.jit
@no_type_check
def _fold(
    m: tl.tensor, w: tl.tensor, o: tl.tensor, s: tl.tensor, v: tl.tensor, form: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds a block of scores and values to a running softmax; an all-masked row stays as it was."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    kept = tl.exp2(m - shift)
    p = tl.exp2(s - shift[:, None])
    w = kept * w + tl.sum(p, axis=1)
    o = kept[:, None] * o
    o = tl.dot(p, v, o, input_precision=form) if v.dtype == tl.float32 else tl.dot(p.to(v.dtype), v, o)
    return m_new, w, o
