"""One decode round, and the prefill before the first one.

    propose   the drafter's block gives marginals; a tree of candidate continuations grows from them
    verify    the target runs over the whole tree in one pass and writes nothing
    accept    walk from the root along the target's own choices, or as another verifier says
    commit    only the accepted path enters the caches of target and drafter

Every function here is pure: `params` is a dict of arrays; the state, which carries its static plan, goes in and comes
out and may be donated. Positions: the root stands at the committed length L, a node of depth d at L + d, and the choice
made at a node of position p is the token of position p + 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import take_nodes
from tfm_jax.budget import choose_budget, choose_steps, promised_tokens, round_seconds
from tfm_jax.commit import commit_path
from tfm_jax.config import DecodePlan, Models
from tfm_jax.dflash import Drafter, empty_caches
from tfm_jax.filters import count_tokens, filter_logits, log_laws, node_laws, penalise
from tfm_jax.growth import PrunedSchedule, Schedule, default_steps, default_width, growth_stops, pruned_schedule
from tfm_jax.sampling import AcceptedPath, Logprobs, cut_at_stop, node_choices, scaled_noise, token_logprobs
from tfm_jax.state import DecodeState, DeltaTape, Filters, KVRows, Ledger, write_rows
from tfm_jax.target import Target, empty_target_state
from tfm_jax.tree import DraftTree, chain_tree, conv_taps, ddtree, drop_nodes, first_nodes, top_candidates
from tfm_jax.verifiers import accept, draft_noise
from tfm_jax.weaver import Weaver

Params = dict[str, Any]


class Modules(NamedTuple):
    """The three models. A missing one is None; the plan's method says which are there."""

    target: Target
    drafter: Any  # Drafter
    weaver: Any  # Weaver


def bind(models: Models, params: Params) -> Modules:
    """Modules over the given arrays, for use inside a jitted function."""

    def merge(build: type, config: Any, name: str) -> Any:  # noqa: ANN401 - one of three configurations and modules
        if config is None or name not in params:
            return None
        return nnx.merge(_graphdef(build, config), params[name])

    return Modules(
        merge(Target, models.target, "target"),
        merge(Drafter, models.drafter, "drafter"),
        merge(Weaver, models.weaver, "weaver"),
    )


@functools.cache  # building the modules takes as long as tracing a tenth of a round
def _graphdef(build: type, config: Any) -> nnx.GraphDef:  # noqa: ANN401 - one of three configurations
    return nnx.graphdef(nnx.eval_shape(lambda: build(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))))


class RoundOutput(NamedTuple):
    """What a round emitted, and how.

    `tokens[:, :count]` are new: the accepted path without its root, then the bonus, cut at a stop or the length limit.
    `path[:, :count]` are the committed nodes, the root first; `accepted` counts drafts accepted before that cut.
    `logprobs` belong to `tokens`; None unless the plan asks for them.
    """

    tokens: Int[Array, "batch steps"]
    count: Int[Array, " batch"]
    tree: DraftTree
    path: Int[Array, "batch steps"]
    accepted: Int[Array, " batch"]
    bonus: Int[Array, " batch"]
    logprobs: Logprobs | None


def empty_state(
    plan: DecodePlan, *, capacity: int, limit: Array, temperature: Array, seed: Array, stop_ids: Array, dtype: DTypeLike
) -> DecodeState:
    """State before the first prompt token, without filters and penalties.

    Args:
        plan: static choices; `ar` keeps no drafter caches.
        capacity: rows of every K/V cache: context plus at least one block.
        limit: [batch] new tokens wanted.
        temperature: [batch] float32; 0 is greedy.
        seed: [batch] int32 of the noise field.
        stop_ids: [stops] token ids that end a row; may be empty.
        dtype: compute dtype of the models.
    """
    batch = limit.shape[0]
    config = plan.models.target
    drafter = plan.models.drafter if plan.method != "ar" else None
    return DecodeState(
        target=empty_target_state(config, batch, capacity, dtype),
        drafter=() if drafter is None else empty_caches(drafter, batch, capacity, dtype),
        root=jnp.zeros((batch,), jnp.int32),
        feature=jnp.zeros((batch, config.hidden_size), dtype),
        emitted=jnp.zeros((batch,), jnp.int32),
        limit=limit,
        done=jnp.zeros((batch,), bool),
        temperature=temperature,
        seed=seed,
        stop_ids=stop_ids,
        filters=Filters(),
        penalties=None,
        ledger=None,
        plan=plan,
    )


