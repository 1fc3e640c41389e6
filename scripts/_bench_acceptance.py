"""`bench.py acceptance`: tokens a round and tokens a second of every method on held-out prompts.

Acceptance length: tokens that a round emits, bonus included (the last round of a text is cut at the length limit),
averaged over the rounds of a prompt, then over the prompts (a macro mean: every prompt counts the same). Intervals are
percentiles of a bootstrap over prompts; differences of two methods pair them prompt by prompt.

Prompt i has the noise seed SEED + i whatever the method, so that in float32 all methods must give the same text, greedy
and sampled; `tokens_equal` is the share of prompts where a method's tokens are those of the first method measured (`ar`
where it is among them). One seed for all would tie prompts of equal length together, and the bootstrap takes them as
independent.

Acceptance comes from batches. Tokens a second come from a second pass, one prompt at a time, over the first few prompts
of each set: tokens after the first, by the time from the first to the last.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _bench_prompts import PromptSets, encode_prompts, list_files, read_texts
from _bench_report import plot_budgets, plot_depths, plot_methods, show_acceptance
from jaxtyping import Float

from tfm_jax.config import DraftNoise, Method, TreeKind
from tfm_jax.data import hash_files
from tfm_jax.decode import emit_first, run_rounds, start_transcript
from tfm_jax.engine import Engine, load, load_demo
from tfm_jax.errors import TfmError

BASELINES: tuple[Method, ...] = ("ddtree", "chain")  # what `tfm` is compared with
_EVERYTHING = "all"
_RESAMPLES = 10_000
_NGRAM = 4

type Groups = dict[str, list[int]]


class Setting(NamedTuple):
    """One way to decode; `ar` drafts nothing and has budget 0."""

    method: Method
    temperature: float
    budget: int
    draft_noise: DraftNoise = "none"


@dataclasses.dataclass(frozen=True)
class Run:
    """What the prompts gave under one setting.

    Attributes:
        tokens: new tokens of each prompt.
        committed: tokens that each of its rounds emitted; no round where the first token was the last.
    """

    tokens: list[list[int]]
    committed: list[list[int]]

    @property
    def acceptance(self) -> Float[np.ndarray, " prompts"]:
        """Mean tokens a round; NaN without a round."""
        return np.array([np.mean(counts) if counts else np.nan for counts in self.committed])


class Timing(NamedTuple):
    """One prompt alone: tokens after the first, and the seconds from the first to the last."""

    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Measure acceptance length and tokens a second of every method on held-out prompts.

    Attributes:
        model: directory that tfm-convert wrote; by default the models that come with the package.
        held_out: `val.jsonl.xz` of the corpus; set `val` is the 128-token beginnings (shorter documents whole) of its
            first 64 documents in the order of sha1(id).
        prompts: folder with `humaneval.jsonl` and `verilogeval.jsonl`, an object with `turns` a line; a prompt is the
            first turn as raw text, whole, or its beginning where the model has too few positions.
        output: JSON file to write, with plots beside it.
        methods: to measure.
        temperatures: 0 is greedy.
        budgets: most tree nodes, the root not counted.
        max_new_tokens: tokens a prompt; a stop token ends it earlier.
        batch: prompts at once in the pass that measures acceptance.
        timed_prompts: prompts of each set in the pass that measures tokens a second; 0 leaves it out.
        seed: of the noise (plus the prompt's number) and of the bootstrap.
        tree: as for `tfm generate`.
        draft_noise: as for `tfm generate`: `shared`, `none` or both, which are then compared.
        dtype: compute dtype; by default float32 on a CPU and bfloat16 on a GPU.
    """

    model: Path | None = None
    held_out: Path | None = None
    prompts: Path | None = None
    output: Path | None = None
    methods: tuple[Method, ...] = ("ar", "chain", "ddtree", "tfm")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    budgets: tuple[int, ...] = (63,)
    max_new_tokens: int = 128
    batch: int = 32
    timed_prompts: int = 8
    seed: int = 0
    tree: TreeKind = "pruned"
    draft_noise: tuple[DraftNoise, ...] = ("shared",)
    dtype: Literal["float32", "bfloat16"] | None = None

    def measure(self) -> dict[str, Any]:
        """The report: `meta`, `rows`, `comparisons`, `mismatches` and `text`.

        Raises:
            TfmError: an option or a file is unusable, or the model cannot run a method.
        """
        settings = list_settings(self.methods, self.temperatures, self.budgets, self.draft_noise)
        if not settings or self.batch < 1 or self.timed_prompts < 0:
            message = (
                f"{len(settings)} settings, batch {self.batch} and {self.timed_prompts} timed prompts cannot be "
                "measured; give at least one method, temperature and budget, a batch of 1 and no negative number."
            )
            raise TfmError(message)
        files = list_files(self.held_out, self.prompts)
        texts = read_texts(files)
        engine = load_demo(self.dtype) if self.model is None else load(self.model, self.dtype)
        positions = engine.config.target.max_positions
        sets = encode_prompts(texts, engine.tokenizer, positions, self.max_new_tokens)
        prompts = list(itertools.chain.from_iterable(sets.values()))
        runs = {}
        for setting in settings:
            runs[setting] = decode_prompts(
                engine, prompts, self._options(prompts, setting), batch=self.batch, seed=self.seed
            )
            print(f"{_label(setting)}: done", file=sys.stderr, flush=True)
        groups = group_prompts(sets)
        mismatches = find_mismatches(engine, prompts, runs, self.seed) if engine.dtype == jnp.float32 else []
        rows = []
        for setting, run in runs.items():
            timings, reference = self._time(engine, prompts, groups, setting), _reference(runs, setting.temperature)
            for name, members in groups.items():
                figures = make_figures(run, reference, timings, members, self.seed)
                rows.append(setting._asdict() | {"set": name} | figures)
        return {
            "meta": self._describe(engine, sets, files),
            "rows": rows,
            "comparisons": compare_methods(runs, groups, self.seed),
            "mismatches": mismatches,
            "text": {"distinct_4gram_share": share_by_group(runs, groups)},
        }

    def show(self, report: dict[str, Any]) -> None:
        """Prints the report as tables."""
        show_acceptance(report)

    def plot(self, report: dict[str, Any], output: Path) -> None:
        """Draws acceptance by method, by budget and by depth, beside the JSON."""
        plot_methods(report["rows"], output.with_name(f"{output.stem}_methods.png"))
        plot_budgets(report["rows"], output.with_name(f"{output.stem}_budgets.png"))
        plot_depths(report["rows"], output.with_name(f"{output.stem}_depths.png"))

    def failure(self, report: dict[str, Any]) -> str | None:
        """In float32 every method must give the same tokens."""
        if not report["mismatches"]:
            return None
        return f"{len(report['mismatches'])} float32 texts differ from the reference's (JSON: mismatches)."

    def _options(self, prompts: Sequence[Sequence[int]], setting: Setting) -> dict[str, Any]:
        """Arguments of the engine; one context for all prompts, so that a setting compiles once."""
        return {
            "method": setting.method,
            "budget": max(setting.budget, 1),
            "temperature": setting.temperature,
            "max_new_tokens": self.max_new_tokens,
            "context": max(map(len, prompts)) + self.max_new_tokens,
            "seed": self.seed,
            "tree": self.tree,
            "draft_noise": setting.draft_noise,
        }

    def _time(self, engine: Engine, prompts: list[list[int]], groups: Groups, setting: Setting) -> dict[int, Timing]:
        """Timings of the first prompts of each set by their numbers, after one that warms up."""
        if not self.timed_prompts:
            return {}
        print(f"{_label(setting)}: timing", file=sys.stderr, flush=True)
        options = self._options(prompts, setting)
        engine.generate(prompts[:1], **options)
        timings = {}
        for number in sorted({number for members in groups.values() for number in members[: self.timed_prompts]}):
            (generation,) = engine.generate([prompts[number]], **options | {"seed": self.seed + number})
            timings[number] = Timing(len(generation.token_ids) - 1, generation.decode_seconds)
        return timings

    def _describe(self, engine: Engine, sets: PromptSets, files: dict[str, Path]) -> dict[str, Any]:
        return {
            "model": "demo" if self.model is None else str(self.model),
            "parameters": {
                name: sum(leaf.size for leaf in jax.tree.leaves(engine.params[name]))
                for name in ("target", "drafter", "weaver")
                if name in engine.params
            },
            "dtype": engine.dtype.name,
            "max_new_tokens": self.max_new_tokens,
            "batch": self.batch,
            "timed_prompts": self.timed_prompts,
            "seed": self.seed,
            "acceptance_length": "tokens a round, bonus included: mean over a prompt's rounds, then over prompts",
            "ci95": f"percentile bootstrap over prompts, {_RESAMPLES} resamples; differences paired by prompt",
            "tokens_per_second": "one prompt at a time; tokens after the first / seconds from first to last",
            "sets": {
                name: {
                    "prompts": len(members),
                    "prompt_tokens": [min(map(len, members)), max(map(len, members))],
                    "sha256": hash_files(files[name]),
                }
                for name, members in sets.items()
            },
        }


