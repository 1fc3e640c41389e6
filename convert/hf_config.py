"""Reads the configurations of source checkpoints (Hugging Face targets, DFlash drafters, Weavers) into ours.

Keys that do not change the mathematics are ignored; those that do and that we do not compute are errors by name. A
value that other software guesses when it is absent (the base of rope, a head's width) must be there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tfm_jax.config import DrafterConfig, LayerType, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

Json = Mapping[str, Any]

_FAMILIES = {"qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3": "qwen3"}
_MOST_LAYERS = 4096  # bounds what a damaged file can make us build
_PARTIAL_ROTARY = {"qwen3_5": 0.25, "qwen3": 1.0}  # the families' defaults in transformers 5

# Key → values that leave the mathematics as we compute them; an absent or null key always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),  # of the Gated DeltaNet norm, not of attention
    "quantization_config": (),
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "logit_scale": (1,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
}
_NEUTRAL_DRAFTER: dict[str, tuple[Any, ...]] = _NEUTRAL | {
    "shift_label": (False,),  # slot 0 predicts, as with the next key
    "sample_from_anchor": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "partial_rotary_factor": (1,),
    "speculators_model_type": (),
    "aux_hidden_state_layer_ids": (),
}
_DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_NEUTRAL_WEAVER: dict[str, tuple[Any, ...]] = {"encoder_mode": (3,), "score_head": (4,)}


class _Keys:
    """Look-ups in several JSON objects, the first one first; every error names the file and the key."""

    def __init__(self, place: str, *objects: Json) -> None:
        self.place = place
        self._objects = objects

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401  (a JSON value)
        return next((values[key] for values in self._objects if values.get(key) is not None), default)

    def integer(self, key: str, *, least: int = 1, most: int = 1 << 31, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(key, f"must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            self.refuse(key, "must be a positive number")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
            self.refuse(key, "must be a list of whole numbers")
        return tuple(value)

    def choices(self, key: str, default: list[str], allowed: Collection[str]) -> list[str]:
        """One allowed word per layer; as many as `default` has."""
        value = self.get(key, default)
        if not isinstance(value, list) or len(value) != len(default) or any(word not in allowed for word in value):
            self.refuse(key, f"must say {' or '.join(allowed)} for each of {len(default)} layers")
        return value

    def nested(self, key: str) -> Json:
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "must be an object")
        return value

    def refuse(self, key: str, reason: str) -> NoReturn:
        value = self.get(key)
        found = "absent" if value is None else repr(value)[:80]
        message = f"{self.place}: {key} is {found} but {reason}."
        raise TfmError(message)

    def check_neutral(self, table: Mapping[str, tuple[Any, ...]]) -> None:
        for key, neutral in table.items():
            value = self.get(key)
            if value is not None and value not in neutral:
                allowed = " or ".join(repr(choice) for choice in neutral) or "its absence"
                self.refuse(key, f"only {allowed} is supported yet")


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
    text = _Keys(place, _Keys(place, values).nested("text_config") or values)
    family = _family(_Keys(place, values), text)
    text.check_neutral(_NEUTRAL)
    if (tied := tie_flag(values, place)) is not None and tied == has_head:
        found = "a separate" if has_head else "no"
        message = (
            f"{place}: tie_word_embeddings is {tied} but the checkpoint holds {found} lm_head; correct one of them."
        )
        raise TfmError(message)
    layer_types = _target_layers(text, family)
    theta, rope = _rope(text)
    if rope.get("rope_type", "default") != "default":
        _Keys(place, rope).refuse("rope_type", "a target must have plain rope; scaled rope is not supported yet")
    head_dim = text.integer("head_dim")
    partial = _Keys(place, rope, {"partial_rotary_factor": text.get("partial_rotary_factor", _PARTIAL_ROTARY[family])})
    delta = "linear_attention" in layer_types
    return TargetConfig(
        family="qwen3_5" if family == "qwen3_5" else "qwen3",
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        layer_types=layer_types,
        heads=text.integer("num_attention_heads"),
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial.number("partial_rotary_factor")),
        rope_theta=theta,
        norm_eps=text.number("rms_norm_eps"),
        tied_embeddings=not has_head,
        max_positions=text.integer("max_position_embeddings"),
        key_heads=text.integer("linear_num_key_heads") if delta else 0,
        value_heads=text.integer("linear_num_value_heads") if delta else 0,
        key_dim=text.integer("linear_key_head_dim") if delta else 0,
        value_dim=text.integer("linear_value_head_dim") if delta else 0,
        conv_width=text.integer("linear_conv_kernel_dim", least=2) if delta else 0,
    )


def tie_flag(values: Json, place: str) -> bool | None:
    """`tie_word_embeddings`; None where the configuration is silent.

    Raises:
        TfmError: the top level and `text_config` contradict each other.
    """
    top, text = _Keys(place, values), _Keys(place, _Keys(place, values).nested("text_config"))
    flags = {bool(flag) for keys in (top, text) if (flag := keys.get("tie_word_embeddings")) is not None}
    if len(flags) > 1:
        top.refuse("tie_word_embeddings", "text_config says the opposite; correct one of them")
    return flags.pop() if flags else None


def stop_tokens(place: str, *objects: Json) -> tuple[int, ...]:
    """Union of `eos_token_id`, one or several, over generation_config.json, config.json and its `text_config`."""
    stops: set[int] = set()
    for values in (*objects, *(_Keys(place, values).nested("text_config") for values in objects)):
        ids = values.get("eos_token_id")
        if isinstance(ids, list):
            stops |= set(_Keys(place, values).integers("eos_token_id"))
        elif ids is not None:
            stops.add(_Keys(place, values).integer("eos_token_id", least=0))
    return tuple(sorted(stops))


def parse_drafter(values: Json, place: str, *, target_layers: int) -> DrafterConfig:
    """Configuration of a DFlash drafter; `dflash_config` goes before the top level.

    Args:
        values: config.json.
        place: name of the file, for messages.
        target_layers: number of layers of the target that it is to serve.

    Raises:
        TfmError: another kind of model or another target, or a key that is missing, malformed or not supported.
    """
    top = _Keys(place, values)
    nested = top.nested("dflash_config")
    keys = _Keys(place, nested, values)
    if keys.get("mask_token_id") is None:
        keys.refuse("mask_token_id", "a DFlash drafter states it")
    for key in _DFLASH_2:
        if keys.get(key) is not None:
            keys.refuse(key, "DFlash 2 drafters are not supported yet")
    keys.check_neutral(_NEUTRAL_DRAFTER)
    if top.get("model_type", "qwen3") != "qwen3":
        top.refuse("model_type", "only drafters of Qwen3 layers are supported")
    if keys.get("num_target_layers", target_layers) != target_layers:
        keys.refuse("num_target_layers", f"the target has {target_layers} layers; use the drafter's own target")
    if keys.get("draft_vocab_size", keys.get("vocab_size")) != keys.get("vocab_size"):
        keys.refuse("draft_vocab_size", "a reduced draft vocabulary is not supported yet")
    sliding = _draft_layers(top)
    causal = top.get("is_causal", nested.get("causal"))
    theta, rope = _rope(top)
    return DrafterConfig(
        vocab_size=top.integer("vocab_size"),
        hidden_size=top.integer("hidden_size"),
        intermediate_size=top.integer("intermediate_size"),
        layer_causal=tuple(bool(causal) if causal is not None else slides for slides in sliding),
        layer_windows=tuple(_window(top) if slides else 0 for slides in sliding),
        heads=top.integer("num_attention_heads"),
        kv_heads=top.integer("num_key_value_heads"),
        head_dim=top.integer("head_dim"),
        rope_theta=theta,
        norm_eps=top.number("rms_norm_eps"),
        block_size=keys.integer("block_size", least=2),
        mask_token_id=keys.integer("mask_token_id", least=0),
        target_layers=_taps(keys, len(sliding), target_layers),
        max_positions=top.integer("max_position_embeddings"),
        **_yarn(_Keys(place, rope), top),
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
    kind = _Keys(place, _Keys(place, payload).nested("metadata"))
    if kind.get("speculator_kind", "dflash_tfm_weaver") != "dflash_tfm_weaver":
        kind.refuse("speculator_kind", "only dflash_tfm_weaver is supported")
    keys = _Keys(place, _Keys(place, payload).nested("config"))
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


def _family(top: _Keys, text: _Keys) -> str:
    if top.get("format") is not None:
        top.refuse("format", "a source has none; this directory is converted already")
    if top.get("dflash_config") is not None:
        top.refuse("dflash_config", "a target has none; pass this directory as the drafter")
    kind = text.get("model_type", top.get("model_type"))
    if kind not in tuple(_FAMILIES):
        text.refuse("model_type", f"only {', '.join(_FAMILIES)} are supported yet")
    return _FAMILIES[kind]


def _target_layers(text: _Keys, family: str) -> tuple[LayerType, ...]:
    count = text.integer("num_hidden_layers", most=_MOST_LAYERS)
    if family == "qwen3":
        if text.get("use_sliding_window") and text.get("sliding_window"):
            text.refuse("use_sliding_window", "a target with sliding layers is not supported yet")
        return ("full_attention",) * count
    interval = text.integer("full_attention_interval", default=4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    layers = text.choices("layer_types", default, ("linear_attention", "full_attention"))
    return tuple("linear_attention" if layer == "linear_attention" else "full_attention" for layer in layers)


def _draft_layers(top: _Keys) -> tuple[bool, ...]:
    """Whether each draft layer slides."""
    if top.get("layer_types") is None and top.get("use_sliding_window"):
        top.refuse("layer_types", "must say which layers slide when use_sliding_window is true")
    full = ["full_attention"] * top.integer("num_hidden_layers", most=_MOST_LAYERS)
    layers = top.choices("layer_types", full, ("sliding_attention", "full_attention"))
    return tuple(layer == "sliding_attention" for layer in layers)


def _window(top: _Keys) -> int:
    """Window of the sliding layers, in tokens; 0 where use_sliding_window switches it off."""
    use = top.get("use_sliding_window")
    if use is None:
        top.refuse("use_sliding_window", "a drafter with sliding layers must state it")
    return top.integer("sliding_window") if use else 0


def _rope(keys: _Keys) -> tuple[float, dict[str, Any]]:
    """Base of rope, and its other parameters from whichever place holds them."""
    places = [values for name in ("rope_scaling", "rope_parameters") if (values := keys.nested(name))]
    kinds = [
        values.get("rope_type", values.get("type", "default")) for values in places
    ]  # `type` is the older spelling
    if kinds[1:] and kinds[0] != kinds[1]:
        keys.refuse("rope_scaling", "rope_parameters names another type of rope; keep one of them")
    scaling = {key: value for values in places for key, value in values.items()} | {"rope_type": (*kinds, "default")[0]}
    theta = _Keys(keys.place, scaling, {"rope_theta": keys.get("rope_theta")}).number("rope_theta")
    return theta, scaling


def _yarn(rope: _Keys, top: _Keys) -> dict[str, Any]:
    """YaRN fields of a DrafterConfig (Peng et al. 2023, arXiv 2309.00071); empty for plain rope."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind != "yarn":
        rope.refuse("rope_type", "only default and yarn are supported")
    rope.check_neutral({"mscale": (), "mscale_all_dim": (), "truncate": (True,)})
    factor = rope.number("factor")
    temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "yarn_factor": factor,
        "yarn_original_positions": rope.integer(
            "original_max_position_embeddings", default=top.integer("max_position_embeddings")
        ),
        "yarn_beta_fast": rope.number("beta_fast", 32.0),
        "yarn_beta_slow": rope.number("beta_slow", 1.0),
        "yarn_attention_factor": rope.number("attention_factor", temperature),
    }


def _taps(keys: _Keys, draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """Target layers that feed the drafter; the default is that of z-lab's dflash 0.1.0, banker's rounding included."""
    if keys.get("target_layer_ids") is not None:
        return keys.integers("target_layer_ids")
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + index * (target_layers - 4) / (draft_layers - 1)) for index in range(draft_layers))
