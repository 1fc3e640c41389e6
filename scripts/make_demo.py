"""Makes the demo model of the package from the three training runs: the trio, its loss curves and its model card.

    python scripts/make_demo.py --runs runs --output tfm_jax/demo --manifest corpus/MANIFEST.json

Needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import common
import matplotlib as mpl
from matplotlib import pyplot as plt

from tfm_jax.checkpoint import read_config
from tfm_jax.errors import TfmError

mpl.use("Agg")
_STAGES = ("target", "drafter", "weaver")
_LARGEST = 48_000_000  # bytes; what a repository can carry
_LOSSES = {
    "target": "cross-entropy, nats a token",
    "drafter": "weighted cross-entropy, nats a slot",
    "weaver": "LK loss, nats a reached position",
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Make the demo model.

    Attributes:
        runs: directory with the runs `target`, `drafter` and `weaver`.
        output: directory to create.
        manifest: `MANIFEST.json` of the corpus, for sources and licences.
    """

    runs: Path
    output: Path
    manifest: Path


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run directory says about a finished run."""

    settings: dict[str, Any]
    inputs: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def main(arguments: Arguments) -> bool:
    """Copies the trio and writes its card beside it."""
    records = {stage: read_run(arguments.runs / stage) for stage in _STAGES}
    model = arguments.runs / "weaver" / "model"
    read_config(model)
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    if size > _LARGEST:
        message = f"{model} has {size} bytes; the demo may have {_LARGEST}. Train smaller models."
        raise TfmError(message)
    if arguments.output.exists():
        message = f"{arguments.output} exists; remove it or choose another output."
        raise TfmError(message)
    shutil.copytree(model, arguments.output)
    plot_losses(records, arguments.output / "losses.png")
    card = write_card(records, json.loads(arguments.manifest.read_text(encoding="utf-8")), size)
    (arguments.output / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    return True


def read_run(run: Path) -> Record:
    """Settings and log of a run.

    Raises:
        TfmError: the run is missing or not finished.
    """
    if not (run / "model" / "config.json").is_file():
        message = f"{run} is not a finished run: it has no model; go on with its training script."
        raise TfmError(message)
    described = json.loads((run / "run.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return Record(
        described["settings"],
        described["inputs"],
        [line for line in lines if "evaluation" not in line],
        [line for line in lines if "evaluation" in line],
    )


def plot_losses(records: dict[str, Record], path: Path) -> None:
    """One panel a model: training loss, and held-out loss where it is the same quantity."""
    figure, axes = plt.subplots(1, len(records), figsize=(12, 3.2), layout="constrained")
    for axis, (stage, record) in zip(axes, records.items(), strict=True):
        axis.plot(*_column(record.steps, "loss"), linewidth=0.8, label="training")
        held_out = "nats_a_token" if stage == "target" else "loss"
        axis.plot(*_column(record.evaluations, held_out), marker=".", label="held-out")
        axis.set(title=stage, xlabel="step", ylabel=_LOSSES[stage])
        axis.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _column(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [line["step"] for line in lines], [line[name] for line in lines]


def write_card(records: dict[str, Record], manifest: dict[str, Any], size: int) -> str:
    """The model card, in Markdown."""
    target, drafter, weaver = (records[stage] for stage in _STAGES)
    last = {stage: record.evaluations[-1] for stage, record in records.items()}
    config = weaver.inputs["config"]
    shapes = config["target"]
    return f"""# Demo trio

A hybrid target (Qwen3.5 layout: {shapes["layer_types"].count("linear_attention")} Gated DeltaNet and \
{shapes["layer_types"].count("full_attention")} attention layers, hidden size {shapes["hidden_size"]}, \
{shapes["vocab_size"]}-entry byte-level BPE, tied), a DFlash drafter (block {config["drafter"]["block_size"]}) on its \
taps and a Weaver (`{config["weaver"]["generation"]}`, pool {config["weaver"]["pool_size"]}) on the two; bfloat16, \
{size / 1e6:.1f} MB. It shows the algorithm on real weights. It is a small language model of technical English and \
code, follows no instructions, and its text is not to be relied on. Its figures say nothing about other models.

## Training

| | steps | batch | peak learning rate | seed |
|---|---|---|---|---|
| target | {target.settings["steps"]} | {target.inputs["batch"]} windows of {target.inputs["length"]} tokens \
| {target.settings["learning_rate"]:g} | {target.settings["seed"]} |
| drafter | {drafter.settings["steps"]} | {drafter.inputs["batch"]} rows, {drafter.inputs["anchors"]} anchors each \
| {drafter.settings["learning_rate"]:g} | {drafter.settings["seed"]} |
| Weaver | {weaver.settings["steps"]} | {weaver.inputs["batch"]} rows, {weaver.inputs["anchors"]} anchors each \
| {weaver.settings["learning_rate"]:g} | {weaver.settings["seed"]} |

Muon for the kernels of linear layers and AdamW for the rest; warm-up, plateau, linear decay to 0 over the last \
{target.settings["decay"]:.0%} of the steps; bfloat16 arithmetic on float32 parameters. Target: next-token \
cross-entropy. Drafter and Weaver: on the target's own continuations, sampled by `ar` at temperature 1, of pieces of \
the training text; losses in `tfm_jax/losses.py`.

![Losses](losses.png)

## Held-out figures

- Target: **{last["target"]["bits_per_character"]:.3f} bits a character** on the validation text; `xz -9` needs \
{target.inputs["xz_bits_per_character"]:.3f} for the same text.
- Drafter, on held-out continuations: the argmax of a slot is the sampled token in \
{last["drafter"]["accuracy"]:.1%} of the slots; a chain of argmaxes emits \
**{last["drafter"]["chain"]:.2f} tokens a round** at temperature 1, bonus included. The target itself is this \
undecided: its loss is {last["target"]["nats_a_token"]:.2f} nats a token. Greedy figures are in `docs/results.md`.
- Weaver, on the same, where speculative sampling comes to: probability of acceptance \
{last["weaver"]["acceptance"]:.3f} under its law, {last["weaver"]["marginal_acceptance"]:.3f} under the drafter's \
marginals, both within the pool, which holds {last["weaver"]["pool_mass"]:.1%} of the target's probability.

## Data

{target.inputs["tokens"]:,} tokens. SHA-256 of training text and tokenizer `{target.inputs["text"]}`, of \
validation text and tokenizer `{target.inputs["held_out"]}`, of the continuations \
`{drafter.inputs["continuations"]}`. The text is built by `scripts/build_corpus.py` from these \
packages, all under permissive licences:

{list_sources(manifest)}

Weights: Apache-2.0, like the code.

## Retraining

`scripts/train_demo.sh CORPUS RUNS`, about 20 minutes on one H200, then `scripts/make_demo.py`. Every stage can be cut \
at any time; the same command goes on.
"""


def list_sources(manifest: dict[str, Any]) -> str:
    """One line a source package: name, version and licence."""
    return "\n".join(
        f"- {source['package']} {source['version']}: {source['licence']}" for source in manifest["sources"]
    )


if __name__ == "__main__":
    common.run_script(main, Arguments)
