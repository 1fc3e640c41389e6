"""What the two readers have in common: tensors known by their headers, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

_LONGEST_NAME = 512


class TensorInfo(NamedTuple):
    """Header of one tensor; `dtype` is NumPy's name for the types that convert, else the file's own name."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def is_name(name: object) -> bool:
    """Whether a name from a file can be the name of a tensor and stand in a one-line message."""
    return isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable()


@runtime_checkable
class TensorReader(Protocol):
    """A checkpoint on disk."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Headers by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Values of one tensor, in memory of their own.

        Raises:
            TfmError: the file is damaged.
        """
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` (excluded) of the tensor's first axis.

        Raises:
            TfmError: the file is damaged.
        """
        ...
