"""Device functions of `triton_weaver_tree_kernel`, which says why they are so."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

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
def arrive(counter: tl.tensor) -> None:
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
def wait(counter: tl.tensor, total: tl.tensor) -> tl.tensor:
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
def float_key(x: tl.tensor) -> tl.tensor:
    """Order-preserving int32 of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def key_float(key: tl.tensor) -> tl.tensor:
    """The float32 of such a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def of_node(node: tl.tensor, values: tl.tuple) -> tl.tensor:
    """The values, a scalar a node, of the nodes in a tensor."""
    result = values[0]
    for number in tl.static_range(1, len(values)):
        result = tl.where(node == number, values[number], result)
    return result


# --- products --------------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def words(rank: tl.constexpr, stride: tl.constexpr) -> tl.tensor:
    """[8, warps, repeats, 8]: offsets of the int64 words of 8 rows, a run of channels a warp; a lane has 16 bytes."""
    row = tl.arange(0, ROWS)[:, None, None, None]
    warp = tl.arange(0, SPLITS)[None, :, None, None]
    repeat = tl.arange(0, rank // (SPLITS * ROWS * WORD))[None, None, :, None]
    word = tl.arange(0, ROWS)[None, None, None, :]
    return row * stride + warp * (rank // (SPLITS * WORD)) + repeat * ROWS + word


@triton.jit
@no_type_check
def as_words(x: tl.tensor) -> tl.tensor:
    """The same address, of int64."""
    return x.to(tl.pointer_type(tl.int64))


@triton.jit
@no_type_check
def matrix_columns(matrix: tl.tensor, column: tl.tensor, rank: tl.constexpr) -> tuple[tl.tensor, ...]:
    """A program's 16 columns of a matrix, stored [columns, rank], in two halves."""
    at = as_words(matrix) + column * (rank // WORD) + words(rank, rank // WORD)
    return tl.load(at), tl.load(at + ROWS * (rank // WORD))


@triton.jit
@no_type_check
def node_rows(x: tl.tensor, tile: tl.constexpr, rows: tl.constexpr, rank: tl.constexpr) -> tl.tensor:
    """Eight nodes of an activation that other programs wrote; 0 for nodes from `rows` on."""
    row = tl.arange(0, ROWS)[:, None, None, None] + tile * ROWS
    at = as_words(x) + tile * ROWS * (rank // WORD) + words(rank, rank // WORD)
    return tl.load(at, mask=row < rows, other=0, cache_modifier=".cg")


@triton.jit
@no_type_check
def head_rows(
    table: tl.tensor, ids: tl.tensor, first: tl.tensor, ends: tl.tensor, used: tl.tensor, rank: tl.constexpr
) -> tl.tensor:
    """Rows of the table of heads of eight candidates; 0 for what is none."""
    place = first + tl.arange(0, ROWS)[:, None, None, None]
    token = tl.load(ids + place, mask=(place < ends) & used, other=-1)
    at = tl.maximum(token, 0).to(tl.int64) * (rank // WORD) + words(rank, 0)
    return tl.load(as_words(table) + at, mask=token >= 0, other=0)


@triton.jit
@no_type_check
def multiply_add(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
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
def product(columns: tl.tuple, x: tl.tensor) -> tl.tensor:
    """[8, warps, 2, 8]: of a program's columns, number 8 half + g at [g, :, half], and nodes; warps not yet summed.

    The operands are [8, warps, repeats, 8] words as `words` finds them. A thread holds the words 2 t and 2 t + 1 of
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
def add_2(a: tl.tensor, b: tl.tensor, p: tl.tensor, q: tl.tensor) -> tuple[tl.tensor, ...]:
    """Sums, two side by side, of a reduction."""
    return a + p, b + q


@triton.jit
@no_type_check
def add_3(a: tl.tensor, b: tl.tensor, c: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor) -> tuple[tl.tensor, ...]:
    """Three sums."""
    return a + p, b + q, c + r


@triton.jit
@no_type_check
def add_4(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor, s: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Four sums."""
    return a + p, b + q, c + r, d + s


@triton.jit
@no_type_check
def max_3(a: tl.tensor, b: tl.tensor, c: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor) -> tuple[tl.tensor, ...]:
    """Three maxima."""
    return tl.maximum(a, p), tl.maximum(b, q), tl.maximum(c, r)


@triton.jit
@no_type_check
def norm_factor(squares: tl.tensor, rank: tl.constexpr) -> tl.tensor:
    """[1, 1, 8]: factor of the RMS norm of each node, from the products of all pairs of nodes."""
    row = tl.arange(0, ROWS)[:, None, None]
    own = (row == tl.arange(0, ROWS)[None, None, :]) & (tl.arange(0, 2)[None, :, None] == 0)
    return tl.rsqrt(tl.sum(tl.sum(tl.where(own, squares, 0.0), axis=1), axis=0) / rank + EPS)[None, None, :]


@triton.jit
@no_type_check
def own_columns() -> tl.tensor:
    """[8, 2, 1]: numbers of a program's columns, as `product` has them."""
    return tl.arange(0, ROWS)[:, None, None] + tl.arange(0, 2)[None, :, None] * ROWS


@triton.jit
@no_type_check
def in_tile(tile: tl.constexpr) -> tl.tensor:
    """[1, 1, 8]: numbers of eight nodes."""
    return tl.arange(0, ROWS)[None, None, :] + tile * ROWS


@triton.jit
@no_type_check
def rounded_sum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The sum in bfloat16."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)


@triton.jit
@no_type_check
def gelu(x: tl.tensor) -> tl.tensor:
    """GELU with the exact erf, in bfloat16."""
    x = x.to(tl.float32)
    return (0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))).to(tl.bfloat16)


# --- attention -------------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def path_of(
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
def attend(
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
def children(
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
    key = float_key(logit)
    top = tl.max(tl.max(key, axis=2), axis=0)
    finite = tl.where(top == NOTHING, 0.0, key_float(top))
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
    edge = tl.where(best > NOTHING, tl.minimum(key_float(best) - total[None, :], 0.0), float("-inf"))
    return edge, found, tl.where(first > float("-inf"), tl.minimum(first - total, 0.0), float("-inf"))
