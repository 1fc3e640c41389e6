"""Attention of a block of nodes over themselves and a long committed prefix, on Hopper GPUs with Mosaic.

Two kernels, as in flash decoding (Dao et al. 2023). The first runs over parts of the context side by side and keeps per
part and query row the largest score, the sum of weights and the weighted values. The second merges the parts.

The query heads that share a key/value head are rows of one matrix, cut into tiles of 64, one a consumer warpgroup; up
to two tiles share every key and value tile that a third warpgroup brings in by TMA. The nodes are tiles of the context
like any other and come first, then the prefix from its end; so the tiles that need a mask come first, and the rest run
without. The two consumers take turns, one multiplying while the other computes its softmax (the ping-pong schedule of
Shah et al. 2024, arXiv 2407.08608).

Weights are rounded to bfloat16 for their product with the values, as every flash attention does; the sums are float32,
and between the kernels float16 fractions of a row's largest magnitude, which cost 3e-4 of 2e-3 and halve the bytes.
Only Hopper has these products (WGMMA): compute capability 9.0, neither older nor newer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.containers import Prefix
from pallas_kernels.mosaic_attention_parts import SAW_NOTHING, Operands, Plan, Tuning, attend_in_parts
from pallas_kernels.mosaic_common import BF16, F32, I32, TILE_ROWS, WARPGROUP, round_up

HEADS = (64, 128, 256)
MAX_NODES = 256
MULTIPROCESSORS = 132  # of an H100 or H200 SXM
ROUND_COST = 0.03  # start and end of a block, 6 µs, over its walk through a whole context of 8,192 rows

# The fastest of those tried on an H200 at head dimension 256 (docs/kernels.md); the others fill shared memory alike.
TUNING = {
    # (head, at most 64 query rows a key/value head)
    (256, False): Tuning(warpgroups=2, tile=64, slots=5),
    (256, True): Tuning(warpgroups=1, tile=64, slots=6),
    (128, False): Tuning(warpgroups=2, tile=128, slots=5),
    (128, True): Tuning(warpgroups=1, tile=128, slots=6),
    (64, False): Tuning(warpgroups=2, tile=128, slots=8),
    (64, True): Tuning(warpgroups=1, tile=128, slots=8),
}


def unsupported(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,  # noqa: ARG001 - any is taken
    prefix: Prefix | None,
    *,
    window: int = 0,  # noqa: ARG001
) -> str | None:
    """Which argument the kernel cannot take, in one sentence; None when it takes them all."""
    nodes, _, head = query.shape[1:]
    arrays = {"query": query, "key": key, "value": value}
    if prefix is not None:
        arrays |= {"prefix.keys": prefix.keys, "prefix.values": prefix.values}
    for name, array in arrays.items():
        if array.dtype != BF16:
            return f"{name} is {array.dtype}, the Mosaic kernel takes bfloat16"
    if head not in HEADS:
        return f"head dimension {head} is none of {HEADS}"
    if nodes > MAX_NODES:
        return f"{nodes} nodes are more than {MAX_NODES}"
    if prefix is not None and prefix.keys.shape[2] % 8:
        return f"the prefix's capacity {prefix.keys.shape[2]} is no multiple of 8, so TMA cannot read it in tiles"
    return None


@functools.partial(jax.jit, static_argnames=("window", "interpret", "tuning", "splits"))  # one trace for all layers
def tree_attention(
    query: Float[Array, "batch nodes heads head"],
    key: Float[Array, "batch nodes kv_heads head"],
    value: Float[Array, "batch nodes kv_heads head"],
    mask: Bool[Array, "batch nodes nodes"],
    prefix: Prefix | None,
    *,
    window: int = 0,
    interpret: Any = None,  # noqa: ANN401  # plgpu.InterpretGPUParams(), or None for a GPU
    tuning: Tuning | None = None,
    splits: int | None = None,
) -> Float[Array, "batch nodes heads head"]:
    """`pallas_kernels.tree_attention` for what `unsupported` lets through.

    Args:
        query: queries after norm and rope.
        key: the nodes' own keys.
        value: the nodes' own values.
        mask: true where node i may see node j.
        prefix: committed rows, or none. Rows beyond a length may hold anything, NaN too.
        window: sliding window over the prefix in positions, 0 for none.
        interpret: how to run without a GPU.
        tuning: block sizes, the table's unless told.
        splits: parts of the context, as many as fill the GPU best unless told.
    """
    batch, nodes, heads, head = query.shape
    kv_heads = key.shape[2]
    rows = nodes * (heads // kv_heads)
    tuning = tuning or TUNING[head, rows <= TILE_ROWS]
    row_tiles = round_up(-(-rows // TILE_ROWS), tuning.warpgroups)
    blocks = batch * kv_heads * row_tiles // tuning.warpgroups
    tiles = -(-nodes // tuning.tile) + (0 if prefix is None else -(-prefix.keys.shape[2] // tuning.tile))
    plan = Plan(
        **dataclasses.asdict(tuning),
        batch=batch,
        nodes=nodes,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head=head,
        row_tiles=row_tiles,
        splits=min(splits or _best_splits(blocks), tiles),
        window=0 if prefix is None else window,
        interpret=interpret,
    )
    parts = attend_in_parts(plan, _operands(plan, query, key, value, mask, prefix))
    return _merge(plan, *parts, query.dtype)


def _best_splits(blocks: int) -> int:
    """Parts of the context that take the least time when each takes its share of it."""
    most = max(MULTIPROCESSORS // blocks, 8)
    rounds = {splits: -(-blocks * splits // MULTIPROCESSORS) for splits in range(1, most + 1)}
    return min(rounds, key=lambda splits: rounds[splits] * (1 / splits + ROUND_COST))


def _operands(plan: Plan, query: Array, key: Array, value: Array, mask: Array, prefix: Prefix | None) -> Operands:
    rows, nodes = plan.row_tiles * TILE_ROWS, plan.node_tiles * plan.tile

    def per_row(x: Array) -> Array:
        """Entries of nodes as entries of rows."""
        return _pad(jnp.repeat(x, plan.group, axis=1), 1, rows) if plan.packed else x

    if plan.packed:
        query = query.reshape(plan.batch, plan.nodes, plan.kv_heads, plan.group, plan.head).swapaxes(1, 2)
        query = query.reshape(plan.batch, plan.kv_heads, plan.nodes * plan.group, plan.head)
        query = _pad(query, 2, rows if plan.interpret else plan.rows_in_memory(query.shape[2]))
    key, value = (_pad(x, 1, nodes if plan.interpret else plan.rows_in_memory(plan.nodes)) for x in (key, value))
    if plan.nodes > 1:  # else one bit, read as it is: preparing it would cost a kernel
        mask = per_row(_pad(mask, 2, nodes).astype(jnp.int8))
    operands = Operands(query, key, value, mask)
    if prefix is None:
        return operands
    keys, values = (_pad(x, 2, plan.tile) for x in prefix[:2])  # a copy only of caches smaller than a tile
    operands = operands._replace(keys=keys, values=values, lengths=prefix.lengths.astype(I32))
    if plan.window:
        positions = prefix.positions.astype(I32)
        operands = operands._replace(positions=per_row(positions), first_position=jnp.min(positions, axis=1))
    return operands


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros, or false, after the end of an axis up to a size."""
    missing = max(size - x.shape[axis], 0)
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def _merge(plan: Plan, weighted: Array, stats: Array, dtype: jnp.dtype) -> Array:
    """Attended values [batch, nodes, heads, head] of the parts together."""
    if plan.head < WARPGROUP:  # a row is narrower than a warpgroup
        return _merge_with_xla(plan, weighted, stats, dtype)
    return plgpu.kernel(
        functools.partial(_merge_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.batch, plan.nodes, plan.kv_heads * plan.group, plan.head), dtype),
        grid=(plan.batch, plan.kv_heads, plan.nodes * plan.group),
        grid_names=("batch", "kv_head", "row"),
        interpret=plan.interpret,
        kernel_name="tree_attention_merge",
    )(weighted, stats)


