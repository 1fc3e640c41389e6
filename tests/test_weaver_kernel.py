"""Growth of a Weaver's tree behind its front door: its forms against each other, and against the Weaver's own steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_tree import assert_well_formed
from test_weaver_step import make_weaver, scores_by_path

import pallas_kernels
from pallas_kernels import TreeGrowth, triton_weaver_tree
from tfm_jax.growth import grown_tree
from tfm_jax.weaver import Weaver

SCHEDULES = [(3, 4, 0), (2, 4, 1), (2, 3, 3), (1, 6, 0)]  # width, groups, ahead


def trained(weaver: Weaver) -> Weaver:
    """Norms and biases as training leaves them: neither 1 nor 0."""
    rng = np.random.default_rng(2)
    for norm in (weaver.blocks[0].norm_attn, weaver.blocks[0].norm_mlp, weaver.out_norm):
        shape, dtype = norm.scale[...].shape, norm.scale[...].dtype
        norm.scale[...] = jnp.asarray(1 + 0.3 * rng.standard_normal(shape), dtype)
        norm.bias[...] = jnp.asarray(0.2 * rng.standard_normal(shape), dtype)
    for layer in (weaver.blocks[0].fc1, weaver.blocks[0].fc2):
        layer.bias[...] = jnp.asarray(0.2 * rng.standard_normal(layer.bias[...].shape), layer.bias[...].dtype)
    return weaver


def door_operands(weaver: Weaver, arguments: tuple) -> list[Any]:
    """What `Weaver.build_tree` gives to the front door."""
    root, feature, hidden, ids, scores, tables = arguments
    prompt = weaver.prompt(feature, hidden)
    return [
        root, ids[0], scores[0], tables.inputs, tables.heads, weaver.pos_emb[...], prompt.keys[0, 0],
        prompt.values[0, 0], weaver.kernel_weights(),
    ]  # fmt: skip


def small_operands() -> list[Any]:
    weaver, arguments = make_weaver(rank=32, pool=8, depth=5, dtype="float32", batch=1)
    return door_operands(trained(weaver), arguments)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_forms_agree(schedule: tuple[int, int, int]) -> None:
    width, groups, ahead = schedule
    operands = small_operands()
    sizes = {"width": width, "groups": groups, "expand": 4, "ahead": ahead}
    fast, slow = (
        jax.tree.map(np.asarray, pallas_kernels.weaver_tree(*operands, **sizes, implementation=form))
        for form in ("xla", "reference")
    )
    for name in ("tokens", "parents", "depths", "lineage"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), err_msg=name)
    np.testing.assert_allclose(fast.scores, slow.scores, atol=1e-5)
    np.testing.assert_allclose(fast.frontier_scores, slow.frontier_scores, atol=1e-5)
    there = slow.frontier_scores > -np.inf
    assert there.any()
    np.testing.assert_array_equal(fast.frontier_tokens[there], slow.frontier_tokens[there])


@pytest.mark.parametrize("options", [{"steps": 5}, {"steps": 4, "ahead": 1}, {}])
def test_a_weaver_grows_the_same_tree_behind_the_door(options: dict[str, int]) -> None:
    """In float32 the norms that are folded into matrices change nothing that could be seen."""
    weaver, arguments = make_weaver(rank=32, pool=8, depth=5, dtype="float32", batch=1)
    trained(weaver)
    *inputs, tables = arguments
    build = nnx.jit(Weaver.build_tree, static_argnames=("budget", "width", "steps", "ahead"))
    tables = tables._replace(weights=weaver.kernel_weights())
    door = build(weaver, *inputs, tables, budget=15, width=3, **options)
    own = build(weaver, *inputs, tables._replace(weights=None), budget=15, width=3, **options)
    for name in ("tokens", "parents", "depths", "valid", "ancestors"):
        np.testing.assert_array_equal(getattr(door, name), getattr(own, name), err_msg=name)
    np.testing.assert_allclose(door.scores, own.scores, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "sizes", "reason"),
    [
        ({"dtype": "float32"}, {}, "it computes in bfloat16 and these are float32"),
        ({"rank": 256}, {}, "rank is 256 and the MLP's width 256, expected one power of two, at least 512, for both"),
        ({"pool": 8}, {}, "pool is 8, expected a power of two from 16 to 512"),
        ({}, {"width": 6, "ahead": 2}, "a step has 18 nodes, width · (1 + ahead), expected at most 16"),
        ({}, {"expand": 5}, "expand is 5, expected a power of two up to 32"),
        ({}, {"groups": 65}, "the frontier has 8192 entries with padding, expected at most 4096"),
    ],
)
def test_trees_that_the_kernel_cannot_take_are_named(shape: dict[str, Any], sizes: dict[str, int], reason: str) -> None:
    weaver, arguments = make_weaver(**{"rank": 512, "pool": 16, "depth": 7, "dtype": "bfloat16", "batch": 1, **shape})
    operands = door_operands(weaver, arguments)
    sizes = {"width": 4, "groups": 6, "expand": 8, **sizes}
    assert triton_weaver_tree.unsupported(*operands, **sizes) == reason


def test_what_does_not_fit_is_refused() -> None:
    root, ids, scores, *others = small_operands()
    sizes = {"width": 2, "groups": 3, "expand": 4}
    with pytest.raises(ValueError, match="expand is 9, expected 1 to 8, the candidates of each depth"):
        pallas_kernels.weaver_tree(root, ids, scores, *others, **{**sizes, "expand": 9})
    with pytest.raises(ValueError, match="width is 0, groups 3 and ahead 0, expected at least 1, 1 and 0"):
        pallas_kernels.weaver_tree(root, ids, scores, *others, **{**sizes, "width": 0})
    narrow = others[-1]._replace(fc2=others[-1].fc2[:-1])
    with pytest.raises(ValueError, match=r"weights.fc2 has shape \(31, 32\), expected \(32, 32\)"):
        pallas_kernels.weaver_tree(root, ids, scores, *others[:-1], narrow, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [512, 2048])
@pytest.mark.parametrize("schedule", [(4, None, 0), (4, 6, 0), (4, 4, 1), (2, 5, 3), (5, 4, 1), (16, 3, 0)])
def test_the_kernel_grows_the_tree(rank: int, schedule: tuple[int, int | None, int]) -> None:
    """Against the Weaver's own steps, whose sums are rounded to bfloat16 elsewhere."""
    width, steps, ahead = schedule
    weaver, arguments = make_weaver(rank=rank, pool=64, depth=7, dtype="bfloat16", batch=1)
    trained(weaver)
    *inputs, tables = arguments
    sizes = {"width": width, "groups": steps or -(-31 // width), "expand": 8, "ahead": ahead}

    def grow(form: pallas_kernels.Implementation) -> TreeGrowth:
        return pallas_kernels.weaver_tree(*door_operands(weaver, arguments), **sizes, implementation=form)

    first, again = grow("triton"), grow("triton")
    jax.tree.map(np.testing.assert_array_equal, first, again)
    pruned = steps is not None
    tree = grown_tree(first, budget=31, max_depth=7, pruned=pruned)
    assert_well_formed(tree)
    build = nnx.jit(Weaver.build_tree, static_argnames=("budget", "width", "steps", "ahead"))
    own = build(weaver, *inputs, tables._replace(weights=None), budget=31, width=width, steps=steps, ahead=ahead)
    for other in (own, grown_tree(grow("xla"), budget=31, max_depth=7, pruned=pruned)):
        scores, expected = scores_by_path(tree), scores_by_path(other)
        common = scores.keys() & expected.keys()
        assert len(common) > 0.8 * len(expected)
        np.testing.assert_allclose([scores[path] for path in common], [expected[path] for path in common], atol=0.15)
