"""The short convolution of a tree as one Mosaic GPU kernel (Hopper), whose results are arrays of their own.

A block of threads takes a node and up to 1,024 channels of one result. The weights, the window and the rows of the node
and of its ancestors are all on their way at the same time, and what matters is how long one load takes.
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

LANES = (8, 4, 2, 1)  # channels a thread, as many as divide every result


def unsupported(
    inputs: Array,
    window: Array,
    kernel: Array,
    taps: Array,  # noqa: ARG001 - any are taken
    *,
    widths: tuple[int, ...],
) -> str | None:
    """Which argument `tree_conv` cannot take, in one sentence, or None."""
    for name, x in (("inputs", inputs), ("window", window), ("kernel", kernel)):
        if x.dtype != BF16:
            return f"{name} is {x.dtype}, the Mosaic kernel takes bfloat16"
    if math.gcd(*widths) % WARPGROUP:
        return f"widths are {widths}, the Mosaic kernel takes multiples of {WARPGROUP}"
    return None


@functools.partial(jax.jit, static_argnames=("widths", "interpret"))  # the layers of a model share one trace
def tree_conv(
    inputs: Float[Array, "batch nodes channels"],
    window: Float[Array, "batch window channels"],
    kernel: Float[Array, "width channels"],
    taps: Int[Array, "batch nodes width"],
    *,
    widths: tuple[int, ...],
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "batch nodes _"], ...]:
    """`pallas_kernels.tree_conv` for what `unsupported` lets through; `interpret` is set to run on a CPU."""
    batch, nodes, channels = inputs.shape
    lanes = next(n for n in LANES if math.gcd(*widths) % (n * WARPGROUP) == 0)
    block = lanes * WARPGROUP
    return tuple(
        plgpu.kernel(
            functools.partial(_kernel, lanes=lanes),
            out_type=tuple(jax.ShapeDtypeStruct((batch, nodes, width), BF16) for width in widths),
            grid=(batch, nodes, channels // block),
            grid_names=("batch", "node", "block"),
            interpret=interpret,
            kernel_name="tree_conv",
        )(inputs, window, kernel, taps.astype(I32))
    )


def _kernel(
    inputs_ref: Ref,
    window_ref: Ref,
    kernel_ref: Ref,
    taps_ref: Ref,
    *out_refs: Ref,
    lanes: int,
) -> None:
    """A branch for every result, since a kernel cannot choose where to write by a number."""
    block, first = lanes * WARPGROUP, 0
    start = lax.axis_index("block") * block
    for out_ref in out_refs:
        last = first + out_ref.shape[2]
        convolve = functools.partial(
            _convolve,
            inputs_ref.at[lax.axis_index("batch"), :, pl.ds(start, block)],
            window_ref.at[lax.axis_index("batch"), :, pl.ds(start, block)],
            kernel_ref.at[:, pl.ds(start, block)],
            taps_ref.at[lax.axis_index("batch"), lax.axis_index("node")],
            out_ref.at[lax.axis_index("batch"), lax.axis_index("node"), pl.ds(start - first, block)],
            lanes=lanes,
        )
        pl.when((start >= first) & (start < last))(convolve)
        first = last


def _convolve(inputs_ref: Ref, window_ref: Ref, kernel_ref: Ref, taps_ref: Ref, out_ref: Ref, *, lanes: int) -> None:
    """One node's channels."""
    width = kernel_ref.shape[0]
    layout = plgpu.Layout.WG_STRIDED(out_ref.shape, vec_size=lanes)

    def load(ref: Ref) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(F32)

    committed = [load(window_ref.at[j]) for j in reversed(range(width - 1))]  # the newest first: taps −1, −2, …
    total = load(inputs_ref.at[lax.axis_index("node")]) * load(kernel_ref.at[width - 1])
    for j in range(1, width):
        tap = taps_ref[j]
        row = load(inputs_ref.at[jnp.maximum(tap, 0)])
        for back, old in enumerate(committed, 1):
            row = jnp.where(lax.broadcast_in_dim(tap == -back, row.shape, []), old, row)
        total += row * load(kernel_ref.at[width - 1 - j])
    out_ref[...] = (total / (1.0 + jnp.exp(-total))).astype(BF16)
