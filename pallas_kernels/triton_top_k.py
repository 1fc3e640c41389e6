"""`top_k` for NVIDIA GPUs as three Triton kernels, called through jax-triton; import it only where both are installed.

1. Maxima: element i of a row belongs to group i mod `GROUPS`, so that a warp reads neighbours and a row that is sorted
   by id spreads its best elements over all groups.
2. Filter: the k-th largest maximum bounds the k-th largest element from below, because each of the k best groups holds
   an element at least as large. A bisection over the maxima finds the bound, rounded down to its upper bits; every
   program of the row repeats it, which is cheaper than another launch. All elements above become candidates, about 550
   for k = 512 of 248,320 independent logits.
3. Rank: a candidate's place is the number of candidates above it. No two are equal, as the id is part of the key.

A row with more than `CANDIDATES` of them (many ties, or its best elements crowded into few groups) is selected exactly
by one program of the third kernel, in about a hundred times the time.

Keys order floats as `lax.top_k` does: by their bits, so that −0 is below 0 and a positive NaN above infinity.
"""

# ruff: noqa: ANN001, ANN202, PLR0913 - what a Triton kernel takes and returns has no Python type
from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jaxtyping import Array, Float

GROUPS = 4096
CANDIDATES = 2048
MAX_K = 1024


def unsupported(logits: Array, *, k: int) -> str | None:
    """What the kernels cannot take: every group has to hold an element, and k of them have to fit the candidates."""
    vocab = logits.shape[1]
    if k > MAX_K:
        return f"k is {k}, above {MAX_K}"
    if not GROUPS <= vocab < 2**30:
        return f"rows of {vocab} logits, expected {GROUPS} to 2^30 - 1"
    return None if len(logits) else "no rows"


def top_k(
    logits: Float[Array, "rows vocab"],
    *,
    k: int,
    slab: int = 256,
    parts: int = 8,
    tile: int = 4096,
    bits: int = 20,
    rank_rows: int = 64,
) -> tuple[Array, Array]:
    """Values and ids of the `k` largest elements of every row, best first; under `jax.vmap` all rows in one call.

    Args:
        logits: float32 or bfloat16.
        k: at most 1024.
        slab: groups per program of the first kernel.
        parts: programs per row of the second kernel.
        tile: elements that one of them tests at once.
        bits: upper bits of the bound.
        rank_rows: candidates per program of the third kernel.
    """
    sizes = {"k": k, "slab": slab, "parts": parts, "tile": tile, "bits": bits, "rank_rows": rank_rows}

    @jax.custom_batching.custom_vmap
    def select(logits: Array) -> tuple[Array, Array]:
        return _call_kernels(logits, **sizes)

    @select.def_vmap
    def select_batch(size: int, _: list[bool], logits: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        values, ids = select(logits.reshape(-1, logits.shape[-1]))
        shape = (size, -1, k)
        return (values.reshape(shape), ids.reshape(shape)), (True, True)

    return select(logits)


def _call_kernels(
    logits: Array, *, k: int, slab: int, parts: int, tile: int, bits: int, rank_rows: int
) -> tuple[Array, Array]:
    rows, vocab = logits.shape
    count = jax.ShapeDtypeStruct((rows,), jnp.int32)
    candidate = jax.ShapeDtypeStruct((rows, CANDIDATES), jnp.int32)
    maxima, counts = jax_triton.triton_call(
        logits,
        kernel=_group_maxima,
        out_shape=(jax.ShapeDtypeStruct((rows, GROUPS), jnp.int32), count),
        grid=(rows, GROUPS // slab),
        num_warps=4,
        vocab=vocab,
        groups=GROUPS,
        slab=slab,
        depth=16,
    )
    keys, ids, counts = jax_triton.triton_call(
        logits,
        maxima,
        counts,
        kernel=_filter,
        out_shape=(candidate, candidate, count),
        input_output_aliases={2: 2},
        grid=(rows, parts),
        num_warps=8,
        vocab=vocab,
        groups=GROUPS,
        k=k,
        capacity=CANDIDATES,
        parts=parts,
        tile=tile,
        bits=bits,
    )
    return jax_triton.triton_call(
        logits,
        counts,
        keys,
        ids,
        kernel=_rank,
        out_shape=(
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            candidate,
            candidate,
        ),
        input_output_aliases={2: 2, 3: 3},
        grid=(rows, CANDIDATES // rank_rows),
        num_warps=4,
        vocab=vocab,
        k=k,
        capacity=CANDIDATES,
        own=rank_rows,
        chunk=128,
        tile=2048,
    )[:2]


@triton.jit
@no_type_check
def _key(x):
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _step_up(low, bit):
    # int32 as an unsigned number with its sign flipped: adding 2^31 wraps INT_MIN around to 0.
    return low + (tl.full((), 1, tl.int32) << bit)


@triton.jit
@no_type_check
def _group_maxima(
    logits,
    maxima,
    counts,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    slab: tl.constexpr,
    depth: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        tl.store(counts + row, 0)
    group = part * slab + tl.arange(0, slab)
    best = tl.full((slab,), -(2**31), tl.int32)
    for start in range(0, vocab, groups * depth):
        at = start + tl.arange(0, depth)[:, None] * groups + group[None, :]
        keys = _key(tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0))
        best = tl.maximum(best, tl.max(tl.where(at < vocab, keys, -(2**31)), axis=0))
    tl.store(maxima + row * groups + group, best)


@triton.jit
@no_type_check
def _filter(
    logits,
    maxima,
    counts_in,
    keys_out,
    ids_out,
    counts,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    k: tl.constexpr,
    capacity: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    bits: tl.constexpr,
):
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
        place = tl.atomic_add(counts + row + tl.zeros((tile,), tl.int32), 1, mask=above, sem="relaxed")
        kept = above & (place < capacity)
        tl.store(keys_out + row * capacity + place, keys, mask=kept)
        tl.store(ids_out + row * capacity + place, at, mask=kept)


@triton.jit
@no_type_check
def _rank(
    logits,
    counts,
    keys_in,
    ids_in,
    values_out,
    ids_out,
    keys,
    ids,
    vocab: tl.constexpr,
    k: tl.constexpr,
    capacity: tl.constexpr,
    own: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + row)
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
def _pairs(keys, ids, row, at, count, capacity: tl.constexpr):
    """Candidates as numbers that fall with the order: key first, then the lower id; beyond `count` the lowest."""
    high = tl.load(keys + row * capacity + at, mask=at < count, other=-(2**31)).to(tl.int64)
    low = tl.load(ids + row * capacity + at, mask=at < count, other=0x7FFFFFFF).to(tl.int64)
    return (high << 32) | (0x7FFFFFFF - low)


@triton.jit
@no_type_check
def _place(
    keys,
    ids,
    values_out,
    ids_out,
    row,
    start,
    count,
    k: tl.constexpr,
    capacity: tl.constexpr,
    own: tl.constexpr,
    chunk: tl.constexpr,
):
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
    logits, keys_out, ids_out, row, vocab: tl.constexpr, k: tl.constexpr, capacity: tl.constexpr, tile: tl.constexpr
):
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