_first = jax.jit(emit_first, donate_argnums=1)
_rounds = jax.jit(run_rounds, donate_argnums=(1, 2))


def decode_prompts(
    engine: Engine, prompts: Sequence[list[int]], options: dict[str, Any], *, batch: int, seed: int
) -> Run:
    """All prompts in batches, each with its own noise.

    Args:
        engine: the models.
        prompts: token ids.
        options: of `Engine.prefill`, with `max_new_tokens`.
        batch: prompts at once.
        seed: prompt i has the noise seed + i.
    """
    tokens, committed = [], []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        seeds = seed + start + jnp.arange(len(some), dtype=jnp.int32)
        state = _first(engine.params, dataclasses.replace(engine.prefill(some, **options), seed=seeds))
        most = options["max_new_tokens"]
        state, transcript = _rounds(engine.params, state, start_transcript(state, most), jnp.asarray(most, jnp.int32))
        emitted, new, counts = map(np.asarray, (state.emitted, transcript.tokens, transcript.committed))
        tokens += [row[:end].tolist() for row, end in zip(new, emitted, strict=True)]
        committed += [row[row > 0].tolist() for row in counts]
    return Run(tokens, committed)


def list_settings(
    methods: Iterable[Method],
    temperatures: Iterable[float],
    budgets: Sequence[int],
    draft_noises: Sequence[DraftNoise],
) -> tuple[Setting, ...]:
    """Every combination once, `ar` first and with one budget only; noise is shared where there is any to share."""
    ordered = sorted(methods, key=lambda method: method != "ar")
    combinations = (
        Setting(method, temperature, budget, noise)
        for temperature in temperatures
        for method in ordered
        for budget in ((0,) if method == "ar" else budgets)
        for noise in (draft_noises if temperature and method != "ar" else ("none",))
    )
    return tuple(dict.fromkeys(combinations))


