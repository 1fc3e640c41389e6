"""What front doors refuse: arrays of another rank or kind than their signature says, and indices out of range.

Only the numbers in an index array can show the latter. Under `jax.jit` and other transformations they are not there: a
caller's promise stands, and indices out of range give results that mean nothing, but no error.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, Array, Bool, Float, Int

_KINDS: dict[Any, tuple[Any, str]] = {
    Float: (jnp.floating, "floating-point numbers"),
    Int: (jnp.integer, "integers"),
    Bool: (jnp.bool_, "booleans"),
}
_hints = functools.cache(typing.get_type_hints)


def checked[**P, R](door: Callable[P, R]) -> Callable[P, R]:
    """The front door, which now refuses arrays of another rank or kind of number than its annotations say.

    Its own checks can then unpack shapes, and say how they should fit each other. What differs raises a ValueError that
    names the argument. Traced arrays are checked too, once a trace: rank and dtype are known then.
    """
    signature = inspect.signature(door)

    @functools.wraps(door)
    def enter(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            _check(name, value, _hints(door)[name])
        return door(*args, **kwargs)

    return enter


def _check(name: str, value: Any, hint: Any) -> None:  # noqa: ANN401
    """Compares an argument, or what it consists of, with its annotation.

    Raises:
        ValueError: an array, or a group of arrays, is something else.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # of something and None
        if value is not None:
            _check(name, value, parts[0])
    elif origin is tuple:
        _require(isinstance(value, tuple | list), f"{name} is of type {type(value).__name__}, expected a tuple")
        for place, part in enumerate(value):
            _check(f"{name}[{place}]", part, parts[0])
    elif hasattr(hint, "_fields"):
        _require(isinstance(value, hint), f"{name} is of type {type(value).__name__}, expected {hint.__name__}")
        for field, part in _hints(hint).items():
            _check(f"{name}.{field}", getattr(value, field), part)
    elif isinstance(hint, type) and issubclass(hint, AbstractArray):
        axes = hint.dim_str.split()
        _require(hasattr(value, "dtype"), f"{name} is of type {type(value).__name__}, expected an array")
        least = len(axes) - hint.dim_str.count("*")
        fits = len(value.shape) == least or (len(value.shape) > least and "*" in hint.dim_str)
        _require(fits, f"{name} has shape {value.shape}, expected axes {', '.join(axes)}")
        kind, words = _KINDS.get(hint.dtype, (jnp.generic, ""))
        _require(jnp.issubdtype(value.dtype, kind), f"{name} is {value.dtype}, expected {words}")


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - the condition that is required
    if not condition:
        raise ValueError(message)


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
