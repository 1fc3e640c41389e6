"""What a user may ask of an engine: options, their defaults, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Literal, TypedDict

import jax.numpy as jnp
import numpy as np

from tfm_jax.budget import Costs, start_ledger
from tfm_jax.checkpoint import CheckpointConfig
from tfm_jax.config import (
    DRAFT_NOISES,
    FILTER_ORDERS,
    METHODS,
    TREE_KINDS,
    VERIFIERS,
    DecodePlan,
    Method,
    Models,
    TreePlan,
    Verifier,
)
from tfm_jax.errors import TfmError, require
from tfm_jax.state import Filters, Ledger, Penalties
from tfm_jax.text import check_token_ids
from tfm_jax.tree import MAX_BUDGET

_BUCKET = 256  # contexts are rounded up to multiples of this, so that similar requests share a compilation
_SPARE_BUCKET = 64  # the same for the rows beyond the context
_STOP_BUCKET = 8  # the same for stop tokens
_NO_TOKEN = -1
_LARGEST_SEED = 2**31 - 1
_MOST_LOGPROBS = 20

LogitBias = Mapping[int, float]


class Options(TypedDict, total=False):
    """What may be asked beside the prompts.

    Attributes:
        method: "tfm" (Weaver tree; the default), "ddtree", "chain" or "ar".
        budget: most tree nodes, the root not counted; 63 by default. "auto" chooses in every round, by `costs`.
        max_new_tokens: 128 by default.
        temperature: 0 (the default) is greedy; one for all or one a prompt, like all options down to `seed`.
        top_k: draw among the likeliest `top_k` tokens; 0 (the default) is off.
        top_p: draw among the likeliest tokens, each of which has less than `top_p` before it; 1 (the default) is off.
        min_p: draw among tokens at least `min_p` times as likely as the likeliest; 0 (the default) is off.
        logit_bias: token id to what is added to its logit; −inf bans it.
        repetition_penalty: divides positive and multiplies negative logits of all tokens in prompt or text; 1 is off.
        frequency_penalty: subtracted from a token's logit for every time it is in the text; 0 is off.
        presence_penalty: subtracted from a token's logit if it is in the text; 0 is off.
        seed: decides the sampled text; 0 by default.
        filter_order: "sequential" (top-k, top-p, min-p; the default) or "joint" (top-p of the whole law first).
        verifier: "target_only" (the default), "traversal", or "rejection" for the method "chain". All keep the law;
            with `target_only` the sampled text depends on the seed alone, with the others on method and budget too.
        tree: "pruned" (the default: the best nodes of all that the Weaver scored) or "reference" (those it expanded).
        spine: keep the likeliest chain in every tree, to the depth that the budget allows; off by default.
        draft_noise: "shared" (the default): drafts know the noise that the target will draw with, which changes how
            many are accepted and never the text; or "none". Only `target_only` can share it.
        costs: table for the budget "auto" (`tfm_jax.budget.read_costs`); by default the checkpoint's own.
        context: tokens that the caches hold; by default prompt and new tokens, rounded up.
        stop_token_ids: tokens that end a text; by default, and for None, the checkpoint's.
        ignore_eos: go on after them.
        stop: texts that end a text; they and what follows are left out of it. One or several, for all prompts.
        logprobs: report the log-probability of every new token and of so many likeliest ones in its place, 0 to 20.
    """

    method: str
    budget: int | Literal["auto"]
    max_new_tokens: int
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    logit_bias: LogitBias | Sequence[LogitBias] | None
    repetition_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    seed: int | Sequence[int]
    filter_order: str
    verifier: str
    tree: str
    spine: bool
    draft_noise: str
    costs: Costs | None
    context: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    stop: str | Sequence[str]
    logprobs: int | None


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked batch.

    Attributes:
        prompts: token ids.
        plan: static choices.
        limit: new tokens wanted.
        temperatures: one a prompt.
        seeds: one a prompt.
        capacity: rows of the caches: the context, and room for what one round looks ahead.
        stop_ids: tokens that end a text, padded with −1.
        stop: texts that end a text.
        filters: what of the target's law may be drawn.
        penalties: None where no prompt asks for any.
        ledger: for the choice of budgets; None without one.
    """

    prompts: list[list[int]]
    plan: DecodePlan
    limit: int
    temperatures: list[float]
    seeds: list[int]
    capacity: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    filters: Filters
    penalties: Penalties | None
    ledger: Ledger | None


