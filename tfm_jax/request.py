"""What a user may ask of an engine: options, their defaults, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypedDict

from tfm_jax.checkpoint import CheckpointConfig
from tfm_jax.config import METHODS, DecodePlan, Method, Models
from tfm_jax.errors import TfmError, require
from tfm_jax.text import check_token_ids
from tfm_jax.tree import MAX_BUDGET

_BUCKET = 256  # contexts are rounded up to multiples of this, so that similar requests share a compilation
_SPARE_BUCKET = 64  # the same for the rows beyond the context
_STOP_BUCKET = 8  # the same for stop tokens
_NO_TOKEN = -1
_LARGEST_SEED = 2**31 - 1


class Options(TypedDict, total=False):
    """What may be asked beside the prompts.

    Attributes:
        method: "tfm" (Weaver tree; the default), "ddtree", "chain" or "ar".
        budget: most tree nodes, the root not counted; 63 by default.
        max_new_tokens: 128 by default.
        temperature: 0 (the default) is greedy; one for all or one a prompt.
        seed: decides the sampled text; 0 by default; one for all or one a prompt.
        context: tokens that the caches hold; by default prompt and new tokens, rounded up.
        stop_token_ids: tokens that end a text; by default, and for None, the checkpoint's.
        ignore_eos: go on after them.
    """

    method: str
    budget: int
    max_new_tokens: int
    temperature: float | Sequence[float]
    seed: int | Sequence[int]
    context: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool


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
    """

    prompts: list[list[int]]
    plan: DecodePlan
    limit: int
    temperatures: list[float]
    seeds: list[int]
    capacity: int
    stop_ids: tuple[int, ...]


def check_request(
    config: CheckpointConfig,
    models: Models,
    prompts: Sequence[Sequence[int]],
    *,
    method: str = "tfm",
    budget: int = 63,
    max_new_tokens: int = 128,
    temperature: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    context: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
) -> Request:
    """A batch with `Options`, checked against the models.

    Raises:
        TfmError: a prompt or an option does not fit.
    """
    require(len(prompts) > 0, "there is no prompt; give at least one.")
    for prompt in prompts:
        check_token_ids(prompt, models.target.vocab_size)
    chosen = _find_method(models, method)
    require(1 <= budget <= MAX_BUDGET, f"budget is {budget}; choose 1 to {MAX_BUDGET} tree nodes.")
    require(max_new_tokens >= 1, f"max_new_tokens is {max_new_tokens}; ask for at least 1.")
    temperatures = _one_each("temperature", temperature, len(prompts))
    for value in temperatures:
        fine = value >= 0 and math.isfinite(value)
        require(fine, f"temperature is {value}; choose 0 (greedy) or a positive number.")
    seeds = _one_each("seed", seed, len(prompts))
    for number in seeds:
        require(0 <= number <= _LARGEST_SEED, f"seed is {number}; choose 0 to {_LARGEST_SEED}.")
    plan = DecodePlan(models, chosen, _useful_budget(models, chosen, budget), sample=any(temperatures))
    needed = max(map(len, prompts)) + max_new_tokens
    return Request(
        prompts=[list(prompt) for prompt in prompts],
        plan=plan,
        limit=max_new_tokens,
        temperatures=temperatures,
        seeds=seeds,
        capacity=_context(models, needed, context) + round_up(plan.depth + 1, _SPARE_BUCKET),
        stop_ids=_stop_ids(config, models, stop_token_ids, ignore_eos=ignore_eos),
    )


def _useful_budget(models: Models, method: Method, budget: int) -> int:
    """The part of a budget that changes the program: a chain is at most a block long, `ar` drafts nothing."""
    if method == "ar" or models.drafter is None:
        return 1
    return min(budget, models.drafter.depth) if method == "chain" else budget


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
