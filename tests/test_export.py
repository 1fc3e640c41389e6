"""What goes out comes back bit for bit, in the names, the spelling and the containers of other software."""

from __future__ import annotations

import dataclasses
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from sources import GOLDENS, HYBRID, LOOP, TRIO, array_files, read_safetensors, read_storages

from convert.export import export_checkpoint, spell_drafter
from convert.hf_config import parse_drafter
from convert.pipeline import convert_checkpoint
from convert.pth_io import PthReader
from tfm_jax.config import DrafterConfig
from tfm_jax.errors import TfmError

pytestmark = pytest.mark.slow

DRAFTERS = {
    "tfm/loop_qwen3_5/drafter": "qwen3_5_untied",
    "dflash_swa_on_qwen3_5_untied": "qwen3_5_untied",
    "dflash_on_qwen3_untied": "qwen3_untied",
}
WEAVERS = ["weaver_w1", "weaver_w1_two_layers", "weaver_w1_fused_qkv", "weaver_w2", "weaver_w2_two_layers"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_tensors_are_the_source_s_own(name: str, tmp_path: Path) -> None:
    """Same names, shapes, types and bits as the file that was converted."""
    convert_checkpoint(GOLDENS / DRAFTERS[name], tmp_path / "out", drafter=GOLDENS / name)
    config, weights = export_checkpoint(tmp_path / "out", tmp_path / "exported", "drafter")
    assert (config.name, weights.name) == ("config.json", "model.safetensors")
    source, exported = read_safetensors(GOLDENS / name), read_safetensors(tmp_path / "exported")
    assert exported.keys() == source.keys()
    for tensor, values in source.items():
        np.testing.assert_array_equal(exported[tensor], values, err_msg=tensor)
    with safe_open(weights, "np") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert {theirs.get_slice(tensor).get_dtype() for tensor in source} == {"BF16"}
    stated = json.loads((GOLDENS / name / "config.json").read_text())
    for key, value in json.loads(config.read_text()).items():
        if key in stated and key not in ("dflash_config", "tie_word_embeddings"):
            assert value == stated[key], key
    for key, value in stated["dflash_config"].items():
        assert json.loads(config.read_text())["dflash_config"][key] == value


@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(DRAFTERS, ["bfloat16"] * 3, strict=True), (next(iter(DRAFTERS)), "float32")]
)
def test_drafter_round_trip(name: str, dtype: str, tmp_path: Path) -> None:
    target = GOLDENS / DRAFTERS[name]
    convert_checkpoint(target, tmp_path / "out", drafter=GOLDENS / name, dtype=dtype)
    export_checkpoint(tmp_path / "out", tmp_path / "drafter", "drafter")
    convert_checkpoint(target, tmp_path / "back", drafter=tmp_path / "drafter", dtype=dtype)
    assert array_files(tmp_path / "back/drafter") == array_files(tmp_path / "out/drafter")
    first, second = (json.loads((tmp_path / out / "config.json").read_text()) for out in ("out", "back"))
    assert second["drafter"] == first["drafter"]


PLAIN = DrafterConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    layer_causal=(False, False),
    layer_windows=(0, 0),
    heads=4,
    kv_heads=2,
    head_dim=32,
    rope_theta=1e7,
    norm_eps=1e-6,
    block_size=16,
    mask_token_id=511,
    target_layers=(1, 3, 5),
    max_positions=512,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_causal": (True, False), "layer_windows": (32, 0)},
        {"layer_causal": (True, True), "layer_windows": (32, 32)},
        {"layer_causal": (False, False), "layer_windows": (32, 0)},
        {"layer_causal": (True, True), "layer_windows": (0, 0)},
        {"yarn_factor": 4.0, "yarn_original_positions": 128, "yarn_beta_fast": 16.0, "yarn_attention_factor": 1.25},
    ],
)
def test_every_drafter_s_configuration_comes_back(changes: dict) -> None:
    config = dataclasses.replace(PLAIN, **changes)
    spelled = json.loads(json.dumps(spell_drafter(config, 8, "bfloat16")))
    assert parse_drafter(spelled, "config.json", target_layers=8) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_windows": (16, 32), "layer_causal": (True, True)},
        {"layer_windows": (0, 0), "layer_causal": (True, False)},
    ],
)
def test_what_no_configuration_can_say_is_refused(changes: dict) -> None:
    with pytest.raises(TfmError, match=r"cannot be said in a config\.json"):
        spell_drafter(dataclasses.replace(PLAIN, **changes), 8, "bfloat16")


