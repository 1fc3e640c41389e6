"""Device code of `triton_gdn`: one program verifies a tree for one value head and one block of value columns.

It imports Triton, so only `triton_gdn` imports it, when a kernel is wanted.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# `no_type_check` keeps run-time shape checkers off: Triton reads the source and needs the plain function.


@triton.jit
@no_type_check
def verify_tree(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    ancestors: tl.tensor,
    state: tl.tensor,
    output: tl.tensor,
    update: tl.tensor,
    path_decay: tl.tensor,
    nodes: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    levels: tl.constexpr,
    terms: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """Forward substitution over tiles of nodes; inside a tile the inverse of I + A by halving.

    Letters are those of `pallas_kernels.xla`. U of earlier tiles is read back from `update`, which this program wrote.
    Keys and queries stay raw in the products, so that bfloat16 ones are exact, and are normalised by their rows' norms.
    """
    column_block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // (value_heads // key_heads)
    slots = tl.arange(0, tile)
    dims = tl.arange(0, key_size)
    columns = column_block * block + tl.arange(0, block)

    ancestors += row * nodes * nodes
    keys_at = row * nodes * key_heads + key_head  # vector of node n: keys_at + n · key_heads
    gates_at = row * nodes * value_heads + head
    state += (row * value_heads + head) * key_size * value_size
    S = tl.load(state + dims[:, None] * value_size + columns[None, :]).to(tl.float32)

    for i in range((nodes + tile - 1) // tile):
        node_i = i * tile + slots
        inside = node_i < nodes
        rows_i = (keys_at + node_i * key_heads)[:, None] * key_size + dims[None, :]
        k_i = tl.load(key + rows_i, mask=inside[:, None], other=0.0)
        q_i = tl.load(query + rows_i, mask=inside[:, None], other=0.0)
        k_norm = _inverse_norm(k_i)
        q_norm = _inverse_norm(q_i) * (key_size**-0.5)
        gates_i = gates_at + node_i * value_heads
        beta_i = tl.load(beta + gates_i, mask=inside, other=0.0).to(tl.float32)
        values_i = gates_i[:, None] * value_size + columns[None, :]
        v_i = tl.load(value + values_i, mask=inside[:, None], other=0.0).to(tl.float32)

        G = tl.zeros([tile], tl.float32)
        for m in range(i + 1):
            node_m = m * tile + slots
            g = _gates(log_decay, gates_at, node_m, nodes, value_heads)
            G += tl.sum(tl.where(_on_path(ancestors, node_i, node_m, nodes), g[None, :], 0.0), axis=1)
        reach = tl.exp(G)
        rhs = beta_i[:, None] * (v_i - (reach * k_norm)[:, None] * _raw_product(k_i, S, terms, form))
        out = (reach * q_norm)[:, None] * _raw_product(q_i, S, terms, form)

        for j in range(i):
            node_j = j * tile + slots
            rows_j = (keys_at + node_j * key_heads)[:, None] * key_size + dims[None, :]
            k_j = tl.load(key + rows_j)
            D = _path_decays(ancestors, log_decay, gates_at, node_i, i, j, nodes, value_heads, tile)
            D *= _inverse_norm(k_j)[None, :]
            U = tl.load(update + (gates_at + node_j * value_heads)[:, None] * value_size + columns[None, :])
            A = (beta_i * k_norm)[:, None] * D * _gram(k_i, k_j, form)
            rhs -= _product(A, U, form)
            out += _product(q_norm[:, None] * D * _gram(q_i, k_j, form), U, form)

        D = _path_decays(ancestors, log_decay, gates_at, node_i, i, i, nodes, value_heads, tile) * k_norm[None, :]
        A = (beta_i * k_norm)[:, None] * D * _gram(k_i, k_i, form)
        U = _product(_inverse(tl.where(slots[:, None] > slots[None, :], A, 0.0), slots, levels, form), rhs, form)
        out += _product(q_norm[:, None] * D * _gram(q_i, k_i, form), U, form)
        tl.store(update + values_i, U, mask=inside[:, None])
        tl.store(output + values_i, out, mask=inside[:, None])
        tl.store(path_decay + gates_i, G, mask=inside & (column_block == 0))
        tl.debug_barrier()  # other threads of this program read U


@triton.jit
@no_type_check
def _inverse(A: tl.tensor, slots: tl.tensor, levels: tl.constexpr, form: tl.constexpr) -> tl.tensor:
    """(I + A)⁻¹ of a strictly lower A: see `pallas_kernels.xla.invert_unit_lower`."""
    apart = slots[:, None] ^ slots[None, :]
    X = tl.where(apart == 0, 1.0, tl.where(apart == 1, -A, 0.0))
    for level in range(1, levels):
        corners = tl.where((apart >> level) == 1, A, 0.0)
        X -= _product(X, _product(corners, X, form), form)
    return X


@triton.jit
@no_type_check
def _path_decays(
    ancestors: tl.tensor,
    log_decay: tl.tensor,
    gates_at: tl.tensor,
    node_i: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    nodes: tl.tensor,
    value_heads: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """D_ij = e^{Σ g over the path from below j down to i} where j is i or an ancestor, else 0.

    Nodes between j and an ancestor i of it have indices between theirs.
    """
    slots = tl.arange(0, tile)
    node_j = j * tile + slots
    exponent = tl.zeros([tile, tile], tl.float32)
    for m in range(j, i + 1):
        node_m = m * tile + slots
        g = _gates(log_decay, gates_at, node_m, nodes, value_heads)
        above_i = tl.where(_on_path(ancestors, node_i, node_m, nodes), 1.0, 0.0).to(tl.bfloat16)
        inside = (node_j[None, :] < nodes) & (node_m[:, None] < nodes)
        above_j = tl.load(ancestors + node_j[None, :] * nodes + node_m[:, None], mask=inside, other=0) != 0
        below = tl.where(above_j, 0.0, g[:, None])
        exponent = _exact_product(above_i, below, 3, exponent)
    return tl.where(_on_path(ancestors, node_i, node_j, nodes), tl.exp(exponent), 0.0)


@triton.jit
@no_type_check
def _on_path(ancestors: tl.tensor, node_i: tl.tensor, node_j: tl.tensor, nodes: tl.tensor) -> tl.tensor:
    """True where j is i or an ancestor of i."""
    inside = (node_i[:, None] < nodes) & (node_j[None, :] < nodes)
    return tl.load(ancestors + node_i[:, None] * nodes + node_j[None, :], mask=inside, other=0) != 0


@triton.jit
@no_type_check
def _gates(
    log_decay: tl.tensor, gates_at: tl.tensor, node: tl.tensor, nodes: tl.tensor, value_heads: tl.tensor
) -> tl.tensor:
    g = tl.load(log_decay + gates_at + node * value_heads, mask=node < nodes, other=0.0).to(tl.float32)
    return tl.maximum(g, -88.0)


@triton.jit
@no_type_check
def _inverse_norm(x: tl.tensor) -> tl.tensor:
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit
@no_type_check
def _gram(x: tl.tensor, y: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Products of the rows of raw vectors; those of bfloat16 are exact."""
    return tl.dot(x, tl.trans(y)) if x.dtype == tl.bfloat16 else _product(x, tl.trans(y), form)