def prefill_piece(
    params: Params, state: DecodeState, tokens: Int[Array, "batch piece"], valid: Bool[Array, "batch piece"]
) -> DecodeState:
    """Runs the next piece of every prompt; rows are right-padded, and padding leaves every cache untouched."""
    modules = bind(state.plan.models, params)
    lengths = state.target.lengths
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    output = modules.target.prefill(tokens, valid, state.target, tap_layers=state.plan.tap_layers)
    last = take_nodes(output.hidden, jnp.maximum(count - 1, 0)[:, None])[:, 0]
    return dataclasses.replace(
        state,
        target=output.state,
        drafter=_extend_context(modules.drafter, state.drafter, output.taps, lengths, count),
        feature=jnp.where(count[:, None] > 0, last, state.feature),
    )


def emit_first(params: Params, state: DecodeState) -> DecodeState:
    """Chooses the first new token, the root of the first round, after the last piece of the prompt."""
    depths = jnp.zeros((state.root.shape[0], 1), jnp.int32)
    lengths = state.target.lengths - 1
    root = node_choices(
        _first_logits(params, state), depths, lengths, state.temperature, state.seed, max_depth=0,
        sample=state.plan.sample,
    )  # fmt: skip
    cut = cut_at_stop(root, jnp.ones_like(state.emitted), state.stop_ids, state.limit)
    return dataclasses.replace(state, root=root[:, 0], emitted=cut.count, done=cut.done)


def speculative_round(params: Params, state: DecodeState) -> tuple[DecodeState, RoundOutput]:
    """Propose, verify, accept, commit. Finished rows emit nothing and keep their caches bit for bit.

    Args:
        params: {"target": …, "drafter": …, "weaver": …, "tables": WeaverTables}, as far as the method needs them.
        state: may be donated.
    """
    modules = bind(state.plan.models, params)
    drafted = _draft(modules, params, state)
    return verify_and_commit(modules, state, drafted.tree, drafted.laws, drafted.left_out)


def propose(modules: Modules, params: Params, state: DecodeState) -> DraftTree:
    """The tree of candidate continuations; for `ar` just the root."""
    return _draft(modules, params, state).tree


class _Drafted(NamedTuple):
    """What a round verifies: the tree, laws that its tokens were drawn from, steps that its growth left out.

    There are laws only where `rejection` wants tokens drawn.
    """

    tree: DraftTree
    laws: Float[Array, "batch nodes vocab"] | None = None
    left_out: Int[Array, ""] | int = 0


def _draft(modules: Modules, params: Params, state: DecodeState) -> _Drafted:
    plan = state.plan
    if plan.method == "ar":
        nothing = jnp.zeros((state.root.shape[0], 0, 1))
        return _Drafted(chain_tree(state.root, nothing.astype(jnp.int32), nothing, 0))
    config = modules.drafter.config
    masks = jnp.full((state.root.shape[0], config.depth), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.root[:, None], masks], axis=1)
    hidden = modules.drafter.draft(modules.target.embed(block), state.target.lengths, state.drafter)
    hidden = hidden[:, 1 : 1 + plan.depth]  # slot 0 is the root's own; `chain` verifies a prefix of the block
    logits = modules.target.logits(hidden)
    vocab = logits.shape[-1]
    if plan.method == "chain" and plan.verifier == "rejection":
        return _drawn_chain(state, logits)
    if plan.sample and plan.tree.shared_noise:
        noise = scaled_noise(state.seed, state.target.lengths, state.temperature, max_depth=plan.depth, vocab=vocab)
        logits = logits.astype(jnp.float32) + noise[:, : plan.depth]
    if plan.method == "chain":
        candidates = top_candidates(logits, 1)
        return _Drafted(chain_tree(state.root, candidates.ids, candidates.log_probs, plan.depth))
    if plan.method == "ddtree":
        candidates = top_candidates(logits, min(plan.budget, vocab))
        return _Drafted(ddtree(state.root, candidates.ids, candidates.log_probs, plan.budget, spine=plan.tree.spine))
    candidates = top_candidates(logits, min(modules.weaver.config.pool_size, vocab))
    inputs = (state.root, state.feature, hidden, candidates.ids, candidates.scores, params["tables"])
    if state.ledger is None or not plan.tree.pruned or plan.tree.spine:
        schedule = _schedule(plan)._asdict()
        return _Drafted(modules.weaver.build_tree(*inputs, budget=plan.budget, spine=plan.tree.spine, **schedule))
    schedule = pruned_schedule(plan.budget)
    choose = functools.partial(_choose_steps, state, state.ledger, growth_stops(schedule.steps))
    grown = modules.weaver.grow_tree(*inputs, choose, budget=plan.budget, **schedule._asdict())
    return _Drafted(grown.tree, left_out=schedule.steps - grown.steps)


