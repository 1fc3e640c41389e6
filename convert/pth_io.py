"""Reads torch's zip archives (.pth) without torch and without executing anything that they hold.

The pickle is not unpickled: `_interpret` walks its opcodes and knows only those that build plain values, an
OrderedDict and tensors. Anything else (the import of another name, a call of another thing, an opcode that torch does
not write) is an error before the next byte is looked at. Entries must lie uncompressed in the archive, so that no
declared size exceeds the file's.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from convert.tensors import TensorInfo, is_name
from tfm_jax.errors import TfmError

_STORAGES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
_ORDERED_DICT = "collections OrderedDict"
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"

_MAX_PICKLE = 4 << 20  # bytes; the pickle of a model holds names and shapes, the weights lie beside it
_MAX_DIRECTORY = 4 << 20  # bytes; about 80 an entry, which is a tensor
_END, _LOCATOR, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_ENCRYPTED = 1  # bit of a zip entry's flags
_BARE_PICKLE = b"\x80"  # the opcode PROTO; a zip archive begins with "PK"
_MAX_RANK = 8
_MARK = object()


class _Global(NamedTuple):
    """An allowed import, never resolved."""

    name: str


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    elements: int


class _Tensor(NamedTuple):
    """Strides and offset count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PthReader:
    """Tensors of the `state_dict` of a .pth file, and its plain values.

    Attributes:
        values: the other dicts that were saved, such as `config`, reduced to numbers, strings and booleans.

    Raises:
        TfmError: no such file, not a torch zip archive, damaged, or holding anything but tensors and plain values.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        if not file.is_file():
            fault = "is a directory" if file.is_dir() else "does not exist"
            message = f"{file} {fault}; give the Weaver's .pth file."
            raise TfmError(message)
        with file.open("rb") as start:
            if start.read(1) == _BARE_PICKLE:
                message = f"{file} is in torch's legacy format, a bare pickle; save it again with torch 1.6 or newer."
                raise TfmError(message)
        with _damage_as_error(file):
            _check_directory(file)
        with _damage_as_error(file), zipfile.ZipFile(file) as archive:
            self._prefix = _check_archive(archive, file.stat().st_size)
            saved = _interpret(archive.read(f"{self._prefix}data.pkl"))
            state = saved.get("state_dict") if isinstance(saved, dict) else None
            if not isinstance(state, dict):
                _refuse("it saves no dict with a state_dict")
            for name, tensor in state.items():
                _check_tensor(name, tensor, archive, self._prefix)
        self._tensors: dict[str, _Tensor] = state
        others = {key: value for key, value in saved.items() if isinstance(value, dict) and value is not state}
        self.values = {key: _plain(value) for key, value in others.items()}
        self.tensors = {
            name: TensorInfo(tensor.shape, tensor.storage.dtype.name, str(file)) for name, tensor in state.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Values of one tensor.

        Raises:
            TfmError: the file is damaged.
        """
        storage, offset, shape, strides = self._tensors[name]
        with _damage_as_error(self._file), zipfile.ZipFile(self._file) as archive:
            flat = np.frombuffer(archive.read(f"{self._prefix}data/{storage.key}"), storage.dtype)[offset:]
            steps = [step * storage.dtype.itemsize for step in strides]
            return np.lib.stride_tricks.as_strided(flat, shape, steps).copy()

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of the first axis; the whole storage is read, as only that can be checked."""
        return self.read(name)[start:stop]


def _check_directory(file: Path) -> None:
    """Bounds the list of entries at the end, which zipfile reads into objects many times its size."""
    with file.open("rb") as content:
        content.seek(max(content.seek(0, os.SEEK_END) - _END.size - _LOCATOR.size - _END_64.size, 0))
        tail = content.read()
    if tail[-_END.size :][:4] != b"PK\5\6":  # torch puts no comment behind it
        message = "it does not end as one"
        raise zipfile.BadZipFile(message)
    size = _END.unpack(tail[-_END.size :])[5]
    if tail[-_END.size - _LOCATOR.size :][:4] == b"PK\6\7" and tail[:4] == b"PK\6\6":
        size = _END_64.unpack(tail[: _END_64.size])[8]
    if size > _MAX_DIRECTORY:
        _refuse(f"its list of entries has {size} bytes, more than {_MAX_DIRECTORY}")


def _check_archive(archive: zipfile.ZipFile, size: int) -> str:
    """Prefix of the entries' names, once nothing in the archive can grow or repeat."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if any(entry.flag_bits & _ENCRYPTED for entry in entries):
        _refuse("it is encrypted")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        _refuse("it is compressed, which torch never does")
    if any(entry.compress_size != entry.file_size for entry in entries):  # zipfile would make room for the former
        _refuse("an entry has another size packed than unpacked, although it is not compressed")
    if sum(entry.file_size for entry in entries) > size or len(set(names)) < len(names):
        _refuse("its entries overlap")
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        _refuse(f"it holds {len(pickles)} data.pkl instead of one")
    if pickles[0].file_size > _MAX_PICKLE:
        _refuse(f"its data.pkl has {pickles[0].file_size} bytes, more than {_MAX_PICKLE}")
    prefix = pickles[0].filename.removesuffix("data.pkl")
    if f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder") != b"little":
        _refuse("its numbers are big-endian")
    return prefix


