"""Reads Hugging Face safetensors directories, one file or shards with an index, one tensor at a time.

Values are read with pread into memory of their own: the pages of a mapped file would count as this process's.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from convert.safetensors_header import read_header
from convert.tensors import TensorInfo, is_name
from tfm_jax.errors import TfmError

INDEX_FILE = "model.safetensors.index.json"

_MAX_INDEX = 64 << 20  # bytes; the largest published ones have about 10 MB


class SafetensorsReader:
    """Tensors of a directory; the index decides which files count, else all `*.safetensors`.

    Raises:
        TfmError: no such files, a damaged one, an index that disagrees with the files, or a tensor in two files.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        index = _read_index(directory)
        names = sorted(set(index.values())) if index else sorted(file.name for file in directory.glob("*.safetensors"))
        if not names:
            message = f"{directory} holds no *.safetensors file; give a complete Hugging Face directory."
            raise TfmError(message)
        for name in names:
            self._add_file(directory / name)
        if index:
            _check_index(directory / INDEX_FILE, index, self.tensors)

    def _add_file(self, file: Path) -> None:
        if not file.is_file():
            message = f"{file} is missing although {INDEX_FILE} names it; copy the whole directory."
            raise TfmError(message)
        for name, (info, offset) in read_header(file).items():
            if name in self.tensors:
                message = f"{name} is in both {self.tensors[name].file} and {info.file}; remove one of them."
                raise TfmError(message)
            self.tensors[name], self._offsets[name] = info, offset

    def read(self, name: str) -> np.ndarray:
        """Values of one tensor, which must be of a type that converts.

        Raises:
            TfmError: the file has changed or cannot be read.
        """
        return self._read(name, self._offsets[name], self.tensors[name].shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` (excluded) of the first axis; else as `read`."""
        rows, *rest = self.tensors[name].shape
        if not 0 <= start <= stop <= rows:
            message = f"{name} has {rows} rows, not {start} to {stop}."
            raise IndexError(message)
        row = math.prod(rest) * np.dtype(self.tensors[name].dtype).itemsize
        return self._read(name, self._offsets[name] + start * row, (stop - start, *rest))

    def _read(self, name: str, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        info = self.tensors[name]
        dtype = np.dtype(info.dtype)
        values = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        try:
            with open(info.file, "rb", buffering=0) as file:  # noqa: PTH123  (unbuffered)
                done = 0
                while done < len(values):  # the kernel gives at most 2 GiB a call
                    count = os.preadv(file.fileno(), [values[done:]], offset + done)
                    if not count:
                        message = f"{info.file} ends within {name}; copy the file again."
                        raise TfmError(message)
                    done += count
        except OSError as error:
            message = f"{info.file}: {name} cannot be read ({error}); copy the file again."
            raise TfmError(message) from error
        return values.view(dtype).reshape(shape)


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name → file name; empty without an index."""
    file = directory / INDEX_FILE
    if not file.is_file():
        return {}
    try:
        if (size := file.stat().st_size) > _MAX_INDEX:
            message = f"{size} bytes are more than {_MAX_INDEX}"
            raise ValueError(message)  # noqa: TRY301  (all of these become one error below)
        index = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        plain = all(is_name(shard) and Path(shard).name == shard for shard in index.values())
        if wrong := [name for name in index if not is_name(name)]:
            message = f"it names a tensor {wrong[0][:40]!r}"
            raise ValueError(message)  # noqa: TRY301
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{file} is no index of tensors ({type(error).__name__}: {error}); copy it again."
        raise TfmError(message) from error
    if not plain:
        message = f"{file} names files outside its own directory; do not trust this checkpoint."
        raise TfmError(message)
    return index


def _check_index(file: Path, index: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, shard in index.items():
        if name not in tensors or Path(tensors[name].file).name != shard:
            message = f"{file} says that {name} is in {shard}, where it is not; copy the whole directory."
            raise TfmError(message)
    if unlisted := sorted(tensors.keys() - index.keys()):
        name = unlisted[0]
        message = f"{tensors[name].file} holds {name}, which {file} does not list; copy the whole directory."
        raise TfmError(message)
