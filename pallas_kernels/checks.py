"""What only the numbers in an index array can show to be wrong, looked for where the numbers are there.

Under `jax.jit` and other transformations they are not: there a caller's promise stands, and indices out of range give
results that mean nothing, but no error.
"""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array, Bool, Int


def concrete(x: Array | np.ndarray) -> np.ndarray | None:
    """The numbers of an array, fetched from its device; None while it is traced, or partly on another host."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def check_ancestors(ancestors: Bool[Array, "batch nodes nodes"]) -> None:
    """Refuses what is no tree: a row with an entry must be its node and the row of its parent, an earlier node.

    Raises:
        ValueError: a row of a concrete array is not.
    """
    rows = concrete(ancestors)
    if rows is None:
        return
    nodes = rows.shape[1]
    earlier = np.tril(rows, -1)
    parents = nodes - 1 - np.argmax(earlier[..., ::-1], axis=-1)
    above = np.take_along_axis(rows, parents[..., None], axis=1) & earlier.any(axis=-1, keepdims=True)
    wrong = rows.any(axis=-1) & (rows != (above | np.eye(nodes, dtype=bool))).any(axis=-1)
    if wrong.any():
        tree, node = np.argwhere(wrong)[0]
        parent = f", its parent {parents[tree, node]} and the ancestors of that" if earlier[tree, node].any() else ""
        message = f"row {node} of ancestors of tree {tree} is no path: expected true at {node}{parent}, nowhere else"
        raise ValueError(message)


def check_indices(name: str, indices: Array | np.ndarray, low: int, high: int, unit: str) -> None:
    """Refuses an index out of range.

    Raises:
        ValueError: a concrete array has one.
    """
    found = concrete(indices)
    if found is None:
        return
    wrong = found[(found < low) | (found >= high)]
    if wrong.size:
        message = f"{name} holds {wrong.flat[0]}, expected {low} to {high - 1} for {unit}"
        raise ValueError(message)


def check_path(path: Int[Array, "batch steps"], count: Int[Array, " batch"], nodes: int) -> None:
    """Refuses an accepted path that leaves the tree.

    Raises:
        ValueError: concrete arrays show that it does.
    """
    steps = path.shape[1]
    check_indices("count", count, 0, steps + 1, f"a path of {steps} steps")
    rows, counts = concrete(path), concrete(count)
    if rows is not None and counts is not None:
        accepted = np.where(np.arange(steps) < counts[:, None], rows, 0)
        check_indices("path", accepted, 0, nodes, f"a tree of {nodes} nodes")
