"""Attention of a tree over a committed prefix and itself, against one dense softmax in float64."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import IMPLEMENTATIONS, ancestors_of, kernel, random_tree, relative_error

import pallas_kernels
from pallas_kernels import Prefix


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


class AttentionCase(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array
    prefix: Prefix


def make_case(group: int, capacity: int, lengths: list[int]) -> AttentionCase:
    """A tree of seven nodes, the last of them unused, after prefixes of the given lengths; rows beyond are loud."""
    rng = np.random.default_rng(capacity + group)
    batch, nodes, kv_heads, head = len(lengths), 7, 2, 16

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ancestors = ancestors_of(random_tree(rng, nodes))
    depths = ancestors.sum(axis=1) - 1
    mask = np.broadcast_to(ancestors, (batch, nodes, nodes)).copy()
    mask[:, -1] = False
    free = jnp.arange(capacity)[:, None] >= jnp.array(lengths)[:, None, None, None]
    prefix = Prefix(
        keys=jnp.where(free, 1e4, normal(batch, kv_heads, capacity, head)),
        values=jnp.where(free, 1e4, normal(batch, kv_heads, capacity, head)),
        lengths=jnp.array(lengths, jnp.int32),
        positions=jnp.asarray(np.array(lengths)[:, None] + depths, jnp.int32),
    )
    query, key = 2 * normal(batch, nodes, kv_heads * group, head), normal(batch, nodes, kv_heads, head)
    return AttentionCase(query, key, normal(batch, nodes, kv_heads, head), jnp.asarray(mask), prefix)


def attend(implementation: str, case: AttentionCase, window: int = 0) -> jax.Array:
    return kernel("tree_attention", implementation, window=window)(*case[:4], prefix=case.prefix)


def dense_attention(case: AttentionCase, window: int) -> np.ndarray:
    """Prefix and nodes side by side, keys and values repeated for every query head."""
    group, rows = case.query.shape[2] // case.key.shape[2], np.arange(case.prefix.keys.shape[2])
    q, k, v, pk, pv = (np.asarray(x, np.float64) for x in (*case[:3], *case.prefix[:2]))
    keys = np.repeat(np.concatenate([pk, k.swapaxes(1, 2)], axis=2), group, axis=1)
    values = np.repeat(np.concatenate([pv, v.swapaxes(1, 2)], axis=2), group, axis=1)
    lengths, positions = np.asarray(case.prefix.lengths), np.asarray(case.prefix.positions)
    distance = positions[..., None] - rows
    seen = (rows < lengths[:, None, None]) & (distance < window if window else distance >= 0)
    visible = np.concatenate([seen, case.mask], axis=2)[:, None]
    scores = np.where(visible, np.einsum("bnhd,bhtd->bhnt", q, keys) / np.sqrt(q.shape[-1]), -1e300)
    weights = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    return np.einsum("bhnt,bhtd->bnhd", weights, values)


@pytest.mark.parametrize(
    ("group", "capacity", "lengths", "window"),
    [
        (1, 40, [40, 0, 17], 0),
        (6, 40, [40, 0, 17], 9),
        (2, 512, [512, 0, 300], 0),
        (2, 513, [513, 512, 0], 0),
        (6, 1100, [1100, 1024, 1023], 0),
        (2, 1100, [0, 0, 0], 0),
        (2, 1100, [1100, 700, 3], 64),
        (1, 1536, [1300, 1290, 1536], 200),
    ],
)
def test_attention_is_one_dense_softmax(
    implementation: str, group: int, capacity: int, lengths: list[int], window: int
) -> None:
    case = make_case(group, capacity, lengths)
    assert relative_error(attend(implementation, case, window), dense_attention(case, window)) < 2e-6


def test_bfloat16_keeps_its_dtype_and_normalises_in_float32(implementation: str) -> None:
    """700 equal weights of 1/700: a softmax summed in bfloat16 would stop growing at 256."""
    case = make_case(2, 1100, [700, 700, 700])
    flat = case.prefix._replace(keys=jnp.zeros_like(case.prefix.keys), values=jnp.ones_like(case.prefix.values))
    equal = case._replace(query=jnp.zeros_like(case.query), value=jnp.zeros_like(case.value), prefix=flat)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, equal)
    output = attend(implementation, narrow)
    share = 700 / (700 + case.mask.sum(axis=-1))
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(output.astype(jnp.float32), np.broadcast_to(share[..., None, None], output.shape), 2**-8)


def test_a_node_that_sees_nothing_attends_to_zero(implementation: str) -> None:
    output = attend(implementation, make_case(2, 1100, [0, 0, 600]))
    np.testing.assert_array_equal(output[:2, -1], 0)
    assert np.isfinite(output).all()


def test_attention_without_a_prefix_equals_an_empty_one(implementation: str) -> None:
    case = make_case(2, 40, [0, 0, 0])
    alone = kernel("tree_attention", implementation)(*case[:4], prefix=None)
    np.testing.assert_array_equal(alone, attend(implementation, case))


def test_gradient_without_a_prefix_is_that_of_a_softmax() -> None:
    query, key, value, mask, _ = make_case(2, 8, [0, 0, 0])

    def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        keys, values = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("bnhd,bthd->bhnt", query, keys, precision="highest") / 4
        weights = jnp.where(mask[:, None], jnp.exp(scores), 0.0)
        weights /= jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
        return jnp.sum(jnp.einsum("bhnt,bthd->bnhd", weights, values, precision="highest") ** 2)

    def ours(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.sum(pallas_kernels.tree_attention(query, key, value, mask, prefix=None) ** 2)

    actual, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(query, key, value) for f in (ours, plain))
    for x, y in zip(actual, expected, strict=True):
        assert relative_error(x, y) < 1e-5


@pytest.mark.parametrize("window", [0, 600])
def test_temporaries_do_not_grow_with_the_cache(window: int) -> None:
    def temporary_bytes(capacity: int) -> int:
        case = jax.eval_shape(lambda: make_case(3, capacity, [8, 8]))
        attention = jax.jit(pallas_kernels.tree_attention, static_argnames="window")
        compiled = attention.lower(*case[:4], prefix=case.prefix, window=window).compile()
        return compiled.memory_analysis().temp_size_in_bytes  # pyrefly: ignore[missing-attribute]

    assert temporary_bytes(16384) <= 1.1 * temporary_bytes(2048)


def test_heads_and_windows_that_make_no_sense_are_refused() -> None:
    query, key, value, mask, _ = make_case(1, 8, [0])
    three = jnp.concatenate([query, query[:, :, :1]], axis=2)
    with pytest.raises(ValueError, match="3 query heads do not divide among 2 key/value heads"):
        pallas_kernels.tree_attention(three, key, value, mask, prefix=None)
    with pytest.raises(ValueError, match="window is -1"):
        pallas_kernels.tree_attention(query, key, value, mask, prefix=None, window=-1)
