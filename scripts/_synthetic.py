"""Write a synthetic checkpoint with the names, shapes and types of a published one, to measure converters with.

    python scripts/_synthetic.py qwen3.5-4b 4b                         8.4 GB of text weights, and the rest
    python scripts/_synthetic.py qwen3.6-27b 27b --layers 8            all kinds of tensors, fewer layers
    python scripts/_synthetic.py qwen3.6-27b headers --headers-only    full size, as holes in the files

Values are random (between 2⁻⁷ and 2⁻³ in magnitude) and depend on the seed and the tensor's place alone. Tensors of the
vision tower and of multi-token prediction are there too. Memory stays below 100 MB.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import tyro

Shape = tuple[int, ...]
Preset = Literal["tiny", "qwen3.5-4b", "qwen3.6-27b", "tiny-dflash", "qwen3.5-4b-dflash", "qwen3.6-27b-dflash"]

_CHUNK = 8 << 20  # elements
_BYTES = {"BF16": 2, "F32": 4}


class _Target(NamedTuple):
    """A hybrid of Qwen3.5's layout; `float32` says whether A_log and the gated norm are stored so, as 3.5 does."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    key_heads: int
    value_heads: int
    delta: int  # width of a key and of a value head
    vocab: int
    tied: bool
    float32: bool
    vision: tuple[int, int, int, int]  # depth, width, inner width, positions
    patch: int = 16


class _Drafter(NamedTuple):
    """A DFlash drafter; `sliding` counts its leading layers with a window."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    mask: int
    target_layers: int
    taps: tuple[int, ...]
    sliding: int


_TARGETS = {
    "tiny": _Target(64, 96, 4, 4, 2, 32, 2, 6, 16, 512, tied=False, float32=True, vision=(1, 16, 32, 16), patch=4),
    "qwen3.5-4b": _Target(
        2560, 9216, 32, 16, 4, 256, 16, 32, 128, 248_320, tied=True, float32=True, vision=(24, 1024, 4096, 2304)
    ),
    "qwen3.6-27b": _Target(
        5120, 17_408, 64, 24, 4, 256, 16, 48, 128, 248_320, tied=False, float32=False, vision=(27, 1152, 4304, 2304)
    ),
}
_DRAFTERS = {
    "tiny-dflash": _Drafter(64, 96, 2, 4, 2, 32, 512, 511, 4, (1, 2), 1),
    "qwen3.5-4b-dflash": _Drafter(2560, 9728, 5, 32, 8, 128, 248_320, 248_070, 32, (1, 8, 15, 22, 29), 0),
    "qwen3.6-27b-dflash": _Drafter(5120, 17_408, 5, 32, 8, 128, 248_320, 248_070, 64, (1, 16, 31, 46, 61), 4),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write."""

    preset: tyro.conf.Positional[Preset]
    """Published checkpoint whose names and shapes to take."""
    out: tyro.conf.Positional[Path]
    """Directory to create."""
    layers: int | None = None
    """Number of layers, a multiple of 4 for a target; None for all."""
    headers_only: bool = False
    """Leave the values out: files of full size that take no space."""
    shard_gigabytes: float = 4.0
    """Largest size of a file, in 10⁹ bytes."""
    seed: int = 0
    """Seed of the values."""


def write_synthetic(options: Options) -> int:
    """Write config.json, the shards and their index; returns the bytes of all tensors."""
    options.out.mkdir(parents=True)
    if options.preset in _TARGETS:
        target = _TARGETS[options.preset]
        target = target._replace(layers=options.layers or target.layers)
        config, tensors = _target_config(target), dict(_target_tensors(target))
    else:
        drafter = _DRAFTERS[options.preset]
        drafter = drafter._replace(layers=options.layers or drafter.layers)
        config, tensors = _drafter_config(drafter), dict(_drafter_tensors(drafter))
    shards = _split(tensors, int(options.shard_gigabytes * 1e9))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(_size(*tensor) for tensor in tensors.values())
    _write_json(options.out / "config.json", config)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weights = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        _write_json(
            options.out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weights}
        )
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        seeds = None if options.headers_only else (options.seed, number)
        _write_shard(options.out / name, shard, seeds)
    return total


