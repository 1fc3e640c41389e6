"""`tfm generate` keeps its contract: fields, texts, exit codes. The tokens come from the golden loops."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import GOLDENS
from test_text import TOKENIZER
from worded import link_with_tokenizer

import tfm_jax
from tfm_jax.cli import main

FIELDS = {
    *("prompt_token_ids", "token_ids", "text", "finish_reason", "rounds", "acceptance_length", "accepted_by_depth"),
    *("tokens_per_second", "prefill_seconds", "warmup_seconds", "peak_memory_bytes", "method", "budget", "seed"),
    *("temperature", "top_k", "top_p", "min_p", "filter_order", "logit_bias", "verifier", "stop", "logprobs"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "tree", "spine", "draft_noise"),
}
NEW_TOKENS = 48
SMALL = ("--budget", "7", "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "tfm" / "loop_qwen3_5" / "golden.npz") as arrays:
        return {name: arrays[name] for name in arrays if name.endswith("ids")}


@pytest.fixture(scope="module")
def worded_checkpoint(loop_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint with a tokenizer beside it, whose ids end below the model's."""
    out = tmp_path_factory.mktemp("worded") / "out"
    link_with_tokenizer(loop_checkpoint, out)
    return out


def ids(values: np.ndarray) -> str:
    return " ".join(map(str, values.tolist()))


