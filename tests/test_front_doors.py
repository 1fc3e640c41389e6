"""What the front doors of the kernels refuse before any kernel sees it: one sentence that names the argument."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import Prefix

KEY, STATE = jnp.ones((1, 5, 2, 4)), jnp.ones((1, 2, 4, 4))
TREE = (KEY, KEY, KEY, KEY[..., 0], KEY[..., 0], jnp.eye(5, dtype=bool)[None], STATE)
COMMIT = ((STATE,), (KEY,), (KEY,), (KEY[..., 0],), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32))
CACHE, TAPS = jnp.ones((1, 2, 9, 4)), jnp.zeros((1, 5, 4), jnp.int32)
ROWS = ((), (), TAPS, (CACHE,), (KEY,), jnp.zeros(1, jnp.int32), *COMMIT[4:])
CONV = (jnp.ones((1, 5, 8)), jnp.ones((1, 3, 8)), jnp.ones((4, 8)), TAPS)
PREFIX = Prefix(CACHE, CACHE, jnp.array([3]), jnp.zeros((1, 5), jnp.int32))
ATTENTION = (KEY, KEY, KEY, TREE[5])


def changed(operands: tuple[Any, ...], place: int, operand: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return (*operands[:place], operand, *operands[place + 1 :])


@pytest.mark.parametrize(
    ("door", "operands", "sentence"),
    [
        (
            "gdn_tree_verify",
            changed(TREE, 0, KEY[0]),
            r"query has shape \(5, 2, 4\), expected axes batch, nodes, key_h",
        ),
        (
            "gdn_tree_verify",
            changed(TREE, 2, KEY[0]),
            r"value has shape \(5, 2, 4\), expected axes batch, nodes, value",
        ),
        ("gdn_tree_verify", changed(TREE, 5, TREE[5] * 1.0), "ancestors is float32, expected booleans"),
        ("gdn_tree_verify", changed(TREE, 1, KEY.astype(int)), "key is int32, expected floating-point numbers"),
        ("gdn_tree_verify", changed(TREE, 6, None), "state is of type NoneType, expected an array"),
        ("gdn_chunk", changed(TREE, 5, jnp.ones((1, 5))), "valid is float32, expected booleans"),
        ("commit_states", changed(COMMIT, 0, STATE), "states is of type ArrayImpl, expected a tuple"),
        ("commit_states", changed(COMMIT, 1, (KEY, KEY)), "there are 1 states, 2 keys, 1 updates, 1 path_decays, exp"),
        ("commit_states", changed(COMMIT, 4, COMMIT[4] * 1.0), "path is float32, expected integers"),
        ("commit_states", changed(COMMIT, 4, COMMIT[4][:, :0]), r"nothing to commit: path has shape \(1, 0\), and the"),
        ("commit_rows", changed(ROWS, 4, (KEY, KEY)), "there are 1 caches, 2 rows, expected as many of each"),
        ("commit_rows", changed(ROWS, 3, (CACHE[:, :, :0],)), r"cache has shape \(1, 2, 0, 4\), expected room for at"),
        ("commit_rows", changed(ROWS, 5, jnp.array([-1])), "lengths holds -1, expected 0 to "),
        ("tree_conv", changed(CONV, 0, CONV[0][0]), r"inputs has shape \(5, 8\), expected axes batch, nodes, channels"),
        ("tree_conv", (CONV[0][:, :0], *CONV[1:3], TAPS[:, :0]), "there is nothing to convolve: inputs has shape"),
        ("tree_conv", changed(CONV, 3, TAPS * 1.0), "taps is float32, expected integers"),
        (
            "tree_attention",
            changed(ATTENTION, 1, KEY[0]),
            r"key has shape \(5, 2, 4\), expected axes batch, nodes, kv_",
        ),
        ("tree_attention", changed(ATTENTION, 0, KEY.astype(int)), "query is int32, expected floating-point numbers"),
        ("top_k", (jnp.float32(1),), r"logits has shape \(\), expected axes \*batch, vocab"),
        ("top_k", (jnp.arange(9),), "logits is int32, expected floating-point numbers"),
    ],
)
def test_arrays_that_are_something_else_are_named(door: str, operands: tuple[Any, ...], sentence: str) -> None:
    options = {"tree_conv": {"widths": (8,)}, "tree_attention": {"prefix": None}, "top_k": {"k": 1}}.get(door, {})
    with pytest.raises(ValueError, match=sentence):
        getattr(pallas_kernels, door)(*operands, **options)


@pytest.mark.parametrize(
    ("prefix", "sentence"),
    [
        (PREFIX._replace(lengths=jnp.array([3.5])), "prefix.lengths is float32, expected integers"),
        (PREFIX._replace(lengths=jnp.array([10])), "prefix.lengths holds 10, expected 0 to 9 for a prefix of 9 rows"),
        (PREFIX._replace(lengths=jnp.array([-3])), "prefix.lengths holds -3, expected 0 to 9"),
        (PREFIX._replace(keys=CACHE[0]), r"prefix.keys has shape \(2, 9, 4\), expected axes batch, kv_heads, capacity"),
        (Prefix(CACHE[:, :, :0], CACHE[:, :, :0], *PREFIX[2:]), "prefix.keys has shape .*, expected room for at least"),
        (tuple(PREFIX), "prefix is of type tuple, expected Prefix"),
    ],
)
def test_a_prefix_that_is_something_else_is_named(prefix: Any, sentence: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=sentence):
        pallas_kernels.tree_attention(*ATTENTION, prefix=prefix)
