"""The chunked prefill kernels: interpreted against the oracle, and lowered for Hopper in the same shapes.

On a GPU (`-m gpu`) the bodies of the interpreted tests run compiled.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import mosaic_chunk, reference
from pallas_kernels.dispatch import Precision

MODES = ("interpreted", pytest.param("compiled", marks=pytest.mark.gpu))
BOUNDS: dict[Precision, float] = {"default": 5e-5, "highest": 1e-6}


class Shape(NamedTuple):
    """Sizes of a text and of a layer."""

    batch: int = 1
    tokens: int = 130
    key_heads: int = 1
    ratio: int = 1
    key: int = 64
    value: int = 64


SHAPES = {
    "one token": Shape(tokens=1),
    "one chunk": Shape(tokens=64, value=128),
    "long": Shape(tokens=200),
    "heads": Shape(batch=2, tokens=70, key_heads=2, ratio=3),
    "qwen": Shape(tokens=65, ratio=3, key=128, value=128),
}


def make_case(shape: Shape, cosine: float = 0.0) -> tuple[np.ndarray, ...]:
    """Random operands whose values bf16 holds; with `cosine` between any two keys, decay is slow and β near 1."""
    rng = np.random.default_rng(0)
    heads = (shape.batch, shape.tokens, shape.key_heads)
    gates = (*heads[:2], shape.key_heads * shape.ratio)
    common = rng.standard_normal((shape.batch, 1, shape.key_heads, shape.key))
    query, own = rng.standard_normal((2, *heads, shape.key))
    value = rng.standard_normal((*gates, shape.value))
    log_decay = -0.01 * rng.random(gates) if cosine else -np.exp(rng.standard_normal(gates) - 2)
    beta = rng.uniform(0.9 if cosine else 0.0, 1.0, gates)
    valid = np.arange(shape.tokens) < shape.tokens - np.arange(shape.batch)[:, None] * 9
    state = rng.standard_normal((shape.batch, gates[2], shape.key, shape.value))
    narrow = (query, np.sqrt(cosine) * common + np.sqrt(1 - cosine) * own, value)
    narrow = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in narrow)
    return (*narrow, log_decay.astype(np.float32), beta.astype(np.float32), valid, state.astype(np.float32))


def check(case: tuple[np.ndarray, ...], precision: Precision, mode: str) -> None:
    interpret = plgpu.InterpretGPUParams() if mode == "interpreted" else None
    chunk = functools.partial(mosaic_chunk.gdn_chunk, precision=precision, interpret=interpret)
    result = jax.jit(chunk)(*case)
    valid = case[5]
    expected = reference.gdn_chunk(*(x if x.dtype == bool else x.astype(np.float64) for x in case))
    for actual, wanted in ((result.output[valid], expected.output[valid]), (result.state, expected.state)):
        error = np.linalg.norm(np.asarray(actual, np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < BOUNDS[precision]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
def test_text_follows_the_oracle(name: str, mode: str) -> None:
    check(make_case(SHAPES[name]), "default", mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("cosine", "precision"), [(0.9, "default"), (0.99, "default"), (0.99, "highest")])
def test_alike_keys_keep_their_digits(cosine: float, precision: Precision, mode: str) -> None:
    check(make_case(SHAPES["long"], cosine), precision, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", BOUNDS)
def test_extreme_gates_stay_accurate(precision: Precision, mode: str) -> None:
    rng = np.random.default_rng(1)
    query, key, value, log_decay, beta, valid, state = make_case(SHAPES["long"])
    chosen = rng.random(log_decay.shape) < 0.3
    log_decay = np.where(chosen, rng.choice([0.0, -30.0, -1000.0], beta.shape), log_decay).astype(np.float32)
    beta = np.where(rng.random(beta.shape) < 0.3, rng.choice([0.0, 1.0], beta.shape), beta).astype(np.float32)
    check((query, key, value, log_decay, beta, valid, state), precision, mode)


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [*((name, "H200", "default") for name in SHAPES), ("qwen", "H100", "default"), ("long", "H200", "highest")],
)
def test_shapes_lower(name: str, kind: str, precision: Precision) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_case(SHAPES[name]))
    device = AbstractDevice(device_kind=f"NVIDIA {kind}", num_cores=132, platform="cuda")
    chunk = jax.jit(functools.partial(mosaic_chunk.gdn_chunk, precision=precision))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = chunk.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("index", "changed", "message"),
    [
        (0, np.zeros((1, 130, 1, 64), np.float32), "query is float32, expected bfloat16"),
        (0, np.zeros((1, 130, 1, 16), jnp.bfloat16), "the key dimension is 16, expected 64 or 128"),
        (2, np.zeros((1, 130, 1, 16), jnp.bfloat16), "the value dimension is 16, expected 64, 128 or 256"),
    ],
)
def test_unsupported_operands_are_named(index: int, changed: np.ndarray, message: str) -> None:
    operands = [jnp.asarray(changed if n == index else x) for n, x in enumerate(make_case(Shape()))]
    assert mosaic_chunk.unsupported(*operands) == message
