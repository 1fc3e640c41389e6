"""How `bench.py kernels` measures: kernel times by CUPTI, and what the device reaches with the simplest programs.

CUPTI, NVIDIA's profiling interface, gives the time of every kernel; a call's is their sum, without the gaps between
them. A call of one layer is one program, and layers run one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

_ROUNDS = 5
_RUNS_A_ROUND = 4

type Layers = list[tuple[Any, ...]]  # operands of every layer


class Times(NamedTuple):
    """Of a call; on a CPU, elapsed time."""

    us: float  # median, microseconds
    kernels: int


class Ceilings(NamedTuple):
    """What this device reaches with the simplest programs."""

    copy: float  # bytes read and written per second by a copy larger than any cache
    matmul: float  # bfloat16 operations per second of a large square product


class Program:
    """A function of a layer's operands, arrays or their shapes, compiled in the background and called for every layer.

    With `donates` it returns (new first operand, result), and layers get their new first operands.
    """

    def __init__(
        self, function: Callable[..., Any], operands: tuple[Any, ...], pool: Executor, *, donates: bool = False
    ) -> None:
        lowered = jax.jit(function, donate_argnums=0 if donates else ()).lower(*operands)
        self._compiling = pool.submit(lowered.compile)
        self._donates = donates

    def __call__(self, layers: Layers) -> list[Any]:
        compiled, results = self._compiling.result(), []
        for index, operands in enumerate(layers):
            result = compiled(*operands)
            if self._donates:
                layers[index] = (result[0], *operands[1:])
                result = result[1]
            results.append(result)
        return results


def time_program(program: Callable[[Layers], list[Any]], layers: Layers, repeats: int) -> Times:
    """Median over at least two runs through all layers.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    if jax.default_backend() != "gpu":
        return Times(_elapsed_seconds(lambda: program(layers)) * 1e6 / len(layers), 0)
    run = _Run(lambda: program(layers))
    _, runs = profiler.measure(run, aggregate=False, iterations=max(repeats, 2))()
    if runs is None:
        message = "the profiler saw no kernel; does another program hold CUPTI?"
        raise RuntimeError(message)
    milliseconds = statistics.median(sum(time for _, time in kernels) for kernels in runs)
    return Times(milliseconds * 1e3 / len(layers), round(len(runs[0]) / len(layers)))


class _Run(NamedTuple):
    """Looks like a jitted function, since the profiler would compile anything else."""

    function: Callable[[], Any]

    def __call__(self) -> Any:  # noqa: ANN401 - whatever the function returns
        return self.function()

    def trace(self) -> None:
        """Never called."""

    lower = trace


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
    program = jax.jit(function)
    return _elapsed_seconds(lambda: program(*operands))


def _elapsed_seconds(run: Callable[[], Any]) -> float:
    """Median of a few rounds of runs in a row, by the host's clock."""
    jax.block_until_ready(run())
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        results = [run() for _ in range(_RUNS_A_ROUND)]
        jax.block_until_ready(results[-1])
        rounds.append((time.perf_counter() - start) / _RUNS_A_ROUND)
    return statistics.median(rounds)
