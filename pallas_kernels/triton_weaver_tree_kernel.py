"""Device code of `weaver_tree`: a persistent Triton kernel. Only `weaver_tree` imports it, when the kernel is wanted.

The steps of a tree depend on each other and each is short (50 MB of weights, 12 µs of bandwidth on an H200, for a rank
of 2048), so launches and their ramps cost more than the work. Here one program per multiprocessor stays for all steps;
they meet at barriers in device memory, seven a step:

    query, key, value | attention | output projection | MLP, first layer | second | logits | best children of a node |

Between the last barrier and the next step's first product every program repeats the choice of the next nodes for
itself, in registers, so that it needs no eighth. Weights of a phase are loaded before the barrier in front of it. A
program owns 16 columns of every matrix; a product is 16 columns × nodes, its sum over channels split over the warps.
All sums have a fixed order.

Latency rules a step, not bandwidth: barriers, reductions across warps and code that passes the instruction cache once a
step. Hence loops in place of unrolled code, and 8 warps (with 16 a tree took 1.3 times as long).

Rounding follows the XLA form: bfloat16 after every product, norm and residual sum, float32 inside.
"""

# ruff: noqa: PLR0915 - a kernel whose phases share registers is one long function
from __future__ import annotations

from typing import no_type_check

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from pallas_kernels.weaver_tree import COLUMNS as _COLUMNS
from pallas_kernels.weaver_tree import PATH

COLUMNS = tl.constexpr(_COLUMNS)
LEVELS = tl.constexpr(PATH)
VALUE = tl.constexpr(2)  # of query, key, value
LOWEST = tl.constexpr(-(2**63))


