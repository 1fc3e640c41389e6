"""The gated delta rule over a run of text as two Mosaic GPU kernels (Hopper), in chunks of 64 tokens.

Notation as in `pallas_kernels.xla`, per value head and chunk: (I + A) U = β (V − e^G K S), O = e^G Q S + (D ∘ Q Kᵀ) U,
S ← e^{G_last} S + Kᵀ (D_last U). The first kernel makes T = (I + A)⁻¹ diag(β) and M = D ∘ Q Kᵀ of all chunks in
parallel; no state enters them. The second walks the chunks of a head and of a slice of the values, S in registers.

Queries and keys stay as they came, in bf16, which makes their products exact; their norms scale rows and columns of
float32 results. Float32 operands are split into bf16 parts, see `mosaic_common`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.constants import MIN_LOG_DECAY, NORM_EPS
from pallas_kernels.containers import GdnChunkResult
from pallas_kernels.dispatch import Precision
from pallas_kernels.mosaic_common import (
    BF16,
    COLS,
    F32,
    I32,
    ROWS,
    WGMMA,
    Ref,
    cols,
    dot,
    iota,
    num_parts,
    pairs,
    rows,
    split,
    store,
    store_strided,
    tile,
)

CHUNK = 64
VALUE_BLOCK = 64  # columns of the state per block of the second kernel
SCALES = 4  # vectors that the first kernel leaves for the second, see `_block_kernel`
STEPS = 512.0  # decays are summed as multiples of 1/512, which is exact, plus the rest, which is small


def unsupported(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,  # noqa: ARG001 - any is taken
    beta: Array,  # noqa: ARG001
    valid: Array,  # noqa: ARG001
    state: Array,  # noqa: ARG001
    *,
    precision: Precision = "default",  # noqa: ARG001
) -> str | None:
    """Which argument `gdn_chunk` cannot take, in one sentence, or None."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype != BF16:
            return f"{name} is {x.dtype.name}, expected bfloat16"
    if query.shape[3] not in {64, 128}:
        return f"the key dimension is {query.shape[3]}, expected 64 or 128"
    if value.shape[3] not in {64, 128, 256}:
        return f"the value dimension is {value.shape[3]}, expected 64, 128 or 256"
    return None


