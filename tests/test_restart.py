"""A conversion that is killed, interrupted or runs out of disk leaves no OUT, and the next one finishes its work."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sources import GOLDENS, HYBRID, TRIO, array_files

from convert.pipeline import check_conversion, convert_checkpoint
from tfm_jax.checkpoint import CheckpointWriter, expected_pieces, load_checkpoint, read_config
from tfm_jax.errors import TfmError

pytestmark = pytest.mark.slow

TINY = GOLDENS / "qwen3_tied"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    convert_checkpoint(out=out, **TRIO)
    return out


Child = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Runs one conversion in a process of its own."""
    command = [sys.executable, Path(__file__).with_name("conversions.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        incoming, outgoing = process.stdin, process.stdout
        assert incoming
        assert outgoing

        def run(out: Path, sources: dict[str, Path], **order: object) -> dict[str, Any]:
            order |= {"out": str(out), "sources": {name: str(path) for name, path in sources.items()}}
            incoming.write(json.dumps(order) + "\n")
            return json.loads(outgoing.readline())

        yield run
        incoming.close()


def interrupt_at(parameters: int) -> Callable[[int, int], None]:
    """Progress function that presses Ctrl-C."""

    def progress(done: int, _: int) -> None:
        if done >= parameters:
            raise KeyboardInterrupt

    return progress


def interrupt(out: Path, share: float, **sources: Any) -> None:  # noqa: ANN401
    """Convert a share of the parameters, then stop."""
    total = check_conversion(out=out, **sources).parameters
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(out=out, progress=interrupt_at(math.ceil(share * total)), **sources)


def test_killed_anywhere_it_is_finished_by_the_next_run(child: Child, tmp_path: Path) -> None:
    """SIGKILL before every 37th step, and before each of the last, which give OUT its name."""
    sources = {"target": TINY}
    steps = child(tmp_path / "undisturbed", sources)["steps"]
    expected = array_files(tmp_path / "undisturbed")
    resumed = set()
    for kill_at in [*range(1, steps, 37), *range(steps - 7, steps + 1)]:
        out, partial = tmp_path / f"out{kill_at}", tmp_path / f"out{kill_at}.partial"
        assert child(out, sources, kill_at=kill_at)["code"] == -9
        if out.exists():
            assert kill_at == steps  # only the directory's own fsync was left
        else:
            if (partial / "config.json").exists():
                assert kill_at >= steps - 2
                assert array_files(partial) == expected
            resumed.add(child(out, sources)["resumed"])
        assert array_files(out) == expected
        assert not partial.exists()
    pieces = len(expected_pieces(read_config(out)))
    assert resumed >= {0, pieces}  # the second run has begun everywhere between
    assert len(resumed) > pieces // 2


def test_finished_pieces_are_not_written_again(tmp_path: Path, undisturbed: Path) -> None:
    interrupt(tmp_path / "out", 0.5, **TRIO)
    partial = tmp_path / "out.partial"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.partial"]
    with pytest.raises(TfmError, match=r"has no config\.json"):
        load_checkpoint(partial)
    inodes = {file.relative_to(partial): file.stat().st_ino for file in partial.rglob("zarr.json")}
    finished = {str(path.parents[1]) for path in inodes}
    assert 2 < len(finished) < len(expected_pieces(read_config(undisturbed)))
    assert check_conversion(out=tmp_path / "out", **TRIO).finished == len(finished)
    assert convert_checkpoint(out=tmp_path / "out", **TRIO).resumed == len(finished)
    assert {path: (tmp_path / "out" / path).stat().st_ino for path in inodes} == inodes
    assert array_files(tmp_path / "out") == array_files(undisturbed)


@pytest.mark.parametrize("damage", ["values", "header", "array", "line"])
def test_a_piece_that_is_not_whole_is_written_again(damage: str, tmp_path: Path, undisturbed: Path) -> None:
    interrupt(tmp_path / "out", 0.5, **TRIO)
    finished = check_conversion(out=tmp_path / "out", **TRIO).finished
    array = tmp_path / "out.partial/target/layers.0/mlp.down.kernel"
    journal = tmp_path / "out.partial/journal.jsonl"
    if damage == "values":
        os.truncate(array / "c/0/0", 100)
    elif damage == "header":
        (array / "zarr.json").unlink()
    elif damage == "array":
        shutil.rmtree(array)
    else:  # the kill came while the last line was being written
        journal.write_text(journal.read_text()[:-4])
    assert convert_checkpoint(out=tmp_path / "out", **TRIO).resumed == finished - 1
    assert array_files(tmp_path / "out") == array_files(undisturbed)


def copy_target(directory: Path) -> Path:
    return shutil.copytree(HYBRID, directory / "hf", copy_function=shutil.copyfile)


@pytest.mark.parametrize("change", ["dtype", "time", "config", "drafter"])
def test_other_sources_or_options_start_anew(change: str, tmp_path: Path) -> None:
    target, options = copy_target(tmp_path), {}
    interrupt(tmp_path / "out", 0.5, target=target)
    assert check_conversion(target, tmp_path / "out").finished > 0
    if change == "dtype":
        options = {"dtype": "float32"}
    elif change == "time":
        os.utime(target / "model.safetensors", ns=(1, 1))
    elif change == "config":
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    else:
        options = {"drafter": TRIO["drafter"]}
    assert convert_checkpoint(target, tmp_path / "out", **options).resumed == 0
    convert_checkpoint(target, tmp_path / "again", **options)
    assert array_files(tmp_path / "out") == array_files(tmp_path / "again")


def test_two_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    interrupt(tmp_path / "out", 0.5, target=TINY)
    lock = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(TfmError, match=r"out\.partial is being written by another process"):
        convert_checkpoint(TINY, tmp_path / "out")
    os.close(lock)
    assert convert_checkpoint(TINY, tmp_path / "out").resumed > 0


def test_a_second_writer_takes_nothing_from_the_first(tmp_path: Path, undisturbed: Path) -> None:
    """Both begin before either writes; the second is refused, in whatever way it starts, and removes nothing."""
    config, out = read_config(undisturbed), tmp_path / "out"
    pieces = {
        name: {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
        for name, shapes in expected_pieces(config).items()
    }
    first, second = CheckpointWriter(out, config), CheckpointWriter(out, config)
    with first:
        for number, (name, arrays) in enumerate(pieces.items()):
            first.write_piece(name, arrays)
            if number == 1:
                with pytest.raises(TfmError, match="being written by another process"), second:
                    second.write_piece(name, arrays)
                with pytest.raises(TfmError, match="being written by another process"):
                    CheckpointWriter(out, config)
        first.finish()
    assert array_files(out).keys() == array_files(undisturbed).keys()
    load_checkpoint(out)


# Disks


def test_a_disk_that_fills_up_is_one_error_and_the_next_run_continues(
    child: Child, tmp_path: Path, undisturbed: Path
) -> None:
    """The largest file that may be written ends within the largest array."""
    largest = max(len(content) for content in array_files(undisturbed).values())
    (tmp_path / "out").mkdir()
    result = child(tmp_path / "out", {**TRIO}, largest_file=largest - 1)
    assert result["error"].startswith(f"{tmp_path / 'out'} cannot be written (File too large)")
    assert result["error"].count("\n") == 0
    assert list((tmp_path / "out").iterdir()) == []
    assert not list(tmp_path.rglob("*.tmp"))
    child(tmp_path / "out", TRIO)
    assert array_files(tmp_path / "out") == array_files(undisturbed)


def test_a_read_only_place_is_one_error(child: Child) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = copy_target(folder)
        (folder / "parent").mkdir()
        for path in (folder, folder / "parent", target):
            path.chmod(0o555)
        result = child(folder / "parent" / "out", {"target": target}, as_nobody=True)
        assert "out cannot be written (Permission denied); nothing was left" in result["error"]
        assert list((folder / "parent").iterdir()) == []
        for path in (folder, folder / "parent", target):
            path.chmod(0o755)


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """Nine terabytes, from headers alone: the file is sparse."""
    target = tmp_path / "hf"
    target.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    sizes = {
        "vocab_size": (1 << 31) - 1,
        "hidden_size": 2048,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
    }
    (target / "config.json").write_text(json.dumps(config | sizes))
    head, query, key, inner = (
        config["head_dim"],
        config["head_dim"] * config["num_attention_heads"],
        config["head_dim"] * config["num_key_value_heads"],
        config["intermediate_size"],
    )
    layer = {
        "input_layernorm": (2048,),
        "post_attention_layernorm": (2048,),
        "mlp.gate_proj": (inner, 2048),
        "mlp.up_proj": (inner, 2048),
        "mlp.down_proj": (2048, inner),
        "self_attn.q_proj": (query, 2048),
        "self_attn.k_proj": (key, 2048),
        "self_attn.v_proj": (key, 2048),
        "self_attn.o_proj": (2048, query),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": ((1 << 31) - 1, 2048), "model.norm.weight": (2048,)}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with (target / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
    with pytest.raises(TfmError, match=r"out needs 8796\.\d GB more but \d+\.\d GB are free there"):
        convert_checkpoint(target, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]
