"""Reads the arrays of a converted checkpoint straight to where they are to be.

An array that goes to its devices whole and in the stored dtype is mapped: the pages of the file are what a GPU copies
from, and what a CPU device keeps, so the host never holds a second copy. Any other array is read in bands by a few
threads into a buffer for every shard, one array ahead of the one that is being placed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from tfm_jax._checkpoint_config import CheckpointConfig, expected_pieces
from tfm_jax._checkpoint_files import ArrayFile, bands, read_piece
from tfm_jax._checkpoint_layout import Shape, Tree, check_shapes, locate_piece, nest, stored_dtype
from tfm_jax.errors import TfmError

Sharding = jax.sharding.Sharding | Callable[[str, Shape], jax.sharding.Sharding]

_BAND = 8 << 20  # bytes of one read
_THREADS = 4
_ALIGNMENT = 64  # bytes; a CPU device copies what is less aligned
_FLYING = 2  # arrays on their way to a device that may still hold their host memory

Region = tuple[tuple[int, int], ...]  # first and last + 1 along every axis


class _Array(NamedTuple):
    """One array to read; `path` begins with the model."""

    path: str
    source: ArrayFile
    dtype: np.dtype
    sharding: jax.sharding.Sharding


class _Reading(NamedTuple):
    """Buffers by region; they are filled once every `wait` has returned."""

    array: _Array
    buffers: dict[Region, np.ndarray]
    waits: list[Callable[[], object]]


def read_models(path: Path, config: CheckpointConfig, dtype: str | None, sharding: Sharding | None) -> dict[str, Tree]:
    """Parameter trees by model.

    Args:
        path: an OUT.
        config: its config.json.
        dtype: dtype of every array but the recurrence's; None keeps what is stored.
        sharding: of every array, or a function from `target/layers.0.mixer.qkv.kernel` and a shape to its sharding; by
            default everything lies on the first device.

    Raises:
        TfmError: a piece is missing or damaged.
    """
    chosen = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays: list[_Array] = []
    for model, sources in open_models(path, config).items():
        for rest, source in sources.items():
            place = chosen(f"{model}/{rest}", source.shape) if callable(chosen) else chosen
            own = stored_dtype(locate_piece(model, rest)[1], source.dtype, dtype)
            arrays.append(_Array(f"{model}/{rest}", source, own, place))
    models: dict[str, dict[str, jax.Array]] = {}
    flying: collections.deque[jax.Array] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for reading in _ahead(map(functools.partial(_start, pool), arrays)):
            array = _place(reading)
            model, _, rest = reading.array.path.partition("/")
            models.setdefault(model, {})[rest] = array
            flying.append(array)
            if len(flying) > _FLYING:
                flying.popleft().block_until_ready()
    return {model: nest(arrays) for model, arrays in models.items()}


def open_models(path: Path, config: CheckpointConfig) -> dict[str, dict[str, ArrayFile]]:
    """Every array on disk by model and dotted path.

    Raises:
        TfmError: a piece is missing or damaged.
    """
    models: dict[str, dict[str, ArrayFile]] = {}
    for name, shapes in expected_pieces(config).items():
        model, _, prefix = name.partition("/")
        for rest, source in _open_piece(path / name, shapes).items():
            models.setdefault(model, {})[f"{prefix}.{rest}" if prefix else rest] = source
    return models


def _open_piece(piece: Path, shapes: Mapping[str, Shape]) -> dict[str, ArrayFile]:
    try:
        found = read_piece(piece)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{piece} is damaged or not readable ({type(error).__name__}: {error}); convert again."
        raise TfmError(message) from error
    check_shapes(str(piece), {name: array.shape for name, array in found.items()}, shapes)
    return found


def _ahead(readings: Iterator[_Reading]) -> Iterator[_Reading]:
    """The same, one ahead: the next array is being read while this one is placed."""
    current = next(readings)
    for following in readings:
        yield current
        current = following
    yield current


def _start(pool: concurrent.futures.ThreadPoolExecutor, array: _Array) -> _Reading:
    shape = array.source.shape
    places = array.sharding.addressable_devices_indices_map(shape)
    regions = {_region(index, shape) for index in places.values()}
    whole = tuple((0, extent) for extent in shape)
    if regions == {whole} and array.dtype == array.source.dtype:
        mapped = array.source.map_values()
        return _Reading(array, {whole: mapped.values}, [mapped.wait])
    buffers = {region: _aligned([stop - start for start, stop in region], array.dtype) for region in regions}
    jobs = [pool.submit(_fill, array.source, buffers, *band) for band in bands(array.source, _BAND)]
    return _Reading(array, buffers, [job.result for job in jobs])


def _place(reading: _Reading) -> jax.Array:
    array = reading.array
    try:
        for wait in reading.waits:
            wait()
    except OSError as error:
        message = f"{array.source.file} cannot be read ({error.strerror or error}); convert again."
        raise TfmError(message) from error
    places = array.sharding.addressable_devices_indices_map(array.source.shape)
    parts = [
        jax.device_put(reading.buffers[_region(index, array.source.shape)], device) for device, index in places.items()
    ]
    return jax.make_array_from_single_device_arrays(array.source.shape, array.sharding, parts)


def _region(index: tuple[slice, ...] | None, shape: Shape) -> Region:
    slices = index or (slice(None),) * len(shape)
    return tuple(part.indices(extent)[:2] for part, extent in zip(slices, shape, strict=True))


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill(source: ArrayFile, buffers: Mapping[Region, np.ndarray], start: int, stop: int) -> None:
    """Read entries `start` to `stop` of the first axis into every buffer that holds a part of them."""
    rows = source.read_rows(start, stop)
    for ((first, last), *others), buffer in buffers.items():
        low, high = max(start, first), min(stop, last)
        if low < high:
            inside = tuple(slice(*extent) for extent in others)
            _assign(buffer[low - first : high - first], rows[(slice(low - start, high - start), *inside)])


def _assign(buffer: np.ndarray, values: np.ndarray) -> None:
    if (
        values.dtype.name == "bfloat16" and buffer.dtype == np.float32
    ):  # the upper half of a float32; NumPy takes longer
        bits = buffer.view(np.uint32)
        bits[...] = values.view(np.uint16)
        bits <<= 16
    else:
        buffer[...] = values
