"""Tables and plots of `bench.py`; matplotlib is imported where it draws, because it is an extra."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

type Rows = Sequence[dict[str, Any]]

_PARETO = {"steps": "dependent steps of the Weaver", "expanded": "nodes that the Weaver expands"}
_NOISE_MARKERS = {"none": "s", "shared": "o"}
_NOISE_LABELS = {"none": "noise not shared", "shared": "shared noise"}
_TREE_FIGURES = (("acceptance_length", ""), ("difference", "+"))


def show_acceptance(report: dict[str, Any]) -> None:
    """Prints acceptance and speed by setting and set, the gains of `tfm`, and how much the texts repeat."""
    console = Console(highlight=False, markup=False)
    rows = _table("method", "T", "budget", "noise", "set", "prompts", "tokens/round", "tokens/s", "equal")
    for row in report["rows"]:
        length, speed = _estimate(row["acceptance_length"], row["ci95"], ""), row["tokens_per_second"]
        shown = "" if speed is None else f"{speed:.1f}"
        rows.add_row(row["method"], *_key(row), str(row["prompts"]), length, shown, f"{row['tokens_equal']:.0%}")
    console.print(rows)
    comparisons = _table("difference", "T", "budget", "noise", "set", "tokens/round")
    for item in report["comparisons"]:
        pair = f"{item['method']} - {item['against']}"
        comparisons.add_row(pair, *_key(item), _estimate(item["difference"], item["ci95"], "+"))
    if report["comparisons"]:
        console.print(comparisons)
    for name, share in report["text"]["distinct_4gram_share"].items():
        console.print(f"distinct 4-grams of a greedy text, {name}: {'none' if share is None else f'{share:.0%}'}")
    for item in report["mismatches"]:
        console.print(f"tokens differ: {item}")


def plot_methods(rows: Rows, path: Path) -> None:
    """Acceptance length at the largest budget with its interval, a panel for each set."""
    from matplotlib import pyplot as plt

    rows = _largest_budget(rows)
    sets, temperatures = _values(rows, "set"), _values(rows, "temperature")
    figure, axes = plt.subplots(1, len(sets), figsize=(3.4 * len(sets), 3.2), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], sets, strict=True):
        members = [row for row in rows if row["set"] == name and row["ci95"] is not None]
        places = {label: place for place, label in enumerate(dict.fromkeys(row["method"] for row in members))}
        for number, temperature in enumerate(temperatures):
            for noise, marker in _NOISE_MARKERS.items():
                drawn = [row for row in members if (row["temperature"], row["draft_noise"]) == (temperature, noise)]
                shift = 0.2 * (number - (len(temperatures) - 1) / 2)
                at = [places[row["method"]] + shift for row in drawn]
                label = f"temperature {temperature:g}" if any(row["budget"] for row in drawn) else None
                _draw_estimates(axis, at, drawn, fmt=marker, label=label, color=f"C{number}")
        axis.set_xticks(list(places.values()), list(places))
        axis.set(title=name)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens a round")
    axes[0, 0].legend(loc="upper left")
    _save(figure, path)


def plot_budgets(rows: Rows, path: Path) -> None:
    """Acceptance length of the last set by budget with its interval, a panel for each temperature."""
    from matplotlib import pyplot as plt

    temperatures, last = _values(rows, "temperature"), _values(rows, "set")[-1]
    drafts = [row for row in rows if row["set"] == last and row["budget"] and row["ci95"] is not None]
    size = (3.8 * len(temperatures), 3.4)
    figure, axes = plt.subplots(1, len(temperatures), figsize=size, sharey=True, squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for number, method in enumerate(_values(drafts, "method")):
            for noise, marker in _NOISE_MARKERS.items():
                key = (method, temperature, noise)
                line = [row for row in drafts if (row["method"], row["temperature"], row["draft_noise"]) == key]
                if line:
                    label = f"{method}, {_NOISE_LABELS[noise]}" if temperature else method
                    budgets = [row["budget"] for row in line]
                    _draw_estimates(axis, budgets, line, fmt=f"{marker}-", label=label, color=f"C{number}")
        axis.set(title=f"{last}, temperature {temperature:g}", xlabel="budget, nodes")
        axis.set_xscale("log", base=2)
        axis.set_xticks(_values(drafts, "budget"), _values(drafts, "budget"))
        axis.minorticks_off()
        if axis.containers:
            axis.legend(fontsize=8)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens a round")
    _save(figure, path)


def plot_depths(rows: Rows, path: Path) -> None:
    """Share of the last set's rounds that emit a drafted token at each depth, at the largest budget."""
    from matplotlib import pyplot as plt

    rows = _largest_budget(rows)
    temperatures, last = _values(rows, "temperature"), _values(rows, "set")[-1]
    figure, axes = plt.subplots(
        1, len(temperatures), figsize=(4.2 * len(temperatures), 3.2), sharey=True, squeeze=False
    )
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for row in rows:
            if (row["set"], row["temperature"]) == (last, temperature) and row["accepted_by_depth"]:
                shares = [count / row["rounds"] for count in row["accepted_by_depth"]]
                style = "-" if row["draft_noise"] == "shared" or not temperature else "--"
                label = f"{row['method']}, {_NOISE_LABELS[row['draft_noise']]}" if temperature else row["method"]
                axis.plot(range(1, len(shares) + 1), shares, style, marker=".", label=label)
        axis.set(title=f"{last}, temperature {temperature:g}", xlabel="depth", ylim=(0, 1))
        if axis.lines:
            axis.legend(fontsize=8)
    axes[0, 0].set_ylabel("share of rounds")
    _save(figure, path)


