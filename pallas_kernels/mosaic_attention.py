"""Tree attention as two Mosaic GPU kernels (Hopper): attention of one part of the context each, and the merge."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.containers import Prefix

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)
TILE = 64
MASKED = -1e30
EMPTY = -1e28


@dataclasses.dataclass(frozen=True)
class Config:
    warpgroups: int
    tile: int
    slots: int
    splits: int
    schedule: str = "overlap"
    ablate: str = ""
    pdl: bool = True


def _buffer(shape, dtype):
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _row(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [0])


def _cdiv(a, b):
    return lax.div(a + (b - 1), jnp.int32(b))


def _split_kernel(
    *refs, q_smem, ring, stats_smem, q_full, full, free, turn,
    config: Config, kv_heads, head, nodes, window, packed, splits, interpret, has_prefix,
):  # fmt: skip
    *inputs, weighted_ref, stats_ref = refs
    q_ref, key_ref, value_ref, mask_ref, *inputs = inputs
    keys_ref, values_ref, lengths_ref, *inputs = inputs if has_prefix else (None, None, None)
    positions_ref, bounds_ref = inputs or (None, None)
    T, slots = config.tile, config.slots
    batch, kv, split, block = (lax.axis_index(n) for n in ("batch", "kv", "split", "block"))
    wg = lax.axis_index("wg")
    scale = head**-0.5 * math.log2(math.e)
    node_tiles = -(-nodes // T)

    if keys_ref is None:
        length, first, prefix_tiles = jnp.int32(0), jnp.int32(0), jnp.int32(0)
    else:
        length = lengths_ref[batch]
        first = lax.div(jnp.maximum(bounds_ref[batch] - (window - 1), 0), jnp.int32(T)) if window else jnp.int32(0)
        prefix_tiles = jnp.maximum(_cdiv(length, T) - first, 0)
    total = prefix_tiles + node_tiles
    begin = lax.div(split * total, jnp.int32(splits))
    count = lax.div((split + 1) * total, jnp.int32(splits)) - begin
    # Order: the nodes, then the prefix from its last tile, which may be partial, to its first.
    masked = total if window else node_tiles + 1

    def prefix_row(index):
        return (first + (total - 1 - index)) * T

    def prefix_start(index):
        return pl.multiple_of(jnp.minimum(prefix_row(index), keys_ref.shape[2] - T), 8)

    def load(ref, prefix_ref, sequence, index):
        slot = lax.rem(sequence, jnp.int32(slots))

        @pl.when(sequence >= slots)
        def _():
            plgpu.barrier_wait(free.at[slot])

        @pl.when(index < node_tiles)
        def _():
            plgpu.copy_gmem_to_smem(ref.at[batch, pl.ds(index * T, T), kv], ring.at[slot], full.at[slot])

        if prefix_ref is not None:

            @pl.when(index >= node_tiles)
            def _():
                rows = pl.ds(prefix_start(index), T)
                plgpu.copy_gmem_to_smem(prefix_ref.at[batch, kv, rows], ring.at[slot], full.at[slot])

    def produce():
        @pl.loop(0, count)
        def _(step):
            load(key_ref, keys_ref, 2 * step, begin + step)
            load(value_ref, values_ref, 2 * step + 1, begin + step)

    def key_slot(step):
        return lax.rem(2 * step, jnp.int32(slots))

    def value_slot(step):
        return lax.rem(2 * step + 1, jnp.int32(slots))

    def visible(scores, step):
        """Scores of tile `step` with what a row cannot see masked."""
        index = begin + step
        shape = (TILE, T)
        row_tile = block * config.warpgroups + wg
        column = plgpu.broadcasted_iota(I32, shape, 1, layout=WGMMA)
        node_start = jnp.where(index < node_tiles, index, 0) * T
        if packed:
            mask_rows = pl.ds(row_tile * TILE, TILE)
        else:
            mask_rows = pl.ds(lax.rem(row_tile, jnp.int32(nodes // TILE)) * TILE, TILE)
        node_mask = plgpu.load(mask_ref.at[batch, mask_rows, pl.ds(node_start, T)], layout=WGMMA, optimized=False)
        seen_node = node_mask.astype(I32)
        if keys_ref is None:
            return jnp.where(seen_node != 0, scores, MASKED)
        row = prefix_start(index) + column
        start = prefix_row(index)
        seen = (row >= start) & (row < length)
        if window:
            position = plgpu.load(positions_ref.at[batch, mask_rows], layout=ROWS, optimized=False)
            seen = seen & (_row(position, shape) - row < window)
        is_node = jnp.where(index < node_tiles, 1, 0)
        seen = jnp.where(lax.broadcast_in_dim(is_node, shape, []) != 0, seen_node, jnp.where(seen, 1, 0))
        return jnp.where(seen != 0, scores, MASKED)

    def clear_beyond(step):
        """Zero the value rows beyond the length: 0 times NaN would not vanish."""
        if keys_ref is None:
            return
        index = begin + step

        @pl.when((index >= node_tiles) & (prefix_start(index) + T > length))
        def _():
            for r in range(0, T, TILE):
                for c in range(0, head, 64):
                    ref = ring.at[value_slot(step), pl.ds(r, TILE), pl.ds(c, 64)]
                    x = plgpu.load(ref, layout=WGMMA)
                    row = plgpu.broadcasted_iota(I32, (TILE, 64), 0, layout=WGMMA) + (prefix_start(index) + r)
                    ref[...] = jnp.where(row < length, x, jnp.zeros_like(x))
            plgpu.commit_smem()

    def softmax(scores, largest, weight):
        new = jnp.maximum(largest, scores.max(axis=1) * scale)
        kept = jnp.exp2(largest - new)
        p = jnp.exp2(scores * scale - _row(new, scores.shape))
        return new, weight * kept + p.sum(axis=1), p.astype(BF16), kept

    def consume():
        q = q_smem.at[wg]
        row_tile = block * config.warpgroups + wg
        if packed:
            source = q_ref.at[batch, kv, pl.ds(row_tile * TILE, TILE)]
        else:
            per_head = jnp.int32(nodes // TILE)
            group = q_ref.shape[2] // kv_heads
            query_head = kv * group + lax.div(row_tile, per_head)
            source = q_ref.at[batch, pl.ds(lax.rem(row_tile, per_head) * TILE, TILE), query_head]
        plgpu.copy_gmem_to_smem(source, q, q_full.at[wg])
        plgpu.barrier_wait(q_full.at[wg])

        def take_turn():
            if config.schedule == "pingpong" and config.warpgroups == 2:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def scores_of(step, masking, acc_ref=None, p=None):
            """Q K_stepᵀ; with `acc_ref` also starts acc += p V_(step - 1) behind it."""

            def body(s_ref):
                plgpu.barrier_wait(full.at[key_slot(step)])
                plgpu.wgmma(s_ref, q, ring.at[key_slot(step)].T)
                if acc_ref is not None:
                    plgpu.barrier_wait(full.at[value_slot(step - 1)])
                    if masking:
                        clear_beyond(step - 1)
                    plgpu.wgmma(acc_ref, p, ring.at[value_slot(step - 1)])
                else:
                    take_turn()
                return plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if acc_ref is None else 1)

            s = lax.optimization_barrier(pl.run_scoped(body, plgpu.ACC((TILE, T), F32)))
            plgpu.barrier_arrive(free.at[key_slot(step)])
            return visible(s, step) if masking else s

        def add_values(step, acc, p, masking):
            plgpu.barrier_wait(full.at[value_slot(step)])
            if masking:
                clear_beyond(step)
            if interpret:
                acc = acc + jnp.dot(p, ring[value_slot(step)], preferred_element_type=F32)
            else:

                def body(acc_ref):
                    plgpu.wgmma(acc_ref, p, ring.at[value_slot(step)])

                acc = lax.optimization_barrier(pl.run_state(body)(plgpu.ACC.init(acc)))
            plgpu.barrier_arrive(free.at[value_slot(step)])
            return acc

        def simple(masking, step, carry):
            acc, largest, weight = carry
            s = scores_of(step, masking)
            largest, weight, p, kept = softmax(s, largest, weight)
            acc = acc * _row(kept, acc.shape)
            if config.schedule == "pingpong":
                take_turn()
            return add_values(step, acc, p, masking), largest, weight

        def overlapped(masking, step, carry):
            acc, largest, weight, p = carry
            if interpret:
                acc = add_values(step - 1, acc, p, masking)
                s = scores_of(step, masking)
                largest, weight, p, kept = softmax(s, largest, weight)
                return acc * _row(kept, acc.shape), largest, weight, p

            def body(acc_ref):
                acc_ref[...] = acc
                s = scores_of(step, masking, acc_ref, p)
                new, w, p_new, kept = lax.optimization_barrier(softmax(s, largest, weight))
                out = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc_ref, wait_n=0))
                plgpu.barrier_arrive(free.at[value_slot(step - 1)])
                return out * _row(kept, out.shape), new, w, p_new

            return pl.run_scoped(body, plgpu.ACC((TILE, head), F32))

        acc = plgpu.layout_cast(jnp.zeros((TILE, head), F32), WGMMA)
        largest = plgpu.layout_cast(jnp.full((TILE,), MASKED, F32), ROWS)
        weight = plgpu.layout_cast(jnp.zeros((TILE,), F32), ROWS)
        middle = jnp.clip(masked - begin + (config.schedule == "overlap"), 1, count)
        if config.ablate == "copy":

            @pl.loop(0, 2 * count)
            def _(sequence):
                slot = lax.rem(sequence, jnp.int32(slots))
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(free.at[slot])
        elif config.schedule == "overlap":
            s = scores_of(0, True)
            largest, weight, p, _ = softmax(s, largest, weight)
            carry = (acc, largest, weight, p)
            carry = lax.fori_loop(1, middle, functools.partial(overlapped, True), carry)
            carry = lax.fori_loop(middle, count, functools.partial(overlapped, False), carry)
            acc, largest, weight, p = carry
            acc = add_values(count - 1, acc, p, True)
        else:
            if config.schedule == "pingpong":
                pl.when(wg == 1)(take_turn)
            carry = (acc, largest, weight)
            carry = lax.fori_loop(0, middle, functools.partial(simple, True), carry)
            acc, largest, weight = lax.fori_loop(middle, count, functools.partial(simple, False), carry)
            if config.schedule == "pingpong":
                pl.when(wg == 0)(take_turn)
        write(acc, largest, weight)

    def write(acc, largest, weight):
        row_tile = block * config.warpgroups + wg
        rows = pl.ds(row_tile * TILE, TILE)
        weighted_ref[batch, kv, split, rows] = acc
        stats_smem[wg, 0] = largest
        stats_smem[wg, 1] = weight
        plgpu.commit_smem()
        for i in range(2):
            plgpu.copy_smem_to_gmem(stats_smem.at[wg, i], stats_ref.at[batch, kv, i, split, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg < config.warpgroups)
    def _():
        if config.warpgroups == 2:
            plgpu.set_max_registers(240, action="increase")
        pl.when(count > 0)(consume)

        @pl.when(count <= 0)
        def _():
            write(
                plgpu.layout_cast(jnp.zeros((TILE, head), F32), WGMMA),
                plgpu.layout_cast(jnp.full((TILE,), MASKED, F32), ROWS),
                plgpu.layout_cast(jnp.zeros((TILE,), F32), ROWS),
            )

    @pl.when(wg == config.warpgroups)
    def _():
        if config.warpgroups == 2:
            plgpu.set_max_registers(24, action="decrease")
        produce()


def _merge_kernel(weighted_ref, stats_ref, out_ref, *, splits, nodes, group, head, packed, pdl):
    batch, kv, row = (lax.axis_index(n) for n in ("batch", "kv", "row"))
    if pdl:
        plgpu.griddepcontrol_wait()
    layout = plgpu.Layout.WG_STRIDED((head,), vec_size=head // 128)
    parts = [
        plgpu.load(weighted_ref.at[batch, kv, split, row], layout=layout, optimized=False) for split in range(splits)
    ]
    tops = [stats_ref[batch, kv, 0, split, row] for split in range(splits)]
    top = functools.reduce(jnp.maximum, tops)
    factors = [jnp.exp2(x - top) for x in tops]
    weight = sum(f * stats_ref[batch, kv, 1, split, row] for split, f in enumerate(factors))
    inverse = jnp.where(top > EMPTY, 1.0 / weight, 0.0)
    out = sum(part * lax.broadcast_in_dim(f * inverse, (head,), []) for part, f in zip(parts, factors, strict=True))
    if packed:
        node, member = lax.div(row, jnp.int32(group)), lax.rem(row, jnp.int32(group))
    else:
        node, member = lax.rem(row, jnp.int32(nodes)), lax.div(row, jnp.int32(nodes))
    out_ref[batch, node, kv * group + member] = out.astype(out_ref.dtype)


def _merge(weighted, stats, *, nodes, group, packed, dtype, config, interpret):
    batch, kv_heads, splits, _, head = weighted.shape
    if head < 128:
        top = jnp.max(stats[:, :, 0], axis=2, keepdims=True)
        factors = jnp.where(top > EMPTY, jnp.exp2(stats[:, :, 0] - top), 0.0)
        weight = jnp.sum(factors * stats[:, :, 1], axis=2)
        out = jnp.sum(weighted * factors[..., None], axis=2) / jnp.where(weight > 0, weight, 1.0)[..., None]
        out = out[:, :, : nodes * group].astype(dtype)
        if packed:
            out = out.reshape(batch, kv_heads, nodes, group, head).transpose(0, 2, 1, 3, 4)
        else:
            out = out.reshape(batch, kv_heads, group, nodes, head).transpose(0, 3, 1, 2, 4)
        return out.reshape(batch, nodes, kv_heads * group, head)
    return plgpu.kernel(
        functools.partial(
            _merge_kernel, splits=splits, nodes=nodes, group=group, head=head, packed=packed,
            pdl=config.pdl and not interpret,
        ),
        out_type=jax.ShapeDtypeStruct((batch, nodes, kv_heads * group, head), dtype),
        grid=(batch, kv_heads, nodes * group),
        grid_names=("batch", "kv", "row"),
        interpret=interpret,
        kernel_name="tree_attention_merge",
    )(weighted, stats)  # fmt: skip


def _pad(x, axis, size):
    if x.shape[axis] >= size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _up(x, multiple):
    return -(-x // multiple) * multiple


def tree_attention(query, key, value, mask, *, prefix: Prefix | None, window: int = 0, interpret: Any = None,
                   config: Config | None = None, sms: int = 132):
    batch, nodes, heads, head = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    packed = nodes % TILE != 0
    rows = nodes * group
    if config is None:
        config = default_config(batch, nodes, kv_heads, group, head)
    T = config.tile
    row_tiles = _up(-(-rows // TILE), config.warpgroups)
    blocks = row_tiles // config.warpgroups
    splits = config.splits or max(1, sms // (blocks * kv_heads * batch))
    padded_nodes = _up(nodes, T)
    if packed:
        q = query.reshape(batch, nodes, kv_heads, group, head).swapaxes(1, 2).reshape(batch, kv_heads, rows, head)
        q = _pad(q, 2, row_tiles * TILE if interpret else _up(rows, 8) if rows > 8 else rows)
        node_mask = _pad(jnp.repeat(mask, group, axis=1), 1, row_tiles * TILE)
    else:
        q, node_mask = query, mask
    node_mask = _pad(node_mask, 2, padded_nodes).astype(jnp.int8)
    key, value = (_pad(x, 1, padded_nodes if interpret else _up(nodes, 8) if nodes > 8 else nodes) for x in (key, value))
    operands = [q, key, value, node_mask]
    if prefix is not None:
        keys, values = (_pad(x, 2, T) for x in (prefix.keys, prefix.values))
        splits = min(splits, -(-keys.shape[2] // T) + padded_nodes // T)
        operands += [keys, values, prefix.lengths.astype(I32)]
        if window:
            positions = prefix.positions.astype(I32)
            bounds = jnp.min(positions, axis=1)
            if packed:
                positions = _pad(jnp.repeat(positions, group, axis=1), 1, row_tiles * TILE)
            operands += [positions, bounds]
    else:
        window, splits = 0, min(splits, padded_nodes // T)
    weighted, stats = plgpu.kernel(
        functools.partial(
            _split_kernel, config=config, kv_heads=kv_heads, head=head, nodes=nodes, window=window, packed=packed,
            splits=splits, interpret=interpret is not None, has_prefix=prefix is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((batch, kv_heads, splits, row_tiles * TILE, head), F32),
            jax.ShapeDtypeStruct((batch, kv_heads, 2, splits, row_tiles * TILE), F32),
        ),
        scratch_types=dict(
            q_smem=_buffer((config.warpgroups, TILE, head), BF16),
            ring=_buffer((config.slots, T, head), BF16),
            stats_smem=plgpu.SMEM((config.warpgroups, 2, TILE), F32),
            q_full=plgpu.Barrier(num_barriers=config.warpgroups),
            full=plgpu.Barrier(num_barriers=config.slots),
            free=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.slots),
            turn=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(batch, kv_heads, splits, blocks),
        grid_names=("batch", "kv", "split", "block"),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="tree_attention_split",
    )(*operands)  # fmt: skip
    if config.ablate == "split":
        return weighted, stats
    return _merge(weighted, stats, nodes=nodes, group=group, packed=packed, dtype=query.dtype, config=config,
                  interpret=interpret)


def default_config(batch, nodes, kv_heads, group, head):
    warpgroups = 1 if nodes * group <= TILE else 2
    tile = 64 if head == 256 else 128
    used = 64 * head * 2 * warpgroups
    slots = min((232448 - used - 4096) // (tile * head * 2), 8)
    return Config(warpgroups=warpgroups, tile=tile, slots=slots, splits=0)