def _choose_steps(
    state: DecodeState, ledger: Ledger, stops: tuple[int, ...], waiting: Float[Array, "batch rows"]
) -> Int[Array, ""]:
    hits = jnp.where(state.done, 0.0, jnp.sum(jnp.exp(waiting), axis=1))
    return choose_steps(jnp.sum(hits), stops, state.emitted, ledger)


def _steps(plan: DecodePlan) -> int | None:
    """Calls of the Weaver without guesses, as the reference makes them or a spine needs; None prunes nothing."""
    chain = min(plan.budget, plan.depth) if plan.tree.spine else 1
    steps = max(default_steps(plan.budget), chain)
    return steps if plan.tree.pruned or steps > default_steps(plan.budget) else None


def _schedule(plan: DecodePlan) -> Schedule | PrunedSchedule:
    """How a tree grows whose steps are not chosen."""
    if plan.tree.pruned and not plan.tree.spine:
        return pruned_schedule(plan.budget)
    return Schedule(default_width(plan.budget), _steps(plan))


def _drawn_chain(state: DecodeState, logits: Float[Array, "batch depth vocab"]) -> _Drafted:
    """A chain drawn from the drafter's marginals under the target's own temperature and filters, and their laws."""
    logits = filter_logits(logits, state.temperature, state.filters)
    laws = node_laws(logits, state.temperature)
    noise = draft_noise(state.seed, state.target.lengths, *logits.shape[1:])
    ids = jnp.argmax(logits + state.temperature[:, None, None] * noise, axis=-1).astype(jnp.int32)[..., None]
    log_probs = jnp.log(jnp.take_along_axis(laws, ids, axis=-1))
    after_last = jnp.zeros_like(laws[:, :1])
    tree = chain_tree(state.root, ids, log_probs, logits.shape[1])
    return _Drafted(tree, jnp.concatenate([laws, after_last], axis=1))


class _Verified(NamedTuple):
    """What the target says of a tree; commit reads the rows of accepted nodes only."""

    accepted: AcceptedPath
    hidden: Float[Array, "batch nodes hidden"]
    taps: Float[Array, "batch nodes features"]
    values: tuple[KVRows | DeltaTape, ...]
    conv_taps: Int[Array, "batch nodes width"]
    logprobs: Logprobs | None


def verify_and_commit(
    modules: Modules,
    state: DecodeState,
    tree: DraftTree,
    drafted: Float[Array, "batch nodes vocab"] | None = None,
    left_out: Int[Array, ""] | int = 0,
) -> tuple[DecodeState, RoundOutput]:
    """The target's part of a round, for any tree whose root is `state.root` and that the target did not influence.

    Args:
        modules: the three models.
        state: state before the round.
        tree: what to verify.
        drafted: with the verifier `rejection`, the laws that a drawn chain came from; see `verifiers.chain_rejection`.
        left_out: steps that the tree's growth left out; only the choice of budgets asks.
    """
    if state.ledger is None:
        return _verify_and_commit(modules, state, tree, drafted)
    return _verify_best(modules, state, tree, state.ledger, left_out)


