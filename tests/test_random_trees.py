"""Ten thousand random trees through the forms of tree verification, against the closed form solved in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import kernel

from pallas_kernels import GdnTreeResult, reference
from pallas_kernels.constants import MIN_LOG_DECAY

BARS = {"default": 5e-4, "highest": 5e-6}
MAX_DEPTH = 31
ROUNDS = 49  # of 208 trees


class Shape(NamedTuple):
    """Few shapes, so that few programs are compiled; smaller trees leave the last slots unused."""

    trees: int
    nodes: int
    smallest: int  # nodes of a tree
    heads: int  # value heads of the one key head
    width: int


SHAPES = (Shape(128, 16, 1, 4, 64), Shape(32, 64, 17, 3, 128), Shape(32, 128, 65, 2, 64), Shape(16, 256, 129, 1, 64))


class Trees(NamedTuple):
    ancestors: np.ndarray  # [trees, nodes, nodes]
    used: np.ndarray  # [trees, nodes]


def draw_trees(rng: np.random.Generator, shape: Shape) -> Trees:
    """A parent is one of the last `reach` nodes, from chains (1) to bushes; at the depth limit, that one's parent."""
    trees = np.arange(shape.trees)
    ancestors = np.zeros((shape.trees, shape.nodes, shape.nodes), bool)
    parents, depths = np.zeros((2, shape.trees, shape.nodes), int)
    ancestors[:, 0, 0] = True
    reach = rng.choice([1, 2, 4, 8, 32, 256], shape.trees)
    for node in range(1, shape.nodes):
        parent = node - 1 - (rng.random(shape.trees) * np.minimum(reach, node)).astype(int)
        parent = np.where(depths[trees, parent] == MAX_DEPTH, parents[trees, parent], parent)
        parents[:, node], depths[:, node] = parent, depths[trees, parent] + 1
        ancestors[:, node] = ancestors[trees, parent]
        ancestors[:, node, node] = True
    used = np.arange(shape.nodes) < rng.integers(shape.smallest, shape.nodes + 1, (shape.trees, 1))
    return Trees(ancestors & used[:, :, None] & used[:, None], used)


def draw_operands(rng: np.random.Generator, shape: Shape, trees: Trees) -> tuple[jax.Array, ...]:
    """Each tree with keys alike or not, and with gates that are moderate, slow, or partly all or nothing."""
    count, nodes, _, heads, width = shape
    gates = (count, nodes, heads)
    cosine = rng.choice([0.0, 0.0, 0.9, 0.99], (count, 1, 1, 1))
    slow, extreme = cosine[..., 0] > 0, rng.random((count, 1, 1)) < 0.3
    keys = np.sqrt(cosine) * rng.standard_normal((count, 1, 1, width))
    keys = keys + np.sqrt(1 - cosine) * rng.standard_normal((count, nodes, 1, width))
    log_decay = np.where(slow, -0.01 * rng.random(gates), -np.exp(rng.standard_normal(gates) - 2))
    log_decay = np.where(extreme & (rng.random(gates) < 0.3), rng.choice([0.0, -30.0, -1000.0], gates), log_decay)
    beta = np.where(slow, rng.uniform(0.9, 1.0, gates), rng.uniform(0.0, 1.0, gates))
    beta = np.where(extreme & (rng.random(gates) < 0.3), rng.choice([0.0, 1.0], gates), beta)
    return (
        jnp.asarray(rng.standard_normal(keys.shape), jnp.bfloat16),
        jnp.asarray(keys * rng.uniform(0.3, 3.0, (count, nodes, 1, 1)), jnp.bfloat16),
        jnp.asarray(0.1 * rng.standard_normal((*gates, width)), jnp.bfloat16),
        jnp.asarray(log_decay, jnp.float32),
        jnp.asarray(beta, jnp.float32),
        jnp.asarray(trees.ancestors),
        jnp.asarray(0.05 * rng.standard_normal((count, heads, width, width)), jnp.float32),
    )


def to_float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def exp(x: np.ndarray) -> np.ndarray:
    """0 where it is below 1e-87, since arithmetic on numbers below 1e-308 takes a hundred times as long."""
    return np.exp(np.where(x > -200, x, -np.inf))


