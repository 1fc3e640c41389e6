"""The first kernel of tree attention with Mosaic: attention over parts of the context; see `mosaic_attention`."""
# The annotations of references are `Any`: Pallas gives them no public type.
# ruff: noqa: ANN401

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_common import BF16, F32, I32, ROWS, TILE_ROWS, WGMMA, round_up

TMA_ROWS = 8  # rows of a swizzled buffer come and go by eights
# A score that may not be seen. Finite, so that the running maximum of a row that has seen nothing yet makes no NaN;
# such a row sums weights of 1, which its first visible score multiplies by 0. A power of two, so that
# score * scale − maximum is 0 whether or not it is fused.
MASKED = -(2.0**100)
TINY = 1e-30
LOG2_E = math.log2(math.e)
SAW_NOTHING = -1e28  # a running maximum below this (times a scale of at least 0.09) has met masked scores only


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes of the first kernel."""

    warpgroups: int  # consumers of a block, each with 64 query rows
    tile: int  # context rows of a step
    slots: int  # key or value tiles in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Tuning):
    """What the kernels are specialised to."""

    batch: int
    nodes: int
    kv_heads: int
    group: int  # query heads of a key/value head
    head: int
    row_tiles: int  # 64-row tiles of a key/value head
    splits: int
    window: int
    interpret: Any

    @property
    def packed(self) -> bool:
        """Whether XLA packs a key/value head's rows as node * group + head; else a tile is 64 nodes of one head."""
        return self.nodes % TILE_ROWS != 0

    @property
    def stored_rows(self) -> int:
        """Rows of a key/value head's results."""
        return (
            min(round_up(self.nodes * self.group, TMA_ROWS), TILE_ROWS)
            if self.row_tiles == 1
            else self.row_tiles * TILE_ROWS
        )

    @property
    def node_tiles(self) -> int:
        """Tiles of the context that the nodes fill."""
        return -(-self.nodes // self.tile)

    def rows_in_memory(self, rows: int) -> int:
        """Rows to pad to: TMA fills with zeros what lies beyond fewer than 8 rows or a multiple of 8."""
        return rows if rows < TMA_ROWS else round_up(rows, TMA_ROWS)


class Operands(NamedTuple):
    """Arrays, or in the kernel references, of the first kernel. `None` where there is no prefix or no window."""

    query: Any  # [batch, kv_heads, rows, head] packed, else [batch, nodes, heads, head]
    key: Any  # [batch, nodes, kv_heads, head]
    value: Any
    mask: Any  # int8 [batch, rows of a tile, nodes], padded with 0; of a single node bool [batch, 1, 1]
    keys: Any = None  # [batch, kv_heads, capacity, head]
    values: Any = None
    lengths: Any = None  # int32 [batch]
    positions: Any = None  # int32 [batch, rows of a tile]
    first_position: Any = None  # int32 [batch]: the smallest


class Softmax(NamedTuple):
    """A running softmax of 64 rows; scores are in units of log 2, scaled."""

    largest: Float[Array, " rows"]
    weight: Float[Array, " rows"]
    weighted: Float[Array, "rows head"]


class _Scratch(NamedTuple):
    """Shared memory of a block and its barriers."""

    rows: Any  # [warpgroups, 64, head]: queries, and at the end the weighted values on their way out
    ring: Any  # [slots, tile, head]: the key tile of step 0, its value tile, the key tile of step 1, …
    query_full: Any
    full: Any  # a slot has been filled
    free: Any  # a slot has been read by all consumers
    turn: Any  # the two consumers meet


def attend_in_parts(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    """Per part of the context and row: weighted values as bits of float16 fractions, and what goes with them.

    That is, float32, stacked: the logarithm, base 2, of what the fractions are fractions of, and the sum of weights as
    a multiple of it.
    """
    parts = (plan.batch, plan.kv_heads, plan.splits)
    present = [name for name, operand in operands._asdict().items() if operand is not None]

    def body(*refs: Any, **scratch: Any) -> None:
        *inputs, weighted_ref, stats_ref = refs
        named = dict.fromkeys(Operands._fields) | dict(zip(present, inputs, strict=True))
        _part_kernel(plan, Operands(**named), weighted_ref, stats_ref, _Scratch(**scratch))

    scratch = _Scratch(
        rows=_swizzled((plan.warpgroups, TILE_ROWS, plan.head)),
        ring=_swizzled((plan.slots, plan.tile, plan.head)),
        query_full=plgpu.Barrier(num_barriers=plan.warpgroups),
        full=plgpu.Barrier(num_barriers=plan.slots),
        free=plgpu.Barrier(num_barriers=plan.slots, num_arrivals=plan.warpgroups),
        turn=plgpu.Barrier(num_arrivals=2),
    )
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*parts, plan.stored_rows, plan.head), BF16),
            jax.ShapeDtypeStruct((2, *parts, plan.row_tiles * TILE_ROWS), F32),
        ),
        scratch_types=scratch._asdict(),
        # Blocks that read the same part of the same key/value head run side by side and meet in the L2 cache.
        grid=(plan.batch, plan.kv_heads, plan.splits, plan.row_tiles // plan.warpgroups),
        grid_names=("batch", "kv_head", "split", "block"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=plan.interpret,
        kernel_name="tree_attention_parts",
    )(*(operand for operand in operands if operand is not None))


def _swizzled(shape: tuple[int, ...]) -> Any:
    """A bfloat16 buffer laid out for TMA and WGMMA."""
    return plgpu.SMEM(shape, BF16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


class _Part:
    """One block's part of the context: `count` tiles from `begin` on of the nodes followed by the prefix backwards.

    A step counts tiles from `begin`. All are traced int32.
    """

    def __init__(self, plan: Plan, refs: Operands) -> None:
        self.plan, self.operands = plan, refs
        self.warpgroup = lax.axis_index("warpgroup")
        self.batch, self.kv_head, self.split, self.block = (
            lax.axis_index(name) for name in ("batch", "kv_head", "split", "block")
        )
        self.length, self.first = jnp.int32(0), jnp.int32(0)
        if refs.keys is not None:
            self.length = refs.lengths[self.batch]
        if plan.window:
            first_row = jnp.maximum(refs.first_position[self.batch] - (plan.window - 1), 0)
            self.first = lax.div(first_row, jnp.int32(plan.tile))  # the first prefix tile that a node sees
        last = lax.div(self.length + (plan.tile - 1), jnp.int32(plan.tile))
        self.tiles = plan.node_tiles + jnp.maximum(last - self.first, 0)
        splits = jnp.int32(plan.splits)
        self.begin = lax.div(self.split * self.tiles, splits)
        self.count = lax.div((self.split + 1) * self.tiles, splits) - self.begin
        # The nodes and the last prefix tile, which may be partial, need masks; with a window all tiles may.
        masked = self.tiles if plan.window else plan.node_tiles + 1
        self.masked = jnp.clip(masked - self.begin, 0, self.count)  # of them in this part

    def is_node(self, step: Array) -> Array:
        return self.begin + step < self.plan.node_tiles

    def node_start(self, step: Array) -> Array:
        return jnp.where(self.is_node(step), self.begin + step, 0) * self.plan.tile

    def prefix_row(self, step: Array) -> Array:
        """First row of the prefix tile of a step."""
        return (self.first + (self.tiles - 1 - (self.begin + step))) * self.plan.tile

    def prefix_start(self, step: Array) -> Array:
        """First row that is read: earlier where the tile would reach beyond the capacity."""
        last = self.operands.keys.shape[2] - self.plan.tile
        return pl.multiple_of(jnp.minimum(self.prefix_row(step), last), 8)

    def row_tile(self) -> Array:
        """The 64 rows of this warpgroup."""
        return self.block * self.plan.warpgroups + self.warpgroup


def _part_kernel(plan: Plan, refs: Operands, weighted_ref: Any, stats_ref: Any, scratch: _Scratch) -> None:
    part = _Part(plan, refs)

    @pl.when(part.warpgroup < plan.warpgroups)
    def _consumer() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(240, action="increase")

        def write(softmax: Softmax) -> None:
            _write(part, softmax, weighted_ref, stats_ref, scratch.rows.at[part.warpgroup])

        @pl.when(part.count > 0)
        def _attend() -> None:
            write(_Consumer(part, scratch).run())

        @pl.when(part.count == 0)
        def _nothing() -> None:
            write(_empty(plan))

    @pl.when(part.warpgroup == plan.warpgroups)
    def _producer() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, part.count)
        def _load(step: Array) -> None:
            _fill(part, scratch, 2 * step, step, refs.key, refs.keys)
            _fill(part, scratch, 2 * step + 1, step, refs.value, refs.values)

        # No warpgroup may leave while another still multiplies: wait until what was loaded last has been read.
        @pl.loop(jnp.maximum(2 * part.count - plan.slots, 0), 2 * part.count)
        def _drain(sequence: Array) -> None:
            plgpu.barrier_wait(scratch.free.at[lax.rem(sequence, jnp.int32(plan.slots))])


def _fill(part: _Part, scratch: _Scratch, sequence: Array, step: Array, of_nodes: Any, of_prefix: Any) -> None:
    """Fetch the tile of a step into the ring's next slot, once that is free."""
    slot = lax.rem(sequence, jnp.int32(part.plan.slots))
    target, full = scratch.ring.at[slot], scratch.full.at[slot]

    @pl.when(sequence >= part.plan.slots)
    def _wait() -> None:
        plgpu.barrier_wait(scratch.free.at[slot])

    @pl.when(part.is_node(step))
    def _nodes() -> None:
        rows = pl.ds(part.node_start(step), part.plan.tile)
        plgpu.copy_gmem_to_smem(of_nodes.at[part.batch, rows, part.kv_head], target, full)

    if of_prefix is not None:

        @pl.when(jnp.logical_not(part.is_node(step)))
        def _prefix() -> None:
            rows = pl.ds(part.prefix_start(step), part.plan.tile)
            plgpu.copy_gmem_to_smem(of_prefix.at[part.batch, part.kv_head, rows], target, full)


class _Consumer:
    """A warpgroup's way through its part."""

    def __init__(self, part: _Part, scratch: _Scratch) -> None:
        self.part, self.plan, self.scratch = part, part.plan, scratch
        self.rows = scratch.rows.at[part.warpgroup]

    def run(self) -> Softmax:
        """Softmax of this warpgroup's rows over the part."""
        ready = self.scratch.query_full.at[self.part.warpgroup]
        plgpu.copy_gmem_to_smem(_query_rows(self.part), self.rows, ready)
        plgpu.barrier_wait(ready)
        if self.plan.warpgroups > 1:
            pl.when(self.part.warpgroup == 1)(self._take_turn)
        masked, count = self.part.masked, self.part.count
        softmax = lax.fori_loop(0, masked, functools.partial(self._advance, masked=True), _empty(self.plan))
        softmax = lax.fori_loop(masked, count, functools.partial(self._advance, masked=False), softmax)
        if self.plan.warpgroups > 1:
            pl.when(self.part.warpgroup == 0)(self._take_turn)
        return softmax

    def _advance(self, step: Array, softmax: Softmax, *, masked: bool) -> Softmax:
        """Scores, weights and values of one tile."""
        scores = self._scores(step)
        if masked:
            scores = _mask(self.part, step, scores)
        largest, weight, weights, kept = _update(self.plan, softmax, scores)
        weighted = softmax.weighted * _per_row(kept, softmax.weighted.shape)
        self._take_turn()
        return Softmax(largest, weight, self._add_values(step, weighted, weights, masked=masked))

    def _take_turn(self) -> None:
        """Meet the other consumer, which is half a step ahead or behind: one multiplies while one exponentiates."""
        if self.plan.warpgroups > 1 and not self.plan.interpret:
            plgpu.barrier_arrive(self.scratch.turn)
            plgpu.barrier_wait(self.scratch.turn)

    def _scores(self, step: Array) -> Array:
        slot = lax.rem(2 * step, jnp.int32(self.plan.slots))

        def multiply(scores_ref: Any) -> Array:
            plgpu.barrier_wait(self.scratch.full.at[slot])
            plgpu.wgmma(scores_ref, self.rows, self.scratch.ring.at[slot].T)
            self._take_turn()
            return scores_ref[...]

        # Without the barrier, arithmetic could be scheduled before the products are waited for.
        scores = lax.optimization_barrier(pl.run_scoped(multiply, plgpu.ACC((TILE_ROWS, self.plan.tile), F32)))
        plgpu.barrier_arrive(self.scratch.free.at[slot])
        return scores

    def _add_values(self, step: Array, weighted: Array, weights: Array, *, masked: bool) -> Array:
        slot = lax.rem(2 * step + 1, jnp.int32(self.plan.slots))
        plgpu.barrier_wait(self.scratch.full.at[slot])
        values = self.scratch.ring.at[slot]
        if masked and self.part.operands.keys is not None:
            _clear_beyond_length(self.part, step, values)
        if self.plan.interpret:  # the interpreter has no WGMMA with an operand in registers
            weighted = weighted + jnp.dot(weights, values[...], preferred_element_type=F32)
        else:

            def multiply(accumulator_ref: Any) -> None:
                plgpu.wgmma(accumulator_ref, weights, values)

            weighted = lax.optimization_barrier(pl.run_state(multiply)(plgpu.ACC.init(weighted)))
        plgpu.barrier_arrive(self.scratch.free.at[slot])
        return weighted


def _query_rows(part: _Part) -> Any:
    """The 64 query rows of this warpgroup in memory."""
    plan, tile = part.plan, part.row_tile()
    if plan.packed:
        return part.operands.query.at[part.batch, part.kv_head, pl.ds(tile * TILE_ROWS, TILE_ROWS)]
    tiles = jnp.int32(plan.nodes // TILE_ROWS)  # of a head
    head = part.kv_head * plan.group + jnp.minimum(lax.div(tile, tiles), plan.group - 1)
    return part.operands.query.at[part.batch, pl.ds(lax.rem(tile, tiles) * TILE_ROWS, TILE_ROWS), head]


def _table_rows(part: _Part) -> Any:
    """The same 64 rows of the mask and the positions."""
    tile = part.row_tile()
    return pl.ds(
        (tile if part.plan.packed else lax.rem(tile, jnp.int32(part.plan.nodes // TILE_ROWS))) * TILE_ROWS, TILE_ROWS
    )


def _empty(plan: Plan) -> Softmax:
    return Softmax(
        plgpu.layout_cast(jnp.full((TILE_ROWS,), MASKED, F32), ROWS),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS,), F32), ROWS),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, plan.head), F32), WGMMA),
    )


