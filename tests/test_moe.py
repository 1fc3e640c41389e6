"""Mixtures of experts: against golden arrays, against a loop over tokens and experts, and in both layouts on disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from goldens import GOLDENS, arrays, largest_difference, load_engine
from safetensors.numpy import save_file
from sources import array_files, read_safetensors
from test_models import GATE, LONG_GATE, check_state, prefilled, run, verify_chain

from convert.hf_config import parse_target
from convert.pipeline import convert_checkpoint
from tfm_jax._checkpoint_layout import target_shapes
from tfm_jax.config import TargetConfig
from tfm_jax.errors import TfmError
from tfm_jax.moe import MixtureOfExperts
from tfm_jax.presets import demo_trio

TARGETS = ["qwen3_next", "qwen3_5_moe"]

# The whole model


@pytest.mark.parametrize("name", TARGETS)
def test_whole_sequences_match(name: str) -> None:
    golden, engine = arrays(name), load_engine(name)
    # The greedy text begins with the prompt of the first three arrays; in a row of 150 both tests share a program.
    logits, hidden, outputs = run(engine, np.pad(golden["greedy_ids"], ((0, 0), (0, 150 - 41))))
    assert largest_difference(logits[:, :9], golden["logits"]) < GATE
    assert largest_difference(hidden[:, :9], golden["final_hidden"]) < GATE
    assert largest_difference(outputs[:, :, :9], golden["hidden_states"][1:]) < GATE
    assert largest_difference(logits[:, 8:41], golden["teacher_logits"]) < GATE
    logits, _, _ = run(engine, golden["long_input_ids"])
    assert largest_difference(logits[:, 142:], golden["long_logits_tail"]) < LONG_GATE
    assert largest_difference(logits[:, ::10], golden["long_logits_stride10"]) < LONG_GATE


@pytest.mark.parametrize("name", TARGETS)
def test_caches_steps_and_blocks_match(name: str) -> None:
    golden, engine = arrays(name), load_engine(name)
    tokens = golden["greedy_ids"]
    state = start = prefilled(engine, golden["input_ids"], padding=5)
    check_state(state, golden, "cache_after_prefill", caches=True)
    for step in range(16):
        logits, state = verify_chain(engine, tokens[:, 9 + step : 10 + step], state, 1)
        assert largest_difference(logits[:, 0], golden["cached_step_logits"][:, step + 1]) < GATE
    check_state(state, golden, "cache_after_16_steps", caches=False)
    logits, _ = verify_chain(engine, tokens[:, 9:17], start, 8)
    assert largest_difference(logits, golden["cached_block8_logits"]) < GATE


@pytest.mark.parametrize("name", TARGETS)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    golden, engine = arrays(name), load_engine(name)
    state = prefilled(engine, golden["input_ids"], padding=5)
    logits, state = verify_chain(engine, golden["rollback/block_ids"], state, int(golden["rollback/committed"]))
    assert largest_difference(logits, golden["rollback/block_logits"]) < GATE
    check_state(state, golden, "rollback/state_after_commit", caches=False)
    logits, _ = verify_chain(engine, golden["rollback/next_id"], state, 1)
    assert largest_difference(logits, golden["rollback/next_logits"]) < GATE
    assert largest_difference(logits, golden["rollback/next_logits_hf_crop_WRONG"]) > 1.0  # rejected tokens kept


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_matches(name: str) -> None:
    ids = arrays(name)["greedy_ids"][0].tolist()
    (generation,) = load_engine(name).generate([ids[:9]], method="ar", max_new_tokens=32, ignore_eos=True)
    assert list(generation.token_ids) == ids[9:]


# The layer


def make_layer(experts: int, chosen: int, *, normalise: bool = True) -> MixtureOfExperts:
    """A layer of random parameters; only the sizes of the MLP matter."""
    config = TargetConfig(
        family="qwen3_5", vocab_size=8, hidden_size=12, intermediate_size=10, layer_types=("full_attention",),
        heads=1, kv_heads=1, head_dim=8, rotary_dim=8, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
        max_positions=8, experts=experts, experts_per_token=chosen, expert_size=6, normalise_experts=normalise,
    )  # fmt: skip
    abstract = nnx.eval_shape(lambda: MixtureOfExperts(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda array: jnp.asarray(rng.standard_normal(array.shape) * array.shape[-2] ** -0.5, jnp.float32),
        nnx.to_pure_dict(nnx.state(abstract)),
    )
    return nnx.merge(nnx.graphdef(abstract), params)


def apply(layer: MixtureOfExperts, x: np.ndarray) -> jax.Array:
    return jax.jit(lambda x: layer(x[None])[0])(x.astype(np.float32))


def swiglu(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ gate_up, 2)
    return (gate / (1 + np.exp(-gate)) * up) @ down


def apply_slowly(layer: MixtureOfExperts, x: np.ndarray) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    kernels = jax.tree.map(lambda array: np.asarray(array, np.float64), nnx.to_pure_dict(nnx.state(layer)))
    experts, shared = kernels["experts"], kernels["shared"]
    output = np.zeros_like(x)
    for token, row in enumerate(x):
        scores = np.exp(row @ kernels["router"]["kernel"])
        probabilities = scores / scores.sum()
        best = np.argsort(-probabilities)[: layer.config.experts_per_token]
        total = probabilities[best].sum() if layer.config.normalise_experts else 1.0
        for expert in best:
            result = swiglu(row, experts["gate_up"]["kernel"][expert], experts["down"]["kernel"][expert])
            output[token] += probabilities[expert] / total * result
        gate = 1 / (1 + np.exp(-(row @ kernels["shared_gate"]["kernel"])))
        output[token] += gate * swiglu(row, shared["gate_up"]["kernel"], shared["down"]["kernel"])
    return output


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "normalise"),
    [(1, 8, 3, True), (2, 32, 8, False), (7, 8, 3, False), (5, 4, 4, True), (300, 6, 2, True)],
    ids=["gathered", "gathered, plain weights", "every expert", "all chosen", "several blocks"],
)
def test_layer_equals_a_loop(tokens: int, experts: int, chosen: int, normalise: bool) -> None:  # noqa: FBT001
    layer = make_layer(experts, chosen, normalise=normalise)
    x = np.random.default_rng(1).standard_normal((tokens, 12))
    assert largest_difference(apply(layer, x), apply_slowly(layer, x)) < 1e-5


def test_gathered_and_dense_products_agree() -> None:
    layer = make_layer(16, 4)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing = layer.route(x)
        return layer.experts.apply_chosen(x, routing), layer.experts.apply_every(x, routing)

    chosen, every = both(np.random.default_rng(2).standard_normal((9, 12), np.float32))
    assert largest_difference(chosen, np.asarray(every)) < 1e-6


def test_an_expert_leaves_tokens_of_others_alone() -> None:
    """Not even an overflow in an expert that a token did not choose reaches it."""
    layer = make_layer(4, 1)
    x = np.random.default_rng(3).standard_normal((20, 12))
    before = apply(layer, x)
    foreign = np.argmax(x @ np.asarray(layer.router.kernel[...]), axis=-1) != 2
    gate_up = np.array(layer.experts.gate_up.kernel[...])
    gate_up[2] *= 1e38
    layer.experts.gate_up.kernel.set_value(jnp.asarray(gate_up))
    after = apply(layer, x)
    assert 0 < foreign.sum() < 20
    np.testing.assert_array_equal(after[foreign], before[foreign])
    assert not np.isfinite(after[~foreign]).all()


# On disk


def rewrite(name: str, directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Copy of a golden directory with other tensors."""
    target = directory / name
    shutil.copytree(GOLDENS / name, target, ignore=shutil.ignore_patterns("*.npz", "*.safetensors"))
    kept = {n: a if is_recurrence(n) else a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}
    save_file({n: np.ascontiguousarray(a) for n, a in kept.items()}, target / "model.safetensors")
    return target


