"""`scripts/bench.py acceptance`: statistics with known answers, the choice of prompts, and the report of a real run."""

import hashlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from test_text import TOKENIZER
from worded import link_with_tokenizer

sys.path.insert(0, str(ROOT / "scripts"))

from _bench_acceptance import (
    Run,
    Setting,
    Timing,
    bootstrap_interval,
    compare_methods,
    distinct_share,
    list_settings,
    make_figures,
    share_by_group,
)
from _bench_prompts import choose_documents, encode_prompts
from bench import main

pytestmark = pytest.mark.slow


def run_of(lengths: list[int]) -> Run:
    """Prompt i has two rounds that emit `lengths[i]` tokens each."""
    return Run([[0] * (1 + 2 * length) for length in lengths], [[length, length] for length in lengths])


def test_bootstrap_has_the_law_of_the_binomial() -> None:
    # The sum of a resample of 20 zeros and 20 ones is Binomial(40, 1/2); its 2.5 % and 97.5 % points are 14 and 26.
    interval = bootstrap_interval(np.repeat([0.0, 1.0], 20), seed=0)
    assert interval == [14 / 40, 26 / 40]
    assert bootstrap_interval(np.full(5, 2.5), seed=0) == [2.5, 2.5]
    assert bootstrap_interval(np.array([]), seed=0) is None


def test_differences_are_paired() -> None:
    """Prompts differ by far more than methods do: only pairing sees a gain of exactly 1 for every prompt."""
    spread = list(range(1, 41))
    runs = {
        Setting("tfm", 0.0, 7): run_of([length + 1 for length in spread]),
        Setting("ddtree", 0.0, 7): run_of(spread),
        Setting("chain", 0.0, 15): run_of(spread),
    }
    (comparison,) = compare_methods(runs, {"val": list(range(40))}, seed=0)  # `chain` has another budget
    assert (comparison["method"], comparison["against"], comparison["budget"]) == ("tfm", "ddtree", 7)
    assert (comparison["difference"], comparison["ci95"]) == (1, [1, 1])


def test_figures_by_hand() -> None:
    """A macro mean; a text that ends with its first token has no round and does not count."""
    run = Run([[1, 2, 3, 4, 5], [6, 7, 8], [9], [0]], [[3, 1], [2], [], [5]])
    reference = Run([[1, 2, 3, 4, 5], [6, 7, 0], [9], [0]], run.committed)
    timings = {0: Timing(4, 0.5), 1: Timing(2, 0.25), 3: Timing(100, 1.0)}
    figures = make_figures(run, reference, timings, [0, 1, 2], seed=0)
    assert (figures["prompts"], figures["acceptance_length"], figures["ci95"]) == (2, 2.0, [2.0, 2.0])
    assert (figures["tokens_per_second"], figures["tokens_equal"]) == (8.0, pytest.approx(2 / 3))
    assert (figures["rounds"], figures["accepted_by_depth"]) == (3, [2, 1])
    empty = make_figures(run, reference, {}, [2], seed=0)
    assert (empty["prompts"], empty["acceptance_length"], empty["ci95"], empty["accepted_by_depth"]) == (
        0,
        None,
        None,
        [],
    )


def test_distinct_share_by_hand() -> None:
    """Of the greedy text of the first method, however many others there are."""
    assert distinct_share([1, 2, 3, 4, 5]) == 1
    assert distinct_share([1, 2] * 4) == 2 / 5
    assert np.isnan(distinct_share([1, 2, 3]))
    texts = Run([[1, 2, 3, 4], [1, 2] * 4, [1]], [[1], [1], [1]])
    runs = {
        Setting("ar", 1.0, 0): run_of([3] * 3),
        Setting("ar", 0.0, 0): texts,
        Setting("tfm", 0.0, 7): run_of([3] * 3),
    }
    assert share_by_group(runs, {"val": [0, 1, 2], "short": [2]}) == {"val": pytest.approx(0.7), "short": None}