def _update(plan: Plan, softmax: Softmax, scores: Array) -> tuple[Array, Array, Array, Array]:
    """New largest score, new sum of weights, the tile's weights, and the factor for what was summed before."""
    scale = plan.head**-0.5 * LOG2_E
    largest = jnp.maximum(softmax.largest, scores.max(axis=1) * scale)
    kept = jnp.exp2(softmax.largest - largest)
    weights = jnp.exp2(scores * scale - _per_row(largest, scores.shape))
    return largest, softmax.weight * kept + weights.sum(axis=1), weights.astype(BF16), kept


def _mask(part: _Part, step: Array, scores: Array) -> Array:
    """Scores with those masked that a row may not see."""
    plan, refs, shape = part.plan, part.operands, scores.shape
    column = plgpu.broadcasted_iota(I32, shape, 1, layout=WGMMA)
    if plan.nodes == 1:
        alone = jnp.where(refs.mask[part.batch, 0, 0], 1, 0)
        seen = jnp.where(column == 0, lax.broadcast_in_dim(alone, shape, []), 0)
    else:  # of the first node tile when this is none of the nodes
        nodes = refs.mask.at[part.batch, _table_rows(part), pl.ds(part.node_start(step), plan.tile)]
        seen = plgpu.load(nodes, layout=WGMMA, optimized=False).astype(I32)
    if refs.keys is not None:
        row = part.prefix_start(step) + column
        in_prefix = (row >= part.prefix_row(step)) & (row < part.length)
        if plan.window:
            position = plgpu.load(refs.positions.at[part.batch, _table_rows(part)], layout=ROWS, optimized=False)
            in_prefix = in_prefix & (_per_row(position, shape) - row < plan.window)
        is_node = lax.broadcast_in_dim(jnp.where(part.is_node(step), 1, 0), shape, [])
        seen = jnp.where(is_node != 0, seen, jnp.where(in_prefix, 1, 0))
    return jnp.where(seen != 0, scores, MASKED)


