"""`scripts/bench.py kernels`: what it writes, what it refuses to time, and the tables that are made of it."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import ROOT
from kernel_cases import random_tree

sys.path.insert(0, str(ROOT / "scripts"))

import kernel_tables
from _kernel_timing import Program
from _kernel_workload import QWEN_27B, SMALL, ancestors_of, random_parents, relative_error, with_known
from bench import main

import pallas_kernels

pytestmark = pytest.mark.slow

OPS = {"gdn_tree_verify", "tree_conv", "tree_attention", "commit", "top_k", "weaver_tree", "gdn_chunk"}
KEYS = {"op", "case", "buffers", "implementation", "us", "floor_us", "rel_err"}
JSON = ROOT / "benchmarks" / "kernels-h200.json"


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    path = folder / "out.json"
    code = main(["kernels", "--small", "--repeats", "1", "--json", str(path), *words])
    return code, json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code, report = run(tmp_path_factory.mktemp("kernels"), "--implementations", "xla")
    assert code == 0
    return report


def test_every_operation_is_timed_against_its_floor(report: dict[str, Any]) -> None:
    assert {row["op"] for row in report["rows"]} == OPS
    assert all(row.keys() >= KEYS for row in report["rows"])
    assert all(row["us"] > 0 < row["floor_us"] for row in report["rows"])
    assert not report["unsupported"]
    assert not report["failed"]
    assert report["meta"].keys() >= {"device", "versions", "date", "command"}
    assert "cpu" in report["meta"]["device"]


def test_layers_have_their_own_buffers_or_share_one(report: dict[str, Any]) -> None:
    buffers = {op: [row["buffers"] for row in report["rows"] if row["op"] == op] for op in OPS}
    assert buffers["gdn_tree_verify"] == ["own", "hot"]
    assert buffers["commit"] == ["own"]
    assert buffers["weaver_tree"] == ["hot"]


def test_what_layers_share_is_charged_once(report: dict[str, Any]) -> None:
    layers = {"gdn_tree_verify": SMALL.gdn_layers, "tree_attention": SMALL.attention_layers}
    for row in report["rows"]:
        assert ("shared_us" in row) == (row["op"] in layers)
        if row["op"] in layers:
            assert row["us"] == pytest.approx(row["layer_us"] + row["shared_us"] / layers[row["op"]])


def test_nothing_is_computed_of_known_operands_alone() -> None:
    tree = np.linspace(0, 1, 32, dtype=np.float32)
    whole = jax.jit(lambda x, tree: x * jax.numpy.cos(tree) + jax.numpy.sin(x))
    texts = [x.lower(tree, tree).compile().as_text() for x in (whole, jax.jit(with_known(whole, {1: tree})))]
    assert ["cosine(" in text for text in texts] == [True, False]
    assert all("sine(" in text for text in texts)


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = pallas_kernels.gdn_tree_verify
    monkeypatch.setattr(
        pallas_kernels,
        "gdn_tree_verify",
        lambda *operands, **options: jax.tree.map(lambda x: 1.001 * x, verify(*operands, **options)),
    )
    code, report = run(tmp_path, "--ops", "gdn_tree_verify", "--implementations", "xla")
    assert code == 1
    assert report["rows"] == []
    (entry,) = report["failed"]
    assert "relative error 1.0" in entry["reason"]


@pytest.mark.parametrize(
    ("message", "kind", "code"),
    [("top_k cannot run as xla: it is Tuesday", "unsupported", 0), ("no such layout", "failed", 1)],
)
def test_refusals_are_told_apart_from_failures(
    message: str, kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError(message)

    monkeypatch.setattr(pallas_kernels, "top_k", refuse)
    actual, report = run(tmp_path, "--ops", "top_k", "--implementations", "xla")
    assert actual == code
    assert [entry["reason"] for entry in report[kind]] == [f"ValueError: {message}"]
    assert not report["rows"]


def test_full_size_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 2
    assert "kernels are timed on a GPU and this is a CPU" in capsys.readouterr().err


def test_a_program_hands_on_what_it_donates() -> None:
    layers: list[tuple[Any, ...]] = [(jax.numpy.zeros(3), jax.numpy.ones(3)), (jax.numpy.ones(3), jax.numpy.ones(3))]
    with ThreadPoolExecutor() as pool:
        program = Program(lambda total, x: (total + x, 2 * x), layers[0], pool, donates=True)
    results = [program(layers), program(layers)]
    np.testing.assert_array_equal([layer[0] for layer in layers], [[2, 2, 2], [3, 3, 3]])
    np.testing.assert_array_equal(results[1], np.full((2, 3), 2))


def test_trees_are_as_deep_as_the_models() -> None:
    for nodes in (*QWEN_27B.nodes, *SMALL.nodes):
        parents = random_parents(nodes)
        assert (parents[1:] < np.arange(1, nodes)).all()
        assert ancestors_of(parents).sum(axis=1).max() <= 16
    parents = random_tree(np.random.default_rng(0), 33)
    assert ancestors_of(parents)[32, parents[32]]


def test_an_error_is_never_nan() -> None:
    assert relative_error(np.array([1.0, np.nan]), np.ones(2)) == float("inf")
    assert relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)


def test_tables_hold_the_figures_and_nothing_else_changes(report: dict[str, Any]) -> None:
    text = "before\n<!-- figures: top_k -->\nold\n<!-- end -->\nafter\n<!-- figures: none -->\n<!-- end -->\n"
    filled = kernel_tables.fill_tables(text, report)
    assert filled.startswith("before\n<!-- figures: top_k -->\n| case |")
    assert filled.endswith("<!-- end -->\nafter\n<!-- figures: none -->\n<!-- end -->\n")
    assert "old" not in filled
    assert filled.count("| xla |") == sum(row["op"] == "top_k" for row in report["rows"])
    assert kernel_tables.fill_tables(filled, report) == filled


def test_tables_that_a_report_cannot_fill_stay(report: dict[str, Any]) -> None:
    text = "<!-- figures: top_k -->\nold\n<!-- end -->\n<!-- figures: commit -->\nold\n<!-- end -->\n"
    rows = [row for row in report["rows"] if row["op"] == "top_k"]
    filled = kernel_tables.fill_tables(text, report | {"rows": rows})
    assert filled.endswith("<!-- figures: commit -->\nold\n<!-- end -->\n")
    assert filled.count("old") == 1


@pytest.mark.parametrize(
    ("report_text", "words"),
    [
        ("[]", "is no report of bench.py kernels"),
        ('{"rows": null}', "is no report"),
        ('{"rows": [1]}', "is no report"),
        ('{"rows": [{"op": "top_k"}]}', "is no report"),
        ("[" * 100_000, "is no report"),
        ('{"rows": []}', "has no table of anything in the report"),
        ('{"rows": [{"op": "other"}]}', "has no table of other"),
        ("{", "give a report of bench.py kernels and a text"),
    ],
)
def test_a_report_that_is_none_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report_text: str, words: str
) -> None:
    path, document = tmp_path / "report.json", tmp_path / "document.md"
    path.write_text(report_text)
    document.write_text(text := "<!-- figures: top_k -->\nold\n<!-- end -->\n")
    assert kernel_tables.main(path, document) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert words in message
    assert document.read_text() == text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_figures_are_shown_before_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["kernels", "--small", "--ops", "top_k", "--implementations", "xla", "--repeats", "1"]
    assert main([*options, "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "rel. error" in said.out
    assert "/dev/full cannot be written" in said.err


@pytest.mark.skipif(not JSON.exists(), reason="no figures of an H200 yet")
def test_the_documents_tables_are_those_of_the_report() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert kernel_tables.fill_tables(text, json.loads(JSON.read_text(encoding="utf-8"))) == text
