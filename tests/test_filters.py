"""Filters against golden vectors, a sorted oracle and exact cases; penalties against counting by hand."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filter_cases import CASES, FilterCase, filtered_law
from small_trees import draft_tree
from weavers import golden_group, jit_quickly

from tfm_jax.filters import filter_logits, kept_tokens, log_laws, node_laws, penalise
from tfm_jax.sampling import node_choices, token_logprobs
from tfm_jax.state import Filters, Penalties

GOLDEN = [golden_group("acceptance", f"filter{index}") for index in range(8)]


@jit_quickly
def laws(logits: jax.Array, temperature: jax.Array, filters: Filters) -> jax.Array:
    return node_laws(filter_logits(logits, temperature, filters), temperature)


@jit_quickly
def kept(weights: jax.Array, filters: Filters) -> jax.Array:
    return kept_tokens(weights, weights, filters)


def law_of(logits: np.ndarray, case: FilterCase, dtype: str = "float32") -> np.ndarray:
    with jax.enable_x64(dtype == "float64"):
        row = jnp.asarray(logits, dtype)[None, None]
        law = laws(row, jnp.full(1, case.temperature), case.batch(1, len(logits)))
        assert law.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
        return np.asarray(law[0, 0])


def kept_of(weights: list[float], dtype: str = "float32", **filters: float) -> list[int]:
    """Tokens that stay of given weights, which are ranked by themselves."""
    with jax.enable_x64(dtype == "float64"):
        row = jnp.asarray(weights, dtype)[None, None]
        case = dataclasses.replace(FilterCase(""), **filters)
        return np.flatnonzero(kept(row, case.batch(1, len(weights)))[0, 0]).tolist()


# --- golden vectors and an oracle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [False, True], ids=["sequential", "joint"])
@pytest.mark.parametrize("index", range(8))
def test_golden_vectors(index: int, joint: bool) -> None:  # noqa: FBT001
    golden = GOLDEN[index]
    expected = golden["joint" if joint else "sequential"]
    settings = {name: golden[name].item() for name in ("temperature", "top_k", "top_p", "min_p")}
    for dtype, gate in (("float32", 1e-6), ("float64", 1e-12)):
        law = law_of(golden["logits"], FilterCase("", **settings, joint=joint), dtype)
        np.testing.assert_array_equal(law > 0, expected > 0)
        np.testing.assert_allclose(law, expected, atol=gate)


def test_golden_vectors_are_rows_of_one_batch() -> None:
    """Every row has its own filters, and none of them sees its neighbours or its place."""
    rows = GOLDEN[1:]
    for order in (np.arange(7), np.arange(7)[::-1]):
        picked = [rows[index] for index in order]
        column = {name: np.array([row[name] for row in picked]) for name in ("top_k", "top_p", "min_p", "temperature")}
        filters = Filters(
            top_k=jnp.asarray(column["top_k"]),
            top_p=jnp.asarray(column["top_p"], jnp.float32),
            min_p=jnp.asarray(column["min_p"], jnp.float32),
        )
        logits = jnp.asarray([row["logits"] for row in picked])[:, None]
        batch = laws(logits, jnp.asarray(column["temperature"], jnp.float32), filters)[:, 0]
        np.testing.assert_allclose(batch, [row["sequential"] for row in picked], atol=1e-6)


def test_the_two_orders_differ_as_documented() -> None:
    weights = [0.60, 0.25, 0.15]
    logits = np.log(weights)
    joint, sequential = (law_of(logits, FilterCase("", top_k=2, top_p=0.7, joint=joint)) for joint in (True, False))
    np.testing.assert_allclose(joint, [12 / 17, 5 / 17, 0], atol=1e-6)
    np.testing.assert_allclose(sequential, [1, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws_equal_a_sorted_oracle(case: FilterCase, dtype: str) -> None:
    """200 rows of 33 tokens; a third of the rows is coarse, so that logits tie."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((200, 1, 33)).astype(np.float32) * 3
    logits[::3] = np.round(logits[::3])
    with jax.enable_x64(dtype == "float64"):
        ours = laws(jnp.asarray(logits, dtype), jnp.full(200, case.temperature), case.batch(200, 33))[:, 0]
    expected = np.array([filtered_law(row, case) for row in logits[:, 0]])
    np.testing.assert_allclose(ours, expected, atol=1e-12 if dtype == "float64" else 2e-6)


