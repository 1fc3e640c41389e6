"""The whole round against golden loops: trees, paths, states, and what the compiled program may not do."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import LOOP_TARGETS, largest_difference, loop, loop_engine, plain, prompts

import tfm_jax
from tfm_jax.config import METHODS, DecodePlan, Method
from tfm_jax.decode import RoundOutput, bind, speculative_round, verify_and_commit
from tfm_jax.sampling import gumbel_noise
from tfm_jax.state import DecodeState, DeltaState
from tfm_jax.tree import top_candidates

LOOPS = list(LOOP_TARGETS)
MARGIN = 1e-4  # closer scores may be ordered either way
NEW = 48


def golden_modes() -> list[tuple[str, Method, int, str]]:
    """Loop, method, budget and golden mode."""
    return [
        ("loop_qwen3_5", "tfm", 64, "tree64"),
        ("loop_qwen3_5", "tfm", 16, "tree16"),
        ("loop_qwen3_5", "ddtree", 64, "ddtree64"),
        ("loop_qwen3_5", "chain", 63, "dflash"),
        ("loop_qwen3", "tfm", 64, "tree64"),
        ("loop_qwen3", "tfm", 16, "tree16"),
        ("loop_qwen3", "ddtree", 16, "ddtree16"),
        ("loop_qwen3", "chain", 63, "dflash"),
    ]


@pytest.mark.parametrize(("name", "method", "budget", "mode"), golden_modes())
def test_every_round_equals_the_golden_loop(name: str, method: Method, budget: int, mode: str) -> None:
    golden, engine = loop(name), loop_engine(name)
    for prompt in range(3):
        at = f"prompt{prompt}/{mode}"
        ids = golden[f"prompt{prompt}/ids"].tolist()
        options = {"method": method, "budget": budget, "tree": "reference", "max_new_tokens": NEW, "ignore_eos": True}
        first, *rounds = list(engine.stream(ids, **options))
        emitted = list(first.tokens)
        for index, step in enumerate(rounds):
            trace = step.trace
            assert emitted[-1] == golden[f"{at}/root"][index]
            whole = len(emitted) + len(step.tokens) < NEW  # the length limit may cut the last round
            if whole:
                assert trace.bonus == golden[f"{at}/bonus"][index]
                assert step.committed == golden[f"{at}/accepted"][index] + 1
            clear = [
                golden[f"{at}/{margin}"][index]
                for margin in ("tree_margin", "pool_margin")
                if f"{at}/{margin}" in golden
            ]
            if method == "chain" or (clear and min(clear) > MARGIN):
                nodes = golden[f"{at}/tree_token"].shape[1]
                for ours, theirs in (
                    ("tokens", "token"),
                    ("parents", "parent"),
                    ("depths", "depth"),
                    ("valid", "valid"),
                ):
                    assert np.array_equal(getattr(trace, ours)[:nodes], golden[f"{at}/tree_{theirs}"][index])
            if whole and method == "tfm" and min(clear) > MARGIN:
                path = golden[f"{at}/path"][index]
                assert trace.path.tolist() == path[path >= 0].tolist()
            emitted += step.tokens
        assert emitted == golden[f"prompt{prompt}/greedy_ids"][len(ids) :].tolist()
        assert len(rounds) == len(golden[f"{at}/root"])


@pytest.mark.parametrize("name", LOOPS)
def test_inner_quantities_of_the_first_rounds(name: str) -> None:
    """Drafter, pool, feature and node logits in isolation, before any accumulated difference."""
    golden, engine = loop(name), loop_engine(name)
    mode, budget = ("tree64", 64) if name == "loop_qwen3_5" else ("tree16", 16)

    inspect = jax.jit(functools.partial(draft, engine))
    for prompt in range(3):
        at = f"prompt{prompt}/{mode}"
        state = engine.prefill([golden[f"prompt{prompt}/ids"].tolist()], budget=budget, max_new_tokens=NEW)
        for index in range(3):
            assert largest_difference(state.feature[0], golden[f"{at}/f"][index]) < 2e-4
            hidden, logits = inspect(engine.params, state)
            assert largest_difference(hidden[0], golden[f"{at}/z"][index]) < 2e-4
            pool = golden[f"{at}/cand_scores"].shape[-1]
            scores = np.sort(np.asarray(logits[0]), axis=-1)[:, ::-1][:, :pool]
            assert largest_difference(scores, golden[f"{at}/cand_scores"][index]) < 2e-4
            state, output = engine.round(state)
            assert int(output.count[0]) == golden[f"{at}/accepted"][index] + 1


def test_state_after_a_golden_round() -> None:
    golden, engine = loop("loop_qwen3_5"), loop_engine("loop_qwen3_5")
    for prompt in range(3):
        at = f"prompt{prompt}/tree64"
        state = engine.prefill([golden[f"prompt{prompt}/ids"].tolist()], budget=64, max_new_tokens=NEW)
        for _ in range(int(golden[f"{at}/state_round"]) + 1):
            state, _ = engine.round(state)
        assert state.target.lengths.tolist() == [len(golden[f"{at}/state_ids"])]
        stored = sorted({key.split("/")[3] for key in golden if key.startswith(f"{at}/state_after_round/")})
        assert len(stored) > 1
        for layer in stored:
            where, ours = f"{at}/state_after_round/{layer}", state.target.layers[int(layer.removeprefix("layer"))]
            assert largest_difference(ours.recurrent[0], golden[f"{where}/recurrent"]) < 1e-4
            assert largest_difference(ours.conv[0].T, golden[f"{where}/conv"]) < 1e-4


@pytest.mark.parametrize("name", LOOPS)
def test_weavers_own_chain_equals_the_golden_loop(name: str) -> None:
    """The builder with one child a node and one node a step, given to the same verification."""
    golden, engine = loop(name), loop_engine(name)
    depth = engine.models.drafter.depth

    @jax.jit
    def advance(params: dict, state: DecodeState) -> tuple[DecodeState, RoundOutput]:
        modules = bind(engine.models, params)
        hidden, logits = draft(engine, params, state)
        candidates = top_candidates(logits, modules.weaver.config.pool_size)
        tree = modules.weaver.build_tree(
            state.root, state.feature, hidden, candidates.ids, candidates.scores, params["tables"],
            budget=depth, width=1, expand=1,
        )  # fmt: skip
        return verify_and_commit(modules, state, tree)

    for prompt in range(3):
        at = f"prompt{prompt}/chain"
        state = engine.prefill([golden[f"prompt{prompt}/ids"].tolist()], max_new_tokens=NEW + depth, ignore_eos=True)
        for index, accepted in enumerate(golden[f"{at}/accepted"]):
            state, output = advance(engine.params, state)
            assert output.tree.tokens[0].tolist() == golden[f"{at}/tree_token"][index].tolist()
            assert (int(output.accepted[0]), int(output.bonus[0])) == (accepted, golden[f"{at}/bonus"][index])


def draft(engine: tfm_jax.Engine, params: dict, state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """The drafter's outputs for slots 1 … and their logits, inside a jitted function."""
    modules, config = bind(engine.models, params), engine.models.drafter
    masks = jnp.full((state.root.shape[0], config.depth), config.mask_token_id, jnp.int32)
    block = modules.target.embed(jnp.concatenate([state.root[:, None], masks], axis=1))
    hidden = modules.drafter.draft(block, state.target.lengths, state.drafter)[:, 1:]
    return hidden, modules.target.logits(hidden)


