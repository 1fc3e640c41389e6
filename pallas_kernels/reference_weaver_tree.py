"""Slow oracle of `weaver_tree` in numpy: one node at a time, its path walked from the root, and a list as the frontier.

It computes in float32 what is narrower, and in float64 what is that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.constants import NORM_EPS, PATH
from pallas_kernels.containers import TreeGrowth, WeaverWeights


class _Entry(NamedTuple):
    """A child that is no slot yet."""

    score: float
    slot: int  # of its parent
    place: int  # among its parent's children
    token: int


def weaver_tree(
    root: Int[np.ndarray, " one"],
    candidate_ids: Int[np.ndarray, "depth pool"],
    candidate_scores: Float[np.ndarray, "depth pool"],
    inputs_table: Float[np.ndarray, "vocab rank"],
    heads_table: Float[np.ndarray, "vocab rank"],
    positions: Float[np.ndarray, "positions rank"],
    prompt_keys: Float[np.ndarray, "prompt heads head"],
    prompt_values: Float[np.ndarray, "prompt heads head"],
    weights: WeaverWeights,
    *,
    width: int,
    groups: int,
    expand: int,
    ahead: int = 0,
) -> TreeGrowth:
    """Steps that take entries from a list; a guess is the entry of its parent that has the first candidate."""
    model = _Model(
        _wide(inputs_table), _wide(heads_table), _wide(positions), _wide(prompt_keys), _wide(prompt_values),
        WeaverWeights._make(_wide(np.asarray(x)) for x in weights),
    )  # fmt: skip
    rows = width * (1 + ahead)
    tree = _Tree(model, candidate_ids, _wide(candidate_scores), groups * rows + width, groups * rows, expand)
    taken = [_Entry(0.0, -1, 0, int(root[0]))]
    for group in range(groups):
        chains = width if group or not ahead else 1
        for number, entry in enumerate(taken):
            node: _Entry | None = entry
            for slot in range(group * rows + number, (group + 1) * rows, chains):
                if node is not None:
                    tree.put(slot, node)
                    node = tree.expand(slot, taken_away=slot + chains < (group + 1) * rows)
        taken = sorted(tree.frontier, key=lambda x: (-x.score, x.slot, x.place))[:width]
        for entry in taken:
            tree.drop(entry)
    for number, entry in enumerate(taken):
        tree.put(groups * rows + number, entry)
    return tree.growth


class _Tree:
    """A growing tree."""

    def __init__(
        self, model: _Model, ids: np.ndarray, scores: np.ndarray, slots: int, expanded: int, expand: int
    ) -> None:
        self.model, self.ids, self.scores = model, ids, scores
        self.frontier: list[_Entry] = []
        self.growth = TreeGrowth._make(
            (
                np.zeros(slots, np.int32),
                np.full(slots, -1, np.int32),
                np.zeros(slots, np.int32),
                np.full(slots, -np.inf, np.float32),
                np.full((slots, PATH), -1, np.int32),
                np.full((expanded, expand), -np.inf, np.float32),
                np.zeros((expanded, expand), np.int32),
            )
        )

    def put(self, slot: int, entry: _Entry) -> None:
        """Makes an entry a slot."""
        growth = self.growth
        path = [*self.path(entry.slot), slot] if entry.slot >= 0 else [slot]
        growth.tokens[slot], growth.parents[slot], growth.scores[slot] = entry.token, entry.slot, entry.score
        growth.depths[slot] = len(path) - 1
        growth.lineage[slot, : len(path)] = path

    def path(self, slot: int) -> list[int]:
        """Slots from the root to this one."""
        return [int(x) for x in self.growth.lineage[slot] if x >= 0]

    def expand(self, slot: int, *, taken_away: bool) -> _Entry | None:
        """Adds a slot's best children to the frontier and returns the guess, which may be taken away from there."""
        growth, path, score = self.growth, self.path(slot), float(self.growth.scores[slot])
        if len(path) > len(self.ids):
            return None
        ids = self.ids[len(path) - 1]
        logits = self.scores[len(path) - 1] + self.model.corrections(np.asarray(growth.tokens)[path], ids)
        logits = np.where(ids >= 0, logits, -np.inf)
        edges = np.minimum(logits - np.logaddexp.reduce(logits), 0.0)
        for place, option in enumerate(np.argsort(-logits, kind="stable")[: growth.frontier_scores.shape[1]]):
            if ids[option] >= 0 and not (taken_away and option == 0):
                child = _Entry(score + float(edges[option]), slot, place, int(ids[option]))
                self.frontier.append(child)
                growth.frontier_tokens[slot, place], growth.frontier_scores[slot, place] = child.token, child.score
        return _Entry(score + float(edges[0]), slot, -1, int(ids[0])) if ids[0] >= 0 else None

    def drop(self, entry: _Entry) -> None:
        """Takes an entry out of the frontier."""
        self.frontier.remove(entry)
        self.growth.frontier_scores[entry.slot, entry.place] = -np.inf


class _Model(NamedTuple):
    """The Weaver's operands, none narrower than float32."""

    inputs: np.ndarray
    heads: np.ndarray
    positions: np.ndarray
    prompt_keys: np.ndarray
    prompt_values: np.ndarray
    weights: WeaverWeights

    def corrections(self, tokens: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """What the last node of a path, given by its tokens, adds to its candidates' logits."""
        keys, values = list(self.prompt_keys), list(self.prompt_values)
        w = self.weights
        for depth, token in enumerate(tokens):
            row = min(depth, len(self.prompt_keys) - 2)
            x = self.inputs[token] + self.positions[row]
            query, key, value = (w.qkv @ _unit(x) + w.qkv_bias).reshape(3, *self.prompt_keys.shape[1:])
            keys.append(key)
            values.append(value)
        match = np.einsum("hd,khd->hk", query, np.stack(keys)) / math.sqrt(query.shape[1])
        match = np.exp(match - match.max(axis=1, keepdims=True))
        mixed = np.einsum("hk,khd->hd", match / match.sum(axis=1, keepdims=True), np.stack(values))
        x = x + w.out @ mixed.reshape(-1)
        inner = w.fc1 @ _unit(x) + w.fc1_bias
        gelu = np.array([0.5 * y * (1 + math.erf(y / math.sqrt(2))) for y in inner], x.dtype)
        x = x + w.fc2 @ gelu + w.fc2_bias
        return self.heads[np.maximum(candidates, 0)] @ (_unit(x) * w.out_norm_scale + w.out_norm_bias)


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + NORM_EPS)
