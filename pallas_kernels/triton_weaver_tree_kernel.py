"""Device code of `triton_weaver_tree`, which alone imports it, when the kernel is wanted.

The steps of a tree depend on each other and each is short (50 MB of weights, 12 µs of bandwidth on an H200, for a rank
of 2048), so launches and their ramps cost more than the work. Here one program per multiprocessor stays for all steps;
they meet at barriers in device memory, six a step:

    query, key, value | attention | output projection | MLP, first layer | second | logits

Between the last barrier and the next step's first product every program finds the best children and the next nodes for
itself, in registers, so that it needs no seventh. A program owns 16 columns of every matrix; a product is 16 columns x
nodes, its sum over channels split over the warps. All sums have a fixed order.

Latency rules a step: barriers, exchanges between warps, and code that passes the instruction cache once a step. So
- a warp owns a node while children are found: reductions need no other warp, and those of int32 are one instruction;
- products are `mma.sync` on operands as they come from memory (`product`), which Triton would carry through shared
  memory: channels are summed, so it does not matter which of them an operand's register holds, if both hold the same;
- a norm is a factor: its scale is folded into the matrix behind it, and the squares are summed by one more product;
- what the programs agree on, the nodes of a step, is held in scalars.

Rounding follows the XLA form: bfloat16 after every product and residual sum, float32 inside.
"""

