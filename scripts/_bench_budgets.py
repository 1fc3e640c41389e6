"""`bench.py budgets`: the budget chosen round by round against every fixed one, on recorded texts.

The records are those of `bench.py trees --record`: what a round at any place of a text would emit, with a tree grown
for any number of steps and verified to any budget, and with a fixed budget's own tree. So every way to choose walks
through a text by rounds of its own, as the engine would. The rule is the engine's (`tfm_jax.budget`), one prompt at a
time; it sees scores and the past, never the text to come.

A choice is judged by tokens per modelled second: all tokens by the sum of what the table of costs says of the rounds.
Gains are ratios to the fixed budget that is best for the set in hindsight, which drafts its own tree and pays for that
one only; intervals by bootstrap over prompts.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _bench_report import show_budgets
from _draft_simulation import Chart
from jaxtyping import Bool, Float, Int

from tfm_jax.budget import Costs, choose_budget, choose_steps, read_costs, round_seconds, start_ledger
from tfm_jax.errors import TfmError, require
from tfm_jax.state import Ledger

_RESAMPLES = 10_000
_MIXED = "mixed"


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Compare budgets chosen round by round with fixed ones.

    Attributes:
        records: files of `bench.py trees --record`; all their prompts together are the set `mixed`.
        costs: table of `tfm calibrate`.
        output: JSON file to write.
        smallest_set: sets of fewer prompts are taken together, and left out if that does not help.
        seed: of the bootstrap.
    """

    records: tuple[Path, ...]
    costs: Path
    output: Path | None = None
    smallest_set: int = 32
    seed: int = 0

    def measure(self) -> dict[str, Any]:
        """The report: `meta` and `rows`.

        Raises:
            TfmError: a file is missing or is not what it should be.
        """
        require(len(self.records) > 0, "there are no rounds; name files of bench.py trees --record.")
        costs = read_costs(self.costs)
        outcomes, members, start = [], {}, 0
        for path in self.records:
            record = read_record(path, costs)
            outcomes.append(judge(record.chart, costs))
            for name, prompts in large_sets(record.sets, self.smallest_set).items():
                members[f"{path.stem}, {name}"] = start + prompts
            start += len(record.chart.lengths)
        whole = Outcome(*(np.concatenate(part) for part in zip(*outcomes, strict=True)))
        members[_MIXED] = np.arange(start)
        rows = [make_row(name, whole, prompts, costs, self.seed) for name, prompts in members.items()]
        return {"meta": {"costs": dataclasses.asdict(costs)}, "rows": rows}

    def show(self, report: dict[str, Any]) -> None:
        """Prints the report as a table."""
        show_budgets(report)

    def plot(self, _: dict[str, Any], __: Path) -> None:
        """The table says it all."""

    def failure(self, _: dict[str, Any]) -> None:
        """Nothing here can fail a check."""


class Record(NamedTuple):
    """A recorded chart and the prompts of each set."""

    chart: Chart
    sets: dict[str, Int[np.ndarray, " prompts"]]


class Outcome(NamedTuple):
    """Tokens, modelled seconds, rounds and steps of every prompt: column b under the b-th budget, the last by choice.

    Steps are the Weaver's of chosen rounds.
    """

    tokens: Float[np.ndarray, "prompts choices"]
    seconds: Float[np.ndarray, "prompts choices"]
    rounds: Int[np.ndarray, "prompts choices"]
    steps: Int[np.ndarray, " prompts"]


def read_record(path: Path, costs: Costs) -> Record:
    """Reads a chart.

    Raises:
        TfmError: the file is missing, is no record, or holds other budgets than the table.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
        chart = Chart(**{field.name: arrays[field.name] for field in dataclasses.fields(Chart)})
        budgets = tuple(arrays["budgets"].tolist())
    except (OSError, ValueError, KeyError) as error:
        message = f"{path} holds no rounds ({error}); make it with bench.py trees --record."
        raise TfmError(message) from error
    require(budgets == costs.budgets, f"{path} has rounds for the budgets {budgets} and the costs {costs.budgets}.")
    sets = {name.removeprefix("set_"): array for name, array in arrays.items() if name.startswith("set_")}
    return Record(chart, sets)


def large_sets(sets: dict[str, Int[np.ndarray, " prompts"]], smallest: int) -> dict[str, Int[np.ndarray, " prompts"]]:
    """Sets of enough prompts; all that are too small make one."""
    large = {name: prompts for name, prompts in sets.items() if len(prompts) >= smallest}
    small = {name: prompts for name, prompts in sets.items() if name not in large}
    joint = np.concatenate([np.zeros(0, int), *small.values()])
    return large | ({" + ".join(small): joint} if len(joint) >= smallest else {})


def judge(chart: Chart, costs: Costs) -> Outcome:
    """All prompts under every budget, and with steps and budget chosen by round."""
    columns = [_walk_fixed(chart, index, seconds) for index, seconds in enumerate(costs.fixed_seconds)]
    walk = walk_chosen(chart, costs)
    seconds, rounds, steps = (
        np.sum([getattr(step, name) * step.live for step in walk], axis=0) for name in ("seconds", "live", "steps")
    )
    tokens = np.broadcast_to(chart.lengths[:, None] - 1.0, (len(chart.lengths), len(columns) + 1))
    fixed_seconds, fixed_rounds = zip(*columns, strict=True)
    return Outcome(tokens, np.stack([*fixed_seconds, seconds], 1), np.stack([*fixed_rounds, rounds], 1), steps)


def _walk_fixed(chart: Chart, index: int, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and rounds of every prompt with one fixed budget."""
    rows, last = np.arange(len(chart.lengths)), chart.lengths - 1
    place, rounds = np.zeros_like(last), np.zeros_like(last)
    while np.any(live := place < last):
        emitted = chart.fixed[rows, np.minimum(place, last), index].astype(place.dtype)
        place, rounds = np.where(live, np.minimum(place + emitted, last), place), rounds + live
    return rounds * seconds, rounds