def _verify_best(
    modules: Modules, state: DecodeState, tree: DraftTree, ledger: Ledger, left_out: Int[Array, ""] | int
) -> tuple[DecodeState, RoundOutput]:
    """Verifies and commits the first nodes of a tree, as many as `tfm_jax.budget` chooses; enters what that took."""
    budgets, live = state.plan.tree.budgets, ~state.done
    promised = jnp.sum(jnp.where(live[:, None], promised_tokens(tree.scores, budgets), 0.0), axis=0)
    choice = choose_budget(promised, jnp.sum(live), state.emitted, ledger)
    nodes = tree.tokens.shape[1]

    def branch(budget: int) -> Callable[[], tuple[DecodeState, dict[str, Any]]]:
        def run() -> tuple[DecodeState, dict[str, Any]]:
            new_state, output = _verify_and_commit(modules, state, first_nodes(tree, budget), None)
            return new_state, {name: part for name, part in output._asdict().items() if name != "tree"}

        return run

    new_state, output = lax.switch(choice, [branch(budget) for budget in budgets])
    seconds = ledger.seconds + round_seconds(choice, left_out, ledger)
    accepted = ledger.accepted + jnp.sum(jnp.maximum(output["count"] - 1, 0))
    ledger = ledger._replace(seconds=seconds, promised=ledger.promised + promised[choice], accepted=accepted)
    kept = jnp.arange(nodes) <= jnp.asarray(budgets)[choice]
    return dataclasses.replace(new_state, ledger=ledger), RoundOutput(tree=drop_nodes(tree, kept), **output)


def _verify_and_commit(
    modules: Modules, state: DecodeState, tree: DraftTree, drafted: Array | None
) -> tuple[DecodeState, RoundOutput]:
    """The whole tree, whatever the ledger says."""
    lengths = state.target.lengths
    verified = _verify(modules, state, tree, drafted)
    accepted = verified.accepted
    remaining = jnp.where(state.done, 0, state.limit - state.emitted)
    cut = cut_at_stop(accepted.tokens, accepted.count, state.stop_ids, remaining)

    path, count = accepted.path, cut.count
    last = jnp.maximum(count - 1, 0)[:, None]
    alive = count > 0
    leaf = jnp.take_along_axis(path, last, axis=1)
    new_state = dataclasses.replace(
        state,
        target=commit_path(state.target, verified.values, path, count, verified.conv_taps),
        drafter=_extend_context(modules.drafter, state.drafter, take_nodes(verified.taps, path), lengths, count),
        root=jnp.where(alive, jnp.take_along_axis(accepted.tokens, last, axis=1)[:, 0], state.root),
        feature=jnp.where(alive[:, None], take_nodes(verified.hidden, leaf)[:, 0], state.feature),
        emitted=state.emitted + count,
        done=state.done | cut.done,
        penalties=count_tokens(state.penalties, take_nodes(tree.tokens, path), count),
    )
    return new_state, RoundOutput(
        accepted.tokens, count, tree, path, accepted.count - 1, accepted.bonus, verified.logprobs
    )


def _verify(modules: Modules, state: DecodeState, tree: DraftTree, drafted: Array | None) -> _Verified:
    """The target over the whole tree, and the walk; writes nothing."""
    plan, lengths = state.plan, state.target.lengths
    taps = conv_taps(tree.parents, max(plan.models.target.conv_width, 1))
    verified = modules.target.verify(
        tree.tokens, lengths[:, None] + tree.depths, tree.ancestors, taps, state.target, tap_layers=plan.tap_layers
    )
    logits = _filtered(state, modules.target.logits(verified.hidden), tree.tokens, tree.ancestors)
    accepted = accept(
        tree, logits, lengths, state.temperature, state.seed,
        verifier=plan.verifier, max_depth=plan.depth, sample=plan.sample, drafted=drafted,
    )  # fmt: skip
    logprobs = None
    if plan.logprobs is not None:
        laws = log_laws(take_nodes(logits, accepted.path), state.temperature)
        logprobs = token_logprobs(laws, accepted.tokens, plan.logprobs)
    return _Verified(accepted, verified.hidden, verified.taps, verified.values, taps, logprobs)


def first_logprobs(params: Params, state: DecodeState) -> Logprobs:
    """Log-probabilities for the token of `emit_first`, from the state that it returned."""
    laws = log_laws(_first_logits(params, state), state.temperature)
    return token_logprobs(laws, state.root[:, None], state.plan.logprobs or 0)


