"""Samples a target's own continuations of pieces of the training text, at temperature 1: what its drafter learns from.

    python scripts/sample_continuations.py --model runs/target/model --text train.jsonl.xz --tokenizer tokenizer.json \
        --output runs/continuations.npz

The output has `tokens` [rows, prompt + new], right-padded, `prompt_lengths` and `lengths`. Every row has a seed of its
own. Batches are kept in OUTPUT.parts until all are there. Exit code 75: the time of --seconds ran out; the same command
goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import sys
import time
from pathlib import Path

import common  # isort: skip - before jax
import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.checkpoint import load_checkpoint
from tfm_jax.config import DecodePlan, Models
from tfm_jax.data import Prompts, choose_prompts, hash_files, save_arrays, tokenise
from tfm_jax.decode import Params, emit_first, empty_state, prefill_piece, run_rounds, start_transcript
from tfm_jax.errors import TfmError
from tfm_jax.presets import END_OF_TEXT
from tfm_jax.runtime import default_dtype


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Sample continuations with `ar`.

    Attributes:
        model: directory with the target.
        text: text whose pieces are the prompts.
        tokenizer: `tokenizer.json`.
        output: `.npz` to write.
        rows: continuations.
        batch: continuations at once.
        shortest_prompt: tokens.
        longest_prompt: tokens.
        new_tokens: most new tokens of a continuation; a stop token ends it earlier.
        seed: of prompts and samples.
        seconds: stop after so long; run again to go on.
    """

    model: Path
    text: Path
    tokenizer: Path
    output: Path
    rows: int = 32768
    batch: int = 2048
    shortest_prompt: int = 64
    longest_prompt: int = 256
    new_tokens: int = 384
    seed: int = 0
    seconds: float | None = None


def main(arguments: Arguments) -> bool:
    """Samples the missing batches, and joins them if all are there."""
    if arguments.rows % arguments.batch:
        message = f"rows ({arguments.rows}) must be a multiple of batch ({arguments.batch})."
        raise TfmError(message)
    stored, dtype = load_checkpoint(arguments.model, default_dtype().name), default_dtype()
    parts = arguments.output.with_name(arguments.output.name + ".parts")
    text = tokenise(arguments.text, arguments.tokenizer, arguments.output.parent, END_OF_TEXT)
    _agree(parts, arguments, text.sha256)
    prompts = choose_prompts(text, arguments.rows, arguments.shortest_prompt, arguments.longest_prompt, arguments.seed)
    sample = functools.partial(
        sample_batch,
        {"target": stored.target},
        DecodePlan(Models(stored.config.target), "ar", 1, sample=True),
        stops=stored.config.stop_token_ids,
        new_tokens=arguments.new_tokens,
        dtype=dtype,
    )
    deadline, batches = common.deadline(arguments.seconds), arguments.rows // arguments.batch
    for number in range(batches):
        part = parts / f"{number:05d}.npz"
        if part.exists():
            continue
        if deadline is not None and time.monotonic() > deadline:
            return False
        rows = slice(number * arguments.batch, (number + 1) * arguments.batch)
        seeds = np.arange(rows.start, rows.stop, dtype=np.int32) + arguments.rows * arguments.seed
        started = time.monotonic()
        arrays = sample(prompts=Prompts(prompts.tokens[rows], prompts.lengths[rows]), seeds=seeds)
        save_arrays(part, arrays)
        rate = (arrays["lengths"] - arrays["prompt_lengths"]).sum() / (time.monotonic() - started)
        print(f"batch {number + 1}/{batches}  {rate:.3g} tokens/s, compilation included", file=sys.stderr, flush=True)
    loaded = [dict(np.load(parts / f"{number:05d}.npz")) for number in range(batches)]
    save_arrays(arguments.output, {name: np.concatenate([part[name] for part in loaded]) for name in loaded[0]})
    shutil.rmtree(parts)
    return True


def sample_batch(
    params: Params,
    plan: DecodePlan,
    *,
    prompts: Prompts,
    seeds: np.ndarray,
    stops: tuple[int, ...],
    new_tokens: int,
    dtype: jnp.dtype,
) -> dict[str, np.ndarray]:
    """`tokens`, `prompt_lengths` and `lengths` of one batch.

    Args:
        params: {"target": …}.
        plan: `ar`, sampling.
        prompts: right-padded.
        seeds: [batch] of the noise.
        stops: token ids that end a row, and belong to it.
        new_tokens: most new tokens a row.
        dtype: compute dtype.
    """
    batch, longest = prompts.tokens.shape
    state = empty_state(
        plan,
        capacity=longest + new_tokens + 1,
        limit=jnp.full((batch,), new_tokens, jnp.int32),
        temperature=jnp.ones((batch,), jnp.float32),
        seed=jnp.asarray(seeds),
        stop_ids=jnp.asarray(stops, jnp.int32),
        dtype=dtype,
    )
    lengths = jnp.asarray(prompts.lengths)
    valid = jnp.arange(longest) < lengths[:, None]
    state = _prefill(params, state, jnp.asarray(prompts.tokens, jnp.int32), valid)
    state = _first(params, state)
    state, transcript = _rounds(params, state, start_transcript(state, new_tokens), jnp.asarray(new_tokens, jnp.int32))
    emitted = np.asarray(state.emitted)
    tokens = np.zeros((batch, longest + new_tokens), np.uint16)
    new = np.asarray(transcript.tokens)
    for row, length in enumerate(prompts.lengths):
        tokens[row, :length] = prompts.tokens[row, :length]
        tokens[row, length : length + emitted[row]] = new[row, : emitted[row]]
    return {"tokens": tokens, "prompt_lengths": prompts.lengths, "lengths": prompts.lengths + emitted}


_prefill = jax.jit(prefill_piece, donate_argnums=1)
_first = jax.jit(emit_first, donate_argnums=1)
_rounds = jax.jit(run_rounds, donate_argnums=(1, 2))


def _agree(parts: Path, arguments: Arguments, text: str) -> None:
    """Writes what the parts were sampled from, or checks it.

    Raises:
        TfmError: the parts come from another model, text or setting.
    """
    model = sorted(path for path in arguments.model.rglob("*") if path.is_file())
    settings = {key: value for key, value in dataclasses.asdict(arguments).items() if isinstance(value, int)}
    now = {"text": text, "model": hash_files(*model), **settings}
    path = parts / "run.json"
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != now:
            message = f"{parts} was begun with other settings, text or model; remove it or choose another output."
            raise TfmError(message)
        return
    parts.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now), encoding="utf-8")


if __name__ == "__main__":
    common.run_script(main, Arguments)
