"""The command line: `tfm generate`, `tfm calibrate` and `tfm --version`.

Whatever loads jax is imported inside functions, so that `--help` and mistyped options answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_jax import runtime
from tfm_jax.cli_options import Calibrate, Generate, Prompt, parse_arguments, parse_logit_bias, read_prompts
from tfm_jax.config import Method
from tfm_jax.errors import TfmError, require
from tfm_jax.files import write_whole

if TYPE_CHECKING:
    from tfm_jax.engine import Engine, Generation, Round, TokenLogprobs

_BAD_INPUT, _INTERRUPTED = 2, 130


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Plain decoding of one prompt beside a speculative run of it.

    Attributes:
        tokens_per_second: of plain decoding, over the whole batch.
        first_difference: index of the first new token that differs; None where all are equal.
        top2_margin: gap between the target's two best choices there, logits plus noise.
    """

    tokens_per_second: float | None
    equal: bool
    first_difference: int | None
    top2_margin: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tfm`; returns the exit code: 0, 2 after bad input, 130 after Ctrl-C."""
    try:
        _run(sys.argv[1:] if arguments is None else list(arguments))
    except TfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader went away, as in `tfm generate … | head`; spare Python's flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print(_version())
        return
    options = parse_arguments(arguments)
    require(options.demo != (options.model is not None), "give either --demo or --model DIR.")
    if isinstance(options, Calibrate):
        _calibrate(options)
        return
    prompts = read_prompts(options)
    _check_output("--trace", options.trace)
    with _busy("loading"):
        engine = _load(options)
        batch = [_encode(engine, prompt) for prompt in prompts]
    if options.json or options.prompt_file is not None:
        _generate_batch(engine, batch, options)
    else:
        _stream_one(engine, batch[0], options)


def _version() -> str:
    runtime.configure()
    import jax

    import pallas_kernels
    from tfm_jax import __version__

    kernels = pallas_kernels.default_implementation()
    return f"tfm-jax {__version__}, jax {jax.__version__}, device {runtime.device_name()}, kernels {kernels}"


def _check_output(option: str, path: Path | None) -> None:
    fine = path is None or (path.parent.is_dir() and not path.is_dir())
    require(fine, f"{option} {path} cannot be written; name a file in a folder that exists.")


def _calibrate(options: Calibrate) -> None:
    """Measure, write the table, and show it."""
    from tfm_jax.budget import COSTS_FILE, write_costs

    _check_output("--output", options.output)
    with _busy("loading"):
        engine = _load(options)
    from tfm_jax.calibration import measure_costs

    with _busy("timing"):
        costs = measure_costs(
            engine, method=options.method, budgets=options.budgets, context=options.context, rounds=options.rounds
        )
    path = options.output or engine.costs_path or Path(COSTS_FILE)
    write_costs(path, costs)
    for budget, *seconds in zip(costs.budgets, costs.fixed_seconds, costs.seconds, strict=True):
        fixed, chosen = (f"{part * 1e3:.2f} ms" for part in seconds)
        print(
            f"budget {budget}: {fixed} a round"
            + (f", {chosen} as the choice of auto" if budget in costs.choices else "")
        )
    print(f"a step left out: {costs.step_seconds * 1e3:.3f} ms less")
    print(path)


def _load(options: Generate | Calibrate) -> Engine:
    runtime.configure()
    from tfm_jax import engine

    return engine.load_demo(options.dtype) if options.model is None else engine.load(options.model, options.dtype)


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if engine.tokenizer is None:
        message = "this checkpoint has no tokenizer.json; give the prompt as --token-ids."
        raise TfmError(message)
    return engine.tokenizer.encode(prompt)


def _settings(options: Generate, method: Method | None = None) -> dict[str, Any]:
    """Keyword arguments of `Engine.generate` and `Engine.stream`; `ar`, to compare with, has no budget to choose."""
    from tfm_jax.budget import read_costs

    return {
        "method": method or options.method,
        "budget": options.budget if method is None or options.budget != "auto" else 1,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "filter_order": options.filter_order,
        "logit_bias": parse_logit_bias(options.logit_bias),
        "repetition_penalty": options.repetition_penalty,
        "frequency_penalty": options.frequency_penalty,
        "presence_penalty": options.presence_penalty,
        "verifier": options.verifier,
        "tree": options.tree,
        "spine": options.spine,
        "draft_noise": options.draft_noise,
        "costs": None if options.costs is None else read_costs(options.costs),
        "seed": options.seed,
        "context": options.context,
        "stop": options.stop,
        "logprobs": options.logprobs,
    }


def _stream_one(engine: Engine, prompt: list[int], options: Generate) -> None:
    """Print one continuation as it comes, then the figures.

    Beside plain decoding both methods are timed by `generate`, so that neither pays for printing.
    """
    with _busy("compiling"):
        stream = engine.stream(prompt, **_settings(options))
    rounds = []
    times = []
    for item in _show(engine, stream, options.stop):
        rounds.append(item)
        times.append(time.perf_counter())
    if options.trace is not None:
        _write_trace(options.trace, _trace_lines(0, rounds))
    if options.compare_ar:
        _print_figures(*_measure(engine, [prompt], options), options)
        return
    committed = [item.committed for item in rounds[1:]]
    rate = sum(committed) / (times[-1] - times[0]) if committed else None
    print(_figures(1 + sum(committed), committed, rate, options))


def _show(engine: Engine, rounds: Iterator[Round], stop: Sequence[str]) -> Iterator[Round]:
    """Pass the rounds on and print their text, or their ids where the checkpoint has no tokenizer."""
    from tfm_jax.text import StopText

    text = StopText(engine.tokenizer, stop) if engine.tokenizer else None
    for item in rounds:
        stopped = item.done and item.tokens[-1] in engine.config.stop_token_ids
        shown = item.tokens[:-1] if stopped else item.tokens
        print(text.feed(shown)[1] if text else "".join(f"{token} " for token in shown), end="", flush=True)
        yield item
    print(text.finish() if text else "")


def _generate_batch(engine: Engine, batch: list[list[int]], options: Generate) -> None:
    with _busy("generating"):
        generations, comparisons = _measure(engine, batch, options)
        if options.trace is not None:  # a second run, so that tracing does not slow the one that is timed
            traced = (engine.stream(prompt, **_settings(options)) for prompt in batch)
            lines = (line for index, rounds in enumerate(traced) for line in _trace_lines(index, rounds))
            _write_trace(options.trace, lines)
    if options.json:
        print(json.dumps([_to_json(*pair, options) for pair in zip(generations, comparisons, strict=True)]))
        return
    for number, generation in enumerate(generations, 1):
        text = " ".join(map(str, generation.token_ids)) if generation.text is None else generation.text
        print(f"[{number}] {text}")
    _print_figures(generations, comparisons, options)


def _measure(
    engine: Engine, batch: list[list[int]], options: Generate
) -> tuple[list[Generation], list[Comparison | None]]:
    """Run a batch, and plain decoding of it where that is asked for."""
    generations = engine.generate(batch, **_settings(options))
    if not options.compare_ar:
        return generations, [None] * len(batch)
    plain = engine.generate(batch, **_settings(options, "ar"))
    return generations, [_compare(engine, *pair, options) for pair in zip(generations, plain, strict=True)]


def _compare(engine: Engine, generation: Generation, plain: Generation, options: Generate) -> Comparison:
    pairs = itertools.zip_longest(generation.token_ids, plain.token_ids)
    index = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    margin = None
    if index is not None:
        drawn = {"temperature": options.temperature, "seed": options.seed}
        margin = engine.top2_margin(plain.prompt_token_ids, plain.token_ids, index, **drawn)
    return Comparison(plain.tokens_per_second, index is None, index, margin)


def _to_json(generation: Generation, comparison: Comparison | None, options: Generate) -> dict[str, Any]:
    values: dict[str, Any] = {
        "prompt_token_ids": generation.prompt_token_ids,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "rounds": [dataclasses.asdict(stats) for stats in generation.rounds],
        "acceptance_length": generation.acceptance_length,
        "accepted_by_depth": generation.accepted_by_depth,
        "tokens_per_second": generation.tokens_per_second,
        "prefill_seconds": generation.prefill_seconds,
        "warmup_seconds": generation.warmup_seconds,
        "peak_memory_bytes": runtime.peak_memory_bytes(),
        "method": options.method,
        "budget": options.budget,
        "seed": options.seed,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "filter_order": options.filter_order,
        "logit_bias": options.logit_bias,
        "repetition_penalty": options.repetition_penalty,
        "frequency_penalty": options.frequency_penalty,
        "presence_penalty": options.presence_penalty,
        "verifier": options.verifier,
        "tree": options.tree,
        "spine": options.spine,
        "draft_noise": options.draft_noise,
        "stop": list(options.stop),
        "logprobs": generation.logprobs and [_logprobs_json(entry) for entry in generation.logprobs],
    }
    return values if comparison is None else values | {"compare_ar": dataclasses.asdict(comparison)}


def _logprobs_json(entry: TokenLogprobs) -> dict[str, Any]:
    """Minus infinity, which JSON has no number for, becomes null."""
    top = [{"token_id": token, "logprob": _finite(value)} for token, value in entry.top]
    return {"token_id": entry.token_id, "logprob": _finite(entry.logprob), "top": top}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print_figures(generations: list[Generation], comparisons: list[Comparison | None], options: Generate) -> None:
    committed = [stats.committed for generation in generations for stats in generation.rounds]
    tokens = sum(len(generation.token_ids) for generation in generations)
    line = _figures(tokens, committed, generations[0].tokens_per_second, options)
    known = [comparison for comparison in comparisons if comparison is not None]
    print("; ".join([line, *_comparison_notes(known, generations[0].tokens_per_second)]))


def _figures(tokens: int, committed: list[int], rate: float | None, options: Generate) -> str:
    mean = f", {sum(committed) / len(committed):.2f} tokens a round" if committed else ""
    return f"{options.method}: {tokens} tokens in {len(committed)} rounds{mean}, {_rate(rate)}"


def _comparison_notes(comparisons: list[Comparison], rate: float | None) -> Iterator[str]:
    if not comparisons:
        return
    plain = comparisons[0].tokens_per_second
    ratio = f" ({rate / plain:.2f} times as fast)" if rate and plain else ""
    yield f"ar: {_rate(plain)}{ratio}"
    differing = [(number, item) for number, item in enumerate(comparisons, 1) if not item.equal]
    if not differing:
        yield "tokens equal"
    for number, item in differing:
        where = f"prompt {number}: " if len(comparisons) > 1 else ""
        yield (
            f"{where}tokens differ first at new token {item.first_difference}, "
            f"where the target's two best choices are {item.top2_margin:.2g} apart"
        )


def _rate(rate: float | None) -> str:
    return "no rate" if rate is None else f"{rate:.1f} tokens/s"


def _trace_lines(prompt: int, rounds: Iterable[Round]) -> Iterator[str]:
    """One JSON object a round: lists over the tree's slots, root first; the path holds slots."""
    traces = ((item.committed, item.trace) for item in rounds if item.trace is not None)
    for number, (committed, trace) in enumerate(traces):
        values = {
            "prompt": prompt,
            "round": number,
            "tokens": trace.tokens.tolist(),
            "parents": trace.parents.tolist(),
            "depths": trace.depths.tolist(),
            "valid": trace.valid.tolist(),
            "scores": [_finite(score) for score in trace.scores.tolist()],
            "path": trace.path.tolist(),
            "bonus": trace.bonus,
            "committed": committed,
        }
        yield json.dumps(values)


def _write_trace(path: Path, lines: Iterable[str]) -> None:
    try:
        write_whole(path, (f"{line}\n" for line in lines))
    except OSError as error:
        message = f"--trace {path} cannot be written ({error}); name another file."
        raise TfmError(message) from error


@contextlib.contextmanager
def _busy(what: str) -> Generator[None]:
    """A spinner on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


if __name__ == "__main__":
    sys.exit(main())
