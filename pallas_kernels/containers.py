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
