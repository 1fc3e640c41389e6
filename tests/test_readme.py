"""README's blocks run as written: `bash` and `python` ones here, `console` ones by people."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHELLS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


@pytest.mark.slow
@pytest.mark.parametrize(("language", "block"), BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(language: str, block: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([*SHELLS[language], block], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
