"""Losslessness: whatever is drafted, the text is the target's own, token for token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import SEEDS, TEMPERATURES, changed, loop_engine, plain, prompts
from tiny_model import optimised

from tfm_jax.config import METHODS, Method
from tfm_jax.decode import run_rounds, start_transcript
from tfm_jax.state import DeltaState

LOOPS = ["loop_qwen3_5", "loop_qwen3"]
BUDGETS = {"loop_qwen3_5": [1, 7, 15, 63, 64, 127], "loop_qwen3": [15]}
CASES = [
    pytest.param(name, budget, marks=[] if budget == 7 else pytest.mark.slow)
    for name in LOOPS
    for budget in BUDGETS[name]
]


@pytest.mark.parametrize(("name", "budget"), CASES)
@pytest.mark.parametrize("method", ["tfm", "ddtree", "chain"])
def test_text_is_the_targets_own_at_every_budget(name: str, method: Method, budget: int) -> None:
    """Greedy and sampled rows of ragged prompts: neither method nor budget nor batch changes a token."""
    options = {"temperature": TEMPERATURES, "seed": SEEDS, "max_new_tokens": 24, "ignore_eos": True}
    batch = loop_engine(name).generate([*prompts(name), *prompts(name)], method=method, budget=budget, **options)
    assert [generation.token_ids for generation in batch] == plain(name)
    assert all(stats.nodes <= budget for generation in batch for stats in generation.rounds)
    assert any(stats.committed > 1 for generation in batch for stats in generation.rounds)


DRIVEN = [("loop_qwen3_5", "tfm")] + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in [*(("loop_qwen3_5", method) for method in METHODS if method != "tfm"), ("loop_qwen3", "tfm")]
]


@pytest.mark.parametrize(("name", "method"), DRIVEN)
def test_batch_and_driver_change_nothing(name: str, method: Method) -> None:
    engine, options = loop_engine(name), {"method": method, "budget": 64, "max_new_tokens": 24, "ignore_eos": True}
    together = engine.generate(prompts(name), **options)
    for row in (1, 2):
        alone = engine.generate([prompts(name)[row]], **options)[0]
        assert alone.token_ids == together[row].token_ids == plain(name)[row]
        assert alone.rounds == together[row].rounds
        first, *rounds = engine.stream(prompts(name)[row], **options)
        assert first.tokens + [token for step in rounds for token in step.tokens] == alone.token_ids
        assert [(step.nodes, step.committed) for step in rounds] == [(s.nodes, s.committed) for s in alone.rounds]


def test_sampled_text_depends_on_seed_and_temperature() -> None:
    engine, options = loop_engine("loop_qwen3_5"), {"method": "ar", "max_new_tokens": 24, "ignore_eos": True}
    keys = [(seed, temperature) for seed in (0, 1) for temperature in (0.0, 1.0, 3.0)]
    seeds, temperatures = zip(*keys, strict=True)
    batch = engine.generate([prompts("loop_qwen3_5")[1]] * 6, seed=seeds, temperature=temperatures, **options)
    texts = {key: tuple(generation.token_ids) for key, generation in zip(keys, batch, strict=True)}
    assert texts[0, 0.0] == texts[1, 0.0]
    assert len(set(texts.values())) == len(texts) - 1


def test_two_drafts_equal_one_text() -> None:
    """A worse drafter costs rounds, never tokens: here its weights are noise."""
    engine = loop_engine("loop_qwen3_5")
    rng = np.random.default_rng(0)
    drafter = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), engine.params["drafter"])
    noisy = changed(engine, params=engine.params | {"drafter": drafter})
    options = {"budget": 15, "max_new_tokens": 24, "ignore_eos": True}
    prompt = prompts("loop_qwen3_5")[0]
    good, bad = engine.generate([prompt], **options)[0], noisy.generate([prompt], **options)[0]
    assert good.token_ids == bad.token_ids == plain("loop_qwen3_5")[0]
    assert len(bad.rounds) > len(good.rounds)


@pytest.mark.slow
def test_state_does_not_drift_over_2000_tokens() -> None:
    engine = loop_engine("loop_qwen3_5")
    options = {"max_new_tokens": 2000, "ignore_eos": True}
    models = dataclasses.replace(engine.models, target=dataclasses.replace(engine.models.target, max_positions=4096))
    long = changed(engine, models=models)
    ends = []
    for method in ("tfm", "ar"):
        state = long.prefill([prompts("loop_qwen3_5")[1]], method=method, budget=15, **options)
        transcript = start_transcript(state, 2000)
        run = optimised(run_rounds, donate_argnums=(1, 2))
        state, transcript = run(long.params, state, transcript, jnp.asarray(2000, jnp.int32))
        ends.append((state, np.asarray(transcript.tokens)))
    (tree, tree_tokens), (slow, slow_tokens) = ends
    assert np.array_equal(tree_tokens, slow_tokens)
    for a, b in zip(tree.target.layers, slow.target.layers, strict=True):
        if isinstance(a, DeltaState):
            error = np.linalg.norm(np.asarray(a.recurrent - b.recurrent)) / np.linalg.norm(np.asarray(b.recurrent))
            assert error < 1e-5


def test_stops_inside_a_tree_end_the_text() -> None:
    engine, name = loop_engine("loop_qwen3_5"), "loop_qwen3_5"
    text = plain(name)[0]
    for position in (0, 5, 17):
        stop = text[position]
        expected = text[: text.index(stop) + 1]
        for method in METHODS:
            options = {"method": method, "budget": 15, "max_new_tokens": 24, "stop_token_ids": [stop, 509]}
            result = engine.generate([prompts("loop_qwen3_5")[0]], **options)[0]
            assert (result.token_ids, result.finish_reason) == (expected, "stop")
            assert 1 + sum(stats.committed for stats in result.rounds) == len(expected)


def test_length_limit_inside_a_tree() -> None:
    engine, text = loop_engine("loop_qwen3_5"), plain("loop_qwen3_5")[0]
    for limit in (1, 2, 9, 21):
        result = engine.generate([prompts("loop_qwen3_5")[0]], budget=15, max_new_tokens=limit, ignore_eos=True)[0]
        assert (result.token_ids, result.finish_reason) == (text[:limit], "length")


def test_mask_token_may_be_generated() -> None:
    """The drafter's mask id is an ordinary token of the target."""
    engine = loop_engine("loop_qwen3_5")
    mask = engine.models.drafter.mask_token_id
    embedding = engine.params["target"]["lm_head"]["kernel"]
    text = plain("loop_qwen3_5")[0]
    column = embedding[:, text[3]]
    kernel = embedding.at[:, mask].set(column * 1.001)  # wins wherever text[3] would
    target = engine.params["target"] | {"lm_head": {"kernel": kernel}}
    forced = changed(engine, params=engine.params | {"target": target})
    prompt, options = prompts("loop_qwen3_5")[0], {"budget": 15, "max_new_tokens": 24, "ignore_eos": True}
    results = [forced.generate([prompt], method=method, **options)[0].token_ids for method in METHODS]
    assert mask in results[0]
    assert all(result == results[0] for result in results)
