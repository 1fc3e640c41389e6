"""The mapping from the tensors of a checkpoint to our parameters, as tables.

A rule reads: this parameter is this transform of these tensors, which have these shapes. Tensors are torch's
([out, in]); kernels become [in, out]. The words of a shape are looked up in the sizes of the model's configuration.
Where several rules name one parameter (a fused and a separate spelling), the one with most of its tensors applies.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from convert.tensors import TensorInfo, TensorReader
from convert.transforms import (
    Sizes,
    Tensor,
    Transform,
    fuse,
    fuse_gated,
    fuse_grouped,
    keep,
    stack,
    stack_pairs,
    take_key_value,
    take_query,
    transpose,
    transpose_each,
    unroll_conv,
)
from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

_CONVERTIBLE = ("bfloat16", "float16", "float32")


class Rule(NamedTuple):
    """One parameter.

    Attributes:
        path: dotted path of the parameter.
        transform: from the tensors, in order, to the blocks of the parameter.
        tensors: name → shape in words.
    """

    path: str
    transform: Transform
    tensors: Mapping[str, str]

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in numbers."""
        return {
            name: tuple(int(word) if word.isdigit() else sizes[word] for word in words.split())
            for name, words in self.tensors.items()
        }


def _prefixed(path: str, name: str, rules: Iterable[Rule]) -> Iterator[Rule]:
    for rule in rules:
        yield Rule(path + rule.path, rule.transform, {name + tensor: words for tensor, words in rule.tensors.items()})


_NORMS = (
    Rule("input_norm.scale", keep, {"input_layernorm.weight": "hidden"}),
    Rule("post_norm.scale", keep, {"post_attention_layernorm.weight": "hidden"}),
)
_MLP = (
    Rule("gate_up.kernel", fuse, {"gate_proj.weight": "inner hidden", "up_proj.weight": "inner hidden"}),
    Rule("down.kernel", transpose, {"down_proj.weight": "hidden inner"}),
)
_DENSE = tuple(_prefixed("mlp.", "mlp.", _MLP))
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
    Rule(
        "mixer.in_proj.kernel",
        fuse_grouped,
        {"linear_attn.in_proj_qkvz.weight": "qkvz hidden", "linear_attn.in_proj_ba.weight": "gates hidden"},
    ),
    Rule("mixer.conv.kernel", unroll_conv, {"linear_attn.conv1d.weight": "channels 1 width"}),
    Rule("mixer.A_log", keep, {"linear_attn.A_log": "value_heads"}),
    Rule("mixer.dt_bias", keep, {"linear_attn.dt_bias": "value_heads"}),
    Rule("mixer.norm.scale", keep, {"linear_attn.norm.weight": "value_dim"}),
    Rule("mixer.out.kernel", transpose, {"linear_attn.out_proj.weight": "hidden value"}),
)
_MIXTURE = (
    *_prefixed("mlp.shared.", "mlp.shared_expert.", _MLP),
    Rule("mlp.shared_gate.kernel", transpose, {"mlp.shared_expert_gate.weight": "1 hidden"}),
    Rule("mlp.router.kernel", transpose, {"mlp.gate.weight": "experts hidden"}),
    Rule("mlp.experts.gate_up.kernel", transpose_each, {"mlp.experts.gate_up_proj": "experts expert_gate_up hidden"}),
    Rule("mlp.experts.down.kernel", transpose_each, {"mlp.experts.down_proj": "experts hidden expert"}),
)
_TARGET = (
    Rule("embed_tokens.embedding", keep, {"embed_tokens.weight": "vocab hidden"}),
    Rule("norm.scale", keep, {"norm.weight": "hidden"}),
)
_HEAD = Rule("lm_head.kernel", transpose, {"lm_head.weight": "vocab hidden"})

