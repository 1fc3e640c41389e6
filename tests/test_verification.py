"""What `--verify` finds: every changed value among those it looks at, and logits that are another model's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from goldens import arrays
from sources import HYBRID, LOOP, TRIO, read_safetensors

import tfm_jax
from convert.pipeline import convert_checkpoint
from convert.verification import verify_checkpoint
from tfm_jax.errors import TfmError


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    convert_checkpoint(out=out, **TRIO)
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(converted, tmp_path / "out")


def test_all_values_are_compared_where_the_sample_is_large_enough(converted: Path) -> None:
    result = verify_checkpoint(converted, *TRIO.values(), samples=1000, logits=False)
    assert result.parameters == result.of == len(list(converted.rglob("zarr.json")))
    safetensors = sum(a.size for d in (HYBRID, TRIO["drafter"]) for a in read_safetensors(d).values())
    weaver = sum(file.stat().st_size - 20 for file in (converted / "weaver").rglob("0") if file.is_file()) // 2
    assert result.values == safetensors + weaver
    assert result.logits is None


def test_samples_are_as_many_as_asked_for(converted: Path) -> None:
    seen = []
    result = verify_checkpoint(
        converted, *TRIO.values(), samples=7, logits=False, progress=lambda done, total: seen.append((done, total))
    )
    assert result.parameters == 7
    assert seen == [(done, 7) for done in range(1, 8)]


@pytest.mark.parametrize("array", ["target/layers.0/mixer.in_proj.kernel", "drafter/fc/kernel", "weaver/pos_emb"])
def test_one_changed_bit_is_found(array: str, out: Path) -> None:
    values = out / array / "c/0/0"
    content = bytearray(values.read_bytes())
    content[-22] ^= 1  # the last value; an index of 20 bytes follows
    values.write_bytes(content)
    name = array.replace("/mixer", ".mixer").replace("fc/", "fc.")
    with pytest.raises(TfmError, match=rf"1 values of {name} differ from the source's"):
        verify_checkpoint(out, *TRIO.values(), samples=1000, logits=False)


def test_other_sources_are_told_apart(converted: Path, tmp_path: Path) -> None:
    drafter = shutil.copytree(LOOP / "drafter", tmp_path / "drafter", copy_function=shutil.copyfile)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(TfmError, match="was not converted from this drafter"):
        verify_checkpoint(converted, HYBRID, drafter, TRIO["weaver"], logits=False)
    with pytest.raises(TfmError, match="was not converted from this weaver"):
        verify_checkpoint(converted, HYBRID, TRIO["drafter"], logits=False)


def test_next_logits_are_the_golden_ones(loop_checkpoint: Path) -> None:
    """What `--verify` compares with transformers' logits, here against the ones that were kept from it."""
    golden = arrays("qwen3_5_untied")
    prompt = golden["input_ids"].reshape(-1)[:9].tolist()
    logits = tfm_jax.load(loop_checkpoint, "float32").next_logits(prompt)
    np.testing.assert_allclose(logits, golden["logits"].reshape(-1, logits.size)[8], atol=2e-4)


def test_transformers_says_the_same(converted: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = verify_checkpoint(converted, *TRIO.values())
    assert result.logits is not None
    assert result.logits.agreed == result.logits.prefixes == 12
    assert result.logits.difference < 1e-3 * result.logits.largest
