"""Device code of `triton_top_k`; it imports Triton, so only `triton_top_k` imports it, when a kernel is wanted.

`no_type_check` keeps run-time shape checkers off: Triton reads the source and needs the plain function.
"""

# ruff: noqa: ARG001 - an output that is written in place is named twice
from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _key(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _step_up(low: tl.tensor, bit: tl.tensor) -> tl.tensor:
    # int32 as an unsigned number with its sign flipped: adding 2^31 wraps INT_MIN around to 0.
    return low + (tl.full((), 1, tl.int32) << bit)


@triton.jit
@no_type_check
def group_maxima(
    logits: tl.tensor,
    maxima: tl.tensor,
    counts: tl.tensor,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    slab: tl.constexpr,
    depth: tl.constexpr,
    stride: tl.constexpr,
) -> None:
    """The largest key of every group; also sets the row's count of candidates to 0."""
    row, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        tl.store(counts + row * stride, 0)
    group = part * slab + tl.arange(0, slab)
    best = tl.full((slab,), -(2**31), tl.int32)
    for start in range(0, vocab, groups * depth):
        at = start + tl.arange(0, depth)[:, None] * groups + group[None, :]
        keys = _key(tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0))
        best = tl.maximum(best, tl.max(tl.where(at < vocab, keys, -(2**31)), axis=0))
    tl.store(maxima + row * groups + group, best)


@triton.jit
@no_type_check
def filter_row(
    logits: tl.tensor,
    maxima: tl.tensor,
    counts_in: tl.tensor,
    keys_out: tl.tensor,
    ids_out: tl.tensor,
    counts: tl.tensor,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    k: tl.constexpr,
    capacity: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    bits: tl.constexpr,
    stride: tl.constexpr,
) -> None:
    """Collects the elements of a row that can be among its best."""
    row, part = tl.program_id(0), tl.program_id(1)
    best = tl.load(maxima + row * groups + tl.arange(0, groups))
    bound = tl.full((), -(2**31), tl.int32)
    for level in range(bits):
        higher = _step_up(bound, 31 - level)
        bound = tl.where(tl.sum((best >= higher).to(tl.int32)) >= k, higher, bound)
    for start in range(part * tile, vocab, parts * tile):
        at = start + tl.arange(0, tile)
        keys = _key(tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0))
        above = (keys >= bound) & (at < vocab)
        place = tl.atomic_add(counts + row * stride + tl.zeros((tile,), tl.int32), 1, mask=above, sem="relaxed")
        kept = above & (place < capacity)
        tl.store(keys_out + row * capacity + place, keys, mask=kept)
        tl.store(ids_out + row * capacity + place, at, mask=kept)


@triton.jit
@no_type_check
def rank_candidates(
    logits: tl.tensor,
    counts: tl.tensor,
    keys_in: tl.tensor,
    ids_in: tl.tensor,
    values_out: tl.tensor,
    ids_out: tl.tensor,
    keys: tl.tensor,
    ids: tl.tensor,
    vocab: tl.constexpr,
    k: tl.constexpr,
    capacity: tl.constexpr,
    own: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    stride: tl.constexpr,
) -> None:
    """Writes each candidate to its place."""
    row, part = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + row * stride)
    if count > capacity:
        if part == 0:
            _select_exactly(logits, keys, ids, row, vocab, k, capacity, tile)
            tl.debug_barrier()
            for start in range(0, k, own):
                _place(keys, ids, values_out, ids_out, row, start, k, k, capacity, own, chunk)
    elif part * own < count:
        _place(keys, ids, values_out, ids_out, row, part * own, count, k, capacity, own, chunk)


@triton.jit
@no_type_check
def _pairs(
    keys: tl.tensor, ids: tl.tensor, row: tl.tensor, at: tl.tensor, count: tl.tensor, capacity: tl.constexpr
) -> tl.tensor:
    """Candidates as numbers that fall with the order: key first, then the lower id; beyond `count` the lowest."""
    high = tl.load(keys + row * capacity + at, mask=at < count, other=-(2**31)).to(tl.int64)
    low = tl.load(ids + row * capacity + at, mask=at < count, other=0x7FFFFFFF).to(tl.int64)
    return (high << 32) | (0x7FFFFFFF - low)


@triton.jit
@no_type_check
def _place(
    keys: tl.tensor,
    ids: tl.tensor,
    values_out: tl.tensor,
    ids_out: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    k: tl.constexpr,
    capacity: tl.constexpr,
    own: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    at = start + tl.arange(0, own)
    mine = _pairs(keys, ids, row, at, count, capacity)
    rank = tl.zeros((own,), tl.int32)
    for other in range(0, count, chunk):
        theirs = _pairs(keys, ids, row, other + tl.arange(0, chunk), count, capacity)
        rank += tl.sum((theirs[None, :] > mine[:, None]).to(tl.int32), axis=1)
    chosen = (at < count) & (rank < k)
    key = (mine >> 32).to(tl.int32)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(values_out + row * k + rank, value, mask=chosen)
    tl.store(ids_out + row * k + rank, 0x7FFFFFFF - (mine & 0x7FFFFFFF).to(tl.int32), mask=chosen)


@triton.jit
@no_type_check
def _select_exactly(
    logits: tl.tensor,
    keys_out: tl.tensor,
    ids_out: tl.tensor,
    row: tl.tensor,
    vocab: tl.constexpr,
    k: tl.constexpr,
    capacity: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Writes the k best of a whole row, in no order: all above the k-th largest, and its equals with the lowest ids."""
    bound = tl.full((), -(2**31), tl.int32)
    for level in range(32):
        higher = _step_up(bound, 31 - level)
        total = tl.zeros((tile,), tl.int32)
        for start in range(0, vocab, tile):
            at = start + tl.arange(0, tile)
            keys = _key(tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0))
            total += ((keys >= higher) & (at < vocab)).to(tl.int32)
        bound = tl.where(tl.sum(total) >= k, higher, bound)
    above_total = tl.zeros((tile,), tl.int32)
    for start in range(0, vocab, tile):
        at = start + tl.arange(0, tile)
        keys = _key(tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0))
        above_total += ((keys > bound) & (at < vocab)).to(tl.int32)
    next_above, next_equal = tl.zeros((), tl.int32), tl.sum(above_total)
    for start in range(0, vocab, tile):
        at = start + tl.arange(0, tile)
        keys = _key(tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0))
        above, equal = (keys > bound) & (at < vocab), (keys == bound) & (at < vocab)
        place = (
            tl.where(above, next_above + tl.cumsum(above.to(tl.int32)), next_equal + tl.cumsum(equal.to(tl.int32))) - 1
        )
        kept = (above | equal) & (place < k)
        tl.store(keys_out + row * capacity + place, keys, mask=kept)
        tl.store(ids_out + row * capacity + place, at, mask=kept)
        next_above += tl.sum(above.to(tl.int32))
        next_equal += tl.sum(equal.to(tl.int32))
