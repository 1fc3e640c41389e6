"""Commit of an accepted path into the caches of all layers, in place, as two Mosaic GPU kernels (Hopper).

`commit_states` advances the recurrent states: S ← e^{G_leaf} S + Σ_j e^{G_leaf − G_j} k_j u_jᵀ along the path, the keys
normalised here, all in float32 FMA. It reads and writes every state once, and hardly anything else: the device's copy
bandwidth bounds it. `commit_rows` moves what is only copied, the windows of the convolutions and the K/V rows.

One launch serves all layers, because a launch of one layer ends before the memory system is busy. Pallas cannot pick a
buffer by a run-time index but with a branch for each, and a branch is code of its own: every block would fetch the
instructions of its layer from far away, which took longer than its work. So `commit_states` selects between addresses
(`_pick`). The few blocks of `commit_rows` do branch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import arith, ir, memref
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.constants import NORM_EPS

type Ref = Any  # memory or a view of it, for which jax has no public name
type Layout = Any  # the same of layouts with parameters
type Context = Any
Registers = mgpu.FragmentedArray

__all__ = ["commit_rows", "commit_states", "unsupported", "unsupported_rows"]

TILE = 128 * 128  # most elements of a state per block: 128 registers a thread
STEPS = 8  # path nodes in flight at a time
ROW_STEPS = 16  # the same of K/V rows
LANE_COLUMNS = 128  # float32 columns that the 32 lanes of a warp cover with 16 bytes each
NORM_TILE = 8  # rows of the tile whose row sums are the squared norm of a key, each of them
SCALAR = plgpu.Layout.WG_SPLAT(())
COPY_BYTES = 16  # granularity of bulk copies
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # contiguous copies then need no descriptor


def unsupported(
    states: Sequence[jax.ShapeDtypeStruct | Array],
    keys: Sequence[jax.ShapeDtypeStruct | Array],
    updates: Sequence[jax.ShapeDtypeStruct | Array],
    path_decays: Sequence[jax.ShapeDtypeStruct | Array],
    path: jax.ShapeDtypeStruct | Array,  # noqa: ARG001 - any is taken
    count: jax.ShapeDtypeStruct | Array,  # noqa: ARG001
) -> str | None:
    """Which argument `commit_states` cannot take, in one sentence, or None."""
    for name, group, dtypes in (
        ("state", states, ("float32",)),
        ("key", keys, ("bfloat16", "float16", "float32")),
        ("update", updates, ("float32",)),
        ("path_decay", path_decays, ("float32",)),
    ):
        for x in group:
            if x.shape != group[0].shape or x.dtype != group[0].dtype:
                return f"{name} differs between layers: {group[0].dtype}{group[0].shape} and {x.dtype}{x.shape}"
            if x.dtype.name not in dtypes:
                return f"{name} is {x.dtype.name}, expected {' or '.join(dtypes)}"
    key, value = states[0].shape[2:]
    if key not in {64, 128, 256}:
        return f"the key dimension is {key}, expected 64, 128 or 256"
    if value not in {64, 128, 256}:
        return f"the value dimension is {value}, expected 64, 128 or 256"
    return None


def commit_states(
    states: tuple[Float[Array, "batch value_heads key value"], ...],
    keys: tuple[Float[Array, "batch nodes key_heads key"], ...],
    updates: tuple[Float[Array, "batch nodes value_heads value"], ...],
    path_decays: tuple[Float[Array, "batch nodes value_heads"], ...],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "batch value_heads key value"], ...]:
    """States of all layers after the accepted path, in one launch; in place where the caller donates them.

    Args:
        states: per layer, the state that verification read, float32.
        keys: per layer, the raw keys as given to verification.
        updates: per layer, the updates that it returned, float32.
        path_decays: per layer, the path decays that it returned, float32.
        path: node indices, root first; entries at and beyond `count` are ignored.
        count: accepted nodes; a row with 0 keeps its states bit for bit and costs nothing.
        interpret: how to simulate the kernel where there is no GPU.

    Raises:
        ValueError: shapes or dtypes that the kernel cannot take.
    """
    if reason := unsupported(states, keys, updates, path_decays, path, count):
        raise ValueError(reason)
    batch, heads, key, value = states[0].shape
    rows = min(key, TILE // value)
    refs = [jax.new_ref(state) for state in states]
    plgpu.kernel(
        functools.partial(
            _states_kernel, layers=len(states), group=heads // keys[0].shape[2], interpret=interpret is not None
        ),
        out_type=(),
        scratch_types={
            "k_smem": plgpu.SMEM((STEPS * key,), jnp.float32),
            "norm_smem": plgpu.SMEM((STEPS * NORM_TILE,), jnp.float32),
        },
        grid=(len(states), batch, heads, key // rows),
        grid_names=("layer", "row", "head", "block"),
        interpret=interpret,
        kernel_name="gdn_commit_states",
    )(*refs, *keys, *updates, *path_decays, path.astype(jnp.int32), count.astype(jnp.int32))
    return tuple(ref[...] for ref in refs)


def _tile_layout(rows: int, columns: int) -> Layout:
    """Consecutive rows per warp, 16 bytes of a row per lane; a value per column is then the same in every warp."""
    if columns == LANE_COLUMNS // 2:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((rows, columns), (rows // 4, columns), (2, 4))),
            warp_dims=(-6,),
            lane_dims=(-2, -3),
            vector_dim=-1,
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, LANE_COLUMNS), (rows // 4, LANE_COLUMNS), (4,))),
        warp_dims=(-5,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _load(
    refs: Sequence[Ref], layer: Array, index: tuple, shape: tuple[int, ...], layout: Layout, *, interpret: bool
) -> Array:
    """Registers with `shape` from where `index` points to in the layer's buffer; a scalar where `shape` is ()."""
    if interpret:

        def branch(ref: Ref) -> Array:
            return ref[_window(index, shape)]

        return lax.switch(layer, [functools.partial(branch, ref) for ref in refs])

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, (SCALAR,) * len(index), (plgpu.RefType(),) * len(refs)),
        return_type=plgpu.ShapeDtypeStruct(shape, refs[0].dtype, layout=layout),
    )
    def read(_: Context, layer: Registers, index: tuple, refs: tuple) -> Registers:
        source = _pick(refs, layer, index, shape)
        if not shape:
            return Registers.splat(memref.load(source, []), ())
        return Registers.load_untiled(source, layout=layout.to_mgpu(), optimized=False)

    return read(layer, index, tuple(refs))


