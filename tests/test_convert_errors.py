"""Everything that `tfm-convert` refuses: one error that names the file, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sources import GOLDENS, HYBRID, LOOP, array_files, read_safetensors

from convert.cli import main
from convert.pipeline import convert_checkpoint
from tfm_jax.checkpoint import load_checkpoint
from tfm_jax.errors import TfmError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def copy_target(directory: Path, changes: dict[str, np.ndarray | None], source: Path = HYBRID) -> Path:
    """Copy of a golden directory in one file, with tensors replaced, added or (None) removed."""
    target = shutil.copytree(
        source, directory / "hf", ignore=shutil.ignore_patterns("*.npz", "*.safetensors", "*.index*")
    )
    tensors = {n: a.astype(ml_dtypes.bfloat16) for n, a in read_safetensors(source).items()} | changes
    save_file({name: array for name, array in tensors.items() if array is not None}, target / "model.safetensors")
    return target


A_LOG = "model.layers.0.linear_attn.A_log"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({A_LOG: None}, rf"hf lacks the tensor {A_LOG} of shape \(6,\)"),
        ({A_LOG: np.zeros(7, np.float32)}, rf"model\.safetensors: {A_LOG} has shape \(7,\) .* \(6,\)"),
        (
            {"model.norm.bias": np.zeros(3, np.float32)},
            r"model\.safetensors: unknown tensor model\.norm\.bias of shape \(3,\)",
        ),
        ({A_LOG: np.zeros(6, np.int32)}, f"{A_LOG} is of type I32"),
        ({A_LOG: np.zeros(6, ml_dtypes.float8_e4m3fn)}, f"{A_LOG} is of type F8_E4M3, and fp8 is not supported"),
        ({"lm_head.weight": None}, "tie_word_embeddings is False but the checkpoint holds no lm_head"),
        (
            {"model.layers.0.linear_attn.conv1d.weight": np.zeros((160, 4, 1), np.float32)},
            r"has shape \(160, 4, 1\) .* \(160, 1, 4\)",
        ),
    ],
    ids=["missing", "misshapen", "unknown", "integers", "fp8", "no head", "conv layout of mlx"],
)
def test_tensors_must_be_the_expected_ones(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(TfmError, match=words):
        convert_checkpoint(copy_target(tmp_path, changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tied_target_may_store_a_copy_but_no_other_head(tmp_path: Path) -> None:
    embedding = read_safetensors(GOLDENS / "qwen3_tied")["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    copied = copy_target(tmp_path, {"lm_head.weight": embedding}, GOLDENS / "qwen3_tied")
    assert convert_checkpoint(copied, tmp_path / "out").skipped == {"lm_head": 1}
    assert "lm_head" not in load_checkpoint(tmp_path / "out").target
    shutil.rmtree(copied)
    other = copy_target(tmp_path, {"lm_head.weight": -embedding}, GOLDENS / "qwen3_tied")
    with pytest.raises(TfmError, match="tie_word_embeddings is True but the checkpoint holds a separate lm_head"):
        convert_checkpoint(other, tmp_path / "out2")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The dense golden in two shards and an index."""
    source = read_safetensors(GOLDENS / "qwen3_tied")
    target = tmp_path / "sharded"
    target.mkdir()
    shutil.copy(GOLDENS / "qwen3_tied" / "config.json", target)
    index = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(sorted(source))}
    for shard in sorted(set(index.values())):
        save_file({n: source[n].astype(ml_dtypes.bfloat16) for n in source if index[n] == shard}, target / shard)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return target


def edit_index(directory: Path, **changes: str) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))


def test_shards_give_what_one_file_gives(sharded: Path, tmp_path: Path) -> None:
    convert_checkpoint(sharded, tmp_path / "shards")
    (sharded / "model.safetensors.index.json").unlink()
    convert_checkpoint(sharded, tmp_path / "no_index")
    convert_checkpoint(GOLDENS / "qwen3_tied", tmp_path / "one")
    for name in ("shards", "no_index"):
        assert array_files(tmp_path / name / "target") == array_files(tmp_path / "one" / "target")


def spoil_duplicate(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()
    shutil.copy(directory / "model-00001-of-00002.safetensors", directory / "copy.safetensors")


def repeat_tensor(directory: Path) -> None:
    """The first tensor of one shard in the other, too."""
    first, second = (directory / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    name, array = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: array}, second)


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def lengthen(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])


def move_norm(directory: Path) -> None:
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    edit_index(directory, **{"model.norm.weight": next(s for s in index.values() if s != index["model.norm.weight"])})


def unlist_norm(directory: Path) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())["weight_map"]
    del index["model.norm.weight"]
    file.write_text(json.dumps({"weight_map": index}))