def is_recurrence(name: str) -> bool:
    """Whether the golden files hold this tensor in float32."""
    return name.endswith(("A_log", "linear_attn.norm.weight"))


def split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor an expert, as transformers 5 saves them."""
    result = {}
    for name, array in tensors.items():
        stem, fused, part = name.partition(".experts.")
        if not fused:
            result[name] = array
            continue
        for expert, matrix in enumerate(array):
            names = ("gate", "up") if part == "gate_up_proj" else ("down",)
            for piece, rows in zip(names, np.split(matrix, len(names)), strict=True):
                result[f"{stem}.experts.{expert}.{piece}_proj.weight"] = rows
    return result


def fuse_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inverse of `split_experts` for four experts."""
    result = {name: array for name, array in tensors.items() if ".experts." not in name}
    for stem in sorted({name.partition(".experts.")[0] for name in tensors.keys() - result.keys()}):
        parts = {
            part: [tensors[f"{stem}.experts.{expert}.{part}_proj.weight"] for expert in range(4)]
            for part in ("gate", "up", "down")
        }
        gate_up = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        result[f"{stem}.experts.gate_up_proj"] = np.stack(gate_up)
        result[f"{stem}.experts.down_proj"] = np.stack(parts["down"])
    return result


def test_both_layouts_of_experts_give_the_same_files(tmp_path: Path) -> None:
    for name, relay in (("qwen3_next", fuse_experts), ("qwen3_5_moe", split_experts)):
        tensors = read_safetensors(GOLDENS / name)
        other = relay(tensors)
        assert other.keys() != tensors.keys()
        convert_checkpoint(GOLDENS / name, tmp_path / f"{name}.published")
        convert_checkpoint(rewrite(name, tmp_path, other), tmp_path / f"{name}.other")
        assert array_files(tmp_path / f"{name}.published/target") == array_files(tmp_path / f"{name}.other/target")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = read_safetensors(GOLDENS / "qwen3_next")
    lost = "model.layers.2.mlp.experts.3.up_proj.weight"
    del tensors[lost]
    with pytest.raises(TfmError, match=rf"lacks the tensor {lost} of shape \(32, 64\)"):
        convert_checkpoint(rewrite("qwen3_next", tmp_path, tensors), tmp_path / "out")


