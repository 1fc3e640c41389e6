"""Measures what the package does. Every sub-command prints tables and, with --output, writes JSON and plots beside it.

    python scripts/bench.py acceptance --held-out corpus/val.jsonl.xz --prompts prompts --output acceptance.json

Plots need the extra `plot` (matplotlib). Exit code 1: the figures are there, but a check that belongs to them failed.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import common  # isort: skip - before jax
import tyro
from _bench_acceptance import Acceptance
from _bench_budgets import Budgets
from _bench_kernels import Kernels
from _bench_speed import Speed
from _bench_trees import Trees

import tfm_jax
from tfm_jax import runtime
from tfm_jax.errors import TfmError, one_sentence
from tfm_jax.files import write_whole

# Options of each sub-command; `measure` makes the report, `show` prints it, `plot` draws it, `failure` judges it.
COMMANDS: dict[str, Callable[..., Any]] = {
    "acceptance": Acceptance,
    "trees": Trees,
    "budgets": Budgets,
    "speed": Speed,
    "kernels": Kernels,
}
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
_CHECK_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit code: 0, 1 after a failed check, 2 after a user's error."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with one_sentence("bench.py"):
            command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="bench.py", description=__doc__, args=words)
        check_output(command.output)
        run = describe_run(words)
        report = command.measure()
    except TfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return common.USER_ERROR
    report = report | {"meta": run | report["meta"]}
    command.show(report)
    if command.output is not None:
        try:
            write_whole(command.output, [json.dumps(report, indent=1, allow_nan=False), "\n"])
        except OSError as error:
            print(f"error: {command.output} cannot be written ({error}); the figures are above.", file=sys.stderr)
            return common.USER_ERROR
        if can_plot():
            command.plot(report, command.output)
    if failure := command.failure(report):
        print(f"error: {failure}", file=sys.stderr)
        return _CHECK_FAILED
    return 0


def check_output(path: Path | None) -> None:
    """Finds out before the measurement whether its results can be written.

    Raises:
        TfmError: the folder is missing, or the path is one.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        message = f"--output {path} cannot be written; name a file in a folder that exists."
        raise TfmError(message)


def describe_run(words: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to judge or repeat a measurement: device, versions, date, command, XLA's flags."""
    return {
        "device": runtime.device_name(),
        "versions": {
            "tfm-jax": tfm_jax.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _LIBRARIES},
        },
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "scripts/bench.py", *words]),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def can_plot() -> bool:
    """Prepares matplotlib for files; says so where it is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: matplotlib is missing (pip install 'tfm-jax[plot]')", file=sys.stderr)
        return False
    mpl.use("Agg")
    return True


if __name__ == "__main__":
    sys.exit(main())