class _Calls(pickle.Unpickler):
    """Python's own reader of pickles: what a file asks to import and call, without doing it."""

    def find_class(self, module: str, name: str) -> Callable:
        return lambda *arguments: (f"{module}.{name}", *arguments)

    def persistent_load(self, pid: tuple) -> tuple:
        kind, storage, _, place, elements = pid
        return kind, storage()[0], place, elements


def calls(file: Path) -> dict:
    """The saved dict with its tensors as the calls that make them; keys of storages are left out."""
    with zipfile.ZipFile(file) as archive:
        return _Calls(archive.open(f"{file.stem}/data.pkl")).load()


@pytest.mark.parametrize("name", WEAVERS)
def test_weaver_file_is_torch_s(name: str, tmp_path: Path) -> None:
    """Same calls with the same arguments as in the file that torch wrote, and the same bits, by name."""
    source = GOLDENS / "tfm" / f"{name}.pth"
    convert_checkpoint(HYBRID, tmp_path / "out", drafter=LOOP / "drafter", weaver=source, dtype="float32")
    (file,) = export_checkpoint(tmp_path / "out", tmp_path / f"{name}.pth", "weaver")
    theirs, ours = PthReader(source), PthReader(file)
    if name != "weaver_w1_fused_qkv":  # the reference's older loader splits nothing, so q, k and v go out apart
        assert ours.values == theirs.values
        assert ours.tensors.keys() == theirs.tensors.keys()
        for tensor in theirs.tensors:
            assert ours.read(tensor).tobytes() == theirs.read(tensor).tobytes(), tensor
        assert calls(file) == calls(source)
    assert sum(storage.size for storage in read_storages(file)) == sum(s.size for s in read_storages(source))
    convert_checkpoint(HYBRID, tmp_path / "back", drafter=LOOP / "drafter", weaver=file, dtype="float32")
    assert array_files(tmp_path / "back") == array_files(tmp_path / "out") | {
        "config.json": (tmp_path / "back/config.json").read_bytes()
    }


def test_torch_reads_the_weaver(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    convert_checkpoint(out=tmp_path / "out", **TRIO, dtype="float32")
    (file,) = export_checkpoint(tmp_path / "out", tmp_path / "weaver.pth", "weaver")
    ours, theirs = (torch.load(path, weights_only=True) for path in (file, TRIO["weaver"]))
    assert ours["config"] == theirs["config"]
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    assert all(torch.equal(ours["state_dict"][name], tensor) for name, tensor in theirs["state_dict"].items())


def test_exports_that_cannot_be(tmp_path: Path) -> None:
    convert_checkpoint(HYBRID, tmp_path / "out")
    with pytest.raises(TfmError, match="out holds no weaver"):
        export_checkpoint(tmp_path / "out", tmp_path / "weaver.pth", "weaver")
    convert_checkpoint(HYBRID, tmp_path / "pair", drafter=LOOP / "drafter")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(TfmError, match="full exists; choose another"):
        export_checkpoint(tmp_path / "pair", tmp_path / "full", "drafter")
    with pytest.raises(TfmError, match=r"nowhere is not a directory"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "drafter", "drafter")
    with pytest.raises(TfmError, match=r"file/drafter cannot be written \(Not a directory\)"):
        export_checkpoint(tmp_path / "pair", tmp_path / "full/file/drafter", "drafter")
