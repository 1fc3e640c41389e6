"""Rules of the repository that no other tool checks."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfm_jax

ROOT = Path(__file__).parent.parent
STANDARD_LIBRARY = set(sys.stdlib_module_names)

# What import contracts cannot say: these packages import nothing beyond the list. (jaxtyping writes shapes.)
ALLOWED = {
    "pallas_kernels": {"pallas_kernels", "jax", "numpy", "jaxtyping"}
    | {"jax_triton", "triton"},  # only where a Triton form is called; the modules of device code
    "convert": {"convert", "numpy", "ml_dtypes", "safetensors", "tyro", "rich"}
    | {"tfm_jax.config", "tfm_jax.checkpoint", "tfm_jax.errors"}
    | {"tfm_jax.engine", "torch", "transformers"}  # only to compare logits, inside one function
    | {"huggingface_hub"},  # only to find a source by its id, inside one function
}

REGISTRY = r"https?://[^\s\"')]*(?:py[p]i|mirro[r]|registr[y])"
ABSOLUTE_PATH = r"(?<![\w./$}~-])/(?:home|root|tmp|mnt|work|opt)/\w"


def tracked_files() -> list[Path]:
    """Files that are committed or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    allowed = ALLOWED[package] | STANDARD_LIBRARY
    for path in (ROOT / package).rglob("*.py"):
        for module in imported_modules(path):
            parents = {module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)}
            assert parents & allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_no_registry_address_and_no_path_of_a_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and arrays
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(REGISTRY, line) or re.search(ABSOLUTE_PATH, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line[:120]}")
    assert found == []


def test_constraints_are_names_and_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tfm_jax.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("tfm_jax.cli", ["--help"]),
        ("tfm_jax.cli", ["generate", "--help"]),
        ("tfm_jax.cli", ["generate", "--method", "x"]),
        ("tfm_jax.cli", ["generate", "--demo", "--prompt-file", "missing.txt"]),
        ("convert.cli", ["--help"]),
    ],
)
def test_help_and_mistakes_answer_without_jax(command: str, arguments: list[str]) -> None:
    program = f"""
import sys
from {command} import main
try:
    main({arguments})
except SystemExit:
    pass
heavy = {{"jax", "numpy", "flax", "orbax", "tokenizers"}} & sys.modules.keys()
sys.exit(f"loaded {{sorted(heavy)}}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
