"""Growth of a Weaver's tree in one persistent Triton kernel; import it only where triton and jax-triton are installed.

The steps of a tree depend on each other and each is short (50 MB of weights, 12 µs of bandwidth on an H200, for a rank
of 2048), so launches and their ramps cost more than the work. Here one program per multiprocessor stays for all steps;
they meet at barriers in device memory, six a step:

    query, key, value | attention | output projection | first MLP layer | second | corrected logits of the candidates |

Between the last barrier and the next step's first product every program repeats the choice of children and of the next
nodes for itself, in registers, so that it needs no seventh. Weights of a phase are loaded before the barrier in front
of it. A program owns 16 columns of every matrix; a product is 16 columns × nodes, its sum over channels split
over the warps. All sums have a fixed order.

Rounding follows the XLA form: bfloat16 after every product, norm and residual sum, float32 inside.
"""

# ruff: noqa: ANN001, ANN202, PLR0913 - what a Triton kernel takes and returns has no Python type
from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.weaver_tree import PATH, WeaverWeights, TreeGrowth
from pallas_kernels.weaver_tree import COLUMNS as _COLUMNS

COLUMNS = tl.constexpr(_COLUMNS)
LOWEST = tl.constexpr(-(2**63))


@triton.jit
@no_type_check
def _meet(counter, total):
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
def _float_key(x):
    """Order-preserving int64 of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
@no_type_check
def _key_float(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _half(kernel, column, odd: tl.constexpr, width: tl.constexpr, rank: tl.constexpr, splits: tl.constexpr):
    """[splits, rank / splits / 2, 16]: the even or the odd channels of a program's columns of a matrix [rank, width]."""
    share: tl.constexpr = rank // splits // 2
    channel = tl.arange(0, splits).to(tl.int64)[:, None, None] * share + tl.arange(0, share).to(tl.int64)[None, :, None]
    offset = channel * (2 * width) + tl.arange(0, COLUMNS).to(tl.int64)[None, None, :]
    return tl.load(kernel + column + odd * width + offset)


