"""Verification of trees by the gated delta rule on NVIDIA GPUs since Ampere, written in Triton (through jax-triton).

The twin of the Mosaic form for GPUs that Mosaic does not take. Float32 products are sums of products of bfloat16 or
tf32 parts: with `precision="default"` three of bfloat16, with "highest" three of tf32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.containers import GdnTreeResult

MAX_NODES = 256
_DTYPES = ("bfloat16", "float32")
_WIDTHS = (16, 32, 64, 128)
_SMALLEST_TILE, _LARGEST_TILE = 16, 64
_BLOCK, _WARPS = 64, 4  # value columns a program, and its warps: the fastest on an H200 (docs/kernels.md)


class _Digits(NamedTuple):
    """How float32 operands are split."""

    terms: int  # bfloat16 parts of a state that meets raw bfloat16 keys
    form: str  # of products of two float32 matrices


_DIGITS = {"default": _Digits(2, "bf16x3"), "highest": _Digits(3, "tf32x3")}


def unsupported(
    query: Float[Array, "batch nodes key_heads key"],
    key: Float[Array, "batch nodes key_heads key"],
    value: Float[Array, "batch nodes value_heads value"],
    log_decay: Float[Array, "batch nodes value_heads"],  # noqa: ARG001 - any is taken
    beta: Float[Array, "batch nodes value_heads"],  # noqa: ARG001
    ancestors: Bool[Array, "batch nodes nodes"],  # noqa: ARG001
    state: Float[Array, "batch value_heads key value"],  # noqa: ARG001
    *,
    precision: str = "default",  # noqa: ARG001
) -> str | None:
    """What keeps these arguments from `gdn_tree_verify`, in one sentence, or nothing."""
    nodes = query.shape[1]
    if nodes > MAX_NODES:
        return f"it takes up to {MAX_NODES} nodes and these are {nodes}"
    if query.shape[3] not in _WIDTHS or value.shape[3] not in _WIDTHS:
        return f"it takes heads of 16, 32, 64 or 128 and these are {query.shape[3]} and {value.shape[3]}"
    if query.dtype != key.dtype or query.dtype.name not in _DTYPES:
        return f"it takes queries and keys in bfloat16 or in float32 and these are {query.dtype} and {key.dtype}"
    return None


def gdn_tree_verify(
    query: Float[Array, "batch nodes key_heads key"],
    key: Float[Array, "batch nodes key_heads key"],
    value: Float[Array, "batch nodes value_heads value"],
    log_decay: Float[Array, "batch nodes value_heads"],
    beta: Float[Array, "batch nodes value_heads"],
    ancestors: Bool[Array, "batch nodes nodes"],
    state: Float[Array, "batch value_heads key value"],
    *,
    precision: str = "default",
) -> GdnTreeResult:
    """See `pallas_kernels.gdn_tree_verify`; the arguments must be ones that `unsupported` has nothing against."""
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_gdn_kernel import verify_tree

    batch, nodes, key_heads, key_size = query.shape
    value_heads, value_size = value.shape[2:]
    block = min(_BLOCK, value_size)
    # Several tiles of 64, with float32 keys in three parts each, would take more than many GPUs have: 100 of 99 KiB.
    split = precision == "highest" and query.dtype == jnp.float32 and nodes > _LARGEST_TILE
    largest = _LARGEST_TILE // 2 if split else _LARGEST_TILE
    tile = min(max(1 << (nodes - 1).bit_length(), _SMALLEST_TILE), largest)
    vectors = jax.ShapeDtypeStruct(value.shape, jnp.float32)
    gates = jax.ShapeDtypeStruct(log_decay.shape, jnp.float32)
    results = jax_triton.triton_call(
        query,
        key,
        value,
        log_decay,
        beta,
        ancestors,
        state,
        kernel=verify_tree,
        out_shape=(vectors, vectors, gates),
        grid=(value_size // block, value_heads, batch),
        name="gdn_tree_verify",
        num_warps=_WARPS,
        num_stages=1,  # loops here are short, and U is read where it was written
        nodes=nodes,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=key_size,
        value_size=value_size,
        block=block,
        tile=tile,
        levels=tile.bit_length() - 1,
        **_DIGITS[precision]._asdict(),
    )
    return GdnTreeResult(*results)
