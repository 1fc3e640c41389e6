"""Converted checkpoints on disk, format 1: written once by `tfm-convert` or a training script, read by the engine.

    OUT/config.json             {"format": 1, "target": …, "drafter": …|null, "weaver": …|null, "stop_token_ids": …}
    OUT/tokenizer.json          only where the source has one
    OUT/target/{embed_tokens, layers.0, layers.1, …, norm, lm_head}     lm_head only where untied
    OUT/drafter/{fc, hidden_norm, layers.0, …, norm}                    only with a drafter
    OUT/weaver                                                          only with a Weaver

Each leaf directory, a *piece*, is one Orbax checkpoint of a nested dict (zarr3, neither OCDBT nor compression), small
enough to be converted and loaded one at a time; the array files depend on their values alone. An array is addressed by
its model and a dotted path, such as `layers.0.mixer.qkv.kernel`; kernels are stored [in, out].

An OUT is complete or absent: it is built in the sibling directory `OUT.partial`, where every piece appears by one
rename and config.json after all of them, and `OUT.partial` itself is renamed last. So a later writer can resume after
the pieces that it finds; this one starts over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import signal
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tfm_jax._checkpoint_layout import (
    Shape,
    Tree,
    drafter_shapes,
    flatten,
    locate_piece,
    nest,
    target_shapes,
    weaver_shapes,
)
from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

FORMAT = 1
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

Dtype = Literal["float32", "bfloat16"]

# The recurrence of a Gated DeltaNet layer is float32 whatever the compute dtype.
_FLOAT32_ALWAYS = ("mixer.A_log", "mixer.dt_bias", "mixer.norm.scale")


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


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded OUT: configurations and parameter trees (nested dicts as NNX pure dicts, layer numbers as int keys)."""

    config: CheckpointConfig
    target: Tree
    drafter: Tree | None
    weaver: Tree | None
    tokenizer_path: Path | None


def load_checkpoint(path: str | Path, dtype: str | None = None) -> Checkpoint:
    """Read an OUT onto the default device.

    Args:
        path: directory written by `CheckpointWriter`.
        dtype: dtype of every array but the recurrence's (`A_log`, `dt_bias` and the gated norm are always float32);
            None keeps what is stored.

    Raises:
        TfmError: nothing there, not a converted checkpoint, another format, or a piece is missing or damaged.
    """
    path = Path(path)
    config = read_config(path)
    models: dict[str, dict[str, jax.Array]] = {}
    with _orbax() as orbax:
        for name, shapes in expected_pieces(config).items():
            model, _, prefix = name.partition("/")
            for rest, array in _restore_piece(orbax, path.absolute() / name, shapes, dtype).items():
                models.setdefault(model, {})[f"{prefix}.{rest}" if prefix else rest] = array
    trees = {model: nest(arrays) for model, arrays in models.items()}
    tokenizer = path / TOKENIZER_FILE
    return Checkpoint(
        config=config,
        target=trees["target"],
        drafter=trees.get("drafter"),
        weaver=trees.get("weaver"),
        tokenizer_path=tokenizer if tokenizer.is_file() else None,
    )


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


