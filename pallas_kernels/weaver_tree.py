"""Growth of a Weaver's tree in one kernel, where there is one; elsewhere `tfm_jax.growth` does the same in XLA.

The kernel is for batch 1 and a Weaver of generation w1 with one layer, in bfloat16.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import device_lacks

COLUMNS = 16  # of every matrix that a program owns; so a kernel has rank / 16 programs, one per multiprocessor
PATH = 16  # slots on a path, the root's among them
WARPS = 8  # with 16 a tree takes 1.3 times as long on an H200
_LEAST_NODES = 8  # to which a step is padded
_LANES = 32
_MOST_ENTRIES = 4096  # of the frontier, which every program keeps in registers


class WeaverWeights(NamedTuple):
    """Parameters of a Weaver of generation w1 with one layer; matrices are [out, in].

    A norm of `qkv` and of `fc1` is folded into them: of x̂ · scale + bias, the scale into the matrix and the bias, through
    the matrix, into the vector behind it.
    """

    qkv: Float[Array, "three_ranks rank"]
    qkv_bias: Float[Array, " three_ranks"]  # float32
    out: Float[Array, "rank rank"]
    fc1: Float[Array, "mlp rank"]
    fc1_bias: Float[Array, " mlp"]  # float32
    fc2: Float[Array, "rank mlp"]
    fc2_bias: Float[Array, " rank"]
    out_norm_scale: Float[Array, " rank"]
    out_norm_bias: Float[Array, " rank"]


class TreeGrowth(NamedTuple):
    """Slots, those of a step together, the last `width` not expanded; and the children of those that were expanded.

    A score of −inf marks what is not there; children that became slots are not there any more.
    """

    tokens: Int[Array, " slots"]
    parents: Int[Array, " slots"]
    depths: Int[Array, " slots"]
    scores: Float[Array, " slots"]
    lineage: Int[Array, "slots path"]  # the path of a slot from the root to itself, −1 beyond
    frontier_scores: Float[Array, "expanded expand"]
    frontier_tokens: Int[Array, "expanded expand"]


def supports(
    weights: WeaverWeights, *, depth: int, pool: int, width: int, groups: int, expand: int, ahead: int = 0
) -> bool:
    """Whether `grow` has a kernel for these sizes on this machine."""
    mlp, rank = weights.fc1.shape
    rows = width * (1 + ahead)
    entries = _power_of_two(groups) * max(_LEAST_NODES, _power_of_two(rows)) * expand
    return (
        weights.qkv.dtype == jnp.bfloat16
        and rank == mlp == _power_of_two(rank)
        and rank >= 16 * COLUMNS
        and rank // COLUMNS <= _multiprocessors()
        and pool == _power_of_two(pool)
        and COLUMNS <= pool <= 512  # noqa: PLR2004 - the pool of the released Weaver, and the largest measured
        and depth < PATH
        and rows <= COLUMNS
        and expand == _power_of_two(expand)
        and entries <= _MOST_ENTRIES
        and available()
    )


def available() -> bool:
    """Whether this machine can run the kernel at all."""
    return device_lacks("triton") is None


def grow(
    root: Int[Array, " one"],
    candidate_ids: Int[Array, "depth pool"],
    candidate_scores: Float[Array, "depth pool"],
    inputs_table: Float[Array, "vocab rank"],
    heads_table: Float[Array, "vocab rank"],
    positions: Float[Array, "positions rank"],
    prompt_keys: Float[Array, "prompt heads head"],
    prompt_values: Float[Array, "prompt heads head"],
    weights: WeaverWeights,
    *,
    width: int,
    groups: int,
    expand: int,
    ahead: int = 0,
) -> TreeGrowth:
    """The tree after `groups` steps of `width` nodes, before any pruning; only where `supports` says so.

    Args:
        root: last emitted token.
        candidate_ids: possible children of the nodes of each depth; −1 means no candidate.
        candidate_scores: their logits.
        inputs_table: node inputs before positions, a row a token.
        heads_table: rows whose products with a node's output correct the logits, a row a token.
        positions: added to the inputs, a row a depth.
        prompt_keys: of depth + 1 prompt tokens.
        prompt_values: of the same.
        weights: of the Weaver.
        width: frontier entries per step.
        groups: steps.
        expand: children per node.
        ahead: guesses behind each entry, so that a step has width · (1 + ahead) nodes, at most 16.

    Raises:
        ModuleNotFoundError: jax-triton is not installed.
    """
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_weaver_tree_kernel import grow_kernel

    depth, pool = candidate_ids.shape
    rank = inputs_table.shape[1]
    rows = width * (1 + ahead)
    slots, expanded = groups * rows + width, groups * rows
    nodes = max(_LEAST_NODES, _power_of_two(rows))
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    shapes = [
        ((1,), i32), ((slots,), i32), ((slots,), i32), ((slots,), i32), ((slots,), f32), ((slots, PATH), i32),
        ((expanded, expand), f32), ((expanded, expand), i32),
        ((3, slots, rank), bf16), ((rows, rank), bf16), ((rows, rank), bf16), ((rows, rank), bf16), ((rows, rank), bf16),
        ((rows, pool), f32),
    ]  # fmt: skip
    _, *growth = jax_triton.triton_call(
        root, candidate_ids, candidate_scores.astype(jnp.float32), inputs_table, heads_table, positions, prompt_keys,
        prompt_values, *weights,
        kernel=grow_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        grid=(rank // COLUMNS,),
        zeroed_outputs=(0,),
        num_warps=WARPS,
        rank=rank,
        heads=prompt_keys.shape[1],
        depth=depth,
        pool=pool,
        width=width,
        ahead=ahead,
        nodes=nodes,
        groups=groups,
        expand=expand,
        programs=rank // COLUMNS,
        entries=max(1, _power_of_two(groups) * expand // _LANES),
        picks=max(1, nodes * _power_of_two(width) // _LANES),
    )[:8]  # fmt: skip
    return TreeGrowth(*growth)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _multiprocessors() -> int:
    return getattr(jax.devices()[0], "core_count", 0)
