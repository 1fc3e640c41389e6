"""`weaver_tree` for NVIDIA GPUs as one persistent Triton kernel, called through jax-triton."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.constants import PATH
from pallas_kernels.containers import TreeGrowth, WeaverWeights

COLUMNS = 16  # of every matrix that a program owns; so a kernel has rank / 16 programs, one per multiprocessor
WARPS = 8  # with 16 a tree takes 1.3 times as long on an H200
LANES = 32
_NODES = 8  # a step is padded to this or to twice this
_LEAST_RANK = 512  # a warp takes two repeats of eight words of four channels
_MOST_POOL = 512  # of the released Weaver, and the largest measured
_MOST_ENTRIES = 4096  # of the frontier, which every program keeps in registers


def unsupported(
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
) -> str | None:
    """What the kernel cannot take."""
    del root, candidate_scores
    (depth, pool), (mlp, rank) = candidate_ids.shape, weights.fc1.shape
    halves = (inputs_table, heads_table, positions, prompt_keys, prompt_values, weights.qkv, weights.out, weights.fc1)
    types = sorted({str(x.dtype) for x in (*halves, weights.fc2, weights.fc2_bias, *weights[-2:])})
    rows, heads, programs = width * (1 + ahead), prompt_keys.shape[1], rank // COLUMNS
    entries = _power_of_two(groups) * _padded(rows) * expand
    least, most = _LEAST_RANK, 2 * _NODES
    reasons = (
        (types != ["bfloat16"], f"it computes in bfloat16 and these are {' and '.join(types)}"),
        (
            not mlp == rank == _power_of_two(rank) >= least,
            f"rank is {rank} and the MLP's width {mlp}, expected one power of two, at least {least}, for both",
        ),
        (heads != _power_of_two(heads), f"there are {heads} heads, expected a power of two"),
        (
            not COLUMNS <= pool == _power_of_two(pool) <= _MOST_POOL,
            f"pool is {pool}, expected a power of two from {COLUMNS} to {_MOST_POOL}",
        ),
        (depth >= PATH, f"there are candidates of {depth} depths, expected at most {PATH - 1}"),
        (rows > most, f"a step has {rows} nodes, width · (1 + ahead), expected at most {most}"),
        (
            not expand == _power_of_two(expand) <= LANES,
            f"expand is {expand}, expected a power of two up to {LANES}",
        ),
        (entries > _MOST_ENTRIES, f"the frontier has {entries} entries with padding, expected at most {_MOST_ENTRIES}"),
        (
            programs > _multiprocessors(),
            f"a rank of {rank} needs {programs} multiprocessors and this device has {_multiprocessors()}",
        ),
    )
    return next((reason for cannot, reason in reasons if cannot), None)


def weaver_tree(
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
    """All steps of a tree in one kernel; the front door describes the arguments, `unsupported` which it takes."""
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_weaver_tree_kernel import grow_kernel

    depth, pool = candidate_ids.shape
    rank = inputs_table.shape[1]
    rows = width * (1 + ahead)
    slots, expanded = groups * rows + width, groups * rows
    nodes = _padded(rows)
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    shapes = [
        ((1,), i32), ((slots,), i32), ((slots,), i32), ((slots,), i32), ((slots,), f32), ((slots, PATH), i32),
        ((expanded, expand), f32), ((expanded, expand), i32),
        ((3, slots, rank), bf16), ((rows, rank), bf16), ((rows, rank), bf16), ((rows, rank), bf16),
        ((rows, rank), bf16), ((rows, pool), f32),
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
        entries=max(1, _power_of_two(groups) * expand // LANES),
        picks=max(1, nodes * _power_of_two(width) // LANES),
    )[:8]  # fmt: skip
    return TreeGrowth(*growth)


def _padded(rows: int) -> int:
    """Nodes that a step is padded to."""
    return max(_NODES, _power_of_two(rows))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _multiprocessors() -> int:
    return getattr(jax.devices()[0], "core_count", 0)
