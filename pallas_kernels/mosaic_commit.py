"""Commit of an accepted path into the caches of all layers, in place, as two Mosaic GPU kernels (Hopper and newer).

`commit_states` advances the recurrent states: S ← e^{G_leaf} S + Σ_j e^{G_leaf − G_j} k_j u_jᵀ along the path, the keys
normalised here, all in float32 FMA. It reads and writes every state once, and hardly anything else: the device's copy
bandwidth bounds it. `commit_rows` moves what is only copied, the windows of the convolutions and the K/V rows.

One launch serves all layers, because a launch of one layer ends before the memory system is busy. A kernel cannot pick
a buffer by a run-time index, so each layer is a branch; the branches hold nothing but bulk copies between global and
shared memory (and scalar loads), which need no TMA descriptor and no register layout: 48 branches that held register
values took the layout inference minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

__all__ = ["commit_rows", "commit_states", "unsupported", "unsupported_rows"]

KEY_BLOCK = 64  # key rows of a state per block: four or five blocks share a multiprocessor and hide each other's waits
STEPS = 8  # path nodes staged in shared memory at a time
ROW_STEPS = 16  # the same of K/V rows
NORM_EPS = 1e-6
NORM_TILE = 8  # rows of the tile whose row sums are the squared norm of a key, each of them
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
    refs = [jax.new_ref(state) for state in states]
    plgpu.kernel(
        functools.partial(_states_kernel, layers=len(states), group=heads // keys[0].shape[2]),
        out_type=(),
        scratch_types={
            "s_smem": plgpu.SMEM((KEY_BLOCK, value), jnp.float32),
            "k_smem": plgpu.SMEM((STEPS * key,), keys[0].dtype),
            "u_smem": plgpu.SMEM((STEPS * value,), jnp.float32),
            "decay_smem": plgpu.SMEM((STEPS,), jnp.float32),
            "norm_smem": plgpu.SMEM((STEPS * NORM_TILE,), jnp.float32),
            "state_ready": plgpu.Barrier(),
            "rows_ready": plgpu.Barrier(num_arrivals=2, num_barriers=STEPS),
        },
        grid=(len(states), batch, heads, key // KEY_BLOCK),
        grid_names=("layer", "row", "head", "block"),
        interpret=interpret,
        kernel_name="gdn_commit_states",
    )(*refs, *keys, *updates, *path_decays, path.astype(jnp.int32), count.astype(jnp.int32))
    return tuple(ref[...] for ref in refs)


def _tile_layout(rows: int, columns: int) -> Hashable:
    """Consecutive rows per warp, 16 bytes of a row per lane: coalesced, with the same column vector in each warp."""
    if columns == 64:  # noqa: PLR2004
        return plgpu.Layout.TILED(
            plgpu.Tiling(((rows, columns), (rows // 4, columns), (2, 4))),
            warp_dims=(-6,),
            lane_dims=(-2, -3),
            vector_dim=-1,
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, 128), (rows // 4, 128), (4,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
    )


def _states_kernel(
    *refs: jax.Ref,
    layers: int,
    group: int,
    s_smem: jax.Ref,
    k_smem: jax.Ref,
    u_smem: jax.Ref,
    decay_smem: jax.Ref,
    norm_smem: jax.Ref,
    state_ready: jax.Ref,
    rows_ready: jax.Ref,
) -> None:
    states, keys, updates, decays = (refs[i * layers : (i + 1) * layers] for i in range(4))
    path_ref, count_ref = refs[4 * layers :]
    layer, row, head = (lax.axis_index(name) for name in ("layer", "row", "head"))
    start = lax.axis_index("block") * KEY_BLOCK
    block = pl.ds(start, KEY_BLOCK)
    key, value = k_smem.shape[0] // STEPS, s_smem.shape[1]
    layout, norm_layout = _tile_layout(KEY_BLOCK, value), _tile_layout(NORM_TILE, key)
    count = count_ref[row]

    def on_layer(action: Callable, *per_layer: Sequence[jax.Ref]) -> Array | None:
        return lax.switch(
            layer, [functools.partial(action, *layer_refs) for layer_refs in zip(*per_layer, strict=True)]
        )

    def fetch_rows(k_ref: jax.Ref, u_ref: jax.Ref, decay_ref: jax.Ref, first: Array | int) -> None:
        def fetch(step: Array, _: None) -> None:
            node = path_ref[row, first + step]
            k_row, u_row = k_smem.at[pl.ds(step * key, key)], u_smem.at[pl.ds(step * value, value)]
            ready = rows_ready.at[step]
            plgpu.copy_gmem_to_smem(k_ref.at[row, node, lax.div(head, group)], k_row, ready, oob_mode=IN_BOUNDS)
            plgpu.copy_gmem_to_smem(u_ref.at[row, node, head], u_row, ready, oob_mode=IN_BOUNDS)
            decay_smem[step] = decay_ref[row, node, head]

        lax.fori_loop(0, jnp.minimum(count - first, STEPS), fetch, None)

    def norm(step: Array, _: None) -> None:
        k = plgpu.load(k_smem.at[pl.ds(step * key, key)], layout=norm_layout.reduce(0)).astype(jnp.float32)
        squares = plgpu.layout_cast(lax.broadcast_in_dim(k * k, (NORM_TILE, key), [1]), norm_layout)
        norm_smem[pl.ds(step * NORM_TILE, NORM_TILE)] = lax.rsqrt(jnp.sum(squares, axis=1) + NORM_EPS)

    @pl.when(count > 0)
    def _() -> None:
        leaf = path_ref[row, count - 1]

        def start_layer(s_ref: jax.Ref, k_ref: jax.Ref, u_ref: jax.Ref, decay_ref: jax.Ref) -> Array:
            plgpu.copy_gmem_to_smem(s_ref.at[row, head, block], s_smem, state_ready, oob_mode=IN_BOUNDS)
            fetch_rows(k_ref, u_ref, decay_ref, 0)
            return decay_ref[row, leaf, head]

        leaf_decay = on_layer(start_layer, states, keys, updates, decays)

        def fold(first: Array | int, s: Array) -> Array:
            """Adds the staged steps from `first` on."""
            staged = jnp.minimum(count - first, STEPS)
            lax.fori_loop(0, staged, lambda step, _: plgpu.barrier_wait(rows_ready.at[step]), None)
            lax.fori_loop(0, staged, norm, None)
            plgpu.commit_smem()

            def add(step: Array, s: Array) -> Array:
                weight = jnp.exp(leaf_decay - decay_smem[step]) * norm_smem[step * NORM_TILE]
                k = plgpu.load(k_smem.at[pl.ds(step * key + start, KEY_BLOCK)], layout=layout.reduce(1))
                u = plgpu.load(u_smem.at[pl.ds(step * value, value)], layout=layout.reduce(0)) * weight
                k = lax.broadcast_in_dim(k.astype(jnp.float32), s.shape, [0])
                return s + k * lax.broadcast_in_dim(u, s.shape, [1])

            return lax.fori_loop(0, staged, add, s)

        def fold_more(batch: Array, s: Array) -> Array:
            plgpu.commit_smem()  # every warp has read the steps before
            first = batch * STEPS
            on_layer(functools.partial(fetch_rows, first=first), keys, updates, decays)
            return fold(first, s)

        plgpu.barrier_wait(state_ready)
        s = fold(0, plgpu.load(s_smem, layout=layout) * jnp.exp(leaf_decay))
        s_smem[...] = lax.fori_loop(1, lax.div(count + STEPS - 1, STEPS), fold_more, s)
        plgpu.commit_smem()
        on_layer(lambda s_ref: plgpu.copy_smem_to_gmem(s_smem, s_ref.at[row, head, block]), states)
        plgpu.wait_smem_to_gmem(0)


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
    scratch = {}
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
    *refs: jax.Ref,
    layers: int,
    caches: int,
    window_smem: jax.Ref | None = None,
    window_ready: jax.Ref | None = None,
    rows_smem: jax.Ref | None = None,
    rows_ready: jax.Ref | None = None,
) -> None:
    buffers = layers + caches
    targets, sources = refs[:buffers], refs[buffers : 2 * buffers]
    taps_ref, lengths_ref, path_ref, count_ref = refs[2 * buffers :]
    row = lax.axis_index("row")
    count = count_ref[row]

    def advance_window(window_ref: jax.Ref, input_ref: jax.Ref) -> None:
        leaf, width = path_ref[row, count - 1], window_smem.shape[0]
        for slot in range(width):  # oldest first
            tap, target = taps_ref[row, leaf, width - 1 - slot], window_smem.at[slot]

            @pl.when(tap >= 0)
            def _(tap: Array = tap, target: jax.Ref = target) -> None:
                plgpu.copy_gmem_to_smem(input_ref.at[row, tap], target, window_ready, oob_mode=IN_BOUNDS)

            @pl.when(tap < 0)
            def _(tap: Array = tap, target: jax.Ref = target) -> None:
                plgpu.copy_gmem_to_smem(window_ref.at[row, width + tap], target, window_ready, oob_mode=IN_BOUNDS)

        plgpu.barrier_wait(window_ready)  # the old window is read before any of it is overwritten
        plgpu.copy_smem_to_gmem(window_smem, window_ref.at[row])
        plgpu.wait_smem_to_gmem(0)

    def append_rows(cache_ref: jax.Ref, source_ref: jax.Ref) -> None:
        heads, capacity = cache_ref.shape[1:3]
        length = lengths_ref[row]

        def append(batch: Array, _: None) -> None:
            first = batch * ROW_STEPS
            staged = jnp.minimum(count - first, ROW_STEPS)

            def fetch(step: Array, _: None) -> None:
                source = source_ref.at[row, path_ref[row, first + step]]
                plgpu.copy_gmem_to_smem(source, rows_smem.at[step], rows_ready.at[step], oob_mode=IN_BOUNDS)

            def write(step: Array, _: None) -> None:
                plgpu.barrier_wait(rows_ready.at[step])
                slot = jnp.minimum(length + first + step, capacity - 1)
                for head in range(heads):
                    plgpu.copy_smem_to_gmem(rows_smem.at[step, head], cache_ref.at[row, head, slot])

            lax.fori_loop(0, staged, fetch, None)
            lax.fori_loop(0, staged, write, None)
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, lax.div(count + ROW_STEPS - 1, ROW_STEPS), append, None)

    @pl.when(count > 0)
    def _() -> None:
        actions = [advance_window] * layers + [append_rows] * caches
        branches = [functools.partial(*branch) for branch in zip(actions, targets, sources, strict=True)]
        lax.switch(lax.axis_index("buffer"), branches)
