"""Configurations in every dialect read alike; what would change the mathematics is an error that names the key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from sources import GOLDENS

from convert.hf_config import parse_drafter, parse_target, parse_weaver, stop_tokens
from tfm_jax.errors import TfmError


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / name / "config.json").read_text())


HYBRID, DENSE, VISUAL = read("qwen3_5_untied"), read("qwen3_untied"), read("qwen3_5_vl_tied")
DRAFTER, SLIDING = read("dflash_on_qwen3_5_untied"), read("tfm/loop_qwen3_5/drafter")
FULL_DRAFTER = DRAFTER | {"dflash_config": {"mask_token_id": 511}}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def merge(values: dict[str, Any], place: str, **changes: object) -> dict[str, Any]:
    """Changes in a nested object."""
    return values | {place: values[place] | changes}


def test_hybrid_target() -> None:
    config = parse_target(HYBRID, "config.json", has_head=True)
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert (config.heads, config.kv_heads, config.head_dim, config.rotary_dim) == (4, 2, 32, 8)
    assert (config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.conv_width) == (
        2,
        6,
        16,
        16,
        4,
    )
    assert (config.rope_theta, config.norm_eps, config.tied_embeddings) == (1e7, 1e-6, False)
    assert config.hybrid


def test_dense_target_has_no_delta_sizes() -> None:
    config = parse_target(DENSE, "config.json", has_head=True)
    assert config.layer_types == ("full_attention",) * 8
    assert (config.rotary_dim, config.rope_theta, config.conv_channels, config.hybrid) == (32, 1e6, 0, False)


def test_the_top_level_does_not_override_the_text_model() -> None:
    noise = {"hidden_size": 7, "rope_theta": 3.0, "vocab_size": 9, "num_hidden_layers": 1}
    assert parse_target(VISUAL | noise, "c", has_head=False) == parse_target(VISUAL, "c", has_head=False)


@pytest.mark.parametrize(
    "dialect",
    [
        without(HYBRID, "layer_types"),
        without(HYBRID, "layer_types", "full_attention_interval"),
        without(HYBRID, "partial_rotary_factor") | {"rope_parameters": {"rope_theta": 10000000}},
        without(HYBRID, "rope_parameters") | {"rope_theta": 10000000},
        without(HYBRID, "rope_parameters")
        | {"rope_theta": 10000000, "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}},
        HYBRID | {"output_gate_type": "swish", "hidden_act": "silu", "model_type": "qwen3_5"},
        {"text_config": HYBRID, "model_type": "qwen3_5", "tie_word_embeddings": False},
        {"text_config": without(HYBRID, "model_type", "tie_word_embeddings"), "model_type": "qwen3_5"},
    ],
)
def test_dialects_of_a_target_read_alike(dialect: dict[str, Any]) -> None:
    assert parse_target(dialect, "c", has_head=True) == parse_target(HYBRID, "c", has_head=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (without(HYBRID, "rope_parameters"), "c: rope_theta is absent"),
        (HYBRID | {"rope_parameters": {"rope_theta": 1e7, "rope_type": "llama3"}}, "rope_type is 'llama3'"),
        (DENSE | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is .* another type of rope"),
        (DENSE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope_type is 'yarn'"),
        (without(HYBRID, "head_dim"), "head_dim is absent"),
        (HYBRID | {"head_dim": "32"}, "head_dim is '32' but must be a whole number"),
        (HYBRID | {"vocab_size": True}, "vocab_size is True"),
        (HYBRID | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (HYBRID | {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        (merge(HYBRID, "rope_parameters", partial_rotary_factor=1e308), r"factor is 1e\+308 .* number up to 1\."),
        (HYBRID | {"num_key_value_heads": 3}, "multiple of kv_heads"),
        (HYBRID | {"layer_types": ["full_attention"]}, "layer_types is .* for each of 8 layers"),
        (HYBRID | {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        (HYBRID | {"layer_types": 8}, "layer_types is 8"),
        (HYBRID | {"hidden_act": "gelu"}, "hidden_act is 'gelu' but only 'silu'"),
        (HYBRID | {"attention_bias": True}, "attention_bias is True"),
        (HYBRID | {"attn_output_gate": False}, "attn_output_gate is False"),
        (HYBRID | {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid' but only 'silu' or 'swish'"),
        (HYBRID | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (HYBRID | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (HYBRID | {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        (HYBRID | {"model_type": ["qwen3"]}, "model_type is"),
        (HYBRID | {"dflash_config": {}}, "pass this directory as the drafter"),
        (HYBRID | {"format": 1}, "converted already"),
        (HYBRID | {"text_config": 3}, "text_config is 3 but must be an object"),
        (DENSE | {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is True"),
        (VISUAL | {"tie_word_embeddings": False}, "text_config says the opposite"),
        (HYBRID | {"tie_word_embeddings": True}, "True but the checkpoint holds a separate lm_head"),
    ],
)
def test_targets_that_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TfmError, match=words):
        parse_target(values, "c", has_head=True)


def test_stop_tokens_are_united() -> None:
    assert stop_tokens("c", {"eos_token_id": [248046, 248044]}, {"text_config": {"eos_token_id": 248044}}) == (
        248044,
        248046,
    )
    assert stop_tokens("c", {}, {"eos_token_id": 7, "text_config": {"eos_token_id": [9, 7]}}) == (7, 9)
    assert stop_tokens("c", {"eos_token_id": None}) == ()
    with pytest.raises(TfmError, match="eos_token_id is 'x'"):
        stop_tokens("c", {"eos_token_id": "x"})


def test_sliding_layers_are_causal_and_windowed_unless_told_otherwise() -> None:
    def shape_of(**changes: object) -> tuple:
        config = parse_drafter(SLIDING | changes, "c", target_layers=8)
        return config.layer_causal, config.layer_windows

    nested = SLIDING["dflash_config"]
    assert shape_of() == ((True, False), (32, 0))
    assert shape_of(use_sliding_window=False) == ((True, False), (0, 0))
    assert shape_of(is_causal=False) == ((False, False), (32, 0))
    assert shape_of(dflash_config=nested | {"causal": True}) == ((True, True), (32, 0))
    assert shape_of(dflash_config=nested | {"causal": True}, is_causal=False) == ((False, False), (32, 0))


@pytest.mark.parametrize(
    "dialect",
    [
        without(DRAFTER, "dflash_config") | DRAFTER["dflash_config"],
        without(DRAFTER, "block_size") | {"dflash_config": DRAFTER["dflash_config"] | {"block_size": 8}},
        DRAFTER | {"block_size": 99, "dflash_config": DRAFTER["dflash_config"] | {"block_size": 8}},
        without(DRAFTER, "rope_parameters") | {"rope_theta": 10000000.0, "rope_scaling": None},
        without(DRAFTER, "layer_types", "num_target_layers", "use_sliding_window"),
        DRAFTER | {"tie_word_embeddings": False, "draft_vocab_size": 512, "final_logit_softcapping": None},
    ],
)
def test_dialects_of_a_drafter_read_alike(dialect: dict[str, Any]) -> None:
    assert parse_drafter(dialect, "c", target_layers=8) == parse_drafter(DRAFTER, "c", target_layers=8)


SIZES = {
    "attention_bias": False, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "vocab_size": 512,
}  # fmt: skip
SPECFORGE = SIZES | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
    "block_size": 8, "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 3, 5], "projector_type": "dflash"},
    "layer_types": ["full_attention"] * 2, "max_window_layers": 2, "model_type": "qwen3", "num_target_layers": 8,
    "rope_scaling": None, "rope_theta": 10000000, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
MODELOPT = SIZES | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "torch_dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 3, 5], "causal": False},
    "rope_theta": 10000000.0, "rope_scaling": None, "tie_word_embeddings": False, "num_target_layers": 8,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "model_type": "speculator_model",
    "block_size": 8, "draft_vocab_size": 512, "mask_token_id": 511, "aux_hidden_state_layer_ids": [2, 4, 6],
    "target_hidden_size": None, "sliding_window_non_causal": False, "sample_from_anchor": False,
    "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 7}]},
    "transformer_layer_config": SIZES | {
        "model_type": "qwen3", "layer_types": ["full_attention"] * 2, "use_sliding_window": False,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    },
}  # fmt: skip


@pytest.mark.parametrize("dialect", [SPECFORGE, MODELOPT, SPECULATORS], ids=["SpecForge", "ModelOpt", "speculators"])
def test_every_trainers_drafter_reads_alike(dialect: dict[str, Any]) -> None:
    assert parse_drafter(dialect, "c", target_layers=8) == parse_drafter(DRAFTER, "c", target_layers=8)


@pytest.mark.parametrize(
    ("values", "causal", "windows"),
    [
        (merge(MODELOPT, "dflash_config", use_swa=True, swa_window_size=64), (False, False), (64, 64)),
        (merge(MODELOPT, "dflash_config", use_swa=True, causal=True) | {"sliding_window": 64}, (True, True), (64, 64)),
        (merge(MODELOPT, "dflash_config", use_swa=True, causal=None) | {"sliding_window": 8}, (False, False), (8, 8)),
        (
            merge(MODELOPT, "dflash_config", use_swa=True, swa_window_size=16, causal=None)
            | {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False},
            (True, False),
            (16, 0),
        ),
        (
            SPECULATORS
            | {"layer_types": ["full_attention", "sliding_attention"]}
            | {"use_sliding_window": True, "sliding_window": 128},
            (False, True),
            (0, 128),
        ),
        (
            SPECULATORS
            | {"layer_types": ["sliding_attention"] * 2, "sliding_window_non_causal": True}
            | {"use_sliding_window": True, "sliding_window": 128},
            (False, False),
            (128, 128),
        ),
    ],
    ids=["ModelOpt", "top-level window", "MiMo", "typed", "speculators", "bidirectional"],
)
def test_sliding_windows_of_every_trainer(values: dict[str, Any], causal: tuple, windows: tuple) -> None:
    config = parse_drafter(values, "c", target_layers=8)
    assert (config.layer_causal, config.layer_windows) == (causal, windows)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (merge(SPECFORGE, "dflash_config", shift_label=True), "shift_label is True .* slot 0 predicts"),
        (merge(SPECFORGE, "dflash_config", projector_type="domino"), "projector_type is 'domino' .* heads on top"),
        (merge(SPECFORGE, "dflash_config", projector_type="dspark", markov_rank=256), "projector_type is 'dspark'"),
        (SPECFORGE | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}, "DSparkModel.* slot 0 predicts"),
        (SPECFORGE | {"markov_rank": 0, "block_size": 7}, "markov_rank is 0 .* slot 0 predicts"),
        (SPECFORGE | {"architectures": 3}, "architectures is 3 but must be a list of strings"),
        (SPECFORGE | {"architectures": ["DFlash2DraftModel"]}, "DFlash 2 drafters are not implemented"),
        (SPECFORGE | {"architectures": ["LiLiCorrDraftModel"]}, "only DFlashDraftModel and DFlashSpeculator"),
        (SPECFORGE | {"is_neox_style": False}, "is_neox_style is False"),
        (merge(MODELOPT, "dflash_config", attention_sink_bias=True), "attention_sink_bias is True .* attention sinks"),
        (MODELOPT | {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is True"),
        (merge(MODELOPT, "dflash_config", use_swa=True, swa_window_size=4), "use_swa .* 4 tokens .* a block of 8"),
        (
            merge(MODELOPT, "dflash_config", use_swa=True, swa_window_size=64) | {"sliding_window": 32},
            "swa_window_size is 64 but sliding_window is 32",
        ),
        (merge(MODELOPT, "dflash_config", use_swa=True), "sliding_window is absent"),
        (merge(MODELOPT, "dflash_config", causal="no"), "causal is 'no' but must be true or false"),
        (MODELOPT | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_type is 'llama3'"),
        (SPECULATORS | {"sample_from_anchor": True}, "sample_from_anchor is True .* slot 0 predicts"),
        (
            merge(SPECULATORS, "speculators_config", proposal_methods=[{"speculative_tokens": 8}]),
            "speculative_tokens is 8 .* 8 slots",
        ),
        (SPECULATORS | {"draft_vocab_size": 64}, "draft_vocab_size is 64 .* d2t"),
        (SPECULATORS | {"target_hidden_size": 128}, "target_hidden_size is 128"),
        (SPECULATORS | {"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3' but only 'dflash'"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is absent"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [0, 4]}, r"\[0, 4\] but the embedding as a feature"),
        (merge(SPECULATORS, "transformer_layer_config", model_type="llama"), "model_type is 'llama'"),
        (merge(SPECULATORS, "transformer_layer_config", rope_parameters=None), "rope_theta is absent"),
    ],
)
def test_other_speculators_of_these_trainers_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TfmError, match=words):
        parse_drafter(values, "c", target_layers=8)


@pytest.mark.parametrize(
    ("draft_layers", "target_layers", "taps"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 32, (1, 8, 15, 22, 29)),
        (5, 64, (1, 16, 31, 46, 61)),
        (1, 36, (18,)),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(draft_layers: int, target_layers: int, taps: tuple) -> None:
    values = without(FULL_DRAFTER, "layer_types", "num_target_layers") | {"num_hidden_layers": draft_layers}
    assert parse_drafter(values, "c", target_layers=target_layers).target_layers == taps


def test_yarn() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
    config = parse_drafter(DRAFTER | {"rope_parameters": rope}, "c", target_layers=8)
    assert (config.rope_theta, config.yarn_factor, config.yarn_original_positions) == (1e6, 4.0, 128)
    assert (config.yarn_beta_fast, config.yarn_beta_slow) == (32.0, 1.0)
    assert config.yarn_attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **without(rope, "rope_type", "rope_theta")}}
    assert parse_drafter(without(DRAFTER, "rope_parameters") | old, "c", target_layers=8) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | {"conv_kernel_size": 2}},
            "conv_kernel_size is 2 .* DFlash 2",
        ),
        (DRAFTER | {"selector_rank": 256}, "selector_rank is 256 .* DFlash 2 drafters are not implemented"),
        (DRAFTER | {"shift_label": True}, "shift_label is True"),
        (DRAFTER | {"sample_from_anchor": True}, "sample_from_anchor is True"),
        (DRAFTER | {"input_embedding_scale": 8.0}, "input_embedding_scale is 8.0"),
        (DRAFTER | {"draft_vocab_size": 64}, "draft_vocab_size is 64"),
        (DRAFTER | {"num_target_layers": 9}, "num_target_layers is 9"),
        (DRAFTER | {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        (DRAFTER | {"block_size": 1}, "block_size is 1"),
        (DRAFTER | {"model_type": "llama"}, "model_type is 'llama'"),
        (DRAFTER | {"rope_parameters": {}}, "rope_theta is absent"),
        (DRAFTER | {"rope_parameters": {"rope_theta": 1, "rope_type": "longrope"}}, "rope_type is 'longrope'"),
        (DRAFTER | {"rope_parameters": {"rope_theta": 1, "rope_type": "yarn"}}, "factor is absent"),
        (DRAFTER | {"layer_types": None, "use_sliding_window": True}, "layer_types is absent"),
        (without(SLIDING, "use_sliding_window"), "use_sliding_window is absent"),
        (SLIDING | {"sliding_window": None}, "sliding_window is absent"),
        (DRAFTER | {"dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, "3"]}}, "target_layer_ids is"),
        (HYBRID, "mask_token_id is absent"),
    ],
)
def test_drafters_that_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TfmError, match=words):
        parse_drafter(values, "c", target_layers=8)


WEAVER = {
    "d_model": 64,
    "d_embed": 64,
    "d_rank": 48,
    "num_layers": 1,
    "num_heads": 4,
    "mlp_dim": 64,
    "K": 15,
    "candidate_pool_size": 48,
}
W1_NAMES, W2_NAMES = ("pos_emb",), ("blocks.0.gate_up_proj.weight",)


def test_the_tensors_tell_the_generation_of_a_weaver() -> None:
    first = parse_weaver({"config": WEAVER}, W1_NAMES, "w.pth")
    second = parse_weaver({"config": WEAVER | {"rope_base": 500.0, "activation": "swiglu"}}, W2_NAMES, "w.pth")
    assert (first.generation, first.rope_base) == ("w1", 0.0)
    assert (second.generation, second.rope_base) == ("w2", 500.0)
    with pytest.raises(TfmError, match="is no Weaver"):
        parse_weaver({"config": WEAVER}, (), "w.pth")


@pytest.mark.parametrize(
    ("changes", "names", "words"),
    [
        ({"encoder_mode": 2}, W1_NAMES, "w.pth: encoder_mode is 2"),
        ({"score_head": 1}, W1_NAMES, "score_head is 1"),
        ({"activation": "swiglu"}, W1_NAMES, "activation is 'swiglu' but a W1 Weaver has gelu"),
        ({"activation": "relu", "rope_base": 1.0}, W2_NAMES, "activation is 'relu'"),
        ({}, W2_NAMES, "rope_base is absent"),
        ({"rope_base": -1.0}, W2_NAMES, "rope_base is -1.0"),
        ({"d_rank": 0}, W1_NAMES, "d_rank is 0"),
        ({"num_heads": 5}, W1_NAMES, "multiple of heads"),
        ({"num_layers": 1 << 30}, W1_NAMES, "num_layers is 1073741824"),
        ({"K": None}, W1_NAMES, "K is absent"),
    ],
)
def test_weavers_that_are_refused(changes: dict[str, Any], names: tuple[str, ...], words: str) -> None:
    with pytest.raises(TfmError, match=words):
        parse_weaver({"config": WEAVER | changes}, names, "w.pth")


def test_other_speculators_are_refused() -> None:
    with pytest.raises(TfmError, match="speculator_kind is 'eagle'"):
        parse_weaver({"config": WEAVER, "metadata": {"speculator_kind": "eagle"}}, W1_NAMES, "w.pth")
