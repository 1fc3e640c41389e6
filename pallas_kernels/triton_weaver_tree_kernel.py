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
- products are `mma.sync` on operands as they come from memory (`_product`), which Triton would carry through shared
  memory: channels are summed, so it does not matter which of them an operand's register holds, if both hold the same;
- a norm is a factor: its scale is folded into the matrix behind it, and the squares are summed by one more product;
- what the programs agree on, the nodes of a step, is held in scalars.

Rounding follows the XLA form: bfloat16 after every product and residual sum, float32 inside.
"""

# ruff: noqa: C901, PLR0912, PLR0915 - a kernel whose phases share registers is one long function
from __future__ import annotations

from typing import no_type_check

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from pallas_kernels import constants, triton_weaver_tree

COLUMNS = tl.constexpr(triton_weaver_tree.COLUMNS)
LANES = tl.constexpr(triton_weaver_tree.LANES)
SPLITS = tl.constexpr(triton_weaver_tree.WARPS)
LEVELS = tl.constexpr(constants.PATH)
EPS = tl.constexpr(constants.NORM_EPS)
ROWS = tl.constexpr(8)  # of an operand that one instruction takes: half of a program's columns, or the nodes
WORD = tl.constexpr(4)  # bfloat16 numbers in an int64
LOWEST = tl.constexpr(-(2**31))
NOTHING = tl.constexpr(-2139095041)  # the key of −inf
LAST = tl.constexpr(2**31 - 1)


@triton.jit
@no_type_check
def _arrive(counter: tl.tensor) -> None:
    """This program's half of a barrier: what it has written is seen behind the barrier."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l",
        [counter],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
