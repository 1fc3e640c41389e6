"""The command line: `tfm generate` and `tfm --version`.

Whatever loads jax is imported inside functions, so that `--help` and mistyped options answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tfm_jax import runtime
from tfm_jax.config import FilterOrder, Method, Verifier
from tfm_jax.errors import TfmError, require

if TYPE_CHECKING:
    from tfm_jax.engine import Engine, Generation, Round, TokenLogprobs

type Prompt = str | list[int]

_BAD_INPUT, _INTERRUPTED = 2, 130
_Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt: the text that plain decoding gives, in fewer passes of the target."""

    demo: bool = False
    """Use the small models that come with the package; this or --model."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory that tfm-convert wrote."""
    prompt: _Text = None
    """Raw text: no template and no begin token are added. One of --prompt, --prompt-file, --token-ids."""
    prompt_file: _File = None
    """One prompt a line; in a .jsonl file an object with `prompt` or `token_ids` a line. Runs as one batch."""
    token_ids: Annotated[str | None, tyro.conf.arg(metavar='"1 2 3"')] = None
    """Prompt as token ids."""
    method: Method = "tfm"
    """Weaver tree, tree of the drafter's marginals, drafted chain, or one token at a time."""
    budget: int = 63
    """Most nodes of a tree, the root not counted, 1 to 255."""
    max_new_tokens: int = 128
    """Stop after so many new tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, tokens are sampled from the target's own law."""
    top_k: int = 0
    """Sample among the K likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens, each of which has less than P before it; 1 is off."""
    min_p: float = 0.0
    """Sample among tokens at least P times as likely as the likeliest; 0 is off."""
    filter_order: FilterOrder = "sequential"
    """Top-k, top-p, min-p, each on what the one before left; or top-p jointly with top-k, on the whole law."""
    logit_bias: Annotated[str | None, tyro.conf.arg(metavar='"ID:X ID:X"')] = None
    """Numbers added to the logits of tokens; -inf bans one."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or text; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtract from a token's logit for every time it is in the text; 0 is off."""
    presence_penalty: float = 0.0
    """Subtract from a token's logit if it is in the text; 0 is off."""
    verifier: Verifier = "target_only"
    """How drafts are accepted; none changes the law of the text. rejection needs the method chain."""
    seed: int = 0
    """Decides the sampled text, whatever method and budget (with another verifier than target_only: given those)."""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")] = ()
    """Texts that end the continuation; they are left out of it."""
    logprobs: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --json, report every new token's log-probability and those of the N likeliest tokens in its place."""
    context: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Tokens that the caches hold; by default prompt and new tokens, rounded up."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, tyro.conf.arg(metavar="{float32,bfloat16}")] = None
    """Compute dtype; by default float32 on a CPU and bfloat16 on a GPU."""
    compare_ar: bool = False
    """Run plain decoding too: its speed, and whether the tokens are equal."""
    trace: _File = None
    """Write every round's tree, accepted path and bonus as JSON lines."""
    json: bool = False
    """Print one JSON array, an object a prompt, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Plain decoding of one prompt beside a speculative run of it.

    Attributes:
        tokens_per_second: of plain decoding, over the whole batch.
        first_difference: index of the first new token that differs; None where all are equal.
        top2_margin: gap between the target's two largest logits there.
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
    options = _parse(arguments)
    prompts = _read_prompts(options)
    _check_trace_path(options.trace)
    with _busy("loading"):
        engine = _load(options)
        batch = [_encode(engine, prompt) for prompt in prompts]
    if options.json or options.prompt_file is not None:
        _generate_batch(engine, batch, options)
    else:
        _stream_one(engine, batch[0], options)


def _parse(arguments: list[str]) -> Generate:
    """The options; tyro's framed message about a mistake becomes one sentence."""
    framed = io.StringIO()
    try:
        with contextlib.redirect_stderr(framed):
            return tyro.extras.subcommand_cli_from_dict(
                {"generate": Generate},
                prog="tfm",
                description="Lossless tree speculation. `tfm --version` names jax, the device and the kernels.",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        message = f"{_first_paragraph(framed.getvalue())} See: tfm generate --help"
        raise TfmError(message) from None


def _first_paragraph(framed: str) -> str:
    """What tyro's frame says between its title and its first rule, on one line."""
    framed = re.sub(r"\x1b\[[0-9;]*m", "", framed)  # colours
    title, *paragraphs = re.split(r"(?m)^.*[─-]{10}.*$", framed)
    sentence = " ".join((paragraphs or [title])[0].replace("│", " ").split())
    return sentence.rstrip(".") + "."


def _version() -> str:
    runtime.configure()
    import jax

    import pallas_kernels
    from tfm_jax import __version__

    kernels = pallas_kernels.default_implementation()
    return f"tfm-jax {__version__}, jax {jax.__version__}, device {runtime.device_name()}, kernels {kernels}"


def _read_prompts(options: Generate) -> list[Prompt]:
    """Prompts as the user gave them, before a model is loaded."""
    require(options.demo != (options.model is not None), "give either --demo or --model DIR.")
    sources = (options.prompt, options.prompt_file, options.token_ids)
    given = sum(source is not None for source in sources)
    require(given == 1, "give exactly one of --prompt, --prompt-file and --token-ids.")
    if options.prompt_file is not None:
        return _read_prompt_file(options.prompt_file)
    if options.token_ids is not None:
        return [_parse_token_ids(options.token_ids)]
    return [options.prompt or ""]


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        message = f'--token-ids is {text!r}; write whole numbers with spaces between, such as "1 2 3".'
        raise TfmError(message) from None


def _parse_logit_bias(text: str | None) -> dict[int, float] | None:
    if text is None:
        return None
    pairs = [word.partition(":") for word in text.split()]
    try:
        return {int(token): float(value) for token, _, value in pairs}
    except ValueError:
        message = f'--logit-bias is {text!r}; write ID:NUMBER with spaces between, such as "11:-2 13:0.5".'
        raise TfmError(message) from None


def _read_prompt_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({error}); give a UTF-8 text file."
        raise TfmError(message) from error
    if path.suffix == ".jsonl":
        return [_parse_json_prompt(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    for number, line in enumerate(lines, 1):
        require(line != "", f"{path} line {number} is empty; write one prompt a line.")
    return list(lines)


def _parse_json_prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        message = f"{where} is not JSON ({error}); write an object a line."
        raise TfmError(message) from error
    match entry:
        case {"prompt": str(text)} if "token_ids" not in entry:
            return text
        case {"token_ids": [*token_ids]} if "prompt" not in entry and all(type(token) is int for token in token_ids):
            return token_ids
    message = f'{where} must be an object with either "prompt" (a text) or "token_ids" (a list of whole numbers).'
    raise TfmError(message)


def _check_trace_path(path: Path | None) -> None:
    fine = path is None or (path.parent.is_dir() and not path.is_dir())
    require(fine, f"--trace {path} cannot be written; name a file in a folder that exists.")


def _load(options: Generate) -> Engine:
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
    """Keyword arguments of `Engine.generate` and `Engine.stream`."""
    return {
        "method": method or options.method,
        "budget": options.budget,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "filter_order": options.filter_order,
        "logit_bias": _parse_logit_bias(options.logit_bias),
        "repetition_penalty": options.repetition_penalty,
        "frequency_penalty": options.frequency_penalty,
        "presence_penalty": options.presence_penalty,
        "verifier": options.verifier,
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
    return generations, [_compare(engine, *pair) for pair in zip(generations, plain, strict=True)]


def _compare(engine: Engine, generation: Generation, plain: Generation) -> Comparison:
    pairs = itertools.zip_longest(generation.token_ids, plain.token_ids)
    index = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    margin = None if index is None else engine.top2_margin(plain.prompt_token_ids, plain.token_ids, index)
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
            f"where the target's two best logits are {item.top2_margin:.2g} apart"
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
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
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