def _target_config(target: _Target) -> dict[str, Any]:
    depth, width, inner, positions = target.vision
    text: dict[str, Any] = {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": target.vocab - 2,
        "full_attention_interval": 4, "head_dim": target.head, "hidden_act": "silu", "hidden_size": target.hidden,
        "intermediate_size": target.inner, "linear_conv_kernel_dim": 4, "linear_key_head_dim": target.delta,
        "linear_num_key_heads": target.key_heads, "linear_num_value_heads": target.value_heads,
        "linear_value_head_dim": target.delta, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144,
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "num_attention_heads": target.heads,
        "num_hidden_layers": target.layers, "num_key_value_heads": target.kv_heads, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000, "rope_type": "default",
        },
        "tie_word_embeddings": target.tied, "vocab_size": target.vocab,
    }  # fmt: skip
    text["layer_types"] = [
        "full_attention" if _is_full(layer) else "linear_attention" for layer in range(target.layers)
    ]
    vision = {
        "depth": depth, "hidden_size": width, "intermediate_size": inner, "num_position_embeddings": positions,
        "model_type": "qwen3_5", "out_hidden_size": target.hidden, "patch_size": target.patch,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "tie_word_embeddings": target.tied, "vision_config": vision,
    }  # fmt: skip


def _is_full(layer: int) -> bool:
    """The last layer of every four."""
    return (layer + 1) % 4 == 0


def _target_tensors(target: _Target) -> Iterator[tuple[str, tuple[str, Shape]]]:
    prefix = "model.language_model."
    yield f"{prefix}embed_tokens.weight", ("BF16", (target.vocab, target.hidden))
    for layer in range(target.layers):
        mixer = _attention(target) if _is_full(layer) else _delta(target)
        for name, tensor in (_block(target.hidden, target.inner) | mixer).items():
            yield f"{prefix}layers.{layer}.{name}", tensor
    yield f"{prefix}norm.weight", ("BF16", (target.hidden,))
    if not target.tied:
        yield "lm_head.weight", ("BF16", (target.vocab, target.hidden))
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{name}.weight", ("BF16", (target.hidden,))
    yield "mtp.fc.weight", ("BF16", (target.hidden, 2 * target.hidden))
    for name, tensor in (_block(target.hidden, target.inner) | _attention(target)).items():
        yield f"mtp.layers.0.{name}", tensor
    for name, shape in _vision(target):
        yield f"model.visual.{name}", ("BF16", shape)


