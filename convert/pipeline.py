"""The conversion itself: check every configuration and header, then stream parameter by parameter into OUT."""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert.hf_config import parse_drafter, parse_target, parse_weaver, read_json, stop_tokens, tie_flag
from convert.hub import name_source
from convert.pth_io import PthReader
from convert.rules import Model, map_drafter, map_target, map_weaver
from convert.safetensors_io import SafetensorsReader
from convert.streaming import CountingReader, read_ahead
from tfm_jax.checkpoint import (
    TOKENIZER_FILE,
    CheckpointConfig,
    CheckpointWriter,
    Dtype,
    Shape,
    check_free,
    expected_pieces,
    finished_pieces,
    stored_bytes,
)
from tfm_jax.errors import TfmError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


class Plan(NamedTuple):
    """What a conversion would do.

    Attributes:
        config: what config.json will say.
        models: the checked models by name.
        parameters: numbers to store.
        size: their bytes on disk.
        free: bytes free where OUT is to lie.
        skipped: tensors left out, by prefix.
        finished: pieces that an earlier run of the same conversion has written, out of `pieces`.
        pieces: all of them.
        origin: identifies sources and options.
    """

    config: CheckpointConfig
    models: Mapping[str, Model]
    parameters: int
    size: int
    free: int
    skipped: Mapping[str, int]
    finished: int
    pieces: int
    origin: str


class Report(NamedTuple):
    """What a conversion did.

    Attributes:
        parameters: numbers stored.
        skipped: tensors left out, by prefix.
        non_finite: NaN and infinite values, which are stored as they are, by tensor.
        resumed: pieces that an earlier run had written.
    """

    parameters: int
    skipped: Mapping[str, int]
    non_finite: Mapping[str, int]
    resumed: int


