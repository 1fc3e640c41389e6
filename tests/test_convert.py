"""Conversion of Hugging Face and Weaver checkpoints gives exactly the stored values."""

from __future__ import annotations

import json
import re
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from sources import GOLDENS, HYBRID, LOOP, TRIO, array_files, read_safetensors, read_storages

from convert.pipeline import convert_checkpoint, read_sources
from convert.safetensors_io import SafetensorsReader
from convert.streaming import CountingReader, count_non_finite, read_ahead
from convert.transforms import Tensor, keep, transpose
from tfm_jax._checkpoint_layout import flatten
from tfm_jax.checkpoint import load_checkpoint
from tfm_jax.errors import TfmError

TIED_VL = GOLDENS / "qwen3_5_vl_tied"


def convert_flat(directory: Path, **sources: Any) -> dict[str, dict[str, np.ndarray]]:  # noqa: ANN401
    """Arrays of a float32 conversion by model and dotted path."""
    convert_checkpoint(out=directory / "out", **sources)
    loaded = load_checkpoint(directory / "out", "float32")
    trees = {"target": loaded.target, "drafter": loaded.drafter, "weaver": loaded.weaver}
    return {name: {path: np.asarray(a) for path, a in flatten(tree).items()} for name, tree in trees.items() if tree}


def take_columns(kernel: np.ndarray, *widths: int) -> Iterator[np.ndarray]:
    """Consecutive column blocks of an [in, out] kernel, each in torch's [out, in]."""
    assert kernel.shape[1] == sum(widths)
    for last, width in zip(np.cumsum(widths), widths, strict=True):
        yield kernel[:, last - width : last].T


# Values


@pytest.mark.parametrize(
    "name", ["qwen3_5_untied", "qwen3_5_vl_tied", "qwen3_untied", "qwen3_tied", "qwen3_next", "qwen3_5_moe"]
)
def test_target_values(name: str, tmp_path: Path) -> None:
    config = json.loads((GOLDENS / name / "config.json").read_text())
    config = config.get("text_config", config)
    source = read_safetensors(GOLDENS / name)
    arrays = convert_flat(tmp_path, target=GOLDENS / name, dtype="float32")["target"]
    prefix = "model.language_model." if name == "qwen3_5_vl_tied" else "model."
    equal = np.testing.assert_array_equal
    equal(arrays["embed_tokens.embedding"], source[f"{prefix}embed_tokens.weight"])
    equal(arrays["norm.scale"], source[f"{prefix}norm.weight"])
    if config["tie_word_embeddings"]:
        assert "lm_head.kernel" not in arrays
    else:
        equal(arrays["lm_head.kernel"].T, source["lm_head.weight"])
    for layer, kind in enumerate(config["layer_types"]):
        ours = {path.removeprefix(f"layers.{layer}."): a for path, a in arrays.items() if f"layers.{layer}." in path}
        theirs = {n.removeprefix(f"{prefix}layers.{layer}."): a for n, a in source.items() if n.startswith(prefix)}
        if "num_experts" in config:
            check_mixture(ours, theirs, config)
        else:
            check_block(ours, theirs, config["intermediate_size"])
        if kind == "linear_attention":
            check_delta(ours, theirs, config)
        else:
            check_attention(ours, theirs, config)


def check_block(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], inner: int) -> None:
    equal = np.testing.assert_array_equal
    equal(ours["input_norm.scale"], theirs["input_layernorm.weight"])
    equal(ours["post_norm.scale"], theirs["post_attention_layernorm.weight"])
    for part, block in zip(("gate", "up"), take_columns(ours["mlp.gate_up.kernel"], inner, inner), strict=True):
        equal(block, theirs[f"mlp.{part}_proj.weight"])
    equal(ours["mlp.down.kernel"].T, theirs["mlp.down_proj.weight"])


