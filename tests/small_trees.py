"""Small trees as the code under test takes them, and the check that a rule keeps the target's law on them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from exact import Outcomes, SmallTree, emitted_masses, make_small_tree, mark_ancestors, prefix_errors, sequence_law
from exact import target_law as law_of_target
from weavers import golden_group, jit_quickly

from tfm_jax.tree import DraftTree

GROUPS = ("two_children_published", "three_children", "chain3", "chain_and_branches", "zeros", "seven_nodes")


def load_tree(group: str) -> SmallTree:
    golden = golden_group("acceptance", group)
    return make_small_tree(golden["token"], golden["parent"], golden["node_rows"], golden["target_rows"])


def draft_tree(
    tokens: np.ndarray,
    parents: np.ndarray,
    valid: np.ndarray | None = None,
    batch: int = 1,
    scores: np.ndarray | None = None,
) -> DraftTree:
    """`DraftTree` of given parents, the same in every row of a batch; without scores, siblings are equally likely."""
    valid = np.ones(len(tokens), bool) if valid is None else valid
    parents = np.where(valid, parents, -1)
    mask = mark_ancestors(parents, valid)
    scores = np.full(len(tokens), -1.0) if scores is None else scores
    rows = (
        np.where(valid, tokens, 0).astype(np.int32),
        parents.astype(np.int32),
        np.maximum(mask.sum(axis=1) - 1, 0).astype(np.int32),
        valid,
        np.where(valid, scores, -np.inf).astype(np.float64 if jax.config.jax_enable_x64 else np.float32),
        mask,
    )
    return DraftTree(*(jnp.asarray(np.broadcast_to(row, (batch, *row.shape))) for row in rows))


def assert_lossless(small: SmallTree, outcomes: Outcomes | np.ndarray) -> None:
    """Masses (see `exact.emitted_masses`) or outcomes, completed by the target, have the target's law."""
    if isinstance(outcomes, Outcomes):
        if small.prefix_rows.size:
            np.testing.assert_allclose(sequence_law(small, outcomes), law_of_target(small), atol=1e-10, rtol=0)
        outcomes = emitted_masses(small, outcomes)
    np.testing.assert_allclose(outcomes.sum(), 1, atol=1e-10)
    np.testing.assert_allclose(prefix_errors(small, outcomes), 0, atol=1e-10)


@functools.cache
def compiled(rule: Callable, depth: int) -> Callable:
    """A verifier with its static depth, jitted once."""
    return jit_quickly(functools.partial(rule, max_depth=depth))


@functools.cache
def tree_shapes(most: int) -> tuple[tuple[int, ...], ...]:
    """Parents of every shape of a rooted tree with up to `most` nodes, the root included; siblings have no order."""
    shapes = {}
    for nodes in range(1, most + 1):
        for parents in itertools.product(*(range(max(slot, 1)) for slot in range(nodes))):
            shape = (-1, *parents[1:])
            shapes.setdefault(_name_shape(shape, 0), shape)
    return tuple(shapes.values())


def _name_shape(parents: tuple[int, ...], node: int) -> str:
    children = sorted(_name_shape(parents, child) for child in range(1, len(parents)) if parents[child] == node)
    return f"({''.join(children)})"
