"""Transforms from the tensors of a rule to a parameter, written once for every model.

Each takes the tensors in the order of the rule and the sizes that the rule's shapes refer to, and yields the parameter
in blocks along its first axis, so that no second copy of a large one is ever in memory. Every value is read once.
Tensors are torch's ([out, in]); kernels become [in, out].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from convert.tensors import TensorReader

Sizes = Mapping[str, int]

_BLOCK = 64 << 20  # bytes
_TILE = 32, 512  # source rows and columns that are transposed at once; they stay in the cache


class Tensor(NamedTuple):
    """A tensor that is still on disk."""

    reader: TensorReader
    name: str

    def read(self) -> np.ndarray:
        """All values."""
        return self.reader.read(self.name)

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Entries of the first axis."""
        return self.reader.read_rows(self.name, start, stop)

    @property
    def rows(self) -> int:
        """Length of the first axis."""
        return self.reader.tensors[self.name].shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first axis."""
        info = self.reader.tensors[self.name]
        return math.prod(info.shape[1:]) * np.dtype(info.dtype).itemsize


Transform = Callable[[Sequence[Tensor], Sizes], Iterator[np.ndarray]]


def keep(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """The tensor as it is."""
    (tensor,) = tensors
    step = max(1, _BLOCK // tensor.row_bytes)
    for start in range(0, tensor.rows, step):
        yield tensor.read_rows(start, min(start + step, tensor.rows))


def join(parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Several [out, in] → [in, out | out | …], in blocks."""
    outputs = sum(map(len, parts))
    step = max(1, _BLOCK // (outputs * max(part.itemsize for part in parts)))
    for start in range(0, parts[0].shape[1], step):
        yield _transpose([part[:, start : start + step] for part in parts])


def transpose(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """[out, in] → [in, out]."""
    return fuse(tensors, sizes)


def fuse(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """Several [out, in] → one [in, out | out | …], in the order of the rule."""
    return join([tensor.read() for tensor in tensors])


def fuse_gated(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """As `fuse`; the first tensor interleaves [query | gate] per head and is split into all queries, then all gates."""
    interleaved, *rest = tensors
    heads = interleaved.read().reshape(-1, 2, sizes["head"], sizes["hidden"])
    split = [heads[:, part].reshape(-1, sizes["hidden"]) for part in range(2)]
    return join([*split, *(tensor.read() for tensor in rest)])


def fuse_grouped(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """As `fuse`, of two tensors that hold [q | k | v | z] and [b | a] per key head: all q, then all k, v, z, b, a."""
    key, value = sizes["key_dim"], sizes["value"] // sizes["key_heads"]
    gates = sizes["value_heads"] // sizes["key_heads"]
    widths = ((key, key, value, value), (gates, gates))
    parts = []
    for tensor, group in zip(tensors, widths, strict=True):
        heads = tensor.read().reshape(sizes["key_heads"], -1, sizes["hidden"])
        parts += [part.reshape(-1, sizes["hidden"]) for part in np.split(heads, np.cumsum(group)[:-1], axis=1)]
    return join(parts)


def stack_pairs(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """Two tensors of every expert, each pair as in `fuse`: [experts, in, out | out]."""
    for gate, up in zip(tensors[::2], tensors[1::2], strict=True):
        yield _transpose([gate.read(), up.read()])[None]


def stack(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """One [out, in] of every expert → [experts, in, out]."""
    for tensor in tensors:
        yield _transpose([tensor.read()])[None]


def transpose_each(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """[experts, out, in] → [experts, in, out]."""
    (tensor,) = tensors
    for expert in range(tensor.rows):
        yield _transpose([tensor.read_rows(expert, expert + 1)[0]])[None]


def take_query(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """The query's part of a fused [query | key | value]."""
    (tensor,) = tensors
    return join([tensor.read_rows(0, sizes["query"])])


def take_key_value(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """The rest of a fused [query | key | value]."""
    (tensor,) = tensors
    return join([tensor.read_rows(sizes["query"], tensor.rows)])


def unroll_conv(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """Depthwise [channels, 1, width] → [width, channels]; the last row still multiplies the current token."""
    (tensor,) = tensors
    yield np.ascontiguousarray(tensor.read()[:, 0].T)


def _transpose(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Several [out, in] → [in, out | out | …]."""
    dtype = np.result_type(*parts)
    result = np.empty((parts[0].shape[1], sum(map(len, parts))), dtype)
    bits = np.dtype(f"u{dtype.itemsize}")  # NumPy copies whole numbers faster than bfloat16
    start = 0
    for part in parts:
        stop = start + len(part)
        _transpose_tiles(part.astype(dtype, copy=False).view(bits), result[:, start:stop].view(bits))
        start = stop
    return result


def _transpose_tiles(source: np.ndarray, result: np.ndarray) -> None:
    rows, columns = _TILE
    for column in range(0, source.shape[1], columns):
        for row in range(0, source.shape[0], rows):
            tile = source[row : row + rows, column : column + columns].T
            result[column : column + columns, row : row + rows] = tile
