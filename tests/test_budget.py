"""Budgets chosen round by round: the rule, its table, and that the text stays the target's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from goldens import SEEDS, TEMPERATURES, loop_engine, plain, prompts
from test_tree import VOCAB

from tfm_jax.budget import (
    Costs,
    choose_budget,
    choose_steps,
    promised_tokens,
    read_costs,
    round_seconds,
    start_ledger,
    write_costs,
)
from tfm_jax.calibration import measure_costs
from tfm_jax.errors import TfmError
from tfm_jax.state import Ledger
from tfm_jax.tree import DraftTree, first_nodes
from tfm_jax.verifiers import Noise, target_only

LOOP = "loop_qwen3_5"
COSTS = Costs((3, 15), (1.0, 1.3), 0.01, (0.9, 1.2), "tfm", "cpu", "float32", 64)


def test_promised_tokens_are_the_mean_of_what_is_accepted() -> None:
    """A tree whose scores are the target's own log-probabilities: the mean over many coins is their promise."""
    # root -> 0 (.5), 1 (.3); 0 -> 2 (.8); 1 -> 2 (.25)
    parents, tokens = [-1, 0, 0, 1, 2], [6, 0, 1, 2, 2]
    edges = np.log([1.0, 0.5, 0.3, 0.8, 0.25])
    scores = np.array([0, edges[1], edges[2], edges[1] + edges[3], edges[2] + edges[4]], np.float32)
    ancestors = np.eye(5, dtype=bool)
    for node, parent in enumerate(parents):
        ancestors[node] |= ancestors[parent] if parent >= 0 else False
    rows = np.full((5, VOCAB), 0.0)
    rows[:, 5] = 1.0
    rows[0] = [0.5, 0.3, 0, 0, 0, 0.2, 0]
    rows[1] = [0, 0, 0.8, 0, 0, 0.2, 0]
    rows[2] = [0, 0, 0.25, 0, 0, 0.75, 0]
    coins = np.stack(np.meshgrid((np.arange(20) + 0.5) / 20, (np.arange(20) + 0.5) / 20), -1).reshape(-1, 2)
    batch = len(coins)
    uniforms = np.full((batch, 5), 0.5)
    uniforms[:, 0], uniforms[:, 1], uniforms[:, 2] = coins[:, 0], coins[:, 1], coins[:, 1]

    def repeat(x: list[int] | np.ndarray) -> jnp.ndarray:
        return jnp.broadcast_to(jnp.asarray(x), (batch, *np.shape(x)))

    tree = DraftTree(
        repeat(np.int32(tokens)), repeat(np.int32(parents)), repeat(np.int32([0, 1, 1, 2, 2])),
        repeat(np.ones(5, bool)), repeat(scores), repeat(ancestors),
    )  # fmt: skip
    promised = promised_tokens(tree.scores[:1], (2, 3, 4))[0]
    np.testing.assert_allclose(promised, [0.8, 1.2, 1.275], atol=1e-6)
    for budget, expected in zip((2, 3, 4), promised, strict=True):
        noise = Noise(jnp.zeros((batch, budget + 1)), jnp.asarray(uniforms[:, : budget + 1]))
        verdict = target_only(first_nodes(tree, budget), repeat(rows)[:, : budget + 1], noise, max_depth=2)
        np.testing.assert_allclose(np.mean(np.asarray(verdict.count) - 1), expected, atol=1e-6)


def test_rule_maximises_tokens_less_their_price() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        costs = np.sort(rng.uniform(1, 3, 4)).astype(np.float32)
        promised = np.sort(rng.uniform(0, 4, 4)).astype(np.float32)
        spent, hoped, kept = rng.uniform(0, 50, 3).astype(np.float32)
        emitted = rng.integers(1, 100, 2)
        choice = choose_budget(
            jnp.asarray(promised),
            jnp.int32(1),
            jnp.asarray(emitted, jnp.int32),
            Ledger(jnp.asarray(costs), *map(jnp.float32, (0, 0, spent, hoped, kept))),
        )
        gains = (kept + 10) / (hoped + 10) * promised - (emitted.sum() + 4) / (spent + costs[0]) * costs
        assert int(choice) == int(np.argmax(gains))
        seen.add(int(choice))
    assert seen == {0, 1, 2, 3}


