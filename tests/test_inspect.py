"""`tfm-convert inspect`: what it says holds for the loaded models, and for the published ones by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import save_file
from sources import GOLDENS, HYBRID, LOOP, TRIO, read_safetensors

from convert.cli import main
from convert.hf_config import parse_drafter
from convert.inspection import describe, estimate_memory, find_unknown_keys, inspect_checkpoint
from convert.pipeline import convert_checkpoint
from tfm_jax.checkpoint import load_checkpoint
from tfm_jax.config import DecodePlan, WeaverConfig
from tfm_jax.decode import empty_state
from tfm_jax.engine import Engine
from tfm_jax.errors import TfmError
from tfm_jax.state import KVCache

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
from _synthetic import Options, write_synthetic

ROOT = Path(__file__).parent.parent
WEAVER = GOLDENS / "tfm" / "weaver_w1.pth"


def size(tree: Any) -> int:  # noqa: ANN401  (any tree of arrays or of their shapes)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_memory_is_that_of_the_loaded_models_and_an_empty_state(tmp_path: Path) -> None:
    convert_checkpoint(out=tmp_path / "out", **TRIO)
    found = inspect_checkpoint(tmp_path / "out", context=200)
    engine = Engine(load_checkpoint(tmp_path / "out", "bfloat16"), jnp.dtype("bfloat16"))
    plan = DecodePlan(engine.models, "tfm", 8, sample=False)
    row = {name: jnp.zeros(1, jnp.int32) for name in ("limit", "seed", "stop_ids")} | {"temperature": jnp.zeros(1)}
    state = jax.eval_shape(lambda: empty_state(plan, capacity=200, dtype=jnp.bfloat16, **row))
    params = dict(engine.params)
    assert found.memory.weaver_tables == size(params.pop("tables"))
    assert found.memory.weights == size(params)
    caches = [layer for layer in state.target.layers if isinstance(layer, KVCache)]
    assert found.memory.kv_cache == size(caches) > 0
    assert found.memory.recurrent_state == size(state.target.layers) - size(caches) > 0
    assert found.memory.drafter_cache == size(state.drafter) > 0
    assert found.to_dict()["memory"]["total"] == sum(
        getattr(found.memory, name)
        for name in ("weights", "kv_cache", "recurrent_state", "drafter_cache", "weaver_tables")
    )
    assert [facts.parameters for facts in found.models] == [
        sum(leaf.size for leaf in jax.tree.leaves(params[name])) for name in ("target", "drafter", "weaver")
    ]
    assert found.source == {"target": "qwen3_5_untied", "drafter": "drafter", "weaver": "weaver.pth"}


def test_the_published_27b(tmp_path: Path) -> None:
    """26.9 B parameters, 64 KiB a token, 144 MiB of states; of the drafter 20 KiB a token."""
    write_synthetic(Options("qwen3.6-27b", tmp_path / "hf", headers_only=True))
    write_synthetic(Options("qwen3.6-27b-dflash", tmp_path / "dflash", headers_only=True))
    found = inspect_checkpoint(tmp_path / "hf", context=1000)
    (facts,) = found.models
    assert facts.parameters == 26_895_998_464
    assert facts.tensors == 851 + 333 + 15
    assert facts.skipped == {"model.visual": (333, 460_730_096), "mtp": (15, 424_699_392)}
    assert 2 * (facts.parameters + 460_730_096 + 424_699_392) == 55_562_855_904 < facts.bytes
    assert found.memory.kv_cache == 1000 * 64 * 1024
    assert found.memory.recurrent_state == 144 * 2**20 + 48 * 3 * 10_240 * 2
    # A_log and dt_bias of 48 heads and a norm of 128, in 48 layers, are float32: 2 bytes more each.
    assert found.memory.weights == 2 * facts.parameters + 2 * 48 * (48 + 48 + 128)
    drafter = inspect_checkpoint(tmp_path / "dflash", context=1000)
    assert drafter.memory.drafter_cache == 1000 * 20 * 1024
    assert drafter.models[0].parameters == 1_730_213_120
    weaver = WeaverConfig("w1", 5120, 5120, 2048, 1, 16, 2048, 15, 512)
    both = estimate_memory([(facts.config, facts.parameters), (weaver, 56_694_784)], 1000, "bfloat16")
    assert both.weaver_tables == 2 * 248_320 * 2048 * 2
    assert both.weights - found.memory.weights == 2 * 56_694_784


@pytest.mark.parametrize(
    ("path", "kind", "family", "tensors", "parts"),
    [
        (HYBRID, "target", "qwen3_5", 109, ("8 layers (6 recurrent)", "own head", "97 bfloat16, 12 float32")),
        (GOLDENS / "qwen3_5_vl_tied", "target", "qwen3_5", 91, ("tied head", "skipped: 21 tensors model.visual.*")),
        (GOLDENS / "qwen3_untied", "target", "qwen3", 91, ("8 layers (0 recurrent)",)),
        (GOLDENS / "qwen3_next", "target", "qwen3_5", 106, ("2 of 4 experts of 32",)),
        (LOOP / "drafter", "drafter", "dflash", 25, ("block 16, mask 511, taps 1, 3, 5", "2 layers (1 with a window)")),
        (WEAVER, "weaver", "w1", 24, ("rank 48, 4 heads, MLP 64, depth 15, pool 48",)),
        (GOLDENS / "tfm" / "weaver_w2.pth", "weaver", "w2", 21, ("21 float32",)),
    ],
)
def test_kinds(path: Path, kind: str, family: str, tensors: int, parts: tuple[str, ...]) -> None:
    found = inspect_checkpoint(path)
    (facts,) = found.models
    assert (found.kind, facts.model, facts.family, facts.tensors) == (kind, kind, family, tensors)
    for part in parts:
        assert part in describe(found)


def test_a_copy_of_the_embedding_counts_as_skipped(tmp_path: Path) -> None:
    source = GOLDENS / "qwen3_tied"
    tensors = read_safetensors(source)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    (facts,) = inspect_checkpoint(tmp_path).models
    assert facts.skipped == {"lm_head": (1, 512 * 64)}


# Keys


@pytest.fixture
def trio(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of target and drafter whose configurations a test may change."""
    target = shutil.copytree(HYBRID, tmp_path / "target", copy_function=shutil.copyfile)
    return target, shutil.copytree(LOOP / "drafter", tmp_path / "drafter", copy_function=shutil.copyfile)


