"""What drafts would have been accepted along texts that are already known.

The text of a prompt does not depend on how it was drafted, so a draft at any position can be judged by the text that
follows there: no pass of the target is needed, and a schedule of rounds is a walk over the positions. Drafter and
Weaver see what they see in a real round: the target's features of the text so far, computed once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tfm_jax.config import Models
from tfm_jax.data import Continuations
from tfm_jax.decode import Params, bind
from tfm_jax.engine import Engine
from tfm_jax.objectives import Drawn, draft_blocks
from tfm_jax.sampling import scaled_noise, walk
from tfm_jax.tree import DraftTree, top_candidates

_PROMPTS_AT_ONCE = 4
_NOTHING = -1  # follows the end of a text; no draft has this token


class Positions(NamedTuple):
    """Everything that a round's draft depends on, for every position of every text; rows are padded.

    Entry (prompt, k) belongs to the round whose root is new token k. `following[k + d + 1]` is what the target writes
    after an accepted node of depth d.
    """

    roots: Int[np.ndarray, "prompts positions"]
    features: Float[np.ndarray, "prompts positions hidden"]
    hidden: Float[np.ndarray, "prompts positions depth hidden"]
    ids: Int[np.ndarray, "prompts positions depth pool"]
    scores: Float[np.ndarray, "prompts positions depth pool"]
    log_probs: Float[np.ndarray, "prompts positions depth pool"]
    following: Int[np.ndarray, "prompts tokens"]
    lengths: Int[np.ndarray, " prompts"]


class Drafts(NamedTuple):
    """Inputs of one round of a batch of prompts: the rows of `Positions` at the prompts' places."""

    root: Int[Array, " batch"]
    feature: Float[Array, "batch hidden"]
    hidden: Float[Array, "batch depth hidden"]
    ids: Int[Array, "batch depth pool"]
    scores: Float[Array, "batch depth pool"]
    log_probs: Float[Array, "batch depth pool"]


class Judged(NamedTuple):
    """One round: accepted slots (the root first) and how many tokens it would emit; the tree's scores and depths."""

    count: Int[Array, " batch"]
    path: Int[Array, "batch steps"]
    scores: Float[Array, "batch nodes"]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """All rounds of all prompts under one schedule, one row a round.

    Attributes:
        prompt: number of the prompt.
        committed: tokens emitted.
        path: accepted slots, the root first; −1 beyond.
        scores: of the tree's slots.
        remaining: tokens still wanted before the round.
    """

    prompt: Int[np.ndarray, " rounds"]
    committed: Int[np.ndarray, " rounds"]
    path: Int[np.ndarray, "rounds steps"]
    scores: Float[np.ndarray, "rounds nodes"]
    remaining: Int[np.ndarray, " rounds"]

    def acceptance(self, prompts: int) -> Float[np.ndarray, " prompts"]:
        """Mean tokens a round of each prompt; NaN without a round."""
        total = np.bincount(self.prompt, self.committed, prompts)
        with np.errstate(invalid="ignore"):
            return total / np.bincount(self.prompt, minlength=prompts)


