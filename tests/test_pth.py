"""The reader of torch archives: right values, and for anything hostile or damaged one error and no execution."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sources import GOLDENS, HYBRID, LOOP

from convert.pipeline import convert_checkpoint
from convert.pth_io import PthReader
from tfm_jax.errors import TfmError

pytestmark = pytest.mark.slow

WEAVER = GOLDENS / "tfm" / "weaver_w1.pth"
MARKER = "weaver_pickle_was_executed.marker"

BAD = {
    "missing_key": r"missing_key\.pth lacks the tensor blocks\.0\.norm_mlp\.bias of shape \(48,\)",
    "extra_key": r"extra_key\.pth: unknown tensor blocks\.0\.extra_gate\.weight of shape \(3,\)",
    "wrong_shape": r"wrong_shape\.pth: token_in\.weight has shape \(64, 47\) .* \(48, 64\)",
    "truncated": r"truncated\.pth is no intact torch zip archive",
    "other_kind": r"other_kind\.pth: speculator_kind is 'something_else'",
    "malicious": r"malicious\.pth is refused: its pickle asks for io\.open",
    "malicious_legacy": r"malicious_legacy\.pth is in torch's legacy format, a bare pickle",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_and_not_executed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = GOLDENS / "tfm" / "bad" / f"{name}.pth"
    with pytest.raises(TfmError, match=BAD[name]):
        convert_checkpoint(HYBRID, Path("out"), drafter=LOOP / "drafter", weaver=file)
    assert list(tmp_path.iterdir()) == []


def test_the_malicious_files_do_execute_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the marker's absence above means something."""
    monkeypatch.chdir(tmp_path)
    with (GOLDENS / "tfm" / "bad" / "malicious_legacy.pth").open("rb") as file:
        pickle.load(file)  # noqa: S301  (an empty file is all it makes)
    assert (tmp_path / MARKER).exists()


# Archives made here


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def pair(*values: int) -> bytes:
    return b"(" + b"".join(number(value) for value in values) + b"t"