def convert_checkpoint(
    target: Path,
    out: Path,
    *,
    drafter: Path | None = None,
    weaver: Path | None = None,
    dtype: Dtype = "bfloat16",
    strict: bool = False,
    revisions: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Convert a target and what goes with it into one checkpoint that `tfm_jax` loads.

    A run that was killed, interrupted or ran out of disk is continued by the next one of the same sources and options;
    one of others starts anew. The array files and config.json are the same as of an undisturbed run.

    Args:
        target: Hugging Face directory of a Qwen3.5 or Qwen3 model.
        out: directory to create; empty or absent.
        drafter: Hugging Face directory of a DFlash drafter.
        weaver: .pth file of a Weaver.
        dtype: dtype to store; the recurrence's A_log, dt_bias and norm stay float32.
        strict: fail on NaN and infinite values.
        revisions: of the models that come from a hub, by model; recorded in config.json.
        progress: called after every block with the parameters written and their total.

    Raises:
        TfmError: a source is missing, damaged, not understood or does not fit the others, the disk is too small, or
            `out` cannot be written. `out` is then as it was.
    """
    plan = check_conversion(target, out, drafter=drafter, weaver=weaver, dtype=dtype, revisions=revisions)
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        progress(written, plan.parameters)

    with CheckpointWriter(out, plan.config, dtype=dtype, origin=plan.origin) as writer:
        resumed, missing = len(writer.finished), writer.missing
        _check_finite(writer.finished, strict=strict)
        advance(plan.parameters - sum(map(_count, missing.values())))
        for name, shapes in missing.items():
            model, _, prefix = name.partition("/")
            reader = CountingReader(plan.models[model].reader)
            blocks = _make_blocks(plan.models[model]._replace(reader=reader), prefix, shapes)
            writer.write_blocks(name, _report_each(read_ahead(blocks), advance), reader.non_finite)
            _check_finite({name: reader.non_finite}, strict=strict)
        if (target / TOKENIZER_FILE).is_file():
            writer.copy_tokenizer(target / TOKENIZER_FILE)
        writer.finish()
        notes = sum(map(collections.Counter, writer.finished.values()), collections.Counter())
    return Report(plan.parameters, plan.skipped, notes, resumed)


def check_conversion(
    target: Path,
    out: Path,
    *,
    drafter: Path | None = None,
    weaver: Path | None = None,
    dtype: Dtype = "bfloat16",
    revisions: Mapping[str, str] | None = None,
) -> Plan:
    """Check everything that `convert_checkpoint` checks, from headers alone; writes nothing.

    Only where a tied checkpoint holds an lm_head all the same, its values are compared with the embedding's.

    Raises:
        TfmError: as `convert_checkpoint`.
    """
    check_free(out)
    for source in filter(None, (target, drafter)):
        if out.resolve().is_relative_to(source.resolve()):
            message = f"{out} lies inside {source}, which is being converted; choose another OUT."
            raise TfmError(message)
    config, models = read_sources(target, drafter, weaver, revisions)
    pieces = expected_pieces(config)
    origin = _identify(config, models, dtype)
    finished = finished_pieces(out, config, origin)
    sizes = {name: stored_bytes(shapes, dtype) for name, shapes in pieces.items()}
    place = next(folder for folder in out.resolve().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    needed = sum(size for name, size in sizes.items() if name not in finished)
    if needed > free:
        message = (
            f"{out} needs {needed / 1e9:.1f} GB more but {free / 1e9:.1f} GB are free there; choose another place."
        )
        raise TfmError(message)
    skipped = sum((collections.Counter(model.skipped) for model in models.values()), collections.Counter())
    return Plan(
        config=config,
        models=models,
        parameters=sum(map(_count, pieces.values())),
        size=sum(sizes.values()),
        free=free,
        skipped=skipped,
        finished=len(finished),
        pieces=len(pieces),
        origin=origin,
    )


def read_sources(
    target: Path,
    drafter: Path | None = None,
    weaver: Path | None = None,
    revisions: Mapping[str, str] | None = None,
) -> tuple[CheckpointConfig, dict[str, Model]]:
    """What OUT's config.json will say, and the checked models by name; reads configurations and headers only.

    Raises:
        TfmError: as `convert_checkpoint`.
    """
    values, place = _read_config(target)
    reader = SafetensorsReader(target)
    target_config = parse_target(values, place, has_head=_has_own_head(reader, values, place))
    models = {"target": map_target(reader, target_config, str(target))}
    source = {"target": name_source(target)}
    drafter_config = weaver_config = None
    if drafter is not None:
        drafter_config = parse_drafter(*_read_config(drafter), target_layers=len(target_config.layer_types))
        models["drafter"] = map_drafter(SafetensorsReader(drafter), drafter_config, str(drafter))
        source["drafter"] = name_source(drafter)
    if weaver is not None:
        saved = PthReader(weaver)
        weaver_config = parse_weaver(saved.values, saved.tensors.keys(), str(weaver))
        models["weaver"] = map_weaver(saved, weaver_config, str(weaver))
        source["weaver"] = name_source(weaver)
    generation = read_json(target / _GENERATION) if (target / _GENERATION).is_file() else {}
    stops = stop_tokens(str(target), generation, values)
    source |= {f"{model}_revision": revision for model, revision in (revisions or {}).items()}
    return CheckpointConfig(target_config, drafter_config, weaver_config, stops, source), models


def _read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """config.json of a Hugging Face directory, and its name for messages."""
    if not directory.is_dir():
        message = f"{directory} is not a directory; give a Hugging Face checkpoint."
        raise TfmError(message)
    return read_json(directory / _CONFIG), str(directory / _CONFIG)


def _has_own_head(reader: SafetensorsReader, values: Mapping[str, Any], place: str) -> bool:
    """Whether there is an lm_head; some tied checkpoints store a copy of the embedding under its name."""
    head = reader.tensors.get(_HEAD)
    if head is None or not tie_flag(values, place):
        return head is not None
    embedding = next((name for name in _EMBEDDINGS if name in reader.tensors), _HEAD)
    copy = embedding != _HEAD and reader.tensors[embedding][:2] == head[:2]
    return not (copy and np.array_equal(reader.read(_HEAD), reader.read(embedding)))


def _identify(config: CheckpointConfig, models: Mapping[str, Model], dtype: Dtype) -> str:
    """Digest of what decides the bytes of OUT: version, options, configurations, headers, file sizes and times."""
    tensors = {name: sorted(model.reader.tensors.items()) for name, model in models.items()}
    files = {info.file for entries in tensors.values() for _, info in entries}
    states = [(file, status.st_size, status.st_mtime_ns) for file in sorted(files) for status in [Path(file).stat()]]
    version = importlib.metadata.version("tfm-jax")
    identity = json.dumps([version, dtype, config.to_dict(), tensors, states])
    return hashlib.sha256(identity.encode()).hexdigest()


def _make_blocks(model: Model, prefix: str, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
    for path in shapes:
        for block in model.make_blocks(f"{prefix}.{path}" if prefix else path):
            yield path, block


def _report_each(
    blocks: Iterator[tuple[str, np.ndarray]], advance: Callable[[int], None]
) -> Iterator[tuple[str, np.ndarray]]:
    for path, block in blocks:
        yield path, block
        advance(block.size)


def _check_finite(pieces: Mapping[str, Mapping[str, int]], *, strict: bool) -> None:
    """Fail on the first piece whose note counts NaN or infinite values."""
    for note in pieces.values() if strict else ():
        for name, count in note.items():
            message = f"{name} holds {count} NaN or infinite values; convert a sound checkpoint, or without strict."
            raise TfmError(message)


def _count(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
