"""Inputs and calls that the tests of the kernels share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import GdnChunkResult, GdnTreeResult

IMPLEMENTATIONS = ("xla", "reference")
type AnyArray = np.ndarray | jax.Array

GOLDENS = Path(__file__).parent / "data" / "goldens"


@functools.cache
def golden(file: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / file) as arrays:
        return dict(arrays)


def golden_group(file: str, group: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{group}/"): x for name, x in golden(file).items() if name.startswith(f"{group}/")}


@functools.cache
def kernel(name: str, implementation: str, **options: int | str | tuple[int, ...]) -> Callable:
    function = functools.partial(getattr(pallas_kernels, name), implementation=implementation, **options)
    return function if implementation == "reference" else jax.jit(function)


def to_device(x: AnyArray) -> jax.Array:
    return jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)


def verify(implementation: str, *operands: AnyArray) -> GdnTreeResult:
    return jax.tree.map(np.asarray, kernel("gdn_tree_verify", implementation)(*map(to_device, operands)))


def read_text(implementation: str, *operands: AnyArray) -> GdnChunkResult:
    return jax.tree.map(np.asarray, kernel("gdn_chunk", implementation)(*map(to_device, operands)))


def commit(implementation: str, *operands: AnyArray) -> np.ndarray:
    """Of one layer: state, key, update, path decay, then path and count."""
    *layer, path, count = map(to_device, operands)
    return np.asarray(kernel("commit_states", implementation)(*((x,) for x in layer), path, count)[0])


def convolve(implementation: str, *operands: AnyArray) -> np.ndarray:
    """In two parts, put together again."""
    channels = operands[0].shape[2]
    convolved = kernel("tree_conv", implementation, widths=(1, channels - 1) if channels > 1 else (1,))
    return np.concatenate(convolved(*map(to_device, operands)), axis=-1)


def relative_error(actual: AnyArray, expected: AnyArray) -> float:
    """Largest difference over largest magnitude."""
    return float(np.max(np.abs(np.asarray(actual) - expected)) / max(np.max(np.abs(expected)), 1e-30))


def chain(nodes: int) -> np.ndarray:
    return np.arange(nodes) - 1


def random_tree(rng: np.random.Generator, nodes: int, depth: int = 15) -> np.ndarray:
    """Parents of a tree of bounded depth; draws as the golden trees of that name do."""
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parent = int(rng.integers(max(0, node - 6), node))
        while depths[parent] >= depth:
            parent = int(rng.integers(0, node))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return np.array(parents)


def path_to(node: int, parents: np.ndarray) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def ancestors_of(parents: np.ndarray) -> np.ndarray:
    mask = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        mask[node, path_to(node, parents)] = True
    return mask


def taps_of(parents: np.ndarray, width: int = 4) -> np.ndarray:
    """Slot of the j-th ancestor; beyond the root −1, −2, … address the window from its end."""
    taps = np.tile(np.arange(len(parents))[:, None], (1, width))
    for j in range(1, width):
        last = taps[:, j - 1]
        taps[:, j] = np.where(last > 0, parents[np.maximum(last, 0)], last - 1)
    return taps.astype(np.int32)


class GdnCase(NamedTuple):
    """Operands of verification: float32 values held in float64, so that the oracle sees the very same numbers."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    ancestors: np.ndarray
    state: np.ndarray

    @property
    def rows(self) -> tuple[np.ndarray, ...]:
        """The operands with one entry a node."""
        return self[:5]

    def pick(self, nodes: list[int]) -> GdnCase:
        """Some nodes, or all in another order."""
        query, key, value, log_decay, beta = (x[:, nodes] for x in self.rows)
        return GdnCase(query, key, value, log_decay, beta, self.ancestors[:, nodes][:, :, nodes], self.state)

    def text(self, valid: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """The operands of the chunk form: the nodes read as tokens in their order, all valid unless told."""
        return (*self.rows, np.ones(self.beta.shape[:2], bool) if valid is None else valid, self.state)


def make_case(
    rng: np.random.Generator, parents: np.ndarray, ratio: int = 3, *, batch: int = 1, cosine: float = 0.0
) -> GdnCase:
    """Random operands; with `cosine` between any two keys, decay is slow and β near 1, the hard case of the solve."""
    nodes, key_heads, width = len(parents), 2, 16
    gates = (batch, nodes, key_heads * ratio)
    common = rng.standard_normal((batch, 1, key_heads, width)) * np.sqrt(cosine)
    own = rng.standard_normal((batch, nodes, key_heads, width)) * np.sqrt(1 - cosine)
    log_decay = -0.01 * rng.random(gates) if cosine else -np.exp(rng.standard_normal(gates) - 1)
    case = GdnCase(
        query=rng.standard_normal((batch, nodes, key_heads, width)),
        key=common + own,
        value=rng.standard_normal((*gates, width)),
        log_decay=log_decay,
        beta=rng.uniform(0.9 if cosine else 0.0, 1.0, gates),
        ancestors=np.broadcast_to(ancestors_of(parents), (batch, nodes, nodes)),
        state=rng.standard_normal((batch, gates[2], width, width)),
    )
    return GdnCase(*(x if x.dtype == bool else x.astype(np.float32).astype(np.float64) for x in case))


def with_extreme_gates(case: GdnCase, rng: np.random.Generator) -> GdnCase:
    """Half of the gates become no decay, e^-30 or total forgetting, and writes of nothing or everything."""
    shape = case.beta.shape
    log_decay = np.where(rng.random(shape) < 0.5, rng.choice([0.0, -30.0, -1000.0], shape), case.log_decay)
    beta = np.where(rng.random(shape) < 0.5, rng.choice([0.0, 1.0], shape), case.beta)
    return case._replace(log_decay=log_decay, beta=beta)
