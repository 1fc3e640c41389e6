"""`scripts/bench.py trees`: rounds simulated along known texts are the rounds that the engine decodes."""

import sys

import numpy as np
import pytest
from conftest import ROOT
from goldens import loop_engine, prompts

sys.path.insert(0, str(ROOT / "scripts"))

from _bench_trees import Schedule, read_schedule, tree_of
from _draft_simulation import read_positions, simulate

from tfm_jax.errors import TfmError

LOOP, NEW = "loop_qwen3_5", 24


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_simulated_rounds_are_the_engines(temperature: float) -> None:
    """Also where texts end, and with the noise of the right positions: all rounds of all prompts agree."""
    engine, seeds = loop_engine(LOOP), [11, 12, 13, 14]
    options = {"temperature": temperature, "seed": seeds, "max_new_tokens": NEW, "ignore_eos": True}
    decoded = engine.generate(prompts(LOOP), budget=15, **options)
    texts = [generation.token_ids for generation in decoded]
    pool = engine.models.weaver.pool_size
    positions = read_positions(
        engine, prompts(LOOP), texts, temperature=temperature, seeds=seeds, pool=pool, shared_noise=True
    )
    rounds = simulate(engine, positions, tree_of(engine, Schedule(1, 15), 15), depth=15)
    for number, generation in enumerate(decoded):
        assert rounds.committed[rounds.prompt == number].tolist() == [r.committed for r in generation.rounds]
    known = np.array([generation.acceptance_length for generation in decoded])
    np.testing.assert_allclose(rounds.acceptance(len(texts)), known)


def test_schedules_are_read_or_refused() -> None:
    assert read_schedule("4") == Schedule(4, 0)
    assert read_schedule("12x8+spine") == Schedule(8, 12, spine=True)
    assert [read_schedule(text).dependent_steps(63) for text in ("4", "8", "12x8")] == [16, 8, 12]
    for text in ("", "0", "4x", "x4", "4+bone", "1x2x3", "-1"):
        with pytest.raises(TfmError, match="is no schedule"):
            read_schedule(text)
