"""Verification of a tree by the gated delta rule as one Mosaic GPU kernel (Hopper).

Algebra, in the notation of `pallas_kernels.xla`, for one value head and a tile of up to 64 nodes:
(I + A) U = β (V − e^G K S), O = e^G Q S + M U, with A and M the decayed Gram matrices K Kᵀ and Q Kᵀ below and on the
diagonal. The Gram products and those with the state take the raw bf16 q and k, which makes them exact on one side;
norms multiply rows afterwards. Scaling U by k's inverse norms (W = U / |k|) turns k's norms on columns of A and M into
a second factor on rows, so that no norm is ever needed along columns.

Solve. Let node pairs be of level l when l is the highest bit in which their depths differ, and A_l the pairs of A of
that level. X = (I + A_0 + … + A_{l−1})⁻¹ is block diagonal by depth >> l, hence X A restricted to level l is X A_l, and
X ← X − (X A_l) X adds that level: A is written to shared memory once, and masks of depths do the rest. The last three
levels are not worth an inverse: with P = X A over them, P⁸ = 0 and U = (I + P⁴)(I + P²)(I − P) X rhs, whose factors are
applied while the next square is computed. A depth up to 15 costs four products in a row. Powers of P count paths of
blocks, at most C(7, 3) = 35 of them, where powers of A itself would count up to C(depth, depth / 2) and cancel: with
keys alike, plain doubling loses all digits on a long chain, this form none that matter.

Schedule. One block of threads for a value head and a slice of the value dimension. One warpgroup makes square matrices
and sends X, −P, P² and P⁴ through a ring in shared memory; another splits the state into bf16 parts, computes the
right-hand side, multiplies it by what comes and writes U. When the first has nothing left to send, it makes M and the
outputs. The matrices of a tile do not depend on earlier tiles: beyond 64 nodes two warpgroups make them, one those of
even tiles and one those of odd tiles. Each has a ring of its own, in which the couplings of a tile to earlier ones
precede its X. Shared memory is short then: values lie where W will be, and queries come where A was, once P is made.

Both inverting warpgroups run the same code, and what repeats is a loop: unrolled, 128 nodes take 6 % longer.

Prefix sums of log-decays, in base 2, are kept as multiples of 1/256 plus a remainder. Sums of the former are exact, so
differences of prefixes keep the digits of a weak decay downstream of a strong one.

What `ancestors` says about a tree is packed into a few integers a node (`pack_ancestors`), the same for all layers.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._mosaic_gdn_body import kernel
from pallas_kernels._mosaic_gdn_plan import WORD, Plan
from pallas_kernels.containers import GdnTreeResult
from pallas_kernels.dispatch import Precision
from pallas_kernels.mosaic_common import BF16, F32, I32, TILE_ROWS, num_parts, round_up

MAX_NODES = 256
MAX_RATIO = 4  # value heads a key head
HEAD_DIMS = (64, 128)
NODE_MULTIPLE = 16  # rows of the smallest operand that a product takes as its right side
SMEM_BYTES = 232_448 - 4096  # of a block, less barriers and gaps
VALUE_BLOCKS = (64, 32, 16)
RING_SLOTS = (4, 3, 2)  # of all rings


def unsupported(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    ancestors: Array,
    state: Array,
    *,
    precision: Precision = "default",  # noqa: ARG001 - either fits
) -> str | None:
    """Which argument this kernel cannot take and why, None if it can take all; shapes must fit each other already."""
    for name, x, dtype in (
        ("query", query, BF16),
        ("key", key, BF16),
        ("value", value, BF16),
        ("log_decay", log_decay, F32),
        ("beta", beta, F32),
        ("state", state, F32),
    ):
        if x.dtype != dtype:
            return f"{name} is {x.dtype}, the Mosaic kernel takes {jnp.dtype(dtype)}"
    key_heads, key_dim = key.shape[2:]
    heads, value_dim = value.shape[2:]
    nodes = ancestors.shape[1]
    if nodes > MAX_NODES:
        return f"ancestors has {nodes} nodes, the Mosaic kernel takes at most {MAX_NODES}"
    if heads > MAX_RATIO * key_heads:
        return f"value has {heads} heads for {key_heads} of key, the Mosaic kernel takes at most {MAX_RATIO} for one"
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size not in HEAD_DIMS:
            return f"{name} has head dimension {size}, the Mosaic kernel takes {HEAD_DIMS}"
    return None


def pack_ancestors(ancestors: Bool[Array, "batch nodes nodes"]) -> Int[Array, "batch words padded_nodes"]:
    """A tree as the kernel reads it: for each node its ancestors in words of 32 bits, its depth twice, the levels.

    The depth is there for a column view and a row view, which may not be loaded from the same place; levels are those
    of the whole tree, log2 of its depth. Layers that share `ancestors` in a program share this.
    """
    batch, nodes, _ = ancestors.shape
    padded = round_up(nodes, TILE_ROWS)
    bits = jnp.pad(ancestors, [(0, 0), (0, padded - nodes), (0, padded - nodes)])
    shifts = jnp.arange(WORD, dtype=jnp.uint32)
    words = jnp.sum(bits.reshape(batch, padded, -1, WORD).astype(jnp.uint32) << shifts, axis=-1, dtype=jnp.uint32)
    depths = jnp.maximum(jnp.sum(bits, axis=-1, dtype=I32) - 1, 0)
    levels = 32 - lax.clz(jnp.max(depths, axis=-1, keepdims=True))
    rest = jnp.stack([depths, depths, jnp.broadcast_to(levels, depths.shape)], axis=1)
    return jnp.concatenate([jnp.swapaxes(lax.bitcast_convert_type(words, I32), 1, 2), rest], axis=1)


def gdn_tree_verify(
    query: Float[Array, "batch nodes key_heads key"],
    key: Float[Array, "batch nodes key_heads key"],
    value: Float[Array, "batch nodes value_heads value"],
    log_decay: Float[Array, "batch nodes value_heads"],
    beta: Float[Array, "batch nodes value_heads"],
    ancestors: Bool[Array, "batch nodes nodes"],
    state: Float[Array, "batch value_heads key value"],
    *,
    precision: Precision = "default",
    interpret: plgpu.InterpretGPUParams | None = None,
) -> GdnTreeResult:
    """`pallas_kernels.gdn_tree_verify` on arguments of which `unsupported` has nothing to say.

    Node counts up to 64 that are multiples of 16, and multiples of 64, are taken as they are; others are padded, which
    costs copies of the arguments.

    Args:
        query: raw queries, bf16.
        key: raw keys, bf16.
        value: values, bf16.
        log_decay: g ≤ 0, float32.
        beta: write strengths, float32.
        ancestors: row i is true at i and at its ancestors, which have smaller indices.
        state: committed state, float32.
        precision: "default" is 1e-5 from float64 (5e-5 when keys are alike), "highest" 5e-7 at twice the products.
        interpret: set to run on a CPU.
    """
    operands = query, key, value, log_decay, beta, pack_ancestors(ancestors), state
    if interpret is not None:  # below a jit the interpreter's threads can starve on a machine of few cores
        return _verify(*operands, precision=precision, interpret=interpret)
    return _verify_jitted(*operands, precision=precision)


def _verify(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    tree: Array,
    state: Array,
    *,
    precision: Precision,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> GdnTreeResult:
    nodes = key.shape[1]
    multiple = NODE_MULTIPLE if nodes <= TILE_ROWS else TILE_ROWS
    query, key, value = (_pad_nodes(x, multiple) for x in (query, key, value))
    if nodes > TILE_ROWS:
        log_decay, beta = (_pad_nodes(x, TILE_ROWS) for x in (log_decay, beta))
    batch, _, heads, value_dim = value.shape
    group, parts = heads // key.shape[2], num_parts(precision)
    plan = _find_plan(nodes, key.shape[1], group, key.shape[3], parts, interpret=interpret is not None)
    wide = jax.ShapeDtypeStruct(value.shape, F32)
    call = plgpu.kernel(
        functools.partial(kernel, plan=plan),
        out_type=(wide, wide, jax.ShapeDtypeStruct(log_decay.shape, F32)),
        scratch_types=plan.scratch() | plan.barriers(),
        grid=(batch, heads, value_dim // plan.block),
        grid_names=("batch", "head", "block"),
        num_threads=plan.inverters + 1,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="gdn_tree_verify",
        # Every store would be between two barriers; `commit_smem` is where one is needed.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    results = call(query, key, value, log_decay, beta, tree, state)
    return GdnTreeResult(*(x if x.shape[1] == nodes else x[:, :nodes] for x in results))


# The layers of a model share one trace.
_verify_jitted = jax.jit(_verify, static_argnames="precision")


def _find_plan(given: int, nodes: int, group: int, key_dim: int, parts: int, *, interpret: bool) -> Plan:
    """The widest slice of the value dimension, then the longest rings, whose buffers fit; the smallest always do."""
    sizes = itertools.product(VALUE_BLOCKS, RING_SLOTS)
    plans = (Plan(given, nodes, group, key_dim, *size, parts, interpret) for size in sizes)
    return next(plan for plan in plans if plan.bytes() <= SMEM_BYTES)


def _pad_nodes(x: Array, multiple: int) -> Array:
    extra = round_up(x.shape[1], multiple) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)]) if extra else x
