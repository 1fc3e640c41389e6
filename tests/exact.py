"""Exact laws of acceptance rules on small trees, in float64, by enumeration instead of sampling.

An acceptance rule is a function of finitely many random numbers. Where it uses uniforms, the unit interval of each of
them falls into cells in which nothing changes. One run per combination of cells, weighted by their widths, gives the
whole law; it is run close to both ends of the cells, so that a rule whose thresholds lie elsewhere shows. Where a rule
uses an order of siblings or a token per node, all are tried. What it emits is then completed with the target's own law
and compared with the target's law of whole sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

CELL, EDGE = 1e-11, 1e-12  # narrower cells are rounding's; how far inside its cell a coin lies


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


def emitted_masses(small: SmallTree, outcomes: Outcomes) -> np.ndarray:
    """Entry (n, x): probability that the accepted path ends at node n and x is emitted after it."""
    masses = np.zeros(small.node_rows.shape)
    for tokens, count, weight in zip(*outcomes, strict=True):
        node = 0
        for token in tokens[: count - 1]:
            node = next(c for c in np.flatnonzero(small.parents == node) if small.tokens[c] == token)
        masses[node, tokens[count - 1]] += weight
    return masses


def prefix_errors(small: SmallTree, masses: np.ndarray) -> np.ndarray:
    """Entry (n, x): error in the probability that the text begins with node n's path and x.

    The text is what was emitted (`emitted_masses`), written on by the target. A text follows the tree for a while and
    then leaves it, after which the target writes: if all entries are 0, the law of the text is the target's.
    """
    nodes = len(small.parents)
    below = masses.sum(axis=1)  # of paths that end at the node or below
    for node in range(nodes - 1, 0, -1):
        below[small.parents[node]] += below[node]
    begins = masses.copy()
    reached, earlier = np.ones(nodes), np.zeros(nodes)  # by the target's law; by the target after an earlier end
    for node in range(nodes):
        begins[node] += earlier[node] * small.node_rows[node]
        for child in np.flatnonzero(small.parents == node):
            token = small.tokens[child]
            earlier[child] = begins[node, token]
            begins[node, token] += below[child]
            reached[child] = reached[node] * small.node_rows[node, token]
    return begins - reached[:, None] * small.node_rows


def coin_draws(small: SmallTree) -> list[Draws]:
    """One uniform per node, near the lower and near the upper ends of all cells, for rules that scan in slot order.

    A node's coin can only be compared with running sums of its children's probabilities.
    """
    cells = []
    for node in range(len(small.tokens)):
        children = np.flatnonzero(small.parents == node)
        cells.append(_cells(np.cumsum(small.node_rows[node, small.tokens[children]])))
    grid = list(itertools.product(*(list(zip(*cell, strict=True)) for cell in cells)))
    lower, upper = np.moveaxis(np.array(grid), -1, 0)
    weights = np.prod(upper - lower, axis=1)
    return [Draws(lower + EDGE, weights), Draws(upper - EDGE, weights)]


def traversal_draws(small: SmallTree, scores: np.ndarray) -> tuple[list[Draws], np.ndarray]:
    """Coins for all cells of traversal verification, and the Gumbel keys of the orders of siblings they belong to.

    After an order is drawn, what can happen is that the nodes are refused in turn, up to one that is accepted.
    """
    families = [np.flatnonzero(small.parents == node) for node in range(len(small.parents))]
    lower, upper, keys, weights = [], [], [], []
    for orders in itertools.product(*(itertools.permutations(family) for family in families)):
        key, weight = np.zeros(len(scores)), 1.0
        for order in orders:
            for place, child in enumerate(order):
                key[child] = -place - scores[child]  # scores are added to the keys
                weight *= np.exp(scores[child]) / np.exp(scores[list(order[place:])]).sum()
        tests = scan_traversal(small, scores, orders)
        coins = [np.full(len(scores), 0.5), np.full(len(scores), 0.5)]
        for node, threshold in tests:
            if threshold > CELL:
                lower.append(coins[0].copy())
                upper.append(coins[1].copy())
                lower[-1][node], upper[-1][node] = EDGE, threshold - EDGE
                keys.append(key)
                weights.append(weight * threshold)
            coins[0][node], coins[1][node] = threshold + EDGE, 1 - EDGE
            weight *= 1 - threshold
            if weight < CELL:
                break
    return [Draws(np.array(coins), np.array(weights)) for coins in (lower, upper)], np.array(keys)


def scan_traversal(
    small: SmallTree, scores: np.ndarray, orders: tuple[tuple[int, ...], ...]
) -> list[tuple[int, float]]:
    """Traversal verification as one would tell it, over the whole vocabulary.

    Gives the nodes in the order in which they are tested if all are refused, the root last, with their probabilities
    of acceptance.
    """
    rows, ratio = small.node_rows.copy(), np.ones(len(scores))
    waiting = [list(order) for order in orders]
    tests, node = [], 0
    while True:
        law = np.zeros(small.vocab)
        law[small.tokens[waiting[node]]] = np.exp(scores[waiting[node]]) / np.exp(scores[waiting[node]]).sum()
        if waiting[node]:
            child = waiting[node][0]
            token = small.tokens[child]
            ratio[child] = min(ratio[node] * rows[node, token] / law[token], 1)
            node = child
            continue
        tests.append((node, 1.0 if node == 0 else ratio[node]))
        if node == 0:
            return tests
        node = int(small.parents[node])
        law = np.zeros(small.vocab)
        law[small.tokens[waiting[node]]] = np.exp(scores[waiting[node]]) / np.exp(scores[waiting[node]]).sum()
        waiting[node].pop(0)
        residual = np.maximum(ratio[node] * rows[node] - law, 0)
        total = residual.sum()
        if total > 0:
            rows[node] = residual / total
            ratio[node] = total / (total + (1 - ratio[node]))
        elif ratio[node] < 1:
            ratio[node] = 0


def choice_paths(small: SmallTree, fill: int) -> Draws:
    """A token per node for every way to walk and leave the tree; nodes beside the path choose `fill`."""
    values, weights = [], []
    for node in range(len(small.parents)):
        choices, weight, at = np.full(len(small.parents), fill), 1.0, node
        while at > 0:
            above = small.parents[at]
            choices[above] = small.tokens[at]
            weight *= small.node_rows[above, small.tokens[at]]
            at = above
        for token in set(range(small.vocab)) - set(small.tokens[small.parents == node].tolist()):
            values.append(np.where(np.arange(len(choices)) == node, token, choices))
            weights.append(weight * small.node_rows[node, token])
    return Draws(np.array(values), np.array(weights))


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
        lower, upper = np.array(combination).T
        coin = ((lower + upper) / 2)[tree.depths]
        yield np.argmax(cumulative > coin[:, None], axis=1), float(np.prod(upper - lower))


def _cells(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends of the cells of [0, 1] between edges; rounding's slivers are left out."""
    edges = np.unique(np.concatenate([[0.0], np.clip(edges, 0, 1), [1.0]]))
    kept = np.diff(edges) > CELL
    return edges[:-1][kept], edges[1:][kept]


def scan_target_only(tree: SmallTree, uniforms: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The target_only rule as one would tell it: path and the law of the next token, up to a factor."""
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
            return path, rest
        node = chosen
        path.append(node)


def scan_release(row: np.ndarray, tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """First published traversal kernel (W1 era) on a root with leaf children, which biases the law: `emitted_masses`.

    Children are tried in slot order whatever their weights; the ratio is updated, the row is not, and the residual
    counts active children only; what follows comes from the raw row.
    """
    masses = np.zeros((len(tokens) + 1, len(row)))
    alive, ratio, active = 1.0, 1.0, list(range(len(tokens)))
    masses_at_leaf = np.full(len(row), 1 / len(row))  # any law does below a leaf
    for child in range(len(tokens)):
        law = weights[active] / weights[active].sum()
        accepted = min(ratio * row[tokens[child]] / law[0], 1)
        masses[child + 1] = alive * accepted * masses_at_leaf
        alive *= 1 - accepted
        shares = row[tokens[active]]
        residual = np.maximum(ratio * shares - law, 0).sum() + ratio * (1 - shares.sum())
        ratio = residual / (residual + 1 - ratio) if residual > 0 else 0.0
        active.pop(0)
    masses[0] = alive * row
    return masses
