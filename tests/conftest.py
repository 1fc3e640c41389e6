"""Set-up that must precede jax, GPU tests without a GPU, and the checkpoint that end-to-end tests share."""

import os
from pathlib import Path

# Before any test module imports jax. GPU tests: JAX_PLATFORMS=cuda pytest -m gpu.
ROOT = Path(__file__).parent.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Most of the time goes into compiling programs that run for milliseconds: no optimisation, none of the emitters that
# build every fusion through MLIR, and one LLVM module a program take a sixth of the time.
COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)
# Warpgroups of an interpreted kernel block a thread of XLA's pool each; it has one a core, and three starve on two.
os.environ.setdefault("NPROC", "8")

import pytest  # noqa: E402 - what it loads may import jax

GOLDENS = ROOT / "tests" / "data" / "goldens"


MOST_MAPPINGS = 30_000  # of the 65,530 that Linux allows a process; beyond these XLA crashes


def pytest_runtest_teardown() -> None:
    """Every program that XLA compiles for a CPU keeps a few memory mappings: drops them before there are too many."""
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs a GPU and JAX_PLATFORMS=cuda")


@pytest.fixture(scope="session")
def loop_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid golden trio, whose whole loops are in `loop_qwen3_5/golden.npz`, converted in float32."""
    from convert.pipeline import convert_checkpoint

    out = tmp_path_factory.mktemp("loop") / "out"
    convert_checkpoint(
        GOLDENS / "qwen3_5_untied",
        out,
        drafter=GOLDENS / "tfm" / "loop_qwen3_5" / "drafter",
        weaver=GOLDENS / "tfm" / "loop_qwen3_5" / "weaver.pth",
        dtype="float32",
    )
    return out