def _first_logits(params: Params, state: DecodeState) -> Float[Array, "batch 1 vocab"]:
    """The target's filtered logits after the prompt."""
    batch = state.root.shape[0]
    logits = bind(state.plan.models, params).target.logits(state.feature[:, None])
    return _filtered(state, logits, jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 1, 0), bool))


def _filtered(
    state: DecodeState,
    logits: Float[Array, "batch nodes vocab"],
    tokens: Int[Array, "batch slots"],
    ancestors: Bool[Array, "batch nodes slots"],
) -> Float[Array, "batch nodes vocab"]:
    """Logits after penalties, bias and filters; without any, as they are."""
    logits = penalise(logits, tokens, ancestors, state.penalties)
    return filter_logits(logits, state.temperature, state.filters)


class Transcript(NamedTuple):
    """What the rounds of a batch emitted so far.

    `tokens[:, :emitted]` are all new tokens, the one from prefill first; `logprobs` are theirs, None unless the plan
    asks for them. Entry r of `committed` and `nodes` is round r.
    """

    tokens: Int[Array, "batch limit"]
    committed: Int[Array, "batch rounds"]
    nodes: Int[Array, "batch rounds"]
    rounds: Int[Array, ""]
    logprobs: Logprobs | None


def start_transcript(state: DecodeState, limit: int, logprobs: Logprobs | None = None) -> Transcript:
    """Transcript after `emit_first`.

    Args:
        state: what `emit_first` returned.
        limit: the largest number of new tokens of any row.
        logprobs: what `first_logprobs` says, if the plan asks for log-probabilities.
    """
    batch = state.root.shape[0]
    blank = jnp.zeros((batch, limit), jnp.int32)  # every round emits at least one token: `limit` rounds are enough

    def begin(first: Array) -> Array:
        return jnp.zeros((batch, limit, *first.shape[2:]), first.dtype).at[:, :1].set(first)

    tokens, zero = blank.at[:, 0].set(state.root), jnp.zeros((), jnp.int32)
    return Transcript(tokens, blank, jnp.zeros_like(blank), zero, jax.tree.map(begin, logprobs))


def run_rounds(
    params: Params, state: DecodeState, transcript: Transcript, rounds: Int[Array, ""]
) -> tuple[DecodeState, Transcript]:
    """The device-side driver: at most `rounds` more rounds in one `lax.while_loop`, until every row is done."""
    limit = transcript.tokens.shape[1]
    last = transcript.rounds + rounds

    def going(carry: tuple[DecodeState, Transcript]) -> Bool[Array, ""]:
        return jnp.any(~carry[0].done) & (carry[1].rounds < last)

    def body(carry: tuple[DecodeState, Transcript]) -> tuple[DecodeState, Transcript]:
        state, transcript = carry
        new_state, output = speculative_round(params, state)
        step = jnp.arange(output.tokens.shape[1])
        slots = jnp.where(step < output.count[:, None], state.emitted[:, None] + step, limit)
        rows = jnp.arange(slots.shape[0])[:, None]
        drafted = jnp.where(state.done, 0, jnp.sum(output.tree.valid, axis=1, dtype=jnp.int32) - 1)

        def append(text: Array, new: Array) -> Array:
            return text.at[rows, slots].set(new, mode="drop")

        return new_state, Transcript(
            append(transcript.tokens, output.tokens),
            transcript.committed.at[:, transcript.rounds].set(output.count),
            transcript.nodes.at[:, transcript.rounds].set(drafted),
            transcript.rounds + 1,
            jax.tree.map(append, transcript.logprobs, output.logprobs),
        )

    return lax.while_loop(going, body, (state, transcript))


def _extend_context(
    drafter: Drafter | None, caches: tuple, taps: Array, lengths: Int[Array, " batch"], count: Int[Array, " batch"]
) -> tuple:
    """Appends the committed tokens' features to the drafter's caches: they always hold what the target's hold."""
    if drafter is None or not caches:  # `ar` keeps none
        return caches
    positions = lengths[:, None] + jnp.arange(taps.shape[1], dtype=jnp.int32)
    rows = drafter.context_rows(taps, positions)
    return tuple(write_rows(cache, new, lengths, count) for cache, new in zip(caches, rows, strict=True))
