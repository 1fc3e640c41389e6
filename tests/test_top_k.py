"""Exact top-k: every form gives the values and the ids of `lax.top_k`, whatever ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jaxtyping import TypeCheckError

from pallas_kernels.top_k import reference_top_k, top_k

LONG = 1 << 14
VALUES = (-np.inf, -3.5, -0.0, 0.0, 1.0, 2.5, 3e38, np.inf)


def draw_rows(kind: str, rows: int, vocab: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    match kind:
        case "random":
            return rng.normal(size=(rows, vocab)).astype(np.float32)
        case "few":
            return rng.choice(np.float32(VALUES), size=(rows, vocab))
        case "equal":
            return np.full((rows, vocab), 1.25, np.float32)
        case "nothing":
            return np.full((rows, vocab), -np.inf, np.float32)
        case "coarse":
            return np.round(rng.normal(size=(rows, vocab)) * 4).astype(np.float32)
        case "ascending":
            return np.broadcast_to(np.arange(vocab, dtype=np.float32) / 7, (rows, vocab))
        case "crowded":  # the best of all in one group of neighbours, then in one group of every 4096th
            x = rng.normal(size=(rows, vocab)).astype(np.float32)
            x[:, 100:600] += 50
            x[:, 3::4096] += 100
            return x
        case _:
            raise AssertionError(kind)


KINDS = ("random", "few", "equal", "nothing", "coarse", "ascending", "crowded")


def check(logits: np.ndarray, k: int, implementation: str) -> None:
    values, ids = jax.jit(top_k, static_argnums=1, static_argnames="implementation")(
        logits, k, implementation=implementation
    )
    expected_values, expected_ids = reference_top_k(np.asarray(logits, np.float32), k)
    assert (values.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(np.asarray(values).view(np.int32), expected_values.view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_lax_top_k(kind: str) -> None:
    logits = draw_rows(kind, 2, 700, 0)
    for k in (1, 5, 700):
        expected = lax.top_k(logits, k)
        for own, theirs in zip(top_k(jnp.asarray(logits), k, implementation="reference"), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(own).view(np.int32), np.asarray(theirs).view(np.int32))


@given(
    st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 2000), st.floats(0, 1), st.integers(0, 99), st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_two_stages_are_exact(kind: str, rows: int, vocab: int, share: float, seed: int, few: bool) -> None:
    k = max(1, int(share * (vocab // 300 if few else vocab)))
    check(draw_rows(kind, rows, vocab, seed), k, "xla")


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_are_exact_on_long_rows(kind: str) -> None:
    check(draw_rows(kind, 2, LONG + 77, 1), 31, "xla")


def test_bfloat16_is_compared_as_float32() -> None:
    logits = jnp.asarray(draw_rows("random", 3, LONG, 2), jnp.bfloat16)
    check(np.asarray(logits.astype(jnp.float32)), 40, "xla")
    values, ids = top_k(logits, 40)
    expected = lax.top_k(logits.astype(jnp.float32), 40)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(values, expected[0])


def test_leading_axes_stay() -> None:
    logits = jnp.asarray(draw_rows("random", 6, 50, 3)).reshape(2, 3, 50)
    values, ids = top_k(logits, 4)
    assert values.shape == ids.shape == (2, 3, 4)
    np.testing.assert_array_equal(ids, lax.top_k(logits, 4)[1])


def test_mistaken_arguments_are_refused() -> None:
    logits = jnp.zeros((2, 9))
    for k in (0, 10):
        with pytest.raises(ValueError, match=f"k is {k}, expected 1 to 9"):
            top_k(logits, k)
    with pytest.raises(ValueError, match='no "triton" form'):
        top_k(logits, 3, implementation="triton")
    with pytest.raises((ValueError, TypeCheckError)):  # the shape checker that runs with the tests may speak first
        top_k(logits, 3, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(15, 248_320, 512), (1, 4096, 1), (3, LONG + 77, 1024), (2, 50_000, 63)])
def test_triton_is_exact(kind: str, rows: int, vocab: int, k: int) -> None:
    check(draw_rows(kind, rows, vocab, 4), k, "triton")
