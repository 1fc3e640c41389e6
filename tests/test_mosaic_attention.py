"""Tree attention with Mosaic: interpreted against the float64 oracle, and lowered for Hopper from the same shapes.

The interpreter accepts what a GPU does not, so neither test says much without the other.
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
from kernel_cases import ancestors_of, random_tree

from pallas_kernels import Prefix, mosaic_attention, reference
from pallas_kernels.mosaic_attention_parts import Tuning

INTERPRETED = plgpu.InterpretGPUParams()


class Shape(NamedTuple):
    nodes: int
    kv_heads: int
    group: int
    head: int
    capacity: int
    lengths: tuple[int, ...]  # one a batch row
    window: int = 0


# One case for each way through the kernels: rows packed or not, staged or not, a partial tile, a row without a prefix,
# a tile that would reach beyond the capacity, a capacity below a tile, a window that ends inside tiles, two node tiles.
SHAPES = [
    Shape(1, 1, 6, 256, 304, (257, 30)),
    Shape(5, 2, 3, 64, 304, (200,)),
    Shape(64, 1, 2, 128, 264, (200,)),
    Shape(11, 1, 6, 128, 264, (264, 0), window=100),
    Shape(64, 1, 2, 256, 256, (133,)),
    Shape(3, 1, 1, 128, 24, (7,)),
    Shape(100, 1, 1, 64, 264, (264,)),
]


class Case(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array
    prefix: Prefix


def make_case(shape: Shape) -> Case:
    """A random tree after prefixes whose rows beyond the length are NaN."""
    rng = np.random.default_rng(shape.nodes)
    batch = len(shape.lengths)

    def normal(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(jnp.bfloat16)

    ancestors = ancestors_of(random_tree(rng, shape.nodes))
    lengths = np.array(shape.lengths)
    keys, values = (normal(batch, shape.kv_heads, shape.capacity, shape.head) for _ in range(2))
    for rows in (keys, values):
        rows[np.broadcast_to(np.arange(shape.capacity) >= lengths[:, None, None], rows.shape[:3])] = np.nan
    case = Case(
        query=normal(batch, shape.nodes, shape.kv_heads * shape.group, shape.head),
        key=normal(batch, shape.nodes, shape.kv_heads, shape.head),
        value=normal(batch, shape.nodes, shape.kv_heads, shape.head),
        mask=np.broadcast_to(ancestors, (batch, shape.nodes, shape.nodes)),
        prefix=Prefix(
            keys, values, lengths.astype(np.int32), (lengths[:, None] + ancestors.sum(axis=1) - 1).astype(np.int32)
        ),
    )
    return jax.tree.map(jnp.asarray, case)


def expected(case: Case, window: int) -> np.ndarray:
    """The float64 oracle, fed the same bfloat16 numbers."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == jnp.bfloat16 else np.asarray(x), case)
    return reference.tree_attention(*wide[:4], prefix=wide.prefix, window=window)


def relative_error(actual: jax.Array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


@functools.cache
def abstract_gpu(kind: str) -> AbstractMesh:
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
    return AbstractMesh((1,), ("x",), abstract_device=device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_it_is_the_oracle(shape: Shape) -> None:
    """Weights and outputs are rounded to bfloat16, 1.7e-3 each at worst."""
    case = make_case(shape)
    run = functools.partial(mosaic_attention.tree_attention, window=shape.window, interpret=INTERPRETED, splits=3)
    assert relative_error(run(*case[:4], prefix=case.prefix), expected(case, shape.window)) < 2.5e-3


@pytest.mark.parametrize("nodes", [1, 64])
def test_tiles_pass_through_few_slots(nodes: int) -> None:
    """Every slot is filled several times."""
    case = make_case(Shape(nodes, 1, 2, 64, 512, (511,)))
    tuning = Tuning(warpgroups=1 if nodes == 1 else 2, tile=64, slots=3)
    run = functools.partial(mosaic_attention.tree_attention, interpret=INTERPRETED, tuning=tuning, splits=1)
    assert relative_error(run(*case[:4], prefix=case.prefix), expected(case, 0)) < 2.5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [3, None])
@pytest.mark.parametrize(
    "shape", [*SHAPES, Shape(64, 4, 6, 256, 4096, (4001,)), Shape(256, 2, 6, 256, 2048, (2048,))], ids=str
)
def test_on_a_gpu_it_is_the_oracle(shape: Shape, splits: int | None) -> None:
    case = make_case(shape)
    run = functools.partial(mosaic_attention.tree_attention, window=shape.window, splits=splits)
    assert relative_error(run(*case[:4], prefix=case.prefix), expected(case, shape.window)) < 2.5e-3


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, *(Shape(nodes, 4, 6, 256, 262144, (4096,)) for nodes in (64, 1)), Shape(256, 2, 2, 128, 512, (1,))],
    ids=str,
)
def test_it_lowers_for_hopper(shape: Shape, kind: str) -> None:
    case = jax.eval_shape(lambda: make_case(shape._replace(capacity=8, lengths=(0,) * len(shape.lengths))))
    rows = jax.ShapeDtypeStruct((*case.prefix.keys.shape[:2], shape.capacity, shape.head), jnp.bfloat16)
    prefix = case.prefix._replace(keys=rows, values=rows)
    with jax.sharding.use_abstract_mesh(abstract_gpu(kind)):
        traced = mosaic_attention.tree_attention.trace(*case[:4], prefix=prefix, window=shape.window)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_node_that_sees_nothing_attends_to_zero() -> None:
    case = make_case(Shape(5, 2, 3, 64, 8, (0,)))
    blind = case.mask.at[:, -1].set(False)
    output = mosaic_attention.tree_attention(*case[:3], blind, prefix=case.prefix, interpret=INTERPRETED)
    np.testing.assert_array_equal(output[:, -1], 0)
    assert np.isfinite(np.asarray(output, np.float32)).all()


def test_without_a_prefix_it_is_an_empty_one() -> None:
    case = make_case(Shape(70, 1, 1, 64, 8, (0,)))
    run = functools.partial(mosaic_attention.tree_attention, *case[:4], interpret=INTERPRETED)
    np.testing.assert_array_equal(run(prefix=None), run(prefix=case.prefix))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": jnp.float32}, "query is float32"),
        ({"head": 96}, "head dimension 96"),
        ({"nodes": 257}, "257 nodes"),
        ({"capacity": 20}, "capacity 20"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, int], named: str) -> None:
    shape = Shape(5, 2, 3, 64, 304, (200,))
    case = make_case(shape._replace(**{k: v for k, v in change.items() if k != "query"}, lengths=(8,)))
    query = case.query.astype(change.get("query", jnp.bfloat16))
    assert named in mosaic_attention.unsupported(query, *case[1:])
    case = make_case(shape)
    assert mosaic_attention.unsupported(*case) is None
