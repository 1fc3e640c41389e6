"""The short convolution of a tree as one Mosaic GPU kernel (Hopper): what verification reads, in its layout.

A block of threads takes a few nodes and some channels, eight a thread. It reads each node's row and its ancestors' from
global memory, all loads in flight together, and writes queries, keys and values as arrays of their own: XLA would cut
them out of one array with a kernel each.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_common import BF16, F32, I32, WARPGROUP, Ref

LANES = (8, 4, 2, 1)  # channels a thread
NODES = 2  # nodes a block of threads


def unsupported(inputs: Array, window: Array, kernel: Array, taps: Array, *, widths: tuple[int, ...]) -> str | None:  # noqa: ARG001 - any taps are taken
    """Which argument `tree_conv` cannot take, in one sentence, or None."""
    for name, x in (("inputs", inputs), ("window", window), ("kernel", kernel)):
        if x.dtype != BF16:
            return f"{name} is {x.dtype}, the Mosaic kernel takes bfloat16"
    if math.gcd(*widths) % WARPGROUP:
        return f"widths are {widths}, the Mosaic kernel takes multiples of {WARPGROUP}"
    return None


@functools.partial(jax.jit, static_argnames=("widths", "nodes_a_block", "interpret"))
def tree_conv(
    inputs: Float[Array, "batch nodes channels"],
    window: Float[Array, "batch window channels"],
    kernel: Float[Array, "width channels"],
    taps: Int[Array, "batch nodes width"],
    *,
    widths: tuple[int, ...],
    nodes_a_block: int = NODES,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "batch nodes _"], ...]:
    """`pallas_kernels.tree_conv` for what `unsupported` lets through."""
    batch, nodes, channels = inputs.shape
    lanes = next(n for n in LANES if math.gcd(*widths) % (n * WARPGROUP) == 0)
    block = lanes * WARPGROUP
    results = plgpu.kernel(
        functools.partial(_kernel, block=block, lanes=lanes, nodes_a_block=nodes_a_block),
        out_type=tuple(jax.ShapeDtypeStruct((batch, nodes, width), inputs.dtype) for width in widths),
        grid=(batch, -(-nodes // nodes_a_block), channels // block),
        grid_names=("batch", "nodes", "block"),
        interpret=interpret,
        kernel_name="tree_conv",
    )(inputs, window, kernel, taps.astype(I32))
    return tuple(results)


def _kernel(
    inputs_ref: Ref,
    window_ref: Ref,
    kernel_ref: Ref,
    taps_ref: Ref,
    *out_refs: Ref,
    block: int,
    lanes: int,
    nodes_a_block: int,
) -> None:
    start = lax.axis_index("block") * block
    first = 0
    for out_ref in out_refs:
        last = first + out_ref.shape[2]
        convolve = functools.partial(
            _convolve,
            inputs_ref,
            window_ref,
            kernel_ref,
            taps_ref,
            out_ref,
            source=start,
            target=start - first,
            block=block,
            lanes=lanes,
            nodes_a_block=nodes_a_block,
        )
        pl.when((start >= first) & (start < last))(convolve)
        first = last


def _convolve(
    inputs_ref: Ref,
    window_ref: Ref,
    kernel_ref: Ref,
    taps_ref: Ref,
    out_ref: Ref,
    *,
    source: Array,
    target: Array,
    block: int,
    lanes: int,
    nodes_a_block: int,
) -> None:
    batch = lax.axis_index("batch")
    columns = pl.ds(source, block)
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=lanes)
    nodes, width = taps_ref.shape[1:]

    def load(ref: Ref) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(F32)

    weights = [load(kernel_ref.at[j, columns]) for j in range(width)]
    committed = [load(window_ref.at[batch, j, columns]) for j in range(width - 1)]
    for n in range(nodes_a_block):
        node = jnp.minimum(lax.axis_index("nodes") * nodes_a_block + n, nodes - 1)  # the last one may be written twice
        total = load(inputs_ref.at[batch, node, columns]) * weights[-1]
        for j in range(1, width):
            tap = taps_ref[batch, node, j]
            row = load(inputs_ref.at[batch, jnp.maximum(tap, 0), columns])
            for back, old in enumerate(reversed(committed), 1):
                row = jnp.where(lax.broadcast_in_dim(tap == -back, row.shape, []), old, row)
            total += row * weights[width - 1 - j]
        out_ref[batch, node, pl.ds(target, block)] = (total / (1.0 + jnp.exp(-total))).astype(out_ref.dtype)