def solve(operands: tuple[jax.Array, ...]) -> GdnTreeResult:
    """(I + A) U = β (V − e^G K S), O = e^G Q S + (D ∘ Q Kᵀ) U, all trees and heads side by side; one key head."""
    query, key, value, log_decay, beta, mask, state = operands
    ancestors = np.asarray(mask)[:, None]
    q, k = (reference.l2_normalise(to_float64(x))[:, :, 0][:, None] for x in (query, key))
    q = q * q.shape[-1] ** -0.5
    v, g, b = (np.moveaxis(to_float64(x), 2, 1) for x in (value, log_decay, beta))
    s = to_float64(state)
    g = np.maximum(g, MIN_LOG_DECAY)
    total = (ancestors @ g[..., None])[..., 0]
    decay = exp(np.where(ancestors, total[..., :, None] - total[..., None, :], -np.inf))
    gram, lookup = k @ k.swapaxes(-1, -2), q @ k.swapaxes(-1, -2)
    below = np.tril(b[..., None] * decay * gram, -1)
    reach = exp(total)[..., None]
    update = b[..., None] * (v - reach * (k @ s))
    for node in range(1, k.shape[2]):  # forward substitution
        update[:, :, node] -= np.einsum("thj,thjv->thv", below[:, :, node, :node], update[:, :, :node])
    output = reach * (q @ s) + (decay * lookup) @ update
    return GdnTreeResult(*(np.moveaxis(x, 1, 2) for x in (output, update, total)))  # pyrefly: ignore[bad-argument-type]


def worst_error(actual: GdnTreeResult, expected: GdnTreeResult, used: np.ndarray) -> float:
    """The largest relative error ‖x − ref‖ / ‖ref‖ of outputs and of updates among the trees, unused nodes left out."""

    def norms(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.sum(np.where(used[:, :, None, None], x, 0.0) ** 2, axis=(1, 2, 3)))

    pairs = ((np.asarray(actual[i], np.float64), np.asarray(expected[i])) for i in (0, 1))
    errors = [norms(x - y) / np.maximum(norms(y), 1e-30) for x, y in pairs]
    return float(np.nan_to_num(errors, nan=np.inf).max())


def rounds(numbers: Iterable[int]) -> Iterator[tuple[tuple[jax.Array, ...], GdnTreeResult, np.ndarray]]:
    """Operands, results and used nodes, shape by shape."""
    for number in numbers:
        rng = np.random.default_rng(number)
        for shape in SHAPES:
            trees = draw_trees(rng, shape)
            operands = draw_operands(rng, shape, trees)
            yield operands, solve(operands), trees.used


def check(forms: tuple[tuple[str, str], ...], numbers: Iterable[int]) -> None:
    worst = dict.fromkeys(forms, 0.0)
    for operands, expected, used in rounds(numbers):
        for form, precision in forms:
            actual = kernel("gdn_tree_verify", form, precision=precision)(*operands)
            worst[form, precision] = max(worst[form, precision], worst_error(actual, expected, used))
    assert all(error < BARS[precision] for (_, precision), error in worst.items()), worst


def test_the_closed_form_is_the_recurrence() -> None:
    rng = np.random.default_rng(0)
    for shape in (Shape(6, 40, 1, 3, 16), Shape(1, 256, 256, 1, 16)):
        trees = draw_trees(rng, shape)
        operands = draw_operands(rng, shape, trees)
        *rows, state = (np.asarray(x) if x.dtype == bool else to_float64(x) for x in operands)
        for x, y in zip(solve(operands), reference.gdn_tree_verify(*rows, state), strict=True):
            np.testing.assert_allclose(np.where(trees.used[(..., *[None] * (y.ndim - 2))], x - y, 0), 0, atol=1e-9)


def test_trees_are_of_every_size_and_as_deep_as_allowed() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_trees(rng, shape) for _ in range(10) for shape in SHAPES]
    sizes = np.concatenate([trees.used.sum(axis=1) for trees in drawn])
    depths = np.concatenate([trees.ancestors.sum(axis=2).max(axis=1) - 1 for trees in drawn])
    assert {sizes.min(), sizes.max()} == {1, 256}
    assert {depths.min(), depths.max()} == {0, MAX_DEPTH}


def test_random_trees_through_xla() -> None:
    check((("xla", "highest"),), range(1))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_ten_thousand_trees_through_xla() -> None:
    assert sum(shape.trees for shape in SHAPES) * ROUNDS >= 10_000
    check((("xla", "highest"),), range(ROUNDS))


@pytest.mark.gpu
@pytest.mark.timeout(3600)  # 16 programs, one after the other
def test_ten_thousand_trees_on_the_device() -> None:
    check(tuple((form, precision) for form in ("mosaic", "triton") for precision in BARS), range(ROUNDS))
