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

from pallas_kernels import reference, top_k

LONG = (1 << 14) + 77
FEW = np.float32((-np.inf, -3.5, -0.0, 0.0, 1.0, 2.5, 3e38, np.inf))
KINDS = ("random", "few", "equal", "nothing", "coarse", "ascending", "crowded", "tied")


def draw_rows(kind: str, rows: int, vocab: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, vocab)).astype(np.float32)
    match kind:
        case "few":
            x = rng.choice(FEW, size=x.shape)
        case "equal":
            x[:] = 1.25
        case "nothing":
            x[:] = -np.inf
        case "coarse":
            x = np.round(x * 4)
        case "ascending":
            x[:] = np.arange(vocab) / 7
        case "crowded":  # the best in groups of neighbours, and in a group of the GPU's kernels
            x[:, 100:600] += 50
            x[:, 3::4096] += 100
        case "tied":  # fewer than k above a tie of all the others, which are too many to rank
            above = x[:, :: max(1, vocab // 40)].copy()
            x[:] = -5.0
            x[:, :: max(1, vocab // 40)] = above
    return x


def check(logits: np.ndarray | jax.Array, k: int, implementation: str) -> None:
    select = jax.jit(top_k, static_argnums=1, static_argnames="implementation")
    values, ids = select(logits, k, implementation=implementation)
    expected_values, expected_ids = reference.top_k(np.asarray(logits, np.float32), k=k)
    assert (values.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(np.asarray(values).view(np.int32), expected_values.view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_lax_top_k(kind: str) -> None:
    logits = draw_rows(kind, 2, 700, 0)
    for k in (1, 5, 700):
        ours, theirs = top_k(jnp.asarray(logits), k, implementation="reference"), lax.top_k(logits, k)
        for own, their in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(own).view(np.int32), np.asarray(their).view(np.int32))


@given(st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 2000), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_two_stages_are_exact(kind: str, rows: int, vocab: int, share: float, seed: int) -> None:
    check(draw_rows(kind, rows, vocab, seed), max(1, int(share * vocab)), "xla")


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_are_exact_on_long_rows(kind: str) -> None:
    check(draw_rows(kind, 2, LONG, 1), 31, "xla")


def test_bfloat16_is_compared_as_float32() -> None:
    check(jnp.asarray(draw_rows("random", 3, LONG, 2), jnp.bfloat16), 40, "auto")


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
    with pytest.raises((ValueError, TypeCheckError)):  # the shape checker that runs with the tests may speak first
        top_k(logits, 3, implementation="fastest")
    with pytest.raises(ValueError, match="top_k cannot run as triton"):
        top_k(logits, 3, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(15, 248_320, 512), (1, 4096, 1), (3, LONG, 1024), (2, 50_000, 63)])
def test_triton_is_exact(kind: str, rows: int, vocab: int, k: int) -> None:
    check(draw_rows(kind, rows, vocab, 4), k, "triton")


@pytest.mark.gpu
def test_triton_takes_bfloat16() -> None:
    check(jnp.asarray(draw_rows("random", 3, LONG, 5), jnp.bfloat16), 512, "triton")


@pytest.mark.gpu
def test_triton_works_under_vmap() -> None:
    logits = jnp.asarray(draw_rows("random", 6, LONG, 6)).reshape(2, 3, LONG)
    values, ids = jax.vmap(lambda rows: top_k(rows, 9, implementation="triton"))(logits)
    expected = lax.top_k(logits, 9)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(values, expected[0])
