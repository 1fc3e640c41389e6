"""Converted checkpoints on disk, format 1: written once by `tfm-convert` or a training script, read by the engine.

    OUT/config.json             {"format": 1, "target": …, "drafter": …|null, "weaver": …|null, "stop_token_ids": …}
    OUT/tokenizer.json          only where the source has one
    OUT/target/{embed_tokens, layers.0, layers.1, …, norm, lm_head}     lm_head only where untied
    OUT/drafter/{fc, hidden_norm, layers.0, …, norm}                    only with a drafter
    OUT/weaver                                                          only with a Weaver

Each leaf directory, a *piece*, is one Orbax checkpoint of a nested dict (zarr3, neither OCDBT nor compression), small
enough to be converted and loaded one at a time; the array files depend on their values alone. An array is addressed by
its model and a dotted path, such as `layers.0.mixer.qkv.kernel`; kernels are stored [in, out].

An OUT is complete or absent: it is built in the sibling directory `OUT.partial`, which is renamed last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm_jax._checkpoint_config import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    CheckpointConfig,
    Dtype,
    expected_pieces,
    read_config,
    stored_bytes,
)
from tfm_jax._checkpoint_files import ArrayFile
from tfm_jax._checkpoint_layout import Shape, Tree, flatten, locate_piece
from tfm_jax._checkpoint_reader import Sharding, open_models, read_models
from tfm_jax._checkpoint_writer import CheckpointWriter, check_free, finished_pieces

__all__ = [
    "CONFIG_FILE",
    "TOKENIZER_FILE",
    "ArrayFile",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointWriter",
    "Dtype",
    "Shape",
    "Sharding",
    "Tree",
    "check_free",
    "expected_pieces",
    "finished_pieces",
    "load_checkpoint",
    "open_models",
    "read_config",
    "save_checkpoint",
    "stored_bytes",
]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded OUT: configurations and parameter trees (nested dicts as NNX pure dicts, layer numbers as int keys)."""

    config: CheckpointConfig
    target: Tree
    drafter: Tree | None
    weaver: Tree | None
    tokenizer_path: Path | None


def load_checkpoint(path: str | Path, dtype: str | None = None, sharding: Sharding | None = None) -> Checkpoint:
    """Read an OUT, each array straight onto its devices.

    Args:
        path: directory written by `CheckpointWriter`.
        dtype: dtype of every array but the recurrence's (`A_log`, `dt_bias` and the gated norm are always float32);
            None keeps what is stored.
        sharding: of every array, or a function from `target/layers.0.mixer.qkv.kernel` and a shape to its sharding; by
            default everything lies on the first device.

    Raises:
        TfmError: nothing there, not a converted checkpoint, another format, or a piece is missing or damaged.
    """
    path = Path(path)
    config = read_config(path)
    trees = read_models(path, config, dtype, sharding)
    tokenizer = path / TOKENIZER_FILE
    return Checkpoint(
        config=config,
        target=trees["target"],
        drafter=trees.get("drafter"),
        weaver=trees.get("weaver"),
        tokenizer_path=tokenizer if tokenizer.is_file() else None,
    )


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
