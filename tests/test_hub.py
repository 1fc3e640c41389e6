"""Ids on the Hub: what they are in a cache laid out as huggingface_hub does, and what is said without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from sources import GOLDENS, HYBRID, LOOP

from convert.cli import main
from convert.hub import DIRECTORY_FILES, WEAVER_FILES, name_source, resolve
from convert.inspection import inspect_checkpoint
from tfm_jax.errors import TfmError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FIRST, SECOND = "1" * 40, "2" * 40
WEAVER = GOLDENS / "tfm" / "weaver_w1.pth"


def add_snapshot(cache: Path, name: str, commit: str, files: dict[str, Path], *refs: str) -> Path:
    """A repository in the cache: files as links to blobs, branches and tags as files that hold a commit."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for number, (file, source) in enumerate(files.items()):
        blob = repository / "blobs" / f"{commit[:8]}{number:032}"
        link = repository / "snapshots" / commit / file
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir(exist_ok=True)
    for ref in refs:
        (repository / "refs" / ref).write_text(commit)
    return repository / "snapshots" / commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine without a network; the working directory holds nothing."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "cache"


def files_of(directory: Path, *names: str) -> dict[str, Path]:
    return {name: directory / name for name in names}


def test_branches_tags_and_commits(cache: Path) -> None:
    files = files_of(HYBRID, "config.json", "model.safetensors")
    first = add_snapshot(cache, "Qwen/Tiny-0.1", FIRST, files, "v1")
    second = add_snapshot(cache, "Qwen/Tiny-0.1", SECOND, files, "main")
    assert resolve("Qwen/Tiny-0.1") == (second, SECOND)
    assert resolve("Qwen/Tiny-0.1", "v1") == (first, FIRST)
    assert resolve("Qwen/Tiny-0.1@v1") == (first, FIRST)
    assert resolve(f"Qwen/Tiny-0.1@{FIRST}") == (first, FIRST)
    assert resolve("Qwen/Tiny-0.1@v1", "v1") == (first, FIRST)
    with pytest.raises(TfmError, match=r"revision is main but Qwen/Tiny-0\.1@v1 names another"):
        resolve("Qwen/Tiny-0.1@v1", "main")
    assert name_source(first) == "Qwen/Tiny-0.1"
    assert inspect_checkpoint(first).models[0].parameters == inspect_checkpoint(HYBRID).models[0].parameters


def test_paths_go_before_ids(cache: Path) -> None:
    snapshot = add_snapshot(cache, "Qwen/Tiny", FIRST, files_of(HYBRID, "config.json"), "main")
    assert resolve(str(snapshot)) == (snapshot, FIRST)
    assert resolve("no-such") == (Path("no-such"), None)
    assert resolve("a/b/c/d") == (Path("a/b/c/d"), None)
    assert resolve("runs/weaver.pth", patterns=WEAVER_FILES) == (Path("runs/weaver.pth"), None)
    Path("Qwen/Tiny").mkdir(parents=True)
    assert resolve("Qwen/Tiny") == (Path("Qwen/Tiny"), None)
    with pytest.raises(TfmError, match="revision is main but Qwen/Tiny is no id on the Hub"):
        resolve("Qwen/Tiny", "main")


def test_weavers(cache: Path) -> None:
    name, first = "trymirai/weaver", {"weaver/a.pth": WEAVER, "config.json": HYBRID / "config.json"}
    file = add_snapshot(cache, name, FIRST, first, "main") / "weaver" / "a.pth"
    assert resolve(name, patterns=WEAVER_FILES) == (file, FIRST)
    assert resolve(f"{name}/weaver/a.pth", patterns=WEAVER_FILES) == (file, FIRST)
    assert name_source(file) == "trymirai/weaver/weaver/a.pth"
    add_snapshot(cache, name, SECOND, {"weaver/b.pth": WEAVER, "c.pth": WEAVER}, "both")
    with pytest.raises(TfmError, match=r"weaver holds 2 \.pth files \(c\.pth, weaver/b\.pth\); choose one as"):
        resolve(f"{name}@both", patterns=WEAVER_FILES)
    assert resolve(f"{name}/c.pth@both", patterns=WEAVER_FILES).path.read_bytes() == WEAVER.read_bytes()
    add_snapshot(cache, name, "3" * 40, {"x": WEAVER}, "none")
    with pytest.raises(TfmError, match=r"weaver holds 0 \.pth files \(none\)"):
        resolve(f"{name}@none", patterns=WEAVER_FILES)


def test_without_a_network_the_sentence_says_what_to_fetch(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = "config.json, generation_config.json, tokenizer.json, model.safetensors.index.json, *.safetensors"
    by_hand = f"download {files} of https://huggingface.co/Qwen/Qwen3.6-27B by hand and give the path."
    assert main(["--target", "Qwen/Qwen3.6-27B", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Qwen/Qwen3.6-27B is no path here and cannot be downloaded (LocalEntryNotFoundError")
    assert error.endswith(f"; {by_hand}\n")
    assert error.count("\n") == 1
    target = str(HYBRID)
    words = [
        "--target",
        target,
        "--drafter",
        str(LOOP / "drafter"),
        "--weaver",
        "trymirai/weaver/a.pth",
        "--out",
        "out",
    ]
    assert main(words) == 2
    assert "download a.pth of https://huggingface.co/trymirai/weaver by hand" in capsys.readouterr().err
    assert not cache.exists()
    assert list(Path().iterdir()) == []


def test_commits_are_recorded(cache: Path) -> None:
    names = ("config.json", "model.safetensors")
    add_snapshot(cache, "Qwen/Tiny", FIRST, files_of(HYBRID, *names), "main", "v1")
    add_snapshot(cache, "z-lab/Tiny-DFlash", SECOND, files_of(LOOP / "drafter", *names), "main")
    words = ["--target", "Qwen/Tiny", "--drafter", "z-lab/Tiny-DFlash", "--weaver", str(LOOP / "weaver.pth")]
    assert main([*words, "--revision", "v1", "--out", "out", "--quiet"]) == 0
    assert inspect_checkpoint(Path("out")).source == {
        "target": "Qwen/Tiny",
        "drafter": "z-lab/Tiny-DFlash",
        "weaver": "weaver.pth",
        "target_revision": FIRST,
        "drafter_revision": SECOND,
    }


def test_only_what_a_conversion_reads_is_fetched() -> None:
    published = [
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json",
        "model-00001-of-00015.safetensors", "README.md", "LICENSE", "vocab.json", "merges.txt", "dflash.py",
        "modeling_x.py", "pytorch_model.bin", "model.pth", "training_args.bin", "tokenizer_config.json",
        ".gitattributes", "chat_template.jinja", "x.gguf",
    ]  # fmt: skip
    assert list(filter_repo_objects(published, allow_patterns=list(DIRECTORY_FILES))) == published[:5]
    assert list(filter_repo_objects(published, allow_patterns=list(WEAVER_FILES))) == ["model.pth"]


def test_without_the_extra_the_sentence_names_it(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not installed')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, "-m", "convert", "--target", "Qwen/Qwen3.6-27B", "--out", "out"]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "Qwen/Qwen3.6-27B is no path here, and the Hub needs the extra tfm-jax[hub]; install it, or" in run.stderr
    assert "https://huggingface.co/Qwen/Qwen3.6-27B by hand" in run.stderr
