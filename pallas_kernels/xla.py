"""Gated DeltaNet and the short convolution in jnp: the production form on every device, and the one that trains.

Notation of the gated delta rule, per value head: q, k normalised, q also scaled; g ≤ 0 the log-decay, β the write
strength, S the state. G_i = Σ g over i and its ancestors, D_ij = e^{G_i − G_j} where j is i or an ancestor, else 0.
With A_ij = β_i D_ij (k_i·k_j) for proper ancestors, (I + A) U = β (V − e^G K S) gives all updates of a block at once,
and the outputs are e^G Q S + (D ∘ Q Kᵀ) U. A chunk of text is the tree without branches.

The functions are jitted so that the layers of a model, which call them with the same shapes, share one trace.

Inside, arrays are [batch, key_heads, group, …]: the `group` value heads that share a key head also share K Kᵀ, Q Kᵀ.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.constants import MIN_LOG_DECAY, NORM_EPS
from pallas_kernels.containers import GdnChunkResult, GdnTreeResult

CHUNK = 64
SOLVE_TILE = 16


def l2_normalise(x: Float[Array, "... key"]) -> Float[Array, "... key"]:
    """Unit vectors along the last axis in float32, x · rsqrt(Σ x² + 1e-6)."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


@jax.jit
def gdn_tree_verify(
    query: Float[Array, "batch nodes key_heads key"],
    key: Float[Array, "batch nodes key_heads key"],
    value: Float[Array, "batch nodes value_heads value"],
    log_decay: Float[Array, "batch nodes value_heads"],
    beta: Float[Array, "batch nodes value_heads"],
    ancestors: Bool[Array, "batch nodes nodes"],
    state: Float[Array, "batch value_heads key value"],
) -> GdnTreeResult:
    """All nodes of a tree in one pass over the state."""
    inputs = _group_heads(query, key, value, log_decay, beta)
    s = _group_states(state, query.shape[2])
    ancestors = ancestors[:, None, None]
    block = _block_terms(inputs, ancestors)
    path_decay = _einsum("...ij,...j->...i", ancestors.astype(jnp.float32), inputs.g)
    reach = jnp.exp(path_decay)[..., None]
    inherited = reach * _einsum("bhnk,bhgkv->bhgnv", inputs.k, s)
    update = _matmul(block.inverse, inputs.beta[..., None] * (inputs.v - inherited))
    output = reach * _einsum("bhnk,bhgkv->bhgnv", inputs.q, s) + _matmul(block.readout, update)
    return GdnTreeResult(_ungroup_heads(output), _ungroup_heads(update), _ungroup_heads(path_decay))


@jax.jit
def gdn_commit(
    state: Float[Array, "batch value_heads key value"],
    key: Float[Array, "batch nodes key_heads key"],
    update: Float[Array, "batch nodes value_heads value"],
    path_decay: Float[Array, "batch nodes value_heads"],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
) -> Float[Array, "batch value_heads key value"]:
    """S ← e^{G_leaf} S + Σ_{j < count} e^{G_leaf − G_j} k_j u_jᵀ along the path."""
    key_heads = key.shape[2]
    k = jnp.moveaxis(l2_normalise(take_nodes(key, path)), 1, 2)
    u = _split_heads(take_nodes(update, path), key_heads)
    decay = _split_heads(take_nodes(path_decay, path), key_heads)
    last = jnp.maximum(count - 1, 0)[:, None, None, None]
    leaf = jnp.take_along_axis(decay, jnp.broadcast_to(last, (*decay.shape[:-1], 1)), axis=-1)
    taken = jnp.arange(path.shape[1]) < count[:, None]
    weight = jnp.exp(jnp.where(taken[:, None, None], leaf - decay, -jnp.inf))
    written = _einsum("bhsk,bhgsv->bhgkv", k, weight[..., None] * u)
    committed = jnp.exp(leaf)[..., None] * _group_states(state, key_heads) + written
    return jnp.where(count[:, None, None, None] > 0, committed.reshape(state.shape), state)