def _block(hidden: int, inner: int) -> dict[str, tuple[str, Shape]]:
    shapes = {f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    return {f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()}


def _attention(sizes: _Target | _Drafter) -> dict[str, tuple[str, Shape]]:
    query, key, hidden = sizes.heads * sizes.head, sizes.kv_heads * sizes.head, sizes.hidden
    gated = 2 if isinstance(sizes, _Target) else 1
    shapes = {"q_proj": (gated * query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
    shapes |= {"o_proj": (hidden, query), "q_norm": (sizes.head,), "k_norm": (sizes.head,)}
    return {f"self_attn.{name}.weight": ("BF16", shape) for name, shape in shapes.items()}


def _delta(target: _Target) -> dict[str, tuple[str, Shape]]:
    value = target.value_heads * target.delta
    channels, exact = 2 * target.key_heads * target.delta + value, "F32" if target.float32 else "BF16"
    tensors: dict[str, tuple[str, Shape]] = {
        "in_proj_qkv.weight": ("BF16", (channels, target.hidden)),
        "in_proj_z.weight": ("BF16", (value, target.hidden)),
        "in_proj_a.weight": ("BF16", (target.value_heads, target.hidden)),
        "in_proj_b.weight": ("BF16", (target.value_heads, target.hidden)),
        "conv1d.weight": ("BF16", (channels, 1, 4)),
        "A_log": (exact, (target.value_heads,)),
        "dt_bias": ("BF16", (target.value_heads,)),
        "norm.weight": (exact, (target.delta,)),
        "out_proj.weight": ("BF16", (target.hidden, value)),
    }
    return {f"linear_attn.{name}": tensor for name, tensor in tensors.items()}


def _vision(target: _Target) -> Iterator[tuple[str, Shape]]:
    depth, width, inner, positions = target.vision
    merged = 4 * width
    linear = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    linear |= {"mlp.linear_fc1": (inner, width), "mlp.linear_fc2": (width, inner)}
    for block in range(depth):
        for name, shape in (linear | {"norm1": (width,), "norm2": (width,)}).items():
            yield f"blocks.{block}.{name}.weight", shape
            yield f"blocks.{block}.{name}.bias", shape[:1]
    yield "pos_embed.weight", (positions, width)
    rest = {"patch_embed.proj": (width, 3, 2, target.patch, target.patch), "merger.norm": (width,)}
    rest |= {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (target.hidden, merged)}
    for name, shape in rest.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


def _drafter_config(drafter: _Drafter) -> dict[str, Any]:
    full = drafter.layers - min(drafter.sliding, drafter.layers)
    return {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "dtype": "bfloat16",
        "dflash_config": {"block_size": 16, "mask_token_id": drafter.mask, "target_layer_ids": list(drafter.taps)},
        "head_dim": drafter.head, "hidden_act": "silu", "hidden_size": drafter.hidden,
        "intermediate_size": drafter.inner, "max_position_embeddings": 262_144, "model_type": "qwen3",
        "layer_types": ["sliding_attention"] * (drafter.layers - full) + ["full_attention"] * full,
        "num_attention_heads": drafter.heads, "num_hidden_layers": drafter.layers,
        "num_key_value_heads": drafter.kv_heads, "num_target_layers": drafter.target_layers, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000, "sliding_window": 2048, "use_sliding_window": drafter.sliding > 0,
        "vocab_size": drafter.vocab,
    }  # fmt: skip


def _drafter_tensors(drafter: _Drafter) -> Iterator[tuple[str, tuple[str, Shape]]]:
    yield "fc.weight", ("BF16", (drafter.hidden, len(drafter.taps) * drafter.hidden))
    for name in ("hidden_norm", "norm"):
        yield f"{name}.weight", ("BF16", (drafter.hidden,))
    for layer in range(drafter.layers):
        for name, tensor in (_block(drafter.hidden, drafter.inner) | _attention(drafter)).items():
            yield f"layers.{layer}.{name}", tensor


def _size(dtype: str, shape: Shape) -> int:
    return int(np.prod(shape)) * _BYTES[dtype]


def _split(tensors: dict[str, tuple[str, Shape]], limit: int) -> list[dict[str, tuple[str, Shape]]]:
    shards, filled = [{}], 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _size(*tensor) > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _size(*tensor)
    return shards


def _write_shard(file: Path, tensors: dict[str, tuple[str, Shape]], seeds: tuple[int, int] | None) -> None:
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = position + _size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        if seeds is None:
            target.truncate(8 + len(text) + position)
            return
        for number, (dtype, shape) in enumerate(tensors.values()):
            rng = np.random.Generator(np.random.SFC64((*seeds, number)))
            _write_values(target, rng, dtype, int(np.prod(shape)))


def _write_values(target: BinaryIO, rng: np.random.Generator, dtype: str, count: int) -> None:
    """Random signs, mantissas and two bits of the exponent."""
    for start in range(0, count, _CHUNK):
        bits = rng.integers(0, 1 << 16, min(_CHUNK, count - start), np.uint16)
        bits &= np.uint16(0x81FF)
        bits |= np.uint16(0x3C00)
        target.write((bits if dtype == "BF16" else bits.astype(np.uint32) << 16).data)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    arguments = tyro.cli(Options)
    print(f"{arguments.out}: {write_synthetic(arguments):,} bytes of tensors")
