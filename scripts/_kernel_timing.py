"""How `bench.py kernels` measures: programs that run again and again, kernel times by CUPTI, the device's two ceilings.

Kernel times come from CUPTI, NVIDIA's profiling interface: the sum over a program's kernels, without the gaps between
them. The elapsed time of the same program, gaps included, is read off the host's clock over several runs in a row. A
program's kernels run one after the other, also where they do not depend on each other, as the layers of a model do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

_ONE_AFTER_THE_OTHER = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
_ROUNDS = 5
_RUNS_A_ROUND = 4


class Times(NamedTuple):
    """Medians, microseconds a call."""

    us: float  # kernels alone; on a CPU the elapsed time
    elapsed_us: float


class Ceilings(NamedTuple):
    """What this device reaches with the simplest programs."""

    copy: float  # bytes read and written per second by a copy larger than any cache
    matmul: float  # bfloat16 operations per second of a large square product


class Program:
    """A compiled `function(donated, *operands) -> (donated, results)`; each run donates what the last one returned."""

    def __init__(self, function: Callable[..., tuple[Any, Any]], donated: Any, *operands: Any) -> None:  # noqa: ANN401
        jitted = jax.jit(function, donate_argnums=0, compiler_options=_ONE_AFTER_THE_OTHER)
        self.donated = donated
        self._operands = operands
        self._compiled = jitted.lower(donated, *operands).compile()

    def __call__(self) -> Any:  # noqa: ANN401 - whatever the function returns
        self.donated, results = self._compiled(self.donated, *self._operands)
        return results

    def trace(self) -> None:
        """Here because the profiler takes only what looks like a jitted function; it does not call it."""

    lower = trace


def time_program(program: Program, calls: int, repeats: int) -> Times:
    """Medians over at least two runs of a program that consists of `calls` calls.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    elapsed = _elapsed_seconds(program) * 1e6 / calls
    if jax.default_backend() != "gpu":
        return Times(elapsed, elapsed)
    _, milliseconds = profiler.measure(program, iterations=max(repeats, 2))()
    if milliseconds is None:
        message = "the profiler saw no kernel; does another program hold CUPTI?"
        raise RuntimeError(message)
    return Times(statistics.median(milliseconds) * 1e3 / calls, elapsed)


def measure_ceilings(*, small: bool) -> Ceilings:
    """Copies 2 GiB and multiplies 8192 x 8192 random matrices, or much less."""
    size, length = (256, 1 << 20) if small else (8192, 1 << 30)
    words = jax.random.bits(jax.random.key(0), (length,), jnp.uint16)
    matrices = jax.random.normal(jax.random.key(1), (2, size, size), jnp.bfloat16)
    # A copy by the copy engine and one by a kernel; which one is faster depends on the device.
    copies = [_seconds(lambda x: x.copy(), words), _seconds(lambda x: x ^ jnp.uint16(1), words)]
    product = _seconds(jnp.matmul, *matrices)
    return Ceilings(copy=2 * words.nbytes / min(copies), matmul=2 * size**3 / product)


def _seconds(function: Callable[..., jax.Array], *operands: jax.Array) -> float:
    def step(_: tuple[()], *arrays: jax.Array) -> tuple[tuple[()], jax.Array]:
        return (), function(*arrays)

    return _elapsed_seconds(Program(step, (), *operands))


def _elapsed_seconds(program: Program) -> float:
    """Median of a few rounds of runs in a row, by the host's clock."""
    jax.block_until_ready(program())
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        results = [program() for _ in range(_RUNS_A_ROUND)]
        jax.block_until_ready(results[-1])
        rounds.append((time.perf_counter() - start) / _RUNS_A_ROUND)
    return statistics.median(rounds)