@pytest.mark.parametrize("name", LOOPS)
def test_committed_state_is_that_of_plain_decoding(name: str) -> None:
    """After every round all caches hold what one-token steps over the same tokens leave."""
    engine = loop_engine(name)
    options = {"max_new_tokens": 60, "ignore_eos": True, "context": 256}
    prompt = prompts(name)[1]
    state, slow = engine.prefill([prompt], **options), engine.prefill([prompt], method="ar", **options)
    accepted = set()
    for _ in range(12):
        if bool(state.done[0]):
            break
        state, output = engine.round(state)
        accepted.add(int(output.count[0]))
        while int(slow.target.lengths[0]) < int(state.target.lengths[0]):
            slow, _ = engine.round(slow)
        assert int(slow.root[0]) == int(state.root[0])
        check_same_caches(state, slow, 1e-4)
    assert len(accepted) > 2


def check_same_caches(one: DecodeState, other: DecodeState, gate: float) -> None:
    """Target caches agree row for row up to the committed length."""
    length = int(one.target.lengths[0])
    assert length == int(other.target.lengths[0])
    for a, b in zip(one.target.layers, other.target.layers, strict=True):
        if isinstance(a, DeltaState):
            assert largest_difference(a.recurrent, np.asarray(b.recurrent)) < gate
            assert largest_difference(a.conv, np.asarray(b.conv)) < gate
        else:
            assert largest_difference(a.keys[:, :, :length], np.asarray(b.keys[:, :, :length])) < gate
            assert largest_difference(a.values[:, :, :length], np.asarray(b.values[:, :, :length])) < gate


