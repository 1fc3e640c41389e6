"""Device code of `triton_commit`: one program advances one block of key rows of one head's state.

It imports Triton, so only `triton_commit` imports it, when a kernel is wanted.
"""

from __future__ import annotations

from typing import no_type_check

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

# `no_type_check` keeps run-time shape checkers off: Triton reads the source and needs the plain function.


@triton.jit
@no_type_check
def commit_layers(
    path: tl.tensor,
    count: tl.tensor,
    key_0: tl.tensor,
    key_1: tl.tensor,
    key_2: tl.tensor,
    key_3: tl.tensor,
    update_0: tl.tensor,
    update_1: tl.tensor,
    update_2: tl.tensor,
    update_3: tl.tensor,
    decay_0: tl.tensor,
    decay_1: tl.tensor,
    decay_2: tl.tensor,
    decay_3: tl.tensor,
    _before_0: tl.tensor,
    _before_1: tl.tensor,
    _before_2: tl.tensor,
    _before_3: tl.tensor,
    state_0: tl.tensor,
    state_1: tl.tensor,
    state_2: tl.tensor,
    state_3: tl.tensor,
    nodes: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    max_steps: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """S ← e^{G_leaf} S + Σ_j e^{G_leaf − G_j} k_j u_jᵀ; the state after is where the state before was."""
    layer = tl.program_id(2)
    if layer == 0:
        _advance(
            key_0, update_0, decay_0, state_0, path, count,
            nodes, key_heads, value_heads, key_size, value_size, max_steps, steps, block,
        )  # fmt: skip
    elif layer == 1:
        _advance(
            key_1, update_1, decay_1, state_1, path, count,
            nodes, key_heads, value_heads, key_size, value_size, max_steps, steps, block,
        )  # fmt: skip
    elif layer == 2:  # noqa: PLR2004
        _advance(
            key_2, update_2, decay_2, state_2, path, count,
            nodes, key_heads, value_heads, key_size, value_size, max_steps, steps, block,
        )  # fmt: skip
    else:
        _advance(
            key_3, update_3, decay_3, state_3, path, count,
            nodes, key_heads, value_heads, key_size, value_size, max_steps, steps, block,
        )  # fmt: skip


@triton.jit
@no_type_check
def _advance(
    key: tl.tensor,
    update: tl.tensor,
    decay: tl.tensor,
    state: tl.tensor,
    path: tl.tensor,
    count: tl.tensor,
    nodes: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    max_steps: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A program of one layer. The loads of states, path and rows do not wait for each other where they need not."""
    row = (tl.program_id(1) // value_heads).to(tl.int64)
    head = tl.program_id(1) % value_heads
    accepted = tl.load(count + row)
    if accepted > 0:
        mine = tl.program_id(0) * block + tl.arange(0, block)
        dims, columns, step = tl.arange(0, key_size), tl.arange(0, value_size), tl.arange(0, steps)
        places = state + ((row * value_heads + head) * key_size + mine)[:, None] * value_size + columns[None, :]
        S = tl.load(places)
        taken = step < accepted
        node = tl.load(path + row * max_steps + step, mask=taken, other=0)
        leaf = tl.load(path + row * max_steps + accepted - 1)
        gates = decay + row * nodes * value_heads + head
        G_leaf = tl.load(gates + leaf * value_heads)
        G = tl.load(gates + node * value_heads, mask=taken, other=0.0)
        k_rows = key + ((row * nodes + node) * key_heads + head // (value_heads // key_heads))[:, None] * key_size
        k = tl.load(k_rows + dims[None, :], mask=taken[:, None], other=0.0).to(tl.float32)
        k_mine = tl.load(k_rows + mine[None, :], mask=taken[:, None], other=0.0).to(tl.float32)
        u_rows = update + ((row * nodes + node) * value_heads + head)[:, None] * value_size
        u = tl.load(u_rows + columns[None, :], mask=taken[:, None], other=0.0)
        weight = tl.where(taken, tl.exp(tl.where(taken, G_leaf - G, 0.0)), 0.0) * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)
        written = tl.dot(tl.trans(k_mine * weight[:, None]), u, input_precision="tf32x3")
        tl.store(places, tl.exp(G_leaf) * S + written)
