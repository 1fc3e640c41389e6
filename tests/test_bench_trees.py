"""`scripts/bench.py trees` and `budgets`: simulated rounds are the engine's, and sums counted by hand."""

import sys

import numpy as np
import pytest
from conftest import ROOT
from goldens import loop_engine, prompts

sys.path.insert(0, str(ROOT / "scripts"))

from _bench_budgets import Outcome, Record, judge, make_row
from _bench_trees import Schedule, read_schedule, tree_of
from _draft_simulation import read_positions, simulate

from tfm_jax.budget import Costs
from tfm_jax.errors import TfmError

LOOP, NEW = "loop_qwen3_5", 24


@pytest.mark.slow
def test_simulated_rounds_are_the_engines() -> None:
    """Also where texts end, and with the noise of the right positions: all rounds of all prompts agree."""
    engine, seeds, temperature = loop_engine(LOOP), [11, 12, 13, 14], 1.0
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


def test_fixed_and_chosen_budgets_on_rounds_counted_by_hand() -> None:
    """Slots 2 and 9 are accepted in round 1, slot 1 in round 2, where one token is wanted; 10 nodes cost twice 3."""
    scores = np.full((2, 11), -np.inf, np.float32)
    scores[0, [0, 1, 2, 9]] = [0, -9, 0, 0]  # promises 2 tokens in slots 2 and 9: 1 with 3 nodes, 2 with 10
    scores[1, [0, 1, 9]] = [0, 0, -9]
    path = np.array([[0, 2, 9, -1], [0, 1, -1, -1]])
    record = Record(np.array([0, 0]), path, scores, np.array([10, 1]), {"val": np.array([0])})
    outcome = judge(record, Costs((1, 3, 10), (1.0, 1.5, 3.0), "tfm", "cpu", "float32", 8))
    # Round 1: rate 1, so 3 nodes (1 + 1 - 1.5) beat 1 (0 + 1 - 1) and 10 (2 + 1 - 3): two tokens.
    # Round 2: rate 3 / 2.5, promised 1 with every budget: the cheapest.
    np.testing.assert_allclose(outcome.tokens, [[1 + 1, 2 + 1, 3 + 1, 2 + 1]])
    np.testing.assert_allclose(outcome.seconds, [[2.0, 3.0, 6.0, 2.5]])


def test_gain_is_the_ratio_of_sums_over_the_best_budget() -> None:
    tokens = np.array([[2.0, 4.0, 5.0]] * 3)
    seconds = np.array([[1.0, 2.5, 2.5]] * 3)
    costs = Costs((1, 3), (1.0, 2.5), "tfm", "cpu", "float32", 8)
    row = make_row("val", Outcome(tokens, seconds), np.arange(3), costs, seed=0)
    assert (row["best_fixed"], row["fixed"], row["chosen"]) == (1, {"1": 2.0, "3": 1.6}, 2.0)
    assert (row["gain"], row["ci95"]) == (0, [0, 0])


def test_schedules_are_read_or_refused() -> None:
    assert read_schedule("4") == Schedule(4, 0)
    assert read_schedule("12x8+spine") == Schedule(8, 12, spine=True)
    assert read_schedule("9x4a1") == Schedule(4, 9, ahead=1)
    assert [read_schedule(text).dependent_steps(63) for text in ("4", "8", "12x8")] == [16, 8, 12]
    assert [read_schedule(text).expanded(63) for text in ("4", "12x8", "9x4a1")] == [61, 89, 72]
    for text in ("", "0", "4x", "x4", "4+bone", "1x2x3", "-1", "4a1", "9x4a0", "9x4a1+spine"):
        with pytest.raises(TfmError, match="is no schedule"):
            read_schedule(text)