@jax.jit
def gdn_chunk(
    query: Float[Array, "batch tokens key_heads key"],
    key: Float[Array, "batch tokens key_heads key"],
    value: Float[Array, "batch tokens value_heads value"],
    log_decay: Float[Array, "batch tokens value_heads"],
    beta: Float[Array, "batch tokens value_heads"],
    valid: Bool[Array, "batch tokens"],
    state: Float[Array, "batch value_heads key value"],
) -> GdnChunkResult:
    """Everything that does not need the state is computed for all chunks at once; a scan carries the state.

    The state of each chunk's start is not known outside the scan, so the solve is split as U − W S with
    (I + A) U = β V and (I + A) W = β e^G K (Yang et al. 2024, arXiv 2412.06464, section 3.3).
    """
    batch, tokens, key_heads = query.shape[:3]
    log_decay = jnp.where(valid[..., None], log_decay, 0.0)
    beta = jnp.where(valid[..., None], beta, 0.0)
    size = min(tokens, CHUNK)
    chunks = -(-tokens // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch * chunks, size, *x.shape[2:])

    def scanned(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(batch, chunks, *x.shape[1:]), 1, 0)

    inputs = _group_heads(*map(split, (query, key, value, log_decay, beta)))
    block = _block_terms(inputs, jnp.tril(jnp.ones((size, size), bool)))
    total = jnp.cumsum(inputs.g, axis=-1)
    k, q = inputs.k[:, :, None], inputs.q[:, :, None]
    reach = jnp.exp(total)[..., None]
    u = _matmul(block.inverse, inputs.beta[..., None] * inputs.v)
    w = _matmul(block.inverse, inputs.beta[..., None] * reach * k)
    remaining = block.decay[..., -1, :, None] * k
    forget = reach[..., -1:, :]

    def step(s: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        u, w, remaining, forget = chunk
        update = u - _matmul(w, s)
        return forget * s + _einsum("bhgik,bhgiv->bhgkv", remaining, update), (s, update)

    final, (starts, updates) = lax.scan(
        step, _group_states(state, key_heads), tuple(map(scanned, (u, w, remaining, forget)))
    )
    starts, updates = (jnp.moveaxis(x, 0, 1).reshape(batch * chunks, *x.shape[2:]) for x in (starts, updates))
    output = _matmul(reach * q, starts) + _matmul(block.readout, updates)
    output = _ungroup_heads(output).reshape(batch, chunks * size, *value.shape[2:])[:, :tokens]
    return GdnChunkResult(output, final.reshape(state.shape))


@functools.partial(jax.jit, static_argnames="widths")
def tree_conv(
    inputs: Float[Array, "batch nodes channels"],
    window: Float[Array, "batch window channels"],
    kernel: Float[Array, "width channels"],
    taps: Int[Array, "batch nodes width"],
    *,
    widths: tuple[int, ...],
) -> tuple[Float[Array, "batch nodes _"], ...]:
    """Both gathers and a choice, which fuse; one gather of nodes behind the window would make that array first."""
    rows, width = take_nodes(inputs, jnp.maximum(taps, 0)), kernel.shape[0]
    if width > 1:
        committed = take_nodes(window.astype(inputs.dtype), jnp.clip(taps + width - 1, 0, width - 2))
        rows = jnp.where(taps[..., None] < 0, committed, rows)
    weight = kernel[::-1].astype(jnp.float32)
    activated = jax.nn.silu(jnp.sum(rows.astype(jnp.float32) * weight, axis=2)).astype(inputs.dtype)
    return tuple(jnp.split(activated, list(itertools.accumulate(widths[:-1])), axis=-1))


class _Inputs(NamedTuple):
    """Float32 operands of a block, heads grouped; q and k belong to a key head, the others to a value head."""

    q: Float[Array, "batch key_heads nodes key"]
    k: Float[Array, "batch key_heads nodes key"]
    v: Float[Array, "batch key_heads group nodes value"]
    g: Float[Array, "batch key_heads group nodes"]
    beta: Float[Array, "batch key_heads group nodes"]


class _Block(NamedTuple):
    """The state-free matrices of a block."""

    decay: Float[Array, "batch key_heads group nodes nodes"]  # D
    inverse: Float[Array, "batch key_heads group nodes nodes"]  # (I + A)⁻¹
    readout: Float[Array, "batch key_heads group nodes nodes"]  # D ∘ Q Kᵀ


def _group_heads(query: Array, key: Array, value: Array, log_decay: Array, beta: Array) -> _Inputs:
    key_heads, scale = query.shape[2], query.shape[3] ** -0.5
    return _Inputs(
        q=jnp.moveaxis(l2_normalise(query) * scale, 1, 2),
        k=jnp.moveaxis(l2_normalise(key), 1, 2),
        v=_split_heads(value, key_heads),
        g=jnp.maximum(_split_heads(log_decay, key_heads), MIN_LOG_DECAY),
        beta=_split_heads(beta, key_heads),
    )


def _split_heads(x: Array, key_heads: int) -> Array:
    """[batch, nodes, value_heads, …] → [batch, key_heads, group, nodes, …] in float32."""
    x = x.reshape(*x.shape[:2], key_heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3).astype(jnp.float32)


def _ungroup_heads(x: Array) -> Array:
    """[batch, key_heads, group, nodes, …] → [batch, nodes, value_heads, …]."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _group_states(state: Array, key_heads: int) -> Array:
    """[batch, value_heads, key, value] → [batch, key_heads, group, key, value] in float32."""
    return state.reshape(state.shape[0], key_heads, -1, *state.shape[2:]).astype(jnp.float32)


def take_nodes(x: Shaped[Array, "batch nodes ..."], indices: Int[Array, "batch ..."]) -> Shaped[Array, "batch ..."]:
    """Rows of the nodes with these indices, per row of the batch."""
    return jax.vmap(lambda rows, picked: rows[picked])(x, indices)


def _block_terms(inputs: _Inputs, ancestors: Bool[Array, "*batch nodes nodes"]) -> _Block:
    """D is 0 outside ancestors, so its products with the Gram matrices need no mask of their own."""
    decay = _path_decays(inputs.g, ancestors)
    gram = _einsum("bhik,bhjk->bhij", inputs.k, inputs.k)[:, :, None]
    lookup = _einsum("bhik,bhjk->bhij", inputs.q, inputs.k)[:, :, None]
    return _Block(decay, invert_unit_lower(inputs.beta[..., None] * decay * gram), decay * lookup)


def _path_decays(g: Array, ancestors: Array) -> Array:
    """D_ij = e^{Σ g over the path from below j down to i}, 0 unless j is i or an ancestor of i.

    The sum is taken over the path itself. G_i − G_j would be cheaper, but after strong decay upstream both are large
    and their difference has lost the digits of a weak decay downstream.
    """
    on_path = ancestors.astype(jnp.float32)
    below = jnp.swapaxes(1.0 - on_path, -1, -2)
    exponent = _matmul(on_path, g[..., :, None] * below)
    return jnp.exp(jnp.where(ancestors, exponent, -jnp.inf))


@jax.custom_vjp
def invert_unit_lower(a: Float[Array, "*batch nodes nodes"]) -> Float[Array, "*batch nodes nodes"]:
    """(I + a)⁻¹ for the part of a below the diagonal, of any size; the diagonal is not read, nothing is above it.

    Block halving: with both diagonal halves inverted, the corner is X21 = −X22 a21 X11. No power of a is ever formed:
    those grow like binomial coefficients when keys are alike and cancel only in exact arithmetic, so that repeated
    squaring loses all digits on a long chain.
    """
    nodes = a.shape[-1]
    size = 1 << (nodes - 1).bit_length()
    padding = [(0, 0)] * (a.ndim - 2) + [(0, size - nodes)] * 2
    return _invert_by_halves(jnp.pad(a, padding))[..., :nodes, :nodes]


def _invert_by_halves(a: Array) -> Array:
    """Sizes above a tile, with true sub-blocks: a level costs two products of its own block size."""
    half = a.shape[-1] // 2
    if 2 * half <= SOLVE_TILE:
        return _invert_tile(a)
    halves = _invert_by_halves(jnp.stack([a[..., :half, :half], a[..., half:, half:]], axis=-3))
    upper, lower = halves[..., 0, :, :], halves[..., 1, :, :]
    corner = -_matmul(lower, _matmul(a[..., half:, :half], upper))
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)


def _invert_tile(a: Array) -> Array:
    """The same recursion from single nodes up, all blocks of a level in one masked product: small blocks cost a launch.

    Nodes i and j are in neighbouring blocks of `size` when the highest bit of i ^ j is `size`.
    """
    rows = jnp.arange(a.shape[-1])
    apart = rows[:, None] ^ rows
    inverse = jnp.eye(a.shape[-1]) - jnp.where(apart == 1, a, 0.0)
    size = 2
    while size < a.shape[-1]:
        corners = jnp.where((apart >= size) & (apart < 2 * size), a, 0.0)
        inverse -= _matmul(inverse, _matmul(corners, inverse))
        size *= 2
    return inverse


def _invert_forward(a: Array) -> tuple[Array, Array]:
    inverse = invert_unit_lower(a)
    return inverse, inverse


def _invert_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    """d(M⁻¹) = −M⁻¹ dM M⁻¹, so two products replace the transposed recursion."""
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(transposed, _matmul(cotangent, transposed)), -1),)


invert_unit_lower.defvjp(_invert_forward, _invert_backward)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _einsum(subscripts: str, *operands: Array) -> Array:
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)
