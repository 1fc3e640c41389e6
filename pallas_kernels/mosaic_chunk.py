"""The gated delta rule over a run of text as two Mosaic GPU kernels (Hopper and newer), in chunks of 64 tokens.

Notation as in `pallas_kernels.xla`, per value head and chunk: (I + A) U = β (V − e^G K S), O = e^G Q S + (D ∘ Q Kᵀ) U,
S ← e^{G_last} S + Kᵀ (D_last U). The first kernel makes T = (I + A)⁻¹ diag(β) and M = D ∘ Q Kᵀ of all chunks in parallel;
no state enters them. The second walks the chunks of a head and a slice of the value dimension with S in registers.

Queries and keys stay as they came, in bf16, which makes their products exact; their norms scale rows and columns of
float32 results. Float32 operands are split into bf16 parts, see `mosaic_common`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.containers import GdnChunkResult
from pallas_kernels.mosaic_common import (
    BF16,
    COLS,
    F32,
    ROWS,
    WGMMA,
    Precision,
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
MIN_LOG_DECAY = -88.0
NORM_EPS = 1e-6
STEPS = 512.0  # decays are summed as multiples of 1/512, which is exact, plus the rest, which is small


class _Gates(NamedTuple):
    """What both kernels need per token; [batch, heads, tokens], the tokens padded to whole chunks."""

    coarse: Array  # Σ of the log-decays rounded to multiples of 1 / STEPS, within the chunk
    fine: Array  # Σ of what the rounding left
    beta: Array
    k_norm: Array  # 1 / ‖k‖; per key head
    q_norm: Array  # key^-0.5 / ‖q‖; per key head
    row_scales: Array  # [batch, heads, chunks, 3 · CHUNK]: e^G / ‖k‖, e^G key^-0.5 / ‖q‖, e^{G_last − G} / ‖k‖
    forget: Array  # [batch, heads, chunks]: e^{G_last}


def unsupported(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    valid: Array,
    state: Array,
) -> str | None:
    """Which argument `gdn_chunk` cannot take, in one sentence, or None."""
    if query.dtype != BF16 or value.dtype != BF16:
        return f"query is {query.dtype.name} and value {value.dtype.name}, expected bfloat16"
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
    block: int = 64,
    slots: int | None = None,
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
    slots = slots or {"default": 2, "highest": 1}[precision]

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, chunks * CHUNK - tokens), *[(0, 0)] * (x.ndim - 2)])

    query, key, value = pad(query), pad(key), pad(value)
    gates = _prepare(query, key, pad(log_decay * valid[..., None]), pad(beta * valid[..., None]), heads // key_heads)
    matrices = plgpu.kernel(
        functools.partial(_block_kernel, parts=parts, group=heads // key_heads, interpret=interpret is not None),
        out_type=jax.ShapeDtypeStruct((batch, heads, chunks, 2, parts, CHUNK, CHUNK), BF16),
        scratch_types={
            "q_smem": tile((max(key_dim // CHUNK, parts), CHUNK, CHUNK), BF16),
            "k_smem": tile((max(key_dim // CHUNK, parts), CHUNK, CHUNK), BF16),
            "a_smem": tile((parts, CHUNK, CHUNK), BF16),
            "x_smem": tile((parts, CHUNK, CHUNK), BF16),
            "turn_smem": plgpu.SMEM((3, CHUNK), F32),
            "loaded": plgpu.Barrier(num_arrivals=2 * key_dim // CHUNK),
        },
        grid=(batch, chunks, key_heads),
        grid_names=("batch", "chunk", "key_head"),
        interpret=interpret,
        kernel_name="gdn_chunk_blocks",
    )(query, key, *gates[:5])
    scan_tile = functools.partial(tile, dtype=BF16, lanes=min(CHUNK, block))
    output, final = plgpu.kernel(
        functools.partial(_scan_kernel, parts=parts, slots=slots, interpret=interpret is not None),
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
            "scale_smem": plgpu.SMEM((slots, 3 * CHUNK), F32),
            "s_smem": scan_tile((parts, key_dim, block)),
            "y_smem": scan_tile((parts, CHUNK, block)),
            "u_smem": scan_tile((parts, CHUNK, block)),
            "loaded": plgpu.Barrier(num_arrivals=4 + 2 * parts, num_barriers=slots),
        },
        grid=(batch, heads, value_dim // block),
        grid_names=("batch", "head", "block"),
        interpret=interpret,
        kernel_name="gdn_chunk_scan",
    )(query, key, value, gates.row_scales, gates.forget, matrices, state)
    return GdnChunkResult(output[:, :tokens], final)


@functools.partial(jax.jit, static_argnames="group")
def _prepare(query: Array, key: Array, log_decay: Array, beta: Array, group: int) -> _Gates:
    batch, tokens, heads = beta.shape
    chunks = tokens // CHUNK

    def heads_first(x: Array) -> Array:
        return jnp.swapaxes(x, 1, 2)

    def inverse_norm(x: Array) -> Array:
        x = x.astype(F32)
        return heads_first(lax.rsqrt(jnp.sum(x * x, axis=-1) + NORM_EPS))

    g = heads_first(jnp.maximum(log_decay.astype(F32), MIN_LOG_DECAY)).reshape(batch, heads, chunks, CHUNK)
    whole = jnp.trunc(g * STEPS) * (1 / STEPS)
    coarse, fine = jnp.cumsum(whole, axis=-1), jnp.cumsum(g - whole, axis=-1)
    reach = jnp.exp(coarse + fine)
    rest = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))
    k_norm, q_norm = inverse_norm(key), inverse_norm(query) * query.shape[3] ** -0.5

    def spread(x: Array) -> Array:
        return jnp.repeat(x, group, axis=1).reshape(batch, heads, chunks, CHUNK)

    scales = jnp.concatenate([reach * spread(k_norm), reach * spread(q_norm), rest * spread(k_norm)], axis=-1)
    flat = (batch, heads, tokens)
    beta = heads_first(beta.astype(F32))
    return _Gates(coarse.reshape(flat), fine.reshape(flat), beta, k_norm, q_norm, scales, reach[..., -1])


def _block_kernel(
    q_ref: jax.Ref,
    k_ref: jax.Ref,
    coarse_ref: jax.Ref,
    fine_ref: jax.Ref,
    beta_ref: jax.Ref,
    k_norm_ref: jax.Ref,
    q_norm_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    q_smem: jax.Ref,
    k_smem: jax.Ref,
    a_smem: jax.Ref,
    x_smem: jax.Ref,
    turn_smem: jax.Ref,
    loaded: jax.Ref,
    parts: int,
    group: int,
    interpret: bool,
) -> None:
    batch, chunk, key_head = (lax.axis_index(name) for name in ("batch", "chunk", "key_head"))
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    slices = q_ref.shape[3] // CHUNK
    for n in range(slices):
        for ref, target in ((q_ref, q_smem), (k_ref, k_smem)):
            source = ref.at[batch, tokens, key_head, pl.ds(n * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(source, target.at[n], loaded)
    square = (CHUNK, CHUNK)
    row, column = iota(square, 0), iota(square, 1)
    apart = lax.bitwise_xor(row, column)

    def load(ref: jax.Ref, head: Array) -> Array:
        return plgpu.load(ref.at[batch, head, tokens], layout=ROWS, optimized=False)

    def turn(*vectors: Array) -> list[Array]:
        """A value per row as a value per column."""
        for n, vector in enumerate(vectors):
            turn_smem[n] = vector
        plgpu.commit_smem()
        return [cols(plgpu.load(turn_smem.at[n], layout=COLS), square) for n in range(len(vectors))]

    def product(a: list, b: list) -> Array:
        return dot(square, pairs(a, b), interpret=interpret)

    k_norm, q_norm = load(k_norm_ref, key_head), load(q_norm_ref, key_head)
    [k_norm_columns] = turn(k_norm)
    a_refs, x_refs = ([smem.at[n] for n in range(parts)] for smem in (a_smem, x_smem))
    plgpu.barrier_wait(loaded)
    k_rows = [k_smem.at[n] for n in range(slices)]
    gram = dot(square, [(k, k.T) for k in k_rows], interpret=interpret)
    gram *= rows(k_norm, square) * k_norm_columns
    lookup = dot(square, [(q_smem.at[n], k.T) for n, k in enumerate(k_rows)], interpret=interpret)
    lookup *= rows(q_norm, square) * k_norm_columns

    def publish(matrix: Array, smem: jax.Ref, head: Array, kind: int) -> None:
        store(split(matrix, parts), [smem.at[n] for n in range(parts)])
        for n in range(parts):
            plgpu.copy_smem_to_gmem(smem.at[n], out_ref.at[batch, head, chunk, kind, n])

    for member in range(group):
        head = key_head * group + member
        coarse, fine, beta = (load(ref, head) for ref in (coarse_ref, fine_ref, beta_ref))
        coarse_columns, fine_columns, beta_columns = turn(coarse, fine, beta)
        exponent = (rows(coarse, square) - coarse_columns) + (rows(fine, square) - fine_columns)
        decay = jnp.exp(jnp.where(row >= column, exponent, -jnp.inf))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before
        publish(lookup * decay, q_smem, head, 1)
        a = jnp.where(row == column, 0.0, gram * decay * rows(beta, square))
        store(split(a, parts), a_refs)

        def halve(level: Array, x: Array) -> Array:
            """X ← X − X A_off X, A_off the blocks of A that join two inverted ones; X A has no others but those below."""
            x_parts = split(x, parts)
            store(x_parts, x_refs)
            step = jnp.where(lax.shift_right_logical(apart, level) == 1, product(x_parts, a_refs), 0.0)
            return x - product(split(step, parts), x_refs)

        x = jnp.where(apart == 1, -a, jnp.where(row == column, 1.0, 0.0))
        x = lax.fori_loop(1, CHUNK.bit_length() - 1, halve, x)
        publish(x * beta_columns, k_smem, head, 0)
    plgpu.wait_smem_to_gmem(0)


def _scan_kernel(
    q_ref: jax.Ref,
    k_ref: jax.Ref,
    v_ref: jax.Ref,
    scale_ref: jax.Ref,
    forget_ref: jax.Ref,
    matrix_ref: jax.Ref,
    s_ref: jax.Ref,
    o_ref: jax.Ref,
    s_out: jax.Ref,
    *,
    q_smem: jax.Ref,
    k_smem: jax.Ref,
    v_smem: jax.Ref,
    t_smem: jax.Ref,
    m_smem: jax.Ref,
    scale_smem: jax.Ref,
    s_smem: jax.Ref,
    y_smem: jax.Ref,
    u_smem: jax.Ref,
    loaded: jax.Ref,
    parts: int,
    slots: int,
    interpret: bool,
) -> None:
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    key, block = s_smem.shape[1:]
    values = pl.ds(lax.axis_index("block") * block, block)
    key_head = lax.div(head, v_ref.shape[2] // k_ref.shape[2])
    chunks = forget_ref.shape[2]
    wide = (CHUNK, block)
    s_refs, y_refs, u_refs = ([smem.at[n] for n in range(parts)] for smem in (s_smem, y_smem, u_smem))

    def fetch(chunk: Array | int, slot: Array | int) -> None:
        tokens, ready = pl.ds(chunk * CHUNK, CHUNK), loaded.at[slot]
        plgpu.copy_gmem_to_smem(k_ref.at[batch, tokens, key_head], k_smem.at[slot], ready)
        plgpu.copy_gmem_to_smem(v_ref.at[batch, tokens, head, values], v_smem.at[slot], ready)
        plgpu.copy_gmem_to_smem(scale_ref.at[batch, head, chunk], scale_smem.at[slot], ready)
        for kind, smem in enumerate((t_smem, m_smem)):
            for n in range(parts):
                plgpu.copy_gmem_to_smem(matrix_ref.at[batch, head, chunk, kind, n], smem.at[slot, n], ready)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, tokens, key_head], q_smem.at[slot], ready)

    def product(a: list, b: list) -> Array:
        return dot(wide, pairs(a, b), interpret=interpret)

    def advance(chunk: Array, s: Array) -> Array:
        slot = lax.rem(chunk, slots)
        forget = forget_ref[batch, head, chunk]
        store(split(s, parts), s_refs)
        plgpu.barrier_wait(loaded.at[slot])
        reach, look, rest = (
            plgpu.load(scale_smem.at[slot, pl.ds(n * CHUNK, CHUNK)], layout=ROWS) for n in range(3)
        )
        inherited = dot(wide, [(k_smem.at[slot], part) for part in reversed(s_refs)], interpret=interpret)
        y = plgpu.load(v_smem.at[slot], layout=WGMMA).astype(F32) - inherited * rows(reach, wide)
        store(split(y, parts), y_refs)
        u = product([t_smem.at[slot, n] for n in range(parts)], y_refs)
        store(split(u, parts), u_refs)
        store(split(u * rows(rest, wide), parts), y_refs)
        written = dot((key, block), [(k_smem.at[slot].T, part) for part in reversed(y_refs)], interpret=interpret)
        output = dot(wide, [(q_smem.at[slot], part) for part in reversed(s_refs)], interpret=interpret)
        output = output * rows(look, wide) + product([m_smem.at[slot, n] for n in range(parts)], u_refs)
        store_strided(o_ref.at[batch, pl.ds(chunk * CHUNK, CHUNK), head, values], output)
        plgpu.commit_smem()  # every warp is done with the slot

        @pl.when(chunk + slots < chunks)
        def _() -> None:
            fetch(chunk + slots, slot)

        return s * forget + written

    for slot in range(min(slots, chunks)):
        fetch(slot, slot)
    s = plgpu.load(s_ref.at[batch, head, :, values], layout=WGMMA, optimized=False)
    store_strided(s_out.at[batch, head, :, values], lax.fori_loop(0, chunks, advance, s))
