"""`bench.py budgets`: the budget chosen round by round against every fixed one, on recorded rounds.

The rounds are those of `bench.py trees --record`, whose trees have as many nodes as the largest budget and hold them
best first: a round with a smaller budget would have accepted the part of its path within the first so many slots. A
choice is judged by tokens per modelled second: all tokens by the sum of what the table of costs says of the rounds.
The rule is the engine's own (`tfm_jax.budget`), one prompt at a time; it sees scores and the past, never the path.

Gains are ratios to the fixed budget that is best for the set in hindsight, with bootstrap intervals over prompts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _bench_report import show_budgets
from jaxtyping import Float, Int

from tfm_jax.budget import Costs, choose_budget, promised_tokens, read_costs
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
        smallest_set: sets of fewer prompts count in `mixed` only.
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
            outcomes.append(judge(record, costs))
            for name, prompts in record.sets.items():
                members[f"{path.stem}, {name}"] = start + prompts
            start += len(outcomes[-1].tokens)
        whole = Outcome(*(np.concatenate(part) for part in zip(*outcomes, strict=True)))
        members = {name: prompts for name, prompts in members.items() if len(prompts) >= self.smallest_set}
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
    """Recorded rounds in the order of the text; columns as in `_draft_simulation.Rounds`."""

    prompt: Int[np.ndarray, " rounds"]
    path: Int[np.ndarray, "rounds steps"]
    scores: Float[np.ndarray, "rounds nodes"]
    remaining: Int[np.ndarray, " rounds"]
    sets: dict[str, Int[np.ndarray, " prompts"]]


class Outcome(NamedTuple):
    """Tokens and modelled seconds of every prompt: column b under the b-th budget, the last column by choice."""

    tokens: Float[np.ndarray, "prompts choices"]
    seconds: Float[np.ndarray, "prompts choices"]


def read_record(path: Path, costs: Costs) -> Record:
    """Reads rounds.

    Raises:
        TfmError: the file is missing, is no record, or its trees are smaller than the largest budget.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
        prompt, path_slots, scores, remaining = (arrays[name] for name in ("prompt", "path", "scores", "remaining"))
    except (OSError, ValueError, KeyError) as error:
        message = f"{path} holds no rounds ({error}); make it with bench.py trees --record."
        raise TfmError(message) from error
    nodes = scores.shape[1] - 1
    require(nodes >= costs.budgets[-1], f"{path} has trees of {nodes} nodes and the costs go to {costs.budgets[-1]}.")
    sets = {name.removeprefix("set_"): array for name, array in arrays.items() if name.startswith("set_")}
    return Record(prompt, path_slots, scores, remaining, sets)


def judge(record: Record, costs: Costs) -> Outcome:
    """All prompts under every budget, and with the budget chosen by round."""
    budgets, seconds = np.array(costs.budgets), np.array(costs.seconds)
    accepted = ((record.path >= 0)[:, None] & (record.path[:, None] <= budgets[:, None])).sum(axis=2)
    committed = np.minimum(accepted, record.remaining[:, None])
    promised = np.asarray(promised_tokens(jnp.asarray(record.scores), costs.budgets))
    prompts = int(record.prompt.max()) + 1
    order = np.argsort(record.prompt, kind="stable")
    starts = np.searchsorted(record.prompt[order], np.arange(prompts + 1))
    tokens, zero = (
        np.ones(prompts, np.int32),
        np.zeros(prompts, np.float32),
    )  # the prompt's own token counts for the rate
    spent, promises, hits = zero, zero.copy(), zero.copy()
    table = jnp.asarray(seconds, jnp.float32)
    choose = jax.jit(jax.vmap(lambda *past: choose_budget(past[0], jnp.int32(1), past[1], Ledger(table, *past[2:]))))
    for step in range(int(np.diff(starts).max())):
        live = np.flatnonzero(starts[:-1] + step < starts[1:])
        rounds = order[starts[live] + step]
        past = (promised[rounds], tokens[live], spent[live], promises[live], hits[live])
        choice = np.asarray(choose(*map(jnp.asarray, past)))
        tokens[live] += committed[rounds, choice]
        spent[live] += seconds[choice]
        promises[live] += promised[rounds, choice]
        hits[live] += committed[rounds, choice] - 1
    count = np.diff(starts)[:, None]
    fixed = np.stack([np.bincount(record.prompt, column, prompts) for column in committed.T], axis=1)
    return Outcome(np.column_stack([fixed, tokens - 1]), np.column_stack([count * seconds, spent]))


def make_row(
    name: str, outcome: Outcome, members: Int[np.ndarray, " prompts"], costs: Costs, seed: int
) -> dict[str, Any]:
    """Tokens per second of every choice on one set, and the gain over the best fixed budget."""
    tokens, seconds = outcome.tokens[members], outcome.seconds[members]
    rates = tokens.sum(axis=0) / seconds.sum(axis=0)
    best = int(np.argmax(rates[:-1]))
    drawn = np.random.default_rng(seed).integers(len(members), size=(_RESAMPLES, len(members)))
    resampled = tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1)
    gains = resampled[:, -1] / resampled[:, best] - 1
    return {
        "set": name,
        "prompts": len(members),
        "fixed": {str(budget): rate for budget, rate in zip(costs.budgets, rates[:-1].tolist(), strict=True)},
        "best_fixed": costs.budgets[best],
        "chosen": float(rates[-1]),
        "gain": float(rates[-1] / rates[best] - 1),
        "ci95": np.percentile(gains, (2.5, 97.5)).tolist(),
    }
