"""What happens to values on their way from the source to OUT: counting what is not finite, and reading ahead."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterator, Mapping

import numpy as np

from convert.tensors import TensorInfo, TensorReader

_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}  # all ones: infinity or not a number
_CHUNK = 1 << 16  # elements that are looked at together; they stay in the cache


class CountingReader:
    """A reader that counts the NaN and infinite values that pass, by tensor."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.non_finite: collections.Counter[str] = collections.Counter()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Headers by name."""
        return self._reader.tensors

    def read(self, name: str) -> np.ndarray:
        """Values of one tensor."""
        return self._count(name, self._reader.read(name))

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries of the first axis of one tensor."""
        return self._count(name, self._reader.read_rows(name, start, stop))

    def _count(self, name: str, values: np.ndarray) -> np.ndarray:
        if found := count_non_finite(values):
            self.non_finite[name] += found
        return values


def count_non_finite(values: np.ndarray) -> int:
    """Number of NaN and infinite values of a contiguous array."""
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    mask = bits.dtype.type(_EXPONENTS[values.dtype.name])
    chunks = (bits[start : start + _CHUNK] for start in range(0, bits.size, _CHUNK))
    return sum(int(np.count_nonzero((chunk & mask) == mask)) for chunk in chunks)


def read_ahead[Item](items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the next one being made by a thread while this one is used."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