@triton.jit
@no_type_check
def _raw_product(x: tl.tensor, y: tl.tensor, terms: tl.constexpr, form: tl.constexpr) -> tl.tensor:
    """Raw vectors times float32."""
    return (
        _exact_product(x, y, terms, tl.zeros([x.shape[0], y.shape[1]], tl.float32))
        if x.dtype == tl.bfloat16
        else _product(x, y, form)
    )


@triton.jit
@no_type_check
def _exact_product(x: tl.tensor, y: tl.tensor, terms: tl.constexpr, total: tl.tensor) -> tl.tensor:
    """Adds to total the product of bfloat16 and float32, y as a sum of `terms` bfloat16 numbers, 8 bits each."""
    for _ in tl.static_range(terms):
        part = y.to(tl.bfloat16)
        total = tl.dot(x, part, total)
        y -= part.to(tl.float32)
    return total


@triton.jit
@no_type_check
def _product(x: tl.tensor, y: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Product of float32: three products of bfloat16 halves, or Triton's own `form`."""
    if form == "bf16x3":
        x_high, y_high = x.to(tl.bfloat16), y.to(tl.bfloat16)
        x_low, y_low = (x - x_high.to(tl.float32)).to(tl.bfloat16), (y - y_high.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    else:
        product = tl.dot(x, y, input_precision=form)
    return product
