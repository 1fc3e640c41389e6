"""Compares an OUT with what it was converted from: sampled parameters bit for bit, and logits with transformers'."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convert.pipeline import read_sources
from convert.rules import Model
from tfm_jax.checkpoint import ArrayFile, CheckpointConfig, open_models, read_config
from tfm_jax.errors import TfmError

_PROMPT = 12  # tokens
_TOLERANCE = 0.01  # of the largest logit; rounding the weights to bfloat16 stays below, a misplaced tensor does not


class Logits(NamedTuple):
    """Next-token logits of ours and of transformers, in float32, after the prefixes of a random prompt.

    Attributes:
        difference: largest absolute difference.
        largest: largest absolute logit of transformers'.
        agreed: prefixes after which the largest logit belongs to the same token, out of `prefixes`.
        prefixes: how many.
    """

    difference: float
    largest: float
    agreed: int
    prefixes: int


class Verification(NamedTuple):
    """What was compared and found equal.

    Attributes:
        parameters: arrays compared, of `of`.
        of: arrays in OUT.
        values: numbers compared.
        logits: None where torch or transformers is not installed, or where not asked for.
    """

    parameters: int
    of: int
    values: int
    logits: Logits | None


def verify_checkpoint(
    out: Path,
    target: Path,
    drafter: Path | None = None,
    weaver: Path | None = None,
    *,
    samples: int = 64,
    seed: int = 0,
    logits: bool = True,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Verification:
    """Compare an OUT with its sources.

    Args:
        out: directory that `tfm-convert` wrote.
        target: Hugging Face directory that it was converted from.
        drafter: that of the drafter.
        weaver: .pth file of the Weaver.
        samples: arrays to compare; those of all models and places are equally likely.
        seed: of the choice, and of the prompt.
        logits: also compare the target's logits, where torch and transformers are installed. The model is then in
            memory twice, in float32.
        progress: called after every array with their numbers done and in all.

    Raises:
        TfmError: they differ, or one of them cannot be read.
    """
    stored = read_config(out)
    expected, models = read_sources(target, drafter, weaver)
    _check_configs(out, stored, expected)
    arrays = {
        f"{model}/{path}": array for model, found in open_models(out, stored).items() for path, array in found.items()
    }
    rng = np.random.default_rng(seed)
    chosen = sorted(rng.choice(sorted(arrays), min(samples, len(arrays)), replace=False).tolist())
    values = 0
    for number, name in enumerate(chosen, 1):
        values += _compare(out, name, arrays[name], models)
        progress(number, len(chosen))
    compared = None
    if logits and all(importlib.util.find_spec(module) for module in ("torch", "transformers")):
        compared = _compare_logits(out, target, rng.integers(0, stored.target.vocab_size, _PROMPT).tolist())
    return Verification(len(chosen), len(arrays), values, compared)


def _check_configs(out: Path, stored: CheckpointConfig, expected: CheckpointConfig) -> None:
    for model in ("target", "drafter", "weaver"):
        if getattr(stored, model) != getattr(expected, model):
            message = f"{out} was not converted from this {model}: their configurations differ; give its own sources."
            raise TfmError(message)


def _compare(out: Path, name: str, array: ArrayFile, models: Mapping[str, Model]) -> int:
    """Compare one array bit for bit; returns its size."""
    model, _, path = name.partition("/")
    start = 0
    for block in models[model].make_blocks(path):
        ours, theirs = array.read_rows(start, start + len(block)), block.astype(array.dtype)
        bits = f"u{array.dtype.itemsize}"
        if wrong := int(np.count_nonzero(ours.view(bits) != np.ascontiguousarray(theirs).view(bits))):
            message = f"{out}: {wrong} values of {name} differ from the source's; convert again."
            raise TfmError(message)
        start += len(block)
    return int(np.prod(array.shape))


def _compare_logits(out: Path, target: Path, prompt: list[int]) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM

    from tfm_jax.engine import load

    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].float().numpy()
    del theirs
    engine = load(out, "float32")
    ours = np.stack([engine.next_logits(prompt[: length + 1]) for length in range(len(prompt))])
    difference, largest = float(np.abs(ours - expected).max()), float(np.abs(expected).max())
    agreed = int(np.count_nonzero(ours.argmax(-1) == expected.argmax(-1)))
    if not difference <= _TOLERANCE * largest:
        message = f"{out}: logits differ from transformers' by {difference:.3g} of {largest:.3g}; report this."
        raise TfmError(message)
    return Logits(difference, largest, agreed, len(prompt))