@triton.jit
@no_type_check
def _halves(x, nodes: tl.constexpr, rank: tl.constexpr, splits: tl.constexpr):
    """Even and odd channels of x [nodes, rank], each [splits, rank / splits / 2, nodes]."""
    share: tl.constexpr = rank // splits // 2
    even, odd = tl.split(tl.reshape(x, [nodes, rank // 2, 2]))
    even = tl.permute(tl.reshape(even, [nodes, splits, share]), (1, 2, 0))
    return even, tl.permute(tl.reshape(odd, [nodes, splits, share]), (1, 2, 0))


@triton.jit
@no_type_check
def _product(weights, x):
    """[splits, 16, nodes]: half of a product, its sum over channels not finished."""
    return tl.dot(tl.permute(weights, (0, 2, 1)), x, out_dtype=tl.float32)


@triton.jit
@no_type_check
def _total(even, odd):
    return tl.sum(even + odd, axis=0).to(tl.bfloat16)


@triton.jit
@no_type_check
def _sum(x, y):
    """x + y in bfloat16."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)


@triton.jit
@no_type_check
def _norm(x, scale, bias, rank: tl.constexpr):
    """Biased RMS norm of rows [nodes, rank]."""
    channel = tl.arange(0, rank)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / rank + 1e-6)
    scale = tl.load(scale + channel).to(tl.float32)
    bias = tl.load(bias + channel).to(tl.float32)
    return (x * inverse[:, None] * scale[None, :] + bias[None, :]).to(tl.bfloat16)


@triton.jit
@no_type_check
def _rows(x, nodes: tl.constexpr, width: tl.constexpr, rank: tl.constexpr):
    """[nodes, rank] of an activation that other programs wrote; rows from `width` on are zero."""
    node, channel = tl.arange(0, nodes)[:, None], tl.arange(0, rank)[None, :]
    return tl.load(x + node * rank + channel, mask=node < width, other=0.0, cache_modifier=".cg")


@triton.jit
@no_type_check
def _own(x, column, nodes: tl.constexpr, width: tl.constexpr, rank: tl.constexpr):
    """[16, nodes] of an activation: a program's own columns."""
    node = tl.arange(0, nodes)[None, :]
    at = node * rank + column + tl.arange(0, COLUMNS)[:, None]
    return tl.load(x + at, mask=node < width, other=0.0, cache_modifier=".cg")


@triton.jit
@no_type_check
def _put(x, value, column, nodes: tl.constexpr, width: tl.constexpr, rank: tl.constexpr):
    node = tl.arange(0, nodes)[None, :]
    at = node * rank + column + tl.arange(0, COLUMNS)[:, None]
    tl.store(x + at, value, mask=node < width)


@triton.jit
@no_type_check
def _pick(vector, index, size: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, size) == index, vector, 0))


@triton.jit
@no_type_check
def grow_kernel(
    root,
    candidate_ids,
    candidate_scores,
    inputs_table,
    heads_table,
    positions,
    prompt_keys,
    prompt_values,
    norm_attn_scale,
    norm_attn_bias,
    qkv,
    out,
    norm_mlp_scale,
    norm_mlp_bias,
    fc1,
    fc1_bias,
    fc2,
    fc2_bias,
    out_norm_scale,
    out_norm_bias,
    counter,
    tokens,
    parents,
    depths,
    scores,
    lineage,
    frontier_scores,
    frontier_tokens,
    queries,
    keys,
    values,
    attended,
    middle,
    hidden,
    last,
    logits,
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
):
    """Grows the tree; `tfm_jax.tree.best_first_tree` says what the steps are.

    A step's nodes are `width` frontier entries, then a guessed child of each, then a guessed child of each of these,
    `ahead` times; in the first step they are one chain from the root. Group g holds the slots from g · width · (1 + ahead) on. `nodes` is a step's nodes padded to a
    power of two of at least 4. Frontier entries are [group, node, child], in the order of slots. `lineage[slot]` holds
    the slot's path, −1 beyond its own depth.
    """
    program = tl.program_id(0)
    column = program * COLUMNS
    head_dim: tl.constexpr = rank // heads
    rows: tl.constexpr = width * (1 + ahead)
    level: tl.constexpr = 16  # a path's length, padded
    node = tl.arange(0, nodes)
    channel = tl.arange(0, rank)
    in_step = node < rows

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
    weights_0 = _half(qkv, column, 0, 3 * rank, rank, splits)
    weights_1 = _half(qkv, column, 1, 3 * rank, rank, splits)
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

        # Query, key, value.
        here = tl.load(inputs_table + token[:, None] * rank + channel[None, :], mask=in_step[:, None], other=0.0)
        there = tl.load(positions + row[:, None] * rank + channel[None, :], mask=in_step[:, None], other=0.0)
        x = _norm(_sum(here, there), norm_attn_scale, norm_attn_bias, rank)
        even, odd = _halves(x, nodes, rank, splits)
        next_0 = _half(qkv, rank + column + zero, 0, 3 * rank, rank, splits)
        sum_0 = _product(weights_0, even)
        next_1 = _half(qkv, rank + column + zero, 1, 3 * rank, rank, splits)
        sum_1 = _product(weights_1, odd)
        _put(queries, _total(sum_0, sum_1), column, nodes, rows, rank)
        weights_0 = _half(qkv, 2 * rank + column + zero, 0, 3 * rank, rank, splits)
        sum_0 = _product(next_0, even)
        weights_1 = _half(qkv, 2 * rank + column + zero, 1, 3 * rank, rank, splits)
        sum_1 = _product(next_1, odd)
        _put(keys + first * rank, _total(sum_0, sum_1), column, nodes, rows, rank)
        next_0 = _half(out, column + zero, 0, rank, rank, splits)
        sum_0 = _product(weights_0, even)
        next_1 = _half(out, column + zero, 1, rank, rank, splits)
        sum_1 = _product(weights_1, odd)
        _put(values + first * rank, _total(sum_0, sum_1), column, nodes, rows, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # Attention of a node and a head over the prompt and the node's path.
        for pair in range(program, rows * heads, programs):
            own, head = pair // heads, pair % heads
            at = head * head_dim + tl.arange(0, head_dim)
            step = tl.arange(0, level)
            own_depth, own_base = _pick(node_depth, own, nodes), _pick(base_depth, own, nodes)
            path = tl.load(lineage + _pick(base_parent, own, nodes) * level + step, mask=step < own_base, other=0)
            path = tl.where(step >= own_base, _pick(chain, own, nodes) + chains * step, path)
            query = tl.load(queries + own * rank + at, cache_modifier=".cg").to(tl.float32)
            in_prompt, in_path = step < depth + 1, step <= own_depth
            key = tl.load(prompt_keys + step[:, None] * rank + at[None, :], mask=in_prompt[:, None], other=0.0)
            value = tl.load(prompt_values + step[:, None] * rank + at[None, :], mask=in_prompt[:, None], other=0.0)
            path_at = path[:, None] * rank + at[None, :]
            path_key = tl.load(keys + path_at, mask=in_path[:, None], other=0.0, cache_modifier=".cg")
            path_value = tl.load(values + path_at, mask=in_path[:, None], other=0.0, cache_modifier=".cg")
            scaling: tl.constexpr = head_dim**-0.5
            match = tl.sum(query[None, :] * key.to(tl.float32), axis=1) * scaling
            match = tl.where(in_prompt, match, float("-inf"))
            path_match = tl.sum(query[None, :] * path_key.to(tl.float32), axis=1) * scaling
            path_match = tl.where(in_path, path_match, float("-inf"))
            top = tl.maximum(tl.max(match), tl.max(path_match))
            match, path_match = tl.exp(match - top), tl.exp(path_match - top)
            total = tl.sum(match) + tl.sum(path_match)
            match = (match / total).to(tl.bfloat16).to(tl.float32)
            path_match = (path_match / total).to(tl.bfloat16).to(tl.float32)
            mixed = tl.sum(match[:, None] * value.to(tl.float32), axis=0)
            mixed += tl.sum(path_match[:, None] * path_value.to(tl.float32), axis=0)
            tl.store(attended + own * rank + at, mixed.to(tl.bfloat16))
        arrivals += programs
        zero = _meet(counter, arrivals)

        # Output projection.
        own_column = column + tl.arange(0, COLUMNS)[:, None]
        before = tl.load(inputs_table + token[None, :] * rank + own_column, mask=in_step[None, :], other=0.0)
        there = tl.load(positions + row[None, :] * rank + own_column, mask=in_step[None, :], other=0.0)
        before = _sum(before, there)
        even, odd = _halves(_rows(attended, nodes, rows, rank), nodes, rank, splits)
        weights_0 = _half(fc1, column + zero, 0, rank, rank, splits)
        sum_0 = _product(next_0, even)
        weights_1 = _half(fc1, column + zero, 1, rank, rank, splits)
        sum_1 = _product(next_1, odd)
        _put(middle, _sum(before, _total(sum_0, sum_1)), column, nodes, rows, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # MLP.
        x = _norm(_rows(middle, nodes, rows, rank), norm_mlp_scale, norm_mlp_bias, rank)
        even, odd = _halves(x, nodes, rank, splits)
        next_0 = _half(fc2, column + zero, 0, rank, rank, splits)
        sum_0 = _product(weights_0, even)
        next_1 = _half(fc2, column + zero, 1, rank, rank, splits)
        sum_1 = _product(weights_1, odd)
        inner = _sum(_total(sum_0, sum_1), tl.load(fc1_bias + own_column)).to(tl.float32)
        x = (0.5 * inner * (1.0 + tl.math.erf(inner * 0.7071067811865476))).to(tl.bfloat16)
        _put(hidden, x, column, nodes, rows, rank)
        arrivals += programs
        zero = _meet(counter, arrivals)
        even, odd = _halves(_rows(hidden, nodes, rows, rank), nodes, rank, splits)
        x = _sum(_total(_product(next_0, even), _product(next_1, odd)), tl.load(fc2_bias + own_column))
        _put(last, _sum(_own(middle, column, nodes, rows, rank), x), column, nodes, rows, rank)

        # Logits: 16 candidates of one node at a time.
        blocks: tl.constexpr = pool // COLUMNS
        block = program
        own, candidate = block // blocks, (block % blocks) * COLUMNS + tl.arange(0, COLUMNS)
        own_row, own_exists = _pick(row, own, nodes), _pick(exists.to(tl.int32), own, nodes) > 0
        ids = tl.load(candidate_ids + own_row * pool + candidate, mask=own_exists, other=-1)
        heads_rows = tl.load(heads_table + ids[:, None] * rank + channel[None, :], mask=(ids >= 0)[:, None], other=0.0)
        arrivals += programs
        zero = _meet(counter, arrivals)
        while block < rows * blocks:
            result = tl.load(last + own * rank + channel[None, :], cache_modifier=".cg")
            result = _norm(result, out_norm_scale, out_norm_bias, rank).to(tl.float32)
            corrected = tl.sum(result * heads_rows.to(tl.float32), axis=1)
            corrected += tl.load(candidate_scores + own_row * pool + candidate)
            tl.store(logits + own * pool + candidate, tl.where(ids >= 0, corrected, float("-inf")))
            block += programs
            own, candidate = block // blocks, (block % blocks) * COLUMNS + tl.arange(0, COLUMNS)
            own_row, own_exists = _pick(row, own, nodes), _pick(exists.to(tl.int32), own, nodes) > 0
            ids = tl.load(candidate_ids + own_row * pool + candidate, mask=own_exists, other=-1)
            at = ids[:, None] * rank + channel[None, :]
            heads_rows = tl.load(heads_table + at, mask=(ids >= 0)[:, None], other=0.0)
        weights_0 = _half(qkv, column + zero, 0, 3 * rank, rank, splits)
        weights_1 = _half(qkv, column + zero, 1, 3 * rank, rank, splits)
        arrivals += programs
        zero = _meet(counter, arrivals)

        # Children: the best of each node.
        option = tl.arange(0, pool)[None, :]
        logit = tl.load(
            logits + node[:, None] * pool + option, mask=in_step[:, None], other=float("-inf"), cache_modifier=".cg"
        )
        top = tl.max(logit, axis=1)
        finite = tl.where(top == float("-inf"), 0.0, top)
        total = finite + tl.log(tl.sum(tl.exp(logit - finite[:, None]), axis=1))
        order = (_float_key(logit) << 32) | (pool - 1 - option)
        place = tl.arange(0, expand)[None, :]
        best = tl.full((nodes, expand), LOWEST, tl.int64)
        for child in tl.static_range(expand):
            winner = tl.max(order, axis=1)
            order = tl.where(order == winner[:, None], LOWEST, order)
            best = tl.where(place == child, winner[:, None], best)
        best_logit, best_option = _key_float(best >> 32), pool - 1 - best.to(tl.int32)
        ids = tl.load(candidate_ids + row[:, None] * pool + best_option)
        edge = tl.minimum(best_logit - total[:, None], 0.0)
        guessed = tl.minimum(tl.load(logits + node * pool, mask=in_step, other=0.0, cache_modifier=".cg") - total, 0.0)
        before = tl.arange(0, nodes)[None, :] == node[:, None] - chains
        for place_in_chain in range(1, tl.cdiv(rows, chains)):
            above_score = tl.sum(tl.where(before, score[None, :] + guessed[None, :], 0.0), axis=1)
            score = tl.where((behind == place_in_chain) & exists, above_score, score)
        is_guessed = tl.sum((before & ((behind > 0) & exists)[:, None]).to(tl.int32), axis=0) > 0
        usable = (best_logit > float("-inf")) & (score[:, None] > float("-inf")) & (node_depth[:, None] < depth)
        usable = usable & ((best_option > 0) | ~is_guessed[:, None])
        child_scores = tl.where(usable, score[:, None] + edge, float("-inf"))
        child_info = ids * 32 + node_depth[:, None] + 1
        fresh = group_at == group
        open_scores = tl.where(fresh, child_scores[None, :, :], open_scores)
        open_info = tl.where(fresh, child_info[None, :, :], open_info)
        if program == 0:
            slot = first + node
            parent = tl.where(behind == 0, base_parent, slot - chains)
            tl.store(tokens + slot, token, mask=in_step)
            tl.store(parents + slot, tl.where(exists, parent, -1), mask=in_step)
            tl.store(depths + slot, node_depth, mask=in_step)
            tl.store(scores + slot, score, mask=in_step)
            step = tl.arange(0, level)[None, :]
            path = tl.load(
                lineage + base_parent[:, None] * level + step,
                mask=(step < base_depth[:, None]) & exists[:, None],
                other=0,
            )
            path = tl.where(step >= base_depth[:, None], chain[:, None] + chains * step, path)
            path = tl.where((step <= node_depth[:, None]) & exists[:, None], path, -1)
            tl.store(lineage + slot[:, None] * level + step, path, mask=in_step[:, None])

        # The next chains: the best frontier entries.
        chains = width
        chances = (_float_key(open_scores) << 32) | (0x7FFFFFFF - entry)
        token = tl.zeros((nodes,), tl.int32)
        base_parent = tl.full((nodes,), -1, tl.int32)
        base_depth = tl.zeros((nodes,), tl.int32)
        score = tl.full((nodes,), float("-inf"), tl.float32)
        for number in tl.static_range(width):
            winner = tl.max(chances)
            chosen = chances == winner
            chances = tl.where(chosen, LOWEST, chances)
            winner_score = _key_float(winner >> 32)
            info = tl.sum(tl.where(chosen, open_info, 0))
            open_scores = tl.where(chosen, float("-inf"), open_scores)
            above = (0x7FFFFFFF - winner.to(tl.int32)) // expand
            in_chain = in_step & (node % width == tl.where(winner_score > float("-inf"), number, nodes))
            token = tl.where(in_chain, info // 32, token)
            base_depth = tl.where(in_chain, info % 32, base_depth)
            base_parent = tl.where(in_chain, above // nodes * rows + above % nodes, base_parent)
            score = tl.where(in_chain & (node < width), winner_score, score)
        exists = base_depth > 0
    if program == 0:
        slot = groups * rows + node
        kept = node < width
        tl.store(tokens + slot, token, mask=kept)
        tl.store(parents + slot, base_parent, mask=kept)
        tl.store(depths + slot, base_depth, mask=kept)
        tl.store(scores + slot, score, mask=kept)
        step = tl.arange(0, level)[None, :]
        path = tl.load(
            lineage + base_parent[:, None] * level + step, mask=(step < base_depth[:, None]) & kept[:, None], other=-1
        )
        path = tl.where((step == base_depth[:, None]) & exists[:, None], slot[:, None], path)
        tl.store(lineage + slot[:, None] * level + step, path, mask=kept[:, None])
        at = (group_at * rows + node_at) * expand + child_at
        kept_children = (node_at < rows) & (group_at < groups)
        tl.store(frontier_scores + at, open_scores, mask=kept_children)
        tl.store(frontier_tokens + at, open_info // 32, mask=kept_children)


def grow(
    root: Int[Array, "1"],
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
    num_warps: int = 8,
    least_nodes: int = 4,
) -> TreeGrowth:
    """The tree after `groups` steps of `width` nodes, before any pruning."""
    depth, pool = candidate_ids.shape
    rank = inputs_table.shape[1]
    rows = width * (1 + ahead)
    slots, expanded = groups * rows + width, groups * rows
    nodes = max(least_nodes, triton.next_power_of_2(rows))
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    shapes = [
        ((1,), i32), ((slots,), i32), ((slots,), i32), ((slots,), i32), ((slots,), f32), ((slots, PATH), i32),
        ((expanded, expand), f32), ((expanded, expand), i32),
        ((rows, rank), bf16), ((slots, rank), bf16), ((slots, rank), bf16), ((rows, rank), bf16),
        ((rows, rank), bf16), ((rows, rank), bf16), ((rows, rank), bf16), ((rows, pool), f32),
    ]  # fmt: skip
    _, *growth = jax_triton.triton_call(
        root, candidate_ids, candidate_scores, inputs_table, heads_table, positions, prompt_keys, prompt_values,
        *weights,
        kernel=grow_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        grid=(rank // _COLUMNS,),
        zeroed_outputs=(0,),
        num_warps=num_warps,
        rank=rank,
        heads=prompt_keys.shape[1],
        depth=depth,
        pool=pool,
        width=width,
        ahead=ahead,
        nodes=nodes,
        groups=groups,
        groups_padded=triton.next_power_of_2(groups),
        expand=expand,
        programs=rank // _COLUMNS,
        splits=8,
    )[:8]  # fmt: skip
    return TreeGrowth(*growth)