def _store(refs: Sequence[Ref], layer: Array, index: tuple, value: Array, layout: Layout, *, interpret: bool) -> None:
    """Writes registers to where `index` points to in the layer's buffer."""
    if interpret:

        def branch(ref: Ref) -> None:
            ref[_window(index, value.shape)] = value

        lax.switch(layer, [functools.partial(branch, ref) for ref in refs])
        return

    shape = value.shape

    @plgpu.inline_mgpu(arg_types=(SCALAR, (SCALAR,) * len(index), layout, (plgpu.RefType(),) * len(refs)))
    def write(_: Context, layer: Registers, index: tuple, value: Registers, refs: tuple) -> None:
        value.store_untiled(_pick(refs, layer, index, shape), optimized=False)

    write(layer, index, value, tuple(refs))


def _window(index: tuple, shape: tuple[int, ...]) -> tuple:
    """`index`, its last entry the start of the first axis of `shape`, as an index of a Pallas reference."""
    if not shape:
        return index
    return (*index[:-1], pl.ds(index[-1], shape[0]), *(slice(None) for _ in shape[1:]))


def _pick(refs: tuple, layer: Registers, index: tuple, shape: tuple[int, ...]) -> ir.Value:
    """The same window of a layer's buffer. All buffers have the same shape, so only the address is selected."""
    number = layer.registers.item()
    address = mgpu.utils.memref_ptr(refs[0])
    for n, ref in enumerate(refs[1:], 1):
        here = arith.cmpi(arith.CmpIPredicate.eq, number, mgpu.utils.c(n, number.type))
        address = arith.select(here, mgpu.utils.memref_ptr(ref), address)
    starts = [arith.index_cast(ir.IndexType.get(), x.registers.item()) for x in index]
    window = starts
    if shape:
        rows = mgpu.utils.DynamicSlice(starts[-1], shape[0])
        window = [*starts[:-1], rows, *(slice(None) for _ in shape[1:])]
    return mgpu.utils.memref_slice(mgpu.utils.ptr_as_memref(address, refs[0].type), tuple(window))


