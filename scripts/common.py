"""What the training scripts share: the environment, error messages, exit codes and the time budget.

Import it before jax: it sets jax's environment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from tfm_jax import runtime
from tfm_jax.errors import TfmError, one_sentence

_STARTED = time.monotonic()
USER_ERROR = 2
UNFINISHED = 75  # EX_TEMPFAIL: the time ran out, the same command goes on

runtime.configure()


def deadline(seconds: float | None) -> float | None:
    """`time.monotonic()` at which a script that was given `seconds` since its start must stop."""
    return None if seconds is None else _STARTED + seconds


def run_script[Arguments](main: Callable[[Arguments], bool], arguments: type[Arguments]) -> None:
    """Parses the command line, runs `main` and exits: 0 if it says it has finished, else 75; 2 after a user's error."""
    try:
        with one_sentence(Path(sys.argv[0]).name):
            parsed: Any = tyro.cli(arguments)
        finished = main(parsed)
    except TfmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if not finished:
        print("the time is up; run the same command again to go on", file=sys.stderr)
        sys.exit(UNFINISHED)