def check_request(
    config: CheckpointConfig,
    models: Models,
    prompts: Sequence[Sequence[int]],
    *,
    method: str = "tfm",
    budget: int | Literal["auto"] = 63,
    max_new_tokens: int = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    logit_bias: LogitBias | Sequence[LogitBias] | None = None,
    repetition_penalty: float | Sequence[float] = 1.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    presence_penalty: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    filter_order: str = "sequential",
    verifier: str = "target_only",
    tree: str = "pruned",
    spine: bool = False,
    draft_noise: str = "shared",
    costs: Costs | None = None,
    context: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
) -> Request:
    """A batch with `Options`, checked against the models; the budget "auto" needs `costs`.

    Raises:
        TfmError: a prompt or an option does not fit.
    """
    require(len(prompts) > 0, "there is no prompt; give at least one.")
    _check_whole(max_new_tokens=max_new_tokens, budget=0 if budget == "auto" else budget)
    _check_whole(logprobs=logprobs or 0, context=context or 0)
    for prompt in prompts:
        check_token_ids(prompt, models.target.vocab_size)
    chosen = _find_method(models, method)
    budgets, most = _budgets(chosen, budget, costs)
    require(max_new_tokens >= 1, f"max_new_tokens is {max_new_tokens}; ask for at least 1.")
    count, vocab = len(prompts), models.target.vocab_size
    temperatures = _checked(
        "temperature", temperature, count, lambda value: value >= 0, "0 (greedy) or a positive number"
    )
    seeds = _one_each("seed", seed, count)
    for number in seeds:
        _check_whole(seed=number)
        require(0 <= number <= _LARGEST_SEED, f"seed is {number}; choose 0 to {_LARGEST_SEED}.")
    require(
        logprobs is None or 0 <= logprobs <= min(_MOST_LOGPROBS, vocab),
        f"logprobs is {logprobs}; choose 0 to {min(_MOST_LOGPROBS, vocab)}.",
    )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    require("" not in stops, "a stop text is empty; give at least one character.")
    sample = any(temperatures)
    rule = _useful_verifier(chosen, verifier, sample=sample)
    plan = DecodePlan(
        models,
        chosen,
        _useful_budget(models, chosen, most),
        sample=sample,
        verifier=rule,
        logprobs=logprobs,
        tree=_tree_plan(chosen, tree, draft_noise, spine=spine, sample=sample, verifier=rule, budgets=budgets),
    )
    needed = max(map(len, prompts)) + max_new_tokens
    return Request(
        prompts=[list(prompt) for prompt in prompts],
        plan=plan,
        limit=max_new_tokens,
        temperatures=temperatures,
        seeds=seeds,
        capacity=_context(models, needed, context) + round_up(plan.depth + 1, _SPARE_BUCKET),
        stop_ids=_stop_ids(config, models, stop_token_ids, ignore_eos=ignore_eos),
        stop=stops,
        filters=Filters(
            bias=_bias(logit_bias, count, vocab),
            top_k=_top_k(top_k, count),
            top_p=_filter("top_p", top_p, count, lambda value: 0 < value <= 1, "above 0, up to 1 (off)", off=1.0),
            min_p=_filter("min_p", min_p, count, lambda value: 0 <= value <= 1, "0 (off) to 1", off=0.0),
            joint=_is_joint(filter_order),
        ),
        penalties=_penalties(prompts, vocab, repetition_penalty, frequency_penalty, presence_penalty),
        ledger=_ledger(costs) if budgets and costs else None,
    )


def _check_whole(**numbers: object) -> None:
    for name, number in numbers.items():
        require(isinstance(number, Integral), f"{name} is {number!r:.40}; give a whole number.")


