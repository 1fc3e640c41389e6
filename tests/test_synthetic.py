"""The synthetic checkpoints have the sizes of the published ones and convert."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from convert.pipeline import read_sources
from convert.safetensors_io import SafetensorsReader

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
from _synthetic import Options, write_synthetic

pytestmark = pytest.mark.slow


# The bytes that Qwen/Qwen3.8-27B, of the shapes of 3.6, states for its tensors; parameters of the drafter by hand:
# 25600·5120 + 2·5120 + 5·(3·17408·5120 + 2·4096·5120 + 2·1024·5120 + 2·5120 + 2·128).
@pytest.mark.parametrize(
    ("preset", "total", "tensors"),
    [("qwen3.6-27b", 55_562_855_904, 1199), ("qwen3.6-27b-dflash", 2 * 1_730_213_120, 58)],
)
def test_sizes_are_the_published_ones(preset: str, total: int, tensors: int, tmp_path: Path) -> None:
    assert write_synthetic(Options(preset, tmp_path / "hf", headers_only=True)) == total
    assert len(SafetensorsReader(tmp_path / "hf").tensors) == tensors
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert total < sum(file.stat().st_size for file in files) < total + 1_000_000
    assert sum(file.stat().st_blocks * 512 for file in files) < 2_000_000


def test_values_are_finite_and_repeat(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_synthetic(Options("tiny", tmp_path / name, seed=seed, shard_gigabytes=1e-4))
        write_synthetic(Options("tiny-dflash", tmp_path / f"{name}-dflash", seed=seed))
    config, models = read_sources(tmp_path / "a", tmp_path / "a-dflash")
    assert config.target.layer_types.count("full_attention") == 1
    assert models["target"].skipped == {"model.visual": 21, "mtp": 15}
    first, same, other = (SafetensorsReader(tmp_path / name) for name in "abc")
    for name in first.tensors:
        values = np.abs(first.read(name).astype(np.float32))
        assert 2**-7 <= values.min() < values.max() < 2**-3
        assert first.read(name).tobytes() == same.read(name).tobytes()
        assert first.read(name).tobytes() != other.read(name).tobytes()
    assert first.tensors["model.language_model.layers.0.linear_attn.A_log"].dtype == "float32"