def tensor(key: str, storage: str, elements: int, offset: int, shape: tuple, strides: tuple) -> bytes:
    """Pickle of one tensor as torch writes it."""
    identifier = (
        b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + number(elements) + b"t"
    )
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    layout = number(offset) + pair(*shape) + pair(*strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + identifier + b"Q" + layout + hooks + b"tR"


def pickled(**tensors: bytes) -> bytes:
    """Pickle of {"state_dict": {name: tensor}}."""
    state = b"".join(text(name) + value for name, value in tensors.items())
    return b"\x80\x02}(" + text("state_dict") + b"}(" + state + b"uu."


def archive(file: Path, data: bytes, storages: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(file, "w", method) as target:
        target.writestr("w/data.pkl", data)
        for key, content in storages.items():
            target.writestr(f"w/data/{key}", content)
    return file


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [("FloatStorage", np.float32), ("HalfStorage", np.float16), ("BFloat16Storage", ml_dtypes.bfloat16)],
)
def test_storage_types_offsets_and_strides(storage: str, dtype: type, tmp_path: Path) -> None:
    values = np.arange(24).astype(dtype)
    data = pickled(
        whole=tensor("0", storage, 24, 0, (4, 6), (6, 1)), turned=tensor("0", storage, 24, 2, (3, 2), (1, 6))
    )
    reader = PthReader(archive(tmp_path / "x.pth", data, {"0": values.tobytes()}))
    np.testing.assert_array_equal(reader.read("whole"), values.reshape(4, 6))
    np.testing.assert_array_equal(reader.read("turned"), values.reshape(4, 6)[:2, 2:5].T)
    assert reader.tensors["turned"].dtype == np.dtype(dtype).name


def test_a_state_dict_with_attributes_is_read(tmp_path: Path) -> None:
    """`Module.state_dict()` is an OrderedDict that carries `_metadata`."""
    with zipfile.ZipFile(WEAVER) as source:
        entries = {name.partition("/")[2]: source.read(name) for name in source.namelist()}
    plain = entries["data.pkl"]
    start, end = plain.index(b"state_dictq\x0b") + 12, plain.rindex(b"uX\x08\x00\x00\x00metadata") + 1
    assert plain[start : start + 1] == b"}"
    state = b"ccollections\nOrderedDict\n)R" + plain[start + 1 : end] + b"}" + text("_metadata") + b"}sb"
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as target:
        for name, content in entries.items():
            target.writestr(f"x/{name}", plain[:start] + state + plain[end:] if name == "data.pkl" else content)
    ordered, usual = PthReader(tmp_path / "x.pth"), PthReader(WEAVER)
    assert ordered.values == usual.values
    for name in usual.tensors:
        np.testing.assert_array_equal(ordered.read(name), usual.read(name))


def floats(elements: int, offset: int, shape: tuple, strides: tuple) -> bytes:
    return pickled(t=tensor("0", "FloatStorage", elements, offset, shape, strides))


FOUR = floats(4, 0, (4,), (1,))
PREFIX = b"\x80\x02"
HOSTILE = {
    "beyond the storage": (floats(4, 1, (4,), (1,)), "reaches beyond its storage"),
    "strides beyond the storage": (floats(4, 0, (2, 2), (1, 3)), "reaches beyond its storage"),
    "broadcast strides": (floats(4, 0, (1 << 30, 1 << 30), (0, 0)), "reaches beyond its storage"),
    "negative offset": (floats(4, -1, (1,), (1,)), "shape is malformed"),
    "negative shape": (floats(4, 0, (-1, -4), (1, 1)), "shape is malformed"),
    "strides of another rank": (floats(4, 0, (4,), (1, 1)), "is damaged"),
    "storage of another size": (floats(5, 0, (4,), (1,)), "entry has 16 bytes"),
    "storage not there": (pickled(t=tensor("1", "FloatStorage", 4, 0, (4,), (1,))), "is damaged"),
    "storage of doubles": (pickled(t=tensor("0", "DoubleStorage", 4, 0, (4,), (1,))), r"asks for torch\.DoubleStorage"),
    "storage outside": (pickled(t=tensor("../data.pkl", "FloatStorage", 4, 0, (4,), (1,))), "is damaged"),
    "no tensor": (pickled(t=number(3)), "has a int where a Tensor belongs"),
    "no state_dict": (PREFIX + b"}.", "no dict with a state_dict"),
    "no dict": (PREFIX + b"K\x01.", "no dict with a state_dict"),
    "call of a system function": (
        PREFIX + b"cposix\nsystem\n" + text("touch x") + b"\x85R.",
        r"asks for posix\.system",
    ),
    "call of a storage": (PREFIX + b"ctorch\nFloatStorage\n)R.", "calls something that makes no tensor"),
    "call with arguments": (PREFIX + b"ccollections\nOrderedDict\n]\x85R.", "calls something that makes no tensor"),
    "new object": (PREFIX + b"ccollections\nOrderedDict\n)\x81.", "uses the opcode NEWOBJ"),
    "import by stack": (PREFIX + text("os") + text("system") + b"\x93.", "uses the opcode STACK_GLOBAL"),
    "old import": (b"(S'x'\nios\nsystem\n.", "uses the opcode STRING"),
    "extension": (PREFIX + b"\x82\x01.", "uses the opcode EXT1"),
    "memo of 2**32": (PREFIX + b"}r\xff\xff\xff\xff.", "no dict with a state_dict"),
    "bytes of 2**60": (PREFIX + b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.", "is damaged"),
    "text of 4 GB": (PREFIX + b"X\xff\xff\xff\xffx.", "is damaged"),
    "keys nested deeply": (PREFIX + b"})" + b"\x85" * 100_000 + b"K\x01s.", "keys that are neither strings"),
    "values nested deeply": (
        PREFIX + b"}" + text("state_dict") + b")" + b"\x85" * 100_000 + b"s.",
        "no dict with a state_dict",
    ),
    "marks that miss": (PREFIX + b"u.", "is damaged"),
    "empty stack": (PREFIX + b".", "is damaged"),
    "no end": (PREFIX + b"}", "is damaged"),
    "empty": (b"", "is damaged"),
    "too large": (FOUR + b" " * (4 << 20), r"data\.pkl has \d+ bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str, tmp_path: Path) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(TfmError, match=words):
        PthReader(archive(tmp_path / "x.pth", data, {"0": bytes(16)}))


def test_damaged_weights_are_noticed_on_reading(tmp_path: Path) -> None:
    file = archive(tmp_path / "x.pth", FOUR, {"0": b"abcd" * 4})
    file.write_bytes(file.read_bytes().replace(b"abcd" * 4, b"abcX" * 4))
    reader = PthReader(file)
    with pytest.raises(TfmError, match=r"no intact torch zip archive \(Bad CRC-32"):
        reader.read("t")


def test_archives_that_torch_never_writes_are_refused(tmp_path: Path) -> None:
    bomb = archive(tmp_path / "x.pth", FOUR, {"0": bytes(16), "bomb": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(TfmError, match="it is compressed"):
        PthReader(bomb)
    with zipfile.ZipFile(tmp_path / "two.pth", "w") as target:
        target.writestr("a/data.pkl", FOUR)
        target.writestr("b/data.pkl", FOUR)
    with pytest.raises(TfmError, match=r"holds 2 data\.pkl"):
        PthReader(tmp_path / "two.pth")
    with zipfile.ZipFile(tmp_path / "big.pth", "w") as target:
        target.writestr("a/data.pkl", FOUR)
        target.writestr("a/byteorder", "big")
    with pytest.raises(TfmError, match="big-endian"):
        PthReader(tmp_path / "big.pth")
    locked = archive(tmp_path / "locked.pth", FOUR, {"0": bytes(16)})
    content = bytearray(locked.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1  # the flag of an encrypted entry
    locked.write_bytes(content)
    with pytest.raises(TfmError, match="it is encrypted"):
        PthReader(locked)
    with pytest.raises(TfmError, match="is a directory"):
        PthReader(tmp_path)


def test_an_entry_larger_than_what_it_holds_is_refused(tmp_path: Path) -> None:
    """Zipfile would make room for the size that is claimed before it reads."""
    file = archive(tmp_path / "x.pth", FOUR, {"0": bytes(16)})
    content = bytearray(file.read_bytes())
    content[(place := content.rindex(b"PK\x01\x02") + 20) : place + 4] = struct.pack("<L", 1 << 30)
    file.write_bytes(content)
    with pytest.raises(TfmError, match="an entry has another size packed than unpacked"):
        PthReader(file)


@pytest.mark.parametrize("zip64", [False, True])
def test_an_endless_list_of_entries_is_not_read(tmp_path: Path, zip64: bool) -> None:  # noqa: FBT001  (parametrised)
    """A list of 100,000 entries, whose length stands in the end record or in that of a large archive."""
    file = archive(tmp_path / "x.pth", FOUR, {"0": bytes(16)})
    content = file.read_bytes()
    first, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    entries = content[first:end] * 50_000
    size, count = len(entries), 0 if zip64 else 1000
    large = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 100_000, 100_000, size, first)
    large += struct.pack("<4sLQL", b"PK\6\7", 0, first + size, 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, 0 if zip64 else size, first, 0)
    file.write_bytes(content[:first] + entries + (large if zip64 else b"") + last)
    with pytest.raises(TfmError, match=rf"its list of entries has {size} bytes, more than"):
        PthReader(file)


def test_an_archive_with_the_records_of_large_ones_is_read(tmp_path: Path) -> None:
    file = archive(tmp_path / "x.pth", FOUR, {"0": np.arange(4, dtype=np.float32).tobytes()})
    content = file.read_bytes()
    first, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    large = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, end - first, first)
    large += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    file.write_bytes(content[:end] + large + content[end:])
    np.testing.assert_array_equal(PthReader(file).read("t"), [0, 1, 2, 3])