def _ledger(costs: Costs) -> Ledger:
    return start_ledger(jnp.asarray(costs.choice_seconds, jnp.float32), costs.step_seconds, costs.node_seconds)


def _budgets(method: Method, budget: int | Literal["auto"], costs: Costs | None) -> tuple[tuple[int, ...], int]:
    """Budgets to choose from, none where one is given, and the largest."""
    if budget != "auto":
        require(1 <= budget <= MAX_BUDGET, f"budget is {budget}; choose 1 to {MAX_BUDGET} tree nodes, or auto.")
        return (), budget
    trees = method in {"tfm", "ddtree"}
    require(trees, f"budget auto chooses among trees and the method is {method}; choose tfm or ddtree, or a budget.")
    if costs is None:
        message = "budget auto needs a table of costs; make one with `tfm calibrate`, or give a budget."
        raise TfmError(message)
    require(
        costs.method == method, f"the table of costs is for {costs.method} and the method is {method}; calibrate it."
    )
    largest = costs.budgets[-1]
    require(largest <= MAX_BUDGET, f"the table of costs has a budget of {largest}; calibrate up to {MAX_BUDGET}.")
    return costs.choices, largest


def _tree_plan(
    method: Method,
    tree: str,
    draft_noise: str,
    *,
    spine: bool,
    sample: bool,
    verifier: Verifier,
    budgets: tuple[int, ...],
) -> TreePlan:
    """How trees grow, as far as it changes the program."""
    require(tree in TREE_KINDS, f"tree {tree!r} is unknown; choose one of {', '.join(TREE_KINDS)}.")
    require(draft_noise in DRAFT_NOISES, f"draft_noise {draft_noise!r} is unknown; choose {' or '.join(DRAFT_NOISES)}.")
    if method == "ar":
        return TreePlan()
    return TreePlan(
        pruned=method == "tfm" and tree == "pruned",
        spine=spine and method != "chain",
        shared_noise=draft_noise == "shared" and sample and verifier == "target_only",
        budgets=budgets,
    )


def _useful_budget(models: Models, method: Method, budget: int) -> int:
    """The part of a budget that changes the program: a chain is at most a block long, `ar` drafts nothing."""
    if method == "ar" or models.drafter is None:
        return 1
    return min(budget, models.drafter.depth) if method == "chain" else budget


def _useful_verifier(method: Method, verifier: str, *, sample: bool) -> Verifier:
    """The verifier, where it changes the program: plain and greedy decoding have one rule only."""
    require(verifier in VERIFIERS, f"verifier {verifier!r} is unknown; choose one of {', '.join(VERIFIERS)}.")
    require(
        verifier != "rejection" or method in {"chain", "ar"},
        f"verifier rejection needs a chain and the method is {method}; choose method chain or another verifier.",
    )
    return VERIFIERS[VERIFIERS.index(verifier)] if sample and method != "ar" else "target_only"


def _is_joint(filter_order: str) -> bool:
    orders = ", ".join(FILTER_ORDERS)
    require(filter_order in FILTER_ORDERS, f"filter_order {filter_order!r} is unknown; choose one of {orders}.")
    return filter_order == "joint"


def _filter(
    name: str, value: float | Sequence[float], count: int, fits: Callable[[float], bool], allowed: str, *, off: float
) -> jnp.ndarray | None:
    """The values of the batch; None where all are off."""
    values = _checked(name, value, count, fits, allowed)
    return None if all(value == off for value in values) else jnp.asarray(values, jnp.float32)


def _top_k(top_k: int | Sequence[int], count: int) -> jnp.ndarray | None:
    values = _one_each("top_k", top_k, count)
    for value in values:
        _check_whole(top_k=value)
        require(0 <= value <= _LARGEST_SEED, f"top_k is {value}; choose 0 (off) or a number of tokens.")
    return jnp.asarray(values, jnp.int32) if any(values) else None


