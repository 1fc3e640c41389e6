"""Verification of a tree by the gated delta rule as one Mosaic GPU kernel (Hopper and newer)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.containers import GdnTreeResult
from pallas_kernels.mosaic_common import (
    BF16,
    COLS,
    F32,
    I32,
    ROWS,
    TILE_ROWS,
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

MIN_LOG_DECAY = -88.0
NORM_EPS = 1e-6
WORD = 32
SQUARINGS = 2
SLOTS = 2
STEPS = 512.0
SMEM_BYTES = 232448 - 1024


def pack_ancestors(ancestors: jax.Array) -> jax.Array:
    """[batch, nodes, nodes] bool -> [batch, words + 2, padded nodes] int32: bit words of each row, depth, levels."""
    batch, nodes, _ = ancestors.shape
    rows_ = -(-nodes // TILE_ROWS) * TILE_ROWS
    n = rows_
    a = jnp.pad(ancestors, [(0, 0), (0, n - nodes), (0, n - nodes)])
    bits = a.reshape(batch, n, n // WORD, WORD).astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), I32)
    depth = jnp.maximum(jnp.sum(a, axis=-1, dtype=I32) - 1, 0)
    levels = 32 - lax.clz(jnp.max(depth, axis=-1))
    levels = jnp.broadcast_to(levels[:, None], (batch, n))
    return jnp.concatenate([jnp.swapaxes(words, 1, 2), depth[:, None], depth[:, None], levels[:, None]], axis=1)


class _Plan(NamedTuple):
    nodes: int
    key_heads: int
    heads: int
    key: int
    block: int
    parts: int
    interpret: bool

    @property
    def bytes(self):
        width = self.width(0)
        lines = self.key * (self.q_slots + self.tiles) + self.tiles * self.block + width * self.parts * (1 + SLOTS)
        lines += self.tiles * self.parts * self.block + 4 * self.block + 16 * self.tiles
        return 2 * (TILE_ROWS * lines + self.parts * self.key * self.block)

    @property
    def q_slots(self):
        return min(self.tiles, 2)

    @property
    def tiles(self):
        return -(-self.nodes // TILE_ROWS)

    def width(self, i):
        return min(TILE_ROWS, self.nodes - i * TILE_ROWS)


def _kernel(
    q_ref, k_ref, v_ref, g_ref, beta_ref, tree_ref, s_ref, o_ref, u_ref, g_out,
    *, q_smem, k_smem, v_smem, s_smem, a_smem, ring, y_smem, wide_smem, u_smem,
    g_rows, g_cols, gates, loaded, full, empty, gates_ready, solved, plan: _Plan,
):  # fmt: skip
    batch = lax.axis_index("batch")
    head = lax.axis_index("head")
    values = pl.ds(lax.axis_index("block") * plan.block, plan.block)
    warpgroup = lax.axis_index("warpgroup")
    key_head = lax.div(head, plan.heads // plan.key_heads)
    product = functools.partial(dot, interpret=plan.interpret)

    def span(i):
        return pl.ds(i * TILE_ROWS, plan.width(i))

    def inside(i):
        return pl.ds(0, plan.width(i))

    words = tree_ref.shape[1] - 3

    @pl.when(warpgroup == 0)
    def _():
        def copy_query(i):
            target = q_smem.at[i % plan.q_slots, inside(i)]
            plgpu.copy_gmem_to_smem(q_ref.at[batch, span(i), key_head], target, loaded.at[i])

        for i in range(plan.tiles):
            plgpu.copy_gmem_to_smem(k_ref.at[batch, span(i), key_head], k_smem.at[i, inside(i)], loaded.at[i])
            if i < plan.q_slots:
                copy_query(i)
            plgpu.copy_gmem_to_smem(v_ref.at[batch, span(i), head, values], v_smem.at[i, inside(i)], loaded.at[i])
        levels = jnp.maximum(tree_ref[batch, words + 2, 0], SQUARINGS + 2)
        pushed = [0]

        def slot():
            return ring.at[pushed[0] % SLOTS]

        def claim():
            if pushed[0] >= SLOTS:
                plgpu.barrier_wait(empty.at[pushed[0] % SLOTS])

        def put(x):
            refs = [slot().at[p, :, pl.ds(0, x.shape[1])] if False else slot().at[p] for p in range(plan.parts)]
            parts = split(x, plan.parts)
            store(parts, refs)
            return parts, refs

        def push():
            plgpu.barrier_arrive(full.at[pushed[0] % SLOTS])
            pushed[0] += 1

        def on_path(i, j):
            shape = (TILE_ROWS, plan.width(j))
            column = iota(shape, 1)
            word = rows(
                plgpu.load(tree_ref.at[batch, 2 * j, pl.ds(i * TILE_ROWS, TILE_ROWS)], layout=ROWS, optimized=False),
                shape,
            )
            if shape[1] > WORD:
                high = plgpu.load(
                    tree_ref.at[batch, 2 * j + 1, pl.ds(i * TILE_ROWS, TILE_ROWS)], layout=ROWS, optimized=False
                )
                word = jnp.where(column < WORD, word, rows(high, shape))
            return lax.bitwise_and(lax.shift_right_logical(word, lax.bitwise_and(column, 31)), 1) == 1

        def gate(ref, i):
            return plgpu.load(ref.at[batch, pl.ds(i * TILE_ROWS, TILE_ROWS), head], layout=ROWS, optimized=False)

        def decays(i, j, mask):
            shape = (TILE_ROWS, plan.width(j))
            exponent = rows(prefix[i][0], shape) - cols(plgpu.load(g_cols.at[j, 0, inside(j)], layout=COLS), shape)
            exponent += rows(prefix[i][1], shape) - cols(plgpu.load(g_cols.at[j, 1, inside(j)], layout=COLS), shape)
            return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

        def write_updates(i):
            with jax.named_scope("update"):
                plgpu.barrier_wait(solved.at[i])
                shape = (TILE_ROWS, plan.block)
                u = sum(plgpu.load(y_smem.at[i, n], layout=WGMMA).astype(F32) for n in reversed(range(plan.parts)))
                if i > 0:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                u_smem[...] = u * rows(norms[i], shape)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(u_smem.at[inside(i)], u_ref.at[batch, span(i), head, values])

        prefix, norms = {}, {}
        for i in range(plan.tiles):
            square = (TILE_ROWS, plan.width(i))
            with jax.named_scope("gates"):
                g = jnp.maximum(gate(g_ref, i), MIN_LOG_DECAY)
                whole = (g * STEPS).astype(I32).astype(F32) * (1 / STEPS)
                g_rows[i, 0] = whole
                g_rows[i, 1] = g - whole
                plgpu.commit_smem()
                coarse, fine = 0.0, 0.0
                for j in range(i + 1):
                    shape = (TILE_ROWS, plan.width(j))
                    mask = on_path(i, j)
                    whole, rest = (cols(plgpu.load(g_rows.at[j, n, inside(j)], layout=COLS), shape) for n in range(2))
                    coarse += jnp.sum(jnp.where(mask, whole, 0.0), axis=1)
                    fine += jnp.sum(jnp.where(mask, rest, 0.0), axis=1)
                prefix[i] = coarse, fine
                g_cols[i, 0] = coarse
                g_cols[i, 1] = fine
                plgpu.commit_smem()
                diagonal = iota(square, 0) == iota(square, 1)
                beta = gate(beta_ref, i)
                decay = decays(i, i, mask)
                depth_rows = plgpu.load(
                    tree_ref.at[batch, words, pl.ds(i * TILE_ROWS, TILE_ROWS)], layout=ROWS, optimized=False
                )
                depth_cols = plgpu.load(tree_ref.at[batch, words + 1, span(i)], layout=COLS, optimized=False)
                apart = lax.bitwise_xor(rows(depth_rows, square), cols(depth_cols, square))
                store_strided(g_out.at[batch, pl.ds(i * TILE_ROWS, TILE_ROWS), head], coarse + fine)
            with jax.named_scope("gram"):
                plgpu.barrier_wait(loaded.at[i])
                gram = product(square, [(k_smem.at[i], k_smem.at[i, inside(i)].T)])
                squares = jnp.sum(jnp.where(diagonal, gram, 0.0), axis=1) + NORM_EPS
                inverse_norm = lax.rsqrt(squares)
                carry = jnp.exp(coarse + fine)
                gates[i, 0] = beta * inverse_norm
                gates[i, 1] = carry * inverse_norm
                gates[i, 2] = carry
                plgpu.commit_smem()
                plgpu.barrier_arrive(gates_ready.at[i])
                scale = beta * inverse_norm * inverse_norm
                norms[i] = squares * inverse_norm
            for j in range(i):
                with jax.named_scope("below"):
                    shape = (TILE_ROWS, plan.width(j))
                    gram_j = product(shape, [(k_smem.at[i], k_smem.at[j].T)])
                    claim()
                    put(gram_j * rows(scale, shape) * decays(i, j, on_path(i, j)))
                    push()
            with jax.named_scope("couple"):
                a = jnp.where(diagonal, 0.0, gram * rows(scale, square) * decay)
                a_refs = [a_smem.at[p, inside(i)] for p in range(plan.parts)]
                store(split(a, plan.parts), [a_smem.at[p] for p in range(plan.parts)])
                x = jnp.where(apart == 1, -a, jnp.where(diagonal, 1.0, 0.0))

            claim()

            def halve(level, x):
                step = product(square, pairs(split(x, plan.parts), a_refs))
                step = jnp.where(lax.shift_right_logical(apart, level) == 1, step, 0.0)
                _, x_refs = put(x)
                return x - product(square, pairs(split(step, plan.parts), [r.at[inside(i)] for r in x_refs]))

            with jax.named_scope("halve"):
                x = lax.fori_loop(1, levels - SQUARINGS - 1, halve, x)
            with jax.named_scope("put x"):
                x_parts, _ = put(x)
                push()
            with jax.named_scope("p"):
                p = product(square, pairs(x_parts, a_refs))
                p = jnp.where(lax.shift_right_logical(apart, levels - SQUARINGS - 1) == 0, 0.0, p)
            for n in range(SQUARINGS):
                with jax.named_scope(f"put p{n}"):
                    claim()
                    p_parts, refs = put(p)
                    push()
                with jax.named_scope(f"square{n}"):
                    p = product(square, pairs(p_parts, [r.at[inside(i)] for r in refs]))
            with jax.named_scope("put last"):
                claim()
                put(p)
                push()
            if i > 0:
                write_updates(i - 1)
            for j in range(i + 1):
                with jax.named_scope("readout"):
                    shape = (TILE_ROWS, plan.width(j))
                    lookup = product(shape, [(q_smem.at[i % plan.q_slots], k_smem.at[j, inside(j)].T)])
                    claim()
                    put(lookup * (decay if j == i else decays(i, j, on_path(i, j))))
                    push()
            if i + plan.q_slots < plan.tiles:
                copy_query(i + plan.q_slots)

        write_updates(plan.tiles - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # A warpgroup that exits while another multiplies is an illegal instruction; the interpreter wants it too.
        for n in range(max(pushed[0] - SLOTS, 0), pushed[0]):
            plgpu.barrier_wait(empty.at[n % SLOTS])

    @pl.when(warpgroup == 1)
    def _():
        def query_scale(i):
            with jax.named_scope("query"):
                plgpu.barrier_wait(loaded.at[i])
                q = plgpu.load(q_smem.at[i % plan.q_slots], layout=WGMMA).astype(F32)
                return lax.rsqrt(jnp.sum(q * q, axis=1) + NORM_EPS) * plan.key**-0.5

        parts = [pl.ds(start, TILE_ROWS) for start in range(0, plan.key, TILE_ROWS)]
        # In flight together: nothing waits for them before the first split.
        states = [plgpu.load(s_ref.at[batch, head, part, values], layout=WGMMA, optimized=False) for part in parts]
        q_scale = query_scale(0)
        with jax.named_scope("state"):
            for part, s in zip(parts, states, strict=True):
                for n, piece in enumerate(split(s, plan.parts)):
                    s_smem[n, part] = piece
            plgpu.commit_smem()
        s_refs = [s_smem.at[p] for p in range(plan.parts)]
        wide = (TILE_ROWS, plan.block)
        popped = [0]

        def pop(width, b_refs):
            n = popped[0] % SLOTS
            plgpu.barrier_wait(full.at[n])
            result = product(wide, pairs([ring.at[n, p] for p in range(plan.parts)], b_refs))
            plgpu.barrier_arrive(empty.at[n])
            popped[0] += 1
            return result

        for i in range(plan.tiles):
            y_refs = [y_smem.at[i, p] for p in range(plan.parts)]
            y_used = [y_smem.at[i, p, inside(i)] for p in range(plan.parts)]
            if i > 0:
                q_scale = query_scale(i)
            with jax.named_scope("inherit"):
                inherited = product(wide, [(k_smem.at[i], s) for s in reversed(s_refs)])
                plgpu.barrier_wait(gates_ready.at[i])
                write, reach, carry = (plgpu.load(gates.at[i, n], layout=ROWS) for n in range(3))
                v = plgpu.load(v_smem.at[i], layout=WGMMA).astype(F32)
                y = (v - inherited * rows(reach, wide)) * rows(write, wide)
            with jax.named_scope("outer"):
                out = product(wide, [(q_smem.at[i % plan.q_slots], s) for s in reversed(s_refs)]) * rows(carry, wide)
            for j in range(i):
                with jax.named_scope("subtract"):
                    y -= pop(plan.width(j), [y_smem.at[j, p] for p in range(plan.parts)])
            with jax.named_scope("put y"):
                store(split(y, plan.parts), y_refs)
            with jax.named_scope("y"):
                y = pop(plan.width(i), y_used)
            for n in range(SQUARINGS + 1):
                with jax.named_scope(f"put y{n}"):
                    store(split(y, plan.parts), y_refs)
                with jax.named_scope(f"apply{n}"):
                    step = pop(plan.width(i), y_used)
                    y = y - step if n == 0 else y + step
            with jax.named_scope("update"):
                store(split(y, plan.parts), y_refs)
                plgpu.barrier_arrive(solved.at[i])
            with jax.named_scope("output"):
                for j in range(i + 1):
                    out += pop(plan.width(j), [y_smem.at[j, p, inside(j)] for p in range(plan.parts)])
            with jax.named_scope("write"):
                if i > 0:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                wide_smem[...] = out * rows(q_scale, wide)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(wide_smem.at[inside(i)], o_ref.at[batch, span(i), head, values])
                if i + 1 == plan.tiles:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def gdn_tree_verify(
    query, key, value, log_decay, beta, ancestors, state, *, precision: Precision = "default", interpret=None, block=64, compiler_params=None, packed=False
):
    batch, nodes, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    parts = num_parts(precision)
    for size in (block, 32, 16):
        plan = _Plan(nodes, key_heads, heads, key_dim, min(size, value_dim), parts, interpret is not None)
        if plan.bytes <= SMEM_BYTES:
            break
    tiles = plan.tiles
    cols_ = min(TILE_ROWS, nodes)
    slots = SLOTS
    lanes = min(cols_, plan.block)
    scratch = dict(
        q_smem=tile((plan.q_slots, TILE_ROWS, key_dim), BF16, lanes),
        k_smem=tile((tiles, TILE_ROWS, key_dim), BF16, lanes),
        v_smem=tile((tiles, TILE_ROWS, plan.block), BF16, lanes),
        s_smem=tile((parts, key_dim, plan.block), BF16, lanes),
        a_smem=tile((parts, TILE_ROWS, cols_), BF16, lanes),
        ring=tile((slots, parts, TILE_ROWS, cols_), BF16, lanes),
        y_smem=tile((tiles, parts, TILE_ROWS, plan.block), BF16, lanes),
        wide_smem=tile((TILE_ROWS, plan.block), F32),
        u_smem=tile((TILE_ROWS, plan.block), F32),
        g_rows=plgpu.SMEM((tiles, 2, TILE_ROWS), F32),
        g_cols=plgpu.SMEM((tiles, 2, TILE_ROWS), F32),
        gates=plgpu.SMEM((tiles, 3, TILE_ROWS), F32),
        loaded=plgpu.Barrier(num_arrivals=3, num_barriers=tiles),
        full=plgpu.Barrier(num_barriers=slots),
        empty=plgpu.Barrier(num_barriers=slots),
        solved=plgpu.Barrier(num_barriers=tiles),
        gates_ready=plgpu.Barrier(num_barriers=tiles),
    )
    padded = tiles * TILE_ROWS
    log_decay, beta = (jnp.pad(x, ((0, 0), (0, padded - nodes), (0, 0))) for x in (log_decay, beta))
    wide = jax.ShapeDtypeStruct((batch, nodes, heads, value_dim), F32)
    result = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(wide, wide, jax.ShapeDtypeStruct((batch, padded, heads), F32)),
        scratch_types=scratch,
        grid=(batch, heads, value_dim // plan.block),
        grid_names=("batch", "head", "block"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="gdn_tree_verify",
        compiler_params=compiler_params,
    )(query, key, value, log_decay, beta, ancestors if packed else pack_ancestors(ancestors), state)
    return GdnTreeResult(*result[:2], result[2][:, :nodes])
