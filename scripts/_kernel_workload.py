"""What a workload of `bench.py kernels` is, the shapes of the model, and what the workloads share.

Operands are random numbers, never zeros, on which a device is faster. Oracles compute in float64 on the very operands
that the device reads; where that would take minutes they compute the heads of one key or key/value head, which a kernel
treats like any other.

Floors count what no implementation can leave out: every operand read and every result written once (of caches only the
rows that matter), and the operations of the usual algorithm, at the rate of bfloat16 products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from _kernel_timing import Layers

WINDOW = 3  # rows of a convolution's window
_MAX_DEPTH = 15


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of a hybrid target, its drafter's output and its Weaver, and of the cases."""

    key_heads: int = 16
    value_heads: int = 48
    width: int = 128  # of a key and of a value head
    heads: int = 24
    kv_heads: int = 4
    head: int = 256
    gdn_layers: int = 48
    attention_layers: int = 16
    nodes: tuple[int, ...] = (16, 64, 128)
    attention_nodes: tuple[int, ...] = (64, 1)
    contexts: tuple[int, ...] = (4096, 32768, 131072)
    accepted: int = 8
    tokens: int = 4096
    vocab: int = 248320
    pool: int = 512
    depth: int = 15
    hidden: int = 5120
    rank: int = 2048
    weaver_heads: int = 16
    tree: int = 64

    @property
    def channels(self) -> int:
        """Inputs of a GDN layer's convolution."""
        return (2 * self.key_heads + self.value_heads) * self.width


QWEN_27B = Shapes()
SMALL = Shapes(
    key_heads=1,
    value_heads=3,
    width=64,
    heads=4,
    kv_heads=2,
    head=64,
    gdn_layers=2,
    attention_layers=2,
    nodes=(5,),
    attention_nodes=(5, 1),
    contexts=(96,),
    accepted=3,
    tokens=96,
    vocab=1024,
    pool=16,
    depth=3,
    hidden=64,
    rank=32,
    weaver_heads=2,
    tree=8,
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One operation at one shape.

    Attributes:
        op: name in the report.
        case: its shape in the report.
        forms: implementations to time.
        operands: operands of a layer; layers differ.
        run: the operation in a form and a precision, as a function of a layer's operands. With `donates` it takes the
            first operand for itself and returns (its new value, results).
        oracle: the right results, from a layer's operands.
        error: relative error (l2) of what `run` returned against what `oracle` returned.
        bar: the largest error with which a form is timed.
        bytes: least traffic of a call with device memory.
        operations: least arithmetic of a call.
        layers: how many there are.
        buffers: what is timed: all layers, each with its `own` buffers, or one layer again and again, whose are `hot`.
        donates: see `run`.
        shared: operands that all layers of a round have in common, by their place. What a form computes from them
            alone, XLA computes once for all layers of a program; they are charged for it once.
        foreign: public kernels that are timed for comparison, whatever their error, and how to make their programs.
    """

    op: str
    case: str
    forms: tuple[str, ...]
    operands: Callable[[int], tuple[Any, ...]]
    run: Callable[[str, str], Callable[..., Any]]
    oracle: Callable[..., Any]
    error: Callable[[Any, Any], float]
    bar: float
    bytes: float
    operations: float
    layers: int = 1
    buffers: tuple[Literal["own", "hot"], ...] = ("own", "hot")
    donates: bool = False
    shared: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    foreign: Mapping[str, Callable[[], Callable[[Layers], list[Any]]]] = dataclasses.field(default_factory=dict)


def with_known(function: Callable[..., Any], known: Mapping[int, np.ndarray]) -> Callable[..., Any]:
    """The function with some operands known to the compiler, which then computes beforehand what needs no others."""

    def run(*operands: Any) -> Any:  # noqa: ANN401 - whatever the function takes and returns
        return function(*(jnp.asarray(known[place]) if place in known else x for place, x in enumerate(operands)))

    return run


def random_parents(nodes: int) -> np.ndarray:
    """Parents of a bushy tree of at most 15 levels below its root, parents first."""
    rng = np.random.default_rng(nodes)
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        shallow = [slot for slot in range(max(0, node - 6), node) if depths[slot] < _MAX_DEPTH]
        parent = int(rng.choice(shallow or [0]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return np.array(parents)


def ancestors_of(parents: np.ndarray) -> np.ndarray:
    """Row i is true at i and at its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def taps_of(parents: np.ndarray) -> np.ndarray:
    """Row i: the node and its next three ancestors; past the root -1, -2, … count back into the window."""
    taps = [np.arange(len(parents))]
    for _ in range(WINDOW):
        last = taps[-1]
        taps.append(np.where(last > 0, parents[np.maximum(last, 0)], last - 1))
    return np.stack(taps, axis=1)


class Normals:
    """Random arrays of one layer, each with a key of its own."""

    def __init__(self, layer: int) -> None:
        self._keys = jax.random.key(layer)
        self._drawn = 0

    def __call__(self, *shape: int, dtype: Any = jnp.float32, scale: float = 1.0) -> jax.Array:  # noqa: ANN401
        self._drawn += 1
        return _draw(jax.random.fold_in(self._keys, self._drawn), scale, shape, jnp.dtype(dtype))


def exact(*arrays: jax.Array) -> list[np.ndarray]:
    """The same numbers in float64."""
    return [np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, np.float64) for x in arrays]


def relative_error(actual: jax.Array | np.ndarray, expected: np.ndarray) -> float:
    """‖actual − expected‖₂ / ‖expected‖₂; infinite where a number is not finite."""
    difference = np.asarray(actual, np.float64) - expected
    error = float(np.linalg.norm(difference) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def nbytes(tree: Any) -> int:  # noqa: ANN401 - any tree of arrays or of their shapes
    """Size of all arrays together."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _draw_array(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: Any) -> jax.Array:  # noqa: ANN401
    return (scale * jax.random.normal(key, shape, dtype)).astype(dtype)


_draw = jax.jit(_draw_array, static_argnums=(2, 3))
