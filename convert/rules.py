"""The mapping from the tensors of a checkpoint to our parameters, as tables.

A rule reads: this parameter is this transform of these tensors, which have these shapes. Tensors are torch's
([out, in]); kernels become [in, out]. The words of a shape are looked up in the sizes of the model's configuration.
Where two rules name one parameter (a fused and a separate spelling), the first whose tensors are present applies.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from convert.tensors import TensorInfo, TensorReader
from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

Sizes = Mapping[str, int]
Transform = Callable[[Iterator[np.ndarray], Sizes], np.ndarray]

_BAND = 256  # rows
_CONVERTIBLE = ("bfloat16", "float16", "float32")


class Rule(NamedTuple):
    """One parameter.

    Attributes:
        path: dotted path of the parameter.
        transform: from the tensors, in order and one at a time, to the parameter.
        tensors: name → shape in words.
    """

    path: str
    transform: Transform
    tensors: Mapping[str, str]


def keep(tensors: Iterator[np.ndarray], _: Sizes) -> np.ndarray:
    """The tensor as it is."""
    return next(tensors)


def transpose(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """[out, in] → [in, out]."""
    return fuse(tensors, sizes)


def fuse(tensors: Iterator[np.ndarray], _: Sizes) -> np.ndarray:
    """Several [out, in] → one [in, out | out | …], in the order of the rule."""
    parts = list(tensors)
    fused = np.empty((parts[0].shape[1], sum(map(len, parts))), np.result_type(*parts))
    start = 0
    for part in parts:
        for first in range(0, len(part), _BAND):  # in bands that stay in the cache: twice as fast as all at once
            band = part[first : first + _BAND].T
            fused[:, start + first : start + first + band.shape[1]] = band
        start += len(part)
    return fused


def fuse_gated(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """As `fuse`; the first tensor interleaves [query | gate] per head and is split into all queries, then all gates."""
    interleaved = next(tensors)
    heads = interleaved.reshape(-1, 2, sizes["head"], sizes["hidden"])
    split = (heads[:, part].reshape(-1, sizes["hidden"]) for part in range(2))
    return fuse(iter([*split, *tensors]), sizes)


def unroll_conv(tensors: Iterator[np.ndarray], _: Sizes) -> np.ndarray:
    """Depthwise [channels, 1, width] → [width, channels]; the last row still multiplies the current token."""
    return np.ascontiguousarray(next(tensors)[:, 0].T)


_BLOCK = (
    Rule("input_norm.scale", keep, {"input_layernorm.weight": "hidden"}),
    Rule("post_norm.scale", keep, {"post_attention_layernorm.weight": "hidden"}),
    Rule("mlp.gate_up.kernel", fuse, {"mlp.gate_proj.weight": "inner hidden", "mlp.up_proj.weight": "inner hidden"}),
    Rule("mlp.down.kernel", transpose, {"mlp.down_proj.weight": "hidden inner"}),
)
_KEY_VALUE = {"self_attn.k_proj.weight": "key hidden", "self_attn.v_proj.weight": "key hidden"}
_ATTENTION_REST = (
    Rule("mixer.q_norm.scale", keep, {"self_attn.q_norm.weight": "head"}),
    Rule("mixer.k_norm.scale", keep, {"self_attn.k_norm.weight": "head"}),
    Rule("mixer.out.kernel", transpose, {"self_attn.o_proj.weight": "hidden query"}),
)
_ATTENTION = (
    Rule("mixer.qkv.kernel", fuse, {"self_attn.q_proj.weight": "query hidden"} | _KEY_VALUE),
    *_ATTENTION_REST,
)
_GATED_ATTENTION = (
    Rule("mixer.qkv.kernel", fuse_gated, {"self_attn.q_proj.weight": "query_gate hidden"} | _KEY_VALUE),
    *_ATTENTION_REST,
)
_DELTA = (
    Rule(
        "mixer.in_proj.kernel",
        fuse,
        {
            "linear_attn.in_proj_qkv.weight": "channels hidden",
            "linear_attn.in_proj_z.weight": "value hidden",
            "linear_attn.in_proj_b.weight": "value_heads hidden",
            "linear_attn.in_proj_a.weight": "value_heads hidden",
        },
    ),
    Rule("mixer.conv.kernel", unroll_conv, {"linear_attn.conv1d.weight": "channels 1 width"}),
    Rule("mixer.A_log", keep, {"linear_attn.A_log": "value_heads"}),
    Rule("mixer.dt_bias", keep, {"linear_attn.dt_bias": "value_heads"}),
    Rule("mixer.norm.scale", keep, {"linear_attn.norm.weight": "value_dim"}),
    Rule("mixer.out.kernel", transpose, {"linear_attn.out_proj.weight": "hidden value"}),
)
_TARGET = (
    Rule("embed_tokens.embedding", keep, {"embed_tokens.weight": "vocab hidden"}),
    Rule("norm.scale", keep, {"norm.weight": "hidden"}),
)
_HEAD = Rule("lm_head.kernel", transpose, {"lm_head.weight": "vocab hidden"})

_DRAFTER = (
    Rule("fc.kernel", transpose, {"fc.weight": "hidden taps"}),
    Rule("hidden_norm.scale", keep, {"hidden_norm.weight": "hidden"}),
    Rule("norm.scale", keep, {"norm.weight": "hidden"}),
)
_DRAFT_LAYER = (
    *_BLOCK,
    Rule("q.kernel", transpose, {"self_attn.q_proj.weight": "query hidden"}),
    Rule("kv.kernel", fuse, _KEY_VALUE),
    Rule("q_norm.scale", keep, {"self_attn.q_norm.weight": "head"}),
    Rule("k_norm.scale", keep, {"self_attn.k_norm.weight": "head"}),
    Rule("out.kernel", transpose, {"self_attn.o_proj.weight": "hidden query"}),
)

_WEAVER = (
    Rule("output_norm.scale", keep, {"output_norm.weight": "hidden"}),
    Rule("output_norm.bias", keep, {"output_norm.bias": "hidden"}),
    Rule("embed_norm.scale", keep, {"embed_norm.weight": "embed"}),
    Rule("embed_norm.bias", keep, {"embed_norm.bias": "embed"}),
    Rule("token_in.kernel", transpose, {"token_in.weight": "rank embed"}),
    Rule("token_in.bias", keep, {"token_in.bias": "rank"}),
    Rule("proposal_in.kernel", transpose, {"proposal_in.weight": "rank hidden"}),
    Rule("proposal_in.bias", keep, {"proposal_in.bias": "rank"}),
    Rule("out_norm.scale", keep, {"out_norm.weight": "rank"}),
    Rule("out_norm.bias", keep, {"out_norm.bias": "rank"}),
    Rule("query_out.kernel", transpose, {"lm_head_query_in.weight": "hidden rank"}),
)
_WEAVER_BLOCK = (
    Rule("norm_attn.scale", keep, {"norm_attn.weight": "rank"}),
    Rule("norm_attn.bias", keep, {"norm_attn.bias": "rank"}),
    Rule("qkv.kernel", transpose, {"qkv_proj.weight": "qkv rank"}),
    Rule("qkv.kernel", fuse, {f"{name}_proj.weight": "rank rank" for name in "qkv"}),
    Rule("out.kernel", transpose, {"o_proj.weight": "rank rank"}),
    Rule("norm_mlp.scale", keep, {"norm_mlp.weight": "rank"}),
    Rule("norm_mlp.bias", keep, {"norm_mlp.bias": "rank"}),
)
_WEAVER_W1 = (Rule("pos_emb", keep, {"pos_emb": "depth rank"}),)
_WEAVER_W1_BLOCK = (
    Rule("fc1.kernel", transpose, {"fc1.weight": "inner rank"}),
    Rule("fc1.bias", keep, {"fc1.bias": "inner"}),
    Rule("fc2.kernel", transpose, {"fc2.weight": "rank inner"}),
    Rule("fc2.bias", keep, {"fc2.bias": "rank"}),
)
_WEAVER_W2_BLOCK = (
    Rule("mlp.gate_up.kernel", transpose, {"gate_up_proj.weight": "gate_up rank"}),
    Rule("mlp.gate_up.bias", keep, {"gate_up_proj.bias": "gate_up"}),
    Rule("mlp.down.kernel", transpose, {"down_proj.weight": "rank inner"}),
    Rule("mlp.down.bias", keep, {"down_proj.bias": "rank"}),
)

# Parts of a target that text generation does not use; an lm_head that no rule reads is a copy of the embedding.
_SKIPPED = re.compile(r"(model\.visual|mtp|lm_head)\.")


class Model(NamedTuple):
    """One checkpoint, checked: its tensors, the rule of every parameter by path, and the sizes that shapes refer to.

    Attributes:
        skipped: number of tensors that no rule reads and text generation does not need, by prefix.
    """

    reader: TensorReader
    rules: Mapping[str, Rule]
    sizes: Sizes
    skipped: Mapping[str, int]

    def make_parameter(self, path: str) -> np.ndarray:
        """Read the tensors of a rule and transform them."""
        rule = self.rules[path]
        return rule.transform((self.reader.read(name) for name in rule.tensors), self.sizes)


def map_target(reader: TensorReader, config: TargetConfig, place: str) -> Model:
    """Map a target, whose tensors begin with `model.language_model.` or `model.`.

    Args:
        reader: its tensors.
        config: its configuration, which decides their shapes.
        place: file or directory, for messages.

    Raises:
        TfmError: a tensor is missing, misshapen, of a type that does not convert, or unknown.
    """
    prefix = "model." if "model.embed_tokens.weight" in reader.tensors else "model.language_model."
    rules = [*_prefixed("", prefix, _TARGET)]
    for index, kind in enumerate(config.layer_types):
        attention = _GATED_ATTENTION if config.hybrid else _ATTENTION
        mixer = _DELTA if kind == "linear_attention" else attention
        rules += _prefixed(f"layers.{index}.", f"{prefix}layers.{index}.", (*_BLOCK, *mixer))
    if not config.tied_embeddings:
        rules.append(_HEAD)
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "head": config.head_dim,
        "query": config.heads * config.head_dim,
        "query_gate": 2 * config.heads * config.head_dim,
        "key": config.kv_heads * config.head_dim,
        "channels": config.conv_channels,
        "width": config.conv_width,
        "value": config.value_heads * config.value_dim,
        "value_heads": config.value_heads,
        "value_dim": config.value_dim,
    }
    return _map(reader, rules, sizes, place)


def map_drafter(reader: TensorReader, config: DrafterConfig, place: str) -> Model:
    """Map a DFlash drafter, whose tensors have no prefix; arguments and errors as in `map_target`."""
    rules = [*_DRAFTER]
    for index in range(config.layers):
        rules += _prefixed(f"layers.{index}.", f"layers.{index}.", _DRAFT_LAYER)
    sizes = {
        "hidden": config.hidden_size,
        "taps": len(config.target_layers) * config.hidden_size,
        "inner": config.intermediate_size,
        "head": config.head_dim,
        "query": config.heads * config.head_dim,
        "key": config.kv_heads * config.head_dim,
    }
    return _map(reader, rules, sizes, place)


def map_weaver(reader: TensorReader, config: WeaverConfig, place: str) -> Model:
    """Map a Weaver of either generation; arguments and errors as in `map_target`."""
    first = config.generation == "w1"
    rules = [*_WEAVER, *(_WEAVER_W1 if first else ())]
    block = (*_WEAVER_BLOCK, *(_WEAVER_W1_BLOCK if first else _WEAVER_W2_BLOCK))
    for index in range(config.layers):
        rules += _prefixed(f"blocks.{index}.", f"blocks.{index}.", block)
    sizes = {
        "hidden": config.hidden_size,
        "embed": config.embed_size,
        "rank": config.rank,
        "qkv": 3 * config.rank,
        "inner": config.mlp_size,
        "gate_up": 2 * config.mlp_size,
        "depth": config.max_depth,
    }
    return _map(reader, rules, sizes, place)


def _map(reader: TensorReader, rules: Iterable[Rule], sizes: Sizes, place: str) -> Model:
    """Choose the rule of every parameter and check every tensor, from headers alone."""
    tensors = reader.tensors
    chosen: dict[str, Rule] = {}
    for rule in rules:
        if rule.path not in chosen or not chosen[rule.path].tensors.keys() <= tensors.keys():
            chosen[rule.path] = rule
    for rule in chosen.values():
        for name, words in rule.tensors.items():
            shape = tuple(int(word) if word.isdigit() else sizes[word] for word in words.split())
            if name not in tensors:
                message = f"{place} lacks the tensor {name} of shape {shape} ({words})."
                raise TfmError(message)
            _check_tensor(name, tensors[name], shape, words)
    skipped: collections.Counter[str] = collections.Counter()
    for name in sorted(tensors.keys() - {name for rule in chosen.values() for name in rule.tensors}):
        prefix = _SKIPPED.match(name)
        if prefix is None:
            message = f"{tensors[name].file}: unknown tensor {name} of shape {tensors[name].shape}; no rule reads it."
            raise TfmError(message)
        skipped[prefix[1]] += 1
    return Model(reader, chosen, sizes, skipped)


def _check_tensor(name: str, info: TensorInfo, shape: tuple[int, ...], words: str) -> None:
    if info.shape != shape:
        message = f"{info.file}: {name} has shape {info.shape} but the configuration says {shape} ({words})."
        raise TfmError(message)
    if info.dtype not in _CONVERTIBLE:
        message = f"{info.file}: {name} is of type {info.dtype}; only {', '.join(_CONVERTIBLE)} can be converted."
        raise TfmError(message)


def _prefixed(path: str, name: str, rules: Iterable[Rule]) -> Iterator[Rule]:
    for rule in rules:
        yield Rule(path + rule.path, rule.transform, {name + tensor: words for tensor, words in rule.tensors.items()})