def change(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_keys_that_nothing_reads_are_listed(trio: tuple[Path, Path]) -> None:
    target, drafter = trio
    assert inspect_checkpoint(target).models[0].unknown_keys == ()
    change(target, residual_scale=0.5, null_is_absent=None, vision_config={"depth": 3})
    rope = json.loads((target / "config.json").read_text())["rope_parameters"]
    change(target, rope_parameters=rope | {"twist": 2})
    change(drafter, dflash_config={"mask_token_id": 511, "target_layer_ids": [1, 3, 5], "lookahead": True})
    assert inspect_checkpoint(target).models[0].unknown_keys == ("rope_parameters.twist", "residual_scale")
    assert inspect_checkpoint(drafter).models[0].unknown_keys == ("dflash_config.lookahead", "golden_target")
    assert find_unknown_keys(target, drafter, WEAVER) == {
        target: ("rope_parameters.twist", "residual_scale"),
        drafter: ("dflash_config.lookahead", "golden_target"),
    }
    assert "keys not understood: rope_parameters.twist, residual_scale" in describe(inspect_checkpoint(target))


@pytest.mark.parametrize("name", ["qwen3_5_vl_tied", "qwen3_tied", "qwen3_next", "qwen3_5_moe"])
def test_the_keys_of_published_configurations_are_all_known(name: str) -> None:
    assert inspect_checkpoint(GOLDENS / name).models[0].unknown_keys == ()


def test_a_drafter_whose_taps_depend_on_an_unknown_target(trio: tuple[Path, Path]) -> None:
    _, drafter = trio
    values = json.loads((drafter / "config.json").read_text())
    del values["num_target_layers"]
    (drafter / "config.json").write_text(json.dumps(values))
    assert inspect_checkpoint(drafter).models[0].config == parse_drafter(values, "c", target_layers=8)
    change(drafter, dflash_config={"mask_token_id": 511})
    with pytest.raises(TfmError, match="target_layer_ids is absent but without num_target_layers"):
        inspect_checkpoint(drafter)


# Errors, and the command


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda out: (out / "target" / "norm" / "scale" / "zarr.json").unlink(),
            "target/norm is damaged or not readable",
        ),
        (lambda out: shutil.rmtree(out / "target" / "layers.1"), r"target/layers\.1 is damaged or not readable"),
        (lambda out: (out / "config.json").unlink(), r"config\.json is missing"),
        (lambda out: change(out, format=2), "format is 2 but this version reads format 1"),
    ],
)
def test_damaged_results_are_named(spoil: Any, words: str, tmp_path: Path) -> None:  # noqa: ANN401  (a lambda)
    shutil.copytree(ROOT / "tfm_jax" / "demo", tmp_path / "out", copy_function=shutil.copyfile)
    spoil(tmp_path / "out")
    with pytest.raises(TfmError, match=words):
        inspect_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([str(HYBRID), "--context", "0"], "context is 0; choose 1 to 512 tokens"),
        ([str(HYBRID), "--context", "513"], "context is 513; choose 1 to 512 tokens"),
        ([str(GOLDENS / "dflash2_on_qwen3_5_untied")], "DFlash 2 drafters are not implemented"),
        ([str(GOLDENS / "tfm" / "bad" / "malicious.pth")], "asks for io.open"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert error in captured.err


def test_json_needs_no_jax_and_says_what_the_text_says() -> None:
    program = (
        "import sys; from convert.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code if {'jax', 'orbax'}.isdisjoint(sys.modules) else 99)"
    )
    words = ["inspect", str(LOOP / "drafter"), "--context", "100", "--dtype", "float32", "--json"]
    run = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    values = json.loads(run.stdout)
    config = parse_drafter(json.loads((LOOP / "drafter" / "config.json").read_text()), "c", target_layers=8)
    (facts,) = values["models"]
    assert facts["config"] == json.loads(json.dumps(dataclasses.asdict(config)))
    assert facts["types"] == {"bfloat16": 25}
    assert facts["bytes"] == (LOOP / "drafter" / "model.safetensors").stat().st_size
    assert values["memory"] == {
        "context": 100, "dtype": "float32", "weights": 4 * 98_816, "kv_cache": 0, "recurrent_state": 0,
        "drafter_cache": 2 * 2 * 2 * 32 * 4 * 100, "weaver_tables": 0, "total": 4 * 98_816 + 2 * 2 * 2 * 32 * 4 * 100,
    }  # fmt: skip