def save_checkpoint(
    out: str | Path,
    config: CheckpointConfig,
    trees: Mapping[str, Tree],
    *,
    dtype: Dtype | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write an OUT from parameters in memory.

    Args:
        out: directory to create; empty or absent.
        config: configurations of the models in `trees`.
        trees: parameter trees under "target", "drafter" and "weaver".
        dtype: dtype to store, the recurrence's arrays excepted; None keeps each array's own.
        tokenizer: tokenizer.json to copy.

    Raises:
        TfmError: `out` is not empty, an array is missing, superfluous or misshapen, or the disk refuses.
    """
    pieces: dict[str, dict[str, Any]] = {}
    for model, tree in trees.items():
        for path, array in flatten(tree).items():
            name, rest = locate_piece(model, path)
            pieces.setdefault(name, {})[rest] = array
    with CheckpointWriter(out, config, dtype=dtype) as writer:
        for name, arrays in pieces.items():
            writer.write_piece(name, arrays)
        if tokenizer is not None:
            writer.copy_tokenizer(Path(tokenizer))
        writer.finish()


class CheckpointWriter:
    """Writes an OUT piece by piece; leaving the `with` block without `finish` removes what was written.

    Args:
        out: directory to create; empty or absent.
        config: what the checkpoint will hold; `expected_pieces(config)` lists the pieces to write.
        dtype: dtype to store, the recurrence's arrays excepted; None keeps each array's own.

    Raises:
        TfmError: `out` or its sibling `OUT.partial` is in the way.
    """

    def __init__(self, out: str | Path, config: CheckpointConfig, *, dtype: Dtype | None = None) -> None:
        self._out = Path(out).resolve()
        self._partial = self._out.with_name(self._out.name + ".partial")
        self._config = config
        self._dtype = dtype
        self._missing = expected_pieces(config)
        self._finished = False
        if self._out.exists() and (not self._out.is_dir() or self._out.is_mount() or any(self._out.iterdir())):
            message = f"{out} exists and is not an empty directory that can be replaced; choose another."
            raise TfmError(message)
        _remove_partial(self._partial)

    def __enter__(self) -> CheckpointWriter:  # noqa: PYI034  (beartype cannot check Self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            shutil.rmtree(self._partial, ignore_errors=True)

    def write_piece(self, name: str, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Write one piece of `expected_pieces`.

        Args:
            name: such as `target/layers.0`.
            arrays: by dotted path, such as `mixer.qkv.kernel`.

        Raises:
            TfmError: an array is missing, superfluous or misshapen, or the disk refuses.
        """
        shapes = self._missing.pop(name, {})
        _check_shapes(name, {path: array.shape for path, array in arrays.items()}, shapes)
        stored = {path: self._cast(path, np.asarray(array)) for path, array in arrays.items()}
        with _disk_errors(self._out), _late_interrupt(), _orbax() as orbax:
            self._partial.mkdir(parents=True, exist_ok=True)
            orbax.save(self._partial / name, _with_text_keys(nest(stored)))
            # Names the directory of this run: of no use to a reader, and different in every run.
            (self._partial / name / "commit_success.txt").unlink(missing_ok=True)

    def copy_tokenizer(self, source: Path) -> None:
        """Copy a tokenizer.json into OUT."""
        with _disk_errors(self._out):
            shutil.copyfile(source, self._partial / TOKENIZER_FILE)

    def finish(self) -> None:
        """Write config.json and give OUT its name.

        Raises:
            TfmError: a piece has not been written, or the disk refuses.
        """
        if self._missing:
            message = f"{self._out} is incomplete: the pieces {sorted(self._missing)} were not written."
            raise TfmError(message)
        text = json.dumps(self._config.to_dict(), indent=2, ensure_ascii=False) + "\n"
        with _disk_errors(self._out):
            draft = self._partial / (CONFIG_FILE + ".tmp")
            draft.write_text(text, encoding="utf-8")
            draft.replace(self._partial / CONFIG_FILE)
            self._partial.replace(self._out)
        self._finished = True

    def _cast(self, path: str, array: np.ndarray) -> np.ndarray:
        return array.astype(_dtype_of(path, array.dtype, self._dtype), copy=False)


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


def _with_text_keys(tree: Tree) -> Tree:
    return {str(key): _with_text_keys(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _dtype_of(path: str, stored: np.dtype, wanted: str | None) -> np.dtype:
    """Dtype of an array of a piece: float32 for the recurrence's, else the wanted one, else the stored one."""
    if path in _FLOAT32_ALWAYS:
        return np.dtype(np.float32)
    return stored if wanted is None else jnp.dtype(wanted)


def _check_shapes(where: str, found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            message = f"{where} lacks the array {path} of shape {expected[path]}; convert again."
            raise TfmError(message)
        if path not in expected:
            message = f"{where} holds an unknown array {path} of shape {tuple(found[path])}; convert again."
            raise TfmError(message)
        if tuple(found[path]) != expected[path]:
            message = f"{where}: {path} has shape {tuple(found[path])} but its configuration says {expected[path]}."
            raise TfmError(message)


def _restore_piece(
    orbax: ocp.Checkpointer, path: Path, shapes: Mapping[str, Shape], dtype: str | None
) -> dict[str, jax.Array]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        stored = _read_headers(path)
        _check_shapes(str(path), {name: array.shape for name, array in stored.items()}, shapes)
        arguments = {
            name: ocp.ArrayRestoreArgs(sharding=sharding, dtype=_dtype_of(name, array.dtype, dtype))
            for name, array in stored.items()
        }
        return flatten(orbax.restore(path, restore_args=_with_text_keys(nest(arguments))))
    except TfmError:
        raise
    except Exception as error:  # Orbax and TensorStore report damage by many types, bare Exception among them
        message = f"{path} is damaged or not readable ({type(error).__name__}: {_first_line(error)}); convert again."
        raise TfmError(message) from error


def _read_headers(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of the arrays of a piece; their files are checked here, before Orbax sends threads to them."""
    headers = {}
    for directory in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        values = json.loads((directory / "zarr.json").read_text(encoding="utf-8"))
        header = jax.ShapeDtypeStruct(tuple(values["shape"]), jnp.dtype(values["data_type"]))
        least = math.prod(header.shape) * header.dtype.itemsize
        size = sum(file.stat().st_size for file in (directory / "c").rglob("*") if file.is_file())
        if size < least:
            message = f"{path} is damaged: {directory.name} holds {size} bytes of {least}; convert again."
            raise TfmError(message)
        headers[directory.name] = header
    return headers


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _remove_partial(path: Path) -> None:
    """Remove what a killed run left, but nothing that is not ours."""
    ours = {"target", "drafter", "weaver", TOKENIZER_FILE, CONFIG_FILE, CONFIG_FILE + ".tmp"}
    if not path.exists():
        return
    if not path.is_dir() or {entry.name.split(".orbax-checkpoint-tmp")[0] for entry in path.iterdir()} - ours:
        message = f"{path} is in the way and was not left by an earlier run; remove it."
        raise TfmError(message)
    with _disk_errors(path):
        shutil.rmtree(path)


@contextlib.contextmanager
def _orbax() -> Generator[ocp.Checkpointer, None, None]:
    """Checkpointer of the format; keeps quiet on success."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _late_interrupt() -> Generator[None, None, None]:
    """Let Ctrl-C wait for the end of a piece: Orbax's threads, once cut off, would go on writing behind our back."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives it
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _disk_errors(out: Path) -> Generator[None, None, None]:
    """Turn what a full or read-only disk raises into the one error type."""
    try:
        yield
    except TfmError:
        raise
    except (OSError, ValueError) as error:
        message = f"{out} cannot be written ({_first_line(error)}); nothing was left behind."
        raise TfmError(message) from error


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
