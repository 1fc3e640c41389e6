"""`scripts/bench.py speed`: rates and gains with known answers, and the report of a real run."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from worded import link_with_tokenizer

sys.path.insert(0, str(ROOT / "scripts"))

from _bench_speed import Clock, make_rows
from bench import main

from tfm_jax.budget import Costs, write_costs
from tfm_jax.runtime import device_name

pytestmark = pytest.mark.slow


def test_gains_are_over_the_fastest_fixed_budget() -> None:
    """`auto` takes half the seconds of every prompt, so that no resample sees another gain than 100 %."""
    seconds = np.array([[2.0, 1.0, 4.0, 0.5], [6.0, 2.0, 4.0, 1.0]])
    passes = np.stack([seconds - 0.25, seconds + 9, seconds])  # the median is the last, the mean is far away
    clock = Clock(np.full((2, 4), 12), np.array([[12, 4, 3, 4], [12, 8, 3, 4]]), passes)
    rows = make_rows(clock, (0, 7, 63, "auto"), 1.0, seed=0)
    assert [row["tokens_per_second"] for row in rows] == [3, 8, 3, 16]
    assert [row["tokens_per_round"] for row in rows] == [1, 2, 4, 3]
    assert [row["ms_per_round"] for row in rows] == pytest.approx([8000 / 24, 250, 8000 / 6, 1500 / 8])
    assert {row["best_fixed"] for row in rows} == {7}
    assert (rows[3]["gain"], rows[3]["ci95"]) == (1, [1, 1])
    assert (rows[1]["gain"], rows[1]["ci95"]) == (0, [0, 0])
    # Against `ar`, whose seconds are 2 and 3 times as many, resamples lie between.
    assert rows[0]["gain"] == pytest.approx(3 / 8 - 1)
    assert rows[0]["ci95"] == pytest.approx([1 / 3 - 1, 1 / 2 - 1])


@pytest.fixture(scope="module")
def inputs(loop_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the golden trio, a tokenizer and a table of costs as `model`, and two prompt sets."""
    folder = tmp_path_factory.mktemp("speed")
    link_with_tokenizer(loop_checkpoint, folder / "model")
    costs = Costs((3, 7), (1.0, 1.2), 0.01, (0.9, 1.1), "tfm", device_name(), "float32", 64)
    write_costs(folder / "model" / "costs.json", costs)
    for name in ("humaneval", "verilogeval"):
        lines = [json.dumps({"turns": [f"{name} {number}"]}) for number in range(3)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def measure(inputs: Path, *options: object) -> tuple[int, dict[str, Any] | None]:
    output = inputs / "speed.json"
    output.unlink(missing_ok=True)
    words = ["--model", inputs / "model", "--prompts", inputs, "--output", output, *options]
    code = main(["speed", *map(str, words)])
    return code, json.loads(output.read_text()) if output.exists() else None


def test_report_has_a_row_for_every_setting(inputs: Path) -> None:
    words = ["--budgets", 0, 7, "auto", "--temperatures", 0, "--prompts-per-set", 2, "--passes", 2]
    code, report = measure(inputs, *words, "--max-new-tokens", 8)
    assert code == 0
    rows = {row["budget"]: row for row in report["rows"]}
    assert list(rows) == [0, 7, "auto"]
    assert {row["prompts"] for row in report["rows"]} == {4}
    assert {row["best_fixed"] for row in report["rows"]} == {7}
    assert rows[0]["tokens_per_round"] == 1 <= rows[7]["tokens_per_round"] <= 8
    for row in report["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["tokens_per_round"] / row["ms_per_round"])
    assert report["meta"]["costs"]["budgets"] == [3, 7]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--passes", 0], "0 passes"),
        (["--budgets", 0, "auto"], "0 fixed budgets"),
        (["--prompts-per-set", 0], "0 prompts a set"),
        (["--max-new-tokens", 1, "--budgets", 7, "--temperatures", 0], "no prompt has a second token"),
        (["--costs", "missing.json"], "no cost table at missing.json"),
        (["--budgets", 7, "atuo"], "'atuo'"),
    ],
)
def test_what_cannot_be_timed_is_one_sentence(
    words: list[object], message: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(inputs, *words) == (2, None)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
