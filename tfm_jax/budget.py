"""How many nodes of a tree to verify: as many as are worth their time.

A tree's scores say how likely the target is to follow each node, so that the sum of e^score over the first b nodes,
plus one for the bonus, is the number of tokens that a round with b of them should emit. Verifying more takes longer.
Over a whole text the fastest choice is the one that maximises, in every round,

    expected tokens(b) − rate · seconds(b)

where the rate is the tokens per second that one achieves in the end (Dinkelbach 1967, Management Science 13:492, on
ratios of sums); the rate so far stands in for it. Scores may be too low or too high on the whole, at temperature 0 for
one; so what they promise is scaled by what past promises were worth. Nothing here looks at the target's draws of the
round to come. With the rule `target_only` nothing could go wrong if it did: the text does not depend on the tree.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfm_jax.config import Method
from tfm_jax.errors import TfmError, require
from tfm_jax.state import Ledger

COSTS_FILE = "costs.json"
_FORMAT = 1
_PRIOR = 10.0  # tokens: how long scores are taken at their word


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of one round by the most nodes that it verifies of the largest tree, as `tfm calibrate` measured them.

    Attributes:
        budgets: ascending; the root is not counted.
        seconds: of a round with each of them, drafting of the largest tree included.
        method: "tfm" or "ddtree".
        device: that they hold for.
        dtype: compute dtype.
        context: committed tokens during the measurement.
    """

    budgets: tuple[int, ...]
    seconds: tuple[float, ...]
    method: Method
    device: str
    dtype: str
    context: int

    def __post_init__(self) -> None:
        fits = len(self.budgets) == len(self.seconds) > 0 and list(self.budgets) == sorted(set(self.budgets))
        if not fits or min(self.budgets) < 1 or min(self.seconds) <= 0:
            message = f"costs need ascending budgets, each with its seconds: {self.budgets}, {self.seconds}."
            raise TfmError(message)


def write_costs(path: Path, costs: Costs) -> None:
    """Writes a table.

    Raises:
        TfmError: the file cannot be written.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.write_text(json.dumps({"format": _FORMAT} | dataclasses.asdict(costs), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
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
        budgets, seconds = tuple(map(int, values["budgets"])), tuple(map(float, values["seconds"]))
        names = [values[name] for name in ("method", "device", "dtype")]
        return Costs(budgets, seconds, *names, context=int(values["context"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is no cost table ({type(error).__name__}: {error}); calibrate again."
        raise TfmError(message) from error


def promised_tokens(scores: Float[Array, "batch nodes"], budgets: tuple[int, ...]) -> Float[Array, "batch budgets"]:
    """Drafted tokens that a round should emit with the first so many nodes of its tree, by the scores alone."""
    hits = jnp.cumsum(jnp.exp(scores[:, 1:]), axis=1)
    return jnp.stack([hits[:, budget - 1] for budget in budgets], axis=1)


def choose_budget(
    promised: Float[Array, " budgets"], rows: Int[Array, ""], emitted: Int[Array, ""], ledger: Ledger
) -> Int[Array, ""]:
    """Index of the budget for a round, the smaller one of equals.

    Args:
        promised: `promised_tokens`, summed over the rows that still want tokens.
        rows: how many these are.
        emitted: tokens that all rows have so far; those that the prompts gave count as a round of the cheapest kind.
        ledger: costs and past rounds.
    """
    trust = (ledger.accepted + _PRIOR) / (ledger.promised + _PRIOR)
    rate = emitted / (ledger.seconds + ledger.costs[0])
    return jnp.argmax(rows + trust * promised - rate * ledger.costs).astype(jnp.int32)


def start_ledger(costs: Float[Array, " budgets"]) -> Ledger:
    """Nothing spent, promised or accepted yet."""
    return Ledger(costs, *(jnp.zeros((), jnp.float32) for _ in range(3)))  # buffers of their own: the state is donated