def test_finished_rows_stay_as_they_are() -> None:
    engine, text = loop_engine("loop_qwen3_5"), plain("loop_qwen3_5")
    stop = next(token for token in text[0][2:] if token not in text[1])
    state = engine.prefill(prompts("loop_qwen3_5")[:2], max_new_tokens=24, stop_token_ids=[stop])
    while not bool(state.done[0]):
        state, _ = engine.round(state)
    row = jax.tree.map(lambda x: np.asarray(x[0]).tobytes(), (state.target, state.drafter, state.root, state.feature))
    for _ in range(3):
        state, output = engine.round(state)
        assert int(output.count[0]) == 0
    after = jax.tree.map(lambda x: np.asarray(x[0]).tobytes(), (state.target, state.drafter, state.root, state.feature))
    assert jax.tree.leaves(row) == jax.tree.leaves(after)
    assert int(state.emitted[1]) > 3


def compiled_round(engine: tfm_jax.Engine, method: Method, capacity: int) -> jax.stages.Compiled:
    """The round, compiled for caches of some capacity, state donated."""
    state = engine.prefill([[1]], method=method, max_new_tokens=8, context=256, ignore_eos=True)

    def grow(path: tuple, x: jax.Array) -> jax.ShapeDtypeStruct:
        cache = any(getattr(key, "name", "") in {"keys", "values"} for key in path)
        shape = (*x.shape[:2], capacity, x.shape[3]) if cache else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    grown = jax.tree_util.tree_map_with_path(grow, state)
    return jax.jit(speculative_round, donate_argnums=1).lower(engine.params, grown).compile()


@pytest.mark.parametrize("method", ["tfm", "ar"])
def test_compiled_round_copies_no_cache(method: Method) -> None:
    engine = loop_engine("loop_qwen3_5")
    small, large = (compiled_round(engine, method, capacity) for capacity in (2048, 16384))
    assert large.memory_analysis().temp_size_in_bytes <= 1.1 * small.memory_analysis().temp_size_in_bytes
    copies = re.findall(r"\[[0-9,]*\b16384\b[0-9,]*\][^ ]* copy\(", large.as_text())
    assert copies == []


def test_rounds_run_inside_a_users_own_loop() -> None:
    engine = loop_engine("loop_qwen3_5")
    state = engine.prefill([prompts("loop_qwen3_5")[0]], max_new_tokens=24, ignore_eos=True)

    @jax.jit
    def finish(params: dict, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        def body(carry: tuple) -> tuple:
            state, rounds = carry
            return tfm_jax.speculative_round(params, state)[0], rounds + 1

        return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, (state, jnp.zeros((), jnp.int32)))

    state, rounds = finish(engine.params, state)
    expected = engine.generate([prompts("loop_qwen3_5")[0]], max_new_tokens=24, ignore_eos=True)[0]
    assert (int(rounds), int(state.root[0])) == (len(expected.rounds), expected.token_ids[-1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "magic"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": 256}, "budget is 256"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 600}, "603 positions"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"context": 16}, "context is 16"),
        ({"seed": [1, 2]}, "seed has 2 values for 1 prompts"),
    ],
)
def test_bad_options_are_refused(options: dict, words: str) -> None:
    engine = loop_engine("loop_qwen3_5")
    with pytest.raises(tfm_jax.TfmError, match=re.escape(words)):
        engine.generate([[1, 2, 3]], **options)


def test_bad_prompts_are_refused() -> None:
    engine = loop_engine("loop_qwen3_5")
    for batch, words in (([], "no prompt"), ([[]], "empty"), ([[1], [512]], "512"), ([[-1]], "-1")):
        with pytest.raises(tfm_jax.TfmError, match=words):
            engine.generate(batch)


def test_plan_depths() -> None:
    """A small budget shortens what is verified, but the Weaver still reads every slot of the drafter's block."""
    models = loop_engine("loop_qwen3_5").models
    depths = {method: DecodePlan(models, method, 5, sample=False).depth for method in METHODS}
    assert depths == {"tfm": 15, "ddtree": 5, "chain": 5, "ar": 0}


def test_margin_is_that_of_the_draw() -> None:
    """Logits plus noise: the chosen token is the best, and the margin its lead over the second."""
    engine, prompt, drawn = loop_engine("loop_qwen3_5"), prompts("loop_qwen3_5")[0], {"temperature": 1.3, "seed": 5}
    text = engine.generate([prompt], method="ar", max_new_tokens=4, ignore_eos=True, **drawn)[0].token_ids
    for index in (0, 3):
        context = [*prompt, *text[:index]]
        logits = engine.next_logits(context)
        noise = gumbel_noise(jnp.array([5]), jnp.array([[len(context) - 1]]), len(logits))
        field = logits + 1.3 * np.asarray(noise)[0, 0]
        assert int(np.argmax(field)) == text[index]
        lead = field[text[index]] - np.delete(field, text[index]).max()
        assert engine.top2_margin(prompt, text, index, **drawn) == pytest.approx(lead, rel=1e-5)
