"""Options of `tfm-convert`: what is checked without writing, what warns, what is silent."""

from __future__ import annotations

import os
import pty
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from sources import GOLDENS, HYBRID, LOOP, array_files, read_safetensors

from convert.cli import main

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
from _synthetic import Options, write_synthetic

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TRIO = ["--target", str(HYBRID), "--drafter", str(LOOP / "drafter"), "--weaver", str(LOOP / "weaver.pth")]
NORM = "model.layers.3.self_attn.q_norm.weight"


def copy_with(directory: Path, **changes: np.ndarray) -> Path:
    """Copy of a golden target with tensors replaced."""
    directory.mkdir()
    shutil.copyfile(HYBRID / "config.json", directory / "config.json")
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in read_safetensors(HYBRID).items()}
    save_file(tensors | changes, directory / "model.safetensors")
    return directory


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*TRIO, "--out", str(out), "--dry-run"]) == 0
    planned, warnings = capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    assert main([*TRIO, "--out", str(out)]) == 0
    done, same = capsys.readouterr()
    # The golden of the drafter names its target in a key of its own.
    assert (
        warnings == same == f"warning: {LOOP / 'drafter'}: nothing reads the keys golden_target; they are left out.\n"
    )
    parameters = done.removeprefix(f"{out}: ").partition(" ")[0]
    assert planned.startswith(f"{out}: would hold {parameters} parameters in 0.00 GB (")
    values = sum(len(content) for name, content in array_files(out).items() if "/c/" in name)
    assert main([*TRIO, "--out", str(tmp_path / "wide"), "--dtype", "float32", "--dry-run", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert values > 2 * int(parameters.replace(",", ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--targt", "x"], "tfm-convert --help"),
        (["inspect"], "tfm-convert inspect --help"),
        ([*TRIO, "--out", "out", "--dtype", "int8"], "int8"),
        (["--target", str(HYBRID), "--out", str(HYBRID / "out")], "lies inside"),
        (["--target", str(HYBRID), "--weaver", str(HYBRID), "--out", "out"], "is a directory; give the Weaver's .pth"),
        (["inspect", str(HYBRID / "config.json")], "is no .pth file"),
        (["--target", str(HYBRID), "--drafter", str(HYBRID), "--out", "out"], "a target belongs to --target"),
    ],
)
def test_mistaken_options_are_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert list(tmp_path.iterdir()) == []


def processor_seconds(command: list[str], folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    """What a command took of the processors, waiting left out, and what it said."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, run


def test_a_dry_run_of_the_full_27b_takes_little_more_than_its_imports(tmp_path: Path) -> None:
    """2 s is the bar where importing jax takes 1 s; machines differ, so that import is the unit."""
    write_synthetic(Options("qwen3.6-27b", tmp_path / "hf", headers_only=True))
    write_synthetic(Options("qwen3.6-27b-dflash", tmp_path / "dflash", headers_only=True))
    words = ["--target", "hf", "--drafter", "dflash", "--out", "out", "--dry-run"]
    unit, _ = processor_seconds([sys.executable, "-c", "import jax"], tmp_path)
    seconds, run = processor_seconds([sys.executable, "-m", "convert", *words], tmp_path)
    assert seconds < 2 * unit
    if run.returncode == 0:  # else the disk has no room for it
        assert "would hold 28,626,211,584 parameters in 57.26 GB" in run.stdout
    else:
        assert "out needs 57.3 GB more but" in run.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dflash", "hf"]


@pytest.mark.parametrize("option", ["--dry-run", "--quiet"])
def test_a_dry_run_refuses_what_a_run_refuses(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = copy_with(tmp_path / "hf", **{NORM: np.zeros(31, np.float32)})
    assert main(["--target", str(target), "--out", str(tmp_path / "out"), option]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert f"{NORM} has shape (31,) but the configuration says (32,)" in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_nan_and_infinite_values_warn_and_fail_when_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.linspace(0, 1, 32, dtype=np.float32)
    values[[3, 7]], values[11] = np.nan, -np.inf
    target = copy_with(tmp_path / "hf", **{NORM: values})
    words = ["--target", str(target), "--out", str(tmp_path / "out")]
    assert main([*words, "--strict"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"error: {NORM} holds 3 NaN or infinite values")
    assert not (tmp_path / "out").exists()
    assert main([*words, "--quiet"]) == 0
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"warning: {NORM} holds 3 NaN or infinite values.\n"
    assert (tmp_path / "out" / "config.json").is_file()


def test_bars_are_drawn_on_a_terminal_unless_quiet(tmp_path: Path) -> None:
    """That nothing is drawn elsewhere is seen above: what was captured there held warnings alone."""

    def draw(name: str, *options: str) -> bytes:
        ours, terminal = pty.openpty()
        words = ["--target", str(GOLDENS / "qwen3_tied"), "--out", str(tmp_path / name), *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
        subprocess.run([sys.executable, "-m", "convert", *words], env=environment, stderr=terminal, check=True)
        os.write(terminal, b"end")
        drawn = os.read(ours, 1 << 16)
        os.close(terminal)
        os.close(ours)
        return drawn

    assert b"converting" in draw("a")
    assert draw("b", "--quiet") == b"end"


def test_what_is_exported_converts_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, drafter, weaver = (tmp_path / name for name in ("first", "second", "drafter", "weaver.pth"))
    assert main([*TRIO, "--out", str(first), "--dtype", "float32", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["export", str(first), "--drafter", str(drafter), "--weaver", str(weaver)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(str(file) for file in [*drafter.iterdir(), weaver])
    sources = ["--target", str(HYBRID), "--drafter", str(drafter), "--weaver", str(weaver)]
    assert main([*sources, "--out", str(second), "--dtype", "float32", "--quiet"]) == 0
    for model in ("drafter", "weaver"):
        assert array_files(second / model) == array_files(first / model)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["export", str(ROOT / "tfm_jax" / "demo")],
            "nothing to export; give --drafter DIR, --weaver FILE.pth or both",
        ),
        (["export", str(HYBRID), "--drafter", "out"], "is not a converted checkpoint"),
        ([*TRIO, "--out", "out", "--dry-run", "--verify"], "--verify compares what a run has written"),
        ([*TRIO, "--out", "out", "--revision", "main"], "revision is main but"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, printed = capsys.readouterr()
    assert out == ""
    assert printed.startswith("error: ")
    assert error in printed
    assert list(tmp_path.iterdir()) == []


def test_verify_compares_with_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(GOLDENS / "qwen3_tied"), "--out", str(tmp_path / "out"), "--verify"]) == 0
    _, verified = capsys.readouterr().out.splitlines()
    # Embedding, final norm, and in each of 4 layers 4 kernels and 4 norms.
    assert verified.startswith("34 of 34 arrays (205,632 values) are those of the sources; logits ")
