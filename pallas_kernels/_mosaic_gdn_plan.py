"""Sizes, shared memory and barriers of the Mosaic kernel in `pallas_kernels.mosaic_gdn`."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_common import BF16, F32, I32, TILE_ROWS, tile

WORD = 32  # nodes in a word of ancestors
LAST_LEVELS = 3  # applied as factors, not inverted
FACTORS = LAST_LEVELS + 1  # X, −P, P², P⁴
MAX_INVERTERS = 2


class Plan(NamedTuple):
    """Static sizes of a call."""

    given: int  # nodes
    nodes: int  # padded
    group: int  # value heads a key head
    key: int
    block: int  # columns of the value dimension
    slots: int  # of all rings together
    parts: int
    interpret: bool

    @property
    def tiles(self) -> int:
        return -(-self.nodes // TILE_ROWS)

    @property
    def inverters(self) -> int:
        """Warpgroups that make square matrices; number k makes those of tiles k, k + inverters and so on."""
        return min(MAX_INVERTERS, self.tiles)

    @property
    def width(self) -> int:
        """Nodes of a tile."""
        return min(TILE_ROWS, self.nodes)

    @property
    def words(self) -> int:
        """Words of ancestors a node."""
        return self.tiles * TILE_ROWS // WORD

    @property
    def pieces(self) -> int:
        """Square pieces of a tile's queries."""
        return self.key // TILE_ROWS

    @property
    def recycles(self) -> bool:
        """Whether a slot is written more than once."""
        return self.tiles > 1 or self.slots < FACTORS

    @property
    def single(self) -> bool:
        """Whether a ring has only one slot."""
        return self.slots < 2 * self.inverters

    def ring(self, k: int) -> range:
        """The slots of inverter k."""
        ends = [n * self.slots // self.inverters for n in range(self.inverters + 1)]
        return range(ends[k], ends[k + 1])

    def slot(self, i: int, n: int) -> int:
        """Where matrix n of tile i goes."""
        k = i % self.inverters
        ring = self.ring(k)
        return ring[(n + sum(j + FACTORS for j in range(k, i, self.inverters))) % len(ring)]

    def scratch(self) -> dict[str, pl.MemoryRef]:
        # Both operands of a product must be swizzled alike, so all follow the narrowest.
        matrix = functools.partial(tile, dtype=BF16, lanes=min(self.width, self.block))
        wide = (TILE_ROWS, self.block)
        buffers = {
            "k": matrix((self.tiles, TILE_ROWS, self.key)),
            "s": matrix((self.parts, self.key, self.block)),
            # A of each inverter, where the queries of its tile come later, then the rings.
            "squares": matrix((self.inverters + self.slots, self.parts, TILE_ROWS, self.width)),
            "w": matrix((self.tiles, self.parts, *wide)),  # values, then right-hand side, then W
            "tree": plgpu.SMEM((self.words + 3, self.tiles * TILE_ROWS), I32),
            "steps": plgpu.SMEM((self.tiles, 2, TILE_ROWS), F32),  # log2-decays: multiples of 1/256, remainders
            "prefix": plgpu.SMEM((self.tiles, 2, TILE_ROWS), F32),  # their sums over ancestors
            "gates": plgpu.SMEM((self.tiles, 3, TILE_ROWS), F32),
        }
        if self.tiles == 1:
            buffers |= {"q": matrix((self.pieces, TILE_ROWS, TILE_ROWS))}
        if self.width < TILE_ROWS:  # registers hold whole tiles, so only the copy engine can write fewer rows
            buffers |= {"u": tile(wide, F32), "o": tile(wide, F32)}
        return buffers

    def barriers(self) -> dict[str, plgpu.Barrier]:
        tiles, inverters = self.tiles, self.inverters
        return {
            "planted": plgpu.Barrier(),  # the tree is there
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=tiles),
            "asked": plgpu.Barrier(num_arrivals=self.pieces, num_barriers=inverters),  # the queries are there
            "stepped": plgpu.Barrier(num_arrivals=inverters),
            "summed": plgpu.Barrier(num_arrivals=inverters),
            "stated": plgpu.Barrier(),  # the state is split
            "gated": plgpu.Barrier(num_barriers=tiles),
            "full": plgpu.Barrier(num_barriers=self.slots),
            "empty": plgpu.Barrier(num_barriers=self.slots),
            "solved": plgpu.Barrier(num_barriers=tiles),
            "done": plgpu.Barrier(num_arrivals=inverters + 1),
        }

    def bytes(self) -> int:
        return sum(jnp.dtype(x.dtype).itemsize * math.prod(x.shape) for x in self.scratch().values())
