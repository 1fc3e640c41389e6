"""Times one round at several budgets: the table from which the budget "auto" chooses."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.budget import Costs, start_ledger
from tfm_jax.config import METHODS
from tfm_jax.engine import Engine
from tfm_jax.errors import require
from tfm_jax.runtime import device_name


def measure_costs(
    engine: Engine,
    *,
    method: str = "tfm",
    budgets: Sequence[int] = (7, 15, 31, 63),
    context: int = 512,
    rounds: int = 20,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Costs:
    """Median seconds of a round of one prompt that drafts the largest tree and verifies so many of its nodes.

    This is what the budget "auto" does, whatever it chooses; a fixed small budget drafts a smaller tree and is faster.
    The tokens do not matter, only how many there are: the prompt is made up.

    Args:
        engine: with a drafter.
        method: "tfm" or "ddtree".
        budgets: most nodes of a tree, the root not counted.
        context: committed tokens when the rounds begin.
        rounds: timed ones; two more run before them.
        progress: called after every budget with the budgets done and their number.

    Raises:
        TfmError: an option does not fit the model.
    """
    require(method in {"tfm", "ddtree"}, f"method {method!r} has no budgets to choose from; calibrate tfm or ddtree.")
    require(len(set(budgets)) > 1, f"budgets are {tuple(budgets)}; give at least two different ones.")
    require(context >= 1 and rounds >= 1, f"context is {context} and rounds {rounds}; give at least 1 of each.")
    ordered, seconds = sorted(set(budgets)), []
    prompt = (np.arange(context) % engine.models.target.vocab_size).tolist()
    most = (rounds + 2) * ((engine.models.drafter.depth if engine.models.drafter else 0) + 1)
    for number, budget in enumerate(ordered, 1):
        state = engine.prefill([prompt], method=method, budget=ordered[-1], max_new_tokens=most, ignore_eos=True)
        plan = dataclasses.replace(state.plan, tree=dataclasses.replace(state.plan.tree, budgets=(budget,)))
        state = dataclasses.replace(state, plan=plan, ledger=start_ledger(jnp.ones(1)))  # one budget to choose from
        times = []
        for _ in range(rounds + 2):
            start = time.perf_counter()
            state, _ = engine.round(state)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - start)
        seconds.append(float(np.median(times[2:])))
        progress(number, len(ordered))
    return Costs(
        tuple(ordered), tuple(seconds), METHODS[METHODS.index(method)], device_name(), engine.dtype.name, context
    )
