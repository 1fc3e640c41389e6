"""The Mosaic kernel of tree verification: interpreted on a CPU, where each shape is also lowered for Hopper, or run.

The interpreter takes what the GPU does not, so no shape is only interpreted. On a GPU the same bodies run compiled.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_cases import ancestors_of, chain, random_tree

from pallas_kernels import reference
from pallas_kernels.dispatch import Precision
from pallas_kernels.mosaic_gdn import gdn_tree_verify, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from pallas_kernels import GdnTreeResult

BARS: dict[Precision, float] = {"default": 5e-4, "highest": 5e-6}
HOPPERS = (("NVIDIA H200", 132), ("NVIDIA H100 80GB HBM3", 132))
INTERPRETED = plgpu.InterpretGPUParams()


class Case(NamedTuple):
    parents: np.ndarray
    options: dict
    precisions: tuple[Precision, ...] = ("default",)


def tree(nodes: int, depth: int = 15) -> np.ndarray:
    return random_tree(np.random.default_rng(nodes), nodes, depth)


CASES = {
    "one": Case(chain(1), {"ratio": 2}),
    "sixteen": Case(tree(16), {"batch": 2, "ratio": 3, "key": 64}),
    "thirty-three": Case(tree(33), {"ratio": 4}),
    "two value blocks": Case(tree(64), {"value": 128}),
    "alike": Case(tree(64), {"cosine": 0.9}, tuple(BARS)),
    "nearly equal": Case(tree(64), {"cosine": 0.99}, tuple(BARS)),
    "chain": Case(chain(64), {"cosine": 0.99}, tuple(BARS)),
    "gates": Case(tree(64), {"extreme": True}, tuple(BARS)),
    "two tiles": Case(tree(100, 31), {"cosine": 0.5, "extreme": True}, tuple(BARS)),
    "two whole tiles": Case(chain(128), {"cosine": 0.99, "ratio": 2, "value": 128}),
    "three tiles": Case(tree(129, 40), {"batch": 2, "key": 64}),
    "four tiles": Case(tree(256, 31), {"cosine": 0.99}, tuple(BARS)),
}
LONG = (pytest.mark.slow, pytest.mark.exhaustive)  # minutes when interpreted; `-m gpu` runs them
ALL_CASES = [
    pytest.param(name, precision, marks=LONG if name == "four tiles" else ())
    for name, case in CASES.items()
    for precision in case.precisions
]


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
    gates = (batch, nodes, ratio)
    log_decay = -0.01 * rng.random(gates) if cosine else -np.exp(rng.standard_normal(gates) - 3)
    beta = rng.uniform(0.9 if cosine else 0.0, 1.0, gates)
    if extreme:
        log_decay = np.where(rng.random(gates) < 0.3, rng.choice([0.0, -30.0, -1000.0], gates), log_decay)
        beta = np.where(rng.random(gates) < 0.3, rng.choice([0.0, 1.0], gates), beta)
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
def verify_with(precision: Precision, *, interpreted: bool) -> Callable[..., GdnTreeResult]:
    """Not jitted when interpreted: on a machine of few cores the interpreter's threads can starve below a jit."""
    if interpreted:
        return functools.partial(gdn_tree_verify, precision=precision, interpret=INTERPRETED)
    return jax.jit(functools.partial(gdn_tree_verify, precision=precision))


def errors(result: GdnTreeResult, arguments: tuple[jax.Array, ...]) -> list[float]:
    """Relative errors ‖x − ref‖ / ‖ref‖ of outputs, updates and path decays against float64."""
    exact = [np.asarray(x) if x.dtype == bool else np.asarray(x.astype(jnp.float32), np.float64) for x in arguments]
    expected = reference.gdn_tree_verify(*exact)
    return [float(np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y)) for x, y in zip(result, expected, strict=True)]


@functools.cache
def lower(precision: Precision, kind: str, cores: int, *shapes: tuple[tuple[int, ...], str]) -> None:
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        jax.jit(verify_with(precision, interpreted=False)).trace(*structs).lower(lowering_platforms=("cuda",))


def check(precision: Precision, arguments: tuple[jax.Array, ...], *, interpreted: bool) -> None:
    if interpreted:
        lower(precision, *HOPPERS[0], *((x.shape, str(x.dtype)) for x in arguments))
    result = verify_with(precision, interpreted=interpreted)(*arguments)
    assert max(errors(result, arguments)) < BARS[precision]


@pytest.mark.parametrize(("name", "precision"), ALL_CASES)
def test_results_agree_with_the_loop_in_float64(name: str, precision: Precision, *, interpreted: bool) -> None:
    case = CASES[name]
    check(precision, operands(len(case.parents), case.parents, **case.options), interpreted=interpreted)


@pytest.mark.parametrize(("precision", "nodes"), [("default", 128), ("highest", 64)])
def test_the_kernel_lowers_for_the_older_hopper_too(precision: Precision, nodes: int) -> None:
    shapes = ((x.shape, str(x.dtype)) for x in operands(0, chain(nodes)))
    lower(precision, *HOPPERS[1], *shapes)


def test_random_trees(*, interpreted: bool) -> None:
    rng, trees = np.random.default_rng(0), 10
    for seed in range(4 if interpreted else 1000):
        mask = [ancestors_of(random_tree(rng, 16, int(rng.integers(1, 16)))) for _ in range(trees)]
        cosine, extreme = float(rng.choice([0.0, 0.9, 0.99])), bool(seed % 2)
        arguments = operands(seed, chain(16), batch=trees, key=64, cosine=cosine, extreme=extreme)
        check("default", (*arguments[:5], jnp.asarray(mask), arguments[6]), interpreted=interpreted)


def test_rows_of_unused_nodes_are_finite_and_reach_nobody(*, interpreted: bool) -> None:
    parents = random_tree(np.random.default_rng(9), 16)
    whole = operands(3, parents)
    mask = np.asarray(whole[5]).copy()
    mask[:, 12:] = False
    result = verify_with("default", interpreted=interpreted)(*whole[:5], jnp.asarray(mask), whole[6])
    expected = verify_with("default", interpreted=interpreted)(*whole)
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
