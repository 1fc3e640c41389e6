"""Measure conversion and loading against plain copying and reading of the same files, in one run.

    python scripts/_synthetic.py qwen3.5-4b work/4b
    python scripts/bench_convert.py --target work/4b --work work/bench --rounds 3

Each round copies the source's weights (`cp --reflink=never` and `sync`), converts (a process of its own, start-up
included, until OUT is on the disk), reads the files of OUT in 8 MB reads, and loads OUT (a process of its own; the time
from the call to arrays that are ready). Before each of these the page cache is dropped where the rights allow it
(`--cache cold`), or the files are read once (`--cache warm`). Peak memory is the process's resident set, as
`/usr/bin/time -v` reports it. Prints one JSON object a round, then a row for docs/converting.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

_READ = 8 << 20  # bytes
_CONVERT = "import sys; from convert.cli import main; sys.exit(main(sys.argv[1:]))"
_LOAD = """
import sys, time
import jax
from tfm_jax.checkpoint import load_checkpoint
jax.devices()
start = time.perf_counter()
loaded = load_checkpoint(sys.argv[1])
jax.block_until_ready((loaded.target, loaded.drafter, loaded.weaver))
print(time.perf_counter() - start)
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    target: Path
    """Hugging Face directory of a target."""
    work: Path
    """Directory for the copies and OUT; made and removed."""
    drafter: Path | None = None
    """Hugging Face directory of a drafter."""
    rounds: int = 3
    """Repetitions; the medians go into the row."""
    cache: Literal["cold", "warm"] = "cold"
    """State of the page cache before each measurement."""


class Run(NamedTuple):
    """A process that has ended: wall-clock seconds, largest resident set in bytes, and what it printed."""

    seconds: float
    peak: int
    output: str


def run_child(program: str, *arguments: object) -> Run:
    """Run a Python program to its end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  (a program of our own)
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    return Run(time.perf_counter() - start, usage.ru_maxrss * 1024, output)


def prepare_cache(state: str, files: Iterable[Path]) -> None:
    """Write back what is dirty, then drop the page cache or fill it with the files."""
    os.sync()
    if state == "cold":
        Path("/proc/sys/vm/drop_caches").write_text("3")
    else:
        read_plainly(files)


def read_plainly(files: Iterable[Path]) -> float:
    """Seconds to read files once, one after the other, into one buffer."""
    buffer = bytearray(_READ)
    start = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def copy_plainly(files: Iterable[Path], destination: Path) -> float:
    """Seconds of `cp --reflink=never` and `sync`."""
    destination.mkdir(parents=True)
    start = time.perf_counter()
    subprocess.run(["/bin/cp", "--reflink=never", *files, destination], check=True)  # noqa: S603  (files of our own)
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(destination)
    return seconds


def measure(options: Options) -> dict[str, float]:
    """One round; sizes in bytes."""
    folders = [options.target, *([options.drafter] if options.drafter else [])]
    sources = sorted(file for folder in folders for file in folder.glob("*.safetensors"))
    out = options.work / "out"
    drafter = ["--drafter", options.drafter] if options.drafter else []
    prepare_cache(options.cache, sources)
    copying = copy_plainly(sources, options.work / "copy")
    prepare_cache(options.cache, sources)
    converting = run_child(_CONVERT, "--target", options.target, *drafter, "--out", out)
    stored = sorted(file for file in out.rglob("*") if file.is_file())
    prepare_cache(options.cache, stored)
    reading = read_plainly(stored)
    prepare_cache(options.cache, stored)
    loading = run_child(_LOAD, out)
    result = {
        "source_bytes": sum(file.stat().st_size for file in sources),
        "stored_bytes": sum(file.stat().st_size for file in stored),
        "copy_seconds": copying,
        "convert_seconds": converting.seconds,
        "convert_peak_bytes": converting.peak,
        "read_seconds": reading,
        "load_seconds": float(loading.output),
        "load_peak_bytes": loading.peak,
    }
    shutil.rmtree(out)
    return result


def main() -> None:
    """Measure the rounds and print the table's row."""
    options = tyro.cli(Options)
    options.work.mkdir(parents=True)
    rounds = []
    for _ in range(options.rounds):
        rounds.append(measure(options))
        print(json.dumps(rounds[-1]), flush=True)
    options.work.rmdir()
    middle = {name: statistics.median(entry[name] for entry in rounds) for name in rounds[0]}
    copied = middle["source_bytes"] / middle["copy_seconds"] / 1e9
    converted = middle["stored_bytes"] / middle["convert_seconds"] / 1e9
    cells = (
        f"{middle['stored_bytes'] / 1e9:.1f}",
        f"{max(entry['convert_peak_bytes'] for entry in rounds) / 1e9:.2f}",
        f"{copied:.2f}",
        f"{converted:.2f} ({100 * converted / copied:.0f} %)",
        f"{middle['read_seconds']:.1f}",
        f"{middle['load_seconds']:.1f} ({middle['load_seconds'] / middle['read_seconds']:.2f} x)",
        f"{max(entry['load_peak_bytes'] for entry in rounds) / 1e9:.2f}",
    )
    print("| GB stored | peak GB | copy GB/s | convert GB/s | read s | load s | load peak GB |")
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
