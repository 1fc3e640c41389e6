"""Writes torch's zip archives (.pth) without torch: what `torch.load(weights_only=True)` and `PthReader` read.

The pickle (protocol 2) names nothing but tensors, an empty OrderedDict for their hooks, and plain values; it is that of
`torch.save` without the memo.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

_STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}
_SETITEMS, _MARK, _EMPTY_DICT, _TUPLE = b"u", b"(", b"}", b"t"

Plain = str | int | float


class PthTensor(NamedTuple):
    """A tensor to write; `make` gives its values, in C order, when their turn comes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_pth(
    file: Path, values: Mapping[str, Mapping[str, Plain]], tensors: Mapping[str, PthTensor], *, key: str = "state_dict"
) -> None:
    """Write one archive: a dict of the dicts `values`, and of the tensors under `key`.

    Raises:
        OSError: the disk refuses.
    """
    entries = {
        name: _pickle_dict({item: _plain(value) for item, value in part.items()}) for name, part in values.items()
    }
    entries[key] = _pickle_dict(
        {name: _tensor(number, tensor) for number, (name, tensor) in enumerate(tensors.items())}
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        stem = file.stem
        _write(archive, f"{stem}/data.pkl", b"\x80\x02" + _pickle_dict(entries) + b".")
        _write(archive, f"{stem}/byteorder", b"little")
        for number, tensor in enumerate(tensors.values()):
            contents = np.ascontiguousarray(tensor.make(), tensor.dtype)
            _write(archive, f"{stem}/data/{number}", contents.reshape(-1).view(np.uint8).data)
        _write(archive, f"{stem}/version", b"3\n")


def _write(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    archive.writestr(zipfile.ZipInfo(name), content)  # dated 1980: the same tensors give the same file


def _pickle_dict(items: Mapping[str, bytes]) -> bytes:
    return _EMPTY_DICT + _MARK + b"".join(_plain(name) + value for name, value in items.items()) + _SETITEMS


def _tensor(number: int, tensor: PthTensor) -> bytes:
    """Call of `_rebuild_tensor_v2` with storage, offset, sizes, strides, requires_grad and hooks."""
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    storage = f"ctorch\n{_STORAGES[tensor.dtype.name]}\n".encode()
    identifier = _plain("storage") + storage + _plain(str(number)) + _plain("cpu") + _plain(math.prod(tensor.shape))
    sizes = [_MARK + b"".join(map(_plain, numbers)) + _TUPLE for numbers in (tensor.shape, strides)]
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    arguments = _MARK + identifier + _TUPLE + b"Q" + _plain(0) + b"".join(sizes) + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + _MARK + arguments + _TUPLE + b"R"


def _plain(value: Plain) -> bytes:
    """BINUNICODE, BINFLOAT or BININT."""
    if isinstance(value, str):
        encoded = value.encode()
        return b"X" + struct.pack("<I", len(encoded)) + encoded
    return b"G" + struct.pack(">d", value) if isinstance(value, float) else b"J" + struct.pack("<i", value)
