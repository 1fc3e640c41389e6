"""The Mosaic kernel of tree verification: interpreted on a CPU, where each shape is also lowered for Hopper, or run.

The interpreter takes what the GPU does not, so no shape is only interpreted. On a GPU the same bodies run compiled.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_cases import ancestors_of, chain, random_tree

from pallas_kernels import reference
from pallas_kernels.mosaic_gdn import gdn_tree_verify, unsupported

if TYPE_CHECKING:
    from pallas_kernels import GdnTreeResult

BARS = {"default": 5e-4, "highest": 5e-6}
HOPPERS = (("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H200", 132))
INTERPRETED = plgpu.InterpretGPUParams()

# Parents, then options of `operands`.
CASES = {
    "one": (chain(1), {}),
    "seven": (random_tree(np.random.default_rng(1), 7), {"ratio": 4}),
    "sixteen": (random_tree(np.random.default_rng(2), 16), {"batch": 2, "ratio": 3}),
    "thirty-three": (random_tree(np.random.default_rng(3), 33), {"key": 64, "value": 64}),
    "full": (random_tree(np.random.default_rng(4), 64), {"ratio": 2, "value": 128}),
    "alike": (random_tree(np.random.default_rng(5), 64), {"cosine": 0.9}),
    "nearly equal": (random_tree(np.random.default_rng(6), 64), {"cosine": 0.99}),
    "chain": (chain(64), {"cosine": 0.99}),
    "gates": (random_tree(np.random.default_rng(7), 64), {"extreme": True}),
    "two tiles": (random_tree(np.random.default_rng(8), 100, 31), {"cosine": 0.5, "extreme": True}),
}


@pytest.fixture(params=[pytest.param(True, id="interpreted"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)])
def interpreted(request: pytest.FixtureRequest) -> bool:
    return request.param


def operands(
    seed: int,
    parents: np.ndarray,
    *,
    batch: int = 1,
    ratio: int = 1,
    key: int = 128,
    value: int = 64,
    cosine: float = 0.0,
    extreme: bool = False,
) -> tuple[jax.Array, ...]:
    """Arguments of one key head; with `cosine` between any two keys, decay is slow and β near 1."""
    rng = np.random.default_rng(seed)
    nodes = len(parents)

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys = np.sqrt(cosine) * unit(batch, 1, 1, key) + np.sqrt(1 - cosine) * unit(batch, nodes, 1, key)
    log_decay = -0.01 * rng.random((batch, nodes, ratio)) if cosine else -np.exp(rng.standard_normal((batch, nodes, ratio)) - 3)
    beta = rng.uniform(0.9 if cosine else 0.0, 1.0, log_decay.shape)
    if extreme:
        log_decay = np.where(rng.random(log_decay.shape) < 0.3, rng.choice([0.0, -30.0, -1000.0], log_decay.shape), log_decay)
        beta = np.where(rng.random(beta.shape) < 0.3, rng.choice([0.0, 1.0], beta.shape), beta)
    ancestors = np.broadcast_to(ancestors_of(parents), (batch, nodes, nodes))
    return (
        jnp.asarray(rng.standard_normal((batch, nodes, 1, key)), jnp.bfloat16),
        jnp.asarray(keys * rng.uniform(0.3, 3.0, (batch, nodes, 1, 1)), jnp.bfloat16),
        jnp.asarray(0.1 * rng.standard_normal((batch, nodes, ratio, value)), jnp.bfloat16),
        jnp.asarray(log_decay, jnp.float32),
        jnp.asarray(beta, jnp.float32),
        jnp.asarray(ancestors),
        jnp.asarray(0.05 * rng.standard_normal((batch, ratio, key, value)), jnp.float32),
    )


@functools.cache
def compiled(*, interpreted: bool, precision: str) -> jax.stages.Wrapped:
    interpret = INTERPRETED if interpreted else None
    return jax.jit(functools.partial(gdn_tree_verify, precision=precision, interpret=interpret))


def errors(result: GdnTreeResult, arguments: tuple[jax.Array, ...]) -> list[float]:
    """Relative errors ‖x − ref‖ / ‖ref‖ of outputs, updates and path decays against float64."""
    exact = [np.asarray(x) if x.dtype == bool else np.asarray(x.astype(jnp.float32), np.float64) for x in arguments]
    expected = reference.gdn_tree_verify(*exact)
    return [float(np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y)) for x, y in zip(result, expected, strict=True)]


@functools.cache
def lower(precision: str, *shapes: tuple[tuple[int, ...], str]) -> None:
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    for kind, cores in HOPPERS:
        device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            compiled(interpreted=False, precision=precision).trace(*structs).lower(lowering_platforms=("cuda",))


def check(precision: str, arguments: tuple[jax.Array, ...], *, interpreted: bool) -> None:
    if interpreted:
        lower(precision, *((x.shape, str(x.dtype)) for x in arguments))
    result = compiled(interpreted=interpreted, precision=precision)(*arguments)
    assert max(errors(result, arguments)) < BARS[precision]


@pytest.mark.parametrize("precision", BARS)
@pytest.mark.parametrize("case", CASES)
def test_results_agree_with_the_loop_in_float64(case: str, precision: str, interpreted: bool) -> None:
    parents, options = CASES[case]
    check(precision, operands(len(parents), parents, **options), interpreted=interpreted)


def test_forty_random_trees(interpreted: bool) -> None:
    rng = np.random.default_rng(0)
    for seed in range(40 if interpreted else 10_000):
        parents = random_tree(rng, 32, int(rng.integers(1, 32)))
        cosine = float(rng.choice([0.0, 0.9, 0.99]))
        check("default", operands(seed, parents, key=64, cosine=cosine, extreme=bool(seed % 2)), interpreted=interpreted)


def test_rows_of_unused_nodes_are_finite_and_reach_nobody(interpreted: bool) -> None:
    parents = random_tree(np.random.default_rng(9), 16)
    whole = operands(3, parents)
    mask = np.asarray(whole[5]).copy()
    mask[:, 12:] = False
    result = compiled(interpreted=interpreted, precision="default")(*whole[:5], jnp.asarray(mask), whole[6])
    expected = compiled(interpreted=interpreted, precision="default")(*whole)
    for some, every in zip(result, expected, strict=True):
        assert np.isfinite(some).all()
        np.testing.assert_array_equal(some[:, :12], every[:, :12])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({0: jnp.float32}, "query is float32"),
        ({6: jnp.bfloat16}, "state is bfloat16"),
    ],
)
def test_unsupported_dtypes_are_named(change: dict[int, jnp.dtype], reason: str) -> None:
    arguments = [x.astype(change.get(i, x.dtype)) for i, x in enumerate(operands(0, chain(4)))]
    assert reason in (unsupported(*arguments) or "")


def test_unsupported_shapes_are_named() -> None:
    assert "nodes" in (unsupported(*operands(0, chain(257))) or "")
    assert "key" in (unsupported(*operands(0, chain(4), key=32)) or "")
    assert unsupported(*operands(0, chain(256))) is None
