"""`top_k` for NVIDIA GPUs as three Triton kernels, called through jax-triton.

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

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

GROUPS = 4096
CANDIDATES = 2048
MAX_K = 1024
SLAB = 256  # groups a program of the first kernel
PARTS = 31  # programs a row of the second kernel
TILE = 8192  # elements that one of them tests at once
BOUND_BITS = 20  # upper bits of the bound
RANK_ROWS = 16  # candidates a program of the third kernel
COUNTER_STRIDE = 32  # a cache line each: atomics on one line wait for each other


def unsupported(logits: Array, *, k: int) -> str | None:
    """What the kernels cannot take: every group has to hold an element, and k of them have to fit the candidates."""
    vocab = logits.shape[1]
    if k > MAX_K:
        return f"k is {k}, above {MAX_K}"
    if not GROUPS <= vocab < 2**30:
        return f"rows of {vocab} logits, expected {GROUPS} to 2^30 - 1"
    if not 0 < len(logits) * vocab < 2**31:
        return f"{len(logits)} rows of {vocab} logits, expected 1 to 2^31 - 1 logits in all"
    return None


def top_k(
    logits: Float[Array, "rows vocab"],
    *,
    k: int,
) -> tuple[Array, Array]:
    """Values and ids of the `k` largest elements of every row, best first; under `jax.vmap` all rows in one call.

    Args:
        logits: float32 or bfloat16.
        k: at most 1024.
    """

    @jax.custom_batching.custom_vmap
    def select(logits: Array) -> tuple[Array, Array]:
        return _call_kernels(logits, k)

    @select.def_vmap
    def select_batch(size: int, _: list[bool], logits: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        values, ids = select(logits.reshape(-1, logits.shape[-1]))
        shape = (size, -1, k)
        return (values.reshape(shape), ids.reshape(shape)), (True, True)

    return select(logits)


def _call_kernels(logits: Array, k: int) -> tuple[Array, Array]:
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_top_k_kernel import filter_row, group_maxima, rank_candidates

    rows, vocab = logits.shape
    count = jax.ShapeDtypeStruct((rows, COUNTER_STRIDE), jnp.int32)
    candidate = jax.ShapeDtypeStruct((rows, CANDIDATES), jnp.int32)
    maxima, counts = jax_triton.triton_call(
        logits,
        kernel=group_maxima,
        out_shape=(jax.ShapeDtypeStruct((rows, GROUPS), jnp.int32), count),
        grid=(rows, GROUPS // SLAB),
        num_warps=4,
        vocab=vocab,
        groups=GROUPS,
        slab=SLAB,
        depth=16,
        stride=COUNTER_STRIDE,
    )
    keys, ids, counts = jax_triton.triton_call(
        logits,
        maxima,
        counts,
        kernel=filter_row,
        out_shape=(candidate, candidate, count),
        input_output_aliases={2: 2},
        grid=(rows, PARTS),
        num_warps=8,
        vocab=vocab,
        groups=GROUPS,
        k=k,
        capacity=CANDIDATES,
        parts=PARTS,
        tile=TILE,
        bits=BOUND_BITS,
        stride=COUNTER_STRIDE,
    )
    return jax_triton.triton_call(
        logits,
        counts,
        keys,
        ids,
        kernel=rank_candidates,
        out_shape=(
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            candidate,
            candidate,
        ),
        input_output_aliases={2: 2, 3: 3},
        grid=(rows, CANDIDATES // RANK_ROWS),
        num_warps=4,
        vocab=vocab,
        k=k,
        capacity=CANDIDATES,
        own=RANK_ROWS,
        chunk=128,
        tile=2048,
        stride=COUNTER_STRIDE,
    )[:2]
