"""`scripts/bench.py trees` and `budgets`: simulated rounds are the engine's, and sums counted by hand."""

import sys

import numpy as np
import pytest
from conftest import ROOT
from goldens import loop_engine, prompts

sys.path.insert(0, str(ROOT / "scripts"))

from _bench_budgets import Outcome, judge, large_sets, make_row, walk_chosen
from _bench_trees import Schedule, read_schedule, tree_of
from _draft_simulation import Chart, Positions, chart_rounds, read_positions, simulate

from tfm_jax.budget import Costs
from tfm_jax.errors import TfmError

LOOP, NEW, SEEDS = "loop_qwen3_5", 24, [11, 12, 13, 14]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """What the golden loop's target writes at temperature 1."""
    decoded = loop_engine(LOOP).generate(prompts(LOOP), budget=15, **options(SEEDS))
    return [generation.token_ids for generation in decoded]


@pytest.fixture(scope="module")
def positions(texts: list[list[int]]) -> Positions:
    engine = loop_engine(LOOP)
    drafts = {"temperature": 1.0, "seeds": SEEDS, "pool": engine.models.weaver.pool_size, "shared_noise": True}
    return read_positions(engine, prompts(LOOP), texts, **drafts)


def options(seeds: list[int]) -> dict[str, object]:
    return {"temperature": 1.0, "seed": seeds, "max_new_tokens": NEW, "ignore_eos": True}


@pytest.mark.slow
def test_simulated_rounds_are_the_engines(positions: Positions) -> None:
    """Also where texts end, and with the noise of the right positions: all rounds of all prompts agree."""
    engine = loop_engine(LOOP)
    decoded = engine.generate(prompts(LOOP), budget=15, **options(SEEDS))
    rounds = simulate(engine, positions, tree_of(engine, Schedule(4, 8, ahead=1), 15), depth=15)
    for number, generation in enumerate(decoded):
        assert rounds.committed[rounds.prompt == number].tolist() == [r.committed for r in generation.rounds]
    known = np.array([generation.acceptance_length for generation in decoded])
    np.testing.assert_allclose(rounds.acceptance(len(decoded)), known)


@pytest.mark.slow
def test_chosen_rounds_are_the_engines(positions: Positions) -> None:
    """Budget and tokens of every round, and the same number of rounds for every fixed budget."""
    engine = loop_engine(LOOP)
    costs = Costs((3, 7, 15), (1.0, 1.1, 1.25), 0.02, (0.7, 0.9, 1.2), "tfm", "cpu", "float32", 8)
    chart = chart_rounds(engine, positions, costs.budgets, depth=15)
    outcome = judge(chart, costs)
    walks = walk_chosen(chart, costs)
    for number, (prompt, seed) in enumerate(zip(prompts(LOOP), SEEDS, strict=True)):
        (decoded,) = engine.generate([prompt], budget="auto", costs=costs, **options([seed]))
        mine = [step for step in walks if step.live[number]]
        assert [int(costs.budgets[step.choice[number]]) for step in mine] == [r.nodes for r in decoded.rounds]
        assert [int(step.emitted[number]) for step in mine] == [r.committed for r in decoded.rounds]
    steps = np.concatenate([step.steps[step.live] for step in walks])
    assert set(steps.tolist()) == {2, 3, 4}
    assert outcome.steps.sum() == steps.sum()
    for column, budget in enumerate(costs.budgets):
        decoded = engine.generate(prompts(LOOP), budget=budget, **options(SEEDS))
        assert outcome.rounds[:, column].tolist() == [len(generation.rounds) for generation in decoded]


def test_fixed_and_chosen_budgets_on_rounds_counted_by_hand() -> None:
    """A text of 4 tokens after the first."""
    shape = (1, 5, 2)
    waiting = np.zeros(shape[:2], np.float32)
    waiting[0, :3] = [4.6, 0, 1.1]  # of the first round at place 0, and of the second at place 2
    promised = np.zeros((*shape, 2), np.float32)
    promised[0, :3] = [[[0.1, 0.1], [0.1, 1.7]], [[0, 0], [0, 0]], [[0.1, 1.2], [0.1, 1.2]]]
    emitted = np.ones((*shape, 2), np.uint8)
    emitted[0, 0, 1] = [1, 2]
    emitted[0, 2, 0] = [1, 9]  # two more are wanted
    fixed = np.ones((1, 5, 2), np.uint8)
    fixed[0, ::2, 1] = 2
    chart = Chart(np.array([5]), np.array([1, 2]), waiting, promised, emitted, fixed)
    outcome = judge(chart, Costs((1, 3), (1.0, 1.5), 0.25, (0.5, 0.75), "tfm", "cpu", "float32", 8))
    # Round 1, rate 3 / 1: a step more (0.5 x 4.6 > 3 x 0.75), then 3 nodes (1.7 - 4.5 > 0.1 - 3): 2 tokens in 1.5 s.
    # Round 2, rate 5 / 2.5, trust 11 / 11.7: no step more (0.5 x 0.94 x 1.1 < 2 x 0.75), 3 nodes (1.13 - 3 > 0.09 - 2).
    np.testing.assert_allclose(outcome.tokens, [[4, 4, 4]])
    np.testing.assert_allclose(outcome.seconds, [[4 * 0.5, 2 * 0.75, 2.75]])


def test_gain_is_the_ratio_of_sums_over_the_best_budget() -> None:
    tokens, rounds = np.array([[4.0, 4.0, 4.0]] * 3), np.array([[4, 2, 2]] * 3)
    seconds = np.array([[2.0, 2.5, 2.0]] * 3)
    costs = Costs((1, 3), (0.5, 1.2), 0.0, (0.5, 1.25), "tfm", "cpu", "float32", 8)
    row = make_row("val", Outcome(tokens, seconds, rounds, np.array([6, 8, 10])), np.arange(3), costs, seed=0)
    assert (row["best_fixed"], row["fixed"], row["chosen"]) == (1, {"1": 2.0, "3": 1.6}, 2.0)
    assert (row["gain"], row["ci95"]) == (0, [0, 0])
    assert (row["tokens_per_round"], row["steps_per_round"]) == ({"best_fixed": 1.0, "chosen": 2.0}, 4.0)


def test_small_sets_are_taken_together() -> None:
    sets = {"val": np.arange(4), "a": np.array([4, 5]), "b": np.array([6]), "all": np.arange(7)}
    assert {name: members.tolist() for name, members in large_sets(sets, 3).items()} == {
        "val": [0, 1, 2, 3], "all": [0, 1, 2, 3, 4, 5, 6], "a + b": [4, 5, 6],
    }  # fmt: skip
    assert list(large_sets(sets, 4)) == ["val", "all"]


def test_schedules_are_read_or_refused() -> None:
    assert read_schedule("4") == Schedule(4, 0)
    assert read_schedule("12x8+spine") == Schedule(8, 12, spine=True)
    assert read_schedule("9x4a1") == Schedule(4, 9, ahead=1)
    assert [read_schedule(text).dependent_steps(63) for text in ("4", "8", "12x8")] == [16, 8, 12]
    assert [read_schedule(text).expanded(63) for text in ("4", "12x8", "9x4a1")] == [61, 89, 72]
    for text in ("", "0", "4x", "x4", "4+bone", "1x2x3", "-1", "4a1", "9x4a0", "9x4a1+spine"):
        with pytest.raises(TfmError, match="is no schedule"):
            read_schedule(text)
