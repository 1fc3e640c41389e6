"""What a checkpoint is, from its configuration and headers alone: a source of a conversion, or its result."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from convert.config_keys import Keys, Watched
from convert.hf_config import parse_drafter, parse_target, parse_weaver, read_json, tie_flag
from convert.pth_io import PthReader
from convert.rules import Model, map_drafter, map_target, map_weaver
from convert.safetensors_io import SafetensorsReader
from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError, require

Name = Literal["target", "drafter", "weaver"]
Dtype = Literal["bfloat16", "float32"]
Config = TargetConfig | DrafterConfig | WeaverConfig

_CONFIG = "config.json"
_USUAL_CONTEXT = 32_768
_GIGABYTE = 10**9

# Keys that say nothing about the mathematics of text: who wrote the file, how the model was initialised or trained, its
# other parts, and ids that are read elsewhere; and what rope's objects hold, which are merged before they are read.
_KNOWN = {
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "speculators_version",
    "initializer_range", "use_cache", "attention_dropout", "max_window_layers", "mamba_ssm_dtype",
    "router_aux_loss_coef", "output_router_logits", "vision_config", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id",
    "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
}  # fmt: skip
_KNOWN_MIXTURE = {"intermediate_size"}  # of dense layers, which a mixture that is read here lacks
_KNOWN_DRAFTER = {"tie_word_embeddings", "sliding_window", "use_sliding_window"}  # no own head; read where one slides


class Skipped(NamedTuple):
    """Tensors that a conversion leaves out."""

    tensors: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """One model.

    Attributes:
        family: `qwen3_5` or `qwen3` of a target, `dflash`, or the generation of a Weaver.
        types: number of tensors by stored type, those to skip included.
        parameters: what a conversion keeps.
        bytes: size of the files.
        skipped: by prefix.
        unknown_keys: names in the configuration that nothing here reads or knows to be of no effect.
    """

    model: Name
    family: str
    config: Config
    types: Mapping[str, int]
    tensors: int
    parameters: int
    bytes: int
    skipped: Mapping[str, Skipped] = dataclasses.field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Estimated bytes on the device for one sequence of `context` tokens, activations not counted.

    Attributes:
        kv_cache: of the target's attention layers.
        recurrent_state: of its Gated DeltaNet layers, the last inputs of their convolutions included.
        weaver_tables: per token of the vocabulary; 0 where no Weaver or no target is known.
    """

    context: int
    dtype: Dtype
    weights: int
    kv_cache: int
    recurrent_state: int
    drafter_cache: int
    weaver_tables: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.kv_cache + self.recurrent_state + self.drafter_cache + self.weaver_tables


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What lies at a path; `source` is what a converted directory says about its origin."""

    path: str
    kind: Literal["target", "drafter", "weaver", "converted"]
    models: tuple[ModelFacts, ...]
    memory: Memory
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = dataclasses.asdict(self)
        for model in values["models"]:
            model["skipped"] = {prefix: skipped._asdict() for prefix, skipped in model["skipped"].items()}
        values["memory"]["total"] = self.memory.total
        return values


def inspect_checkpoint(path: Path, *, context: int | None = None, dtype: Dtype = "bfloat16") -> Inspection:
    """Read configuration and headers of a Hugging Face directory, a Weaver's .pth or a converted directory.

    Args:
        path: what to look at.
        context: tokens for the estimate of memory; None for 32,768, or fewer where the model has fewer positions.
        dtype: dtype of weights and caches for that estimate.

    Raises:
        TfmError: nothing there, damaged, or a kind of model that cannot be converted; the sentence says why.
    """
    source: Mapping[str, Any] = {}
    if path.is_file():
        require(
            path.suffix == ".pth", f"{path} is no .pth file; give the directory of a model, or a Weaver's .pth file."
        )
        kind, models = "weaver", (_inspect_weaver(path),)
    elif not path.is_dir():
        message = f"{path} does not exist; give a Hugging Face directory, a .pth file or a converted directory."
        raise TfmError(message)
    else:
        values = Watched(read_json(path / _CONFIG))
        if "format" in values:
            kind, (models, source) = "converted", _inspect_converted(path)
        elif _is_drafter(values):
            kind, models = "drafter", (_inspect_drafter(path, values, None),)
        else:
            kind, models = "target", (_inspect_target(path, values),)
    positions = [m.config.max_positions for m in models if isinstance(m.config, TargetConfig | DrafterConfig)]
    if context is None:
        context = min([_USUAL_CONTEXT, *positions])
    elif context < 1 or context > min([context, *positions]):
        message = f"context is {context}; choose 1 to {min(positions, default=context)} tokens."
        raise TfmError(message)
    return Inspection(
        str(path), kind, models, estimate_memory([(m.config, m.parameters) for m in models], context, dtype), source
    )


def find_unknown_keys(target: Path, drafter: Path | None, weaver: Path | None) -> dict[Path, tuple[str, ...]]:
    """Names in the configurations of a conversion's sources that nothing here reads, by source; those without left out.

    Raises:
        TfmError: as `inspect_checkpoint`.
    """
    facts = {target: _inspect_target(target, Watched(read_json(target / _CONFIG)))}
    config = facts[target].config
    if drafter is not None and isinstance(config, TargetConfig):
        values = Watched(read_json(drafter / _CONFIG))
        facts[drafter] = _inspect_drafter(drafter, values, len(config.layer_types))
    if weaver is not None:
        facts[weaver] = _inspect_weaver(weaver)
    return {path: found.unknown_keys for path, found in facts.items() if found.unknown_keys}


def estimate_memory(models: Sequence[tuple[Config, int]], context: int, dtype: Dtype) -> Memory:
    """Bytes for one sequence of `context` tokens, of up to three models that go together, each with its parameters.

    A layer of attention keeps a key and a value of every token, one of Gated DeltaNet a float32 matrix per value head
    and the convolution's last inputs, whatever the context. A_log, dt_bias and the gated norm are always float32.
    """
    item = np.dtype(dtype).itemsize
    weights = cache = recurrent = draft_cache = tables = 0
    vocabulary = next((config.vocab_size for config, _ in models if isinstance(config, TargetConfig)), 0)
    for config, parameters in models:
        weights += parameters * item
        if isinstance(config, TargetConfig):
            delta = config.layer_types.count("linear_attention")
            attention = len(config.layer_types) - delta
            weights += delta * (2 * config.value_heads + config.value_dim) * (4 - item)
            cache = attention * 2 * config.kv_heads * config.head_dim * item * context
            matrix = 4 * config.value_heads * config.key_dim * config.value_dim
            window = max(config.conv_width - 1, 0) * config.conv_channels * item
            recurrent = delta * (matrix + window)
        elif isinstance(config, DrafterConfig):
            draft_cache = config.layers * 2 * config.kv_heads * config.head_dim * item * context
        else:
            tables = 2 * vocabulary * config.rank * item
    return Memory(context, dtype, weights, cache, recurrent, draft_cache, tables)


def _is_drafter(values: Watched) -> bool:
    names = values.get("architectures", [])
    named = isinstance(names, list) and any("DFlash" in str(name) for name in names)
    return named or any(key in values for key in ("dflash_config", "mask_token_id", "speculators_model_type"))


def _inspect_target(path: Path, values: Watched) -> ModelFacts:
    place, reader = str(path / _CONFIG), SafetensorsReader(path)
    # A tied model may store a copy of the embedding as its head, which only the values could tell.
    own_head = "lm_head.weight" in reader.tensors and not tie_flag(values, place)
    config = parse_target(values, place, has_head=own_head)
    known = _KNOWN | _KNOWN_MIXTURE if config.experts else _KNOWN
    return _describe("target", config, map_target(reader, config, str(path)), values.unseen(known))


def _inspect_drafter(path: Path, values: Watched, target_layers: int | None) -> ModelFacts:
    place = str(path / _CONFIG)
    keys = Keys(place, Keys(place, values).nested("dflash_config"), values)
    if target_layers is None:
        if not any(keys.get(key) for key in ("num_target_layers", "target_layer_ids", "aux_hidden_state_layer_ids")):
            keys.refuse("target_layer_ids", "without num_target_layers it cannot be worked out")
        target_layers = keys.integer("num_target_layers", default=1)
    config = parse_drafter(values, place, target_layers=target_layers)
    model = map_drafter(SafetensorsReader(path), config, str(path))
    return _describe("drafter", config, model, values.unseen(_KNOWN | _KNOWN_DRAFTER))


def _inspect_weaver(path: Path) -> ModelFacts:
    reader = PthReader(path)
    values = Watched(reader.values)
    config = parse_weaver(values, reader.tensors.keys(), str(path))
    return _describe("weaver", config, map_weaver(reader, config, str(path)), values.unseen(_KNOWN))


def _describe(name: Name, config: Config, model: Model, unknown: list[str]) -> ModelFacts:
    tensors = model.reader.tensors
    sizes = {tensor: math.prod(info.shape) for tensor, info in tensors.items()}
    used = {tensor for rule in model.rules.values() for tensor in rule.tensors}
    skipped = {
        prefix: Skipped(count, sum(sizes[tensor] for tensor in sizes.keys() - used if tensor.startswith(f"{prefix}.")))
        for prefix, count in sorted(model.skipped.items())
    }
    return ModelFacts(
        model=name,
        family=_family(config),
        config=config,
        types=_count(info.dtype for info in tensors.values()),
        tensors=len(sizes),
        parameters=sum(sizes[tensor] for tensor in used),
        bytes=sum(Path(file).stat().st_size for file in {info.file for info in tensors.values()}),
        skipped=skipped,
        unknown_keys=tuple(unknown),
    )


def _inspect_converted(path: Path) -> tuple[tuple[ModelFacts, ...], Mapping[str, Any]]:
    from tfm_jax.checkpoint import open_models, read_config

    config = read_config(path)
    models: dict[Name, Config | None] = {"target": config.target, "drafter": config.drafter, "weaver": config.weaver}
    arrays = {name: list(found.values()) for name, found in open_models(path, config).items()}
    facts = [
        ModelFacts(
            model=name,
            family=_family(model),
            config=model,
            types=_count(array.dtype.name for array in arrays[name]),
            tensors=len(arrays[name]),
            parameters=sum(math.prod(array.shape) for array in arrays[name]),
            bytes=sum(array.file.stat().st_size for array in arrays[name]),
        )
        for name, model in models.items()
        if model is not None
    ]
    return tuple(facts), config.source


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))


def _family(config: Config) -> str:
    if isinstance(config, TargetConfig):
        return config.family
    return config.generation if isinstance(config, WeaverConfig) else "dflash"


def describe(inspection: Inspection) -> str:
    """The same for people to read."""
    lines = [
        f"{inspection.path}: {'converted checkpoint, format 1' if inspection.kind == 'converted' else inspection.kind}"
    ]
    for facts in inspection.models:
        types = ", ".join(f"{count} {name}" for name, count in facts.types.items())
        lines += [
            f"{facts.model} ({facts.family})",
            f"  {_sizes(facts.config)}",
            f"  {facts.parameters:,} parameters; {facts.tensors} tensors ({types}) in {_gigabytes(facts.bytes)}",
        ]
        lines += [
            f"  skipped: {count.tensors} tensors {prefix}.* of {count.parameters:,} parameters"
            for prefix, count in facts.skipped.items()
        ]
        if facts.unknown_keys:
            lines.append(f"  keys not understood: {', '.join(facts.unknown_keys)}")
    if inspection.source:
        lines.append("source: " + ", ".join(f"{name} {value}" for name, value in inspection.source.items()))
    memory = inspection.memory
    parts = {
        "weights": memory.weights,
        "keys and values": memory.kv_cache,
        "recurrent state": memory.recurrent_state,
        "drafter cache": memory.drafter_cache,
        "Weaver tables": memory.weaver_tables,
    }
    terms = " + ".join(f"{_gigabytes(size)} {name}" for name, size in parts.items() if size)
    lines.append(f"device memory for {memory.context:,} tokens in {memory.dtype}: {_gigabytes(memory.total)} = {terms}")
    return "\n".join(lines)


def _sizes(config: Config) -> str:
    if isinstance(config, WeaverConfig):
        return (
            f"{config.layers} layers of rank {config.rank}, {config.heads} heads, MLP {config.mlp_size}, "
            f"depth {config.max_depth}, pool {config.pool_size}, for hidden size {config.hidden_size}"
        )
    attention = f"{config.heads} heads of {config.head_dim} on {config.kv_heads}, vocabulary {config.vocab_size}"
    if isinstance(config, DrafterConfig):
        return (
            f"{config.layers} layers ({sum(map(bool, config.layer_windows))} with a window), "
            f"hidden {config.hidden_size}, MLP {config.intermediate_size}, {attention}, "
            f"block {config.block_size}, mask {config.mask_token_id}, taps {', '.join(map(str, config.target_layers))}"
        )
    linear = config.layer_types.count("linear_attention")
    experts = (
        f", {config.experts_per_token} of {config.experts} experts of {config.expert_size}" if config.experts else ""
    )
    return (
        f"{len(config.layer_types)} layers ({linear} recurrent), hidden {config.hidden_size}, "
        f"MLP {config.intermediate_size}{experts}, {attention}, {'tied' if config.tied_embeddings else 'own'} head"
    )


def _gigabytes(size: int) -> str:
    return f"{size / _GIGABYTE:,.2f} GB" if size >= _GIGABYTE / 100 else f"{size / _GIGABYTE * 1000:,.2f} MB"
