"""Random damage to everything that a checkpoint brings: it reads, or there is one error, in a bound of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
BOUND = 16 << 20  # bytes that reading may allocate at most; the files have 0.12 MB


@pytest.mark.parametrize(
    ("kind", "count", "least", "seed"),
    [
        ("headers", 6000, 5000, 1),
        ("pickles", 4000, 2500, 1),
        ("archives", 1000, 700, 7),  # the 750th once took 1 GB
        ("configs", 3000, 1500, 1),
    ],
)
def test_no_damage_gets_past_the_one_error(kind: str, count: int, least: int, seed: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "PYTHONWARNINGS": "ignore",  # pickletools warns of escapes that it decodes
    }
    words = [sys.executable, TESTS / "fuzz.py", kind, str(count), str(seed)]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    outcome = json.loads(run.stdout)
    assert least < outcome["refused"] < count
    assert outcome["grown"] < BOUND
    assert list(tmp_path.iterdir()) == []  # what the hostile pickle makes where it is executed