_DRAFTER = (
    Rule("fc.kernel", transpose, {"fc.weight": "hidden taps"}),
    Rule("fc.kernel", transpose, {"encoder.fc.weight": "hidden taps"}),
    Rule("hidden_norm.scale", keep, {"hidden_norm.weight": "hidden"}),
    Rule("hidden_norm.scale", keep, {"encoder.output_norm_enc.weight": "hidden"}),
    Rule("norm.scale", keep, {"norm.weight": "hidden"}),
)
_QKV = {"self_attn.qkv_proj.weight": "qkv hidden"}
_DRAFT_LAYER = (
    *_NORMS,
    *_DENSE,
    Rule("q.kernel", transpose, {"self_attn.q_proj.weight": "query hidden"}),
    Rule("q.kernel", take_query, _QKV),
    Rule("kv.kernel", fuse, _KEY_VALUE),
    Rule("kv.kernel", take_key_value, _QKV),
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

# Tensors that no rule reads and that the models do without, by prefix.
# Of a target: what text generation does not use; an lm_head that no rule reads is a copy of the embedding.
# Of a drafter: copies of the target's frozen tensors, which some trainers save, and buffers.
_SKIPPED_TARGET = re.compile(r"(model\.visual|mtp|lm_head)\.")
_SKIPPED_DRAFTER = re.compile(r"(embed_tokens|lm_head|verifier_lm_head|verifier_norm|rotary_emb)\.")

# Tensors that make a drafter another model than ours, and why.
_REFUSED_DRAFTER = {
    r"d2t|t2d": "a reduced draft vocabulary is not supported yet",
    r"mask_embedding": "a mask embedding outside the target's table is not supported yet",
    r"layers\.\d+\.self_attn\.attention_sink_bias": "attention sinks are not supported yet",
    r"layers\.\d+\.self_attn\.g_proj\..*|aux_hidden_norms\..*": "Laguna's gates and norms are not supported",
    r"layers\.\d+\.(attention|mlp)_conv\..*|candidate_selector\..*": "DFlash 2 drafters are not supported yet",
    r"(markov|confidence|prefix_gru|embed_proj|gate_proj|joint_proj|lilicorr)\w*\..*": "heads on top are not supported",
}


class Table(NamedTuple):
    """Rules of one kind of model, and the sizes that their shapes refer to."""

    rules: list[Rule]
    sizes: Sizes


class Model(NamedTuple):
    """One checkpoint, checked: its tensors, the rule of every parameter by path, and the sizes that shapes refer to.

    Attributes:
        skipped: number of tensors that no rule reads and text generation does not need, by prefix.
    """

    reader: TensorReader
    rules: Mapping[str, Rule]
    sizes: Sizes
    skipped: Mapping[str, int]

    def make_blocks(self, path: str) -> Iterator[np.ndarray]:
        """Read the tensors of a rule and transform them: the parameter in blocks along its first axis."""
        rule = self.rules[path]
        return rule.transform([Tensor(self.reader, name) for name in rule.tensors], self.sizes)

    def make_parameter(self, path: str) -> np.ndarray:
        """The same in one array."""
        return np.concatenate(list(self.make_blocks(path)))


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
        mlp = (*_MIXTURE, *_expert_rules(config.experts)) if config.experts else _DENSE
        rules += _prefixed(f"layers.{index}.", f"{prefix}layers.{index}.", (*_NORMS, *mlp, *mixer))
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
        "key_heads": config.key_heads,
        "key_dim": config.key_dim,
        "value": config.value_heads * config.value_dim,
        "value_heads": config.value_heads,
        "value_dim": config.value_dim,
        "qkvz": config.conv_channels + config.value_heads * config.value_dim,
        "gates": 2 * config.value_heads,
        "experts": config.experts,
        "expert": config.expert_size,
        "expert_gate_up": 2 * config.expert_size,
    }
    return _map(reader, rules, sizes, place, _SKIPPED_TARGET)


