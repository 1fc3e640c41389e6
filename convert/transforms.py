"""Transforms from the tensors of a rule to a parameter, written once for every model.

Each takes the tensors in the order of the rule and the sizes that the rule's shapes refer to, and yields the parameter
in blocks along its first axis. Most parameters are rows of the tensors, put in another order and transposed; these are
read in bands straight into their places. Every value is read once. Tensors are torch's ([out, in]); kernels become
[in, out].
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from convert.tensors import TensorReader

Sizes = Mapping[str, int]

_BAND = 8 << 20  # bytes that are read at once
_TILE = 32, 512  # source rows and columns that are transposed at once; they stay in the cache


class Memory:
    """Memory for parameters, used again once no array refers to it.

    The pages of fresh memory cost more time than transposing what comes into them.
    """

    def __init__(self) -> None:
        self._used: list[tuple[memoryview, weakref.ref[np.ndarray]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of undefined values."""
        size = math.prod(shape) * dtype.itemsize
        free = [memory for memory, array in self._used if array() is None]
        memory = next((memory for memory in free if memory.nbytes >= size), None)
        if memory is None:
            self._used = [entry for entry in self._used if entry[1]() is not None]
            memory = memoryview(np.empty(size, np.uint8))
        array = np.frombuffer(memory, np.uint8, size)  # all views of it refer to this array, whatever views they are of
        self._used = [entry for entry in self._used if entry[0] is not memory]
        self._used.append((memory, weakref.ref(array)))
        return array.view(dtype).reshape(shape)


class Tensor(NamedTuple):
    """A tensor that is still on disk, and memory for what becomes of it."""

    reader: TensorReader
    name: str
    memory: Memory

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the header."""
        return self.reader.tensors[self.name].shape

    @property
    def dtype(self) -> np.dtype:
        """Of the header."""
        return np.dtype(self.reader.tensors[self.name].dtype)

    def read(self) -> np.ndarray:
        """All values."""
        return self.reader.read(self.name)

    def bands(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Entries `start` to `stop` of the first axis, a band at a time."""
        step = max(1, _BAND // (math.prod(self.shape[1:]) * self.dtype.itemsize))
        for first in range(start, stop, step):
            yield self.reader.read_rows(self.name, first, min(first + step, stop))


class Rows(NamedTuple):
    """Rows `start` to `stop` of a tensor [out, in]."""

    tensor: Tensor
    start: int
    stop: int


Transform = Callable[[Sequence[Tensor], Sizes], Iterator[np.ndarray]]


def keep(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """The tensor as it is."""
    (tensor,) = tensors
    return tensor.bands(0, tensor.shape[0])


def transpose(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """[out, in] → [in, out]."""
    return fuse(tensors, sizes)


def fuse(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """Several [out, in] → one [in, out | out | …], in the order of the rule."""
    yield _gather(map(_all_rows, tensors))


def fuse_gated(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """As `fuse`; the first tensor interleaves [query | gate] per head and is split into all queries, then all gates."""
    interleaved, *rest = tensors
    yield _gather([*_ungroup(interleaved, [sizes["head"]] * 2), *map(_all_rows, rest)])


def fuse_grouped(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """As `fuse`, of two tensors that hold [q | k | v | z] and [b | a] per key head: all q, then all k, v, z, b, a."""
    key, value = sizes["key_dim"], sizes["value"] // sizes["key_heads"]
    gates = sizes["value_heads"] // sizes["key_heads"]
    qkvz, ba = tensors
    yield _gather([*_ungroup(qkvz, [key, key, value, value]), *_ungroup(ba, [gates, gates])])


def stack_pairs(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """Two tensors of every expert, each pair as in `fuse`: [experts, in, out | out]."""
    for pair in zip(tensors[::2], tensors[1::2], strict=True):
        yield _gather(map(_all_rows, pair))[None]


def stack(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """One [out, in] of every expert → [experts, in, out]."""
    for tensor in tensors:
        yield _gather([_all_rows(tensor)])[None]


def transpose_each(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """[experts, out, in] → [experts, in, out]."""
    (tensor,) = tensors
    for band in tensor.bands(0, tensor.shape[0]):
        result = tensor.memory.empty((len(band), band.shape[2], band.shape[1]), band.dtype)
        for source, place in zip(band, result, strict=True):
            _transpose(source, place)
        yield result


def take_query(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """The query's part of a fused [query | key | value]."""
    (tensor,) = tensors
    yield _gather([Rows(tensor, 0, sizes["query"])])


def take_key_value(tensors: Sequence[Tensor], sizes: Sizes) -> Iterator[np.ndarray]:
    """The rest of a fused [query | key | value]."""
    (tensor,) = tensors
    yield _gather([Rows(tensor, sizes["query"], tensor.shape[0])])


def unroll_conv(tensors: Sequence[Tensor], _: Sizes) -> Iterator[np.ndarray]:
    """Depthwise [channels, 1, width] → [width, channels]; the last row still multiplies the current token."""
    (tensor,) = tensors
    yield np.ascontiguousarray(tensor.read()[:, 0].T)


def _all_rows(tensor: Tensor) -> Rows:
    return Rows(tensor, 0, tensor.shape[0])


def _ungroup(tensor: Tensor, widths: Sequence[int]) -> Iterator[Rows]:
    """Rows that lie in groups of parts of these widths: the first part of every group, then the second of every one."""
    offset = 0
    for width in widths:
        for start in range(offset, tensor.shape[0], sum(widths)):
            yield Rows(tensor, start, start + width)
        offset += width


def _gather(parts: Iterable[Rows]) -> np.ndarray:
    """Rows of several [out, in] → [in, out | out | …]."""
    parts = list(parts)
    tensor, outputs = parts[0].tensor, sum(part.stop - part.start for part in parts)
    dtype = np.result_type(*{part.tensor.dtype for part in parts})
    result = tensor.memory.empty((tensor.shape[1], outputs), dtype)
    start = 0
    for part in parts:
        for band in part.tensor.bands(part.start, part.stop):
            _transpose(band.astype(dtype, copy=False), result[:, start : start + len(band)])
            start += len(band)
    return result


def _transpose(source: np.ndarray, result: np.ndarray) -> None:
    bits = f"u{source.itemsize}"  # NumPy copies whole numbers faster than bfloat16
    source, result = source.view(bits), result.view(bits)
    rows, columns = _TILE
    for column in range(0, source.shape[1], columns):
        for row in range(0, source.shape[0], rows):
            tile = source[row : row + rows, column : column + columns].T
            result[column : column + columns, row : row + rows] = tile