def read_positions(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    temperature: float,
    seeds: Sequence[int],
    pool: int,
    shared_noise: bool,
) -> Positions:
    """Runs target and drafter over every text once.

    Args:
        engine: with a drafter.
        prompts: token ids.
        texts: the new tokens of each prompt, at least one.
        temperature: that they were written at.
        seeds: that they were written with.
        pool: candidates to keep of each depth.
        shared_noise: see `tfm_jax.sampling.scaled_noise`.
    """
    width = max(map(len, texts))
    total = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True))
    read = jax.jit(functools.partial(_read, engine.models, pool=pool, noise=shared_noise and temperature > 0))
    chunks = []
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        rows = [min(start + row, len(prompts) - 1) for row in range(_PROMPTS_AT_ONCE)]
        tokens = np.zeros((len(rows), total), np.uint32)
        for row, number in enumerate(rows):
            whole = [*prompts[number], *texts[number]]
            tokens[row, : len(whole)] = whole
        begins = np.array([len(prompts[number]) for number in rows], np.int32)
        ends = begins + np.array([len(texts[number]) for number in rows], np.int32)
        anchors = np.minimum(begins[:, None] + np.arange(width, dtype=np.int32), ends[:, None] - 1)
        seed = np.array([seeds[number] for number in rows], np.int32)
        chunk = read(engine.params, tokens, begins, ends, anchors, seed, jnp.float32(temperature))
        chunks.append(jax.device_get(chunk))
    depth = chunks[0][2].shape[2]
    following = np.full((len(prompts), width + depth + 1), _NOTHING, np.int32)
    for row, text in enumerate(texts):
        following[row, : len(text)] = text
    roots, features, hidden, *candidates = (np.concatenate(part)[: len(prompts)] for part in zip(*chunks, strict=True))
    ids, scores, log_probs = candidates
    lengths = np.array(list(map(len, texts)), np.int32)
    return Positions(roots, features, hidden, ids, scores, log_probs, following, lengths)


def _read(
    models: Models,
    params: Params,
    tokens: Array,
    begins: Array,
    ends: Array,
    anchors: Array,
    seed: Array,
    temperature: Array,
    *,
    pool: int,
    noise: bool,
) -> tuple[Array, ...]:
    modules = bind(models, params)
    drawn = Drawn(Continuations(tokens, begins, ends), anchors, ends > begins)
    drafted = draft_blocks(modules.target, modules.drafter, drawn)
    logits = modules.target.logits(drafted.hidden).astype(jnp.float32)
    if noise:
        depth, vocab = logits.shape[2:]
        reach = anchors.shape[1] + depth
        batch = jnp.full(begins.shape, temperature)
        field = scaled_noise(seed, begins, batch, max_depth=reach, vocab=vocab)
        index = anchors[..., None] - begins[:, None, None] + jnp.arange(depth)
        logits = logits + jax.vmap(lambda row, at: row[at])(field, index)
    candidates = jax.vmap(lambda rows: top_candidates(rows, pool))(logits)
    roots = jnp.take_along_axis(tokens, anchors, axis=1).astype(jnp.int32)
    return roots, drafted.feature, drafted.hidden, candidates.ids, candidates.scores, candidates.log_probs


def simulate(
    engine: Engine, positions: Positions, draft: Callable[[Params, Drafts], DraftTree], *, depth: int
) -> Rounds:
    """Decodes all prompts with one way to draft.

    Args:
        engine: for its parameters.
        positions: see `read_positions`.
        draft: the tree of a round, traceable.
        depth: of the tree.
    """
    judge = jax.jit(functools.partial(_judge, draft, depth=depth))
    rows = np.arange(len(positions.lengths))
    place, last = np.zeros_like(positions.lengths), positions.lengths - 1
    records: list[tuple[np.ndarray, ...]] = []
    while np.any(place < last):
        at = np.minimum(place, positions.roots.shape[1] - 1)
        inputs = Drafts(*(part[rows, at] for part in positions[:6]))
        next_tokens = positions.following[rows[:, None], np.minimum(place, last)[:, None] + np.arange(1, depth + 2)]
        judged = jax.device_get(judge(engine.params, inputs, next_tokens))
        live, left = place < last, last - place
        committed = np.where(live, np.minimum(judged.count, left), 0)
        path = np.where(np.arange(depth + 1) < judged.count[:, None], judged.path, -1)
        records.append(tuple(part[live] for part in (rows, committed, path, judged.scores, left)))
        place = place + committed
    return Rounds(*map(np.concatenate, zip(*records, strict=True)))


def _judge(
    draft: Callable[[Params, Drafts], DraftTree], params: Params, inputs: Drafts, following: Array, *, depth: int
) -> Judged:
    tree = draft(params, inputs)
    choices = jax.vmap(lambda row, at: row[at])(following, tree.depths)
    accepted = walk(tree, choices, max_depth=depth)
    return Judged(accepted.count, accepted.path, tree.scores)