SPOILED = {
    "shard missing": (
        lambda d: (d / "model-00002-of-00002.safetensors").unlink(),
        "00002.safetensors is missing although",
    ),
    "shard truncated": (
        lambda d: cut(d / "model-00001-of-00002.safetensors", 5000),
        "00001-of-00002.safetensors is truncated",
    ),
    "header truncated": (
        lambda d: cut(d / "model-00001-of-00002.safetensors", 9),
        "00001-of-00002.safetensors is truncated",
    ),
    "shard empty": (
        lambda d: cut(d / "model-00001-of-00002.safetensors", 0),
        "00001-of-00002.safetensors is truncated",
    ),
    "header too long": (lambda d: lengthen(d / "model-00001-of-00002.safetensors"), "00002.safetensors is truncated"),
    "way out": (lambda d: edit_index(d, **{"model.norm.weight": "../x.safetensors"}), "names files outside its own"),
    "way out by root": (
        lambda d: edit_index(d, **{"model.norm.weight": "/etc/x.safetensors"}),
        "names files outside its own",
    ),
    "shard with a line break": (
        lambda d: edit_index(d, **{"model.norm.weight": "a\nb"}),
        "names files outside its own",
    ),
    "name with a line break": (lambda d: edit_index(d, **{"a\nb": "x.safetensors"}), r"names a tensor 'a\\nb'"),
    "deep index": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": ' + "[" * 100_000),
        "is no index of tensors .RecursionError",
    ),
    "endless index": (
        lambda d: os.truncate(d / "model.safetensors.index.json", 1 << 40),
        "1099511627776 bytes are more than",
    ),
    "wrong shard": (move_norm, r"says that model\.norm\.weight is in"),
    "unlisted": (unlist_norm, r"holds model\.norm\.weight, which .* does not list"),
    "no weight map": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "is no index of tensors"),
    "two files": (spoil_duplicate, "is in both .*copy.safetensors"),
    "two shards": (repeat_tensor, "is in both .*00001-of-00002.safetensors and .*00002-of-00002.safetensors"),
    "no file": (lambda d: [file.unlink() for file in d.glob("model*")], r"holds no \*\.safetensors file"),
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), r"config\.json cannot be read"),
    "list for config": (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds no JSON object"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_damaged_directories_are_named(sharded: Path, tmp_path: Path, spoiled: str) -> None:
    spoil, words = SPOILED[spoiled]
    spoil(sharded)
    with pytest.raises(TfmError, match=words):
        convert_checkpoint(sharded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 640}, "drafter does not fit the target: its vocab_size is 640, the target's is 512"),
        ({"num_target_layers": 9}, "num_target_layers is 9 but the target has 8 layers"),
        ({"dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 3, 8]}}, r"reads the layers \[8\]"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1, 3, 5]}}, "mask token 512 is outside"),
        ({"dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 3]}}, r"fc\.weight has shape \(64, 192\)"),
        ({"hidden_size": 128}, r"fc\.weight has shape \(64, 192\) .* \(128, 384\)"),
    ],
)
def test_drafter_must_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    drafter = shutil.copytree(LOOP / "drafter", tmp_path / "drafter", copy_function=shutil.copyfile)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(TfmError, match=words):
        convert_checkpoint(HYBRID, tmp_path / "out", drafter=drafter)


def test_drafter_of_another_width_does_not_fit(tmp_path: Path) -> None:
    shapes = {"fc.weight": (128, 384), "hidden_norm.weight": (128,), "norm.weight": (128,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {f"{layer}.{name}_layernorm.weight": (128,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (64, 128) for name in "kv"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (128, 128) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (32,) for name in "qk"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (96, 128) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (128, 96)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    config = json.loads((LOOP / "drafter" / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, drafter / "model.safetensors")
    with pytest.raises(TfmError, match="its hidden_size is 128, the target's is 64"):
        convert_checkpoint(HYBRID, tmp_path / "out", drafter=drafter)


def test_command_converts_and_carries_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = shutil.copytree(GOLDENS / "qwen3_tied", tmp_path / "hf", copy_function=shutil.copyfile)
    (target / "tokenizer.json").write_text('{"model": {}}')
    (target / "generation_config.json").write_text('{"eos_token_id": [509, 510]}')
    assert main(["convert", "--target", str(target), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert "parameters" in capsys.readouterr().out
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.config.stop_token_ids == (509, 510)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": {}}'
    assert loaded.target["norm"]["scale"].dtype == np.float32


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--target", "nowhere", "--out", "out"], "error: nowhere is not a directory"),
        (["--target", str(HYBRID), "--out", "full"], "is not an empty directory"),
        (["--target", str(LOOP / "drafter"), "--out", "out"], "pass this directory as the drafter"),
        (["--target", str(HYBRID), "--drafter", str(HYBRID), "--out", "out"], "mask_token_id is absent"),
        (
            ["--target", str(HYBRID), "--drafter", str(GOLDENS / "dflash2_on_qwen3_5_untied"), "--out", "out"],
            "DFlash 2",
        ),
        (["--target", str(HYBRID), "--weaver", str(LOOP / "weaver.pth"), "--out", "out"], "needs the drafter"),
        (["--target", str(HYBRID), "--weaver", "no.pth", "--out", "out"], r"no.pth does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert error in captured.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["full"]


def test_ctrl_c_ends_with_130_and_leaves_no_out(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"

    def interrupt_once_writing() -> None:
        while not partial.exists():
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt_once_writing, daemon=True).start()
    assert main(["--target", str(HYBRID), "--out", str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_usage_errors_and_help_need_no_jax() -> None:
    program = (
        "import sys; from convert.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code if {'jax', 'numpy', 'orbax'}.isdisjoint(sys.modules) else 99)"
    )
    for words, code in ((["--help"], 0), (["--target"], 2)):
        run = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert run.returncode == code
        assert "Traceback" not in run.stderr
