"""Attention of a tree over a long prefix on NVIDIA GPUs since Ampere, written in Triton (through jax-triton).

The twin of the Mosaic form for GPUs that Mosaic does not take. The context is split into shares so that even one node
keeps the whole device busy (flash-decoding); a second kernel merges them. The nodes' own keys, with their mask, are one
more share.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.containers import Prefix

MAX_NODES = 256
_DTYPES = ("bfloat16", "float16", "float32")
_WIDTHS = (16, 32, 64, 128, 256)
_SMALLEST_TILE = 16
_NARROW = 2  # bytes of the dtypes that tensor cores multiply without splitting them
_MERGED_ELEMENTS = 8192
_MANY_SHARES, _MAX_SHARES = 16, 127
# Rows and keys a step for heads of 256 in two bytes, as shared memory allows (227, 163 and 99 KiB a program).
_TILES = {"9.0": (128, 64), "10.0": (128, 64), "8.0": (64, 32)}
_SMALL_TILES = (32, 32)


class Tuning(NamedTuple):
    """What may differ between devices without changing the result."""

    rows: int  # (node, head) rows a program
    block: int  # keys a step
    warps: int
    stages: int
    shares: int  # of the prefix


def unsupported(
    query: Float[Array, "batch nodes heads head"],
    key: Float[Array, "batch nodes kv_heads head"],
    value: Float[Array, "batch nodes kv_heads head"],
    mask: Bool[Array, "batch nodes nodes"],  # noqa: ARG001 - any is taken
    prefix: Prefix | None,
    *,
    window: int = 0,  # noqa: ARG001
) -> str | None:
    """What keeps these arguments from `tree_attention`, in one sentence, or nothing."""
    nodes, head = query.shape[1], query.shape[3]
    if nodes > MAX_NODES:
        return f"it takes up to {MAX_NODES} nodes and these are {nodes}"
    if head not in _WIDTHS:
        return f"it takes heads of 16, 32, 64, 128 or 256 and these are {head}"
    cached = () if prefix is None else (prefix.keys, prefix.values)
    dtypes = {x.dtype.name for x in (query, key, value, *cached)}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        return f"it takes one of {', '.join(_DTYPES)} and this is {', '.join(sorted(dtypes))}"
    return None


def tree_attention(
    query: Float[Array, "batch nodes heads head"],
    key: Float[Array, "batch nodes kv_heads head"],
    value: Float[Array, "batch nodes kv_heads head"],
    mask: Bool[Array, "batch nodes nodes"],
    prefix: Prefix | None,
    *,
    window: int = 0,
) -> Float[Array, "batch nodes heads head"]:
    """See `pallas_kernels.tree_attention`; the arguments must be ones that `unsupported` has nothing against."""
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_attention_kernel import attend_share, merge_shares

    batch, nodes, heads, head = query.shape
    kv_heads = key.shape[2]
    sizes = {"nodes": nodes, "kv_heads": kv_heads, "group": heads // kv_heads, "head": head}
    if prefix is None:
        nothing = jnp.zeros((batch, kv_heads, 1, head), key.dtype)
        prefix = Prefix(nothing, nothing, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, nodes), jnp.int32))
    capacity = prefix.keys.shape[2]
    total = nodes * sizes["group"]
    tuning = _tune(batch * kv_heads, total, head, capacity, query.dtype.itemsize)
    rows = tuning.rows
    shares = max(1, min(tuning.shares, -(-capacity // tuning.block)))
    parts = (batch * kv_heads, shares + 1, total)
    share_shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*parts, head), parts, parts)]
    partial = jax_triton.triton_call(
        query,
        key,
        value,
        mask,
        prefix.keys,
        prefix.values,
        prefix.lengths,
        prefix.positions,
        kernel=attend_share,
        out_shape=share_shapes,
        grid=(-(-total // rows), batch * kv_heads, shares + 1),
        name="tree_attention_shares",
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        capacity=capacity,
        shares=shares,
        window=window,
        rows=rows,
        block=tuning.block,
        node_block=min(tuning.block, max(_SMALLEST_TILE, _power_of_two(nodes))),
        form="tf32x3",  # of float32 inputs: as exact as float32
        **sizes,
    )
    padded = _power_of_two(shares + 1)
    columns = min(head, max(_SMALLEST_TILE, _MERGED_ELEMENTS // padded))
    return jax_triton.triton_call(
        *partial,
        kernel=merge_shares,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(total, head // columns, batch * kv_heads),
        name="tree_attention_merge",
        num_warps=4,
        parts=shares + 1,
        padded=padded,
        block=columns,
        **sizes,
    )


def _tune(pairs: int, total: int, head: int, capacity: int, itemsize: int) -> Tuning:
    """One program a core for the prefix, and for the nodes' own share too where the prefix is in many shares anyway."""
    device = jax.devices()[0]
    rows, block = _TILES.get(device.compute_capability, _SMALL_TILES)
    if itemsize > _NARROW:
        rows, block = rows // 4, block // 2
    rows = max(_SMALLEST_TILE, min(rows, _power_of_two(total)))
    block = max(_SMALLEST_TILE, min(block * _WIDTHS[-1] // head, 64))
    deep = rows == _SMALLEST_TILE and device.compute_capability in _TILES  # the queries leave room for a third stage
    # A share costs a write and a read of its partial results, so it should be worth a few steps.
    shares = device.core_count // (pairs * -(-total // rows))
    shares = min(shares - (shares > _MANY_SHARES), capacity // (2 * block), _MAX_SHARES)
    return Tuning(rows, block, warps=max(4, rows // 16), stages=3 if deep else 2, shares=max(1, shares))


def _power_of_two(x: int) -> int:
    """The smallest one that is not below x."""
    return 1 << max(x - 1, 0).bit_length()
