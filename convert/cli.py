"""Command line `tfm-convert`; everything heavy is imported once the options are known."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tfm_jax.errors import TfmError

_USER_ERROR, _INTERRUPTED = 2, 130


@dataclasses.dataclass(frozen=True)
class Options:
    """Convert a target model, its DFlash drafter and its Weaver into one directory that `tfm` runs.

    Without a Weaver the result serves the methods ar, chain and ddtree; without a drafter ar alone.
    """

    target: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Hugging Face directory of a Qwen3.5, Qwen3.6 or dense Qwen3 model."""

    out: Annotated[Path, tyro.conf.arg(metavar="OUT")]
    """Directory to create."""

    drafter: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Hugging Face directory of a DFlash drafter for this target."""

    weaver: Annotated[Path | None, tyro.conf.arg(metavar="FILE.pth")] = None
    """Weaver for this target and drafter."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the stored weights; those of the recurrence stay float32."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 after bad input, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["convert"]:
        words = words[1:]
    try:
        options = tyro.cli(Options, prog="tfm-convert", args=words)
        print(_convert(options))
    except TfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as end:  # tyro has printed the help or what is wrong with the options
        return end.code if isinstance(end.code, int) else _USER_ERROR
    return 0


def _convert(options: Options) -> str:
    from convert.pipeline import convert_checkpoint

    with _progress_bar() as progress:
        report = convert_checkpoint(
            options.target,
            options.out,
            drafter=options.drafter,
            weaver=options.weaver,
            dtype=options.dtype,
            progress=progress,
        )
    skipped = ", ".join(f"{count} tensors {prefix}.*" for prefix, count in sorted(report.skipped.items()))
    return f"{options.out}: {report.parameters:,} parameters" + (f"; skipped {skipped}" if skipped else "")


@contextmanager
def _progress_bar() -> Generator[Callable[[int, int], None], None, None]:
    """Bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting")
        yield lambda done, total: bar.update(task, completed=done, total=total)
