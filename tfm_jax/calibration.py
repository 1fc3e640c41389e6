"""Times rounds of several kinds: the table from which the budget "auto" chooses."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.budget import Costs
from tfm_jax.config import METHODS
from tfm_jax.decode import run_rounds, start_transcript
from tfm_jax.engine import Engine
from tfm_jax.errors import require
from tfm_jax.growth import growth_stops, pruned_schedule
from tfm_jax.request import Options
from tfm_jax.runtime import device_name
from tfm_jax.state import DecodeState, Ledger

_ROUNDS_PER_CALL = 17  # many rounds run without the host, as in `Engine.generate`
_DEAR = 1e6  # tokens' worth of a choice that is not to be made; far above what a round can emit


def measure_costs(
    engine: Engine,
    *,
    method: str = "tfm",
    budgets: Sequence[int] = (7, 15, 31, 63),
    context: int = 512,
    rounds: int = 80,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Costs:
    """Seconds of a round of one prompt: medians of calls of 17 rounds less those of one.

    The kinds of rounds take turns, so that a change of the machine's speed meets them all. For the budget "auto" they
    are those of its own program, held to one choice: each budget with all steps of the Weaver, and the smallest with as
    few as can be. The tokens do not matter, only how many there are: the prompt is made up.

    Args:
        engine: with a drafter.
        method: "tfm" or "ddtree".
        budgets: most nodes of a tree, the root not counted.
        context: committed tokens when the rounds begin.
        rounds: timed ones of each kind, rounded up to whole calls; another call runs before them.
        progress: called after every turn with the turns done and their number.

    Raises:
        TfmError: an option does not fit the model.
    """
    require(method in {"tfm", "ddtree"}, f"method {method!r} has no budgets to choose from; calibrate tfm or ddtree.")
    require(len(set(budgets)) > 1, f"budgets are {tuple(budgets)}; give at least two different ones.")
    require(context >= 1 and rounds >= 1, f"context is {context} and rounds {rounds}; give at least 1 of each.")
    known, device = METHODS[METHODS.index(method)], device_name()
    ordered = tuple(sorted(set(budgets)))
    rising = tuple(float(rank) for rank in range(1, 1 + len(ordered)))  # so that all are choices
    every = Costs(ordered, rising, 0.0, rising, known, device, engine.dtype.name, context)
    prompt = (np.arange(context) % engine.models.target.vocab_size).tolist()
    most = 1 + _ROUNDS_PER_CALL * ((engine.models.drafter.depth if engine.models.drafter else 0) + 1)
    stops = growth_stops(pruned_schedule(ordered[-1]).steps)
    spared = stops[-1] - stops[0] if known == "tfm" else 0

    def begin(budget: int | Literal["auto"], costs: Costs) -> DecodeState:
        options = Options(method=known, budget=budget, costs=costs, max_new_tokens=most, ignore_eos=True)
        return engine.prefill([prompt], **options)

    def chosen(costs: Costs) -> list[DecodeState]:
        """A state for every choice, and one for the smallest with the fewest steps."""
        count = len(costs.choices)
        held = [_hold(count, choice) for choice in range(count)] + ([_hold(count, 0, spared)] if spared else [])
        auto = begin("auto", costs)
        return [dataclasses.replace(auto, ledger=ledger) for ledger in held]

    def enter(costs: Costs, seconds: list[float]) -> Costs:
        """The costs with what rounds of `chosen` took."""
        known = dict(zip(costs.budgets, costs.seconds, strict=True)) | dict(zip(costs.choices, seconds, strict=False))
        step = max(seconds[0] - seconds[-1], 0.0) / spared if spared else 0.0
        return dataclasses.replace(costs, seconds=tuple(known.values()), step_seconds=step)

    calls = -(-rounds // (_ROUNDS_PER_CALL - 1))
    states = [*(begin(budget, every) for budget in ordered), *chosen(every)]
    seconds = _time_rounds(engine, states, most, calls, progress)
    fixed = tuple(seconds[: len(ordered)])
    costs = enter(dataclasses.replace(every, fixed_seconds=fixed), seconds[len(ordered) :])
    if costs.choices != ordered:  # where there is less to choose from, a round waits less
        costs = enter(costs, _time_rounds(engine, chosen(costs), most, calls, progress))
    return costs


def _hold(budgets: int, choice: int, left_out: int = 0) -> Ledger:
    """A ledger by which every round chooses the same budget, and all steps unless so many are left out.

    Its rate is the tokens so far, because its seconds stay what they are.
    """
    step = 1e3 if left_out else -1.0
    costs = np.where(np.arange(budgets) == choice, left_out * step, _DEAR).astype(np.float32)
    nothing = (jnp.zeros((), jnp.float32) for _ in range(3))
    return Ledger(jnp.asarray(costs), jnp.float32(step), next(nothing), jnp.float32(1 - costs[0]), *nothing)


def _time_rounds(
    engine: Engine, states: Sequence[DecodeState], limit: int, calls: int, progress: Callable[[int, int], None]
) -> list[float]:
    """Median seconds of a round from each state; what a call takes beside its rounds is left out."""
    run = jax.jit(run_rounds, donate_argnames=("state", "transcript"))

    def time_call(state: DecodeState, rounds: int) -> float:
        fresh = jax.tree.map(jnp.copy, state)
        arguments = jax.block_until_ready((fresh, start_transcript(fresh, limit), jnp.int32(rounds)))
        start = time.perf_counter()
        jax.block_until_ready(run(engine.params, *arguments))
        return time.perf_counter() - start

    times = np.empty((calls + 1, 2, len(states)))
    for turn in range(calls + 1):
        for kind, state in enumerate(states):
            times[turn, :, kind] = time_call(state, _ROUNDS_PER_CALL), time_call(state, 1)
        progress(turn + 1, calls + 1)
    many, one = np.median(times[1:], axis=0)
    return ((many - one) / (_ROUNDS_PER_CALL - 1)).tolist()
