"""The body of the Mosaic kernel in `pallas_kernels.mosaic_gdn`, whose docstring has the algebra and the schedule."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.constants import MIN_LOG_DECAY, NORM_EPS
from pallas_kernels.mosaic_common import (
    BF16,
    COLS,
    F32,
    I32,
    ROWS,
    TILE_ROWS,
    WGMMA,
    Ref,
    cols,
    dot,
    iota,
    pairs,
    rows,
    split,
    store,
    store_strided,
    tile,
)

DECAY_STEPS = 256.0  # in a unit of log2 of decay: 256 nodes of −127 stay below 2^24 steps
WORD = 32  # nodes in a word of ancestors
LAST_LEVELS = 3  # applied as factors, not inverted
OPERANDS = ("q", "k", "v", "g", "beta", "tree", "s", "o", "u", "path_decay")  # inputs, then outputs


class Plan(NamedTuple):
    """Static sizes of a call."""

    given: int  # nodes
    nodes: int  # padded
    group: int  # value heads a key head
    key: int
    block: int  # columns of the value dimension
    slots: int  # of the ring
    parts: int
    interpret: bool

    @property
    def tiles(self) -> int:
        return -(-self.nodes // TILE_ROWS)

    @property
    def width(self) -> int:
        """Nodes of a tile."""
        return min(TILE_ROWS, self.nodes)

    @property
    def query_slots(self) -> int:
        return min(2, self.tiles)

    @property
    def words(self) -> int:
        """Words of ancestors a node."""
        return self.tiles * TILE_ROWS // WORD

    def scratch(self) -> dict[str, pl.MemoryRef]:
        # Both operands of a product must be swizzled alike, so all follow the narrowest.
        matrix = functools.partial(tile, dtype=BF16, lanes=min(self.width, self.block))
        square, wide = (TILE_ROWS, self.width), (TILE_ROWS, self.block)
        buffers = {
            "q": matrix((self.query_slots, TILE_ROWS, self.key)),
            "k": matrix((self.tiles, TILE_ROWS, self.key)),
            "v": matrix((self.tiles, *wide)),
            "s": matrix((self.parts, self.key, self.block)),
            "a": matrix((self.parts, *square)),
            "ring": matrix((self.slots, self.parts, *square)),
            "w": matrix((self.tiles, self.parts, *wide)),  # right-hand side, then W
            "tree": plgpu.SMEM((self.words + 3, self.tiles * TILE_ROWS), I32),
            "steps": plgpu.SMEM((self.tiles, 2, TILE_ROWS), F32),  # log2-decays: multiples of 1/256, remainders
            "prefix": plgpu.SMEM((self.tiles, 2, TILE_ROWS), F32),  # their sums over ancestors
            "gates": plgpu.SMEM((self.tiles, 3, TILE_ROWS), F32),
        }
        if self.width < TILE_ROWS:  # registers hold whole tiles, so only the copy engine can write fewer rows
            buffers |= {"u": tile(wide, F32), "o": tile(wide, F32)}
        return buffers

    def barriers(self) -> dict[str, plgpu.Barrier]:
        tiles, slots = self.tiles, self.slots
        return {
            "planted": plgpu.Barrier(),  # the tree is there
            "loaded": plgpu.Barrier(num_arrivals=3, num_barriers=tiles),
            "stated": plgpu.Barrier(),  # the state is split
            "gated": plgpu.Barrier(num_barriers=tiles),
            "full": plgpu.Barrier(num_barriers=slots),
            "empty": plgpu.Barrier(num_barriers=slots),
            "solved": plgpu.Barrier(num_barriers=tiles),
            "done": plgpu.Barrier(),
        }

    def bytes(self) -> int:
        return sum(jnp.dtype(x.dtype).itemsize * math.prod(x.shape) for x in self.scratch().values())


class _Block(NamedTuple):
    """What a block of threads works on."""

    batch: Array
    head: Array
    key_head: Array
    values: pl.Slice


def kernel(*operands: Ref, plan: Plan, **scratch: Ref) -> None:
    head = lax.axis_index("head")
    block = _Block(
        lax.axis_index("batch"),
        head,
        lax.div(head, plan.group),
        pl.ds(lax.axis_index("block") * plan.block, plan.block),
    )
    gmem = SimpleNamespace(**dict(zip(OPERANDS, operands, strict=True)))
    smem = SimpleNamespace(**scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        _Inverter(plan, block, gmem, smem).run()

    @pl.when(warpgroup == 1)
    def _() -> None:
        _Applier(plan, block, gmem, smem).run()


class _Warpgroup:
    """What both warpgroups know; `sent` counts the matrices that have gone through the ring."""

    def __init__(self, plan: Plan, block: _Block, gmem: SimpleNamespace, smem: SimpleNamespace) -> None:
        self.plan, self.block, self.gmem, self.smem = plan, block, gmem, smem
        self.dot = functools.partial(dot, interpret=plan.interpret)
        self.square = (TILE_ROWS, plan.width)
        self.wide = (TILE_ROWS, plan.block)
        self.sent = 0

    @property
    def slot(self) -> int:
        return self.sent % self.plan.slots

    def nodes(self, i: int) -> pl.Slice:
        """The nodes of tile i."""
        return pl.ds(i * TILE_ROWS, self.plan.width)

    @property
    def used(self) -> pl.Slice:
        """Rows of a tile that hold nodes; what the others hold is undefined and stays in its rows."""
        return pl.ds(0, self.plan.width)

    def query(self, i: int) -> Ref:
        return self.smem.q.at[i % self.plan.query_slots]

    def write(self, i: int, x: Array, name: str) -> None:
        """Values of tile i to global memory."""
        at = self.block
        target = getattr(self.gmem, name).at[at.batch, self.nodes(i), at.head, at.values]
        if self.plan.width == TILE_ROWS:
            target[...] = x
        else:
            staged = getattr(self.smem, name)
            store([x], [staged])
            plgpu.copy_smem_to_gmem(staged.at[self.used], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Inverter(_Warpgroup):
    """Makes the square matrices, and the outputs when it has sent them."""

    def __init__(self, plan: Plan, block: _Block, gmem: SimpleNamespace, smem: SimpleNamespace) -> None:
        super().__init__(plan, block, gmem, smem)
        self.prefix = {}  # of tile i: decay from the root to each node, as steps and remainder

    def run(self) -> None:
        plan, smem = self.plan, self.smem
        plgpu.copy_gmem_to_smem(self.gmem.tree.at[self.block.batch], smem.tree, smem.planted)
        for i in range(plan.tiles):
            self.fetch(i)
        gates = [self.load_gates(i) for i in range(plan.tiles)]
        levels = jnp.maximum(self.gmem.tree[self.block.batch, plan.words + 2, 0], LAST_LEVELS + 1)
        for i in range(plan.tiles):
            self.send_factors(i, *gates[i], levels - LAST_LEVELS)
            if i > 0:
                self.write_output(i - 1)
                if plan.query_slots <= i + 1 < plan.tiles:
                    plgpu.commit_smem()  # all warps have read the slot that is written next
                    self.fetch_query(i + 1)
        self.write_output(plan.tiles - 1)
        plgpu.barrier_arrive(smem.done)
        for n in range(max(self.sent - plan.slots, 0), self.sent):
            plgpu.barrier_wait(smem.empty.at[n % plan.slots])

    def fetch(self, i: int) -> None:
        at, gmem, smem = self.block, self.gmem, self.smem
        loaded = smem.loaded.at[i]
        plgpu.copy_gmem_to_smem(gmem.k.at[at.batch, self.nodes(i), at.key_head], smem.k.at[i, self.used], loaded)
        if i < self.plan.query_slots:
            self.fetch_query(i)
        value = gmem.v.at[at.batch, self.nodes(i), at.head, at.values]
        plgpu.copy_gmem_to_smem(value, smem.v.at[i, self.used], loaded)

    def fetch_query(self, i: int) -> None:
        source = self.gmem.q.at[self.block.batch, self.nodes(i), self.block.key_head]
        plgpu.copy_gmem_to_smem(source, self.query(i).at[self.used], self.smem.loaded.at[i])

    def load_gates(self, i: int) -> tuple[Array, Array]:
        """Log2-decays and β of tile i, along rows."""
        g, beta = (self.load_rows(ref, i) for ref in (self.gmem.g, self.gmem.beta))
        return jnp.maximum(g, MIN_LOG_DECAY) * (1 / math.log(2)), beta

    def load_rows(self, ref: Ref, i: int) -> Array:
        """A head's values of tile i, along rows; one by one when there are fewer than rows."""
        at = self.block
        if self.plan.width == TILE_ROWS:
            source = ref.at[at.batch, pl.ds(i * TILE_ROWS, TILE_ROWS), at.head]
            return plgpu.load(source, layout=ROWS, optimized=False)
        row = plgpu.broadcasted_iota(I32, (TILE_ROWS,), 0, layout=ROWS)
        values = jnp.zeros((), F32)
        for n in range(self.plan.given):
            values = jnp.where(row == n, ref[at.batch, n, at.head], values)
        return values

    def write_decays(self, i: int) -> None:
        """Path decays, by the first of the blocks that know them."""
        at, prefix = self.block, self.smem.prefix

        @pl.when(lax.axis_index("block") == 0)
        def _() -> None:
            if self.plan.width == TILE_ROWS:
                target = self.gmem.path_decay.at[at.batch, pl.ds(i * TILE_ROWS, TILE_ROWS), at.head]
                steps, rest = self.prefix[i]
                store_strided(target, (steps + rest) * math.log(2))
            else:
                for n in range(self.plan.given):
                    self.gmem.path_decay[at.batch, n, at.head] = (prefix[0, 0, n] + prefix[0, 1, n]) * math.log(2)

    def tree(self, row: int, i: int) -> Array:
        """A value a node of tile i, along rows."""
        return plgpu.load(self.smem.tree.at[row, pl.ds(i * TILE_ROWS, TILE_ROWS)], layout=ROWS)

    def on_path(self, i: int, j: int) -> Array:
        """Whether node n of tile j is node m of tile i or its ancestor, at (m, n)."""
        column = iota(self.square, 1)
        word = rows(self.tree(2 * j, i), self.square)
        if self.plan.width > WORD:
            word = jnp.where(column < WORD, word, rows(self.tree(2 * j + 1, i), self.square))
        return lax.bitwise_and(lax.shift_right_logical(word, lax.bitwise_and(column, WORD - 1)), 1) == 1

    def columns(self, ref: Ref) -> Array:
        return cols(plgpu.load(ref.at[self.used], layout=COLS), self.square)

    def decay(self, i: int, j: int) -> Array:
        """D between tiles i and j, 0 off the paths."""
        exponent = 0.0
        for n, prefix in enumerate(self.prefix[i]):
            exponent += rows(prefix, self.square) - self.columns(self.smem.prefix.at[j, n])
        return jnp.exp2(jnp.where(self.on_path(i, j), exponent, -jnp.inf))

    def sum_decays(self, i: int, g: Array) -> None:
        """Prefix sums of tile i."""
        smem = self.smem
        steps = (g * DECAY_STEPS).astype(I32).astype(F32) * (1 / DECAY_STEPS)
        store([steps, g - steps], [smem.steps.at[i, n] for n in range(2)])
        if i == 0:
            plgpu.barrier_wait(smem.planted)
        masks = [self.on_path(i, j) for j in range(i + 1)]

        def along_path(n: int) -> Array:
            terms = [jnp.where(mask, self.columns(smem.steps.at[j, n]), 0.0) for j, mask in enumerate(masks)]
            return functools.reduce(jnp.add, [jnp.sum(term, axis=1) for term in terms])

        self.prefix[i] = along_path(0), along_path(1)
        store(self.prefix[i], [smem.prefix.at[i, n] for n in range(2)])

        self.write_decays(i)

    def send_factors(self, i: int, g: Array, beta: Array, inverted: Array) -> None:
        """The couplings of tile i to earlier ones, then the factors of its inverse."""
        smem = self.smem
        self.sum_decays(i, g)
        decay = self.decay(i, i)
        plgpu.barrier_wait(smem.loaded.at[i])
        gram = self.dot(self.square, [(smem.k.at[i], smem.k.at[i, self.used].T)])
        diagonal = iota(self.square, 0) == iota(self.square, 1)
        squares = jnp.sum(jnp.where(diagonal, gram, 0.0), axis=1) + NORM_EPS
        inverse_norm = lax.rsqrt(squares)
        factors = beta * inverse_norm, self.carry(i) * inverse_norm, squares * inverse_norm
        for n, factor in enumerate(factors):
            smem.gates[i, n] = factor
        plgpu.barrier_arrive(smem.gated.at[i])
        scale = rows(beta * inverse_norm * inverse_norm, self.square)
        for j in range(i):
            self.send(self.dot(self.square, [(smem.k.at[i], smem.k.at[j].T)]) * scale * self.decay(i, j))
        self.invert(i, jnp.where(diagonal, 0.0, gram * scale * decay), diagonal, inverted)

    def carry(self, i: int) -> Array:
        return jnp.exp2(sum(self.prefix[i]))

    def claim(self) -> None:
        """Waits until the next slot of the ring may be written."""
        if self.sent >= self.plan.slots:
            plgpu.barrier_wait(self.smem.empty.at[self.slot])

    def put(self, x: Array) -> tuple[list[Array], list[Ref]]:
        """Writes x to the next slot; its parts in registers and, as a right operand, in shared memory."""
        parts = split(x, self.plan.parts)
        refs = [self.smem.ring.at[self.slot, n] for n in range(self.plan.parts)]
        store(parts, refs)
        return parts, [ref.at[self.used] for ref in refs]

    def hand_over(self) -> None:
        plgpu.barrier_arrive(self.smem.full.at[self.slot])
        self.sent += 1

    def send(self, x: Array) -> tuple[list[Array], list[Ref]]:
        self.claim()
        parts = self.put(x)
        self.hand_over()
        return parts

    def invert(self, i: int, a: Array, diagonal: Array, inverted: Array) -> None:
        """Sends X, P, P² and P⁴ of tile i."""
        n_parts, depth_row = self.plan.parts, self.plan.words
        depths = plgpu.load(self.smem.tree.at[depth_row + 1, self.nodes(i)], layout=COLS)
        apart = lax.bitwise_xor(rows(self.tree(depth_row, i), self.square), cols(depths, self.square))
        for n, part in enumerate(split(a, n_parts)):
            self.smem.a[n] = part  # committed with the first X
        a_refs = [self.smem.a.at[n, self.used] for n in range(n_parts)]
        x = jnp.where(apart == 1, -a, jnp.where(diagonal, 1.0, 0.0))
        self.claim()

        def add_level(level: Array, x: Array) -> Array:
            parts, refs = self.put(x)
            step = self.dot(self.square, pairs(parts, a_refs))
            step = jnp.where(lax.shift_right_logical(apart, level) == 1, step, 0.0)
            x -= self.dot(self.square, pairs(split(step, n_parts), refs))
            plgpu.commit_smem()  # all warps have read the slot that is written next
            return x

        x = lax.fori_loop(1, inverted, add_level, x)
        parts, _ = self.put(x)
        self.hand_over()
        p = self.dot(self.square, pairs(parts, a_refs))
        p = jnp.where(lax.shift_right_logical(apart, inverted) == 0, 0.0, p)
        for _ in range(LAST_LEVELS - 1):
            p = self.dot(self.square, pairs(*self.send(p)))
        self.send(p)

    def write_output(self, i: int) -> None:
        smem, n_parts = self.smem, range(self.plan.parts)
        q = self.query(i)
        if i == 0:
            plgpu.barrier_wait(smem.stated)
        out = self.dot(self.wide, [(q, smem.s.at[n]) for n in reversed(n_parts)]) * rows(self.carry(i), self.wide)
        squares = jnp.sum(jnp.square(plgpu.load(q, layout=WGMMA).astype(F32)), axis=1)
        for j in range(i + 1):
            lookup = self.dot(self.square, [(q, smem.k.at[j, self.used].T)]) * self.decay(i, j)
            if j == i:
                plgpu.barrier_wait(smem.solved.at[i])
            out += self.dot(
                self.wide, pairs(split(lookup, len(n_parts)), [smem.w.at[j, n, self.used] for n in n_parts])
            )
        self.write(i, out * rows(lax.rsqrt(squares + NORM_EPS) * self.plan.key**-0.5, self.wide), "o")