def show_trees(report: dict[str, Any]) -> None:
    """Prints tokens a round by schedule, and what the choice of budgets gains."""
    console = Console(highlight=False, markup=False)
    rows = _table("schedule", "T", "budget", "set", "steps", "expanded", "tokens/round", "against the first")
    for row in report["rows"]:
        length, gain = (_estimate(row[name], row[f"{name}_ci95"], sign) for name, sign in _TREE_FIGURES)
        counts = (str(row["steps"]), str(row["expanded"]))
        rows.add_row(row["schedule"], f"{row['temperature']:g}", str(row["budget"]), row["set"], *counts, length, gain)
    console.print(rows)


def show_budgets(report: dict[str, Any]) -> None:
    """Prints tokens per modelled second by budget, and the gain of choosing."""
    console = Console(highlight=False, markup=False)
    budgets = list(report["rows"][0]["fixed"])
    rows = _table("set", "prompts", *budgets, "chosen", "gain over the best", "interval")
    for row in report["rows"]:
        rates = [f"{rate:.1f}" for rate in (*row["fixed"].values(), row["chosen"])]
        low, high = row["ci95"]
        rows.add_row(row["set"], str(row["prompts"]), *rates, f"{row['gain']:+.2%}", f"[{low:+.2%}, {high:+.2%}]")
    console.print(rows)


def show_speed(report: dict[str, Any]) -> None:
    """Prints rates by the clock, and gains over the fastest fixed budget."""
    console = Console(highlight=False, markup=False)
    rows = _table("T", "budget", "prompts", "tokens/s", "tokens/round", "ms/round", "gain", "interval")
    for row in report["rows"]:
        name = (f"{row['temperature']:g}", str(row["budget"]), str(row["prompts"]))
        rates = (f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_round']:.2f}", f"{row['ms_per_round']:.3f}")
        low, high = row["ci95"]
        rows.add_row(*name, *rates, f"{row['gain']:+.1%}", f"[{low:+.1%}, {high:+.1%}]")
    console.print(rows)


def show_kernels(report: dict[str, Any]) -> None:
    """Prints time, floor and error of every program, and what was not timed."""
    console = Console(highlight=False, markup=False, width=140)
    meta = report["meta"]
    copy, product = meta["copy_bytes_per_second"] / 1e12, meta["matmul_operations_per_second"] / 1e12
    console.print(f"{meta['device']}, {meta['timer']}; copy {copy:.2f} TB/s, bfloat16 product {product:.0f} TFLOP/s")
    rows = _table("op", "case", "form", "buffers", "us", "floor", "us/floor", "kernels", "rel. error")
    for row in report["rows"]:
        name = (row["op"], row["case"], row["implementation"], row["buffers"])
        figures = (row["us"], row["floor_us"], row["us"] / row["floor_us"])
        rows.add_row(*name, *(f"{x:.1f}" for x in figures), str(row["kernels"]), f"{row['rel_err']:.1e}")
    console.print(rows)
    for kind in ("unsupported", "failed"):
        for entry in report[kind]:
            console.print(f"{kind}: {entry['op']}, {entry['case']}, {entry['implementation']}: {entry['reason']}")


def plot_pareto(rows: Rows, path: Path) -> None:
    """Tokens a round of the last set against dependent steps and against nodes that the Weaver expands."""
    from matplotlib import pyplot as plt

    temperatures, last = _values(rows, "temperature"), _values(rows, "set")[-1]
    markers = dict(zip(_values(rows, "schedule"), itertools.cycle("os^vDP*X<>hp"), strict=False))
    figure, axes = plt.subplots(len(temperatures), 2, figsize=(12, 3.2 * len(temperatures)), squeeze=False)
    for line, temperature in zip(axes, temperatures, strict=True):
        drawn = [row for row in rows if (row["set"], row["temperature"]) == (last, temperature)]
        for axis, name in zip(line, ("steps", "expanded"), strict=True):
            for row in drawn:
                length, marker = row["acceptance_length"], markers[row["schedule"]]
                axis.plot(row[name], length, marker, markersize=7, alpha=0.7, label=row["schedule"])
            axis.set(title=f"{last}, temperature {temperature:g}", xlabel=_PARETO[name], ylabel="tokens a round")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
    axes[0, 1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=7, ncols=2)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return f"{row['temperature']:g}", str(row["budget"]), row["draft_noise"], row["set"]


def _largest_budget(rows: Rows) -> Rows:
    """Rows of each method at its largest budget."""
    largest = {row["method"]: row["budget"] for row in sorted(rows, key=lambda row: row["budget"])}
    return [row for row in rows if row["budget"] == largest[row["method"]]]


def _draw_estimates(axis: Axes, at: Sequence[float], rows: Rows, **style: Any) -> None:  # noqa: ANN401
    """Acceptance lengths with their intervals."""
    lengths = [row["acceptance_length"] for row in rows]
    below = [row["acceptance_length"] - row["ci95"][0] for row in rows]
    above = [row["ci95"][1] - row["acceptance_length"] for row in rows]
    axis.errorbar(at, lengths, yerr=(below, above), capsize=3, **style)


def _values(rows: Rows, name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _estimate(value: float | None, interval: Sequence[float] | None, sign: str) -> str:
    """Value and 95 % interval; nothing where no prompt had a round."""
    if value is None or interval is None:
        return ""
    return f"{value:{sign}.3f} [{interval[0]:{sign}.2f}, {interval[1]:{sign}.2f}]"
