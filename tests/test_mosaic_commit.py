"""The commit kernels: interpreted against the oracle, and lowered for Hopper in the same shapes.

On a GPU (`-m gpu`) the bodies of the interpreted tests run compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_cases import chain, path_to, taps_of

from pallas_kernels import mosaic_commit, reference, xla

MODES = ("interpreted", pytest.param("compiled", marks=pytest.mark.gpu))


def simulation(mode: str) -> plgpu.InterpretGPUParams | None:
    return plgpu.InterpretGPUParams() if mode == "interpreted" else None


class Shape(NamedTuple):
    """A model's shape and a tree's."""

    layers: int = 2
    batch: int = 1
    key_heads: int = 1
    ratio: int = 3
    key: int = 128
    value: int = 128
    nodes: int = 12
    steps: int = 10
    dtype: str = "bfloat16"


SHAPES = {
    "qwen": Shape(),
    "small heads": Shape(layers=1, key_heads=2, ratio=1, key=64, value=64),
    "wide": Shape(layers=1, ratio=1, key=64, value=256, dtype="float32"),
    "batch": Shape(layers=3, batch=4, ratio=2, key=64),
    "long path": Shape(layers=1, ratio=1, nodes=40, steps=40),
}


class Case(NamedTuple):
    """Operands of `commit_states`."""

    states: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    updates: tuple[jax.Array, ...]
    path_decays: tuple[jax.Array, ...]
    path: jax.Array
    count: jax.Array


def make_case(shape: Shape, counts: list[int], seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    heads = shape.key_heads * shape.ratio

    def arrays(dtype: str, *dims: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(rng.standard_normal((shape.batch, *dims)), dtype) for _ in range(shape.layers))

    parents = chain(shape.nodes)
    paths = np.zeros((shape.batch, shape.steps), np.int32)
    for row, count in enumerate(counts):
        if count < shape.nodes and shape.nodes < 20:  # a path that skips nodes
            parents = np.maximum(chain(shape.nodes) - 1, -1)
        path = path_to(shape.nodes - 1, parents)[:count]
        paths[row, : len(path)] = path
        counts[row] = len(path)
        paths[row, len(path) :] = rng.integers(0, shape.nodes, shape.steps - len(path))
    decays = tuple(-jnp.cumsum(jnp.abs(x), axis=1) / 4 for x in arrays("float32", shape.nodes, heads))
    return Case(
        arrays("float32", heads, shape.key, shape.value),
        arrays(shape.dtype, shape.nodes, shape.key_heads, shape.key),
        arrays("float32", shape.nodes, heads, shape.value),
        decays,
        jnp.asarray(paths),
        jnp.asarray(counts, jnp.int32),
    )


def expected_state(case: Case, layer: int) -> np.ndarray:
    states, keys, updates, path_decays = ((np.asarray(x[layer], np.float64),) for x in case[:4])
    path, count = np.asarray(case.path), np.asarray(case.count)
    return reference.commit_states(states, keys, updates, path_decays, path, count)[0]


def relative_error(actual: jax.Array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "counts"),
    [("qwen", [6]), ("small heads", [1]), ("wide", [8]), ("batch", [0, 9, 1, 10]), ("long path", [40])],
)
def test_states_follow_the_oracle(name: str, counts: list[int], mode: str) -> None:
    case = make_case(SHAPES[name], counts)
    committed = jax.jit(functools.partial(mosaic_commit.commit_states, interpret=simulation(mode)))(*case)
    for layer, state in enumerate(committed):
        assert relative_error(state, expected_state(case, layer)) < 1e-6
        for row in np.flatnonzero(np.asarray(case.count) == 0):
            np.testing.assert_array_equal(state[row], case.states[layer][row])


@pytest.mark.parametrize("mode", MODES)
def test_extreme_decays_stay_finite(mode: str) -> None:
    case = make_case(SHAPES["small heads"], [8])
    decays = tuple(-88.0 * jnp.arange(1.0, 13.0)[:, None] * jnp.asarray([1.0, 0.0]) + 0 * x for x in case.path_decays)
    case = case._replace(path_decays=decays)
    (state,) = mosaic_commit.commit_states(*case, interpret=simulation(mode))
    assert relative_error(state, expected_state(case, 0)) < 1e-6


def make_rows(batch: int, counts: list[int]) -> tuple[tuple, list[np.ndarray]]:
    """Operands of `commit_rows`, and the windows and caches that should come out."""
    rng = np.random.default_rng(1)
    parents = chain(20)
    parents[3] = 1
    taps = taps_of(parents)

    def arrays(*dims: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(rng.standard_normal((batch, *dims)), jnp.bfloat16) for _ in range(2))

    windows, inputs, caches, rows = arrays(3, 64), arrays(20, 64), arrays(2, 40, 64), arrays(20, 2, 64)
    lengths = rng.integers(0, 20, batch)
    paths = np.zeros((batch, 18), np.int32)
    longest = path_to(19, parents)
    for row, count in enumerate(counts):
        paths[row, :count] = longest[:count]
    expected = [np.array(x.astype(jnp.float32)) for x in (*windows, *caches)]
    for row, count in enumerate(counts):
        for layer in range(2 * bool(count)):
            history = np.asarray(jnp.concatenate([windows[layer][row], inputs[layer][row]]), np.float32)
            expected[layer][row] = history[[3 + taps[paths[row, count - 1], tap] for tap in (2, 1, 0)]]
            for step in range(count):
                node = np.asarray(rows[layer][row, paths[row, step]], np.float32)
                expected[2 + layer][row, :, lengths[row] + step] = node
    taps = jnp.asarray(np.broadcast_to(taps, (batch, *taps.shape)))
    numbers = (jnp.asarray(x, jnp.int32) for x in (lengths, paths, counts))
    return (windows, inputs, taps, caches, rows, *numbers), expected


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_copied_exactly(mode: str) -> None:
    operands, expected = make_rows(3, [1, 0, 18])
    windows, caches = jax.jit(functools.partial(mosaic_commit.commit_rows, interpret=simulation(mode)))(*operands)
    for actual, wanted in zip((*windows, *caches), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual, np.float32), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_folds_do_not_drift(mode: str) -> None:
    """2,000 tokens in 32 rounds beside float64, with updates as accurate as each precision of verification leaves them.

    The error of a state enters the next round's updates, so this is what tells whether the fold may replace a replay.
    """
    rng = np.random.default_rng(2)
    nodes, width = 63, 64
    noise, bounds = np.array([0.0, 5e-4])[:, None, None, None], (1e-5, 5e-3)
    ancestors = np.tril(np.ones((2, nodes, nodes), bool))

    @jax.jit
    def commit(state: jax.Array, key: jax.Array, update: jax.Array, path_decay: jax.Array) -> jax.Array:
        layers = ((x,) for x in (state, key, update, path_decay))
        return mosaic_commit.commit_states(*layers, path=path, count=count, interpret=simulation(mode))[0]

    path, count = jnp.tile(jnp.arange(nodes), (2, 1)), jnp.asarray([nodes, nodes])
    exact, state = np.zeros((2, 1, width, width)), jnp.zeros((2, 1, width, width))
    for turn in range(32):
        query, key, value = rng.standard_normal((3, 2, nodes, 1, width)).astype(np.float32)
        key = np.asarray(jnp.asarray(key, jnp.bfloat16), np.float32)
        log_decay = -np.exp(rng.standard_normal((2, nodes, 1)) - 5).astype(np.float32)
        beta = rng.uniform(0.5, 1, (2, nodes, 1)).astype(np.float32)
        rows = (query, key, value, log_decay, beta)
        verified = xla.gdn_tree_verify(*map(jnp.asarray, (*rows, ancestors)), state)
        update = verified.update * jnp.asarray(1 + noise * rng.standard_normal(value.shape), jnp.float32)
        simple = functools.partial(xla.gdn_commit, path=path, count=count)
        fold = simple if mode == "interpreted" and turn % 4 else commit  # the same sum, and 20 times as fast
        state = fold(state, jnp.asarray(rows[1], jnp.bfloat16), update, verified.path_decay)
        query, key, value, log_decay, beta = (x.astype(np.float64) for x in rows)
        valid = np.ones((2, nodes), bool)
        exact = np.asarray(reference.gdn_chunk(query, key, value, log_decay, beta, valid, exact).state)
    for row, bound in enumerate(bounds):
        assert relative_error(state[row], exact[row]) < bound


def lower(kind: str, function: Callable, donated: tuple[int, ...], *operands: tuple | jax.Array) -> str:
    device = AbstractDevice(device_kind=f"NVIDIA {kind}", num_cores=132, platform="cuda")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function, donate_argnums=donated).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", ["H100", "H200"])
@pytest.mark.parametrize("name", SHAPES)
def test_states_lower_in_place(name: str, kind: str) -> None:
    shape = SHAPES[name]
    case = make_case(shape, [1] * shape.batch)
    text = lower(kind, mosaic_commit.commit_states, (0,), *case)
    assert text.count("output_operand_alias<") == shape.layers


@pytest.mark.parametrize("kind", ["H100", "H200"])
def test_rows_lower_in_place(kind: str) -> None:
    operands, _ = make_rows(3, [1, 0, 18])
    text = lower(kind, mosaic_commit.commit_rows, (0, 3), *operands)
    assert text.count("output_operand_alias<") == 4


def test_a_whole_model_is_one_launch() -> None:
    shape = Shape(layers=48, key_heads=16, nodes=64, steps=16)
    case = jax.eval_shape(lambda: make_case(shape._replace(layers=1), [1]))
    case = Case(*(x * 48 for x in case[:4]), *case[4:])
    text = lower("H200", mosaic_commit.commit_states, (0,), *case)
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": 16}, "the key dimension is 16, expected 64, 128 or 256"),
        ({"value": 16}, "the value dimension is 16, expected 64, 128 or 256"),
        ({"dtype": "float8_e4m3fn"}, "key is float8_e4m3fn, expected bfloat16 or float16 or float32"),
    ],
)
def test_unsupported_operands_are_named(changed: dict, message: str) -> None:
    case = make_case(Shape(**changed), [1])
    assert mosaic_commit.unsupported(*case) == message
    with pytest.raises(ValueError, match=message):
        mosaic_commit.commit_states(*case)
