"""Reads Hugging Face safetensors directories, one file or shards with an index, one tensor at a time.

A file is opened anew for every tensor, so that no mapped page of an earlier tensor stays resident.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy; safetensors cannot read it otherwise)
import numpy as np
from safetensors import SafetensorError, safe_open

from convert.tensors import TensorInfo
from tfm_jax.errors import TfmError

INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class SafetensorsReader:
    """Tensors of a directory; the index decides which files count, else all `*.safetensors`.

    Raises:
        TfmError: no such files, a damaged one, an index that disagrees with the files, or a tensor in two files.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        index = _read_index(directory)
        names = sorted(set(index.values())) if index else sorted(file.name for file in directory.glob("*.safetensors"))
        if not names:
            message = f"{directory} holds no *.safetensors file; give a complete Hugging Face directory."
            raise TfmError(message)
        for name in names:
            for tensor, info in _read_header(directory / name).items():
                if tensor in self.tensors:
                    message = f"{tensor} is in both {self.tensors[tensor].file} and {info.file}; remove one of them."
                    raise TfmError(message)
                self.tensors[tensor] = info
        if index:
            _check_index(directory / INDEX_FILE, index, self.tensors)

    def read(self, name: str) -> np.ndarray:
        """Values of one tensor.

        Raises:
            TfmError: the file is damaged.
        """
        file = self.tensors[name].file
        try:
            with safe_open(file, framework="np") as handle:
                return handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            message = f"{file}: {name} cannot be read ({error}); copy the file again."
            raise TfmError(message) from error


def _read_header(file: Path) -> dict[str, TensorInfo]:
    if not file.is_file():
        message = f"{file} is missing although {INDEX_FILE} names it; copy the whole directory."
        raise TfmError(message)
    try:
        with safe_open(str(file), framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
            return {
                name: TensorInfo(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()), str(file))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        message = f"{file} is truncated or no safetensors file ({error}); copy it again."
        raise TfmError(message) from error


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name → file name; empty without an index."""
    file = directory / INDEX_FILE
    if not file.is_file():
        return {}
    try:
        index = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(name, str) and Path(name).name == name for name in index.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
