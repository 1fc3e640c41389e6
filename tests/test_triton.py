"""The Triton forms against the oracles on a GPU, and what they refuse; test_triton_interpreted.py needs none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import ancestors_of, chain, random_tree

from pallas_kernels import GdnTreeResult, Prefix, reference, triton_attention, triton_gdn

BARS = {"default": 5e-4, "highest": 5e-6}


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def l2_error(actual: jax.Array, expected: np.ndarray) -> float:
    difference = exact(actual) - expected
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))


# --- trees of the gated delta rule -----------------------------------------------------------------------------------


def gdn_operands(
    parents: np.ndarray, ratio: int, width: int, *, batch: int = 1, dtype: str = "bfloat16", gates: str = "moderate"
) -> tuple[jax.Array, ...]:
    """Random operands; with `gates` a cosine, keys have it between any two, decay is slow and β near 1."""
    rng = np.random.default_rng(len(parents))
    nodes, key_heads = len(parents), 2
    shape = (batch, nodes, key_heads * ratio)
    log_decay, beta = -np.exp(rng.standard_normal(shape) - 1), rng.uniform(0.0, 1.0, shape)
    key = rng.standard_normal((batch, nodes, key_heads, width))
    if gates == "extreme":
        log_decay = np.where(rng.random(shape) < 0.5, rng.choice([0.0, -30.0, -1000.0], shape), log_decay)
        beta = np.where(rng.random(shape) < 0.5, rng.choice([0.0, 1.0], shape), beta)
    elif gates != "moderate":
        cosine = float(gates)
        key = np.sqrt(cosine) * rng.standard_normal((batch, 1, key_heads, width)) + np.sqrt(1 - cosine) * key
        log_decay, beta = -0.01 * rng.random(shape), rng.uniform(0.9, 1.0, shape)
    return (
        normal(rng, *key.shape, dtype=dtype),
        jnp.asarray(key, dtype),
        normal(rng, *shape, width, dtype=dtype),
        jnp.asarray(log_decay, jnp.float32),
        jnp.asarray(beta, jnp.float32),
        jnp.asarray(np.broadcast_to(ancestors_of(parents), (batch, nodes, nodes))),
        normal(rng, batch, shape[2], width, width),
    )


def gdn_oracle(operands: tuple[jax.Array, ...]) -> GdnTreeResult:
    query, key, value, log_decay, beta, ancestors, state = operands
    return reference.gdn_tree_verify(
        exact(query), exact(key), exact(value), exact(log_decay), exact(beta), np.asarray(ancestors), exact(state)
    )


def tree_of(kind: str) -> np.ndarray:
    name, nodes = kind.split()
    return chain(int(nodes)) if name == "chain" else random_tree(np.random.default_rng(0), int(nodes), depth=31)


# A kernel takes seconds to compile, so each case stands for several shapes and gates.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "ratio", "width", "batch", "dtype", "gates", "precision"),
    [
        ("tree 1", 4, 64, 3, "bfloat16", "moderate", "default"),
        ("tree 5", 2, 16, 2, "float32", "extreme", "highest"),
        ("tree 16", 3, 128, 2, "bfloat16", "moderate", "default"),
        ("tree 64", 3, 128, 1, "bfloat16", "extreme", "default"),
        ("chain 64", 3, 128, 1, "bfloat16", "0.99", "default"),
        ("chain 64", 3, 128, 1, "bfloat16", "0.99", "highest"),
        ("tree 65", 3, 128, 1, "float32", "extreme", "default"),
        ("tree 128", 3, 128, 1, "bfloat16", "0.99", "default"),
        ("chain 256", 1, 128, 1, "bfloat16", "0.9", "highest"),
    ],
)
def test_trees_are_as_exact_as_promised(
    kind: str, ratio: int, width: int, batch: int, dtype: str, gates: str, precision: str
) -> None:
    operands = gdn_operands(tree_of(kind), ratio, width, batch=batch, dtype=dtype, gates=gates)
    assert triton_gdn.unsupported(*operands) is None
    actual = jax.jit(lambda *operands: triton_gdn.gdn_tree_verify(*operands, precision=precision))(*operands)
    for x, y in zip(actual, gdn_oracle(operands), strict=True):
        assert np.isfinite(x).all()
        assert l2_error(x, y) < BARS[precision]


@pytest.mark.gpu
def test_unused_nodes_disturb_no_other() -> None:
    operands = gdn_operands(tree_of("tree 20"), 3, 64)
    ancestors = operands[5].at[:, 12:].set(False).at[:, :, 12:].set(False)
    full = triton_gdn.gdn_tree_verify(*operands[:5], ancestors, operands[6])
    first = triton_gdn.gdn_tree_verify(*(x[:, :12] for x in operands[:5]), ancestors[:, :12, :12], operands[6])
    for x, y in zip(full, first, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x[:, :12], y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "width", "dtype", "reason"),
    [
        (257, 64, "bfloat16", "up to 256 nodes and these are 257"),
        (3, 48, "bfloat16", "heads of 16, 32, 64 or 128 and these are 48 and 48"),
        (3, 64, "float16", "in bfloat16 or in float32 and these are float16 and float16"),
    ],
)
def test_trees_that_it_cannot_take_are_named(nodes: int, width: int, dtype: str, reason: str) -> None:
    operands = gdn_operands(tree_of(f"chain {nodes}"), 1, width, dtype=dtype)
    assert reason in str(triton_gdn.unsupported(*operands))


# --- attention -------------------------------------------------------------------------------------------------------


def attention_operands(
    nodes: int, heads: tuple[int, int], head: int, lengths: list[int], dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Prefix]:
    """A tree whose last node is unused, unless it is alone; rows beyond the lengths are loud."""
    rng = np.random.default_rng(nodes)
    batch, capacity = len(lengths), max(lengths) + 37
    ancestors = ancestors_of(random_tree(rng, nodes))
    mask = np.broadcast_to(ancestors, (batch, nodes, nodes)).copy()
    if nodes > 1:
        mask[:, -1] = False
    free = jnp.arange(capacity)[:, None] >= jnp.array(lengths)[:, None, None, None]
    cache = [normal(rng, batch, heads[1], capacity, head, dtype=dtype) for _ in range(2)]
    prefix = Prefix(
        keys=jnp.where(free, jnp.asarray(1e4, dtype), cache[0]),
        values=jnp.where(free, jnp.asarray(1e4, dtype), cache[1]),
        lengths=jnp.array(lengths, jnp.int32),
        positions=jnp.asarray(np.array(lengths)[:, None] + ancestors.sum(axis=1) - 1, jnp.int32),
    )
    query = normal(rng, batch, nodes, heads[0], head, dtype=dtype)
    own = [normal(rng, batch, nodes, heads[1], head, dtype=dtype) for _ in range(2)]
    return query, *own, jnp.asarray(mask), prefix


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("nodes", "heads", "head", "lengths", "dtype", "window"),
    [
        (64, (24, 4), 256, [1000], "bfloat16", 0),
        (1, (24, 4), 256, [3000], "bfloat16", 0),
        (64, (6, 1), 256, [700], "float32", 0),
        (65, (8, 2), 128, [777, 0, 500], "bfloat16", 100),
        (33, (1, 1), 64, [0], "float16", 0),
        (7, (6, 2), 64, [100, 3], "float32", 9),
        (200, (6, 1), 128, [2000], "bfloat16", 0),
        (5, (2, 1), 16, [600], "float32", 9),
    ],
)
def test_attention_is_one_softmax(
    nodes: int, heads: tuple[int, int], head: int, lengths: list[int], dtype: str, window: int
) -> None:
    operands = attention_operands(nodes, heads, head, lengths, dtype)
    assert triton_attention.unsupported(*operands, window=window) is None
    actual = jax.jit(lambda *x: triton_attention.tree_attention(*x, window=window))(*operands)
    q, k, v, mask, prefix = operands
    cached = Prefix(exact(prefix.keys), exact(prefix.values), np.asarray(prefix.lengths), np.asarray(prefix.positions))
    expected = reference.tree_attention(exact(q), exact(k), exact(v), np.asarray(mask), cached, window=window)
    assert actual.dtype == q.dtype
    assert l2_error(actual, expected) < {"float32": 2e-6, "float16": 1e-3, "bfloat16": 2.5e-3}[dtype]


@pytest.mark.gpu
def test_a_node_that_sees_nothing_attends_to_zero() -> None:
    query, key, value, mask, _ = attention_operands(7, (6, 2), 64, [0], "float32")
    output = triton_attention.tree_attention(query, key, value, mask, None)
    np.testing.assert_array_equal(output[:, -1], 0)
    assert np.isfinite(output).all()


def test_attention_that_it_cannot_take_is_named() -> None:
    query, key, value, mask, prefix = attention_operands(3, (2, 1), 64, [5], "float32")
    mixed = prefix._replace(keys=prefix.keys.astype(jnp.bfloat16))
    assert "this is bfloat16, float32" in str(triton_attention.unsupported(query, key, value, mask, mixed))
    narrow = (x[..., :48] for x in (query, key, value))
    assert "heads of 16, 32, 64, 128 or 256 and these are 48" in str(triton_attention.unsupported(*narrow, mask, None))
