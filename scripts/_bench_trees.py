"""`bench.py trees`: tokens a round against the Weaver's dependent steps and the nodes that it expands.

Texts come from `ar`; whatever drafts them, they are the same, so every schedule is judged on them without the target
(`_draft_simulation.py`). Figures are means over a prompt's rounds, then over prompts, with bootstrap intervals over
prompts; differences pair the prompts.

A schedule is a width (nodes expanded together), steps (dependent calls of the Weaver before pruning; 0 prunes nothing
and takes ⌈budget / width⌉), how many guesses follow each node, and whether the tree keeps its spine.

With --record, what a round at any place would do is kept as well, for `bench.py budgets`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from _bench_acceptance import Groups, bootstrap_interval, decode_prompts, group_prompts
from _bench_prompts import encode_prompts, list_files, read_texts
from _bench_report import plot_pareto, show_trees
from _draft_simulation import Chart, Drafts, Positions, Rounds, chart_rounds, read_positions, simulate

from tfm_jax.data import save_arrays
from tfm_jax.decode import Params, bind
from tfm_jax.engine import Engine, load, load_demo
from tfm_jax.errors import TfmError
from tfm_jax.tree import DraftTree

_LONGEST_PROMPT = 256


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one tree is grown; `steps` 0 is the reference's schedule, which prunes nothing."""

    width: int
    steps: int
    spine: bool = False
    ahead: int = 0

    def dependent_steps(self, budget: int) -> int:
        """Calls of the Weaver that wait for each other."""
        return self.steps or -(-budget // self.width)

    def expanded(self, budget: int) -> int:
        """Nodes that the Weaver expands at most; with guesses the first step has as many as the others."""
        others = (self.dependent_steps(budget) - 1) * self.width
        return (others + self.width) * (1 + self.ahead) if self.ahead else 1 + others

    @property
    def name(self) -> str:
        """For tables and plots."""
        kind = f"{self.steps} x {self.width}" if self.steps else f"width {self.width}"
        kind += f" + {self.ahead} ahead" if self.ahead else ""
        return f"{kind}, spine" if self.spine else kind


def read_schedule(text: str) -> Schedule:
    """A schedule from WIDTH, STEPSxWIDTH, STEPSxWIDTHaGUESSES, the first two perhaps followed by +spine.

    Raises:
        TfmError: it is neither.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)(\+spine)?", text)
    if match is not None:
        return Schedule(int(match[2]), int(match[1] or 0), match[3] is not None)
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)a([1-9]\d*)", text)
    if match is not None:
        return Schedule(int(match[2]), int(match[1]), ahead=int(match[3]))
    message = (
        f"{text!r} is no schedule; write WIDTH or STEPSxWIDTH, and +spine after it to keep the spine, "
        "or STEPSxWIDTHaGUESSES."
    )
    raise TfmError(message)


@dataclasses.dataclass(frozen=True)
class Trees:
    """Measure ways to grow the Weaver's tree on held-out prompts, without verifying.

    Attributes:
        model: directory that tfm-convert wrote; by default the models that come with the package.
        held_out: as for `acceptance`.
        prompts: as for `acceptance`.
        output: JSON file to write, with plots beside it.
        schedules: WIDTH (the reference's) or STEPSxWIDTH (pruned), each with +spine if it keeps its spine, or
            STEPSxWIDTHaGUESSES; the first is what the others are compared with.
        temperatures: 0 is greedy.
        budgets: most tree nodes, the root not counted.
        max_new_tokens: tokens a prompt; a stop token ends it earlier.
        draft_noise: `shared` drafts with the noise of the target's draws; `none` does not know it.
        batch: prompts at once when the texts are written.
        seed: of the noise (plus the prompt's number) and of the bootstrap.
        record: folder for what rounds would do, a file a temperature: see `_draft_simulation.Chart`.
        record_budgets: that the choice is among there.
        dtype: compute dtype; by default float32 on a CPU and bfloat16 on a GPU.
    """

    model: Path | None = None
    held_out: Path | None = None
    prompts: Path | None = None
    output: Path | None = None
    schedules: tuple[str, ...] = ("4", "1", "2", "8", "16", "16x4", "12x6", "12x8", "8x8", "8x16", "4x16", "4+spine")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    budgets: tuple[int, ...] = (63,)
    max_new_tokens: int = 128
    draft_noise: Literal["shared", "none"] = "shared"
    batch: int = 32
    seed: int = 0
    record: Path | None = None
    record_budgets: tuple[int, ...] = (7, 15, 31, 63)
    dtype: Literal["float32", "bfloat16"] | None = None

    def measure(self) -> dict[str, Any]:
        """The report: `meta` and `rows`.

        Raises:
            TfmError: an option or a file is unusable, or the model has no Weaver.
        """
        schedules = [read_schedule(text) for text in self.schedules]
        files = list_files(self.held_out, self.prompts)
        texts = read_texts(files)
        engine = load_demo(self.dtype) if self.model is None else load(self.model, self.dtype)
        if engine.models.weaver is None:
            message = "this checkpoint has no Weaver, whose trees these are; give one that has."
            raise TfmError(message)
        sets = encode_prompts(texts, engine.tokenizer, engine.config.target.max_positions, self.max_new_tokens)
        prompts = [prompt[:_LONGEST_PROMPT] for prompt in itertools.chain.from_iterable(sets.values())]
        groups = group_prompts(sets)
        rows = []
        for temperature in self.temperatures:
            positions = self._positions(engine, prompts, temperature)
            if self.record is not None:
                budgets = tuple(sorted(set(self.record_budgets)))
                chart = chart_rounds(engine, positions, budgets, depth=_depth(engine))
                save_chart(self.record / f"temperature-{temperature:g}.npz", chart, budgets, groups)
                print(f"record, temperature {temperature:g}: done", file=sys.stderr, flush=True)
            for budget in self.budgets:
                runs = []
                for schedule in schedules:
                    runs.append(simulate(engine, positions, tree_of(engine, schedule, budget), depth=_depth(engine)))
                    print(
                        f"{schedule.name}, temperature {temperature:g}, budget {budget}: done",
                        file=sys.stderr,
                        flush=True,
                    )
                for schedule, run in zip(schedules, runs, strict=True):
                    rows += make_rows(schedule, run, runs[0], groups, temperature, budget, len(prompts), self.seed)
        return {"meta": {"dtype": engine.dtype.name, "draft_noise": self.draft_noise, "seed": self.seed}, "rows": rows}

    def _positions(self, engine: Engine, prompts: list[list[int]], temperature: float) -> Positions:
        """The texts of plain decoding, and what drafts along them depend on."""
        options = {"method": "ar", "temperature": temperature, "max_new_tokens": self.max_new_tokens}
        options["context"] = max(map(len, prompts)) + self.max_new_tokens
        run = decode_prompts(engine, prompts, options, batch=self.batch, seed=self.seed)
        print(f"texts, temperature {temperature:g}: done", file=sys.stderr, flush=True)
        return read_positions(
            engine,
            prompts,
            run.tokens,
            temperature=temperature,
            seeds=[self.seed + number for number in range(len(prompts))],
            pool=min(engine.models.weaver.pool_size if engine.models.weaver else 1, engine.models.target.vocab_size),
            shared_noise=self.draft_noise == "shared",
        )

    def show(self, report: dict[str, Any]) -> None:
        """Prints the report as a table."""
        show_trees(report)

    def plot(self, report: dict[str, Any], output: Path) -> None:
        """Draws acceptance against steps and nodes, beside the JSON."""
        plot_pareto(report["rows"], output.with_name(f"{output.stem}_pareto.png"))

    def failure(self, _: dict[str, Any]) -> None:
        """Nothing here can fail a check."""


def tree_of(engine: Engine, schedule: Schedule, budget: int) -> Callable[[Params, Drafts], DraftTree]:
    """The Weaver's tree under a schedule."""

    def draft(params: Params, inputs: Drafts) -> DraftTree:
        return bind(engine.models, params).weaver.build_tree(
            inputs.root, inputs.feature, inputs.hidden, inputs.ids, inputs.scores, params["tables"],
            budget=budget, width=schedule.width, steps=schedule.steps or None, spine=schedule.spine,
            ahead=schedule.ahead,
        )  # fmt: skip

    return draft


def make_rows(
    schedule: Schedule,
    run: Rounds,
    first: Rounds,
    groups: Groups,
    temperature: float,
    budget: int,
    prompts: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Figures of one schedule on every set; `first` is what it is compared with."""
    lengths, baseline = run.acceptance(prompts), first.acceptance(prompts)
    steps = schedule.dependent_steps(budget)
    rows = []
    for name, members in groups.items():
        known = ~np.isnan(lengths[members])
        own, gains = lengths[members][known], (lengths - baseline)[members][known]
        rows.append(
            {
                "schedule": schedule.name,
                "temperature": temperature,
                "budget": budget,
                "set": name,
                "prompts": len(own),
                "steps": steps,
                "expanded": schedule.expanded(budget),
                "acceptance_length": float(own.mean()),
                "acceptance_length_ci95": bootstrap_interval(own, seed),
                "difference": float(gains.mean()),
                "difference_ci95": bootstrap_interval(gains, seed),
            }
        )
    return rows


def save_chart(path: Path, chart: Chart, budgets: tuple[int, ...], groups: Groups) -> None:
    """Writes a chart, its budgets and the prompts of each set as `.npz`."""
    sets = {f"set_{name}": np.array(numbers) for name, numbers in groups.items()}
    save_arrays(path, dataclasses.asdict(chart) | {"budgets": np.array(budgets)} | sets)


def _depth(engine: Engine) -> int:
    drafter, weaver = engine.models.drafter, engine.models.weaver
    return min(drafter.depth, weaver.max_depth) if drafter and weaver else 0