# Configurations

PUBLISHED = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 1e7, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
NEXT_80B = PUBLISHED | {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10,
    "vocab_size": 151936, "intermediate_size": 5120, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
MOE_35B = PUBLISHED | {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
    "vocab_size": 248320,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "total", "active"),
    [(NEXT_80B, 80e9, 3e9), (MOE_35B, 35e9, 3e9), ({"text_config": MOE_35B, "model_type": "qwen3_5_moe"}, 35e9, 3e9)],
    ids=["Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "nested"],
)
def test_published_models_have_the_size_of_their_names(values: dict, total: float, active: float) -> None:
    config = parse_target(values, "c", has_head=True)
    sizes = {path: math.prod(shape) for path, shape in target_shapes(config).items()}
    experts = sum(size for path, size in sizes.items() if ".experts." in path)
    tables = sum(size for path, size in sizes.items() if path.startswith(("embed_tokens", "lm_head")))
    whole = sum(sizes.values())
    assert whole == pytest.approx(total, rel=0.02)
    used = whole - tables - experts * (1 - config.experts_per_token / config.experts)
    assert used == pytest.approx(active, rel=0.25)


def test_checkpoints_older_than_mixtures_still_load() -> None:
    """Format 1 has no such fields in the shipped demo, nor in what earlier versions wrote."""
    file = Path(__file__).parent.parent / "tfm_jax" / "demo" / "config.json"
    values = json.loads(file.read_text())["target"]
    fields = {"experts", "experts_per_token", "expert_size", "normalise_experts"}
    assert fields.isdisjoint(values)
    assert TargetConfig.from_dict(values) == demo_trio().target
    mixture = parse_target(MOE_35B, "c", has_head=True)
    assert TargetConfig.from_dict(json.loads(json.dumps(mixture.to_dict()))) == mixture
    with pytest.raises(TfmError, match=r"lacks the keys \['norm_eps'\]"):
        TargetConfig.from_dict({key: value for key, value in values.items() if key != "norm_eps"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (MOE_35B | {"norm_topk_prob": False}, "norm_topk_prob is False but only True"),
        (NEXT_80B | {"norm_topk_prob": 1}, "norm_topk_prob is 1 but must be true or false"),
        (NEXT_80B | {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        (NEXT_80B | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (NEXT_80B | {"num_experts": 10**6}, "num_experts is 1000000"),
        (NEXT_80B | {"num_experts": 8}, r"experts_per_token \(10\) must be at most experts \(8\)"),
        (NEXT_80B | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (NEXT_80B | {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe' but only"),
        (NEXT_80B | {"model_type": "qwen3_5_text"}, "num_experts is 512 .* another model_type"),
    ],
)
def test_mixtures_that_are_refused(values: dict, words: str) -> None:
    with pytest.raises(TfmError, match=words):
        parse_target(values, "c", has_head=True)
    assert parse_target(NEXT_80B | {"norm_topk_prob": False}, "c", has_head=True).normalise_experts is False