class ChosenRound(NamedTuple):
    """The next round of every prompt; what it says of those that have none is without meaning, but for 0 tokens."""

    live: Bool[np.ndarray, " prompts"]
    steps: Int[np.ndarray, " prompts"]
    choice: Int[np.ndarray, " prompts"]
    emitted: Int[np.ndarray, " prompts"]
    seconds: Float[np.ndarray, " prompts"]


def walk_chosen(chart: Chart, costs: Costs) -> list[ChosenRound]:
    """All rounds with steps and budget by choice; the arithmetic is the engine's."""
    rows, last = np.arange(len(chart.lengths)), chart.lengths - 1
    place, walk = np.zeros_like(last), []
    columns = np.array([costs.budgets.index(budget) for budget in costs.choices])
    start = start_ledger(jnp.asarray(costs.choice_seconds, jnp.float32), costs.step_seconds, costs.node_seconds)
    ledger = jax.tree.map(lambda value: np.array(jnp.broadcast_to(value, (len(last), *value.shape))), start)
    choose = jax.jit(jax.vmap(functools.partial(_choose, tuple(chart.steps.tolist()))))
    while np.any(live := place < last):
        at = np.minimum(place, last)
        promised = chart.promised[rows, at][..., columns]
        stop, choice, seconds = map(np.asarray, choose(ledger, chart.waiting[rows, at], promised, 1 + place[:, None]))
        emitted = chart.emitted[rows, at, stop, columns[choice]].astype(place.dtype)
        emitted = np.where(live, np.minimum(emitted, last - place), 0)
        walk.append(ChosenRound(live, chart.steps[stop], columns[choice], emitted, seconds))
        ledger = ledger._replace(
            seconds=ledger.seconds + seconds * live,
            promised=ledger.promised + promised[rows, stop, choice] * live,
            accepted=ledger.accepted + np.maximum(emitted - 1, 0).astype(np.float32),
        )
        place = place + emitted
    return walk


def _choose(
    steps: tuple[int, ...], ledger: Ledger, waiting: jax.Array, promised: jax.Array, emitted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Index of the stop, index of the choice, and seconds of a round."""
    stop = choose_steps(waiting, steps, emitted, ledger)
    choice = choose_budget(promised[stop], jnp.int32(1), emitted, ledger)
    return stop, choice, round_seconds(choice, steps[-1] - jnp.asarray(steps)[stop], ledger)


def make_row(
    name: str, outcome: Outcome, members: Int[np.ndarray, " prompts"], costs: Costs, seed: int
) -> dict[str, Any]:
    """Tokens per second of every choice on one set, and the gain over the best fixed budget."""
    tokens, seconds, rounds = outcome.tokens[members], outcome.seconds[members], outcome.rounds[members]
    rates = tokens.sum(axis=0) / seconds.sum(axis=0)
    best = int(np.argmax(rates[:-1]))
    drawn = np.random.default_rng(seed).integers(len(members), size=(_RESAMPLES, len(members)))
    resampled = tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1)
    gains = resampled[:, -1] / resampled[:, best] - 1
    per_round = tokens.sum(axis=0) / rounds.sum(axis=0)
    return {
        "set": name,
        "prompts": len(members),
        "fixed": {str(budget): rate for budget, rate in zip(costs.budgets, rates[:-1].tolist(), strict=True)},
        "best_fixed": costs.budgets[best],
        "chosen": float(rates[-1]),
        "gain": float(rates[-1] / rates[best] - 1),
        "ci95": np.percentile(gains, (2.5, 97.5)).tolist(),
        "tokens_per_round": {"best_fixed": float(per_round[best]), "chosen": float(per_round[-1])},
        "steps_per_round": float(outcome.steps[members].sum() / rounds[:, -1].sum()),
    }