def check_mixture(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], config: dict[str, int]) -> None:
    equal = np.testing.assert_array_equal
    shared = {name.replace("mlp.shared.", "mlp."): array for name, array in ours.items()}
    shared_source = {name.replace("mlp.shared_expert.", "mlp."): array for name, array in theirs.items()}
    check_block(shared, shared_source, config["shared_expert_intermediate_size"])
    equal(ours["mlp.shared_gate.kernel"].T, theirs["mlp.shared_expert_gate.weight"])
    equal(ours["mlp.router.kernel"].T, theirs["mlp.gate.weight"])
    inner = config["moe_intermediate_size"]
    for expert in range(config["num_experts"]):
        gate, up = take_columns(ours["mlp.experts.gate_up.kernel"][expert], inner, inner)
        parts = {"gate": gate, "up": up, "down": ours["mlp.experts.down.kernel"][expert].T}
        for part, array in parts.items():
            if config["model_type"] == "qwen3_next":
                equal(array, theirs[f"mlp.experts.{expert}.{part}_proj.weight"])
            elif part == "down":
                equal(array, theirs["mlp.experts.down_proj"][expert])
            else:
                first = inner * (part == "up")
                equal(array, theirs["mlp.experts.gate_up_proj"][expert, first : first + inner])


def ungroup(theirs: dict[str, np.ndarray], config: dict[str, int]) -> dict[str, np.ndarray]:
    """Qwen3-Next's projections, whose rows are grouped by key head, as the four separate ones of Qwen3.5."""
    key_heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    ratio, value = config["linear_num_value_heads"] // key_heads, config["linear_value_head_dim"]
    rows = {part: [] for part in "qkvzba"}
    for head in range(key_heads):
        fused = iter(theirs["linear_attn.in_proj_qkvz.weight"][head * (2 * key + 2 * ratio * value) :])
        for part, count in {"q": key, "k": key, "v": ratio * value, "z": ratio * value}.items():
            rows[part] += [next(fused) for _ in range(count)]
        gates = iter(theirs["linear_attn.in_proj_ba.weight"][head * 2 * ratio :])
        for part in "ba":
            rows[part] += [next(gates) for _ in range(ratio)]
    rows["qkv"] = rows["q"] + rows["k"] + rows["v"]
    return {f"linear_attn.in_proj_{part}.weight": np.stack(rows[part]) for part in ("qkv", "z", "b", "a")}


def check_delta(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], config: dict[str, int]) -> None:
    equal = np.testing.assert_array_equal
    if config["model_type"] == "qwen3_next":
        theirs = theirs | ungroup(theirs, config)
    heads, value = config["linear_num_value_heads"], config["linear_num_value_heads"] * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value
    widths = {"qkv": channels, "z": value, "b": heads, "a": heads}
    blocks = take_columns(ours["mixer.in_proj.kernel"], *widths.values())
    for part, block in zip(widths, blocks, strict=True):
        equal(block, theirs[f"linear_attn.in_proj_{part}.weight"])
    for tap in range(config["linear_conv_kernel_dim"]):
        equal(ours["mixer.conv.kernel"][tap], theirs["linear_attn.conv1d.weight"][:, 0, tap])
    equal(ours["mixer.A_log"], theirs["linear_attn.A_log"])
    equal(ours["mixer.dt_bias"], theirs["linear_attn.dt_bias"])
    equal(ours["mixer.norm.scale"], theirs["linear_attn.norm.weight"])
    equal(ours["mixer.out.kernel"].T, theirs["linear_attn.out_proj.weight"])


