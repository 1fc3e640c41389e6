"""The reader of safetensors: right values in memory of their own, and no belief in headers that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sources import GOLDENS, read_safetensors

from convert.safetensors_header import MAX_HEADER
from convert.safetensors_io import SafetensorsReader
from tfm_jax.errors import TfmError

pytestmark = pytest.mark.slow

SHARDED = GOLDENS / "qwen3_5_vl_tied"


def write_raw(directory: Path, header: bytes, values: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header; `length` is what its first 8 bytes say."""
    size = struct.pack("<Q", len(header) if length is None else length)
    (directory / "model.safetensors").write_bytes(size + header + values)
    return directory


def write_table(directory: Path, values: int = 8, **entries: Any) -> Path:  # noqa: ANN401
    return write_raw(directory, json.dumps(entries).encode(), bytes(values))


def entry(first: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:  # noqa: ANN401
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def test_values_are_the_files_bits() -> None:
    reader, source = SafetensorsReader(SHARDED), read_safetensors(SHARDED)
    assert reader.tensors.keys() == source.keys()
    for name, expected in source.items():
        assert reader.tensors[name].shape == expected.shape
        np.testing.assert_array_equal(reader.read(name).astype(np.float32), expected)


def test_every_convertible_type_keeps_its_bits(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (3, 5, 8), np.uint8)
    arrays = {name: bits.view(name) for name in ("bfloat16", "float16", "float32")} | {"scalar": np.float32(3.5)}
    save_file({name: np.asarray(array) for name, array in arrays.items()}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    for name in ("bfloat16", "float16", "float32"):
        assert reader.read(name).dtype == np.dtype(name)
        assert reader.read(name).tobytes() == bits.tobytes()
        assert reader.read_rows(name, 1, 3).tobytes() == bits[1:3].tobytes()
        assert reader.read_rows(name, 2, 2).shape == (0, *arrays[name].shape[1:])
    assert reader.read("scalar") == np.float32(3.5)
    with pytest.raises(IndexError, match="3 rows, not 2 to 4"):
        reader.read_rows("float32", 2, 4)


def test_values_are_no_mapped_pages(tmp_path: Path) -> None:
    save_file({"t": np.ones((64, 64), np.float32)}, tmp_path / "model.safetensors")
    values = SafetensorsReader(tmp_path).read("t")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert values.flags.writeable
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert values.sum() == 64 * 64


def test_a_file_that_shrinks_meanwhile_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"t": np.ones(64, np.float32)}, file)
    reader = SafetensorsReader(tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(TfmError, match=r"model\.safetensors ends within t"):
        reader.read("t")
    file.unlink()
    with pytest.raises(TfmError, match=r"model\.safetensors: t cannot be read"):
        reader.read("t")


LYING = {
    "overlap": ({"a": entry(), "b": entry(4, 12)}, 12, "b overlaps a"),
    "same bytes": ({"a": entry(), "b": entry()}, 8, "b overlaps a"),
    "gap": ({"a": entry(), "b": entry(12, 20)}, 20, "b leaves a gap after a"),
    "late start": ({"a": entry(4, 12)}, 12, "a leaves a gap after the header"),
    "values cut off": ({"a": entry()}, 7, "its tensors take 8 bytes but 7 follow"),
    "bytes left over": ({"a": entry()}, 9, "its tensors take 8 bytes but 9 follow"),
    "beyond the file": ({"a": entry(0, 1 << 40, [1 << 38])}, 8, "take 1099511627776 bytes but 8 follow"),
    "shape too large": ({"a": entry(shape=[3])}, 8, r"a of shape \(3,\) in F32 has 8 bytes instead of 12"),
    "shape overflows": ({"a": entry(shape=[1 << 62, 4])}, 8, "has 8 bytes instead of 7.3787e"),
    "reversed": ({"a": entry(8, 0)}, 8, "has -8 bytes instead of 8"),
    "half a byte": ({"a": entry(0, 1, [3], "F4")}, 1, "has 1 bytes instead of 1.5"),
    "negative offsets": ({"a": entry(-8, 0)}, 8, "data_offsets of a are malformed"),
    "offsets as text": ({"a": entry("0", "8")}, 8, "data_offsets of a are malformed"),
    "offsets as fractions": ({"a": entry(0.0, 8.0)}, 8, "data_offsets of a are malformed"),
    "three offsets": ({"a": entry() | {"data_offsets": [0, 8, 8]}}, 8, "data_offsets of a are malformed"),
    "negative shape": ({"a": entry(shape=[-1, -2])}, 8, "the shape or the data_offsets of a"),
    "flag as extent": ({"a": entry(0, 4, [True])}, 4, "the shape or the data_offsets of a"),
    "many axes": ({"a": entry(0, 4, [1] * 9)}, 4, "the shape or the data_offsets of a"),
    "unknown type": ({"a": entry(dtype="F8_X")}, 8, "a is of the unknown type F8_X"),
    "type is a list": ({"a": entry(dtype=["F32"])}, 8, "a is of the unknown type"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "a has no dtype, shape and data_offsets"),
    "another key": ({"a": entry() | {"scale": 2}}, 8, "a has no dtype, shape and data_offsets"),
    "no entry": ({"a": 3}, 8, "a has no dtype, shape and data_offsets"),
    "odd name": ({"a\nb": entry()}, 8, r"names a tensor 'a\\nb'"),
    "endless name": ({"a" * 5000: entry()}, 8, "names a tensor 'a{40}'"),
    "metadata is a list": ({"__metadata__": []}, 0, "its header is no table of tensors"),
}


@pytest.mark.parametrize("lie", LYING)
def test_headers_that_lie_are_refused(tmp_path: Path, lie: str) -> None:
    entries, values, words = LYING[lie]
    with pytest.raises(TfmError, match=rf"model\.safetensors is truncated or no safetensors file \(.*{words}"):
        SafetensorsReader(write_table(tmp_path, values, **entries))


DAMAGED = {
    "empty": (b"", 8, "header of 8 bytes exceeds its 8 bytes"),
    "longer than the file": (b"{}", 3, "header of 3 bytes exceeds its 10 bytes"),
    "longest": (b"{}", (1 << 64) - 1, "exceeds its 10 bytes"),
    "list": (b"[]", None, "no table of tensors"),
    "no JSON": (b"{'a'}", None, "Expecting"),
    "no UTF-8": (b'{"\xff": 3}', None, "utf-8"),
    "UTF-16": ("{}".encode("utf-16"), None, "utf-8"),
    "deep": (b'{"a": ' * 100_000, None, "recursion"),
    "deep metadata": (b'{"__metadata__": ' + b"[" * 100_000, None, "recursion"),
    "endless number": (b'{"a": ' + b"9" * 5000 + b"}", None, "limit"),
    "named twice": (b'{"a": 1, "b": 2, "a": 3}', None, "names 'a' twice"),
    "keyed twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', None, "names 'dtype' twice"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_headers_are_refused(tmp_path: Path, damage: str) -> None:
    header, length, words = DAMAGED[damage]
    with pytest.raises(TfmError, match=rf"model\.safetensors is truncated or no safetensors file \(.*{words}"):
        SafetensorsReader(write_raw(tmp_path, header, length=length))


def test_a_header_above_the_bound_is_not_read(tmp_path: Path) -> None:
    directory = write_raw(tmp_path, b"{}", length=MAX_HEADER + 1)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(2 * MAX_HEADER)
    with pytest.raises(TfmError, match=f"header has {MAX_HEADER + 1} bytes, more than {MAX_HEADER}"):
        SafetensorsReader(directory)