class _Applier(_Warpgroup):
    """Splits the state, and multiplies right-hand sides by what comes through the ring."""

    def run(self) -> None:
        plan, smem = self.plan, self.smem
        pieces = [pl.ds(start, TILE_ROWS) for start in range(0, plan.key, TILE_ROWS)]
        source = self.gmem.s.at[self.block.batch, self.block.head]
        # In flight together: nothing needs them before the first split.
        states = [plgpu.load(source.at[piece, self.block.values], layout=WGMMA, optimized=False) for piece in pieces]
        for piece, state in zip(pieces, states, strict=True):
            for n, part in enumerate(split(state, plan.parts)):
                smem.s[n, piece] = part
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.stated)
        for i in range(plan.tiles):
            w = self.right_hand_side(i)
            for j in range(i):
                w -= self.receive(j)
            self.write(i, self.solve(i, w) * rows(plgpu.load(smem.gates.at[i, 2], layout=ROWS), self.wide), "u")
        # A warpgroup that exits while another multiplies is an illegal instruction.
        plgpu.barrier_wait(smem.done)

    def right_hand_side(self, i: int) -> Array:
        smem = self.smem
        plgpu.barrier_wait(smem.loaded.at[i])
        inherited = self.dot(self.wide, [(smem.k.at[i], smem.s.at[n]) for n in reversed(range(self.plan.parts))])
        plgpu.barrier_wait(smem.gated.at[i])
        write, reach = (rows(plgpu.load(smem.gates.at[i, n], layout=ROWS), self.wide) for n in range(2))
        return (plgpu.load(smem.v.at[i], layout=WGMMA).astype(F32) - inherited * reach) * write

    def receive(self, j: int) -> Array:
        """The next matrix of the ring times W of tile j."""
        smem, parts = self.smem, range(self.plan.parts)
        plgpu.barrier_wait(smem.full.at[self.slot])
        matrix = [smem.ring.at[self.slot, n] for n in parts]
        result = self.dot(self.wide, pairs(matrix, [smem.w.at[j, n, self.used] for n in parts]))
        plgpu.barrier_arrive(smem.empty.at[self.slot])
        self.sent += 1
        plgpu.commit_smem()  # all warps have read W, which may be written next
        return result

    def keep(self, i: int, w: Array) -> None:
        store(split(w, self.plan.parts), [self.smem.w.at[i, n] for n in range(self.plan.parts)])

    def solve(self, i: int, w: Array) -> Array:
        """W of tile i from its right-hand side, also left in shared memory."""
        self.keep(i, w)
        w = self.receive(i)  # X
        self.keep(i, w)
        w -= self.receive(i)  # P
        for _ in range(LAST_LEVELS - 1):  # P², P⁴
            self.keep(i, w)
            w += self.receive(i)
        self.keep(i, w)
        plgpu.barrier_arrive(self.smem.solved.at[i])
        return w
