"""`bench.py speed`: tokens a second by the clock, with fixed budgets, with chosen ones, and without drafts.

Every prompt alone. All settings run a prompt before the next prompt begins, and all prompts several times over, so that
a change of the machine's speed meets every setting; of a prompt's times the median counts. Tokens after the first, by
the seconds from the first to the last; a rate is all tokens by all seconds. Gains are over the fixed budget that is the
fastest at that temperature; intervals by bootstrap over prompts.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from _bench_prompts import encode_prompts, list_files, read_texts
from _bench_report import show_speed
from jaxtyping import Float, Int

from tfm_jax.budget import COSTS_FILE, read_costs
from tfm_jax.data import hash_files
from tfm_jax.engine import Engine, load, load_demo
from tfm_jax.errors import require

_RESAMPLES = 10_000

type Budget = int | Literal["auto"]


class Clock(NamedTuple):
    """What every prompt gave at a temperature, and its seconds in every pass; the last axis are the settings."""

    tokens: Int[np.ndarray, "prompts settings"]
    rounds: Int[np.ndarray, "prompts settings"]
    seconds: Float[np.ndarray, "passes prompts settings"]


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time whole texts, prompt by prompt, with budgets that take turns.

    Attributes:
        model: directory that tfm-convert wrote; by default the models that come with the package.
        held_out: as for `bench.py acceptance`.
        prompts: as for `bench.py acceptance`.
        output: JSON file to write.
        budgets: 0 is decoding without drafts, auto chooses in every round.
        temperatures: 0 is greedy.
        costs: table of `tfm calibrate` for auto; by default the model's own.
        prompts_per_set: the first of each set.
        passes: times that every prompt runs under every setting.
        max_new_tokens: tokens a prompt; a stop token ends it earlier.
        seed: of the noise (plus the prompt's number) and of the bootstrap.
        dtype: compute dtype; by default float32 on a CPU and bfloat16 on a GPU.
    """

    model: Path | None = None
    held_out: Path | None = None
    prompts: Path | None = None
    output: Path | None = None
    budgets: tuple[Budget, ...] = (0, 7, 15, 31, 63, "auto")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    costs: Path | None = None
    prompts_per_set: int = 8
    passes: int = 3
    max_new_tokens: int = 128
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] | None = None

    def measure(self) -> dict[str, Any]:
        """The report: `meta` and `rows`.

        Raises:
            TfmError: an option or a file is unusable, or the model cannot decode so.
        """
        settings = tuple(dict.fromkeys(self.budgets))
        fixed = [budget for budget in settings if budget not in (0, "auto")]
        wanted = {
            "fixed budgets": len(fixed),
            "temperatures": len(self.temperatures),
            "prompts a set": self.prompts_per_set,
            "passes": self.passes,
        }
        for name, count in wanted.items():
            require(count >= 1, f"there are {count} {name} to time; give at least one.")
        files = list_files(self.held_out, self.prompts)
        texts = {name: members[: self.prompts_per_set] for name, members in read_texts(files).items()}
        engine = load_demo(self.dtype) if self.model is None else load(self.model, self.dtype)
        sets = encode_prompts(texts, engine.tokenizer, engine.config.target.max_positions, self.max_new_tokens)
        prompts = [prompt for members in sets.values() for prompt in members]
        costs = read_costs(self.costs or engine.costs_path or Path(COSTS_FILE)) if "auto" in settings else None
        rows = []
        for temperature in self.temperatures:
            clock = self._time(engine, prompts, settings, {"temperature": temperature, "costs": costs})
            rows += make_rows(clock, settings, temperature, self.seed)
        meta = {
            "model": "demo" if self.model is None else str(self.model),
            "dtype": engine.dtype.name,
            "prompts": {name: len(members) for name, members in sets.items()},
            "sha256": {name: hash_files(path) for name, path in files.items()},
            "costs": dataclasses.asdict(costs) if costs is not None else None,
        }
        return {"meta": meta, "rows": rows}

    def show(self, report: dict[str, Any]) -> None:
        """Prints the report as a table."""
        show_speed(report)

    def plot(self, _: dict[str, Any], __: Path) -> None:
        """The table says it all."""

    def failure(self, _: dict[str, Any]) -> None:
        """Nothing here can fail a check."""

    def _time(
        self, engine: Engine, prompts: list[list[int]], settings: tuple[Budget, ...], options: dict[str, Any]
    ) -> Clock:
        """Compiles everything before anything is timed.

        Raises:
            TfmError: there is nothing to time, or the model cannot decode so.
        """
        context = max(map(len, prompts)) + self.max_new_tokens
        common = options | {"max_new_tokens": self.max_new_tokens, "context": context}

        def write(place: int, number: int) -> tuple[int, int, float]:
            drafts: dict[str, Any] = {"budget": settings[place]} if settings[place] else {"method": "ar"}
            (text,) = engine.generate([prompts[number]], **common | drafts | {"seed": self.seed + number})
            return len(text.token_ids) - 1, len(text.rounds), text.decode_seconds

        name = f"temperature {options['temperature']:g}"
        for place, budget in enumerate(settings):
            print(f"{name}, budget {budget}: compiling", file=sys.stderr, flush=True)
            write(place, 0)
        figures = np.zeros((self.passes, len(prompts), len(settings), 3))
        for turn in range(self.passes):
            print(f"{name}: pass {turn + 1} of {self.passes}", file=sys.stderr, flush=True)
            for number, place in np.ndindex(figures.shape[1:3]):
                figures[turn, number, place] = write(place, number)
        tokens, rounds, seconds = np.moveaxis(figures, 3, 0)
        require(bool(rounds.any()), "no prompt has a second token; give other prompts or more --max-new-tokens.")
        return Clock(tokens[0].astype(int), rounds[0].astype(int), seconds)


def make_rows(clock: Clock, settings: tuple[Budget, ...], temperature: float, seed: int) -> list[dict[str, Any]]:
    """Rates of every setting, and its gain over the fastest fixed budget.

    Prompts whose first token is their last count for nothing.
    """
    tokens, rounds, seconds = clock.tokens, clock.rounds, np.median(clock.seconds, axis=0)
    rates = tokens.sum(axis=0) / seconds.sum(axis=0)
    best = max((place for place, budget in enumerate(settings) if budget not in (0, "auto")), key=rates.__getitem__)
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(_RESAMPLES, len(tokens)))
    resampled = tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1)
    gains = resampled / resampled[:, [best]] - 1
    return [
        {
            "temperature": temperature,
            "budget": budget,
            "prompts": len(tokens),
            "tokens_per_second": float(rates[place]),
            "tokens_per_round": float(tokens[:, place].sum() / rounds[:, place].sum()),
            "ms_per_round": float(seconds[:, place].sum() / rounds[:, place].sum() * 1e3),
            "best_fixed": settings[best],
            "gain": float(rates[place] / rates[best] - 1),
            "ci95": np.percentile(gains[:, place], (2.5, 97.5)).tolist(),
        }
        for place, budget in enumerate(settings)
    ]
