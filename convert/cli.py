"""Command line `tfm-convert`; everything heavy is imported once the options are known."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from convert.hub import WEAVER_FILES, resolve
from tfm_jax.errors import TfmError, one_sentence

_USER_ERROR, _INTERRUPTED = 2, 130


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert a target model, its DFlash drafter and its Weaver into one directory that `tfm` runs.

    Without a Weaver the result serves the methods ar, chain and ddtree; without a drafter ar alone. An ID is that of a
    repository on the Hugging Face Hub, owner/name or owner/name@revision. A run that was stopped is continued by the
    same command. Other commands: tfm-convert inspect, tfm-convert export.
    """

    target: Annotated[str, tyro.conf.arg(metavar="DIR|ID")]
    """Hugging Face directory of a Qwen3.5, Qwen3.6, Qwen3-Next or dense Qwen3 model."""

    out: Annotated[Path, tyro.conf.arg(metavar="OUT")]
    """Directory to create."""

    drafter: Annotated[str | None, tyro.conf.arg(metavar="DIR|ID")] = None
    """Hugging Face directory of a DFlash drafter for this target."""

    weaver: Annotated[str | None, tyro.conf.arg(metavar="FILE.pth|ID")] = None
    """Weaver for this target and drafter."""

    revision: str | None = None
    """Commit, branch or tag of a target given by its id."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the stored weights; those of the recurrence stay float32."""

    dry_run: bool = False
    """Check names, shapes, types and disk space from headers alone; write nothing."""

    strict: bool = False
    """Fail where a tensor holds NaN or infinite values, instead of warning."""

    verify: bool = False
    """Compare the result with the sources; with the extra tfm-jax[verify] its logits too."""

    quiet: bool = False
    """Print warnings and errors only."""


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Say what a checkpoint is, from its configuration and headers: of any kind that tfm-convert reads or writes."""

    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")]
    """Hugging Face directory, Weaver's .pth, or converted directory."""

    context: int | None = None
    """Tokens of context for the estimate of device memory; by default 32768, or what the model has."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and caches for that estimate."""

    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the drafter or the Weaver of a converted directory for other software, number for number.

    The drafter becomes a directory that SGLang and vLLM read, the Weaver a .pth file for its reference loader.
    """

    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Converted directory."""

    drafter: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory to create for the drafter."""

    weaver: Annotated[Path | None, tyro.conf.arg(metavar="FILE.pth")] = None
    """File to create for the Weaver."""


_COMMANDS = {"convert": Convert, "inspect": Inspect, "export": Export}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 after bad input, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words[:1] and words[0] in _COMMANDS else "convert"
    prog = "tfm-convert" if command == "convert" else f"tfm-convert {command}"
    try:
        with one_sentence(prog):
            options = tyro.cli(
                _COMMANDS[command], prog=prog, args=words, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
            )
        print(_run(options), end="")
    except TfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit:  # tyro has printed the help
        return 0
    return 0


def _run(options: Convert | Inspect | Export) -> str:
    if isinstance(options, Inspect):
        return _inspect(options)
    return _export(options) if isinstance(options, Export) else _convert(options)


def _inspect(options: Inspect) -> str:
    from convert.inspection import describe, inspect_checkpoint

    found = inspect_checkpoint(options.path, context=options.context, dtype=options.dtype)
    return (json.dumps(found.to_dict(), indent=2) if options.json else describe(found)) + "\n"


def _export(options: Export) -> str:
    from convert.export import export_checkpoint

    if options.drafter is None and options.weaver is None:
        message = "nothing to export; give --drafter DIR, --weaver FILE.pth or both."
        raise TfmError(message)
    files = []
    if options.drafter is not None:
        files += export_checkpoint(options.path, options.drafter, "drafter")
    if options.weaver is not None:
        files += export_checkpoint(options.path, options.weaver, "weaver")
    return "".join(f"{file}\n" for file in files)


def _convert(options: Convert) -> str:
    from convert.inspection import find_unknown_keys
    from convert.pipeline import check_conversion, convert_checkpoint

    if options.dry_run and options.verify:
        message = "--verify compares what a run has written; leave out --dry-run."
        raise TfmError(message)
    silent = options.quiet or not sys.stderr.isatty()
    target = resolve(options.target, options.revision, quiet=silent)
    drafter = weaver = None
    revisions = {"target": target.revision}
    if options.drafter is not None:
        drafter, revisions["drafter"] = resolve(options.drafter, quiet=silent)
    if options.weaver is not None:
        weaver, revisions["weaver"] = resolve(options.weaver, patterns=WEAVER_FILES, quiet=silent)
    arguments: dict[str, Any] = {
        "target": target.path,
        "out": options.out,
        "drafter": drafter,
        "weaver": weaver,
        "dtype": options.dtype,
        "revisions": {model: commit for model, commit in revisions.items() if commit},
    }
    if options.dry_run:
        plan = check_conversion(**arguments)
        report = f"{options.out}: would hold {plan.parameters:,} parameters in {plan.size / 1e9:.2f} GB"
        report += f" ({plan.free / 1e9:.2f} GB are free)" + _and_skipped(plan.skipped)
        if plan.finished:
            report += f"; {plan.finished} of {plan.pieces} pieces are written already"
    else:
        with _progress_bar("converting", quiet=options.quiet) as progress:
            done = convert_checkpoint(strict=options.strict, progress=progress, **arguments)
        report = f"{options.out}: {done.parameters:,} parameters" + _and_skipped(done.skipped)
        if done.resumed:
            report += f"; went on after {done.resumed} pieces of an earlier run"
        for name, count in done.non_finite.items():
            _warn(f"{name} holds {count} NaN or infinite values.")
        if options.verify:
            report += "\n" + _verify(options, target.path, drafter, weaver)
    for path, names in find_unknown_keys(target.path, drafter, weaver).items():
        _warn(f"{path}: nothing reads the keys {', '.join(names)}; they are left out.")
    return "" if options.quiet else f"{report}\n"


def _verify(options: Convert, target: Path, drafter: Path | None, weaver: Path | None) -> str:
    from convert.verification import verify_checkpoint

    with _progress_bar("verifying", quiet=options.quiet) as progress:
        found = verify_checkpoint(options.out, target, drafter, weaver, progress=progress)
    report = f"{found.parameters} of {found.of} arrays ({found.values:,} values) are those of the sources"
    if found.logits is None:
        return report + "; logits not compared, for want of torch and transformers (the extra tfm-jax[verify])"
    near = f"within {found.logits.difference:.2g} of transformers', the largest of which is {found.logits.largest:.2g}"
    return report + f"; logits {near}; {found.logits.agreed} of {found.logits.prefixes} next tokens agree"


def _and_skipped(skipped: Mapping[str, int]) -> str:
    words = ", ".join(f"{count} tensors {prefix}.*" for prefix, count in sorted(skipped.items()))
    return f"; skipped {words}" if words else ""


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


@contextmanager
def _progress_bar(title: str, *, quiet: bool) -> Generator[Callable[[int, int], None], None, None]:
    """Bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