def check_attention(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    equal = np.testing.assert_array_equal
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    gates = [heads * width] if config["model_type"] != "qwen3" else []
    blocks = take_columns(ours["mixer.qkv.kernel"], heads * width, *gates, kv_heads * width, kv_heads * width)
    query, *gate, key, value = blocks
    stride = width * (1 + len(gate))
    for head in range(heads):
        rows = theirs["self_attn.q_proj.weight"][head * stride : (head + 1) * stride]
        for part, block in enumerate((query, *gate)):
            equal(block[head * width : (head + 1) * width], rows[part * width : (part + 1) * width])
    equal(key, theirs["self_attn.k_proj.weight"])
    equal(value, theirs["self_attn.v_proj.weight"])
    equal(ours["mixer.q_norm.scale"], theirs["self_attn.q_norm.weight"])
    equal(ours["mixer.k_norm.scale"], theirs["self_attn.k_norm.weight"])
    equal(ours["mixer.out.kernel"].T, theirs["self_attn.o_proj.weight"])


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("qwen3_untied", "dflash_on_qwen3_untied"),
        ("qwen3_5_untied", "dflash_swa_on_qwen3_5_untied"),
        ("qwen3_5_untied", "tfm/loop_qwen3_5/drafter"),
    ],
)
def test_drafter_values(target: str, drafter: str, tmp_path: Path) -> None:
    source = read_safetensors(GOLDENS / drafter)
    arrays = convert_flat(tmp_path, target=GOLDENS / target, drafter=GOLDENS / drafter)["drafter"]
    equal = np.testing.assert_array_equal
    equal(arrays["fc.kernel"].T, source["fc.weight"])
    equal(arrays["hidden_norm.scale"], source["hidden_norm.weight"])
    equal(arrays["norm.scale"], source["norm.weight"])
    for layer in range(2):
        ours = {path.removeprefix(f"layers.{layer}."): a for path, a in arrays.items() if f"layers.{layer}." in path}
        theirs = {n.removeprefix(f"layers.{layer}."): a for n, a in source.items() if f"layers.{layer}." in n}
        check_block(ours, theirs, 96)
        key, value = take_columns(ours["kv.kernel"], 64, 64)
        equal(key, theirs["self_attn.k_proj.weight"])
        equal(value, theirs["self_attn.v_proj.weight"])
        equal(ours["q.kernel"].T, theirs["self_attn.q_proj.weight"])
        equal(ours["out.kernel"].T, theirs["self_attn.o_proj.weight"])
        equal(ours["q_norm.scale"], theirs["self_attn.q_norm.weight"])
        equal(ours["k_norm.scale"], theirs["self_attn.k_norm.weight"])


def test_weaver_values(tmp_path: Path) -> None:
    """Storage numbers follow from the order of the names, which the file's pickle lists in clear text."""
    arrays = convert_flat(tmp_path, **TRIO, dtype="float32")["weaver"]
    with zipfile.ZipFile(TRIO["weaver"]) as archive:
        pickled = archive.read("weaver/data.pkl")
    places = {name: pickled.index(name.encode()) for name in WEAVER_SHAPES}
    names = sorted(places, key=places.__getitem__)
    source = {n: s.reshape(WEAVER_SHAPES[n]) for n, s in zip(names, read_storages(TRIO["weaver"]), strict=True)}
    equal = np.testing.assert_array_equal
    for name in ("output_norm", "embed_norm", "out_norm", "blocks.0.norm_attn", "blocks.0.norm_mlp"):
        equal(arrays[f"{name}.scale"], source[f"{name}.weight"])
        equal(arrays[f"{name}.bias"], source[f"{name}.bias"])
    for name in ("token_in", "proposal_in", "blocks.0.fc1", "blocks.0.fc2"):
        equal(arrays[f"{name}.kernel"].T, source[f"{name}.weight"])
        equal(arrays[f"{name}.bias"], source[f"{name}.bias"])
    blocks = take_columns(arrays["blocks.0.qkv.kernel"], 48, 48, 48)
    for part, block in zip("qkv", blocks, strict=True):
        equal(block, source[f"blocks.0.{part}_proj.weight"])
    equal(arrays["blocks.0.out.kernel"].T, source["blocks.0.o_proj.weight"])
    equal(arrays["query_out.kernel"].T, source["lm_head_query_in.weight"])
    equal(arrays["pos_emb"], source["pos_emb"])
    assert sum(a.size for a in arrays.values()) == sum(a.size for a in source.values())


WEAVER_SHAPES = (
    {"pos_emb": (15, 48), "lm_head_query_in.weight": (64, 48)}
    | {f"{name}.{leaf}": (64,) for name in ("output_norm", "embed_norm") for leaf in ("weight", "bias")}
    | {f"{name}.weight": (48, 64) for name in ("token_in", "proposal_in")}
    | {f"{name}.bias": (48,) for name in ("token_in", "proposal_in", "out_norm")}
    | {"out_norm.weight": (48,)}
    | {f"blocks.0.{name}.{leaf}": (48,) for name in ("norm_attn", "norm_mlp") for leaf in ("weight", "bias")}
    | {f"blocks.0.{name}_proj.weight": (48, 48) for name in "qkvo"}
    | {"blocks.0.fc1.weight": (64, 48), "blocks.0.fc1.bias": (64,)}
    | {"blocks.0.fc2.weight": (48, 64), "blocks.0.fc2.bias": (48,)}
)