@triton.jit
@no_type_check
def _meet(counter: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Barrier of all programs: everything written before it is seen after it. `total` arrivals end the wait.

    Returns a 0 that the compiler does not know to be one: addresses that add it are computed where they are used,
    not once before all steps, which would take more registers than there are.
    """
    tl.debug_barrier()
    zero = tl.inline_asm_elementwise(
        """{
        .reg .pred first, early;
        .reg .u32 lane, seen;
        mov.u32 lane, %tid.x;
        setp.eq.u32 first, lane, 0;
        @!first bra DONE;
        red.release.gpu.global.add.u32 [$1], 1;
        WAIT:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 early, seen, $2;
        @early bra WAIT;
        DONE:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter, total],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    return zero * COLUMNS  # so that addresses stay multiples of a load's width


@triton.jit
@no_type_check
def _float_key(x: tl.tensor) -> tl.tensor:
    """Order-preserving int64 of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
@no_type_check
def _key_float(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _channels(half: tl.constexpr, rank: tl.constexpr, splits: tl.constexpr) -> tl.tensor:
    """[splits, rank / splits / 2]: half of the channels, in runs, one run a warp."""
    run: tl.constexpr = rank // splits // 2
    return (tl.arange(0, splits).to(tl.int64)[:, None] * 2 + half) * run + tl.arange(0, run).to(tl.int64)[None, :]


@triton.jit
@no_type_check
def _half(
    kernel: tl.tensor, column: tl.tensor, half: tl.constexpr, rank: tl.constexpr, splits: tl.constexpr
) -> tl.tensor:
    """[splits, 16, run]: half of the channels of a program's columns of a matrix, stored [columns, rank]."""
    offset = tl.arange(0, COLUMNS).to(tl.int64)[None, :, None] * rank + _channels(half, rank, splits)[:, None, :]
    return tl.load(kernel + column * rank + offset)


@triton.jit
@no_type_check
def _rows(
    x: tl.tensor, half: tl.constexpr, nodes: tl.constexpr, width: tl.constexpr, rank: tl.constexpr, splits: tl.constexpr
) -> tl.tensor:
    """[splits, run, nodes]: channels of an activation that other programs wrote; 0 for nodes from `width` on."""
    node = tl.arange(0, nodes)[None, None, :]
    at = node * rank + _channels(half, rank, splits)[:, :, None]
    return tl.load(x + at, mask=node < width, other=0.0, cache_modifier=".cg")


@triton.jit
@no_type_check
def _inputs(
    table: tl.tensor,
    positions: tl.tensor,
    token: tl.tensor,
    row: tl.tensor,
    half: tl.constexpr,
    rank: tl.constexpr,
    splits: tl.constexpr,
) -> tl.tensor:
    """[splits, run, nodes]: the same channels of the nodes' inputs."""
    channel = _channels(half, rank, splits)[:, :, None]
    here = tl.load(table + token[None, None, :].to(tl.int64) * rank + channel)
    return _sum(here, tl.load(positions + row[None, None, :] * rank + channel))


@triton.jit
@no_type_check
def _norms(
    first: tl.tensor, second: tl.tensor, scale: tl.tensor, bias: tl.tensor, rank: tl.constexpr, splits: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Biased RMS norm of nodes given in two halves."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.sum(x * x + y * y, axis=1), axis=0) / rank + 1e-6)[None, None, :]
    channel = _channels(0, rank, splits)[:, :, None]
    other = _channels(1, rank, splits)[:, :, None]
    x = x * inverse * tl.load(scale + channel).to(tl.float32) + tl.load(bias + channel).to(tl.float32)
    y = y * inverse * tl.load(scale + other).to(tl.float32) + tl.load(bias + other).to(tl.float32)
    return _pin(x.to(tl.bfloat16)), _pin(y.to(tl.bfloat16))


@triton.jit
@no_type_check
def _pin(x: tl.tensor) -> tl.tensor:
    """The same x; without this the compiler changes its layout where it was loaded, and so waits for it there."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
@no_type_check
def _product(weights: tl.tensor, x: tl.tensor) -> tl.tensor:
    """[splits, 16, nodes]: half of a product, its sum over channels not finished."""
    return tl.dot(_pin(weights), x, out_dtype=tl.float32)


@triton.jit
@no_type_check
def _total(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    return tl.sum(first + second, axis=0).to(tl.bfloat16)


@triton.jit
@no_type_check
def _sum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The sum in bfloat16."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)


@triton.jit
@no_type_check
def _norm(x: tl.tensor, scale: tl.tensor, bias: tl.tensor, rank: tl.constexpr) -> tl.tensor:
    """Biased RMS norm of rows [nodes, rank]."""
    channel = tl.arange(0, rank)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / rank + 1e-6)
    scale = tl.load(scale + channel).to(tl.float32)
    bias = tl.load(bias + channel).to(tl.float32)
    return (x * inverse[:, None] * scale[None, :] + bias[None, :]).to(tl.bfloat16)


@triton.jit
@no_type_check
def _own(x: tl.tensor, column: tl.tensor, nodes: tl.constexpr, width: tl.constexpr, rank: tl.constexpr) -> tl.tensor:
    """[16, nodes] of an activation: a program's own columns."""
    node = tl.arange(0, nodes)[None, :]
    at = node * rank + column + tl.arange(0, COLUMNS)[:, None]
    return tl.load(x + at, mask=node < width, other=0.0, cache_modifier=".cg")


@triton.jit
@no_type_check
def _put(
    x: tl.tensor, value: tl.tensor, column: tl.tensor, nodes: tl.constexpr, width: tl.constexpr, rank: tl.constexpr
) -> None:
    node = tl.arange(0, nodes)[None, :]
    at = node * rank + column + tl.arange(0, COLUMNS)[:, None]
    tl.store(x + at, value, mask=node < width)


@triton.jit
@no_type_check
def _pick(vector: tl.tensor, index: tl.tensor, size: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, size) == index, vector, 0))