def _clear_beyond_length(part: _Part, step: Array, values: Any) -> None:
    """Zero the values beyond the length in shared memory: weight 0 times NaN would be NaN.

    Both consumers do it, and write the same bytes.
    """
    start = part.prefix_start(step)

    @pl.when(jnp.logical_not(part.is_node(step)) & (start + part.plan.tile > part.length))
    def _clear() -> None:
        for row in range(0, part.plan.tile, TILE_ROWS):
            for column in range(0, part.plan.head, 64):
                block = values.at[pl.ds(row, TILE_ROWS), pl.ds(column, 64)]
                x = plgpu.load(block, layout=WGMMA)
                index = start + row + plgpu.broadcasted_iota(I32, (TILE_ROWS, 64), 0, layout=WGMMA)
                block[...] = jnp.where(index < part.length, x, jnp.zeros_like(x))
        plgpu.commit_smem()


def _per_row(vector: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(vector, shape, [0])


def _write(part: _Part, softmax: Softmax, weighted_ref: Any, stats_ref: Any, staging: Any) -> None:
    """Weighted values as float16 fractions of a row's largest, in half the bytes of float32, and the row's numbers."""
    where, rows = (part.batch, part.kv_head, part.split), pl.ds(part.row_tile() * TILE_ROWS, TILE_ROWS)
    peak = jnp.maximum(jnp.abs(softmax.weighted).max(axis=1), TINY)
    for i, vector in enumerate((softmax.largest + jnp.log(peak) * LOG2_E, softmax.weight / peak)):
        stats_ref[(i, *where, rows)] = vector
    fractions = softmax.weighted * _per_row(1.0 / peak, softmax.weighted.shape)
    staging[...] = lax.bitcast_convert_type(
        fractions.astype(jnp.float16), BF16
    )  # the buffer of the queries is bfloat16
    plgpu.commit_smem()
    stored = min(part.plan.stored_rows, TILE_ROWS)
    target = weighted_ref.at[(*where, pl.ds(part.row_tile() * stored, stored))]
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, stored)], target)
    plgpu.wait_smem_to_gmem(0)