# Drafters under other names

DRAFTER = GOLDENS / "dflash_on_qwen3_5_untied"


def draft_arrays(directory: Path, tensors: dict[str, np.ndarray], layers: int = 2) -> dict[str, np.ndarray]:
    """Every parameter of the golden drafter's configuration over these tensors."""
    directory.mkdir()
    config = json.loads((DRAFTER / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / "model.safetensors")
    _, models = read_sources(HYBRID, directory)
    return {path: models["drafter"].make_parameter(path) for path in models["drafter"].rules}


def fuse_attention(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor for queries, keys and values."""
    stems = [f"layers.{layer}.self_attn" for layer in range(2)]
    parts = {stem: [tensors[f"{stem}.{part}_proj.weight"] for part in "qkv"] for stem in stems}
    fused = {f"{stem}.qkv_proj.weight": np.concatenate(arrays) for stem, arrays in parts.items()}
    return {name: a for name, a in tensors.items() if not re.search("[qkv]_proj", name)} | fused


def test_other_names_of_a_drafters_tensors_give_the_same_arrays(tmp_path: Path) -> None:
    source = read_safetensors(DRAFTER)
    renamed = {
        name.replace("hidden_norm", "encoder.output_norm_enc").replace("fc.", "encoder.fc."): array
        for name, array in source.items()
    }
    target = read_safetensors(HYBRID)
    copies = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    expected = draft_arrays(tmp_path / "plain", source)
    for name, tensors in {"renamed": renamed, "fused": fuse_attention(source), "copies": source | copies}.items():
        assert name == "copies" or tensors.keys() != source.keys()
        np.testing.assert_equal(draft_arrays(tmp_path / name, tensors), expected)
    one = {name: array for name, array in source.items() if "layers.1." not in name}
    middle = {name.replace("layers.0.", "midlayer."): array for name, array in one.items()}
    np.testing.assert_equal(
        draft_arrays(tmp_path / "middle", middle, layers=1), draft_arrays(tmp_path / "one", one, layers=1)
    )


def test_copies_of_the_targets_tables_are_counted(tmp_path: Path) -> None:
    tables = {"embed_tokens.weight": np.zeros((512, 64), np.float32), "lm_head.weight": np.zeros((512, 64), np.float32)}
    draft_arrays(tmp_path / "drafter", read_safetensors(DRAFTER) | tables)
    _, models = read_sources(HYBRID, tmp_path / "drafter")
    assert models["drafter"].skipped == {"embed_tokens": 1, "lm_head": 1}


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("d2t", (64,), "reduced draft vocabulary"),
        ("mask_embedding", (64,), "a mask embedding outside the target's table"),
        ("layers.0.self_attn.attention_sink_bias", (4,), "attention sinks"),
        ("layers.1.self_attn.g_proj.weight", (64, 64), "Laguna"),
        ("aux_hidden_norms.0.weight", (64,), "Laguna"),
        ("layers.0.mlp_conv.base_kernel", (2, 2, 64), "DFlash 2"),
        ("candidate_selector.predecessor_codebook", (512, 8), "DFlash 2"),
        ("markov_head.markov_w1.weight", (512, 8), "heads on top"),
        ("prefix_gru.weight_ih_l0", (24, 64), "heads on top"),
        ("layers.0.self_attn.q_proj.bias", (128,), "no rule reads it"),
    ],
)
def test_tensors_that_make_another_model_are_refused(
    name: str, shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TfmError, match=rf"model\.safetensors: .*{re.escape(name)} .*{words}"):
        draft_arrays(tmp_path / "drafter", read_safetensors(DRAFTER) | {name: np.zeros(shape, np.float32)})


# Files and bits


def test_bf16_bits_are_kept_and_the_recurrence_is_float32(tmp_path: Path) -> None:
    """The stored type of every array, and the stored bits of one, straight from the array files."""
    report = convert_checkpoint(out=tmp_path / "out", **TRIO)
    headers = {file.parent.name: json.loads(file.read_text()) for file in tmp_path.rglob("layers.0/*/zarr.json")}
    kept = {name for name, header in headers.items() if header["data_type"] == "float32"}
    assert kept == {"mixer.A_log", "mixer.dt_bias", "mixer.norm.scale"}
    stored = np.fromfile(tmp_path / "out/target/embed_tokens/embedding/c/0/0", "<u2")
    source = read_safetensors(HYBRID)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(stored[: source.size], (source.view(np.uint32) >> 16).ravel())
    assert report.parameters == sum(
        a.size for d in (HYBRID, TRIO["drafter"]) for a in read_safetensors(d).values()
    ) + sum(int(np.prod(shape)) for shape in WEAVER_SHAPES.values())
    assert report.skipped == {}


def write_bf16(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file of bfloat16 bits, from its description: 8-byte length, JSON header, values."""
    header, end = {}, 0
    for name, bits in tensors.items():
        start, end = end, end + 2 * bits.size
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for bits in tensors.values():
            stream.write(bits.tobytes())


@pytest.fixture
def every_pattern(tmp_path: Path) -> Path:
    """A target whose embedding holds the 32,768 bfloat16 bits without a sign, and its head those with one."""
    directory = tmp_path / "hf"
    directory.mkdir()
    shutil.copyfile(HYBRID / "config.json", directory / "config.json")
    tensors = {name: (array.view(np.uint32) >> 16).astype("<u2") for name, array in read_safetensors(HYBRID).items()}
    tensors["model.embed_tokens.weight"] = np.arange(1 << 15, dtype="<u2").reshape(512, 64)
    tensors["lm_head.weight"] = np.arange(1 << 15, 1 << 16, dtype="<u2").reshape(512, 64)
    write_bf16(directory / "model.safetensors", tensors)
    return directory


def test_every_bf16_bit_pattern_passes_unchanged(every_pattern: Path, tmp_path: Path) -> None:
    """Denormal numbers, infinities and the payloads of NaN too; the 128 of each sign that are not finite count."""
    report = convert_checkpoint(every_pattern, tmp_path / "out")
    embedding, head = (
        np.fromfile(tmp_path / "out/target" / name / "c/0/0", "<u2")[: 1 << 15]
        for name in ("embed_tokens/embedding", "lm_head/kernel")
    )
    np.testing.assert_array_equal(embedding, np.arange(1 << 15))
    np.testing.assert_array_equal(head.reshape(64, 512).T.ravel(), np.arange(1 << 15, 1 << 16))
    assert report.non_finite == {"model.embed_tokens.weight": 128, "lm_head.weight": 128}


def test_strict_keeps_nothing_that_is_not_finite(every_pattern: Path, tmp_path: Path) -> None:
    with pytest.raises(TfmError, match=r"model\.embed_tokens\.weight holds 128 NaN or infinite values"):
        convert_checkpoint(every_pattern, tmp_path / "out", strict=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_strict_remembers_what_an_earlier_run_has_seen(every_pattern: Path, tmp_path: Path) -> None:
    def interrupt(done: int, _: int) -> None:
        if done > 1 << 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(every_pattern, tmp_path / "out", progress=interrupt)
    shutil.copytree(tmp_path / "out.partial", tmp_path / "again.partial")
    with pytest.raises(TfmError, match=r"model\.embed_tokens\.weight holds 128"):
        convert_checkpoint(every_pattern, tmp_path / "out", strict=True)
    report = convert_checkpoint(every_pattern, tmp_path / "again")
    assert report.resumed > 0
    assert report.non_finite == {"model.embed_tokens.weight": 128, "lm_head.weight": 128}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_non_finite_values_are_counted_in_every_type(dtype: type) -> None:
    values = np.zeros(200_000, dtype)
    values[[0, 65_535, 65_536, 199_999]] = [np.nan, np.inf, -np.inf, -np.nan]
    values[1] = np.finfo(np.float16).max  # the largest finite number of the smallest type
    assert count_non_finite(values) == 4


def test_the_recurrence_keeps_float32_bits_that_bfloat16_has_not(tmp_path: Path) -> None:
    source = read_safetensors(HYBRID)
    for name in ("A_log", "norm.weight", "dt_bias"):
        size = source[f"model.layers.0.linear_attn.{name}"].size
        odd = np.nextafter(np.linspace(1, 2, size, dtype=np.float32), np.float32(3))
        source[f"model.layers.0.linear_attn.{name}"] = odd
    directory = tmp_path / "hf"
    directory.mkdir()
    shutil.copyfile(HYBRID / "config.json", directory / "config.json")
    save_file(source, directory / "model.safetensors")
    convert_checkpoint(directory, tmp_path / "out")
    for name, stored in {"A_log": "A_log", "norm.weight": "norm.scale", "dt_bias": "dt_bias"}.items():
        expected = source[f"model.layers.0.linear_attn.{name}"]
        file = tmp_path / "out/target/layers.0" / f"mixer.{stored}" / "c/0"
        assert file.read_bytes()[:-20] == expected.tobytes()


def test_large_parameters_pass_in_blocks(tmp_path: Path) -> None:
    """An embedding of 256 MB never needs three blocks of 64 MB; a head needs itself and no second copy."""
    shapes = {"embed": (1 << 16, 2048), "head": (1 << 16, 2048)}
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [index << 28, (index + 1) << 28]}
        for index, (name, shape) in enumerate(shapes.items())
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + (2 << 28))  # zeros that take no space
    reader = CountingReader(SafetensorsReader(tmp_path))
    for transform, name, bound in ((keep, "embed", 3 << 26), (transpose, "head", (1 << 28) + (3 << 26))):
        tracemalloc.start()
        total = sum(block.size for block in read_ahead(transform([Tensor(reader, name)], {})))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == 1 << 27
        assert peak < bound


def test_float32_weights_round_to_nearest_even(tmp_path: Path) -> None:
    convert_checkpoint(out=tmp_path / "out", **TRIO)
    stored = np.fromfile(tmp_path / "out/weaver/pos_emb/c/0/0", "<u2")[: 15 * 48]
    exact = read_storages(TRIO["weaver"])[0].view(np.uint32)
    rounded = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
    np.testing.assert_array_equal(stored, rounded)


def test_repeated_conversion_is_byte_identical(tmp_path: Path) -> None:
    for name in ("first", "second"):
        convert_checkpoint(out=tmp_path / name, **TRIO)
    assert array_files(tmp_path / "first") == array_files(tmp_path / "second")


def test_visual_and_mtp_are_skipped_and_counted(tmp_path: Path) -> None:
    names = read_safetensors(TIED_VL)
    report = convert_checkpoint(TIED_VL, tmp_path / "out")
    assert report.skipped == {
        "model.visual": sum(name.startswith("model.visual.") for name in names),
        "mtp": sum(name.startswith("mtp.") for name in names),
    }
    text = sum(array.size for name, array in names.items() if name.startswith("model.language_model."))
    assert report.parameters == text
    assert load_checkpoint(tmp_path / "out").config.source == {"target": "qwen3_5_vl_tied"}


def test_fused_and_separate_weaver_projections_give_the_same_files(tmp_path: Path) -> None:
    for name in ("weaver_w1", "weaver_w1_fused_qkv"):
        convert_checkpoint(out=tmp_path / name, **TRIO | {"weaver": GOLDENS / "tfm" / f"{name}.pth"})
    assert array_files(tmp_path / "weaver_w1/weaver") == array_files(tmp_path / "weaver_w1_fused_qkv/weaver")


@pytest.mark.parametrize("name", ["weaver_w1_two_layers", "weaver_w1_short_block", "weaver_w2", "weaver_w2_two_layers"])
def test_every_weaver_maps(name: str) -> None:
    _, models = read_sources(HYBRID, LOOP / "drafter", GOLDENS / "tfm" / f"{name}.pth")
    weaver = models["weaver"]
    arrays = [weaver.make_parameter(path) for path in weaver.rules]
    assert sum(a.size for a in arrays) == sum(s.size for s in read_storages(GOLDENS / "tfm" / f"{name}.pth"))
