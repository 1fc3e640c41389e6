"""config.json of a converted checkpoint: up to three models that fit each other, and the pieces that hold them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfm_jax._checkpoint_layout import Shape, drafter_shapes, locate_piece, stored_dtype, target_shapes, weaver_shapes
from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

FORMAT = 1
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

Dtype = Literal["float32", "bfloat16"]

_OVERHEAD = 16 << 10  # bytes an array: header, index, directories


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The contents of config.json: up to three models that fit each other.

    Attributes:
        stop_token_ids: tokens that end a text, in ascending order.
        source: where each model came from (file or directory names), for people to read.
    """

    target: TargetConfig
    drafter: DrafterConfig | None = None
    weaver: WeaverConfig | None = None
    stop_token_ids: tuple[int, ...] = ()
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.drafter is not None:
            _check_drafter(self.drafter, self.target)
        if self.weaver is not None:
            _check_weaver(self.weaver, self.drafter, self.target)
        if outside := [token for token in self.stop_token_ids if not 0 <= token < self.target.vocab_size]:
            message = f"stop_token_ids {outside} lie outside the vocabulary of {self.target.vocab_size} tokens."
            raise TfmError(message)

    def to_dict(self) -> dict[str, Any]:
        """JSON values of config.json."""
        return {"format": FORMAT} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CheckpointConfig:
        """Inverse of `to_dict`.

        Raises:
            TfmError: another format, or a field is missing or unknown.
        """
        if values.get("format") != FORMAT:
            message = f"format is {values.get('format')!r} but this version reads format {FORMAT}; convert again."
            raise TfmError(message)
        try:
            drafter, weaver = values["drafter"], values["weaver"]
            return cls(
                target=TargetConfig.from_dict(values["target"]),
                drafter=None if drafter is None else DrafterConfig.from_dict(drafter),
                weaver=None if weaver is None else WeaverConfig.from_dict(weaver),
                stop_token_ids=tuple(values["stop_token_ids"]),
                source=values["source"],
            )
        except KeyError as error:
            message = f"the key {error} is missing; convert again."
            raise TfmError(message) from error
        except (TypeError, AttributeError) as error:
            message = f"a value has the wrong type ({error}); convert again."
            raise TfmError(message) from error


def read_config(path: str | Path) -> CheckpointConfig:
    """Read config.json of an OUT.

    Raises:
        TfmError: nothing there, not a converted checkpoint, or another format.
    """
    file = Path(path) / CONFIG_FILE
    if not Path(path).is_dir():
        message = f"{path} is not a directory; give one that tfm-convert wrote."
        raise TfmError(message)
    if not file.is_file():
        message = f"{path} is not a converted checkpoint: it has no {CONFIG_FILE}; write one with tfm-convert."
        raise TfmError(message)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{file} cannot be read ({error}); convert again."
        raise TfmError(message) from error
    if not isinstance(values, dict) or "format" not in values:
        message = f"{path} is not a converted checkpoint: {CONFIG_FILE} names no format; convert it with tfm-convert."
        raise TfmError(message)
    try:
        return CheckpointConfig.from_dict(values)
    except TfmError as error:
        message = f"{file}: {error}"
        raise TfmError(message) from error


def expected_pieces(config: CheckpointConfig) -> dict[str, dict[str, Shape]]:
    """Name of every piece, and the dotted path and shape of every array in it, in the order of the forward pass."""
    models = {"target": target_shapes(config.target)}
    if config.drafter is not None:
        models["drafter"] = drafter_shapes(config.drafter)
    if config.weaver is not None:
        models["weaver"] = weaver_shapes(config.weaver)
    pieces: dict[str, dict[str, Shape]] = {}
    for model, shapes in models.items():
        for path, shape in shapes.items():
            name, rest = locate_piece(model, path)
            pieces.setdefault(name, {})[rest] = shape
    return pieces


def stored_bytes(shapes: Mapping[str, Shape], dtype: Dtype) -> int:
    """Bytes that a piece takes on disk, with what every file needs besides its values."""
    sizes = (math.prod(shape) * stored_dtype(path, np.dtype(dtype), dtype).itemsize for path, shape in shapes.items())
    return sum(sizes) + len(shapes) * _OVERHEAD


def _check_drafter(drafter: DrafterConfig, target: TargetConfig) -> None:
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(drafter, name), getattr(target, name)
        if theirs != ours:
            message = f"the drafter does not fit the target: its {name} is {theirs}, the target's is {ours}."
            raise TfmError(message)
    layers = len(target.layer_types)
    if outside := [layer for layer in drafter.target_layers if not 0 <= layer < layers]:
        message = f"the drafter does not fit the target: it reads the layers {outside} of a target of {layers} layers."
        raise TfmError(message)
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        message = f"the drafter's mask token {drafter.mask_token_id} is outside the vocabulary of {target.vocab_size}."
        raise TfmError(message)


def _check_weaver(weaver: WeaverConfig, drafter: DrafterConfig | None, target: TargetConfig) -> None:
    if drafter is None:
        message = "a Weaver needs the drafter that it was trained with; give one."
        raise TfmError(message)
    for name in ("hidden_size", "embed_size"):
        theirs = getattr(weaver, name)
        if theirs != target.hidden_size:
            message = f"the Weaver does not fit the target: its {name} is {theirs}, not {target.hidden_size}."
            raise TfmError(message)
