"""Writes the drafter or the Weaver of an OUT in the layout that other software reads: the way back of `rules`.

A drafter becomes a directory that SGLang and vLLM serve: config.json as z-lab spells it, and one safetensors file. A
Weaver becomes a .pth file for `torch.load(weights_only=True)` and the reference's strict loader, with q, k and v apart
in the first generation and fused in the second. Numbers keep the type that OUT stores. One parameter is in memory at a
time.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from convert.pth_writer import PthTensor, write_pth
from convert.rules import Rule, Table, tabulate_drafter, tabulate_weaver
from convert.transforms import join, keep
from tfm_jax.checkpoint import ArrayFile, open_models, read_config
from tfm_jax.config import DrafterConfig, WeaverConfig
from tfm_jax.errors import TfmError

_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class _Tensor(NamedTuple):
    """A tensor of another layout: columns of a stored parameter, transposed, or the parameter itself."""

    parameter: ArrayFile
    shape: tuple[int, ...]
    columns: slice | None

    def make(self) -> np.ndarray:
        values = self.parameter.read_rows(0, self.parameter.shape[0])
        return values if self.columns is None else np.concatenate(list(join([values[:, self.columns]])))


def export_checkpoint(out: Path, destination: Path, model: Literal["drafter", "weaver"]) -> list[Path]:
    """Write one model of an OUT for other software.

    Args:
        out: directory that `tfm-convert` wrote.
        destination: directory to create for a drafter (empty or absent), file to create for a Weaver.
        model: which.

    Returns:
        The files.

    Raises:
        TfmError: OUT is not a converted checkpoint, lacks the model or is damaged, or `destination` cannot be written.
    """
    config = read_config(out)
    if getattr(config, model) is None:
        message = f"{out} holds no {model}; it has what it was converted from."
        raise TfmError(message)
    if destination.exists() and (model == "weaver" or not destination.is_dir() or any(destination.iterdir())):
        message = f"{destination} exists; choose another."
        raise TfmError(message)
    arrays = open_models(out, config)[model]
    with _disk_errors(destination):
        if config.drafter is not None and model == "drafter":
            return _export_drafter(config.drafter, len(config.target.layer_types), arrays, destination)
        if config.weaver is not None:
            return [_export_weaver(config.weaver, arrays, destination)]
    return []


def spell_drafter(config: DrafterConfig, target_layers: int, dtype: str) -> dict[str, Any]:
    """config.json of a DFlash drafter as z-lab spells it; `parse_drafter` reads it back.

    Args:
        config: the drafter.
        target_layers: number of layers of its target.
        dtype: of its tensors.

    Raises:
        TfmError: the spelling has no words for a mixture of windows or causalities.
    """
    windows = sorted(set(config.layer_windows) - {0})
    sliding = [window > 0 for window in config.layer_windows]
    as_usual = list(config.layer_causal) == sliding
    if len(windows) > 1 or not (as_usual or len(set(config.layer_causal)) == 1):
        message = f"windows {config.layer_windows} with causal {config.layer_causal} cannot be said in a config.json."
        raise TfmError(message)
    yarn = {
        "rope_type": "yarn",
        "factor": config.yarn_factor,
        "original_max_position_embeddings": config.yarn_original_positions,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
        "attention_factor": config.yarn_attention_factor,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": yarn if config.yarn_factor else None,
        "max_position_embeddings": config.max_positions,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_target_layers": target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layers),
        },
    } | ({} if as_usual else {"is_causal": config.layer_causal[0]})


def _export_drafter(
    config: DrafterConfig, target_layers: int, arrays: Mapping[str, ArrayFile], destination: Path
) -> list[Path]:
    spelled = spell_drafter(config, target_layers, arrays["fc.kernel"].dtype.name)
    destination.mkdir(parents=True, exist_ok=True)
    weights, file = destination / "model.safetensors", destination / "config.json"
    _write_safetensors(weights, dict(_tensors(tabulate_drafter(config), arrays)))
    file.write_text(json.dumps(spelled, indent=2) + "\n", encoding="utf-8")
    return [file, weights]


def _export_weaver(config: WeaverConfig, arrays: Mapping[str, ArrayFile], destination: Path) -> Path:
    first = config.generation == "w1"
    values: dict[str, str | int | float] = {
        "d_model": config.hidden_size,
        "d_embed": config.embed_size,
        "d_rank": config.rank,
        "num_layers": config.layers,
        "num_heads": config.heads,
        "mlp_dim": config.mlp_size,
        "K": config.max_depth,
        "candidate_pool_size": config.pool_size,
    }
    values |= {} if first else {"activation": "swiglu", "rope_base": config.rope_base}
    tensors = {
        name: PthTensor(tensor.parameter.dtype, tensor.shape, tensor.make)
        for name, tensor in _tensors(tabulate_weaver(config), arrays, last=first)
    }
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_pth(destination, {"config": values, "metadata": {"speculator_kind": "dflash_tfm_weaver"}}, tensors)
    return destination


def _tensors(table: Table, arrays: Mapping[str, ArrayFile], *, last: bool = False) -> Iterator[tuple[str, _Tensor]]:
    """Tensors by name; of several rules of a parameter the first or the last applies."""
    rules: dict[str, Rule] = {}
    for rule in table.rules:
        rules[rule.path] = rule if last else rules.get(rule.path, rule)
    for path, rule in rules.items():
        start = 0
        for name, shape in rule.shapes(table.sizes).items():
            columns = None if rule.transform is keep else slice(start, start + shape[0])
            yield name, _Tensor(arrays[path], shape, columns)
            start += shape[0]


def _write_safetensors(file: Path, tensors: Mapping[str, _Tensor]) -> None:
    """One file; transformers wants to know that the layout is torch's."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + math.prod(tensor.shape) * tensor.parameter.dtype.itemsize
        kind = _SAFETENSORS[tensor.parameter.dtype.name]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor.make()).reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _disk_errors(destination: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        message = f"{destination} cannot be written ({error.strerror or error}); remove what is there and repeat."
        raise TfmError(message) from error