@triton.jit
@no_type_check
def _attend(
    query: tl.tensor, key_at: tl.tensor, value_at: tl.tensor, visible: tl.tensor, size: tl.constexpr
) -> tl.tensor:
    """One head's attention over rows given by their addresses."""
    key = tl.load(key_at, mask=visible[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    value = tl.load(value_at, mask=visible[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    scaling: tl.constexpr = size**-0.5
    match = tl.where(visible, tl.sum(query[None, :] * key, axis=1) * scaling, float("-inf"))
    match = tl.exp(match - tl.max(match))
    match = (match / tl.sum(match)).to(tl.bfloat16).to(tl.float32)
    return tl.sum(match[:, None] * value, axis=0).to(tl.bfloat16)


@triton.jit
@no_type_check
def _heads(
    candidate_ids: tl.tensor,
    heads_table: tl.tensor,
    candidate: tl.tensor,
    row: tl.tensor,
    used: tl.tensor,
    pool: tl.constexpr,
    rank: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Ids of candidates of a depth, −1 for none, and their rows of the table of heads."""
    ids = tl.load(candidate_ids + row * pool + candidate, mask=(candidate < pool) & used, other=-1)
    at = ids.to(tl.int64)[:, None] * rank + tl.arange(0, rank)[None, :]
    return ids, tl.load(heads_table + at, mask=(ids >= 0)[:, None], other=0.0)


@triton.jit
@no_type_check
def _children(logits: tl.tensor, used: tl.tensor, pool: tl.constexpr, expand: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Log-probabilities and places in the pool of one node's best children, and the log-probability of the first."""
    option = tl.arange(0, pool)
    logit = tl.load(logits + option, mask=used, other=float("-inf"), cache_modifier=".cg")
    first = tl.load(logits, mask=used, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(logit)
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = finite + tl.log(tl.sum(tl.exp(logit - finite)))
    order = (_float_key(logit) << 32) | (pool - 1 - option)
    place = tl.arange(0, expand)
    best = tl.full((expand,), LOWEST, tl.int64)
    for child in range(expand):
        winner = tl.max(order)
        order = tl.where(order == winner, LOWEST, order)
        best = tl.where(place == child, winner, best)
    logit = _key_float(best >> 32)
    edge = tl.where(logit > float("-inf"), tl.minimum(logit - total, 0.0), float("-inf"))
    return edge, pool - 1 - best.to(tl.int32), tl.minimum(first - total, 0.0)


@triton.jit
@no_type_check
def _score_guesses(
    score: tl.tensor,
    guessed: tl.tensor,
    behind: tl.tensor,
    exists: tl.tensor,
    node: tl.tensor,
    chains: tl.tensor,
    nodes: tl.constexpr,
    rows: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Scores along the chains, and which nodes have a guessed child; `guessed` is that child's log-probability."""
    before = tl.arange(0, nodes)[None, :] == node[:, None] - chains
    for place in range(1, tl.cdiv(rows, chains)):
        above = tl.sum(tl.where(before, score[None, :] + guessed[None, :], 0.0), axis=1)
        score = tl.where((behind == place) & exists, above, score)
    is_guess = (behind > 0) & exists
    return score, tl.sum((before & is_guess[:, None]).to(tl.int32), axis=0) > 0


@triton.jit
@no_type_check
def _choose(
    open_scores: tl.tensor,
    open_info: tl.tensor,
    entry: tl.tensor,
    node: tl.tensor,
    nodes: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    expand: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Takes the best frontier entries: token, parent, depth and score of the first node of each chain."""
    order = (_float_key(open_scores) << 32) | (0x7FFFFFFF - entry)
    token, depth = tl.zeros((nodes,), tl.int32), tl.zeros((nodes,), tl.int32)
    parent = tl.full((nodes,), -1, tl.int32)
    score = tl.full((nodes,), float("-inf"), tl.float32)
    for number in range(width):
        winner = tl.max(order)
        chosen = order == winner
        order = tl.where(chosen, LOWEST, order)
        open_scores = tl.where(chosen, float("-inf"), open_scores)
        winner_score = _key_float(winner >> 32)
        info = tl.sum(tl.where(chosen, open_info, 0))
        above = (0x7FFFFFFF - winner.to(tl.int32)) // expand
        in_chain = (node < rows) & (node % width == tl.where(winner_score > float("-inf"), number, nodes))
        token, depth = tl.where(in_chain, info // 32, token), tl.where(in_chain, info % 32, depth)
        parent = tl.where(in_chain, above // nodes * rows + above % nodes, parent)
        score = tl.where(in_chain & (node < width), winner_score, score)
    return token, parent, depth, score, open_scores


@triton.jit
@no_type_check
def _paths(
    lineage: tl.tensor,
    base_parent: tl.tensor,
    base_depth: tl.tensor,
    node_depth: tl.tensor,
    chain: tl.tensor,
    chains: tl.tensor,
    exists: tl.tensor,
) -> tl.tensor:
    """[nodes, 2 · 16]: slots from the root to each node, −1 beyond, twice; all −1 for an unused node."""
    step = tl.arange(0, 2 * LEVELS)[None, :] % LEVELS
    shared = (step < base_depth[:, None]) & exists[:, None]
    path = tl.load(lineage + base_parent[:, None] * LEVELS + step, mask=shared, other=0)
    path = tl.where(step >= base_depth[:, None], chain[:, None] + chains * step, path)
    return tl.where((step <= node_depth[:, None]) & exists[:, None], path, -1)


@triton.jit
@no_type_check
def _record(
    tokens: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    lineage: tl.tensor,
    slot: tl.tensor,
    token: tl.tensor,
    parent: tl.tensor,
    depth: tl.tensor,
    path: tl.tensor,
    kept: tl.tensor,
) -> None:
    tl.store(tokens + slot, token, mask=kept)
    tl.store(parents + slot, parent, mask=kept)
    tl.store(depths + slot, depth, mask=kept)
    step = tl.arange(0, 2 * LEVELS)[None, :]
    tl.store(lineage + slot[:, None] * LEVELS + step % LEVELS, path, mask=kept[:, None] & (step < LEVELS))


@triton.jit
@no_type_check
def grow_kernel(
    root: tl.tensor,
    candidate_ids: tl.tensor,
    candidate_scores: tl.tensor,
    inputs_table: tl.tensor,
    heads_table: tl.tensor,
    positions: tl.tensor,
    prompt_keys: tl.tensor,
    prompt_values: tl.tensor,
    norm_attn_scale: tl.tensor,
    norm_attn_bias: tl.tensor,
    qkv: tl.tensor,
    out: tl.tensor,
    norm_mlp_scale: tl.tensor,
    norm_mlp_bias: tl.tensor,
    fc1: tl.tensor,
    fc1_bias: tl.tensor,
    fc2: tl.tensor,
    fc2_bias: tl.tensor,
    out_norm_scale: tl.tensor,
    out_norm_bias: tl.tensor,
    counter: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    scores: tl.tensor,
    lineage: tl.tensor,
    frontier_scores: tl.tensor,
    frontier_tokens: tl.tensor,
    projections: tl.tensor,
    attended: tl.tensor,
    middle: tl.tensor,
    hidden: tl.tensor,
    last: tl.tensor,
    logits: tl.tensor,
    edges: tl.tensor,
    options: tl.tensor,
    guesses: tl.tensor,
    rank: tl.constexpr,
    heads: tl.constexpr,
    depth: tl.constexpr,
    pool: tl.constexpr,
    width: tl.constexpr,
    ahead: tl.constexpr,
    nodes: tl.constexpr,
    groups: tl.constexpr,
    groups_padded: tl.constexpr,
    expand: tl.constexpr,
    programs: tl.constexpr,
    splits: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Grows the tree; `tfm_jax.growth.best_first_tree` says what the steps are.

    A step's nodes are `width` frontier entries, then a guessed child of each, then a guessed child of each of these,
    `ahead` times; in the first step they are one chain from the root. Group g holds the slots from
    g · width · (1 + ahead) on. `nodes` is a step's nodes padded to a power of two of at least 4. Frontier entries are
    [group, node, child], in the order of slots. `lineage[slot]` holds the slot's path, −1 beyond its own depth.
    """
    program = tl.program_id(0)
    column = program * COLUMNS
    head_dim: tl.constexpr = rank // heads
    rows: tl.constexpr = width * (1 + ahead)
    node = tl.arange(0, nodes)
    channel = tl.arange(0, rank)
    in_step = node < rows
    slots: tl.constexpr = groups * rows + width
    keys = projections + slots * rank
    own = program // (programs // nodes)  # the node whose logits this program computes
    leads = (program % (programs // nodes) == 0) & (own < rows)
    blocks: tl.constexpr = (pool * nodes + programs * tile - 1) // (programs * tile)

    # The step's chains: how many, and per node the parent and the depth of its chain's first node.
    chains = 1
    base_parent = tl.full((nodes,), -1, tl.int32)
    base_depth = tl.zeros((nodes,), tl.int32)
    score = tl.where(node == 0, 0.0, float("-inf"))
    token = tl.where(node == 0, tl.load(root), 0)
    exists = (node == 0) | (in_step & (ahead > 0))

    group_at = tl.arange(0, groups_padded)[:, None, None]
    node_at = tl.arange(0, nodes)[None, :, None]
    child_at = tl.arange(0, expand)[None, None, :]
    entry = (group_at * nodes + node_at) * expand + child_at
    open_scores = tl.full((groups_padded, nodes, expand), float("-inf"), tl.float32)
    open_info = tl.zeros((groups_padded, nodes, expand), tl.int32)  # token · 32 + depth

    arrivals = 0
    zero = 0
    weights_0 = _half(qkv, column, 0, rank, splits)
    weights_1 = _half(qkv, column, 1, rank, splits)
    for group in range(groups):
        # Nodes behind the first of a chain: the drafter's best tokens.
        first = group * rows
        behind = node // chains
        node_depth = base_depth + behind
        guess = tl.load(candidate_ids + tl.minimum(tl.maximum(node_depth - 1, 0), depth - 1) * pool)
        token = tl.where(behind == 0, token, guess)
        exists = exists & (node_depth <= depth) & (token >= 0)
        token = tl.where(exists, token, 0)
        node_depth = tl.where(exists, node_depth, 0)
        chain = first + node % chains - base_depth * chains  # + chains · d: the chain's slot of depth d
        row = tl.minimum(node_depth, depth - 1)
        paths = _paths(lineage, base_parent, base_depth, node_depth, chain, chains, exists)
        if program == 0:
            slot = first + node
            parent = tl.where(exists, tl.where(behind == 0, base_parent, slot - chains), -1)
            _record(tokens, parents, depths, lineage, slot, token, parent, node_depth, paths, in_step)
        own_row, own_exists = _pick(row, own, nodes), _pick(exists.to(tl.int32), own, nodes) > 0

        # Query, key, value.
        first_half = _inputs(inputs_table, positions, token, row, 0, rank, splits)
        second_half = _inputs(inputs_table, positions, token, row, 1, rank, splits)
        first_half, second_half = _norms(first_half, second_half, norm_attn_scale, norm_attn_bias, rank, splits)
        for part in range(3):
            source = tl.where(part < VALUE, qkv + (part + 1) * (rank * rank), out)
            next_0 = _half(source, column + zero, 0, rank, splits)
            sum_0 = _product(weights_0, first_half)
            next_1 = _half(source, column + zero, 1, rank, splits)
            sum_1 = _product(weights_1, second_half)
            weights_0, weights_1 = next_0, next_1
            _put(projections + (part * slots + first) * rank, _total(sum_0, sum_1), column, nodes, rows, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # Attention of a node and a head over the prompt and the node's path.
        for pair in range(program, rows * heads, programs):
            number = pair // heads
            path = tl.sum(tl.where((node == number)[:, None], paths, 0), axis=0)
            step = tl.arange(0, 2 * LEVELS)  # the prompt, then the path
            in_prompt = step < LEVELS
            at = (pair % heads) * head_dim + tl.arange(0, head_dim)
            query = tl.load(projections + (first + number) * rank + at, cache_modifier=".cg").to(tl.float32)
            offset = tl.where(in_prompt, step, path)[:, None] * rank + at[None, :]
            key_at = tl.where(in_prompt[:, None], prompt_keys + offset, keys + offset)
            value_at = tl.where(in_prompt[:, None], prompt_values + offset, keys + slots * rank + offset)
            visible = tl.where(in_prompt, step <= depth, path >= 0)
            mixed = _attend(query, key_at, value_at, visible, head_dim)
            tl.store(attended + number * rank + at, mixed)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # Output projection.
        own_column = column + tl.arange(0, COLUMNS)[:, None]
        before = tl.load(inputs_table + token[None, :] * rank + own_column, mask=in_step[None, :], other=0.0)
        there = tl.load(positions + row[None, :] * rank + own_column, mask=in_step[None, :], other=0.0)
        before = _sum(before, there)
        first_half = _rows(attended, 0, nodes, rows, rank, splits)
        second_half = _rows(attended, 1, nodes, rows, rank, splits)
        next_0 = _half(fc1, column + zero, 0, rank, splits)
        sum_0 = _product(weights_0, first_half)
        next_1 = _half(fc1, column + zero, 1, rank, splits)
        sum_1 = _product(weights_1, second_half)
        _put(middle, _sum(before, _total(sum_0, sum_1)), column, nodes, rows, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # MLP.
        first_half = _rows(middle, 0, nodes, rows, rank, splits)
        second_half = _rows(middle, 1, nodes, rows, rank, splits)
        first_half, second_half = _norms(first_half, second_half, norm_mlp_scale, norm_mlp_bias, rank, splits)
        weights_0 = _half(fc2, column + zero, 0, rank, splits)
        sum_0 = _product(next_0, first_half)
        weights_1 = _half(fc2, column + zero, 1, rank, splits)
        sum_1 = _product(next_1, second_half)
        inner = _sum(_total(sum_0, sum_1), tl.load(fc1_bias + own_column)).to(tl.float32)
        x = (0.5 * inner * (1.0 + tl.math.erf(inner * 0.7071067811865476))).to(tl.bfloat16)
        _put(hidden, x, column, nodes, rows, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)
        first_half = _rows(hidden, 0, nodes, rows, rank, splits)
        second_half = _rows(hidden, 1, nodes, rows, rank, splits)
        x = _sum(
            _total(_product(weights_0, first_half), _product(weights_1, second_half)), tl.load(fc2_bias + own_column)
        )
        _put(last, _sum(_own(middle, column, nodes, rows, rank), x), column, nodes, rows, rank)

        # Logits of one node.
        candidate = program % (programs // nodes) * (blocks * tile) + tl.arange(0, tile)
        ids, heads_rows = _heads(candidate_ids, heads_table, candidate, own_row, own_exists, pool, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)
        result = tl.load(last + own * rank + channel[None, :], mask=own < rows, other=0.0, cache_modifier=".cg")
        result = _norm(result, out_norm_scale, out_norm_bias, rank).to(tl.float32)
        for block in range(blocks):
            kept = (candidate < pool) & (own < rows)
            corrected = tl.sum(result * heads_rows.to(tl.float32), axis=1)
            corrected += tl.load(candidate_scores + own_row * pool + candidate, mask=kept, other=0.0)
            tl.store(logits + own * pool + candidate, tl.where(ids >= 0, corrected, float("-inf")), mask=kept)
            if blocks > 1:
                candidate += tile
                more = own_exists & (block + 1 < blocks)
                ids, heads_rows = _heads(candidate_ids, heads_table, candidate, own_row, more, pool, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # Children: the best of one node; all programs of a node find the same.
        edge, option, guess = _children(logits + own * pool, own_exists, pool, expand)
        place = tl.arange(0, expand)
        tl.store(edges + own * expand + place, edge, mask=leads)
        tl.store(options + own * expand + place, option, mask=leads)
        tl.store(guesses + own, guess, mask=leads)
        weights_0 = _half(qkv, column + zero, 0, rank, splits)
        weights_1 = _half(qkv, column + zero, 1, rank, splits)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # The frontier gets them.
        guessed = tl.load(guesses + node, mask=in_step, other=0.0, cache_modifier=".cg")
        at, kept = node[:, None] * expand + place[None, :], in_step[:, None]
        edge = tl.load(edges + at, mask=kept, other=float("-inf"), cache_modifier=".cg")
        option = tl.load(options + at, mask=kept, other=0, cache_modifier=".cg")
        ids = tl.load(candidate_ids + row[:, None] * pool + option)
        score, is_guessed = _score_guesses(score, guessed, behind, exists, node, chains, nodes, rows)
        usable = (edge > float("-inf")) & (score[:, None] > float("-inf")) & (node_depth[:, None] < depth)
        usable = usable & ((option > 0) | ~is_guessed[:, None])
        child_scores = tl.where(usable, score[:, None] + edge, float("-inf"))
        child_info = ids * 32 + node_depth[:, None] + 1
        fresh = group_at == group
        open_scores = tl.where(fresh, child_scores[None, :, :], open_scores)
        open_info = tl.where(fresh, child_info[None, :, :], open_info)
        if program == 0:
            tl.store(scores + first + node, score, mask=in_step)

        # The next chains: the best frontier entries.
        chains = width
        token, base_parent, base_depth, score, open_scores = _choose(
            open_scores, open_info, entry, node, nodes, width, rows, expand
        )
        exists = base_depth > 0
    if program == 0:
        tl.debug_barrier()  # reads paths that it has just written
        chain = groups * rows + node - base_depth
        paths = _paths(lineage, base_parent, base_depth, base_depth, chain, 1, exists)
        slot = groups * rows + node
        _record(tokens, parents, depths, lineage, slot, token, base_parent, base_depth, paths, node < width)
        tl.store(scores + slot, score, mask=node < width)
        at = (group_at * rows + node_at) * expand + child_at
        kept_children = (node_at < rows) & (group_at < groups)
        tl.store(frontier_scores + at, open_scores, mask=kept_children)
        tl.store(frontier_tokens + at, open_info // 32, mask=kept_children)
