"""What every Mosaic GPU kernel here needs: swizzled tiles, products that wait, float32 split into bf16 parts.

Float32 products have no float32 tensor cores to run on. A float32 matrix is instead the sum of bf16 parts, high bits
first, and a product is the sum of the products of its parts that are large enough to count: two parts each and three
products leave about 5e-6 relative error, three parts and six products float32's own rounding. Unlike tf32, bf16 keeps
the left operand in registers and takes the right one in either orientation.

The interpreter is more permissive than the GPU lowering (it knows any numpy operation, and lets a missing
`commit_smem` pass), so every interpreted test goes with a cross-lowering of the same shape.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Precision

if TYPE_CHECKING:
    from collections.abc import Sequence

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
WARPGROUP = 128  # threads that issue one WGMMA together
TILE_ROWS = 64  # rows of a WGMMA
WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)  # one value per row of a WGMMA tile
COLS = WGMMA.reduce(0)  # one value per column

type Ref = Any  # memory or a view of it, for which jax has no public name


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple that is not below x."""
    return -(-x // multiple) * multiple


def num_parts(precision: Precision) -> int:
    """Parts into which a float32 operand is split."""
    return {"default": 2, "highest": 3}[precision]


def tile(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, lanes: int = 0) -> pl.MemoryRef:
    """Shared memory swizzled for TMA and WGMMA in runs of `lanes` columns, by default as wide as the rows allow.

    Two operands of one WGMMA that are both in shared memory need the same run length in bytes.
    """
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle((lanes or shape[-1]) * bits)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)),
    )


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Float32 registers as bf16 parts, high bits first, whose sum is x up to 2^(-8 parts)."""
    result = []
    for _ in range(parts - 1):
        # Without the barrier LLVM converts one number at a time, on a slower unit.
        result.append(lax.optimization_barrier(x.astype(BF16)))
        x = x - result[-1].astype(F32)
    return [*result, x.astype(BF16)]


def pairs(a: Sequence, b: Sequence) -> list[tuple]:
    """The partial products that count, smallest first: part i times part j matters while i + j < number of parts."""
    order = max(len(a), len(b))
    kept = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < order]
    return [(a[i], b[j]) for i, j in sorted(kept, key=sum, reverse=True)]


def store(parts: Sequence[jax.Array], refs: Sequence[Ref]) -> None:
    """Writes parts to shared memory, and makes them visible to the tensor cores and the copy engine."""
    for part, ref in zip(parts, refs, strict=True):
        ref[...] = part
    plgpu.commit_smem()


def store_strided(ref: Ref, value: jax.Array) -> None:
    """Writes registers to global memory in pieces smaller than 32 bytes, which jax 0.12 wants said."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def dot(shape: tuple[int, int], terms: Sequence[tuple], *, interpret: bool) -> jax.Array:
    """Σ a @ b over `terms` in float32; a is shared memory or bf16 registers, b shared memory.

    The interpreter knows WGMMA with both operands in shared memory only ("Expected shape (6,) but got (64, 64)"), so
    there a product with registers is an ordinary one, which in turn the GPU lowering lacks.
    """
    if interpret:
        products = [jnp.dot(a[...], b[...], preferred_element_type=F32) for a, b in terms]
        return functools.reduce(jnp.add, products)

    def body(acc: Ref) -> jax.Array:
        for a, b in terms:
            plgpu.wgmma(acc, a, b)
        return acc[...]  # waits for the products

    # Arithmetic on a fresh accumulator could otherwise be scheduled before the wait.
    return lax.optimization_barrier(pl.run_scoped(body, plgpu.ACC(shape, F32)))


def rows(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A value per row (layout ROWS) as a tile."""
    return lax.broadcast_in_dim(vector, shape, [0])


def cols(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A value per column (layout COLS) as a tile."""
    return lax.broadcast_in_dim(vector, shape, [1])


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """Indices along an axis of a tile."""
    return plgpu.broadcasted_iota(I32, shape, axis, layout=WGMMA)
