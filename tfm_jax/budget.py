"""How far to grow a tree and how many of its nodes to verify: as far and as many as are worth their time.

A tree's scores say how likely the target is to follow each node, so that the sum of e^score over the first b nodes,
plus one for the bonus, is the number of tokens that a round with b of them should emit. Verifying more takes longer.
Over a whole text the fastest choice is the one that maximises, in every round,

    expected tokens(b) − rate · seconds(b)

where the rate is the tokens per second that one achieves in the end (Dinkelbach 1967, Management Science 13:492, on
ratios of sums); the rate so far stands in for it. Growth is judged in the same way before the tree is there, once the
first steps are made: the nodes that the next step of the Weaver would expand are on the target's path with the
probability that their scores say, a step emits at most one token beyond each, and the nodes of every later step are
likely by a third less. So the steps to come, as many as there may be, bring a multiple of what the next one promises.

Scores may be too low or too high on the whole, at temperature 0 for one; so what they promise is scaled by what past
promises were worth. Nothing here looks at the target's draws of the round to come. With the rule `target_only` nothing
could go wrong if it did: the text does not depend on the tree.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import UnionType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tfm_jax.config import Method
from tfm_jax.errors import TfmError, require
from tfm_jax.files import write_whole
from tfm_jax.growth import pruned_schedule
from tfm_jax.state import Ledger

COSTS_FILE = "costs.json"
_FORMAT = 3
_MOST = 1e9  # seconds, nodes or tokens that a table may hold
_PRIOR = 10.0  # tokens: how long scores are taken at their word
_EXPECTED = 3.0  # tokens of a round before there was one
_CAUGHT = 0.5  # tokens that a step brings for each that its nodes promise
_LASTING = 0.65  # what the nodes of the step after it promise for each that they do
_MORE_NODES = 2  # that are worth verifying for each step that is worth making
_FASTER = 1.05  # times at which a smaller budget is worth a choice, which costs an H200 some 5 % of a round


@dataclasses.dataclass(frozen=True)
class Costs:
    """What rounds take on a device, as `tfm calibrate` measured them.

    Attributes:
        budgets: ascending; the root is not counted.
        seconds: of a round that drafts the largest tree, with all of its steps, and verifies so many of its nodes,
            which it chose among all `choices`.
        step_seconds: that such a round takes less for every step of the Weaver that it leaves out; 0 for "ddtree".
        fixed_seconds: of a round that drafts and verifies a tree of just so many nodes.
        method: "tfm" or "ddtree".
        device: that they hold for.
        dtype: compute dtype.
        context: committed tokens during the measurement.
    """

    budgets: tuple[int, ...]
    seconds: tuple[float, ...]
    step_seconds: float
    fixed_seconds: tuple[float, ...]
    method: Method
    device: str
    dtype: str
    context: int

    def __post_init__(self) -> None:
        rising = list(self.budgets) == sorted(set(self.budgets))
        fits = len(self.budgets) == len(self.seconds) == len(self.fixed_seconds) > 0 and rising
        if not fits or min(self.budgets) < 1 or min(*self.seconds, *self.fixed_seconds) <= 0:
            found = f"{self.budgets}, {self.seconds}, {self.fixed_seconds}"
            message = f"costs need ascending budgets, each with its seconds: {found}."
            raise TfmError(message)
        if not 0 <= self.step_seconds * (pruned_schedule(self.budgets[-1]).steps - 1) < min(self.seconds):
            message = (
                f"costs need the seconds of a step, at least 0 and all together below a round's: {self.step_seconds}."
            )
            raise TfmError(message)

    @property
    def choices(self) -> tuple[int, ...]:
        """The budgets that a round chooses from: the largest, and the smaller ones that are faster than the next."""
        kept, least = [], float("inf")
        for budget, seconds in zip(reversed(self.budgets), reversed(self.seconds), strict=True):
            if seconds * _FASTER <= least:
                kept, least = [budget, *kept], seconds
        return tuple(kept)

    @property
    def choice_seconds(self) -> tuple[float, ...]:
        """`seconds` of the choices."""
        known = dict(zip(self.budgets, self.seconds, strict=True))
        return tuple(known[budget] for budget in self.choices)

    @property
    def node_seconds(self) -> float:
        """What a round takes more for a node that is verified, on average over all budgets."""
        rise = self.seconds[-1] - self.seconds[0]
        return max(rise, 0.0) / max(self.budgets[-1] - self.budgets[0], 1)


def write_costs(path: Path, costs: Costs) -> None:
    """Writes a table.

    Raises:
        TfmError: the file cannot be written.
    """
    try:
        write_whole(path, [json.dumps({"format": _FORMAT} | dataclasses.asdict(costs), indent=2), "\n"])
    except OSError as error:
        message = f"{path} cannot be written ({error}); name another file with --output."
        raise TfmError(message) from error


def read_costs(path: Path) -> Costs:
    """Reads a table.

    Raises:
        TfmError: there is none, or it is not one.
    """
    if not path.is_file():
        message = f"no cost table at {path}; make one with `tfm calibrate`, or give a budget."
        raise TfmError(message)
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        require(values["format"] == _FORMAT, f"{path} has another format than {_FORMAT}; calibrate again.")
        budgets, context = _numbers(values["budgets"], int), _numbers([values["context"]], int)
        seconds, fixed = (tuple(map(float, _numbers(values[name]))) for name in ("seconds", "fixed_seconds"))
        step = _numbers([values["step_seconds"]])
        names = [values[name] for name in ("method", "device", "dtype")]
        return Costs(budgets, seconds, float(*step), fixed, *names, *context)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{path} is no cost table ({type(error).__name__}: {error}); calibrate again."
        raise TfmError(message) from error


def _numbers(values: Any, kind: type | UnionType = int | float) -> tuple[Any, ...]:  # noqa: ANN401 - what JSON holds
    """The numbers of a list.

    Raises:
        ValueError: it is no list, or holds something else, or more than a table may.
    """
    if not isinstance(values, list) or not all(isinstance(x, kind) and abs(x) <= _MOST for x in values):
        message = f"{values!r:.60} instead of numbers"
        raise ValueError(message)
    return tuple(values)


def promised_tokens(scores: Float[Array, "batch nodes"], budgets: tuple[int, ...]) -> Float[Array, "batch budgets"]:
    """Drafted tokens that a round should emit with the first so many nodes of its tree, by the scores alone."""
    hits = jnp.cumsum(jnp.exp(scores[:, 1:]), axis=1)
    return jnp.stack([hits[:, budget - 1] for budget in budgets], axis=1)


def choose_steps(
    hits: Float[Array, ""], stops: tuple[int, ...], emitted: Int[Array, " batch"], ledger: Ledger
) -> Int[Array, ""]:
    """Index of the number of steps that the Weaver should make in all, the smaller one of equals.

    Args:
        hits: nodes that the step after the first of `stops` would expand and that are on the target's path, as far as
            scores say: the sum of their e^score, over the rows that still want tokens.
        stops: numbers of steps to choose from, ascending; the first of them are made.
        emitted: as in `choose_budget`.
        ledger: costs and past rounds.
    """
    more = np.array(stops) - stops[0]
    gains = _CAUGHT * (1 - _LASTING**more) / (1 - _LASTING)
    seconds = more * (ledger.step_seconds + _MORE_NODES * ledger.node_seconds)
    return jnp.argmax(_trust(ledger) * hits * gains - _rate(emitted, ledger) * seconds).astype(jnp.int32)


def choose_budget(
    promised: Float[Array, " budgets"], rows: Int[Array, ""], emitted: Int[Array, " batch"], ledger: Ledger
) -> Int[Array, ""]:
    """Index of the budget for a round, the smaller one of equals.

    Args:
        promised: `promised_tokens`, summed over the rows that still want tokens.
        rows: how many these are.
        emitted: tokens that each row has so far, the one from its prompt among them.
        ledger: costs and past rounds.
    """
    return jnp.argmax(rows + _trust(ledger) * promised - _rate(emitted, ledger) * ledger.costs).astype(jnp.int32)


def round_seconds(choice: Int[Array, ""], left_out: Int[Array, ""] | int, ledger: Ledger) -> Float[Array, ""]:
    """What a round takes with a budget, and with so many steps left out."""
    return ledger.costs[choice] - left_out * ledger.step_seconds


def start_ledger(costs: Float[Array, " budgets"], step_seconds: float = 0.0, node_seconds: float = 0.0) -> Ledger:
    """Nothing spent, promised or accepted yet."""
    nothing = (jnp.zeros((), jnp.float32) for _ in range(3))  # buffers of their own: the state is donated
    return Ledger(costs, jnp.float32(step_seconds), jnp.float32(node_seconds), *nothing)


def _trust(ledger: Ledger) -> Float[Array, ""]:
    """What past promises were worth."""
    return (ledger.accepted + _PRIOR) / (ledger.promised + _PRIOR)


def _rate(emitted: Int[Array, " batch"], ledger: Ledger) -> Float[Array, ""]:
    """Tokens per second so far; the prompts count as a round of the cheapest kind with `_EXPECTED` tokens a row."""
    return jnp.sum(emitted - 1 + _EXPECTED) / (ledger.seconds + ledger.costs[0])
