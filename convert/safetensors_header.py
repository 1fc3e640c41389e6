"""Reads the header of a safetensors file and believes nothing in it that the file's size does not bear out.

A file is 8 bytes N (little-endian), N bytes of JSON, {name: {"dtype": …, "shape": […], "data_offsets": [begin, end]}}
and perhaps "__metadata__", then the values, which the offsets must cover without gap or overlap
(https://huggingface.co/docs/safetensors, section "Format").
"""

from __future__ import annotations

import collections
import json
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from convert.tensors import TensorInfo, is_name
from tfm_jax.errors import TfmError

MAX_HEADER = 16 << 20  # bytes; about 100,000 tensors in one file, where the largest published shards hold 5,000

_MAX_RANK = 8
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # NumPy's, of the types that convert
_BITS = (
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16, "F16": 16, "F32": 32, "F64": 64, "C64": 64, "BOOL": 8}
    | {f"F8_{kind}": 8 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
    | {f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)}
)


def read_header(file: Path) -> dict[str, tuple[TensorInfo, int]]:
    """Every tensor of a file, and the position of its first byte.

    Raises:
        TfmError: the file cannot be read or is no whole safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as source:
            start, entries = _read_entries(source, size)
        extents = {name: _check_entry(name, entry) for name, entry in entries.items()}
        _check_cover(extents, size - start)
    except (OSError, ValueError, RecursionError) as error:
        message = f"{file} is truncated or no safetensors file ({error}); copy it again."
        raise TfmError(message) from error
    tensors = {}
    for name, entry in entries.items():
        info = TensorInfo(tuple(entry["shape"]), _NAMES.get(entry["dtype"], entry["dtype"]), str(file))
        tensors[name] = (info, start + extents[name][0])
    return tensors


def _read_entries(source: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Position of the first value, and the JSON entry of every tensor."""
    if size < _LENGTH.size:
        _refuse(f"it has {size} bytes")
    (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
    start = _LENGTH.size + length
    if start > size:
        _refuse(f"its header of {length} bytes exceeds its {size} bytes")
    if length > MAX_HEADER:
        _refuse(f"its header has {length} bytes, more than {MAX_HEADER}")
    header = json.loads(source.read(length).decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict) or not isinstance(header.pop(_METADATA, {}), dict):
        _refuse("its header is no table of tensors")
    return start, header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        _refuse(f"its header names {name[:40]!r} twice")
    return values


def _check_entry(name: str, entry: Any) -> tuple[int, int]:  # noqa: ANN401  (a JSON value)
    """First byte and end of a tensor's values, once its type and shape take exactly as many."""
    if not is_name(name):
        _refuse(f"it names a tensor {name[:40]!r}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"{name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(f"{name} is of the unknown type {str(dtype)[:40]}")
    if not _are_counts(shape, range(_MAX_RANK + 1)) or not _are_counts(offsets, range(2, 3)):
        _refuse(f"the shape or the data_offsets of {name} are malformed")
    first, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (end - first):
        _refuse(f"{name} of shape {tuple(shape)} in {dtype} has {end - first} bytes instead of {bits / 8:g}")
    return first, end


def _check_cover(extents: dict[str, tuple[int, int]], size: int) -> None:
    """The tensors follow each other without gap or overlap, from the first byte of the values to the last."""
    position, last = 0, "the header"
    for name, (first, end) in sorted(extents.items(), key=lambda extent: extent[1]):
        if first != position:
            _refuse(f"{name} {'overlaps' if first < position else 'leaves a gap after'} {last}")
        position, last = end, name
    if position != size:
        _refuse(f"its tensors take {position} bytes but {size} follow the header")


def _are_counts(values: Any, lengths: range) -> bool:  # noqa: ANN401  (a JSON value)
    counts = isinstance(values, list) and len(values) in lengths
    return counts and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)
