"""Named groups of arrays that go into and come out of the kernels; all are pytrees."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class GdnTreeResult(NamedTuple):
    """What verification of a tree yields; `update` and `path_decay` are what a commit needs beside the keys."""

    output: Float[Array, "batch nodes value_heads value"]  # o_i = S_iᵀ q̂_i
    update: Float[Array, "batch nodes value_heads value"]  # u_i, so that S_i = e^{g_i} S_parent + k_i u_iᵀ
    path_decay: Float[Array, "batch nodes value_heads"]  # G_i = Σ g_j over i and its ancestors, natural logarithm


class GdnChunkResult(NamedTuple):
    """Outputs of a run of tokens and the state after the last valid one."""

    output: Float[Array, "batch tokens value_heads value"]
    state: Float[Array, "batch value_heads key value"]


class Prefix(NamedTuple):
    """Committed keys and values that every node of a block may attend to: cache row t belongs to position t."""

    keys: Float[Array, "batch kv_heads capacity head"]
    values: Float[Array, "batch kv_heads capacity head"]
    lengths: Int[Array, " batch"]  # rows t < length hold tokens; the others are never visible
    positions: Int[Array, "batch nodes"]  # absolute positions of the nodes, only read when there is a window


class WeaverWeights(NamedTuple):
    """Parameters of a Weaver of generation w1 with one layer; matrices are [out, in].

    The norms in front of `qkv` and `fc1` are folded into them: of x̂ · scale + bias, with x̂ of mean square 1, the scale
    into the matrix and the bias, seen through the matrix, into the vector behind it.
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
