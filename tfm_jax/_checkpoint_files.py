"""Array files of format 1, byte for byte as Orbax 0.12 writes and reads them (zarr 3, no OCDBT, no compression).

    PIECE/_METADATA, PIECE/_CHECKPOINT_METADATA     the tree of arrays, for Orbax
    PIECE/ARRAY/zarr.json                           shape and dtype
    PIECE/ARRAY/c/0/0                               one 0 for every dimension: the values, then an index of 20 bytes

The values lie in C order, little-endian: the array is one shard of one chunk, and the index holds the chunk's offset
(0) and its number of bytes as two uint64, and the CRC-32C of these 16 bytes (zarr codec `sharding_indexed`). Written
here so that an array goes to disk block by block and comes back straight into its place; TensorStore wants it whole.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from tfm_jax._checkpoint_layout import Shape
from tfm_jax.errors import TfmError

_HEADER, _TREE, _HANDLER = "zarr.json", "_METADATA", "_CHECKPOINT_METADATA"
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name
_ORBAX_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_INDEX_BYTES = 20


class ArrayFile(NamedTuple):
    """One array on disk; its values begin at offset 0 of `file`."""

    file: Path
    shape: Shape
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Entries `start` to `stop` of the first axis, in memory of their own.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        left = memoryview(rows.reshape(-1).view(np.uint8))
        position = start * self.row_bytes
        with self.file.open("rb", buffering=0) as file:
            while left:
                count = os.preadv(file.fileno(), [left], position)
                if not count:
                    message = f"{self.file} has become shorter"
                    raise OSError(message)
                left, position = left[count:], position + count
        return rows

    def map_values(self) -> MappedArray:
        """All values in pages of the file itself, which are being read from now on.

        Raises:
            OSError: the file cannot be mapped.
        """
        with self.file.open("rb") as file:
            private = mmap.PROT_READ | mmap.PROT_WRITE  # what is written here would never reach the file
            pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=private)
        pages.madvise(mmap.MADV_WILLNEED)
        return MappedArray(pages, np.frombuffer(pages, self.dtype, math.prod(self.shape)).reshape(self.shape))


class MappedArray(NamedTuple):
    """Values in pages of a file."""

    pages: mmap.mmap
    values: np.ndarray

    def wait(self) -> None:
        """Wait until the pages are in memory; without the means (before Linux 5.14) they come on first use.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            self.pages.madvise(_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def write_array(directory: Path, shape: Shape, dtype: np.dtype, blocks: Iterable[np.ndarray]) -> None:
    """Write one array.

    Args:
        directory: to create.
        shape: of the whole array.
        dtype: to store; blocks of another are cast.
        blocks: consecutive parts of the array along its first axis.

    Raises:
        OSError: the disk refuses.
    """
    file = directory / _values_name(len(shape))
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        for block in blocks:
            values = np.ascontiguousarray(block, dtype)
            stream.write(values.reshape(-1).view(np.uint8).data)
        stream.write(_index(math.prod(shape) * dtype.itemsize))
    (directory / _HEADER).write_text(_dump(_header(shape, dtype)), encoding="utf-8")


def write_tree(piece: Path, paths: Iterable[str]) -> None:
    """Write what Orbax needs to know about the arrays of a piece.

    Raises:
        OSError: the disk refuses.
    """
    keys = sorted(tuple(path.split(".")) for path in paths)
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str(parts): {"key_metadata": [{"key": key, "key_type": 2} for key in parts], "value_metadata": value}
        for parts in keys
    }
    options = {"use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    (piece / _TREE).write_text(json.dumps({"tree_metadata": tree} | options | {"custom_metadata": None}))
    handler = {"item_handlers": _ORBAX_HANDLER, "metrics": {}, "performance_metrics": {}}
    times = {"init_timestamp_nsecs": None, "commit_timestamp_nsecs": None}  # else no two runs would write the same
    (piece / _HANDLER).write_text(json.dumps(handler | times | {"custom_metadata": {}}))


def read_piece(piece: Path) -> dict[str, ArrayFile]:
    """Arrays of a piece by dotted path, once every header and the size of every file is right.

    Raises:
        TfmError: an array is damaged.
        OSError, ValueError, LookupError, TypeError: something is missing or is not what it should be.
    """
    tree = json.loads((piece / _TREE).read_text(encoding="utf-8"))["tree_metadata"]
    listed = {".".join(entry["key"] for entry in keys["key_metadata"]) for keys in tree.values()}
    found = {entry.name for entry in piece.iterdir() if entry.is_dir()}
    if listed != found:
        message = f"{piece} is damaged: {_TREE} and the arrays differ in {sorted(listed ^ found)}; convert again."
        raise TfmError(message)
    return {name: _read_header(piece / name) for name in sorted(found)}


def sync_tree(directory: Path) -> None:
    """Wait until everything in a directory is on the disk.

    Raises:
        OSError: the disk refuses.
    """
    for entry in [*directory.rglob("*"), directory]:
        sync(entry)


def sync(path: Path) -> None:
    """Wait until one file, or the names in one directory, are on the disk.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_header(directory: Path) -> ArrayFile:
    values = json.loads((directory / _HEADER).read_text(encoding="utf-8"))
    shape, dtype = tuple(values["shape"]), np.dtype(values["data_type"])
    if values != _header(shape, dtype):
        message = f"{directory} is not one uncompressed chunk, as format 1 stores arrays; convert again."
        raise TfmError(message)
    array = ArrayFile(directory / _values_name(len(shape)), shape, dtype)
    index = _index(math.prod(shape) * dtype.itemsize)
    with array.file.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(-min(size, _INDEX_BYTES), os.SEEK_END)
        if size != math.prod(shape) * dtype.itemsize + _INDEX_BYTES or file.read() != index:
            message = f"{directory.parent} is damaged: {directory.name} holds {size} bytes; convert again."
            raise TfmError(message)
    return array


def _values_name(dimensions: int) -> str:
    return "/".join(["c", *["0"] * dimensions])


def _header(shape: Shape, dtype: np.dtype) -> dict[str, Any]:
    little = {"configuration": {"endian": "little"}, "name": "bytes"}
    shard = {"chunk_shape": list(shape), "codecs": [little], "index_codecs": [little, {"name": "crc32c"}]}
    return {
        "chunk_grid": {"configuration": {"chunk_shape": list(shape)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"configuration": shard, "name": "sharding_indexed"}],
        "data_type": dtype.name,
        "fill_value": 0.0,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    }


def _dump(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), sort_keys=True)


def _index(size: int) -> bytes:
    entry = struct.pack("<QQ", 0, size)
    return entry + struct.pack("<I", _crc32c(entry))


def _crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), RFC 3720, appendix B.4."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def bands(array: ArrayFile, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of the first axis of about `size` bytes each."""
    step = max(1, size // max(1, array.row_bytes))
    for start in range(0, array.shape[0], step):
        yield start, min(start + step, array.shape[0])
