"""Trains a DFlash drafter on a frozen target's own continuations.

    python scripts/train_drafter.py --run runs/drafter --model runs/target/model --continuations runs/continuations.npz

Writes the run directory (see `tfm_jax.training`) and, at the end, RUN/model with target and drafter. Exit code 75: the
time of --seconds ran out; the same command goes on.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import common  # isort: skip - before jax
import jax
import tyro

from tfm_jax.checkpoint import load_checkpoint, save_checkpoint
from tfm_jax.data import hash_files, load_continuations, split_held_out
from tfm_jax.objectives import DraftData, average_loss, drafter_network, drafter_objective
from tfm_jax.presets import find_preset
from tfm_jax.runtime import default_dtype
from tfm_jax.training import Settings, train

_EVALUATED_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a drafter for a target.

    Attributes:
        run: directory of the run.
        model: directory with the target.
        continuations: what `scripts/sample_continuations.py` wrote.
        preset: sizes, `demo` or `tiny`.
        batch: continuations a step.
        anchors: blocks a continuation, drawn anew in every step.
        held_out: continuations kept for the evaluations.
        seconds: stop and save after so long; run again to go on.
        settings: see `tfm_jax.training.Settings`.
    """

    run: Path
    model: Path
    continuations: Path
    preset: str = "demo"
    batch: int = 64
    anchors: int = 32
    held_out: int = 512
    seconds: float | None = None
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Settings(steps=6000, learning_rate=2e-3)
    )


def main(arguments: Arguments) -> bool:
    """Trains, and writes the model if the run has finished."""
    config, dtype = find_preset(arguments.preset).drafter, default_dtype()
    stored = load_checkpoint(arguments.model, dtype.name)
    pair = dataclasses.replace(
        stored.config,
        drafter=config,
        weaver=None,
        source={**stored.config.source, "drafter": "scripts/train_drafter.py"},
    )
    learned, held_out = split_held_out(load_continuations(arguments.continuations), arguments.held_out)
    network, settings = drafter_network(config, dtype), arguments.settings
    objective = drafter_objective(
        pair.target, config, dtype, seed=settings.seed, batch=arguments.batch, anchors=arguments.anchors
    )
    frozen = {"target": stored.target}
    state = train(
        arguments.run,
        objective=objective,
        initial=lambda: network.initial(settings.seed),
        data=DraftData(frozen, learned),
        settings=settings,
        inputs={
            "continuations": hash_files(arguments.continuations),
            "batch": arguments.batch,
            "anchors": arguments.anchors,
            "held_out": arguments.held_out,
            "config": pair.to_dict(),
            "dtype": dtype.name,
        },
        evaluate=average_loss(objective, DraftData(frozen, held_out), _EVALUATED_BATCHES),
        deadline=common.deadline(arguments.seconds),
    )
    if int(state.step) < settings.steps:
        return False
    model = arguments.run / "model"
    shutil.rmtree(model, ignore_errors=True)
    trees = {"target": stored.target, "drafter": state.params}
    save_checkpoint(model, pair, jax.device_get(trees), dtype="bfloat16", tokenizer=stored.tokenizer_path)
    return True


if __name__ == "__main__":
    common.run_script(main, Arguments)