def generate(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    """Run `tfm generate … --json` and return what it printed."""
    assert main(["generate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def check_rounds(result: dict[str, Any]) -> None:
    """The relations between the figures of one object."""
    committed = [stats["committed"] for stats in result["rounds"]]
    assert 1 + sum(committed) == len(result["token_ids"])
    assert result["acceptance_length"] == pytest.approx(np.mean(committed))
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["accepted_by_depth"]) / len(committed))
    assert all(0 <= stats["nodes"] <= result["budget"] for stats in result["rounds"])


def test_json_holds_the_contract_and_the_golden_tokens(
    capsys: pytest.CaptureFixture[str], loop_checkpoint: Path, golden: dict[str, np.ndarray]
) -> None:
    prompt, expected = golden["prompt0/ids"], golden["prompt0/greedy_ids"]
    (result,) = generate(
        capsys, "--model", loop_checkpoint, "--token-ids", ids(prompt), "--max-new-tokens", NEW_TOKENS, "--compare-ar"
    )
    assert set(result) == FIELDS | {"compare_ar"}
    assert result["prompt_token_ids"] == prompt.tolist()
    assert result["prompt_token_ids"] + result["token_ids"] == expected.tolist()
    assert (result["finish_reason"], result["text"]) == ("length", None)
    assert (result["method"], result["budget"], result["seed"]) == ("tfm", 63, 0)
    assert result["acceptance_length"] > 2
    check_rounds(result)
    comparison = result["compare_ar"]
    assert (comparison["equal"], comparison["first_difference"], comparison["top2_margin"]) == (True, None, None)


def test_a_file_runs_as_a_batch(
    capsys: pytest.CaptureFixture[str], loop_checkpoint: Path, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    prompts = [golden[f"prompt{row}/ids"].tolist() for row in range(3)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts))
    results = generate(capsys, "--model", loop_checkpoint, "--prompt-file", path, "--method", "chain", *SMALL)
    assert [result["prompt_token_ids"] for result in results] == prompts
    for row, result in enumerate(results):
        assert result["token_ids"] == golden[f"prompt{row}/greedy_ids"][len(prompts[row]) :][:24].tolist()
        assert len(result["accepted_by_depth"]) == 7
        check_rounds(result)
    assert len({result["tokens_per_second"] for result in results}) == 1  # the batch's total


@pytest.mark.slow
def test_calibrated_budgets_change_no_token(
    capsys: pytest.CaptureFixture[str], loop_checkpoint: Path, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """From the table to the choice: every round verifies one of the calibrated budgets, and --costs is needed."""
    table, model = tmp_path / "costs.json", ("--model", str(loop_checkpoint))
    timed = ("--budgets", "3", "7", "--context", "8", "--rounds", "1", "--output", str(table))
    assert main(["calibrate", *model, *timed]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == ["budget 3", "budget 7", "a step left out", str(table)]
    prompt = golden["prompt0/ids"]
    arguments = (*model, "--token-ids", ids(prompt), "--max-new-tokens", NEW_TOKENS, "--budget", "auto")
    (result,) = generate(capsys, *arguments, "--costs", table)
    assert result["prompt_token_ids"] + result["token_ids"] == golden["prompt0/greedy_ids"].tolist()
    assert result["budget"] == "auto"
    assert {step["nodes"] for step in result["rounds"]} <= {3, 7}
    assert main(["generate", *map(str, arguments)]) == 2
    assert "no cost table at" in capsys.readouterr().err


def test_plain_decoding_has_rounds_of_one_token(
    capsys: pytest.CaptureFixture[str], loop_checkpoint: Path, golden: dict[str, np.ndarray]
) -> None:
    prompt = golden["prompt0/ids"]
    arguments = ("--model", loop_checkpoint, "--token-ids", ids(prompt), "--method", "ar", "--max-new-tokens")
    (result,) = generate(capsys, *arguments, "6")
    assert result["rounds"] == [{"nodes": 0, "committed": 1}] * 5
    assert result["accepted_by_depth"] == []
    (result,) = generate(capsys, *arguments, "1")
    assert (result["rounds"], result["acceptance_length"], result["tokens_per_second"]) == ([], None, None)


def test_text_streams_then_figures(capsys: pytest.CaptureFixture[str], worded_checkpoint: Path) -> None:
    arguments = ("--model", worded_checkpoint, "--prompt", "naïve 🙂", *SMALL)
    (result,) = generate(capsys, *arguments)
    assert result["prompt_token_ids"] == TOKENIZER.encode("naïve 🙂")
    assert result["text"] == TOKENIZER.decode(result["token_ids"])
    assert main(["generate", "--compare-ar", *map(str, arguments)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(result["text"] + "\n")
    figures = shown.removeprefix(result["text"] + "\n")
    assert figures.startswith(f"tfm: 24 tokens in {len(result['rounds'])} rounds")
    assert figures.endswith("tokens equal\n")
    assert figures.count("\n") == 1


def test_sampling_options_reach_the_engine_and_the_json(
    capsys: pytest.CaptureFixture[str], worded_checkpoint: Path
) -> None:
    """Options given twice, to the command and to the engine, write the same text; JSON says what was asked."""
    options = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--filter-order", "joint")
    more = ("--logit-bias", "65:-inf 66:1.5", "--frequency-penalty", "0.1", "--seed", "5", "--stop", "Q", "zz")
    arguments = ("--model", worded_checkpoint, "--prompt", "ab", "--method", "chain", "--budget", "7")
    arguments = (*arguments, "--max-new-tokens", "24", *options, *more)
    (result,) = generate(capsys, *arguments, "--logprobs", "2")
    engine = tfm_jax.load(worded_checkpoint, "float32")
    (direct,) = engine.generate(
        [TOKENIZER.encode("ab")], method="chain", budget=7, max_new_tokens=24, temperature=0.9, top_k=40, top_p=0.95,
        min_p=0.01, filter_order="joint", logit_bias={65: -np.inf, 66: 1.5}, frequency_penalty=0.1, seed=5,
        stop=["Q", "zz"], logprobs=2,
    )  # fmt: skip
    assert (result["token_ids"], result["text"]) == (direct.token_ids, direct.text)
    assert result["text"] == TOKENIZER.decode(result["token_ids"]).partition("Q")[0].partition("zz")[0]
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry, ours in zip(result["logprobs"], direct.logprobs, strict=True):
        assert entry["logprob"] == ours.logprob
        assert [(top["token_id"], top["logprob"]) for top in entry["top"]] == list(ours.top)
    asked = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "filter_order": "joint", "seed": 5}
    asked |= {"logit_bias": "65:-inf 66:1.5", "frequency_penalty": 0.1, "stop": ["Q", "zz"], "verifier": "target_only"}
    assert asked.items() <= result.items()
    assert main(["generate", *map(str, arguments)]) == 0
    assert capsys.readouterr().out.startswith(result["text"] + "\n")


def test_trace_replays_the_text(
    capsys: pytest.CaptureFixture[str], loop_checkpoint: Path, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    (result,) = generate(
        capsys, "--model", loop_checkpoint, "--token-ids", ids(golden["prompt1/ids"]), "--trace", path, *SMALL
    )
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["prompt"], line["round"]) for line in rounds] == [(0, number) for number in range(len(rounds))]
    assert [line["committed"] for line in rounds] == [stats["committed"] for stats in result["rounds"]]
    emitted = result["token_ids"][:1]
    for line in rounds:
        tokens, parents, path_slots = line["tokens"], line["parents"], line["path"]
        assert tokens[0] == emitted[-1]
        assert [parents[slot] for slot in path_slots] == [-1, *path_slots[:-1]]
        assert all(parent < slot for slot, parent in enumerate(parents))
        assert all((score is not None) == valid for score, valid in zip(line["scores"], line["valid"], strict=True))
        emitted += [tokens[slot] for slot in path_slots[1:]] + [line["bonus"]]
    assert emitted[: len(result["token_ids"])] == result["token_ids"]


CONVERTED = ["--model", "OUT"]  # OUT: the fixture's path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --demo or --model"),
        (["--demo", "--model", "x", "--prompt", "x"], "give either --demo or --model"),
        (CONVERTED, "give exactly one of --prompt, --prompt-file and --token-ids"),
        (
            [*CONVERTED, "--prompt", "x", "--token-ids", "1"],
            "give exactly one of --prompt, --prompt-file and --token-ids",
        ),
        ([*CONVERTED, "--prompt", "x"], "no tokenizer.json"),
        ([*CONVERTED, "--token-ids", "1 two"], "whole numbers"),
        ([*CONVERTED, "--token-ids", ""], "the prompt is empty"),
        ([*CONVERTED, "--token-ids", "1 512"], "token id 512 at position 1"),
        ([*CONVERTED, "--token-ids", "1", "--method", "beam"], "invalid choice 'beam'"),
        ([*CONVERTED, "--token-ids", "1", "--budget", "0"], "budget is 0"),
        ([*CONVERTED, "--token-ids", "1", "--budget", "256"], "budget is 256"),
        ([*CONVERTED, "--token-ids", "1", "--budget", "many"], "--budget"),
        ([*CONVERTED, "--token-ids", "1", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        ([*CONVERTED, "--token-ids", "1", "--max-new-tokens", "5000"], "positions"),
        ([*CONVERTED, "--token-ids", "1", "--temperature", "-1"], "temperature is -1"),
        ([*CONVERTED, "--token-ids", "1", "--temperature", "nan"], "temperature is nan"),
        ([*CONVERTED, "--token-ids", "1", "--seed", "-1"], "seed is -1"),
        ([*CONVERTED, "--token-ids", "1", "--top-p", "0"], "top_p is 0"),
        ([*CONVERTED, "--token-ids", "1", "--top-k", "-3"], "top_k is -3"),
        ([*CONVERTED, "--token-ids", "1", "--logit-bias", "7=2"], "--logit-bias is '7=2'"),
        ([*CONVERTED, "--token-ids", "1", "--logit-bias", "512:2"], "token 512"),
        ([*CONVERTED, "--token-ids", "1", "--verifier", "rejection"], "verifier rejection needs a chain"),
        ([*CONVERTED, "--token-ids", "1", "--logprobs", "21", "--json"], "logprobs is 21"),
        ([*CONVERTED, "--token-ids", "1", "--logprobs", "2"], "--logprobs shows in JSON only"),
        ([*CONVERTED, "--token-ids", "1", "--temperature", "1", "--verifier", "traversal", "--compare-ar"], "lawfully"),
        ([*CONVERTED, "--token-ids", "1", "--stop", "x"], "need a tokenizer"),
        ([*CONVERTED, "--token-ids", "1", "--context", "9"], "context is 9"),
        ([*CONVERTED, "--token-ids", "1", "--context", "1000000000"], "context is 1000000000"),
        ([*CONVERTED, "--token-ids", "1", "--trace", "missing/trace.jsonl"], "--trace missing/trace.jsonl"),
        ([*CONVERTED, "--prompt-file", "missing.txt"], "missing.txt cannot be read"),
        ([*CONVERTED, "--prompt-file", "gap.txt"], "gap.txt line 2 is empty"),
        ([*CONVERTED, "--prompt-file", "torn.jsonl"], "torn.jsonl line 1 is not JSON"),
        ([*CONVERTED, "--prompt-file", "other.jsonl"], "other.jsonl line 2 must be an object"),
        ([*CONVERTED, "--prompt-file", "truth.jsonl"], "truth.jsonl line 1 must be an object"),
        (["--model", "missing", "--token-ids", "1"], "missing is not a directory"),
        (["--model", ".", "--token-ids", "1"], "not a converted checkpoint"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    loop_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gap.txt").write_text("one\n\nthree\n")
    Path("torn.jsonl").write_text('{"prompt": \n')
    Path("other.jsonl").write_text('{"token_ids": [1]}\n{"text": "x"}\n')
    Path("truth.jsonl").write_text('{"token_ids": [true]}\n')
    before = sorted(tmp_path.iterdir())
    assert main(["generate", *(str(loop_checkpoint) if word == "OUT" else word for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert sorted(tmp_path.iterdir()) == before


def test_text_that_spells_none_is_text(capsys: pytest.CaptureFixture[str], worded_checkpoint: Path) -> None:
    (result,) = generate(
        capsys, "--model", worded_checkpoint, "--prompt", "None", "--method", "ar", "--max-new-tokens", "1"
    )
    assert result["prompt_token_ids"] == TOKENIZER.encode("None")


def test_version_names_jax_device_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    device = jax.devices()[0].platform
    assert f"jax {jax.__version__}, device {device}" in (shown := capsys.readouterr().out)
    assert shown.rstrip().endswith("kernels xla")


def test_ctrl_c_ends_with_130_and_no_traceback(loop_checkpoint: Path) -> None:
    arguments = ["--model", loop_checkpoint, "--token-ids", "1 2 3", "--method", "ar", "--max-new-tokens", "500"]
    command = [sys.executable, "-m", "tfm_jax.cli", "generate", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **pipes) as process:
        process.stdout.read(1)  # generation runs
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