def group_prompts(sets: PromptSets) -> Groups:
    """Numbers of the prompts of each set, and of all where there are several sets."""
    ends = list(itertools.accumulate(map(len, sets.values())))
    groups = {name: list(range(end - len(sets[name]), end)) for name, end in zip(sets, ends, strict=True)}
    return groups if len(groups) == 1 else groups | {_EVERYTHING: list(range(ends[-1]))}


def bootstrap_interval(values: Float[np.ndarray, " prompts"], seed: int) -> list[float] | None:
    """Central 95 % of the means of resamples of `values`; None without any.

    Percentile method: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.
    """
    if not len(values):
        return None
    chosen = np.random.default_rng(seed).integers(len(values), size=(_RESAMPLES, len(values)))
    return np.percentile(values[chosen].mean(axis=1), (2.5, 97.5)).tolist()


def make_figures(
    run: Run, reference: Run, timings: dict[int, Timing], members: Sequence[int], seed: int
) -> dict[str, Any]:
    """Figures of one setting over some of the prompts.

    Prompts without a round have no acceptance length and are not counted.

    Args:
        run: all prompts under the setting.
        reference: texts that it should give.
        timings: of some prompts, by number.
        members: numbers of the prompts that count here.
        seed: of the bootstrap.
    """
    lengths = _known(run.acceptance[members])
    rounds = [count for member in members for count in run.committed[member]]
    timed = [timings[member] for member in members if member in timings]
    seconds = sum(timing.seconds for timing in timed)
    return {
        "prompts": len(lengths),
        "acceptance_length": _mean(lengths),
        "ci95": bootstrap_interval(lengths, seed),
        "tokens_per_second": sum(timing.tokens for timing in timed) / seconds if seconds else None,
        "tokens_equal": float(np.mean([run.tokens[member] == reference.tokens[member] for member in members])),
        "rounds": len(rounds),
        "accepted_by_depth": [sum(count > depth for count in rounds) for depth in range(1, max(rounds, default=1))],
    }