def _states_kernel(*refs: Ref, layers: int, group: int, interpret: bool, k_smem: Ref, norm_smem: Ref) -> None:
    states, keys, updates, decays = (refs[i * layers : (i + 1) * layers] for i in range(4))
    path_ref, count_ref = refs[4 * layers :]
    layer, row, head = (lax.axis_index(name) for name in ("layer", "row", "head"))
    key, value = states[0].shape[2:]
    tile = (key // lax.axis_size("block"), value)
    start = lax.axis_index("block") * tile[0]
    layout, key_layout = _tile_layout(*tile), _tile_layout(NORM_TILE, key)
    count = count_ref[row]
    load = functools.partial(_load, layer=layer, interpret=interpret)

    @pl.when(count > 0)
    def _() -> None:
        s = load(states, index=(row, head, start), shape=tile, layout=layout)
        leaf = path_ref[row, count - 1]
        leaf_decay = load(decays, index=(row, leaf, head), shape=(), layout=SCALAR)

        def fold(batch: Array, s: Array) -> Array:
            """Adds up to `STEPS` nodes."""
            first = batch * STEPS
            nodes = [path_ref[row, jnp.minimum(first + n, count - 1)] for n in range(STEPS)]
            k_rows = [
                load(
                    keys,
                    index=(row, node, lax.div(head, group), jnp.int32(0)),
                    shape=(key,),
                    layout=key_layout.reduce(0),
                )
                for node in nodes
            ]
            u_rows = [
                load(updates, index=(row, node, head, jnp.int32(0)), shape=(value,), layout=layout.reduce(0))
                for node in nodes
            ]
            node_decays = [load(decays, index=(row, node, head), shape=(), layout=SCALAR) for node in nodes]
            for n, k_row in enumerate(k_rows):
                k = k_row.astype(jnp.float32)
                k_smem[pl.ds(n * key, key)] = k
                squares = plgpu.layout_cast(lax.broadcast_in_dim(k * k, (NORM_TILE, key), [1]), key_layout)
                norm_smem[pl.ds(n * NORM_TILE, NORM_TILE)] = lax.rsqrt(jnp.sum(squares, axis=1) + NORM_EPS)
            plgpu.commit_smem()
            for n in range(STEPS):
                weight = jnp.exp(leaf_decay - node_decays[n]) * norm_smem[n * NORM_TILE]
                weight = jnp.where(first + n < count, weight, 0.0)
                k = plgpu.load(k_smem.at[pl.ds(n * key + start, tile[0])], layout=layout.reduce(1))
                s += lax.broadcast_in_dim(k, tile, [0]) * lax.broadcast_in_dim(u_rows[n] * weight, tile, [1])
            plgpu.commit_smem()  # every warp has read these steps
            return s

        s = lax.fori_loop(0, lax.div(count + STEPS - 1, STEPS), fold, s * jnp.exp(leaf_decay))
        _store(states, layer, (row, head, start), s, layout, interpret=interpret)


def unsupported_rows(
    windows: Sequence[jax.ShapeDtypeStruct | Array],
    inputs: Sequence[jax.ShapeDtypeStruct | Array],
    taps: jax.ShapeDtypeStruct | Array,  # noqa: ARG001 - any is taken
    caches: Sequence[jax.ShapeDtypeStruct | Array],
    rows: Sequence[jax.ShapeDtypeStruct | Array],
    lengths: jax.ShapeDtypeStruct | Array,  # noqa: ARG001
    path: jax.ShapeDtypeStruct | Array,  # noqa: ARG001
    count: jax.ShapeDtypeStruct | Array,  # noqa: ARG001
) -> str | None:
    """Which argument `commit_rows` cannot take, in one sentence, or None."""
    for name, targets, sources in (("window", windows, inputs), ("cache", caches, rows)):
        for target, source in zip(targets, sources, strict=True):
            if target.dtype != source.dtype:
                return f"a {name} is {target.dtype.name}, what enters it {source.dtype.name}"
            if target.shape != targets[0].shape or source.shape != sources[0].shape or target.dtype != targets[0].dtype:
                return f"a {name} differs between layers: {targets[0].shape} and {target.shape}"
            if target.shape[-1] * target.dtype.itemsize % COPY_BYTES:
                return (
                    f"rows of a {name} have {target.shape[-1] * target.dtype.itemsize} bytes, expected a multiple of 16"
                )
    return None


def commit_rows(
    windows: tuple[Float[Array, "batch window channels"], ...],
    inputs: tuple[Float[Array, "batch nodes channels"], ...],
    taps: Int[Array, "batch nodes width"],
    caches: tuple[Shaped[Array, "batch kv_heads capacity head"], ...],
    rows: tuple[Shaped[Array, "batch nodes kv_heads head"], ...],
    lengths: Int[Array, " batch"],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Windows and caches of all layers after the accepted path, in one launch; in place where the caller donates them.

    Args:
        windows: per layer with a convolution, the inputs committed last, oldest first.
        inputs: per such layer, the nodes' inputs of the convolution.
        taps: as given to `tree_conv`: the new window is what the leaf's successor would read.
        caches: keys and values of the attention layers, each an entry of its own.
        rows: per cache, the nodes' rows.
        lengths: row of the caches that the root goes to; rows beyond the capacity fall on the last one.
        path: node indices, root first; entries at and beyond `count` are ignored.
        count: accepted nodes; a row with 0 keeps everything bit for bit.
        interpret: how to simulate the kernel where there is no GPU.

    Raises:
        ValueError: shapes or dtypes that the kernel cannot take.
    """
    if reason := unsupported_rows(windows, inputs, taps, caches, rows, lengths, path, count):
        raise ValueError(reason)
    refs = [jax.new_ref(x) for x in (*windows, *caches)]
    scratch: dict[str, Any] = {}
    if windows:
        scratch["window_smem"] = plgpu.SMEM(windows[0].shape[1:], windows[0].dtype)
        scratch["window_ready"] = plgpu.Barrier(num_arrivals=windows[0].shape[1])
    if caches:
        scratch["rows_smem"] = plgpu.SMEM((ROW_STEPS, *rows[0].shape[2:]), rows[0].dtype)
        scratch["rows_ready"] = plgpu.Barrier(num_barriers=ROW_STEPS)
    plgpu.kernel(
        functools.partial(_rows_kernel, layers=len(windows), caches=len(caches)),
        out_type=(),
        scratch_types=scratch,
        grid=(len(refs), path.shape[0]),
        grid_names=("buffer", "row"),
        interpret=interpret,
        kernel_name="commit_rows",
    )(*refs, *inputs, *rows, *(x.astype(jnp.int32) for x in (taps, lengths, path, count)))
    committed = tuple(ref[...] for ref in refs)
    return committed[: len(windows)], committed[len(windows) :]


def _rows_kernel(
    *refs: Ref,
    layers: int,
    caches: int,
    window_smem: Ref = None,
    window_ready: Ref = None,
    rows_smem: Ref = None,
    rows_ready: Ref = None,
) -> None:
    buffers = layers + caches
    targets, sources = refs[:buffers], refs[buffers : 2 * buffers]
    taps_ref, lengths_ref, path_ref, count_ref = refs[2 * buffers :]
    row = lax.axis_index("row")
    count = count_ref[row]

    @pl.when(count > 0)
    def _() -> None:
        path = path_ref.at[row]
        advance = functools.partial(
            _advance_window, taps_ref=taps_ref.at[row, path[count - 1]], smem=window_smem, ready=window_ready
        )
        append = functools.partial(
            _append_rows, path_ref=path, count=count, start=lengths_ref[row], smem=rows_smem, ready=rows_ready
        )
        actions = [advance] * layers + [append] * caches
        branches = [
            functools.partial(action, target.at[row], source.at[row])
            for action, target, source in zip(actions, targets, sources, strict=True)
        ]
        lax.switch(lax.axis_index("buffer"), branches)


def _advance_window(window_ref: Ref, input_ref: Ref, *, taps_ref: Ref, smem: Ref, ready: Ref) -> None:
    width = smem.shape[0]
    for slot in range(width):  # oldest first
        tap, target = taps_ref[width - 1 - slot], smem.at[slot]

        @pl.when(tap >= 0)
        def _(tap: Array = tap, target: Ref = target) -> None:
            plgpu.copy_gmem_to_smem(input_ref.at[tap], target, ready, oob_mode=IN_BOUNDS)

        @pl.when(tap < 0)
        def _(tap: Array = tap, target: Ref = target) -> None:
            plgpu.copy_gmem_to_smem(window_ref.at[width + tap], target, ready, oob_mode=IN_BOUNDS)

    plgpu.barrier_wait(ready)  # the old window is read before any of it is overwritten
    plgpu.copy_smem_to_gmem(smem, window_ref)
    plgpu.wait_smem_to_gmem(0)


def _append_rows(
    cache_ref: Ref, source_ref: Ref, *, path_ref: Ref, count: Array, start: Array, smem: Ref, ready: Ref
) -> None:
    heads, capacity = cache_ref.shape[:2]

    def append(batch: Array, _: None) -> None:
        first = batch * ROW_STEPS
        staged = jnp.minimum(count - first, ROW_STEPS)

        def fetch(step: Array, _: None) -> None:
            source = source_ref.at[path_ref[first + step]]
            plgpu.copy_gmem_to_smem(source, smem.at[step], ready.at[step], oob_mode=IN_BOUNDS)

        def write(step: Array, _: None) -> None:
            plgpu.barrier_wait(ready.at[step])
            slot = jnp.minimum(start + first + step, capacity - 1)
            for head in range(heads):
                plgpu.copy_smem_to_gmem(smem.at[step, head], cache_ref.at[head, slot])

        lax.fori_loop(0, staged, fetch, None)
        lax.fori_loop(0, staged, write, None)
        plgpu.wait_smem_to_gmem(0)

    lax.fori_loop(0, lax.div(count + ROW_STEPS - 1, ROW_STEPS), append, None)
