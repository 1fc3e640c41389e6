"""The body of the Mosaic kernel in `pallas_kernels.mosaic_gdn`, whose docstring has the algebra and the schedule."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._mosaic_gdn_plan import FACTORS, LAST_LEVELS, WORD, Plan
from pallas_kernels.constants import MIN_LOG_DECAY, NORM_EPS
from pallas_kernels.mosaic_common import (
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
)

if TYPE_CHECKING:
    from collections.abc import Callable

type Index = int | Array
type Prefix = tuple[Array, Array]  # log2-decays from the root, as sums of steps and of remainders
type Ring = tuple[Index, Index]  # first slot, and the one after the last

DECAY_STEPS = 256.0  # in a unit of log2 of decay: 256 nodes of −127 stay below 2^24 steps
OPERANDS = ("q", "k", "v", "g", "beta", "tree", "s", "o", "u", "path_decay")  # inputs, then outputs


def _after(slot: Index, ring: Ring) -> Array:
    """The next slot of a ring."""
    start, stop = ring
    return jnp.where(slot + 1 == stop, start, slot + 1)


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

    @pl.when(warpgroup < plan.inverters)
    def _() -> None:
        _Inverter(plan, block, gmem, smem, warpgroup if plan.inverters > 1 else 0).run()

    @pl.when(warpgroup == plan.inverters)
    def _() -> None:
        _Applier(plan, block, gmem, smem).run()


class _Warpgroup:
    """What all warpgroups know."""

    def __init__(self, plan: Plan, block: _Block, gmem: SimpleNamespace, smem: SimpleNamespace) -> None:
        self.plan, self.block, self.gmem, self.smem = plan, block, gmem, smem
        self.dot = functools.partial(dot, interpret=plan.interpret)
        self.square = (TILE_ROWS, plan.width)
        self.wide = (TILE_ROWS, plan.block)

    def nodes(self, i: Index) -> pl.Slice:
        """The nodes of tile i."""
        return pl.ds(i * TILE_ROWS, self.plan.width)

    @property
    def used(self) -> pl.Slice:
        """Rows of a tile that hold nodes; what the others hold is undefined and stays in its rows."""
        return pl.ds(0, self.plan.width)

    def matrix(self, slot: Index) -> list[Ref]:
        """Parts of the matrix in a slot."""
        return [self.smem.squares.at[self.plan.inverters + slot, n] for n in range(self.plan.parts)]

    def write(self, i: Index, x: Array, name: str) -> None:
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

    def finish(self) -> None:
        """A warpgroup that exits while another multiplies is an illegal instruction."""
        plgpu.barrier_arrive(self.smem.done)
        plgpu.barrier_wait(self.smem.done)


class _Inverter(_Warpgroup):
    """Makes the square matrices of its tiles, and the outputs of a tile when it has sent them."""

    def __init__(self, plan: Plan, block: _Block, gmem: SimpleNamespace, smem: SimpleNamespace, number: Index) -> None:
        super().__init__(plan, block, gmem, smem)
        self.number = number

    def run(self) -> None:
        plan, smem = self.plan, self.smem
        rounds = range(0, plan.tiles, plan.inverters)
        # An inverter without a tile in the last round does what another does there, up to the sums.
        tiles = [self.tile_of(first) for first in rounds]
        self.fetch()
        gates = [self.load_gates(i) for i in tiles]
        levels = jnp.maximum(self.gmem.tree[self.block.batch, plan.words + 2, 0], LAST_LEVELS + 1)
        for i, (g, _) in zip(tiles, gates, strict=True):
            self.store_steps(i, g)
        self.meet("stepped")
        plgpu.barrier_wait(smem.planted)
        prefixes = [self.sum_decays(i) for i in tiles]
        self.meet("summed")
        for first, i, prefix, (_, beta) in zip(rounds, tiles, prefixes, gates, strict=True):
            work = functools.partial(self.work, first, i, prefix, beta, levels - LAST_LEVELS)
            if first + plan.inverters <= plan.tiles:
                work()
            else:
                pl.when(first + self.number < plan.tiles)(work)
        self.finish()
        if plan.recycles:
            lax.fori_loop(*self.ring(), lambda slot, _: self.claim(slot), None)

    def tile_of(self, first: int) -> Index:
        if self.plan.inverters == 1:
            return first
        return jnp.minimum(first + self.number, self.plan.tiles - 1)

    def among(self, values: list[int]) -> Index:
        """Of one value an inverter, this one's."""
        return values[0] if len(values) == 1 else jnp.where(self.number == 0, values[0], values[1])

    def ring(self) -> Ring:
        rings = [self.plan.ring(k) for k in range(self.plan.inverters)]
        return self.among([ring.start for ring in rings]), self.among([ring.stop for ring in rings])

    def meet(self, name: str) -> None:
        """Waits until all inverters have written what they share."""
        if self.plan.inverters > 1:
            barrier = getattr(self.smem, name)
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

    def each[Carry](self, count: Index, body: Callable[[Index, Carry], Carry], init: Carry) -> Carry:
        """`lax.fori_loop` from 0, unrolled where the count is known."""
        if not isinstance(count, int):
            return lax.fori_loop(0, count, body, init)
        for n in range(count):
            init = body(n, init)
        return init

    def fetch(self) -> None:
        plan, at, gmem, smem = self.plan, self.block, self.gmem, self.smem

        @pl.when(self.number == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(gmem.tree.at[at.batch], smem.tree, smem.planted)
            for i in range(plan.tiles):
                loaded = smem.loaded.at[i]
                source = gmem.k.at[at.batch, self.nodes(i), at.key_head]
                plgpu.copy_gmem_to_smem(source, smem.k.at[i, self.used], loaded)
                source = gmem.v.at[at.batch, self.nodes(i), at.head, at.values]
                plgpu.copy_gmem_to_smem(source, smem.w.at[i, 0, self.used], loaded)

        if plan.tiles == 1:
            self.fetch_query(0)

    def fetch_query(self, i: Index) -> None:
        at = self.block
        for columns, piece in self.query():
            source = self.gmem.q.at[at.batch, self.nodes(i), at.key_head, columns]
            plgpu.copy_gmem_to_smem(source, piece.at[self.used], self.smem.asked.at[self.number])

    def query(self) -> list[tuple[pl.Slice, Ref]]:
        """Columns of the queries and where they are."""
        target = self.smem.q if self.plan.tiles == 1 else self.smem.squares.at[self.number]
        return [(pl.ds(n * TILE_ROWS, TILE_ROWS), target.at[n]) for n in range(self.plan.pieces)]

    def load_gates(self, i: Index) -> tuple[Array, Array]:
        """Log2-decays and β of tile i, along rows."""
        g, beta = (self.load_rows(ref, i) for ref in (self.gmem.g, self.gmem.beta))
        return jnp.maximum(g, MIN_LOG_DECAY) * (1 / math.log(2)), beta

    def load_rows(self, ref: Ref, i: Index) -> Array:
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

    def store_steps(self, i: Index, g: Array) -> None:
        steps = (g * DECAY_STEPS).astype(I32).astype(F32) * (1 / DECAY_STEPS)
        store([steps, g - steps], [self.smem.steps.at[i, n] for n in range(2)])

    def sum_decays(self, i: Index) -> Prefix:
        """Decay from the root to each node of tile i, as steps and remainder."""

        def add(j: Index, sums: Prefix) -> Prefix:
            mask = self.on_path(i, j)
            terms = [jnp.where(mask, self.columns(self.smem.steps.at[j, n]), 0.0) for n in range(2)]
            return sums[0] + jnp.sum(terms[0], axis=1), sums[1] + jnp.sum(terms[1], axis=1)

        zero = jnp.zeros((TILE_ROWS,), F32)
        prefix = self.each(i + 1, add, (zero, zero))
        store(prefix, [self.smem.prefix.at[i, n] for n in range(2)])
        self.write_decays(i, prefix)
        return prefix

    def write_decays(self, i: Index, prefix: Prefix) -> None:
        """Path decays, by the first of the blocks that know them."""
        at, sums = self.block, self.smem.prefix

        @pl.when(lax.axis_index("block") == 0)
        def _() -> None:
            if self.plan.width == TILE_ROWS:
                target = self.gmem.path_decay.at[at.batch, pl.ds(i * TILE_ROWS, TILE_ROWS), at.head]
                store_strided(target, (prefix[0] + prefix[1]) * math.log(2))
            else:
                for n in range(self.plan.given):
                    self.gmem.path_decay[at.batch, n, at.head] = (sums[0, 0, n] + sums[0, 1, n]) * math.log(2)

    def tree(self, row: Index, i: Index) -> Array:
        """A value a node of tile i, along rows."""
        return plgpu.load(self.smem.tree.at[row, pl.ds(i * TILE_ROWS, TILE_ROWS)], layout=ROWS)

    def on_path(self, i: Index, j: Index) -> Array:
        """Whether node n of tile j is node m of tile i or its ancestor, at (m, n)."""
        column = iota(self.square, 1)
        word = rows(self.tree(2 * j, i), self.square)
        if self.plan.width > WORD:
            word = jnp.where(column < WORD, word, rows(self.tree(2 * j + 1, i), self.square))
        return lax.bitwise_and(lax.shift_right_logical(word, lax.bitwise_and(column, WORD - 1)), 1) == 1

    def columns(self, ref: Ref) -> Array:
        return cols(plgpu.load(ref.at[self.used], layout=COLS), self.square)

    def decay(self, i: Index, prefix: Prefix, j: Index) -> Array:
        """D between tiles i and j, 0 off the paths."""
        exponent = 0.0
        for n, sums in enumerate(prefix):
            exponent += rows(sums, self.square) - self.columns(self.smem.prefix.at[j, n])
        return jnp.exp2(jnp.where(self.on_path(i, j), exponent, -jnp.inf))

    def work(self, first: int, i: Index, prefix: Prefix, beta: Array, inverted: Array) -> None:
        """All of tile i, of the round that starts with tile `first`: couplings, factors, outputs."""
        plan, smem = self.plan, self.smem
        decay = self.decay(i, prefix, i)
        plgpu.barrier_wait(smem.loaded.at[i])
        gram = self.dot(self.square, [(smem.k.at[i], smem.k.at[i, self.used].T)])
        diagonal = iota(self.square, 0) == iota(self.square, 1)
        squares = jnp.sum(jnp.where(diagonal, gram, 0.0), axis=1) + NORM_EPS
        inverse_norm = lax.rsqrt(squares)
        factors = beta * inverse_norm, jnp.exp2(sum(prefix)) * inverse_norm, squares * inverse_norm
        for n, factor in enumerate(factors):
            smem.gates[i, n] = factor
        plgpu.barrier_arrive(smem.gated.at[i])
        scale = beta * inverse_norm * inverse_norm
        a = jnp.where(diagonal, 0.0, gram * rows(scale, self.square) * decay)

        def couple(j: Index, slot: Index) -> Index:
            self.claim(slot)
            # This inverter has waited for the tiles up to its last one.
            pl.when(j > i - plan.inverters)(lambda: plgpu.barrier_wait(smem.loaded.at[j]))
            gram = self.dot(self.square, [(smem.k.at[i], smem.k.at[j].T)])
            self.put(-gram * rows(scale, self.square) * self.decay(i, prefix, j), slot)
            plgpu.barrier_arrive(smem.full.at[slot])
            return _after(slot, self.ring())

        slot = self.among([plan.slot(first + k, 0) for k in range(plan.inverters)])
        slot = self.each(i, couple, slot)
        self.invert(i, a, diagonal, inverted, slot)
        self.write_output(first, i, prefix)

    def claim(self, slot: Index) -> None:
        """Waits until a slot of the ring may be written."""
        if self.plan.recycles:
            plgpu.barrier_wait(self.smem.empty.at[slot])

    def put(self, x: Array, slot: Index) -> list[Array]:
        """Writes x to a slot; its parts in registers."""
        parts = split(x, self.plan.parts)
        store(parts, self.matrix(slot))
        return parts

    def invert(self, i: Index, a: Array, diagonal: Array, inverted: Array, slot: Index) -> None:
        """Sends X, −P, P² and P⁴ of tile i."""
        plan, smem, n_parts, depth_row = self.plan, self.smem, self.plan.parts, self.plan.words
        depths = plgpu.load(smem.tree.at[depth_row + 1, self.nodes(i)], layout=COLS)
        apart = lax.bitwise_xor(rows(self.tree(depth_row, i), self.square), cols(depths, self.square))
        for n, part in enumerate(split(a, n_parts)):
            smem.squares[self.number, n] = part  # committed with the first X
        a_refs = [smem.squares.at[self.number, n, self.used] for n in range(n_parts)]
        x = jnp.where(apart == 1, -a, jnp.where(diagonal, 1.0, 0.0))
        self.claim(slot)

        def add_level(level: Array, x: Array) -> Array:
            parts = self.put(x, slot)
            step = self.dot(self.square, pairs(parts, a_refs))
            step = jnp.where(lax.shift_right_logical(apart, level) == 1, step, 0.0)
            x -= self.dot(self.square, pairs(split(step, n_parts), [ref.at[self.used] for ref in self.matrix(slot)]))
            plgpu.commit_smem()  # all warps have read the slot that is written next
            return x

        x = lax.fori_loop(1, inverted, add_level, x)
        far = lax.shift_right_logical(apart, inverted) != 0

        def multiply(n: Index, carry: tuple[Array, Index]) -> tuple[Array, Index]:
            x, slot = carry
            parts = self.put(x, slot)
            plgpu.barrier_arrive(smem.full.at[slot])
            if plan.tiles > 1:  # all warps have read A
                pl.when(n == 1)(lambda: self.fetch_query(i))
            right = smem.squares.at[jnp.where(n == 0, self.number, plan.inverters + slot)]
            x = self.dot(self.square, pairs(parts, [right.at[m, self.used] for m in range(n_parts)]))
            if plan.single:
                plgpu.commit_smem()  # all warps have read the slot that is written next
            x = jnp.where(far, jnp.where(n == 0, -1.0, 1.0) * x, 0.0)
            slot = _after(slot, self.ring())
            self.claim(slot)
            return x, slot

        x, slot = lax.fori_loop(0, FACTORS - 1, multiply, (x, slot))
        self.put(x, slot)
        plgpu.barrier_arrive(smem.full.at[slot])

    def write_output(self, first: int, i: Index, prefix: Prefix) -> None:
        plan, smem, n_parts = self.plan, self.smem, range(self.plan.parts)
        plgpu.barrier_wait(smem.asked.at[self.number])
        query = self.query()
        if first == 0:
            plgpu.barrier_wait(smem.stated)
        out = self.dot(self.wide, [(q, smem.s.at[n, columns]) for n in reversed(n_parts) for columns, q in query])
        out *= rows(jnp.exp2(sum(prefix)), self.wide)
        squares = [jnp.sum(jnp.square(plgpu.load(q, layout=WGMMA).astype(F32)), axis=1) for _, q in query]

        def look_up(j: Index, out: Array) -> Array:
            lookup = self.dot(self.square, [(q, smem.k.at[j, self.used, columns].T) for columns, q in query])
            lookup *= self.decay(i, prefix, j)
            # Tiles are solved in order, and this inverter has seen those up to its last one.
            pl.when(j > i - plan.inverters)(lambda: plgpu.barrier_wait(smem.solved.at[j]))
            w = [smem.w.at[j, n, self.used] for n in n_parts]
            return out + self.dot(self.wide, pairs(split(lookup, len(n_parts)), w))

        out = self.each(i + 1, look_up, out)
        self.write(i, out * rows(lax.rsqrt(sum(squares) + NORM_EPS) * plan.key**-0.5, self.wide), "o")


class _Applier(_Warpgroup):
    """Splits the state, and multiplies right-hand sides by what comes through the rings."""

    def run(self) -> None:
        plan, smem = self.plan, self.smem
        pieces = [pl.ds(start, TILE_ROWS) for start in range(0, plan.key, TILE_ROWS)]
        source = self.gmem.s.at[self.block.batch, self.block.head]
        # In flight together: nothing needs them before the first split.
        states = [plgpu.load(source.at[piece, self.block.values], layout=WGMMA, optimized=False) for piece in pieces]
        if plan.recycles:
            for slot in range(plan.slots):
                plgpu.barrier_arrive(smem.empty.at[slot])
        for piece, state in zip(pieces, states, strict=True):
            for n, part in enumerate(split(state, plan.parts)):
                smem.s[n, piece] = part
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.stated)
        inherited = self.inherited(0)
        for i in range(plan.tiles):
            w = self.right_hand_side(i, inherited)
            for j in range(i):
                w += self.receive(j, plan.slot(i, j))
            if i + 1 < plan.tiles:
                inherited = self.inherited(i + 1)
            w = self.solve(i, w)
            self.write(i, w * rows(plgpu.load(smem.gates.at[i, 2], layout=ROWS), self.wide), "u")
        self.finish()

    def inherited(self, i: int) -> Array:
        """K S of tile i."""
        smem = self.smem
        plgpu.barrier_wait(smem.loaded.at[i])
        return self.dot(self.wide, [(smem.k.at[i], smem.s.at[n]) for n in reversed(range(self.plan.parts))])

    def right_hand_side(self, i: int, inherited: Array) -> Array:
        smem = self.smem
        value = plgpu.load(smem.w.at[i, 0], layout=WGMMA).astype(F32)
        plgpu.barrier_wait(smem.gated.at[i])
        write, reach = (rows(plgpu.load(smem.gates.at[i, n], layout=ROWS), self.wide) for n in range(2))
        return (value - inherited * reach) * write

    def receive(self, j: int, slot: Index) -> Array:
        """The matrix in a slot times W of tile j."""
        smem, parts = self.smem, range(self.plan.parts)
        plgpu.barrier_wait(smem.full.at[slot])
        result = self.dot(self.wide, pairs(self.matrix(slot), [smem.w.at[j, n, self.used] for n in parts]))
        if self.plan.recycles:
            plgpu.barrier_arrive(smem.empty.at[slot])
        return result

    def keep(self, i: int, w: Array) -> None:
        store(split(w, self.plan.parts), [self.smem.w.at[i, n] for n in range(self.plan.parts)])

    def solve(self, i: int, w: Array) -> Array:
        """W of tile i from its right-hand side, also left in shared memory."""
        ring = self.plan.ring(i % self.plan.inverters)

        def step(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            w, slot = carry
            self.keep(i, w)
            product = self.receive(i, slot)
            plgpu.commit_smem()  # all warps have read W, which is written next
            return jnp.where(n == 0, 0.0, 1.0) * w + product, _after(slot, (ring.start, ring.stop))

        w, _ = lax.fori_loop(0, FACTORS, step, (w, self.plan.slot(i, i)))
        self.keep(i, w)
        plgpu.barrier_arrive(self.smem.solved.at[i])
        return w