def _interpret(data: bytes) -> Any:  # noqa: ANN401, C901, PLR0912, PLR0915  (one case per opcode; reads best in one)
    """Value of a pickle of plain values and tensors."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(_MARK)
            case "NONE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(_pop_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(opcode.name[-1]) :] = [tuple(stack[-int(opcode.name[-1]) :])]
            case "APPEND":
                _expect(stack[-2], list).append(stack.pop())
            case "APPENDS":
                items = _pop_mark(stack)
                _expect(stack[-1], list).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                items = _pop_mark(stack)
                _set_items(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_import(str(argument)))
            case "BINPERSID":
                stack.append(_make_storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
            case "BUILD":  # attributes of an OrderedDict: versions of the modules, which do not matter
                stack.pop()
                _expect(stack[-1], dict)
            case name:
                _refuse(f"its pickle uses the opcode {name}")
    return _refuse("its pickle has no end")


def _pop_mark(stack: list[Any]) -> list[Any]:
    """Items above the topmost mark; removes both."""
    position = len(stack) - 1 - stack[::-1].index(_MARK)
    items = stack[position + 1 :]
    del stack[position:]
    return items


def _set_items(target: Any, items: list[Any]) -> None:  # noqa: ANN401  (any value of a pickle)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            _refuse("a dict in its pickle has keys that are neither strings nor integers")
        _expect(target, dict)[key] = value


def _import(name: str) -> _Global:
    if name not in (_ORDERED_DICT, _REBUILD_TENSOR) and name not in _STORAGES:
        _refuse(f"its pickle asks for {name.replace(' ', '.')}, which is neither a tensor nor a plain value")
    return _Global(name)


def _call(function: Any, arguments: Any) -> dict | _Tensor:  # noqa: ANN401  (any value of a pickle)
    if function == _Global(_ORDERED_DICT) and arguments == ():
        return {}
    if function != _Global(_REBUILD_TENSOR):
        _refuse("its pickle calls something that makes no tensor")
    storage, offset, shape, strides, *_ = _expect(arguments, tuple)
    shape, strides = _expect(shape, tuple), _expect(strides, tuple)
    storage = _expect(storage, _Storage)
    if len(shape) > _MAX_RANK or not all(_is_count(number) for number in (offset, *shape, *strides)):
        _refuse("a tensor's shape is malformed")
    # An upper bound on the elements keeps broadcast strides from growing on copy.
    last = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    if math.prod(shape) > storage.elements or (0 not in shape and offset + last >= storage.elements):
        _refuse(f"a tensor of shape {shape} reaches beyond its storage of {storage.elements} elements")
    return _Tensor(storage, offset, shape, strides)


def _make_storage(identifier: Any) -> _Storage:  # noqa: ANN401  (any value of a pickle)
    kind, storage, key, _, elements = _expect(identifier, tuple)
    dtype = _STORAGES.get(_expect(storage, _Global).name)
    if kind != "storage" or dtype is None or not isinstance(key, str) or not _is_count(elements):
        _refuse("a storage in its pickle is malformed")
    return _Storage(key, dtype, elements)


def _check_tensor(name: Any, tensor: Any, archive: zipfile.ZipFile, prefix: str) -> None:  # noqa: ANN401  (of a pickle)
    storage = _expect(tensor, _Tensor).storage
    size = archive.getinfo(f"{prefix}data/{storage.key}").file_size
    if not is_name(name):
        _refuse(f"it names a tensor {str(name)[:40]!r}")
    if size != storage.elements * storage.dtype.itemsize:
        _refuse(f"{name} should lie in {storage.elements} x {storage.dtype.name} but its entry has {size} bytes")


def _plain(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in values.items() if isinstance(value, str | int | float)}


def _is_count(value: Any) -> bool:  # noqa: ANN401  (any value of a pickle)
    return type(value) is int and 0 <= value < 1 << 63


def _expect[Kind](value: Any, kind: type[Kind]) -> Kind:  # noqa: ANN401  (any value of a pickle)
    if type(value) is not kind:
        _refuse(f"its pickle has a {type(value).__name__.strip('_')} where a {kind.__name__.strip('_')} belongs")
    return value


def _refuse(reason: str) -> NoReturn:
    raise TfmError(reason)


@contextlib.contextmanager
def _damage_as_error(file: Path) -> Generator[None, None, None]:
    try:
        yield
    except TfmError as error:
        message = f"{file} is refused: {_show(error)}."
        raise TfmError(message) from None
    except zipfile.BadZipFile as error:
        message = f"{file} is no intact torch zip archive ({_show(error)}); copy it again."
        raise TfmError(message) from error
    except Exception as error:  # zipfile and pickletools report damage by a dozen types
        message = f"{file} is damaged ({type(error).__name__}: {_show(error)}); copy it again."
        raise TfmError(message) from error


def _show(error: Exception) -> str:
    """One line: names from the file may hold anything."""
    return "".join(filter(str.isprintable, str(error)))[:200]