@no_type_check
def _wait(counter: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The other half: `total` arrivals end it.

    Returns a 0 that the compiler does not know to be one: addresses that add it are computed where they are used,
    not once before all steps, which would take more registers than there are.
    """
    zero = tl.inline_asm_elementwise(
        """{
        .reg .pred first, early;
        .reg .u32 thread, seen;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @!first bra DONE;
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
def _key(x: tl.tensor) -> tl.tensor:
    """Order-preserving int32 of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _unkey(key: tl.tensor) -> tl.tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _of_node(node: tl.tensor, values: tl.tuple) -> tl.tensor:
    """The values, a scalar a node, of the nodes in a tensor."""
    result = values[0]
    for number in tl.static_range(1, len(values)):
        result = tl.where(node == number, values[number], result)
    return result


# --- products --------------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _words(rank: tl.constexpr, stride: tl.constexpr) -> tl.tensor:
    """[8, warps, repeats, 8]: offsets of the int64 words of 8 rows, a run of channels a warp; a lane has 16 bytes."""
    row = tl.arange(0, ROWS)[:, None, None, None]
    warp = tl.arange(0, SPLITS)[None, :, None, None]
    repeat = tl.arange(0, rank // (SPLITS * ROWS * WORD))[None, None, :, None]
    word = tl.arange(0, ROWS)[None, None, None, :]
    return row * stride + warp * (rank // (SPLITS * WORD)) + repeat * ROWS + word


@triton.jit
@no_type_check
def _as_words(x: tl.tensor) -> tl.tensor:
    return x.to(tl.pointer_type(tl.int64))


@triton.jit
@no_type_check
def _columns(matrix: tl.tensor, column: tl.tensor, rank: tl.constexpr) -> tuple[tl.tensor, ...]:
    """A program's 16 columns of a matrix, stored [columns, rank], in two halves."""
    at = _as_words(matrix) + column * (rank // WORD) + _words(rank, rank // WORD)
    return tl.load(at), tl.load(at + ROWS * (rank // WORD))


@triton.jit
@no_type_check
def _nodes(x: tl.tensor, tile: tl.constexpr, rows: tl.constexpr, rank: tl.constexpr) -> tl.tensor:
    """Eight nodes of an activation that other programs wrote; 0 for nodes from `rows` on."""
    row = tl.arange(0, ROWS)[:, None, None, None] + tile * ROWS
    at = _as_words(x) + tile * ROWS * (rank // WORD) + _words(rank, rank // WORD)
    return tl.load(at, mask=row < rows, other=0, cache_modifier=".cg")


@triton.jit
@no_type_check
def _candidates(
    table: tl.tensor, ids: tl.tensor, first: tl.tensor, ends: tl.tensor, used: tl.tensor, rank: tl.constexpr
) -> tl.tensor:
    """Rows of the table of heads of eight candidates; 0 for what is none."""
    place = first + tl.arange(0, ROWS)[:, None, None, None]
    token = tl.load(ids + place, mask=(place < ends) & used, other=-1)
    at = tl.maximum(token, 0).to(tl.int64) * (rank // WORD) + _words(rank, 0)
    return tl.load(_as_words(table) + at, mask=token >= 0, other=0)


@triton.jit
@no_type_check
def _multiply_add(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """X · y + z in bfloat16, rounded once, of words."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x0, x1, y0, y1, z0, z1;
        mov.b64 {x0, x1}, $1;
        mov.b64 {y0, y1}, $2;
        mov.b64 {z0, z1}, $3;
        fma.rn.bf16x2 x0, x0, y0, z0;
        fma.rn.bf16x2 x1, x1, y1, z1;
        mov.b64 $0, {x0, x1};
        }""",
        "=l,l,l,l",
        [x, y, z],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
@no_type_check
def _product(columns: tl.tuple, x: tl.tensor) -> tl.tensor:
    """[8, warps, 2, 8]: of a program's columns, number 8 half + g at [g, :, half], and nodes; warps not yet summed.

    The operands are [8, warps, repeats, 8] words as `_words` finds them. A thread holds the words 2 t and 2 t + 1 of
    row g in each repeat, for lane 4 g + t: what mma.m16n8k16 takes, if a word's four channels are called 2 t, 2 t + 1,
    2 t + 8 and 2 t + 9. It returns the nodes 2 t and 2 t + 1 of column g to the same lane.
    """
    low, high = columns
    sums = tl.inline_asm_elementwise(
        """{
        .reg .b32 a0, a1, a2, a3, b0, b1;
        .reg .f32 c0, c1, c2, c3;
        mov.f32 c0, 0f00000000;
        mov.f32 c1, 0f00000000;
        mov.f32 c2, 0f00000000;
        mov.f32 c3, 0f00000000;
        mov.b64 {a0, a2}, $4;
        mov.b64 {a1, a3}, $8;
        mov.b64 {b0, b1}, $12;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3};
        mov.b64 {a0, a2}, $5;
        mov.b64 {a1, a3}, $9;
        mov.b64 {b0, b1}, $13;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3};
        mov.b64 {a0, a2}, $6;
        mov.b64 {a1, a3}, $10;
        mov.b64 {b0, b1}, $14;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3};
        mov.b64 {a0, a2}, $7;
        mov.b64 {a1, a3}, $11;
        mov.b64 {b0, b1}, $15;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3};
        mov.f32 $0, c0;
        mov.f32 $1, c1;
        mov.f32 $2, c2;
        mov.f32 $3, c3;
        }""",
        "=f,=f,=f,=f,l,l,l,l,l,l,l,l,l,l,l,l",
        [low, high, x],
        dtype=tl.float32,
        is_pure=False,
        pack=4,
    )
    chains: tl.constexpr = x.shape[2] // 2
    return tl.sum(tl.reshape(sums, (ROWS, SPLITS, chains, 2, ROWS)), axis=2)


@triton.jit
@no_type_check
def _add_2(a: tl.tensor, b: tl.tensor, p: tl.tensor, q: tl.tensor) -> tuple[tl.tensor, ...]:
    return a + p, b + q


@triton.jit
@no_type_check
def _add_3(a: tl.tensor, b: tl.tensor, c: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor) -> tuple[tl.tensor, ...]:
    return a + p, b + q, c + r


@triton.jit
@no_type_check
def _add_4(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor, s: tl.tensor
) -> tuple[tl.tensor, ...]:
    return a + p, b + q, c + r, d + s


@triton.jit
@no_type_check
def _max_3(a: tl.tensor, b: tl.tensor, c: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor) -> tuple[tl.tensor, ...]:
    return tl.maximum(a, p), tl.maximum(b, q), tl.maximum(c, r)


@triton.jit
@no_type_check
def _inverse(squares: tl.tensor, rank: tl.constexpr) -> tl.tensor:
    """[1, 1, 8]: factor of the RMS norm of each node, from the products of all pairs of nodes."""
    row = tl.arange(0, ROWS)[:, None, None]
    own = (row == tl.arange(0, ROWS)[None, None, :]) & (tl.arange(0, 2)[None, :, None] == 0)
    return tl.rsqrt(tl.sum(tl.sum(tl.where(own, squares, 0.0), axis=1), axis=0) / rank + EPS)[None, None, :]


@triton.jit
@no_type_check
def _own() -> tl.tensor:
    """[8, 2, 1]: numbers of a program's columns, as `_product` has them."""
    return tl.arange(0, ROWS)[:, None, None] + tl.arange(0, 2)[None, :, None] * ROWS


@triton.jit
@no_type_check
def _in_tile(tile: tl.constexpr) -> tl.tensor:
    """[1, 1, 8]: numbers of eight nodes."""
    return tl.arange(0, ROWS)[None, None, :] + tile * ROWS


@triton.jit
@no_type_check
def _sum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The sum in bfloat16."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)


@triton.jit
@no_type_check
def _gelu(x: tl.tensor) -> tl.tensor:
    x = x.to(tl.float32)
    return (0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))).to(tl.bfloat16)


# --- attention -------------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _path(
    lineage: tl.tensor,
    parent: tl.tensor,
    base_depth: tl.tensor,
    depth: tl.tensor,
    chain: tl.tensor,
    chains: tl.tensor,
) -> tl.tensor:
    """[2 · 16]: slots from the root to a node, −1 beyond, twice; all −1 for an unused node, whose depth is −1.

    The first node of its chain has the depth `base_depth` and this parent; the chain's slot of depth d is
    chain + chains · d.
    """
    step = tl.arange(0, 2 * LEVELS) % LEVELS
    above = tl.load(lineage + parent * LEVELS + step, mask=(step < base_depth) & (depth >= 0), other=0)
    path = tl.where(step >= base_depth, chain + chains * step, above)
    return tl.where(step <= depth, path, -1)


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


# --- children and choice ---------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _children(
    logits: tl.tensor, one: tl.tensor, used: tl.tensor, pool: tl.constexpr, nodes: tl.constexpr, expand: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Log-probabilities and places in the pool of every node's best children, and the log-probability of the first.

    [32, nodes], with child number lane % expand; [nodes]. `one` is a 1 that the compiler does not know to be one: it
    would give neighbours to one lane, and other nodes to the rest of the warp.
    """
    lane = tl.arange(0, LANES)[:, None, None]
    node = tl.arange(0, nodes)
    option = tl.arange(0, (pool + LANES - 1) // LANES)[None, None, :] * LANES + lane
    kept = used[None, :, None] & (option < pool)
    offset = node[None, :, None] * pool + option - lane + lane * one
    logit = tl.load(logits + offset, mask=kept, other=float("-inf"), cache_modifier=".cg")
    key = _key(logit)
    top = tl.max(tl.max(key, axis=2), axis=0)
    finite = tl.where(top == NOTHING, 0.0, _unkey(top))
    total = finite + tl.log(tl.sum(tl.sum(tl.exp(logit - finite[None, :, None]), axis=2), axis=0))
    first = tl.load(logits + node * pool, mask=used, other=float("-inf"), cache_modifier=".cg")
    place = tl.arange(0, LANES)[:, None] % expand
    best = tl.full((LANES, nodes), NOTHING, tl.int32)
    found = tl.zeros((LANES, nodes), tl.int32)
    for child in range(expand):
        winner = tl.max(tl.max(key, axis=2), axis=0)
        at = tl.min(tl.min(tl.where(key == winner[None, :, None], option, LAST), axis=2), axis=0)
        key = tl.where(option == at[None, :, None], LOWEST, key)
        best = tl.where(place == child, winner[None, :], best)
        found = tl.where(place == child, at[None, :], found)
    edge = tl.where(best > NOTHING, tl.minimum(_unkey(best) - total[None, :], 0.0), float("-inf"))
    return edge, found, tl.where(first > float("-inf"), tl.minimum(first - total, 0.0), float("-inf"))


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
    column = program * COLUMNS
    head_dim: tl.constexpr = rank // heads
    rows: tl.constexpr = width * (1 + ahead)
    words: tl.constexpr = rank // WORD
    tiles: tl.constexpr = nodes // ROWS
    slots: tl.constexpr = groups * rows + width
    padded: tl.constexpr = picks * LANES // nodes  # picks of a node
    keys = projections + slots * rank
    share: tl.constexpr = programs // nodes  # programs that compute the logits of a node
    own = program // share
    few: tl.constexpr = (pool + share - 1) // share  # candidates of a program
    pairs: tl.constexpr = (few + 2 * COLUMNS - 1) // (2 * COLUMNS)

    # The frontier: a warp holds a node's children, groups side by side.
    lane = tl.arange(0, LANES)
    row_at = tl.arange(0, entries)[:, None, None]
    node_at = tl.arange(0, nodes)[None, :, None]
    lane_at = lane[None, None, :]
    group_at = row_at * (LANES // expand) + lane_at // expand
    entry = (group_at * nodes + node_at) * expand + lane_at % expand
    open_keys = tl.full((entries, nodes, LANES), NOTHING, tl.int32)
    open_info = tl.zeros((entries, nodes, LANES), tl.int32)  # token · 32 + depth
    node_of_warp = tl.arange(0, nodes)
    firsts = tl.load(candidate_ids + lane * pool, mask=lane < depth, other=-1)

    # The step's nodes: token · 32 + depth, −1 for an unused node. And of the first nodes of chains: parent and score.
    guess = tl.load(root)
    info = (guess * 32,)
    for number in tl.static_range(1, rows):
        guess = tl.sum(tl.where(lane == number - 1, firsts, 0))
        info = info + (tl.where((ahead > 0) & (number <= depth) & (guess >= 0), guess * 32 + number, -1),)  # noqa: RUF005
    base_parent = (program * 0 - 1,)
    base_score = (program * 0.0,)
    for _ in tl.static_range(1, width):
        base_parent = base_parent + (program * 0 - 1,)  # noqa: RUF005
        base_score = base_score + (program * 0.0 + float("-inf"),)  # noqa: RUF005

    arrivals = 0
    zero = 0
    own_column = column + _own()
    weights = _columns(qkv, column, rank)
    more = _columns(qkv + rank * rank, column, rank)
    for group in range(groups):
        first = group * rows
        chains = tl.where(group == 0, 1, width)
        own_info = _of_node(own, info)
        own_row = tl.minimum(own_info & 31, depth - 1)

        # Query, key, value.
        for tile in tl.static_range(tiles):
            row = tl.arange(0, ROWS)[:, None, None, None] + tile * ROWS
            known = tl.where(row < rows, tl.maximum(_of_node(row, info), 0), 0)
            at = _words(rank, 0)
            x = tl.load(_as_words(inputs_table) + (known >> 5) * words + at)
            there = tl.load(_as_words(positions) + tl.minimum(known & 31, depth - 1) * words + at)
            x = _multiply_add(x, tl.full(x.shape, 0x3F803F803F803F80, tl.int64), there)
            if tile > 0:
                weights = _columns(qkv, column + zero, rank)
                more = _columns(qkv + rank * rank, column + zero, rank)
            query = _product(weights, x)
            weights = _columns(qkv + 2 * rank * rank, column + zero, rank)
            key = _product(more, x)
            squares = _product((x, x), x)
            value = _product(weights, x)
            query, key, value, squares = tl.reduce((query, key, value, squares), 1, _add_4)
            inverse = _inverse(squares, rank)
            node = _in_tile(tile)
            here = projections + (first + node) * rank + own_column
            bias = qkv_bias + own_column
            part = tl.arange(0, 2)[None, None, None, :]
            both = tl.join(query * inverse, key * inverse) + tl.load(bias[:, :, :, None] + part * rank)
            tl.store(here[:, :, :, None] + part * (slots * rank), both.to(tl.bfloat16), mask=node[:, :, :, None] < rows)
            value = value * inverse + tl.load(bias + 2 * rank)
            tl.store(here + 2 * (slots * rank), value.to(tl.bfloat16), mask=node < rows)
        arrivals += programs
        _arrive(counter)
        weights = _columns(out, column + zero, rank)
        number = program // heads
        chain = number % chains
        base_depth = (_of_node(number, info) & 31) - number // chains
        own_depth = tl.where((number < rows) & (_of_node(number, info) >= 0), base_depth + number // chains, -1)
        path = _path(
            lineage, _of_node(chain, base_parent), base_depth, own_depth, first + chain - base_depth * chains, chains
        )
        if program == 0:
            all_info = _of_node(node_of_warp, info)
            slot = first + node_of_warp
            above = tl.where(node_of_warp < chains, _of_node(node_of_warp % chains, base_parent), slot - chains)
            tl.store(tokens + slot, tl.where(all_info >= 0, all_info >> 5, 0), mask=node_of_warp < rows)
            tl.store(depths + slot, tl.where(all_info >= 0, all_info & 31, 0), mask=node_of_warp < rows)
            tl.store(parents + slot, tl.where(all_info >= 0, above, -1), mask=node_of_warp < rows)
        zero = _wait(counter, arrivals)

        # Attention of a node and a head over the prompt and the node's path.
        for pair in range(program, rows * heads, programs):
            number = pair // heads
            step = tl.arange(0, 2 * LEVELS)  # the prompt, then the path
            in_prompt = step < LEVELS
            channel = (pair % heads) * head_dim + tl.arange(0, head_dim)
            asked = tl.load(projections + (first + number) * rank + channel, cache_modifier=".cg").to(tl.float32)
            offset = tl.where(in_prompt, step, path)[:, None] * rank + channel[None, :]
            key_at = tl.where(in_prompt[:, None], prompt_keys + offset, keys + offset)
            value_at = tl.where(in_prompt[:, None], prompt_values + offset, keys + slots * rank + offset)
            visible = tl.where(in_prompt, step <= depth, path >= 0)
            mixed = _attend(asked, key_at, value_at, visible, head_dim)
            tl.store(attended + number * rank + channel, mixed)
            if pair % heads == 0:
                tl.store(lineage + (first + number) * LEVELS + step, path, mask=step < LEVELS)
            number = (pair + programs) // heads
            chain = number % chains
            base_depth = (_of_node(number, info) & 31) - number // chains
            own_depth = tl.where((number < rows) & (_of_node(number, info) >= 0), base_depth + number // chains, -1)
            path = _path(
                lineage, _of_node(chain, base_parent), base_depth, own_depth,
                first + chain - base_depth * chains, chains,
            )  # fmt: skip
        arrivals += programs
        _arrive(counter)
        more = _columns(fc1, column + zero, rank)
        zero = _wait(counter, arrivals)

        # Output projection.
        for tile in tl.static_range(tiles):
            x = _nodes(attended, tile, rows, rank)
            node = _in_tile(tile)
            known = tl.maximum(_of_node(node, info), 0)
            before = _sum(
                tl.load(inputs_table + (known >> 5) * rank + own_column, mask=node < rows, other=0.0),
                tl.load(positions + tl.minimum(known & 31, depth - 1) * rank + own_column, mask=node < rows, other=0.0),
            )
            if tile > 0:
                weights = _columns(out, column + zero, rank)
            result = tl.sum(_product(weights, x), axis=1)
            tl.store(middle + node * rank + own_column, _sum(before, result.to(tl.bfloat16)), mask=node < rows)
        arrivals += programs
        _arrive(counter)
        weights = _columns(fc2, column + zero, rank)
        zero = _wait(counter, arrivals)

        # MLP.
        for tile in tl.static_range(tiles):
            x = _nodes(middle, tile, rows, rank)
            node = _in_tile(tile)
            if tile > 0:
                more = _columns(fc1, column + zero, rank)
            inner, squares = tl.reduce((_product(more, x), _product((x, x), x)), 1, _add_2)
            inner = (inner * _inverse(squares, rank) + tl.load(fc1_bias + own_column)).to(tl.bfloat16)
            tl.store(hidden + node * rank + own_column, _gelu(inner), mask=node < rows)
        arrivals += programs
        _arrive(counter)
        used = (own < rows) & (own_info >= 0)
        zero = _wait(counter, arrivals)
        for tile in tl.static_range(tiles):
            x = _nodes(hidden, tile, rows, rank)
            node = _in_tile(tile)
            if tile > 0:
                weights = _columns(fc2, column + zero, rank)
            before = tl.load(middle + node * rank + own_column, mask=node < rows, other=0.0, cache_modifier=".cg")
            result = tl.sum(_product(weights, x), axis=1).to(tl.bfloat16)
            result = _sum(before, _sum(result, tl.load(fc2_bias + own_column)))
            tl.store(last + node * rank + own_column, result, mask=node < rows)
        arrivals += programs
        _arrive(counter)

        # Logits of one node: its row, scaled, in the first column of a product and the norm's bias in the others.
        line = candidate_ids + own_row * pool
        ends = (program % share + 1) * few
        for pair in tl.static_range(pairs):
            candidate = (program % share) * few + pair * 4 * ROWS
            weights = (
                _candidates(heads_table + zero, line, candidate, ends, used, rank),
                _candidates(heads_table + zero, line, candidate + ROWS, ends, used, rank),
            )
            more = (
                _candidates(heads_table + zero, line, candidate + 2 * ROWS, ends, used, rank),
                _candidates(heads_table + zero, line, candidate + 3 * ROWS, ends, used, rank),
            )
            if pair == 0:
                zero = _wait(counter, arrivals)
            is_row = tl.arange(0, ROWS)[:, None, None, None] == 0
            at = _words(rank, 0) + zero
            x = tl.load(
                tl.where(is_row, _as_words(last) + own * words, _as_words(out_norm_bias)) + at,
                mask=own < rows, other=0, cache_modifier=".cg",
            )  # fmt: skip
            scale = tl.load(_as_words(out_norm_scale) + at, mask=is_row, other=0x3F803F803F803F80)
            scaled = _multiply_add(x, scale, tl.full(x.shape, -0x7FFF7FFF7FFF8000, tl.int64))
            corrected, other, squares = tl.reduce(
                (_product(weights, scaled), _product(more, scaled), _product((x, x), x)), 1, _add_3
            )
            number = _in_tile(0)
            factor = tl.where(number == 0, _inverse(squares, rank), tl.where(number == 1, 1.0, 0.0))
            corrected = tl.join(tl.sum(corrected * factor, axis=2), tl.sum(other * factor, axis=2))
            place = candidate + _own() + tl.arange(0, 2)[None, None, :] * COLUMNS
            kept = (place < ends) & (place < pool) & (own < rows)
            is_candidate = tl.load(line + place, mask=kept & used, other=-1) >= 0
            corrected += tl.load(candidate_scores + own_row * pool + place, mask=kept, other=0.0)
            tl.store(logits + own * pool + place, tl.where(is_candidate, corrected, float("-inf")), mask=kept)
        arrivals += programs
        _arrive(counter)
        weights = _columns(qkv, column + zero, rank)
        more = _columns(qkv + rank * rank, column + zero, rank)
        zero = _wait(counter, arrivals)

        # Children: every program finds those of all nodes, a warp those of a node.
        known = _of_node(node_of_warp, info)
        known = tl.where(node_of_warp < rows, known, -1)
        edge, option, guessed = _children(logits + zero, zero + 1, known >= 0, pool, nodes, expand)
        found = tl.load(candidate_ids + tl.minimum(tl.maximum(known, 0) & 31, depth - 1)[None, :] * pool + option)

        # Scores along the chains.
        guessed = tl.where(node_of_warp[None, :] == lane[:, None], _key(guessed)[None, :], LOWEST)
        guessed = tl.max(guessed, axis=1)  # in the lane of the node, in all warps
        node_scores = (base_score[0],)
        beyond = (_unkey(tl.max(tl.where(lane == 0, guessed, LOWEST))),)
        for number in tl.static_range(1, rows):
            above = node_scores[number - 1] + beyond[number - 1]
            if number < width:
                score = tl.where(group == 0, above, base_score[number])
            else:
                score = tl.where(group == 0, above, node_scores[number - width] + beyond[number - width])
            node_scores = node_scores + (tl.where(info[number] >= 0, score, float("-inf")),)  # noqa: RUF005
            beyond = beyond + (_unkey(tl.max(tl.where(lane == number, guessed, LOWEST))),)  # noqa: RUF005

        # The frontier gets the children, but for those that are nodes already.
        following = node_of_warp + chains
        is_guessed = (ahead > 0) & (following < rows) & (_of_node(following, info) >= 0)
        score = _of_node(node_of_warp, node_scores)
        usable = (score > float("-inf")) & ((known & 31) < depth) & (known >= 0)
        usable = usable[None, :] & (edge > float("-inf")) & ((option > 0) | ~is_guessed[None, :])
        child_keys = tl.trans(_key(tl.where(usable, score[None, :] + edge, float("-inf"))))
        child_info = tl.trans(found * 32 + (known & 31)[None, :] + 1)
        fresh = group_at == group
        open_keys = tl.where(fresh, child_keys[None, :, :], open_keys)
        open_info = tl.where(fresh, child_info[None, :, :], open_info)
        if program == 0:
            tl.store(scores + first + node_of_warp, score, mask=node_of_warp < rows)

        # The next chains: the best of every node's best frontier entries.
        left = open_keys
        spot = tl.arange(0, picks)[:, None, None] * LANES + lane_at
        best_keys = tl.full((picks, nodes, LANES), LOWEST, tl.int32)
        best_entries = tl.full((picks, nodes, LANES), -1, tl.int32)
        best_info = tl.full((picks, nodes, LANES), -1, tl.int32)
        for number in range(width):
            winner = tl.max(tl.max(left, axis=0), axis=1)[None, :, None]
            at_entry = tl.min(tl.min(tl.where(left == winner, entry, LAST), axis=0), axis=1)[None, :, None]
            is_winner = entry == at_entry
            told = tl.sum(tl.sum(tl.where(is_winner, open_info, 0), axis=0), axis=1)[None, :, None]
            left = tl.where(is_winner, LOWEST, left)
            is_spot = spot == node_at * padded + number
            best_keys = tl.where(is_spot, winner, best_keys)
            best_entries = tl.where(is_spot, at_entry, best_entries)
            best_info = tl.where(is_spot, told, best_info)
        best_keys, best_entries, best_info = tl.reduce((best_keys, best_entries, best_info), 1, _max_3)
        base_parent = ()
        base_score = ()
        info = ()
        for _ in tl.static_range(width):
            winner = tl.max(tl.max(best_keys, axis=0), axis=0)
            at = tl.min(tl.min(tl.where(best_keys == winner, best_entries, LAST), axis=0), axis=0)
            told = tl.max(tl.max(tl.where(best_entries == at, best_info, -1), axis=0), axis=0)
            best_keys = tl.where(best_entries == at, LOWEST, best_keys)
            exists = winner > NOTHING
            open_keys = tl.where((entry == at) & exists, NOTHING, open_keys)
            above = at // expand
            info = info + (tl.where(exists, told, -1),)  # noqa: RUF005
            base_parent = base_parent + (tl.where(exists, above // nodes * rows + above % nodes, -1),)  # noqa: RUF005
            base_score = base_score + (tl.where(exists, _unkey(winner), float("-inf")),)  # noqa: RUF005
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
            step = tl.arange(0, 2 * LEVELS)
            path = _path(lineage, base_parent[number], base_depth, own_depth, slot - base_depth, 1)
            tl.store(lineage + slot * LEVELS + step, path, mask=step < LEVELS)
            tl.store(tokens + slot, tl.where(exists, known >> 5, 0))
            tl.store(depths + slot, base_depth)
            tl.store(parents + slot, base_parent[number])
            tl.store(scores + slot, base_score[number])
        at = (group_at * rows + node_at) * expand + lane_at % expand
        kept = (node_at < rows) & (group_at < groups)
        tl.store(frontier_scores + at, _unkey(open_keys), mask=kept)
        tl.store(frontier_tokens + at, open_info >> 5, mask=kept)
