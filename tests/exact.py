"""Exact laws of acceptance rules on small trees, in float64, by enumeration instead of sampling.

An acceptance rule is a function of finitely many random numbers. Where it uses uniforms, the unit interval of each of
them falls into cells in which nothing changes: one run per combination of cells, weighted by their widths, gives the
whole law. Where it uses a token per node, all tokens are tried. What a rule emits is then completed with the target's
own law and compared with the target's law of whole sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class SmallTree(NamedTuple):
    """A draft tree, and the target's law after every prefix.

    Row (V^n − 1)/(V − 1) + (base-V number x1 … xn) of `prefix_rows` follows the prefix x1 … xn.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    node_rows: np.ndarray
    prefix_rows: np.ndarray

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.node_rows.shape[1]

    @property
    def length(self) -> int:
        """Most tokens that one round can emit."""
        return int(self.depths.max()) + 1


class Outcomes(NamedTuple):
    """What a rule emits, and how often: `tokens[i, :count[i]]` has probability `weights[i]`."""

    tokens: np.ndarray
    count: np.ndarray
    weights: np.ndarray


class Draws(NamedTuple):
    """Every combination of random numbers that matters, a row each, with its probability."""

    values: np.ndarray
    weights: np.ndarray


def make_small_tree(
    tokens: np.ndarray, parents: np.ndarray, node_rows: np.ndarray, prefix_rows: np.ndarray | None = None
) -> SmallTree:
    """Tree of given parents, without unused slots; without `prefix_rows` it has no law of sequences."""
    depths = mark_ancestors(parents).sum(axis=1) - 1
    return SmallTree(tokens, parents, depths, node_rows, np.zeros((0, 0)) if prefix_rows is None else prefix_rows)


def mark_ancestors(parents: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Row i is true at i and its ancestors, by walking up; rows of unused slots are false."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for slot in range(len(parents)) if valid is None else np.flatnonzero(valid):
        node = slot
        while node >= 0:
            mask[slot, node] = True
            node = parents[node]
    return mask


def sequence_law(tree: SmallTree, outcomes: Outcomes) -> np.ndarray:
    """Law of the first `tree.length` tokens, [vocab] * length, when the target writes on after what was emitted."""
    law = np.zeros((tree.vocab,) * tree.length)
    emitted: dict[tuple[int, ...], float] = {}
    for tokens, count, weight in zip(*outcomes, strict=True):
        prefix = tuple(int(token) for token in tokens[:count])
        emitted[prefix] = emitted.get(prefix, 0.0) + float(weight)
    for prefix, weight in emitted.items():
        law[prefix] += weight * _continuation(tree, prefix)
    return law


def target_law(tree: SmallTree) -> np.ndarray:
    """The target's own law of its first `tree.length` tokens."""
    return _continuation(tree, ())


def _continuation(tree: SmallTree, prefix: tuple[int, ...]) -> np.ndarray:
    """Law of the tokens after `prefix`, up to the tree's length."""
    if len(prefix) == tree.length:
        return np.ones(())
    number = sum(token * tree.vocab**place for place, token in enumerate(reversed(prefix)))
    row = tree.prefix_rows[(tree.vocab ** len(prefix) - 1) // (tree.vocab - 1) + number]
    return np.stack([row[token] * _continuation(tree, (*prefix, token)) for token in range(tree.vocab)])


def coin_draws(tree: SmallTree) -> Draws:
    """One uniform per node and one for the bonus: midpoints of all cells, for any rule that scans in a fixed order.

    A node's coin can only be compared with running sums of its children's probabilities. The bonus coin is compared
    with running sums of a node's row, whole (what a wrong rule may do) or without the children's tokens.
    """
    nodes = len(tree.tokens)
    cells, bonus_edges = [], [np.zeros(1)]
    for node in range(nodes):
        row, children = tree.node_rows[node], np.flatnonzero(tree.parents == node)
        cells.append(_cells(np.cumsum(row[tree.tokens[children]])))
        rest = row.copy()
        rest[tree.tokens[children]] = 0
        bonus_edges += [np.cumsum(row), np.cumsum(rest) / max(rest.sum(), np.finfo(float).tiny)]
    cells.append(_cells(np.concatenate(bonus_edges)))
    grid = itertools.product(*(zip(*cell, strict=True) for cell in cells))
    values, weights = zip(*(zip(*combination, strict=True) for combination in grid), strict=True)
    return Draws(np.array(values), np.prod(weights, axis=1))


def choice_draws(tree: SmallTree, *, share: bool) -> Draws:
    """One token per node, each with the law of the node's row.

    Args:
        tree: the tree.
        share: nodes of one depth use one uniform, by inverse distribution function; otherwise they are independent.
    """
    nodes = len(tree.tokens)
    if not share:
        values = np.array(list(itertools.product(range(tree.vocab), repeat=nodes)))
        weights = np.prod(tree.node_rows[np.arange(nodes), values], axis=1)
        return Draws(values[weights > 0], weights[weights > 0])
    return Draws(*(np.array(part) for part in zip(*_shared_choices(tree), strict=True)))


def _shared_choices(tree: SmallTree) -> Iterator[tuple[np.ndarray, float]]:
    cumulative = np.cumsum(tree.node_rows, axis=1)
    levels = [_cells(cumulative[tree.depths == depth].ravel()) for depth in range(tree.length)]
    for combination in itertools.product(*(zip(*level, strict=True) for level in levels)):
        coins, widths = zip(*combination, strict=True)
        coin = np.array(coins)[tree.depths]
        yield np.argmax(cumulative > coin[:, None], axis=1), float(np.prod(widths))


def _cells(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints and widths of the cells of [0, 1] between sorted edges; rounding's slivers are left out."""
    edges = np.unique(np.concatenate([[0.0], np.clip(edges, 0, 1), [1.0]]))
    widths = np.diff(edges)
    kept = widths > 1e-14
    return ((edges[:-1] + edges[1:]) / 2)[kept], widths[kept]


def scan_target_only(tree: SmallTree, uniforms: np.ndarray) -> tuple[list[int], int]:
    """The target_only rule as one would tell it: path and bonus, node by node."""
    node, path = 0, [0]
    while True:
        running, chosen = 0.0, -1
        children = [child for child in range(1, len(tree.parents)) if tree.parents[child] == node]
        for child in children:
            running += tree.node_rows[node, tree.tokens[child]]
            if uniforms[node] < running:
                chosen = child
                break
        rest = tree.node_rows[node].copy()
        rest[[int(tree.tokens[child]) for child in children]] = 0
        if chosen < 0 and rest.sum() <= 0:
            chosen = next((c for c in reversed(children) if tree.node_rows[node, tree.tokens[c]] > 0), -1)
        if chosen < 0:
            return path, int(np.argmax(np.cumsum(rest) > uniforms[-1] * rest.sum()))
        node = chosen
        path.append(node)
