"""Golden arrays made by independent PyTorch code (tests/data/goldens/README.md), and engines on their checkpoints."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path

import jax
import numpy as np

import tfm_jax
from convert.pipeline import convert_checkpoint
from tfm_jax.decode import Modules, bind

GOLDENS = Path(__file__).parent / "data" / "goldens"
TEMPERATURES = [0.0, 0.0, 0.0, 0.0, 1.0, 0.7, 1.0, 1.5]  # of the prompts, greedy once and sampled once
SEEDS = [0, 0, 0, 0, 11, 12, 13, 14]
LOOP_TARGETS = {"loop_qwen3": "qwen3_untied", "loop_qwen3_5": "qwen3_5_untied"}


@functools.cache
def arrays(name: str) -> np.lib.npyio.NpzFile:
    """Arrays of one golden directory."""
    return np.load(GOLDENS / name / "golden.npz")


@functools.cache
def load_engine(target: str, drafter: str | None = None, weaver: str | None = None) -> tfm_jax.Engine:
    """Converts golden checkpoints, as a user would, and loads them in float32."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        convert_checkpoint(
            GOLDENS / target,
            out,
            drafter=GOLDENS / drafter if drafter else None,
            weaver=GOLDENS / weaver if weaver else None,
            dtype="float32",
        )
        return tfm_jax.load(out, "float32")


def loop_engine(loop: str) -> tfm_jax.Engine:
    """Engine of a whole-loop golden: target, drafter and Weaver."""
    return load_engine(LOOP_TARGETS[loop], f"tfm/{loop}/drafter", f"tfm/{loop}/weaver.pth")


def modules_of(engine: tfm_jax.Engine) -> Modules:
    """Modules over the engine's arrays, outside jit."""
    return bind(engine.models, engine.params)


def largest_difference(actual: jax.Array, expected: np.ndarray) -> float:
    """Largest absolute difference; shapes must agree exactly."""
    assert actual.shape == expected.shape
    return float(np.abs(np.asarray(actual, np.float64) - expected).max())


@functools.cache
def loop(name: str) -> dict[str, np.ndarray]:
    """Arrays of a whole-loop golden."""
    return dict(np.load(GOLDENS / "tfm" / name / "golden.npz"))


def prompts(name: str) -> list[list[int]]:
    """Those of the golden loop, on which the drafter is sometimes right, and a single token."""
    return [*(loop(name)[f"prompt{index}/ids"].tolist() for index in range(3)), [2]]


@functools.cache
def plain(name: str) -> list[list[int]]:
    """What the target alone says to every prompt, greedily, then sampled; a batch of one and a token at a time."""
    engine, texts = loop_engine(name), []
    for prompt, temperature, seed in zip([*prompts(name), *prompts(name)], TEMPERATURES, SEEDS, strict=True):
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": 24, "ignore_eos": True}
        texts.append(engine.generate([prompt], method="ar", **options)[0].token_ids)
    return texts


def changed(engine: tfm_jax.Engine, **attributes: object) -> tfm_jax.Engine:
    """The same engine with other weights or configurations."""
    other = copy.copy(engine)
    for name, value in attributes.items():
        setattr(other, name, value)
    return other