def test_first_round_takes_three_tokens_from_the_cheapest_round_as_the_price() -> None:
    """Three tokens in one second: 4 nodes more for 0.1 s have to promise more than 0.3 tokens."""
    ledger = start_ledger(jnp.array([1.0, 1.1]))
    for more, expected in ((0.29, 0), (0.31, 1)):
        promised = jnp.array([0.5, 0.5 + more])
        assert int(choose_budget(promised, jnp.int32(1), jnp.array([1]), ledger)) == expected


def test_steps_are_made_while_their_promise_is_worth_their_time() -> None:
    """20 tokens in 4 s, 0.06 s a step, 0.02 s a node: a step, with the two nodes that follow, must bring half a token.

    Of 0.5 h tokens the next step brings all, the one after it 0.65, those after that 0.65² and so on; half of that
    where half of what was promised came.
    """
    past = Ledger(jnp.array([1.0, 2.0]), *map(jnp.float32, (0.06, 0.02, 3.0, 20.0, 20.0)))
    doubtful = past._replace(accepted=jnp.float32(5))  # of 20 promised: (5 + 10) / (20 + 10) of a promise counts
    tokens, stops = jnp.array([9, 7]), (2, 3, 5)  # 16 so far, and 2 more a row for the round that the prompts were
    first = 0.5 / 0.5  # hits at which the third step is worth its time
    later = 1.0 / (0.5 * (0.65 + 0.65**2))  # at which the next two are as well
    for ledger, scale in ((past, 1), (doubtful, 2)):
        hits = [first * scale - 0.01, first * scale + 0.01, later * scale - 0.01, later * scale + 0.01]
        assert [int(choose_steps(jnp.float32(h), stops, tokens, ledger)) for h in hits] == [0, 1, 1, 2]
    assert round_seconds(jnp.int32(1), jnp.int32(3), past) == pytest.approx(1.82)


def test_budgets_that_are_hardly_faster_are_no_choices() -> None:
    """From the largest down: 63 takes 1.052 times as long as 31, that 1.055 times as long as 15, that 1.01 times 7."""
    costs = Costs((7, 15, 31, 63), (0.90, 0.91, 0.96, 1.01), 0.01, (1.0,) * 4, "tfm", "cpu", "float32", 8)
    assert (costs.choices, costs.choice_seconds) == ((15, 31, 63), (0.91, 0.96, 1.01))
    level = dataclasses.replace(costs, seconds=(1.0, 1.01, 0.98, 1.01))
    assert (level.choices, level.choice_seconds) == ((63,), (1.01,))


@pytest.mark.slow
def test_a_level_table_leaves_the_largest_budget() -> None:
    engine, costs = loop_engine(LOOP), dataclasses.replace(COSTS, seconds=(1.0, 1.0))
    options = {"budget": "auto", "costs": costs, "max_new_tokens": 8, "ignore_eos": True}
    (generation,) = engine.generate(prompts(LOOP)[:1], **options)
    assert generation.token_ids == plain(LOOP)[0][:8]
    assert {stats.nodes for stats in generation.rounds} == {15}


@pytest.mark.slow
def test_text_of_a_batch_is_the_targets_own_and_budgets_differ() -> None:
    engine = loop_engine(LOOP)
    options = {"budget": "auto", "costs": COSTS, "max_new_tokens": 24, "ignore_eos": True}
    sampled = {"temperature": TEMPERATURES, "seed": SEEDS}
    batch = engine.generate([*prompts(LOOP), *prompts(LOOP)], **options, **sampled)
    assert [generation.token_ids for generation in batch] == plain(LOOP)
    nodes = {stats.nodes for generation in batch for stats in generation.rounds}
    assert nodes == set(COSTS.budgets)


@pytest.mark.slow
def test_streamed_rounds_choose_too() -> None:
    engine, costs = loop_engine(LOOP), Costs((3, 15), (1.0, 1.12), 0.0, (1.0, 1.12), "ddtree", "cpu", "float32", 64)
    options = {"method": "ddtree", "budget": "auto", "costs": costs, "max_new_tokens": 24, "ignore_eos": True}
    rounds = list(engine.stream(prompts(LOOP)[0], **options))
    assert [token for step in rounds for token in step.tokens] == plain(LOOP)[0]
    assert {step.nodes for step in rounds[1:]} == {3, 15}