def test_documents_come_in_the_order_of_sha1() -> None:
    # sha1 of "abc", "" and "The quick brown fox jumps over the lazy dog": a999…, da39…, 2fd4… (FIPS 180 and RFC 3174)
    fox = "The quick brown fox jumps over the lazy dog"
    assert [document["id"] for document in choose_documents([{"id": "abc"}, {"id": ""}, {"id": fox}])] == [
        fox,
        "abc",
        "",
    ]
    chosen = choose_documents([{"id": str(number)} for number in range(200)])
    ranks = {str(number): hashlib.sha1(b"%d" % number, usedforsecurity=False).hexdigest() for number in range(200)}
    assert {document["id"] for document in chosen} == set(sorted(ranks, key=ranks.__getitem__)[:64])


def test_prompts_are_beginnings_that_leave_room() -> None:
    texts = {"val": ["x" * 200, "y"], "humaneval": ["z" * 200]}
    x, y, z = (TOKENIZER.encode(letter)[0] for letter in "xyz")
    assert encode_prompts(texts, TOKENIZER, 512, 100) == {"val": [[x] * 128, [y]], "humaneval": [[z] * 200]}
    assert encode_prompts(texts, TOKENIZER, 150, 100) == {"val": [[x] * 50, [y]], "humaneval": [[z] * 50]}


def test_ar_comes_first_and_once() -> None:
    settings = list_settings(("tfm", "ar", "tfm"), (0.0, 1.0), (7, 63), ("shared", "none"))
    greedy = (("ar", 0.0, 0, "none"), ("tfm", 0.0, 7, "none"), ("tfm", 0.0, 63, "none"))  # no noise to share
    sampled = [("tfm", 1.0, budget, noise) for budget in (7, 63) for noise in ("shared", "none")]
    assert settings == (*greedy, ("ar", 1.0, 0, "none"), *sampled)


def test_sharing_noise_is_compared_with_not_sharing_it() -> None:
    runs = {
        Setting("chain", 1.0, 15, "shared"): run_of([3, 5]),
        Setting("chain", 1.0, 15): run_of([2, 2]),
        Setting("tfm", 1.0, 15): run_of([4, 4]),
    }
    compared = {(item["method"], item["against"], item["draft_noise"]): item["difference"] for item in (
        compare_methods(runs, {"val": [0, 1]}, seed=0)
    )}  # fmt: skip
    assert compared == {("chain", "no noise", "shared"): 2, ("tfm", "chain", "none"): 2}