def compare_methods(runs: dict[Setting, Run], groups: Groups, seed: int) -> list[dict[str, Any]]:
    """Paired gains, as means of differences prompt by prompt, budget and temperature being equal.

    Of `tfm` over the other ways to draft, and of every method that shares the target's noise over itself without.
    """
    pairs = [
        (setting, setting._replace(method=against), against)
        for setting, against in itertools.product(runs, BASELINES)
        if setting.method == "tfm"
    ]
    pairs += [(setting, setting._replace(draft_noise="none"), "no noise") for setting in runs]
    comparisons = []
    for setting, baseline, against in pairs:
        if baseline == setting or baseline not in runs:
            continue
        gains = runs[setting].acceptance - runs[baseline].acceptance
        for name, members in groups.items():
            known = _known(gains[members])
            figures = {"set": name, "difference": _mean(known), "ci95": bootstrap_interval(known, seed)}
            comparisons.append(setting._asdict() | {"against": against} | figures)
    return comparisons


def find_mismatches(
    engine: Engine, prompts: list[list[int]], runs: dict[Setting, Run], seed: int
) -> list[dict[str, Any]]:
    """Texts that are not the reference's, where they part, and how far the target's two best choices are apart there.

    A margin of some 1e-6 is a tie that another order of the same sums may decide otherwise; a larger one is a fault.
    """
    mismatches = []
    for setting, run in runs.items():
        expected = _reference(runs, setting.temperature).tokens
        for number, (prompt, ours, theirs) in enumerate(zip(prompts, run.tokens, expected, strict=True)):
            if ours != theirs:
                pairs = enumerate(itertools.zip_longest(ours, theirs))
                index = next(index for index, (our, their) in pairs if our != their)
                drawn = {"temperature": setting.temperature, "seed": seed + number}
                margin = engine.top2_margin(prompt, theirs, index, **drawn)
                mismatches.append(setting._asdict() | {"prompt": number, "index": index, "top2_margin": margin})
    return mismatches


def distinct_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams of a text by all its 4-grams: low where it runs in circles; NaN where it has none."""
    grams = list(zip(*(tokens[start:] for start in range(_NGRAM)), strict=False))
    return len(set(grams)) / len(grams) if grams else float("nan")


def share_by_group(runs: dict[Setting, Run], groups: Groups) -> dict[str, float | None]:
    """Mean `distinct_share` of the greedy texts of each set; empty where nothing greedy was measured."""
    if not any(setting.temperature == 0 for setting in runs):
        return {}
    shares = np.array([distinct_share(tokens) for tokens in _reference(runs, 0.0).tokens])
    return {name: _mean(_known(shares[members])) for name, members in groups.items()}


def _reference(runs: dict[Setting, Run], temperature: float) -> Run:
    """The first run at a temperature: of `ar`, if it was measured."""
    return next(run for setting, run in runs.items() if setting.temperature == temperature)


def _label(setting: Setting) -> str:
    shared = ", shared noise" if setting.draft_noise == "shared" else ""
    return f"{setting.method}, temperature {setting.temperature:g}, budget {setting.budget}{shared}"


def _known(values: Float[np.ndarray, " prompts"]) -> Float[np.ndarray, " known"]:
    return values[~np.isnan(values)]


def _mean(values: Float[np.ndarray, " known"]) -> float | None:
    return float(values.mean()) if len(values) else None
