"""Conversions in processes of their own, to be killed, limited or stripped of rights; a program for `test_restart`.

It reads a line of JSON per conversion, forks, and prints what became of it: the exit code (negative: the signal), the
number of steps, and the error. Steps are the calls that change OUT or open its files.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (imported on first use, which may be after the rights are gone)
import importlib.metadata
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from convert.pipeline import convert_checkpoint
from tfm_jax.errors import TfmError

_STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
_NOBODY = 65534


def convert(sources: dict[str, str], out: str, kill_at: int, largest_file: int, *, as_nobody: bool) -> dict[str, Any]:
    """In the child: convert, and report unless killed before."""
    steps = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        if event in _STEPS and str(arguments[0]).startswith(out):
            steps += 1
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if as_nobody and os.geteuid() == 0:
        known = importlib.metadata.version("tfm-jax")  # the clone may lie where only its owner can read
        importlib.metadata.version = lambda _: known
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.addaudithook(count)
    try:
        report = convert_checkpoint(out=Path(out), **{name: Path(path) for name, path in sources.items()})
    except TfmError as error:
        return {"steps": steps, "error": str(error)}
    return {"steps": steps, "resumed": report.resumed}


def main() -> None:
    """One fork a line; nothing here starts a thread before."""
    for line in sys.stdin:
        order = {"kill_at": 0, "largest_file": 0, "as_nobody": False} | json.loads(line)
        incoming, outgoing = os.pipe()
        child = os.fork()
        if not child:
            os.write(outgoing, json.dumps(convert(**order)).encode())
            os._exit(0)
        os.close(outgoing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(incoming) as pipe:
            result = json.loads(pipe.read() or "{}")
        sys.stdout.write(json.dumps(result | {"code": os.waitstatus_to_exitcode(status)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