@pytest.fixture(scope="module")
def inputs(loop_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the golden trio and a tokenizer as `model`, two documents, and two prompt sets."""
    folder = tmp_path_factory.mktemp("bench")
    link_with_tokenizer(loop_checkpoint, folder / "model")
    with lzma.open(folder / "val.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": f"d{number}", "text": text * 50}) + "\n" for number, text in enumerate("xy"))
    (folder / "humaneval.jsonl").write_text(json.dumps({"turns": ["def f(x):", "ignored"]}) + "\n")
    (folder / "verilogeval.jsonl").write_text(json.dumps({"turns": ["module top;"]}) + "\n")
    return folder


def measure(inputs: Path, name: str, *options: str) -> dict[str, Any]:
    """The JSON of one run at temperature 1."""
    words = ["--model", inputs / "model", "--held-out", inputs / "val.jsonl.xz", "--prompts", inputs]
    small = ["--temperatures", 1, "--budgets", 7, "--max-new-tokens", 16, "--output", inputs / name]
    assert main(["acceptance", *map(str, [*words, *small, *options])]) == 0
    return json.loads((inputs / name).read_text())


@pytest.fixture(scope="module")
def report(inputs: Path) -> dict[str, Any]:
    """Two methods, prompt by prompt: so one compilation serves acceptance and timing."""
    return measure(inputs, "out.json", "--methods", "tfm", "chain", "--batch", "1", "--timed-prompts", "1")


def test_report_has_a_row_for_every_setting_and_set(report: dict[str, Any]) -> None:
    sets = {"val": 2, "humaneval": 1, "verilogeval": 1, "all": 4}
    keys = [(row["method"], row["temperature"], row["budget"], row["set"], row["prompts"]) for row in report["rows"]]
    assert keys == [(method, 1, 7, name, count) for method in ("tfm", "chain") for name, count in sets.items()]
    for row in report["rows"]:
        low, high = row["ci95"]
        assert 1 <= low <= row["acceptance_length"] <= high <= 16
        assert row["tokens_per_second"] > 0
    assert [(item["against"], item["set"]) for item in report["comparisons"]] == [("chain", name) for name in sets]
    assert {"device", "versions", "date", "command", "xla_flags", "dtype", "model"} <= report["meta"].keys()
    assert report["meta"]["sets"]["val"]["prompt_tokens"] == [50, 50]


def test_methods_agree_and_differences_are_those_of_the_rows(report: dict[str, Any]) -> None:
    assert report["mismatches"] == []
    assert {row["tokens_equal"] for row in report["rows"]} == {1}
    lengths = {(row["method"], row["set"]): row["acceptance_length"] for row in report["rows"]}
    for item in report["comparisons"]:
        difference = lengths["tfm", item["set"]] - lengths["chain", item["set"]]
        assert item["difference"] == pytest.approx(difference)


@pytest.mark.slow
def test_a_prompt_has_the_same_seed_in_a_batch(report: dict[str, Any], inputs: Path) -> None:
    batched = measure(inputs, "batched.json", "--methods", "chain", "--batch", "3", "--timed-prompts", "0")
    same = ("set", "acceptance_length", "rounds", "accepted_by_depth")
    expected = [[row[key] for key in same] for row in report["rows"] if row["method"] == "chain"]
    assert [[row[key] for key in same] for row in batched["rows"]] == expected
    assert {row["tokens_per_second"] for row in batched["rows"]} == {None}


def test_plots_lie_beside_the_json(report: dict[str, Any], inputs: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report["rows"]
    for name in ("out_methods.png", "out_budgets.png", "out_depths.png"):
        assert (inputs / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure on"),
        (["--prompts", "missing"], "no such file"),
        (["--held-out", "torn.jsonl"], "torn.jsonl, line 1, is not JSON"),
        (["--held-out", "other.jsonl"], "other.jsonl, line 1, is not an object with ['id', 'text']"),
        (["--held-out", "empty.jsonl"], "empty.jsonl is empty"),
        (["--held-out", "typed.jsonl"], "typed.jsonl, line 1, has [1, 'x']; write a text as id and one as text"),
        (["--held-out", "deep.jsonl"], "deep.jsonl, line 1, is not JSON"),
        (["--held-out", "bytes.jsonl"], "bytes.jsonl cannot be read"),
        (["--held-out", "junk.jsonl.xz"], "junk.jsonl.xz cannot be read"),
        (["--prompts", "."], "humaneval.jsonl, line 2, has 'abc'; write a list of texts as turns"),
        (["--held-out", "good.jsonl", "--model", "missing"], "missing is not a directory"),
        (["--held-out", "good.jsonl", "--batch", "0"], "batch 0"),
        (["--held-out", "good.jsonl", "--output", "missing/out.json"], "--output missing/out.json cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.jsonl").write_text('{"id": \n')
    Path("other.jsonl").write_text('{"text": "x"}\n')
    Path("empty.jsonl").touch()
    Path("typed.jsonl").write_text('{"id": 1, "text": "x"}\n')
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("bytes.jsonl").write_bytes(b"\xff\xfe")
    Path("junk.jsonl.xz").write_bytes(b"junk")
    Path("humaneval.jsonl").write_text('{"turns": ["a", "b"]}\n{"turns": "abc"}\n')
    Path("verilogeval.jsonl").write_text('{"turns": []}\n')
    Path("good.jsonl").write_text('{"id": "x", "text": "x"}\n')
    assert main(["acceptance", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
