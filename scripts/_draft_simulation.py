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
from jax import lax
from jaxtyping import Array, Float, Int

from tfm_jax.budget import promised_tokens
from tfm_jax.config import Models
from tfm_jax.data import Continuations
from tfm_jax.decode import Params, bind
from tfm_jax.engine import Engine
from tfm_jax.growth import growth_stops, pruned_schedule
from tfm_jax.objectives import Drawn, draft_blocks
from tfm_jax.sampling import AcceptedPath, scaled_noise, walk
from tfm_jax.tree import DraftTree, top_candidates

_PROMPTS_AT_ONCE = 4
_ROUNDS_AT_ONCE = 128
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


@dataclasses.dataclass(frozen=True)
class Rounds:
    """All rounds of all prompts under one schedule, one row a round.

    Attributes:
        prompt: number of the prompt.
        committed: tokens emitted.
    """

    prompt: Int[np.ndarray, " rounds"]
    committed: Int[np.ndarray, " rounds"]

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
    judge = jax.jit(lambda params, inputs, following: _accepted(draft(params, inputs), following, depth).count)
    rows = np.arange(len(positions.lengths))
    place, last = np.zeros_like(positions.lengths), positions.lengths - 1
    records: list[tuple[np.ndarray, ...]] = []
    while np.any(place < last):
        count = np.asarray(judge(engine.params, *_inputs(positions, rows, np.minimum(place, last), depth)))
        live = place < last
        committed = np.where(live, np.minimum(count, last - place), 0)
        records.append((rows[live], committed[live]))
        place = place + committed
    return Rounds(*map(np.concatenate, zip(*records, strict=True)))


@dataclasses.dataclass(frozen=True)
class Chart:
    """What a round at any place of any text would do, however far its tree grows and however much of it is verified.

    Entry (prompt, k) belongs to the round whose root is new token k; rows are padded.

    Attributes:
        lengths: of the texts; a text's last token is no root.
        steps: numbers of steps after which a tree's growth may end (`tfm_jax.growth.growth_stops`).
        waiting: sum of e^score of the nodes that one more step than the fewest would expand.
        promised: `tfm_jax.budget.promised_tokens`.
        emitted: tokens, bonus included and as if the text went on.
        fixed: the same for a tree that was grown for just so many nodes.
    """

    lengths: Int[np.ndarray, " prompts"]
    steps: Int[np.ndarray, " stops"]
    waiting: Float[np.ndarray, "prompts positions"]
    promised: Float[np.ndarray, "prompts positions stops budgets"]
    emitted: Int[np.ndarray, "prompts positions stops budgets"]
    fixed: Int[np.ndarray, "prompts positions budgets"]


def chart_rounds(engine: Engine, positions: Positions, budgets: tuple[int, ...], *, depth: int) -> Chart:
    """Drafts and judges rounds at all places.

    Args:
        engine: for its parameters.
        positions: see `read_positions`.
        budgets: ascending.
        depth: of the trees.
    """
    chart = jax.jit(functools.partial(_chart, engine.models, budgets=budgets, depth=depth))
    prompts, width = positions.roots.shape
    rows, places = np.divmod(np.flatnonzero(np.arange(width) < positions.lengths[:, None] - 1), width)
    parts = []
    for start in range(0, len(rows), _ROUNDS_AT_ONCE):
        some = np.minimum(np.arange(start, start + _ROUNDS_AT_ONCE), len(rows) - 1)
        inputs = _inputs(positions, rows[some], places[some], depth)
        parts.append(jax.device_get(chart(engine.params, *inputs)))

    def spread(*values: np.ndarray) -> np.ndarray:
        whole = np.zeros((prompts, width, *values[0].shape[1:]), values[0].dtype)
        whole[rows, places] = np.concatenate(values)[: len(rows)]
        return whole

    steps = np.array(growth_stops(pruned_schedule(budgets[-1]).steps))
    return Chart(positions.lengths, steps, *map(spread, *parts))


def _chart(
    models: Models, params: Params, inputs: Drafts, following: Array, *, budgets: tuple[int, ...], depth: int
) -> tuple[Array, ...]:
    weaver, most = bind(models, params).weaver, budgets[-1]
    schedule, limits = pruned_schedule(most), jnp.array(budgets)
    arguments = (*inputs[:5], params["tables"])

    def stop(index: Array) -> tuple[Array, ...]:
        grown = weaver.grow_tree(*arguments, lambda _: index, budget=most, **schedule._asdict())
        accepted = _accepted(grown.tree, following, depth)
        on_path = jnp.arange(depth + 1) < accepted.count[:, None]
        emitted = jnp.sum(on_path[:, None] & (accepted.path[:, None] <= limits[:, None]), axis=2, dtype=jnp.uint8)
        return jnp.sum(jnp.exp(grown.waiting), axis=1), promised_tokens(grown.tree.scores, budgets), emitted

    waiting, *charted = lax.map(stop, jnp.arange(len(growth_stops(schedule.steps))))
    trees = (weaver.build_tree(*arguments, budget=budget, **pruned_schedule(budget)._asdict()) for budget in budgets)
    fixed = [_accepted(tree, following, depth).count.astype(jnp.uint8) for tree in trees]
    return waiting[0], *(jnp.moveaxis(part, 0, 1) for part in charted), jnp.stack(fixed, axis=1)


def _inputs(
    positions: Positions, rows: Int[np.ndarray, " batch"], places: Int[np.ndarray, " batch"], depth: int
) -> tuple[Drafts, Int[np.ndarray, "batch steps"]]:
    """What rounds at these places draft from, and what follows their roots."""
    following = positions.following[rows[:, None], places[:, None] + np.arange(1, depth + 2)]
    return Drafts(*(jnp.asarray(part[rows, places]) for part in positions[:6])), following


def _accepted(tree: DraftTree, following: Int[Array, "batch steps"], depth: int) -> AcceptedPath:
    choices = jax.vmap(lambda row, at: row[at])(following, tree.depths)
    return walk(tree, choices, max_depth=depth)