def gdn_chunk(
    query: Float[Array, "batch tokens key_heads key"],
    key: Float[Array, "batch tokens key_heads key"],
    value: Float[Array, "batch tokens value_heads value"],
    log_decay: Float[Array, "batch tokens value_heads"],
    beta: Float[Array, "batch tokens value_heads"],
    valid: Bool[Array, "batch tokens"],
    state: Float[Array, "batch value_heads key value"],
    *,
    precision: Precision = "default",
    interpret: plgpu.InterpretGPUParams | None = None,
) -> GdnChunkResult:
    """See `pallas_kernels.gdn_chunk`.

    Raises:
        ValueError: shapes or dtypes that the kernels cannot take.
    """
    if reason := unsupported(query, key, value, log_decay, beta, valid, state):
        raise ValueError(reason)
    batch, tokens, key_heads, key_dim = query.shape
    heads, value_dim = value.shape[2:]
    chunks = -(-tokens // CHUNK)
    parts = num_parts(precision)
    slots = {"default": 2, "highest": 1}[precision]  # what shared memory holds
    block = VALUE_BLOCK
    simulated = interpret is not None

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, chunks * CHUNK - tokens), *[(0, 0)] * (x.ndim - 2)])

    query, key, value = pad(query), pad(key), pad(value)
    log_decay, beta = (pad(jnp.where(valid[..., None], x.astype(F32), 0.0)) for x in (log_decay, beta))
    key_slices = tile((max(key_dim // CHUNK, parts), CHUNK, CHUNK), BF16)
    squares = tile((parts, CHUNK, CHUNK), BF16)
    matrices, scales = plgpu.kernel(
        functools.partial(_block_kernel, parts=parts, interpret=simulated),
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, chunks, 2, parts, CHUNK, CHUNK), BF16),
            jax.ShapeDtypeStruct((batch, heads, chunks, SCALES * CHUNK), F32),
        ),
        scratch_types={
            "q_smem": key_slices,
            "k_smem": key_slices,
            "a_smem": squares,
            "x_smem": squares,
            "turn_smem": plgpu.SMEM((3, CHUNK), F32),
            "loaded": plgpu.Barrier(num_arrivals=2 * key_dim // CHUNK),
        },
        grid=(batch, chunks, key_heads),
        grid_names=("batch", "chunk", "key_head"),
        interpret=interpret,
        kernel_name="gdn_chunk_blocks",
    )(query, key, log_decay, beta)
    scan_tile = functools.partial(tile, dtype=BF16, lanes=CHUNK)
    output, final = plgpu.kernel(
        functools.partial(_scan_kernel, parts=parts, slots=slots, interpret=simulated),
        out_type=(
            jax.ShapeDtypeStruct((batch, chunks * CHUNK, heads, value_dim), F32),
            jax.ShapeDtypeStruct(state.shape, F32),
        ),
        scratch_types={
            "q_smem": scan_tile((slots, CHUNK, key_dim)),
            "k_smem": scan_tile((slots, CHUNK, key_dim)),
            "v_smem": scan_tile((slots, CHUNK, block)),
            "t_smem": scan_tile((slots, parts, CHUNK, CHUNK)),
            "m_smem": scan_tile((slots, parts, CHUNK, CHUNK)),
            "write_scales": plgpu.SMEM((slots, SCALES * CHUNK), F32),
            "read_scales": plgpu.SMEM((slots, SCALES * CHUNK), F32),
            "s_smem": scan_tile((parts, key_dim, block)),
            "y_smem": scan_tile((parts, CHUNK, block)),
            "u_smem": scan_tile((parts, CHUNK, block)),
            "write_loaded": plgpu.Barrier(num_arrivals=3 + parts, num_barriers=slots),
            "read_loaded": plgpu.Barrier(num_arrivals=2 + parts, num_barriers=slots),
            **{name: plgpu.Barrier() for name in ("s_full", "s_empty", "u_full", "u_empty", "done")},
        },
        grid=(batch, heads, value_dim // block),
        grid_names=("batch", "head", "block"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="gdn_chunk_scan",
    )(query, key, value, scales, matrices, state)
    return GdnChunkResult(output[:, :tokens], final)


def _block_kernel(
    q_ref: Ref,
    k_ref: Ref,
    g_ref: Ref,
    beta_ref: Ref,
    matrix_ref: Ref,
    scale_ref: Ref,
    *,
    q_smem: Ref,
    k_smem: Ref,
    a_smem: Ref,
    x_smem: Ref,
    turn_smem: Ref,
    loaded: Ref,
    parts: int,
    interpret: bool,
) -> None:
    """T and M of one chunk for the value heads of one key head, and per token the factors for the scan.

    Those are e^G / ‖k‖, e^G key^-0.5 / ‖q‖, e^{G_last − G} / ‖k‖, and e^{G_last}, the same at every token.
    """
    batch, chunk, key_head = (lax.axis_index(name) for name in ("batch", "chunk", "key_head"))
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    key_dim = q_ref.shape[3]
    slices = range(key_dim // CHUNK)
    for n in slices:
        columns = pl.ds(n * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, tokens, key_head, columns], q_smem.at[n], loaded)
        plgpu.copy_gmem_to_smem(k_ref.at[batch, tokens, key_head, columns], k_smem.at[n], loaded)
    square = (CHUNK, CHUNK)
    row, column = iota(square, 0), iota(square, 1)
    plgpu.barrier_wait(loaded)
    gram = dot(square, [(k_smem.at[n], k_smem.at[n].T) for n in slices], interpret=interpret)
    lookup = dot(square, [(q_smem.at[n], k_smem.at[n].T) for n in slices], interpret=interpret)
    k_norm = lax.rsqrt(jnp.sum(jnp.where(row == column, gram, 0.0), axis=1) + NORM_EPS)
    queries = [plgpu.load(q_smem.at[n], layout=WGMMA).astype(F32) for n in slices]
    q_norm = lax.rsqrt(functools.reduce(jnp.add, [jnp.sum(q * q, axis=1) for q in queries]) + NORM_EPS) * key_dim**-0.5
    [k_norm_columns] = _turn([k_norm], turn_smem)
    gram *= rows(k_norm, square) * k_norm_columns
    lookup *= rows(q_norm, square) * k_norm_columns
    group = g_ref.shape[2] // k_ref.shape[2]

    def add_head(member: Array, _: None) -> None:
        head = key_head * group + member
        g, beta = (plgpu.load(ref.at[batch, tokens, head], layout=ROWS, optimized=False) for ref in (g_ref, beta_ref))
        g = jnp.maximum(g, MIN_LOG_DECAY)
        whole = (g * STEPS).astype(I32).astype(F32) * (1 / STEPS)
        *decays, beta_columns = _turn([whole, g - whole, beta], turn_smem)
        coarse, fine = (jnp.sum(jnp.where(row >= column, x, 0.0), axis=1) for x in decays)
        coarse_last, fine_last = (jnp.sum(x, axis=1) for x in decays)
        reach = jnp.exp(coarse + fine)
        rest = jnp.exp((coarse_last - coarse) + (fine_last - fine))
        factors = (reach * k_norm, reach * q_norm, rest * k_norm, jnp.exp(coarse_last + fine_last))
        for n, factor in enumerate(factors):
            store_strided(scale_ref.at[batch, head, chunk, pl.ds(n * CHUNK, CHUNK)], factor)
        coarse_columns, fine_columns = _turn([coarse, fine], turn_smem)
        exponent = (rows(coarse, square) - coarse_columns) + (rows(fine, square) - fine_columns)
        decay = jnp.exp(jnp.where(row >= column, exponent, -jnp.inf))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before
        publish = functools.partial(_publish, parts=parts, target=matrix_ref.at[batch, head, chunk])
        publish(lookup * decay, q_smem, 1)
        a = jnp.where(row == column, 0.0, gram * decay * rows(beta, square))
        publish(_invert(a, a_smem, x_smem, interpret=interpret) * beta_columns, k_smem, 0)

    lax.fori_loop(0, group, add_head, None)
    plgpu.wait_smem_to_gmem(0)


def _turn(vectors: list[Array], smem: Ref) -> list[Array]:
    """Tiles with a value per column, of vectors with a value per row."""
    for n, vector in enumerate(vectors):
        smem[n] = vector
    plgpu.commit_smem()
    return [cols(plgpu.load(smem.at[n], layout=COLS), (CHUNK, CHUNK)) for n in range(len(vectors))]


def _publish(matrix: Array, smem: Ref, kind: int, *, parts: int, target: Ref) -> None:
    store(split(matrix, parts), [smem.at[n] for n in range(parts)])
    for n in range(parts):
        plgpu.copy_smem_to_gmem(smem.at[n], target.at[kind, n])


def _invert(a: Array, a_smem: Ref, x_smem: Ref, *, interpret: bool) -> Array:
    """(I + a)⁻¹ by block halving, X ← X − X A_off X, where A_off joins two inverted blocks each.

    X A has other blocks than those of X A_off, but only below them: the mask may come after the product.
    """
    square = (CHUNK, CHUNK)
    row, column = iota(square, 0), iota(square, 1)
    apart = lax.bitwise_xor(row, column)
    parts = a_smem.shape[0]
    a_refs, x_refs = ([smem.at[n] for n in range(parts)] for smem in (a_smem, x_smem))
    store(split(a, parts), a_refs)

    def halve(level: Array, x: Array) -> Array:
        x_parts = split(x, parts)
        store(x_parts, x_refs)
        step = dot(square, pairs(x_parts, a_refs), interpret=interpret)
        step = jnp.where(lax.shift_right_logical(apart, level) == 1, step, 0.0)
        return x - dot(square, pairs(split(step, parts), x_refs), interpret=interpret)

    x = jnp.where(apart == 1, -a, jnp.where(row == column, 1.0, 0.0))
    return lax.fori_loop(1, CHUNK.bit_length() - 1, halve, x)


def _scan_kernel(*operands: Ref, parts: int, slots: int, interpret: bool, **scratch: Ref) -> None:
    """One warpgroup writes the state, the other reads it out; each loads what it needs `slots` chunks ahead."""
    scan = _Scan(*operands, **scratch, parts=parts, slots=slots, interpret=interpret)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(scan.write)
    pl.when(warpgroup == 1)(scan.read)


class _Scan(NamedTuple):
    """Operands and scratch of `_scan_kernel`; leading axes of shared memory are the slots, or the parts."""

    q_ref: Ref
    k_ref: Ref
    v_ref: Ref
    scale_ref: Ref
    matrix_ref: Ref
    s_ref: Ref
    o_ref: Ref
    s_out: Ref
    q_smem: Ref
    k_smem: Ref
    v_smem: Ref
    t_smem: Ref
    m_smem: Ref
    write_scales: Ref
    read_scales: Ref
    s_smem: Ref
    y_smem: Ref
    u_smem: Ref
    write_loaded: Ref
    read_loaded: Ref
    s_full: Ref
    s_empty: Ref
    u_full: Ref
    u_empty: Ref
    done: Ref
    parts: int
    slots: int
    interpret: bool

    @property
    def chunks(self) -> int:
        return self.scale_ref.shape[2]

    @property
    def wide(self) -> tuple[int, int]:
        """Shape of a chunk's rows of the block."""
        return CHUNK, self.s_smem.shape[2]

    @property
    def values(self) -> pl.Slice:
        """The block's slice of the value dimension."""
        return pl.ds(lax.axis_index("block") * self.wide[1], self.wide[1])

    def pieces(self, smem: Ref) -> list[Ref]:
        return [smem.at[n] for n in range(self.parts)]

    def fetch_writes(self, chunk: Array | int, slot: Array | int) -> None:
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        tokens, ready = pl.ds(chunk * CHUNK, CHUNK), self.write_loaded.at[slot]
        plgpu.copy_gmem_to_smem(self.k_ref.at[batch, tokens, self._key_head()], self.k_smem.at[slot], ready)
        plgpu.copy_gmem_to_smem(self.v_ref.at[batch, tokens, head, self.values], self.v_smem.at[slot], ready)
        plgpu.copy_gmem_to_smem(self.scale_ref.at[batch, head, chunk], self.write_scales.at[slot], ready)
        for n in range(self.parts):
            plgpu.copy_gmem_to_smem(self.matrix_ref.at[batch, head, chunk, 0, n], self.t_smem.at[slot, n], ready)

    def fetch_reads(self, chunk: Array | int, slot: Array | int) -> None:
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        tokens, ready = pl.ds(chunk * CHUNK, CHUNK), self.read_loaded.at[slot]
        plgpu.copy_gmem_to_smem(self.q_ref.at[batch, tokens, self._key_head()], self.q_smem.at[slot], ready)
        plgpu.copy_gmem_to_smem(self.scale_ref.at[batch, head, chunk], self.read_scales.at[slot], ready)
        for n in range(self.parts):
            plgpu.copy_gmem_to_smem(self.matrix_ref.at[batch, head, chunk, 1, n], self.m_smem.at[slot, n], ready)

    def _key_head(self) -> Array:
        return lax.div(lax.axis_index("head"), self.v_ref.shape[2] // self.k_ref.shape[2])

    def refill(self, fetch: Callable, chunk: Array, slot: Array) -> None:
        plgpu.commit_smem()  # every warp is done with the slot
        pl.when(chunk + self.slots < self.chunks)(lambda: fetch(chunk + self.slots, slot))

    def scale(self, smem: Ref, slot: Array, kind: int) -> Array:
        return rows(plgpu.load(smem.at[slot, pl.ds(kind * CHUNK, CHUNK)], layout=ROWS), self.wide)

    def dot(self, a: list, b: list) -> Array:
        return dot(self.wide, pairs(a, b), interpret=self.interpret)

    def write(self) -> None:
        """U of every chunk, and the state after it."""
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        s_refs, y_refs = self.pieces(self.s_smem), self.pieces(self.y_smem)

        def advance(chunk: Array, s: Array) -> Array:
            slot = lax.rem(chunk, self.slots)
            plgpu.barrier_wait(self.s_empty)
            store(split(s, self.parts), s_refs)
            plgpu.barrier_arrive(self.s_full)
            plgpu.barrier_wait(self.write_loaded.at[slot])
            inherited = self.dot([self.k_smem.at[slot]], s_refs) * self.scale(self.write_scales, slot, 0)
            y = plgpu.load(self.v_smem.at[slot], layout=WGMMA).astype(F32) - inherited
            store(split(y, self.parts), y_refs)
            u = self.dot(self.pieces(self.t_smem.at[slot]), y_refs)
            store(split(u * self.scale(self.write_scales, slot, 2), self.parts), y_refs)
            forget = self.write_scales[slot, 3 * CHUNK]
            written = self._outer(self.k_smem.at[slot].T, y_refs, u)
            self.refill(self.fetch_writes, chunk, slot)
            return s * forget + written

        for slot in range(min(self.slots, self.chunks)):
            self.fetch_writes(slot, slot)
        s = plgpu.load(self.s_ref.at[batch, head, :, self.values], layout=WGMMA, optimized=False)
        s = lax.fori_loop(0, self.chunks, advance, s)
        store_strided(self.s_out.at[batch, head, :, self.values], s)
        plgpu.barrier_arrive(self.done)  # a warpgroup that exits while another multiplies is an illegal instruction
        plgpu.barrier_wait(self.s_empty)
        plgpu.barrier_wait(self.u_empty)

    def _outer(self, k: Ref, y_refs: list[Ref], u: Array) -> Array:
        """Kᵀ y; passes U on to the reader while the tensor cores are busy."""

        def publish() -> None:
            plgpu.barrier_wait(self.u_empty)
            store(split(u, self.parts), self.pieces(self.u_smem))
            plgpu.barrier_arrive(self.u_full)

        shape = self.s_smem.shape[1:]
        if self.interpret:
            publish()
            return dot(shape, pairs([k], y_refs), interpret=True)

        def body(acc: Ref) -> Array:
            for a, b in pairs([k], y_refs):
                plgpu.wgmma(acc, a, b)
            publish()
            return acc[...]

        return lax.optimization_barrier(pl.run_scoped(body, plgpu.ACC(shape, F32)))

    def read(self) -> None:
        """Outputs of every chunk."""
        batch, head = lax.axis_index("batch"), lax.axis_index("head")

        def read_chunk(chunk: Array, _: None) -> None:
            slot = lax.rem(chunk, self.slots)
            plgpu.barrier_wait(self.read_loaded.at[slot])
            plgpu.barrier_wait(self.s_full)
            output = self.dot([self.q_smem.at[slot]], self.pieces(self.s_smem))
            plgpu.barrier_arrive(self.s_empty)
            output *= self.scale(self.read_scales, slot, 1)
            plgpu.barrier_wait(self.u_full)
            output += self.dot(self.pieces(self.m_smem.at[slot]), self.pieces(self.u_smem))
            plgpu.barrier_arrive(self.u_empty)
            store_strided(self.o_ref.at[batch, pl.ds(chunk * CHUNK, CHUNK), head, self.values], output)
            self.refill(self.fetch_reads, chunk, slot)

        for slot in range(min(self.slots, self.chunks)):
            self.fetch_reads(slot, slot)
        plgpu.barrier_arrive(self.s_empty)
        plgpu.barrier_arrive(self.u_empty)
        lax.fori_loop(0, self.chunks, read_chunk, None)
        plgpu.barrier_wait(self.done)
