"""The Triton forms against the oracles on a CPU, interpreted; but for the Weaver's, whose programs wait for each other.

Results begin as NaN, so that what a kernel reads and did not write is seen. The interpreter cuts float32 down to
bfloat16 where a GPU rounds, which bfloat16 parts of float32 numbers do not mind, but bfloat16 results would.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_top_k import KINDS, draw_rows
from test_triton import BARS, attention_operands, exact, gdn_operands, gdn_oracle, l2_error, tree_of
from triton_on_cpu import interpreted

from pallas_kernels import Prefix, reference, triton_attention, triton_gdn, triton_top_k

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # jax has little part in it


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted(), np.errstate(all="ignore"):
        yield


@given(
    nodes=st.integers(1, 140),
    ratio=st.integers(1, 4),
    dtype=st.sampled_from(("bfloat16", "float32")),
    gates=st.sampled_from(("moderate", "extreme", "0", "0.9", "0.99")),
    precision=st.sampled_from(tuple(BARS)),
)
@settings(max_examples=6, deadline=None)
def test_trees_of_the_gated_delta_rule(nodes: int, ratio: int, dtype: str, gates: str, precision: str) -> None:
    operands = gdn_operands(tree_of(f"tree {nodes}"), ratio, 16, dtype=dtype, gates=gates)
    actual = triton_gdn.gdn_tree_verify(*operands, precision=precision)
    for x, y in zip(actual, gdn_oracle(operands), strict=True):
        assert l2_error(x, y) < BARS[precision]


def test_a_chain_of_eight_tiles() -> None:
    operands = gdn_operands(tree_of("chain 256"), 1, 128, dtype="float32", gates="0.99")
    actual = triton_gdn.gdn_tree_verify(*operands, precision="highest")
    for x, y in zip(actual, gdn_oracle(operands), strict=True):
        assert l2_error(x, y) < BARS["highest"]


@pytest.mark.parametrize(
    ("nodes", "heads", "head", "lengths", "dtype", "window"),
    [
        (7, (6, 2), 64, [100, 3], "float32", 9),
        (33, (1, 1), 64, [0], "float16", 0),
        (1, (6, 1), 64, [300], "float32", 0),
        (5, (2, 1), 16, [600], "float32", 9),
        (40, (6, 2), 32, [77, 0, 50], "float32", 20),
    ],
)
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int, heads: tuple[int, int], head: int, lengths: list[int], dtype: str, window: int,
) -> None:  # fmt: skip
    query, key, value, mask, prefix = attention_operands(nodes, heads, head, lengths, dtype)
    device = SimpleNamespace(compute_capability="8.6", core_count=12)
    with monkeypatch.context() as context:
        context.setattr(triton_attention.jax, "devices", lambda: [device])
        actual = triton_attention.tree_attention(query, key, value, mask, prefix, window=window)
    cached = Prefix(exact(prefix.keys), exact(prefix.values), np.asarray(prefix.lengths), np.asarray(prefix.positions))
    expected = reference.tree_attention(exact(query), exact(key), exact(value), np.asarray(mask), cached, window=window)
    assert l2_error(actual, expected) < {"float32": 2e-6, "float16": 1e-3}[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest(kind: str) -> None:
    logits = draw_rows(kind, 2, 4096 + 77, 4)
    values, ids = triton_top_k.top_k(jnp.asarray(logits), k=63)
    expected_values, expected_ids = reference.top_k(logits, k=63)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(np.asarray(values).view(np.int32), expected_values.view(np.int32))