def law_of(*, sees_coin: bool) -> float:
    """Probability that token 0 is emitted: p = (1/2, 1/2), one child with token 0 that a rule may drop."""
    small = DraftTree(*(jnp.asarray(x)[None] for x in ([7], [-1], [0], [True], [0.0], [[True]])))
    tree = DraftTree(
        *(jnp.asarray(x)[None] for x in ([7, 0], [-1, 0], [0, 1], [True] * 2, [0.0, -0.7], [[True, False], [True] * 2]))
    )
    law = []
    for coin in (np.arange(64, dtype=np.float32) + 0.5) / 64:
        chosen = small if sees_coin and coin < 1 / 2 else tree  # drops the child just when it would be accepted
        nodes = chosen.tokens.shape[1]
        noise = Noise(jnp.zeros((1, nodes)), jnp.full((1, nodes), coin))
        verdict = target_only(chosen, jnp.full((1, nodes, 2), 0.5), noise, max_depth=1)
        rest = verdict.rest[0] / verdict.rest[0].sum()
        law.append(1.0 if int(verdict.count[0]) > 1 else float(rest[0]))
    return float(np.mean(law))


def test_a_rule_that_sees_the_draw_breaks_the_law() -> None:
    """Why a choice must not look at the target's coins where these are used up by what it chooses."""
    assert law_of(sees_coin=False) == pytest.approx(0.5, abs=1e-9)
    assert law_of(sees_coin=True) == pytest.approx(0.25, abs=1e-9)


def test_table_survives_the_disk_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS)
    assert read_costs(path) == COSTS
    with pytest.raises(TfmError, match="no cost table at"):
        read_costs(tmp_path / "missing.json")
    values = json.loads(path.read_text())
    for change, words in (
        ({"format": 2}, "another format"),
        ({"budgets": [15, 3]}, "ascending budgets"),
        ({"seconds": [1.0, 0.0]}, "each with its seconds"),
        ({"seconds": [1.0]}, "each with its seconds"),
        ({"fixed_seconds": [1.0]}, "each with its seconds"),
        ({"step_seconds": -1}, "seconds of a step"),
        ({"step_seconds": 0.15}, "seconds of a step"),
        ({"budgets": "many"}, "is no cost table"),
        ({"budgets": [3.5, 15]}, "is no cost table"),
        ({"budgets": [3, float("inf")]}, "is no cost table"),
        ({"seconds": "12"}, "is no cost table"),
        ({"seconds": {"1": 2, "3": 4}}, "is no cost table"),
        ({"seconds": [1.0, float("inf")]}, "is no cost table"),
        ({"seconds": [1.0, 1e300]}, "is no cost table"),
        ({"context": float("inf")}, "is no cost table"),
        ({"context": "64"}, "is no cost table"),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(TfmError, match=words):
            read_costs(path)
    path.write_text("[" * 100_000)
    with pytest.raises(TfmError, match="is no cost table"):
        read_costs(path)
    with pytest.raises(TfmError, match="cannot be written"):
        write_costs(tmp_path / "missing" / "costs.json", COSTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "chain"}, "calibrate tfm or ddtree"),
        ({"budgets": (7,)}, "at least two"),
        ({"rounds": 0}, "rounds 0"),
    ],
)
def test_calibration_names_what_it_cannot_time(options: dict[str, object], words: str) -> None:
    with pytest.raises(TfmError, match=words):
        measure_costs(loop_engine(LOOP), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"costs": COSTS, "method": "chain"}, "choose tfm or ddtree"),
        ({"costs": COSTS, "method": "ddtree"}, "the table of costs is for tfm"),
        ({"costs": Costs((3,), (1.0,), 0.0, (1.0,), "tfm", "gpu X", "float32", 8)}, "holds for gpu X in float32"),
        ({}, "no cost table at"),
    ],
)
def test_budget_auto_names_what_is_missing(options: dict[str, object], words: str) -> None:
    with pytest.raises(TfmError, match=words):
        loop_engine(LOOP).generate([[1]], budget="auto", **options)
