"""Reads the configurations of source checkpoints (Hugging Face targets, DFlash drafters, Weavers) into ours.

Keys that do not change the mathematics are ignored; those that do and that we do not compute are errors by name. A
value that other software guesses when it is absent (the base of rope, a head's width) must be there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from convert.config_keys import Json, Keys, Neutral
from tfm_jax.config import DrafterConfig, LayerType, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

_MOST_LAYERS, _MOST_EXPERTS = 512, 1024  # bound what a damaged file can make us build


class _Family(NamedTuple):
    """What a model_type stands for; `partial_rotary` is its default in transformers 5."""

    name: Literal["qwen3_5", "qwen3"]
    partial_rotary: float
    neutral: dict[str, Neutral]
    mixture: bool = False


_DENSE = {"num_experts": Neutral((0,), "a mixture of experts has another model_type")}
_MIXTURE = {"mlp_only_layers": Neutral(([],)), "decoder_sparse_step": Neutral((1,))}
_ALWAYS_NORMALISED = {"norm_topk_prob": Neutral((True,))}  # transformers ignores the key in this family
_FAMILIES = {
    "qwen3": _Family("qwen3", 1.0, _DENSE),
    "qwen3_5": _Family("qwen3_5", 0.25, _DENSE),
    "qwen3_5_text": _Family("qwen3_5", 0.25, _DENSE),
    "qwen3_next": _Family("qwen3_5", 0.25, _MIXTURE, mixture=True),
    "qwen3_5_moe": _Family("qwen3_5", 0.25, _MIXTURE | _ALWAYS_NORMALISED, mixture=True),
    "qwen3_5_moe_text": _Family("qwen3_5", 0.25, _MIXTURE | _ALWAYS_NORMALISED, mixture=True),
}

_NEUTRAL = {
    "hidden_act": Neutral(("silu",)),
    "attention_bias": Neutral((False,)),
    "mlp_bias": Neutral((False,)),
    "attn_output_gate": Neutral((True,)),
    "output_gate_type": Neutral(("silu", "swish")),  # of the Gated DeltaNet norm, not of attention
    "quantization_config": Neutral(()),
    "final_logit_softcapping": Neutral((0,)),
    "attn_logit_softcapping": Neutral((0,)),
    "logit_scale": Neutral((1,)),
    "input_embedding_scale": Neutral((1,)),
    "output_multiplier": Neutral((1,)),
}

_SLOT_0 = "its slot 0 predicts a token, where ours holds the last one"
_SINKS = "attention sinks are not implemented"
_DFLASH_2 = "DFlash 2 drafters are not implemented"
_NEUTRAL_DRAFTER = _NEUTRAL | {
    "conv_kernel_size": Neutral((0,), _DFLASH_2),
    "conv_group_size": Neutral((0,), _DFLASH_2),
    "selector_rank": Neutral((0,), _DFLASH_2),
    "selector_top_k": Neutral((0,), _DFLASH_2),
    "projector_type": Neutral(("dflash",), "heads on top of DFlash are not implemented"),
    "shift_label": Neutral((False,), _SLOT_0),  # Domino, SpecForge and ModelOpt
    "sample_from_anchor": Neutral((False,), _SLOT_0),  # speculators
    "markov_rank": Neutral((), _SLOT_0),  # DeepSpec writes it even where it is 0
    "attention_sink_bias": Neutral((False,), _SINKS),
    "add_swa_attention_sink_bias": Neutral((False,), _SINKS),
    "add_full_attention_sink_bias": Neutral((False,), _SINKS),
    "partial_rotary_factor": Neutral((1,)),
    "is_neox_style": Neutral((True,)),
    "use_aux_hidden_state": Neutral((True,)),
    "speculators_model_type": Neutral(("dflash",)),
}
_ARCHITECTURES = {"DFlashDraftModel", "DFlashSpeculator"}
_OTHER_ARCHITECTURES = {
    "DFlash2DraftModel": _DFLASH_2,
    "Qwen3DSparkModel": _SLOT_0,  # DeepSpec, also for its DFlash drafters (`dflash_*_block7`)
    "DSparkDraftModel": _SLOT_0,
    "DSparkSpeculator": _SLOT_0,
}
_NEUTRAL_WEAVER = {"encoder_mode": Neutral((3,)), "score_head": Neutral((4,))}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        TfmError: the file is missing or holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        message = f"{file} is missing; give a complete Hugging Face directory."
        raise TfmError(message) from error
    except (OSError, ValueError, RecursionError) as error:
        message = f"{file} cannot be read ({error}); copy it again."
        raise TfmError(message) from error
    if not isinstance(values, dict):
        message = f"{file} holds no JSON object; copy it again."
        raise TfmError(message)
    return values


def parse_target(values: Json, place: str, *, has_head: bool) -> TargetConfig:
    """Configuration of a target.

    Args:
        values: config.json; the language model's part may be nested under `text_config`, which then rules alone.
        place: name of the file, for messages.
        has_head: whether the checkpoint holds an lm_head of its own.

    Raises:
        TfmError: another kind of model, or a key that is missing, malformed or not supported.
    """
    text = Keys(place, Keys(place, values).nested("text_config") or values)
    family = _family(Keys(place, values), text)
    text.check_neutral(_NEUTRAL | family.neutral)
    if (tied := tie_flag(values, place)) is not None and tied == has_head:
        found = "a separate" if has_head else "no"
        message = (
            f"{place}: tie_word_embeddings is {tied} but the checkpoint holds {found} lm_head; correct one of them."
        )
        raise TfmError(message)
    layer_types = _target_layers(text, family)
    theta, rope = _rope(text)
    if rope.get("rope_type", "default") != "default":
        Keys(place, rope).refuse("rope_type", "a target must have plain rope; scaled rope is not supported yet")
    head_dim = text.integer("head_dim")
    partial = Keys(place, rope, {"partial_rotary_factor": text.get("partial_rotary_factor", family.partial_rotary)})
    delta = "linear_attention" in layer_types
    return TargetConfig(
        family=family.name,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        layer_types=layer_types,
        heads=text.integer("num_attention_heads"),
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial.number("partial_rotary_factor", most=1.0)),
        rope_theta=theta,
        norm_eps=text.number("rms_norm_eps"),
        tied_embeddings=not has_head,
        max_positions=text.integer("max_position_embeddings"),
        key_heads=text.integer("linear_num_key_heads") if delta else 0,
        value_heads=text.integer("linear_num_value_heads") if delta else 0,
        key_dim=text.integer("linear_key_head_dim") if delta else 0,
        value_dim=text.integer("linear_value_head_dim") if delta else 0,
        conv_width=text.integer("linear_conv_kernel_dim", least=2) if delta else 0,
        **_mlp(text, family),
    )


def tie_flag(values: Json, place: str) -> bool | None:
    """`tie_word_embeddings`; None where the configuration is silent.

    Raises:
        TfmError: the top level and `text_config` contradict each other.
    """
    top, text = Keys(place, values), Keys(place, Keys(place, values).nested("text_config"))
    flags = {bool(flag) for keys in (top, text) if (flag := keys.get("tie_word_embeddings")) is not None}
    if len(flags) > 1:
        top.refuse("tie_word_embeddings", "text_config says the opposite; correct one of them")
    return flags.pop() if flags else None


def stop_tokens(place: str, *objects: Json) -> tuple[int, ...]:
    """Union of `eos_token_id`, one or several, over generation_config.json, config.json and its `text_config`."""
    stops: set[int] = set()
    for values in (*objects, *(Keys(place, values).nested("text_config") for values in objects)):
        ids = values.get("eos_token_id")
        if isinstance(ids, list):
            stops |= set(Keys(place, values).integers("eos_token_id"))
        elif ids is not None:
            stops.add(Keys(place, values).integer("eos_token_id", least=0))
    return tuple(sorted(stops))


def parse_drafter(values: Json, place: str, *, target_layers: int) -> DrafterConfig:
    """Configuration of a DFlash drafter as z-lab, SpecForge, ModelOpt or speculators write it.

    Of a key in several places `dflash_config` goes before the top level, and that before `transformer_layer_config`.

    Args:
        values: config.json.
        place: name of the file, for messages.
        target_layers: number of layers of the target that it is to serve.

    Raises:
        TfmError: another kind of model or another target, or a key that is missing, malformed or not supported.
    """
    top = Keys(place, values)
    keys = Keys(place, top.nested("dflash_config"), values, top.nested("transformer_layer_config"))
    if keys.get("mask_token_id") is None:
        keys.refuse("mask_token_id", "a DFlash drafter states it (a target belongs to --target)")
    keys.check_neutral(_NEUTRAL_DRAFTER)
    _check_architecture(top)
    kind = Keys(place, top.nested("transformer_layer_config"), values)
    if kind.get("model_type", "qwen3") != "qwen3":
        kind.refuse("model_type", "only drafters of Qwen3 layers are supported")
    if keys.get("num_target_layers", target_layers) != target_layers:
        keys.refuse("num_target_layers", f"the target has {target_layers} layers; use the drafter's own target")
    if keys.get("draft_vocab_size", keys.get("vocab_size")) != keys.get("vocab_size"):
        keys.refuse("draft_vocab_size", "a reduced draft vocabulary (with d2t) is not supported yet")
    if keys.get("target_hidden_size", keys.get("hidden_size")) != keys.get("hidden_size"):
        keys.refuse("target_hidden_size", "a target of another width is not supported yet")
    block_size = keys.integer("block_size", least=2)
    _check_proposals(keys, block_size)
    causal, windows = _draft_attention(keys, block_size)
    theta, rope = _rope(keys)
    return DrafterConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        layer_causal=causal,
        layer_windows=windows,
        heads=keys.integer("num_attention_heads"),
        kv_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim"),
        rope_theta=theta,
        norm_eps=keys.number("rms_norm_eps"),
        block_size=block_size,
        mask_token_id=keys.integer("mask_token_id", least=0),
        target_layers=_taps(keys, len(causal), target_layers),
        max_positions=keys.integer("max_position_embeddings"),
        **_yarn(Keys(place, rope), keys),
    )


def parse_weaver(payload: Json, names: Collection[str], place: str) -> WeaverConfig:
    """Configuration of a Weaver; its tensors tell the generation.

    Args:
        payload: the plain values of the .pth file.
        names: names of its tensors.
        place: name of the file, for messages.

    Raises:
        TfmError: another kind of speculator, or a key that is missing, malformed or not supported.
    """
    kind = Keys(place, Keys(place, payload).nested("metadata"))
    if kind.get("speculator_kind", "dflash_tfm_weaver") != "dflash_tfm_weaver":
        kind.refuse("speculator_kind", "only dflash_tfm_weaver is supported")
    keys = Keys(place, Keys(place, payload).nested("config"))
    keys.check_neutral(_NEUTRAL_WEAVER)
    if "pos_emb" in names:
        generation, activation = "w1", "gelu"
    elif "blocks.0.gate_up_proj.weight" in names:
        generation, activation = "w2", "swiglu"
    else:
        message = f"{place} is no Weaver: it holds neither pos_emb nor blocks.0.gate_up_proj.weight."
        raise TfmError(message)
    if keys.get("activation", activation) != activation:
        keys.refuse("activation", f"a {generation.upper()} Weaver has {activation}")
    return WeaverConfig(
        generation="w1" if generation == "w1" else "w2",
        hidden_size=keys.integer("d_model"),
        embed_size=keys.integer("d_embed"),
        rank=keys.integer("d_rank"),
        layers=keys.integer("num_layers", most=_MOST_LAYERS),
        heads=keys.integer("num_heads"),
        mlp_size=keys.integer("mlp_dim"),
        max_depth=keys.integer("K"),
        pool_size=keys.integer("candidate_pool_size"),
        rope_base=keys.number("rope_base") if generation == "w2" else 0.0,
    )


def _family(top: Keys, text: Keys) -> _Family:
    if top.get("format") is not None:
        top.refuse("format", "a source has none; this directory is converted already")
    if top.get("dflash_config") is not None:
        top.refuse("dflash_config", "a target has none; pass this directory as the drafter")
    kind = text.get("model_type", top.get("model_type"))
    if kind not in tuple(_FAMILIES):
        text.refuse("model_type", f"only {', '.join(_FAMILIES)} are supported yet")
    return _FAMILIES[kind]


def _target_layers(text: Keys, family: _Family) -> tuple[LayerType, ...]:
    count = text.integer("num_hidden_layers", most=_MOST_LAYERS)
    if family.name == "qwen3":
        if text.get("use_sliding_window") and text.get("sliding_window"):
            text.refuse("use_sliding_window", "a target with sliding layers is not supported yet")
        text.choices("layer_types", ["full_attention"] * count, ("full_attention", "sliding_attention"))
        return ("full_attention",) * count
    interval = text.integer("full_attention_interval", default=4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    layers = text.choices("layer_types", default, ("linear_attention", "full_attention"))
    return tuple("linear_attention" if layer == "linear_attention" else "full_attention" for layer in layers)


def _mlp(text: Keys, family: _Family) -> dict[str, Any]:
    """Sizes of the MLP in a TargetConfig."""
    if not family.mixture:
        return {"intermediate_size": text.integer("intermediate_size")}
    return {
        "intermediate_size": text.integer("shared_expert_intermediate_size"),
        "experts": text.integer("num_experts", most=_MOST_EXPERTS),
        "experts_per_token": text.integer("num_experts_per_tok"),
        "expert_size": text.integer("moe_intermediate_size"),
        "normalise_experts": text.flag("norm_topk_prob", default=True),
    }


def _check_architecture(top: Keys) -> None:
    for name in top.words("architectures"):
        if name not in _ARCHITECTURES:
            supported = f"only {' and '.join(sorted(_ARCHITECTURES))} are supported"
            top.refuse("architectures", _OTHER_ARCHITECTURES.get(name, supported))


def _check_proposals(keys: Keys, block_size: int) -> None:
    """Speculators count a block's proposals: as many as slots means that slot 0 predicts."""
    methods = Keys(keys.place, keys.nested("speculators_config")).get("proposal_methods", [])
    for method in methods if isinstance(methods, list) else []:
        if isinstance(method, dict) and method.get("speculative_tokens") == block_size:
            Keys(keys.place, method).refuse("speculative_tokens", f"the block has {block_size} slots: {_SLOT_0}")