# ruff: noqa: C901, PLR0912, PLR0915 - a kernel whose phases share registers is one long function
from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels import triton_weaver_tree_parts as parts


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
    qkv: tl.tensor,
    qkv_bias: tl.tensor,
    out: tl.tensor,
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
    rank: tl.constexpr,
    heads: tl.constexpr,
    depth: tl.constexpr,
    pool: tl.constexpr,
    width: tl.constexpr,
    ahead: tl.constexpr,
    nodes: tl.constexpr,
    groups: tl.constexpr,
    expand: tl.constexpr,
    programs: tl.constexpr,
    entries: tl.constexpr,
    picks: tl.constexpr,
) -> None:
    """Grows the tree; `tfm_jax.growth.best_first_tree` says what the steps are.

    A step's nodes are `width` frontier entries, then a guessed child of each, then a guessed child of each of these,
    `ahead` times; in the first step they are one chain from the root. Group g holds the slots from
    g · width · (1 + ahead) on. `nodes` is a step's nodes padded to a multiple of 8. Frontier entries are
    [group, node, child], in the order of slots. `lineage[slot]` holds the slot's path, −1 beyond its own depth.
    `entries` is the frontier's size in lanes of a warp, `picks` what an exchange of every node's best takes.
    """
    program = tl.program_id(0)
    column = program * parts.COLUMNS
    head_dim: tl.constexpr = rank // heads
    rows: tl.constexpr = width * (1 + ahead)
    words: tl.constexpr = rank // parts.WORD
    tiles: tl.constexpr = nodes // parts.ROWS
    slots: tl.constexpr = groups * rows + width
    padded: tl.constexpr = picks * parts.LANES // nodes  # picks of a node
    keys = projections + slots * rank
    share: tl.constexpr = programs // nodes  # programs that compute the logits of a node
    own = program // share
    few: tl.constexpr = (pool + share - 1) // share  # candidates of a program
    pairs: tl.constexpr = (few + 2 * parts.COLUMNS - 1) // (2 * parts.COLUMNS)

    # The frontier: a warp holds a node's children, groups side by side.
    lane = tl.arange(0, parts.LANES)
    row_at = tl.arange(0, entries)[:, None, None]
    node_at = tl.arange(0, nodes)[None, :, None]
    lane_at = lane[None, None, :]
    group_at = row_at * (parts.LANES // expand) + lane_at // expand
    entry = (group_at * nodes + node_at) * expand + lane_at % expand
    open_keys = tl.full((entries, nodes, parts.LANES), parts.NOTHING, tl.int32)
    open_info = tl.zeros((entries, nodes, parts.LANES), tl.int32)  # token · 32 + depth
    node_of_warp = tl.arange(0, nodes)
    firsts = tl.load(candidate_ids + lane * pool, mask=lane < depth, other=-1)

    # The step's nodes: token · 32 + depth, −1 for an unused node. And of the first nodes of chains: parent and score.
    guess = tl.load(root)
    info = (guess * 32,)
    for below in tl.static_range(1, rows):
        guess = tl.sum(tl.where(lane == below - 1, firsts, 0))
        info = info + (tl.where((ahead > 0) & (below <= depth) & (guess >= 0), guess * 32 + below, -1),)  # noqa: RUF005
    base_parent = (program * 0 - 1,)
    base_score = (program * 0.0,)
    for _ in tl.static_range(1, width):
        base_parent = base_parent + (program * 0 - 1,)  # noqa: RUF005
        base_score = base_score + (program * 0.0 + float("-inf"),)  # noqa: RUF005

    arrivals = 0
    zero = 0
    own_column = column + parts.own_columns()
    weights = parts.matrix_columns(qkv, column, rank)
    more = parts.matrix_columns(qkv + rank * rank, column, rank)
    for group in range(groups):
        first = group * rows
        chains = tl.where(group == 0, 1, width)
        own_info = parts.of_node(own, info)
        own_row = tl.minimum(own_info & 31, depth - 1)

        # Query, key, value.
        for tile in tl.static_range(tiles):
            row = tl.arange(0, parts.ROWS)[:, None, None, None] + tile * parts.ROWS
            known = tl.where(row < rows, tl.maximum(parts.of_node(row, info), 0), 0)
            at = parts.words(rank, 0)
            x = tl.load(parts.as_words(inputs_table) + (known >> 5) * words + at)
            there = tl.load(parts.as_words(positions) + tl.minimum(known & 31, depth - 1) * words + at)
            x = parts.multiply_add(x, tl.full(x.shape, 0x3F803F803F803F80, tl.int64), there)
            if tile > 0:
                weights = parts.matrix_columns(qkv, column + zero, rank)
                more = parts.matrix_columns(qkv + rank * rank, column + zero, rank)
            query = parts.product(weights, x)
            weights = parts.matrix_columns(qkv + 2 * rank * rank, column + zero, rank)
            key = parts.product(more, x)
            squares = parts.product((x, x), x)
            value = parts.product(weights, x)
            query, key, value, squares = tl.reduce((query, key, value, squares), 1, parts.add_4)
            inverse = parts.norm_factor(squares, rank)
            node = parts.in_tile(tile)
            here = projections + (first + node) * rank + own_column
            bias = qkv_bias + own_column
            part = tl.arange(0, 2)[None, None, None, :]
            both = tl.join(query * inverse, key * inverse) + tl.load(bias[:, :, :, None] + part * rank)
            tl.store(here[:, :, :, None] + part * (slots * rank), both.to(tl.bfloat16), mask=node[:, :, :, None] < rows)
            value = value * inverse + tl.load(bias + 2 * rank)
            tl.store(here + 2 * (slots * rank), value.to(tl.bfloat16), mask=node < rows)
        arrivals += programs
        parts.arrive(counter)
        weights = parts.matrix_columns(out, column + zero, rank)
        number = program // heads
        chain = number % chains
        base_depth = (parts.of_node(number, info) & 31) - number // chains
        own_depth = tl.where((number < rows) & (parts.of_node(number, info) >= 0), base_depth + number // chains, -1)
        path = parts.path_of(
            lineage,
            parts.of_node(chain, base_parent),
            base_depth,
            own_depth,
            first + chain - base_depth * chains,
            chains,
        )
        if program == 0:
            all_info = parts.of_node(node_of_warp, info)
            slot = first + node_of_warp
            above = tl.where(node_of_warp < chains, parts.of_node(node_of_warp % chains, base_parent), slot - chains)
            tl.store(tokens + slot, tl.where(all_info >= 0, all_info >> 5, 0), mask=node_of_warp < rows)
            tl.store(depths + slot, tl.where(all_info >= 0, all_info & 31, 0), mask=node_of_warp < rows)
            tl.store(parents + slot, tl.where(all_info >= 0, above, -1), mask=node_of_warp < rows)
        zero = parts.wait(counter, arrivals)

        # Attention of a node and a head over the prompt and the node's path.
        for pair in range(program, rows * heads, programs):
            number = pair // heads
            step = tl.arange(0, 2 * parts.LEVELS)  # the prompt, then the path
            in_prompt = step < parts.LEVELS
            channel = (pair % heads) * head_dim + tl.arange(0, head_dim)
            asked = tl.load(projections + (first + number) * rank + channel, cache_modifier=".cg").to(tl.float32)
            offset = tl.where(in_prompt, step, path)[:, None] * rank + channel[None, :]
            key_at = tl.where(in_prompt[:, None], prompt_keys + offset, keys + offset)
            value_at = tl.where(in_prompt[:, None], prompt_values + offset, keys + slots * rank + offset)
            visible = tl.where(in_prompt, step <= depth, path >= 0)
            mixed = parts.attend(asked, key_at, value_at, visible, head_dim)
            tl.store(attended + number * rank + channel, mixed)
            if pair % heads == 0:
                tl.store(lineage + (first + number) * parts.LEVELS + step, path, mask=step < parts.LEVELS)
            number = (pair + programs) // heads
            chain = number % chains
            base_depth = (parts.of_node(number, info) & 31) - number // chains
            own_depth = tl.where(
                (number < rows) & (parts.of_node(number, info) >= 0), base_depth + number // chains, -1
            )
            path = parts.path_of(
                lineage, parts.of_node(chain, base_parent), base_depth, own_depth,
                first + chain - base_depth * chains, chains,
            )  # fmt: skip
        arrivals += programs
        parts.arrive(counter)
        more = parts.matrix_columns(fc1, column + zero, rank)
        zero = parts.wait(counter, arrivals)

        # Output projection.
        for tile in tl.static_range(tiles):
            x = parts.node_rows(attended, tile, rows, rank)
            node = parts.in_tile(tile)
            known = tl.maximum(parts.of_node(node, info), 0)
            before = parts.rounded_sum(
                tl.load(inputs_table + (known >> 5) * rank + own_column, mask=node < rows, other=0.0),
                tl.load(positions + tl.minimum(known & 31, depth - 1) * rank + own_column, mask=node < rows, other=0.0),
            )
            if tile > 0:
                weights = parts.matrix_columns(out, column + zero, rank)
            result = tl.sum(parts.product(weights, x), axis=1)
            tl.store(
                middle + node * rank + own_column, parts.rounded_sum(before, result.to(tl.bfloat16)), mask=node < rows
            )
        arrivals += programs
        parts.arrive(counter)
        weights = parts.matrix_columns(fc2, column + zero, rank)
        zero = parts.wait(counter, arrivals)

        # MLP.
        for tile in tl.static_range(tiles):
            x = parts.node_rows(middle, tile, rows, rank)
            node = parts.in_tile(tile)
            if tile > 0:
                more = parts.matrix_columns(fc1, column + zero, rank)
            inner, squares = tl.reduce((parts.product(more, x), parts.product((x, x), x)), 1, parts.add_2)
            inner = (inner * parts.norm_factor(squares, rank) + tl.load(fc1_bias + own_column)).to(tl.bfloat16)
            tl.store(hidden + node * rank + own_column, parts.gelu(inner), mask=node < rows)
        arrivals += programs
        parts.arrive(counter)
        used = (own < rows) & (own_info >= 0)
        zero = parts.wait(counter, arrivals)
        for tile in tl.static_range(tiles):
            x = parts.node_rows(hidden, tile, rows, rank)
            node = parts.in_tile(tile)
            if tile > 0:
                weights = parts.matrix_columns(fc2, column + zero, rank)
            before = tl.load(middle + node * rank + own_column, mask=node < rows, other=0.0, cache_modifier=".cg")
            result = tl.sum(parts.product(weights, x), axis=1).to(tl.bfloat16)
            result = parts.rounded_sum(before, parts.rounded_sum(result, tl.load(fc2_bias + own_column)))
            tl.store(last + node * rank + own_column, result, mask=node < rows)
        arrivals += programs
        parts.arrive(counter)

        # Logits of one node: its row, scaled, in the first column of a product and the norm's bias in the others.
        line = candidate_ids + own_row * pool
        ends = (program % share + 1) * few
        for pair in tl.static_range(pairs):
            candidate = (program % share) * few + pair * 4 * parts.ROWS
            weights = (
                parts.head_rows(heads_table + zero, line, candidate, ends, used, rank),
                parts.head_rows(heads_table + zero, line, candidate + parts.ROWS, ends, used, rank),
            )
            more = (
                parts.head_rows(heads_table + zero, line, candidate + 2 * parts.ROWS, ends, used, rank),
                parts.head_rows(heads_table + zero, line, candidate + 3 * parts.ROWS, ends, used, rank),
            )
            if pair == 0:
                zero = parts.wait(counter, arrivals)
            is_row = tl.arange(0, parts.ROWS)[:, None, None, None] == 0
            at = parts.words(rank, 0) + zero
            x = tl.load(
                tl.where(is_row, parts.as_words(last) + own * words, parts.as_words(out_norm_bias)) + at,
                mask=own < rows, other=0, cache_modifier=".cg",
            )  # fmt: skip
            scale = tl.load(parts.as_words(out_norm_scale) + at, mask=is_row, other=0x3F803F803F803F80)
            scaled = parts.multiply_add(x, scale, tl.full(x.shape, -0x7FFF7FFF7FFF8000, tl.int64))
            corrected, other, squares = tl.reduce(
                (parts.product(weights, scaled), parts.product(more, scaled), parts.product((x, x), x)), 1, parts.add_3
            )
            number = parts.in_tile(0)
            factor = tl.where(number == 0, parts.norm_factor(squares, rank), tl.where(number == 1, 1.0, 0.0))
            corrected = tl.join(tl.sum(corrected * factor, axis=2), tl.sum(other * factor, axis=2))
            place = candidate + parts.own_columns() + tl.arange(0, 2)[None, None, :] * parts.COLUMNS
            kept = (place < ends) & (place < pool) & (own < rows)
            is_candidate = tl.load(line + place, mask=kept & used, other=-1) >= 0
            corrected += tl.load(candidate_scores + own_row * pool + place, mask=kept, other=0.0)
            tl.store(logits + own * pool + place, tl.where(is_candidate, corrected, float("-inf")), mask=kept)
        arrivals += programs
        parts.arrive(counter)
        weights = parts.matrix_columns(qkv, column + zero, rank)
        more = parts.matrix_columns(qkv + rank * rank, column + zero, rank)
        zero = parts.wait(counter, arrivals)

        # Children: every program finds those of all nodes, a warp those of a node.
        known = parts.of_node(node_of_warp, info)
        known = tl.where(node_of_warp < rows, known, -1)
        edge, option, guessed = parts.children(logits + zero, zero + 1, known >= 0, pool, nodes, expand)
        found = tl.load(candidate_ids + tl.minimum(tl.maximum(known, 0) & 31, depth - 1)[None, :] * pool + option)

        # Scores along the chains.
        guessed = tl.where(node_of_warp[None, :] == lane[:, None], parts.float_key(guessed)[None, :], parts.LOWEST)
        guessed = tl.max(guessed, axis=1)  # in the lane of the node, in all warps
        node_scores = (base_score[0],)
        beyond = (parts.key_float(tl.max(tl.where(lane == 0, guessed, parts.LOWEST))),)
        for number in tl.static_range(1, rows):
            above = node_scores[number - 1] + beyond[number - 1]
            if number < width:
                score = tl.where(group == 0, above, base_score[number])
            else:
                score = tl.where(group == 0, above, node_scores[number - width] + beyond[number - width])
            node_scores = node_scores + (tl.where(info[number] >= 0, score, float("-inf")),)  # noqa: RUF005
            beyond = beyond + (parts.key_float(tl.max(tl.where(lane == number, guessed, parts.LOWEST))),)  # noqa: RUF005

        # The frontier gets the children, but for those that are nodes already.
        following = node_of_warp + chains
        is_guessed = (ahead > 0) & (following < rows) & (parts.of_node(following, info) >= 0)
        score = parts.of_node(node_of_warp, node_scores)
        usable = (score > float("-inf")) & ((known & 31) < depth) & (known >= 0)
        usable = usable[None, :] & (edge > float("-inf")) & ((option > 0) | ~is_guessed[None, :])
        child_keys = tl.trans(parts.float_key(tl.where(usable, score[None, :] + edge, float("-inf"))))
        child_info = tl.trans(found * 32 + (known & 31)[None, :] + 1)
        fresh = group_at == group
        open_keys = tl.where(fresh, child_keys[None, :, :], open_keys)
        open_info = tl.where(fresh, child_info[None, :, :], open_info)
        if program == 0:
            tl.store(scores + first + node_of_warp, score, mask=node_of_warp < rows)

        # The next chains: the best of every node's best frontier entries.
        left = open_keys
        spot = tl.arange(0, picks)[:, None, None] * parts.LANES + lane_at
        best_keys = tl.full((picks, nodes, parts.LANES), parts.LOWEST, tl.int32)
        best_entries = tl.full((picks, nodes, parts.LANES), -1, tl.int32)
        best_info = tl.full((picks, nodes, parts.LANES), -1, tl.int32)
        for number in range(width):
            winner = tl.max(tl.max(left, axis=0), axis=1)[None, :, None]
            at_entry = tl.min(tl.min(tl.where(left == winner, entry, parts.LAST), axis=0), axis=1)[None, :, None]
            is_winner = entry == at_entry
            told = tl.sum(tl.sum(tl.where(is_winner, open_info, 0), axis=0), axis=1)[None, :, None]
            left = tl.where(is_winner, parts.LOWEST, left)
            is_spot = spot == node_at * padded + number
            best_keys = tl.where(is_spot, winner, best_keys)
            best_entries = tl.where(is_spot, at_entry, best_entries)
            best_info = tl.where(is_spot, told, best_info)
        best_keys, best_entries, best_info = tl.reduce((best_keys, best_entries, best_info), 1, parts.max_3)
        base_parent = ()
        base_score = ()
        info = ()
        for _ in tl.static_range(width):
            winner = tl.max(tl.max(best_keys, axis=0), axis=0)
            at = tl.min(tl.min(tl.where(best_keys == winner, best_entries, parts.LAST), axis=0), axis=0)
            told = tl.max(tl.max(tl.where(best_entries == at, best_info, -1), axis=0), axis=0)
            best_keys = tl.where(best_entries == at, parts.LOWEST, best_keys)
            exists = winner > parts.NOTHING
            open_keys = tl.where((entry == at) & exists, parts.NOTHING, open_keys)
            above = at // expand
            info = info + (tl.where(exists, told, -1),)  # noqa: RUF005
            base_parent = base_parent + (tl.where(exists, above // nodes * rows + above % nodes, -1),)  # noqa: RUF005
            base_score = base_score + (tl.where(exists, parts.key_float(winner), float("-inf")),)  # noqa: RUF005
        for number in tl.static_range(width, rows):
            above = info[number - width]
            guess = tl.max(tl.where(lane == (above & 31), firsts, -1))
            exists = (above >= 0) & ((above & 31) < depth) & (guess >= 0)
            info = info + (tl.where(exists, guess * 32 + (above & 31) + 1, -1),)  # noqa: RUF005
    if program == 0:
        for number in tl.static_range(width):
            slot = groups * rows + number
            known = info[number]
            exists = known >= 0
            base_depth = tl.maximum(known, 0) & 31
            own_depth = tl.where(exists, base_depth, -1)
            step = tl.arange(0, 2 * parts.LEVELS)
            path = parts.path_of(lineage, base_parent[number], base_depth, own_depth, slot - base_depth, 1)
            tl.store(lineage + slot * parts.LEVELS + step, path, mask=step < parts.LEVELS)
            tl.store(tokens + slot, tl.where(exists, known >> 5, 0))
            tl.store(depths + slot, base_depth)
            tl.store(parents + slot, base_parent[number])
            tl.store(scores + slot, base_score[number])
        at = (group_at * rows + node_at) * expand + lane_at % expand
        kept = (node_at < rows) & (group_at < groups)
        tl.store(frontier_scores + at, parts.key_float(open_keys), mask=kept)
        tl.store(frontier_tokens + at, open_info >> 5, mask=kept)