def _merge_kernel(plan: Plan, weighted_ref: Any, stats_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    """One row of the output."""
    batch, kv_head, row = (lax.axis_index(name) for name in ("batch", "kv_head", "row"))
    if not plan.interpret:
        plgpu.griddepcontrol_wait()  # its launch overlaps the end of the first kernel
    splits = range(plan.splits)
    layout = plgpu.Layout.WG_STRIDED((plan.head,), vec_size=plan.head // WARPGROUP)
    fractions = [
        plgpu.load(weighted_ref.at[batch, kv_head, split, row], layout=layout, optimized=False) for split in splits
    ]
    units, weights = ([stats_ref[i, batch, kv_head, split, row] for split in splits] for i in range(2))
    top = functools.reduce(jnp.maximum, units)
    factors = [jnp.exp2(x - top) for x in units]
    weight = functools.reduce(jnp.add, [factor * x for factor, x in zip(factors, weights, strict=True)])
    inverse = jnp.where(top > SAW_NOTHING, 1.0 / weight, 0.0)
    out = jnp.float32(0)
    for bits, factor in zip(fractions, factors, strict=True):
        fraction = lax.bitcast_convert_type(bits, jnp.float16).astype(F32)
        out = out + fraction * lax.broadcast_in_dim(factor * inverse, fraction.shape, [])
    if plan.packed:
        node, member = lax.div(row, jnp.int32(plan.group)), lax.rem(row, jnp.int32(plan.group))
    else:
        node, member = lax.rem(row, jnp.int32(plan.nodes)), lax.div(row, jnp.int32(plan.nodes))
    out_ref[batch, node, kv_head * plan.group + member] = out.astype(out_ref.dtype)


def _merge_with_xla(plan: Plan, weighted: Array, stats: Array, dtype: jnp.dtype) -> Array:
    rows = plan.nodes * plan.group
    fractions = lax.bitcast_convert_type(weighted[..., :rows, :], jnp.float16).astype(F32)
    units, weights = stats[..., :rows]
    top = jnp.max(units, axis=2, keepdims=True)
    factors = jnp.where(top > SAW_NOTHING, jnp.exp2(units - top), 0.0)
    weight = jnp.sum(factors * weights, axis=2)[..., None]
    out = jnp.sum(fractions * factors[..., None], axis=2) / jnp.where(weight > 0, weight, 1.0)
    if plan.packed:
        out = out.reshape(plan.batch, plan.kv_heads, plan.nodes, plan.group, plan.head).transpose(0, 2, 1, 3, 4)
    else:
        out = out.reshape(plan.batch, plan.kv_heads, plan.group, plan.nodes, plan.head).transpose(0, 3, 1, 2, 4)
    return out.reshape(plan.batch, plan.nodes, plan.kv_heads * plan.group, plan.head).astype(dtype)
