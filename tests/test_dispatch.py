"""Which form of a kernel runs, and what is said where one cannot."""

from __future__ import annotations

import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import make_case, random_tree, to_device

import pallas_kernels
from pallas_kernels import dispatch

OPERATIONS = tuple(dispatch._FORMS)  # noqa: SLF001 - the table is what is tested
ON_GPU = ("mosaic", "triton")


def case(nodes: int = 17) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [to_device(x) for x in make_case(rng, random_tree(rng, nodes))]


@pytest.mark.parametrize("op", OPERATIONS)
def test_forms_take_the_arguments_of_their_front_door(op: str) -> None:
    """By name and order; a form may have options of its own, which have defaults."""
    front = list(inspect.signature(getattr(pallas_kernels, op)).parameters)
    operands = front[: front.index("implementation")]
    for form in pallas_kernels.implementations(op):
        functions = [dispatch._function(op, form)]  # noqa: SLF001
        functions += [dispatch._check(op, form)] if form in ON_GPU else []  # noqa: SLF001
        for function in functions:
            parameters = inspect.signature(function).parameters
            assert [name for name in parameters if name in operands] == operands
            assert all(
                p.default is not inspect.Parameter.empty for name, p in parameters.items() if name not in operands
            )


def test_auto_says_once_what_runs_and_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch._say_once.cache_clear()  # noqa: SLF001
    monkeypatch.setattr(dispatch, "device_lacks", lambda form: f"there is no {form} here")
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for nodes in (17, 17, 16):
            pallas_kernels.gdn_tree_verify(*case(nodes))
    assert [record.getMessage() for record in caplog.records] == [
        "gdn_tree_verify runs as xla (mosaic: there is no mosaic here; triton: there is no triton here)",
        "gdn_tree_verify runs as xla (triton: there is no triton here; mosaic: there is no mosaic here)",  # few nodes
    ]


@pytest.mark.parametrize("form", ON_GPU)
def test_a_form_that_cannot_run_names_one_that_can(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "device_lacks", lambda _: "it needs another GPU")
    with pytest.raises(ValueError, match=f"gdn_tree_verify cannot run as {form}: it needs another GPU; .*'xla'"):
        pallas_kernels.gdn_tree_verify(*case(), implementation=form)
    monkeypatch.setattr(dispatch, "device_lacks", lambda _: None)
    _, key, *others = case()
    with pytest.raises(ValueError, match=f"gdn_tree_verify cannot run as {form}: .*; .*'xla'"):  # heads of 12
        pallas_kernels.gdn_tree_verify(
            key[..., :12], key[..., :12], *others[:4], others[4][:, :, :12], implementation=form
        )


def test_unknown_names_are_refused() -> None:
    """Below the front doors, whose types would stop these names while the tests run."""
    with pytest.raises(ValueError, match="unknown implementation 'abacus' of gdn_tree_verify, choose from 'auto', "):
        dispatch.call("gdn_tree_verify", "abacus", *case())
    with pytest.raises(ValueError, match="unknown precision 'low', choose from 'default', 'highest'"):
        dispatch.call("gdn_tree_verify", "auto", *case(), precision="low")


def test_gradients_are_those_of_the_slow_form() -> None:
    """Values come from the fast one on its own platform only: here there is none."""
    run = dispatch._with_gradients(lambda x, n: x * n + 7, lambda x, n: x * n)  # noqa: SLF001
    x, n = jnp.array([1.0, 2.0]), jnp.array([3, 4])
    np.testing.assert_array_equal(run(x, n), [3, 8])
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(run(x, n)))(x)
    assert float(value) == 11
    np.testing.assert_array_equal(gradient, [3, 4])
    lowered = jax.jit(run).trace(x, n).lower(lowering_platforms=("cuda",)).as_text()
    assert "7.0" in lowered