# --- exact rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("weights", "filters", "expected"),
    [
        ([0.5, 0.25, 0.25], {"top_p": 0.5}, [0]),  # the mass before token 1 is not below .5
        ([0.5, 0.25, 0.25], {"top_p": 0.5000001}, [0, 1]),
        ([0.5, 0.25, 0.25], {"top_p": 0.75}, [0, 1]),
        ([0.25, 0.25, 0.5], {"top_p": 0.75}, [0, 2]),  # equals: the lower id ranks first
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.5}, [0, 1]),
        ([0.5, 0.25, 0.25], {"top_p": 1.0}, [0, 1, 2]),  # off
        ([0.5, 0.25, 0.25], {"top_p": 1e-30}, [0]),
        ([0.5, 0.25, 0.25], {"top_p": 1e-60}, [0]),  # 0 in float32
        ([0.25, 0.5, 0.25], {"top_k": 1}, [1]),
        ([0.25, 0.25, 0.5, 0.25], {"top_k": 2}, [0, 2]),
        ([0.25, 0.25, 0.5, 0.25], {"top_k": 9}, [0, 1, 2, 3]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 1}, [0]),
        ([0.5, 0.25, 0.25], {"min_p": 0.5}, [0, 1, 2]),  # exactly half as likely stays
        ([0.5, 0.25, 0.24], {"min_p": 0.5}, [0, 1]),
        ([0.25, 0.5, 0.25], {"min_p": 1.0}, [1]),
        ([2.0, 1.0, 1.0, 4.0], {"top_k": 3, "top_p": 0.75}, [0, 3]),  # of 7: 4 and 6 come before; of 5.25 only 4
        ([2.0, 1.0, 1.0, 4.0], {"top_k": 3, "top_p": 0.75, "joint": True}, [0, 3]),  # of 8: below 6
        ([2.0, 1.0, 1.0, 4.0], {"top_k": 3, "top_p": 0.8, "joint": True}, [0, 1, 3]),  # below 6.4
        ([1.0, 0.0, 0.0], {"top_p": 0.9}, [0]),
        ([0.0, 1.0, 0.0], {"top_k": 1}, [1]),
    ],
)
def test_exact_rules(weights: list[float], filters: dict, expected: list[int], dtype: str) -> None:
    assert kept_of(weights, dtype, **filters) == expected


def test_top_p_off_keeps_what_rounding_would_drop() -> None:
    """With one heavy token and a million light ones the running sum reaches 1 before the end of the row."""
    weights = jnp.full((1, 1, 100_000), 1e-9).at[0, 0, 0].set(1.0)
    filters = Filters(top_p=jnp.array([1.0]))
    assert bool(kept(weights, filters).all())


def test_top_k_one_is_greedy_and_keeps_the_lowest_of_equals() -> None:
    logits = np.array([1.0, 3.0, 3.0, -np.inf])
    for temperature in (0.5, 1.0, 4.0):
        assert law_of(logits, FilterCase("", temperature=temperature, top_k=1)).tolist() == [0, 1, 0, 0]
    rows = jnp.asarray(logits, jnp.float32)[None, None].repeat(64, axis=0)
    hot = jnp.full(64, 50.0)
    filtered = filter_logits(rows, hot, Filters(top_k=jnp.ones(64, jnp.int32)))
    choices = node_choices(
        filtered, jnp.zeros((64, 1), jnp.int32), jnp.arange(64), hot, jnp.arange(64), max_depth=0, sample=True
    )
    assert choices[:, 0].tolist() == [1] * 64


def test_temperature_zero_is_greedy_whatever_the_filters() -> None:
    """Also where two logits are so close that their probabilities are equal in float32."""
    close = np.nextafter(np.float32(1e-3), np.float32(1))
    rows = jnp.asarray([[1e-3, close, -1e4], [5, 5, 1e4], [-np.inf, -1e4, -1e4]], jnp.float32)[:, None]
    filters = Filters(top_k=jnp.array([1, 2, 0]), top_p=jnp.array([1e-3, 0.5, 1e-3]), min_p=jnp.array([1.0, 0.5, 1.0]))
    for temperature in (0.0, 1e-30):
        filtered = filter_logits(rows, jnp.full(3, temperature), filters)
        assert jnp.argmax(filtered[:, 0], axis=-1).tolist() == [1, 2, 1]
        assert node_laws(filtered, jnp.full(3, temperature))[:, 0].argmax(-1).tolist() == [1, 2, 1]
    np.testing.assert_array_equal(node_laws(filter_logits(rows, jnp.zeros(3), filters), jnp.zeros(3)).max(-1), 1)


def test_extreme_logits() -> None:
    logits = np.array([1e4, -1e4, -np.inf, 1e4, 0.0])
    for case in CASES[1:-1]:
        law = law_of(logits, dataclasses.replace(case, bias=()))
        assert np.isfinite(law).all()
        np.testing.assert_allclose(law, filtered_law(logits, case), atol=1e-7)
    assert law_of(np.array([-np.inf, 0.0, -np.inf]), FilterCase("", top_k=2, top_p=0.5, min_p=0.1)).tolist() == [
        0,
        1,
        0,
    ]