def _draft_attention(keys: Keys, block_size: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Per draft layer: causal within the block or not, and the window; precedence as in vLLM's `qwen3_dflash.py`."""
    use_swa = keys.flag("use_swa", default=False)
    if keys.get("layer_types") is None and keys.get("use_sliding_window") and not use_swa:
        keys.refuse("layer_types", "must say which layers slide when use_sliding_window is true")
    full = ["full_attention"] * keys.integer("num_hidden_layers", most=_MOST_LAYERS)
    layers = keys.choices("layer_types", full, ("sliding_attention", "full_attention"))
    sliding = [layer == "sliding_attention" for layer in layers]
    stated = "is_causal" if keys.get("is_causal") is not None else "causal"
    by_type = not keys.flag("sliding_window_non_causal", default=False)
    causal = tuple(keys.flag(stated, default=slides and by_type) for slides in sliding)
    if use_swa and not any(
        sliding
    ):  # ModelOpt: every layer slides, whatever its type; causality still follows the type
        window = _window(keys)
        if window < block_size:
            keys.refuse("use_swa", f"its window of {window} tokens does not hold a block of {block_size}")
        return causal, (window,) * len(layers)
    return causal, tuple(_window(keys) if slides else 0 for slides in sliding)


def _window(keys: Keys) -> int:
    """Window of the sliding layers, in tokens; 0 where use_sliding_window switches it off."""
    if not keys.get("use_swa"):
        use = keys.get("use_sliding_window")
        if use is None:
            keys.refuse("use_sliding_window", "a drafter with sliding layers must state it")
        if not use:
            return 0
    size = keys.integer("sliding_window", default=keys.get("swa_window_size"))
    if keys.get("swa_window_size", size) != size:
        keys.refuse("swa_window_size", f"sliding_window is {size}; correct one of them")
    return size


def _rope(keys: Keys) -> tuple[float, dict[str, Any]]:
    """Base of rope, and its other parameters from whichever place holds them."""
    places = [values for name in ("rope_scaling", "rope_parameters") if (values := keys.nested(name))]
    kinds = [
        values.get("rope_type", values.get("type", "default")) for values in places
    ]  # `type` is the older spelling
    if kinds[1:] and kinds[0] != kinds[1]:
        keys.refuse("rope_scaling", "rope_parameters names another type of rope; keep one of them")
    scaling = {key: value for values in places for key, value in values.items()} | {"rope_type": (*kinds, "default")[0]}
    theta = Keys(keys.place, scaling, {"rope_theta": keys.get("rope_theta")}).number("rope_theta")
    return theta, scaling


def _yarn(rope: Keys, keys: Keys) -> dict[str, Any]:
    """YaRN fields of a DrafterConfig (Peng et al. 2023, arXiv 2309.00071); empty for plain rope."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind != "yarn":
        rope.refuse("rope_type", "only default and yarn are supported")
    rope.check_neutral({"mscale": Neutral(()), "mscale_all_dim": Neutral(()), "truncate": Neutral((True,))})
    factor = rope.number("factor")
    temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "yarn_factor": factor,
        "yarn_original_positions": rope.integer(
            "original_max_position_embeddings", default=keys.integer("max_position_embeddings")
        ),
        "yarn_beta_fast": rope.number("beta_fast", 32.0),
        "yarn_beta_slow": rope.number("beta_slow", 1.0),
        "yarn_attention_factor": rope.number("attention_factor", temperature),
    }


def _taps(keys: Keys, draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """Target layers that feed the drafter; the default is that of z-lab's dflash 0.1.0, banker's rounding included."""
    if keys.get("target_layer_ids") is not None:
        return keys.integers("target_layer_ids")
    if keys.get("aux_hidden_state_layer_ids") is not None:  # speculators: 0 is the embedding, i + 1 the layer i
        layers = keys.integers("aux_hidden_state_layer_ids")
        if any(layer < 1 for layer in layers):
            keys.refuse("aux_hidden_state_layer_ids", "the embedding as a feature is not supported yet")
        return tuple(layer - 1 for layer in layers)
    if keys.get("speculators_model_type") is not None:
        keys.refuse("aux_hidden_state_layer_ids", "a speculators drafter states it")
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + index * (target_layers - 4) / (draft_layers - 1)) for index in range(draft_layers))