def _bias(logit_bias: LogitBias | Sequence[LogitBias] | None, count: int, vocab: int) -> jnp.ndarray | None:
    if logit_bias is None:
        return None
    dense = np.zeros((count, vocab), np.float32)
    for row, biases in enumerate(_one_each("logit_bias", logit_bias, count)):
        for token, value in biases.items():
            require(0 <= token < vocab, f"logit_bias names token {token}; the model knows 0 to {vocab - 1}.")
            fits = value < math.inf and not math.isnan(value)
            require(fits, f"logit_bias of token {token} is {value}; choose a finite number, or -inf to ban it.")
            dense[row, token] = value
        require(bool(np.isfinite(dense[row]).any()), "logit_bias bans every token; leave at least one.")
    return jnp.asarray(dense) if dense.any() else None


def _penalties(
    prompts: Sequence[Sequence[int]],
    vocab: int,
    repetition: float | Sequence[float],
    frequency: float | Sequence[float],
    presence: float | Sequence[float],
) -> Penalties | None:
    count = len(prompts)
    positive, number = "a positive number, 1 to switch it off", "a number, 0 to switch it off"
    factors = (
        _filter("repetition_penalty", repetition, count, lambda value: value > 0, positive, off=1.0),
        _filter("frequency_penalty", frequency, count, lambda _: True, number, off=0.0),
        _filter("presence_penalty", presence, count, lambda _: True, number, off=0.0),
    )
    if all(values is None for values in factors):
        return None
    prompted = np.zeros((count, vocab), bool)
    for row, prompt in enumerate(prompts):
        prompted[row, list(prompt)] = True
    repetitions, frequencies, presences = (
        jnp.full(count, off, jnp.float32) if values is None else values
        for values, off in zip(factors, (1, 0, 0), strict=True)
    )
    counts = jnp.zeros((count, vocab), jnp.int32)
    return Penalties(repetitions, frequencies, presences, jnp.asarray(prompted), counts)


def _checked(
    name: str, value: float | Sequence[float], count: int, fits: Callable[[float], bool], allowed: str
) -> list[float]:
    values = _one_each(name, value, count)
    for number in values:
        require(math.isfinite(number) and fits(number), f"{name} is {number}; choose {allowed}.")
    return values


def _find_method(models: Models, method: str) -> Method:
    require(method in METHODS, f"method {method!r} is unknown; choose one of {', '.join(METHODS)}.")
    lacking = "Weaver" if models.drafter is not None else "drafter"
    require(
        method in models.methods,
        f"method {method} needs a {lacking}, which this checkpoint lacks; choose {' or '.join(models.methods)}.",
    )
    return METHODS[METHODS.index(method)]


def _context(models: Models, needed: int, context: int | None) -> int:
    """Tokens that the caches hold besides their spare rows."""
    positions = models.target.max_positions
    require(
        needed <= positions,
        f"prompt and new tokens need {needed} positions and the model has {positions}; "
        "shorten the prompt or ask for fewer new tokens.",
    )
    if context is None:
        return round_up(needed, _BUCKET)
    require(
        context >= needed, f"context is {context} but prompt and new tokens need {needed}; raise it or leave it out."
    )
    require(context <= positions, f"context is {context} and the model has {positions} positions; lower it.")
    return context


def _stop_ids(
    config: CheckpointConfig, models: Models, stop_token_ids: Sequence[int] | None, *, ignore_eos: bool
) -> tuple[int, ...]:
    stops = config.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
    for token in stops:
        last = models.target.vocab_size - 1
        require(0 <= token <= last, f"stop token id {token} is out of range; the model knows 0 to {last}.")
    stops = () if ignore_eos else stops
    return stops + (_NO_TOKEN,) * (round_up(max(len(stops), 1), _STOP_BUCKET) - len(stops))


def _one_each[Value](name: str, value: Value | Sequence[Value], count: int) -> list[Value]:
    """One value a prompt, from one for all or a sequence."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        message = f"{name} has {len(value)} values for {count} prompts; give one for all or one each."
        raise TfmError(message)
    return list(value)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple
