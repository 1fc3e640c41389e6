"""Trains a hybrid target on packed text: next-token cross-entropy.

    python scripts/train_target.py --run runs/target --text train.jsonl.xz --held-out val.jsonl.xz \
        --tokenizer tokenizer.json

Writes the run directory (see `tfm_jax.training`) and, at the end, RUN/model, which `tfm_jax.load` reads. Exit code 75:
the time of --seconds ran out; the same command goes on.
"""

from __future__ import annotations

import dataclasses
import lzma
import shutil
from pathlib import Path
from typing import Annotated

import common  # isort: skip - before jax
import jax
import jax.numpy as jnp
import tyro

from tfm_jax.checkpoint import CheckpointConfig, save_checkpoint
from tfm_jax.data import read_documents, tokenise
from tfm_jax.objectives import bits_per_character, target_network, target_objective
from tfm_jax.presets import END_OF_TEXT, find_preset
from tfm_jax.runtime import default_dtype
from tfm_jax.training import Settings, train


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a target from scratch.

    Attributes:
        run: directory of the run.
        text: training text, `.jsonl` or `.jsonl.xz`, an object with a `text` a line.
        held_out: text for the evaluations.
        tokenizer: `tokenizer.json`.
        preset: sizes, `demo` or `tiny`.
        batch: windows a step.
        length: tokens of a window.
        seconds: stop and save after so long; run again to go on.
        settings: see `tfm_jax.training.Settings`.
    """

    run: Path
    text: Path
    held_out: Path
    tokenizer: Path
    preset: str = "demo"
    batch: int = 64
    length: int = 1024
    seconds: float | None = None
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Settings(steps=2800, learning_rate=2e-3)
    )


def main(arguments: Arguments) -> bool:
    """Trains, and writes the model if the run has finished."""
    config = find_preset(arguments.preset).target
    text = tokenise(arguments.text, arguments.tokenizer, arguments.run, END_OF_TEXT)
    held_out = tokenise(arguments.held_out, arguments.tokenizer, arguments.run, END_OF_TEXT)
    network = target_network(config, default_dtype())
    settings, batch, length = arguments.settings, arguments.batch, arguments.length
    state = train(
        arguments.run,
        objective=target_objective(network, seed=settings.seed, batch=batch, length=length),
        initial=lambda: network.initial(settings.seed),
        data=jnp.asarray(text.tokens),
        settings=settings,
        inputs={
            "text": text.sha256,
            "held_out": held_out.sha256,
            "tokens": len(text.tokens),
            "batch": batch,
            "length": length,
            "config": config.to_dict(),
            "dtype": str(network.dtype),
            "xz_bits_per_character": xz_bits_per_character(arguments.held_out),
        },
        evaluate=bits_per_character(network, held_out.tokens, held_out.characters, batch=batch, length=length),
        deadline=common.deadline(arguments.seconds),
    )
    if int(state.step) < settings.steps:
        return False
    model = arguments.run / "model"
    shutil.rmtree(model, ignore_errors=True)
    save_checkpoint(
        model,
        CheckpointConfig(target=config, stop_token_ids=(END_OF_TEXT,), source={"target": "scripts/train_target.py"}),
        {"target": jax.device_get(state.params)},
        dtype="bfloat16",
        tokenizer=arguments.tokenizer,
    )
    return True


def xz_bits_per_character(path: Path) -> float:
    """Size of all documents of a file under `xz -9`, in bits per character."""
    text = "\n".join(read_documents(path))
    return 8 * len(lzma.compress(text.encode(), preset=9)) / len(text)


if __name__ == "__main__":
    common.run_script(main, Arguments)