def map_drafter(reader: TensorReader, config: DrafterConfig, place: str) -> Model:
    """Map a DFlash drafter, whose tensors have no prefix; arguments and errors as in `map_target`."""
    for name, info in reader.tensors.items():
        for pattern, reason in _REFUSED_DRAFTER.items():
            if re.fullmatch(pattern, name):
                message = f"{info.file}: {name} has shape {info.shape}, but {reason}."
                raise TfmError(message)
    table = tabulate_drafter(config)
    midlayer = _prefixed("layers.0.", "midlayer.", _DRAFT_LAYER)  # another name of the only layer
    return _map(reader, [*table.rules, *midlayer], table.sizes, place, _SKIPPED_DRAFTER)


def tabulate_drafter(config: DrafterConfig) -> Table:
    """Rules of a DFlash drafter; where a parameter has several, z-lab's is the first."""
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
        "qkv": (config.heads + 2 * config.kv_heads) * config.head_dim,
    }
    return Table(rules, sizes)


def map_weaver(reader: TensorReader, config: WeaverConfig, place: str) -> Model:
    """Map a Weaver of either generation; arguments and errors as in `map_target`."""
    table = tabulate_weaver(config)
    return _map(reader, table.rules, table.sizes, place)


def tabulate_weaver(config: WeaverConfig) -> Table:
    """Rules of a Weaver; where a parameter has several, the fused spelling is the first."""
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
    return Table(rules, sizes)


def _expert_rules(count: int) -> Iterator[Rule]:
    """The other spelling of the routed experts: one tensor each."""
    names = [f"mlp.experts.{index}" for index in range(count)]
    gate_up = {f"{name}.{part}_proj.weight": "expert hidden" for name in names for part in ("gate", "up")}
    yield Rule("mlp.experts.gate_up.kernel", stack_pairs, gate_up)
    yield Rule("mlp.experts.down.kernel", stack, {f"{name}.down_proj.weight": "hidden expert" for name in names})


def _map(
    reader: TensorReader, rules: Iterable[Rule], sizes: Sizes, place: str, skip: re.Pattern[str] | None = None
) -> Model:
    """Choose the rule of every parameter and check every tensor, from headers alone."""
    tensors = reader.tensors
    chosen: dict[str, Rule] = {}
    found: dict[str, float] = {}
    for rule in rules:
        share = sum(name in tensors for name in rule.tensors) / len(rule.tensors)
        if rule.path not in chosen or share > found[rule.path]:
            chosen[rule.path], found[rule.path] = rule, share
    for rule in chosen.values():
        for name, shape in rule.shapes(sizes).items():
            words = rule.tensors[name]
            if name not in tensors:
                message = f"{place} lacks the tensor {name} of shape {shape} ({words})."
                raise TfmError(message)
            _check_tensor(name, tensors[name], shape, words)
    skipped: collections.Counter[str] = collections.Counter()
    for name in sorted(tensors.keys() - {name for rule in chosen.values() for name in rule.tensors}):
        prefix = skip.match(name) if skip else None
        if prefix is None:
            message = f"{tensors[name].file}: unknown tensor {name} of shape {tensors[name].shape}; no rule reads it."
            raise TfmError(message)
        skipped[prefix[1]] += 1
    return Model(reader, chosen, sizes, skipped)


def _check_tensor(name: str, info: TensorInfo, shape: tuple[int, ...], words: str) -> None:
    if info.shape != shape:
        message = f"{info.file}: {name} has shape {info.shape} but the configuration says {shape} ({words})."
        raise TfmError(message)
    if info.dtype.startswith("F8_"):
        message = f"{info.file}: {name} is of type {info.dtype}, and fp8 is not supported; use the bfloat16 release."
        raise TfmError(message)
    if info.dtype not in _CONVERTIBLE:
        message = f"{info.file}: {name} is of type {info.dtype}; only {', '.join(_CONVERTIBLE)} can be converted."
        raise TfmError(message)