def test_bfloat16_logits_tie_exactly() -> None:
    """Logits that bfloat16 makes equal are equals: the lower ids stay, as many as were asked for."""
    logits = jnp.asarray([[[1.001, 1.002, 1.003, 0.5]]], jnp.bfloat16)
    assert len(set(logits[0, 0, :3].tolist())) == 1
    one = jnp.ones(1)
    law = laws(logits, one, Filters(top_k=jnp.array([2])))
    assert law.dtype == jnp.float32
    np.testing.assert_allclose(law[0, 0], [0.5, 0.5, 0, 0])
    law = laws(logits, one, Filters(top_p=jnp.array([0.3])))
    assert law[0, 0].tolist() == [0.5, 0.5, 0, 0]
    assert laws(jnp.asarray([[[0.0, -0.0, -1.0]]]), one, Filters(top_k=jnp.array([1])))[0, 0].tolist() == [1, 0, 0]
    assert laws(jnp.asarray([[[-0.0, 0.0, -1.0]]]), one, Filters(top_k=jnp.array([1])))[0, 0].tolist() == [1, 0, 0]


def test_rows_without_filters_stay_bit_for_bit() -> None:
    """A row whose neighbours ask for filters gets the logits that it would get alone."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 50)), jnp.float32)
    filters = Filters(
        bias=jnp.zeros((2, 50)).at[1, 3].set(2.0),
        top_k=jnp.array([0, 5]),
        top_p=jnp.array([1.0, 0.5]),
        min_p=jnp.array([0.0, 0.1]),
    )
    temperature = jnp.array([0.8, 0.8])
    np.testing.assert_array_equal(filter_logits(logits, temperature, filters)[0], logits[0])
    text = str(jax.make_jaxpr(functools.partial(filter_logits, filters=Filters()))(logits, temperature))
    assert text.count("=") == 0  # no filter, no operation


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_token_logprobs_are_those_of_the_law() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 3, 9)).astype(np.float32) * 2
    case = FilterCase("", temperature=0.7, top_k=4, min_p=0.05)
    temperature = jnp.array([0.7, 0.0])  # at 0 the law at temperature 1 is reported
    filtered = filter_logits(jnp.asarray(logits), temperature, case.batch(2, 9))
    tokens = jnp.asarray(rng.integers(0, 9, (2, 3)), jnp.int32)
    ours = token_logprobs(log_laws(filtered, temperature), tokens, 5)
    for row, temp in enumerate((0.7, 1.0)):
        for step in range(3):
            law = filtered_law(logits[row, step], dataclasses.replace(case, temperature=temp))
            with np.errstate(divide="ignore"):
                expected = np.log(law)
            np.testing.assert_allclose(ours.chosen[row, step], expected[tokens[row, step]], atol=1e-5)
            np.testing.assert_allclose(ours.top[row, step], np.sort(expected)[::-1][:5], atol=1e-5)
            np.testing.assert_array_equal(ours.top_ids[row, step], np.argsort(-expected, kind="stable")[:5])


# --- penalties --------------------------------------------------------------------------------------------------------


def test_penalties_count_every_nodes_own_path() -> None:
    """Against counting by hand, for a tree whose paths repeat tokens of the prompt, of the text and of themselves."""
    tokens, parents = np.array([3, 1, 3, 3, 1, 0, 2]), np.array([-1, 0, 0, 1, 3, 4, 0])
    valid = np.array([True] * 6 + [False])
    tree = draft_tree(tokens, parents, valid)
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((1, 7, 6)).astype(np.float32) * 3
    prompt, text = [0, 4, 4], [1, 1, 5]
    factors = (1.7, 0.3, 0.9)
    penalties = Penalties(
        *(jnp.array([factor]) for factor in factors),
        prompted=jnp.asarray(np.isin(np.arange(6), prompt)[None]),
        counts=jnp.asarray(np.bincount(text, minlength=6)[None], jnp.int32),
    )
    ours = jit_quickly(penalise)(jnp.asarray(logits), tree.tokens, tree.ancestors, penalties)
    for node in range(6):
        path, at = [], node
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        for token in range(6):
            count, logit = [*text, *path].count(token), float(logits[0, node, token])
            if token in prompt or count:
                logit = logit / factors[0] if logit > 0 else logit * factors[0]
            logit -= factors[1] * count + (factors[2] if count else 0)
            np.testing.assert_allclose(ours[0, node, token], logit, atol=1e-5)


def test_penalties_that_are_off_change_nothing() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 5)), jnp.float32)
    tree = draft_tree(np.array([2, 2]), np.array([-1, 0]))
    off = Penalties(jnp.ones(1), jnp.zeros(1), jnp.zeros(1), jnp.ones((1, 5), bool), jnp.ones((1, 5), jnp.int32))
    np.testing.assert_array_equal(penalise(logits, tree.tokens, tree.ancestors, off), logits)
