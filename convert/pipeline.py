"""The conversion itself: check every configuration and header, then stream parameter by parameter into OUT."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert.hf_config import parse_drafter, parse_target, parse_weaver, read_json, stop_tokens, tie_flag
from convert.pth_io import PthReader
from convert.rules import Model, map_drafter, map_target, map_weaver
from convert.safetensors_io import SafetensorsReader
from tfm_jax.checkpoint import TOKENIZER_FILE, CheckpointConfig, CheckpointWriter, Dtype, Shape, expected_pieces
from tfm_jax.errors import TfmError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


class Report(NamedTuple):
    """What a conversion did: parameters written, and tensors left out by prefix."""

    parameters: int
    skipped: Mapping[str, int]


def convert_checkpoint(
    target: Path,
    out: Path,
    *,
    drafter: Path | None = None,
    weaver: Path | None = None,
    dtype: Dtype = "bfloat16",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Convert a target and what goes with it into one checkpoint that `tfm_jax` loads.

    Args:
        target: Hugging Face directory of a Qwen3.5 or Qwen3 model.
        out: directory to create; empty or absent.
        drafter: Hugging Face directory of a DFlash drafter.
        weaver: .pth file of a Weaver.
        dtype: dtype to store; the recurrence's A_log, dt_bias and norm stay float32.
        progress: called after every piece with the parameters written and their total.

    Raises:
        TfmError: a source is missing, damaged, not understood or does not fit the others, or `out` cannot be written.
            `out` is then as it was.
    """
    config, models = read_sources(target, drafter, weaver)
    pieces = expected_pieces(config)
    total = sum(_count(shapes) for shapes in pieces.values())
    done = 0
    with CheckpointWriter(out, config, dtype=dtype) as writer:
        for name, shapes in pieces.items():
            model, _, prefix = name.partition("/")
            paths = {path: f"{prefix}.{path}" if prefix else path for path in shapes}
            writer.write_piece(name, {path: models[model].make_parameter(full) for path, full in paths.items()})
            done += _count(shapes)
            progress(done, total)
        if (target / TOKENIZER_FILE).is_file():
            writer.copy_tokenizer(target / TOKENIZER_FILE)
        writer.finish()
    skipped = sum((collections.Counter(model.skipped) for model in models.values()), collections.Counter())
    return Report(total, skipped)


def read_sources(
    target: Path, drafter: Path | None = None, weaver: Path | None = None
) -> tuple[CheckpointConfig, dict[str, Model]]:
    """What OUT's config.json will say, and the checked models by name; reads configurations and headers only.

    Raises:
        TfmError: as `convert_checkpoint`.
    """
    values, place = _read_config(target)
    reader = SafetensorsReader(target)
    target_config = parse_target(values, place, has_head=_has_own_head(reader, values, place))
    models = {"target": map_target(reader, target_config, str(target))}
    source = {"target": target.resolve().name}
    drafter_config = weaver_config = None
    if drafter is not None:
        drafter_config = parse_drafter(*_read_config(drafter), target_layers=len(target_config.layer_types))
        models["drafter"] = map_drafter(SafetensorsReader(drafter), drafter_config, str(drafter))
        source["drafter"] = drafter.resolve().name
    if weaver is not None:
        saved = PthReader(weaver)
        weaver_config = parse_weaver(saved.values, saved.tensors.keys(), str(weaver))
        models["weaver"] = map_weaver(saved, weaver_config, str(weaver))
        source["weaver"] = weaver.name
    generation = read_json(target / _GENERATION) if (target / _GENERATION).is_file() else {}
    stops = stop_tokens(str(target), generation, values)
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


def _count(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
