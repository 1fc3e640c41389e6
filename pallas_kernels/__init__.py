"""Kernels of tree speculation behind one front door each; `implementation` picks the form, results agree.

- "reference": token-by-token loops in numpy, slow by design, not traceable; the oracle of the tests.
- "xla": jnp; runs and trains on every device.
- "mosaic": Pallas, for Hopper GPUs. "triton": for NVIDIA GPUs since Ampere, with jax-triton. Some operations have both,
  some one, some none.
- "auto": the fastest form that takes the arguments on this device; the logger "pallas_kernels" says once, at level
  INFO, which one that is and what kept faster ones off.

Layouts. The batch is the first axis, nodes or tokens the second, heads the third. Value head h uses key head
h // (value_heads / key_heads), query head h uses key/value head h // (heads / kv_heads). A recurrent state is
[batch, value_heads, key, value], key axis first. Nodes are in topological order: a parent's index is smaller than its
children's, and node 0 is the root.

Numbers. Trees, taps, paths, lengths and tokens that are none are refused where their numbers are at hand, which is
outside of `jax.jit` and other transformations; such a call waits for these small arrays. Traced ones are not looked at:
indices out of range then give results that mean nothing. Trees may be as deep as they have nodes.

Arithmetic. The gated delta rule is computed in float32 whatever the dtype of the inputs, its matrix products never in
plain tf32; with `precision="default"` a form for GPUs may err by 5e-4 of the result's norm, with "highest" by 5e-6.
Attention multiplies in its inputs' dtype, and accumulates and normalises in float32.

The gated delta rule, per value head, with q and k l2-normalised here and q multiplied by key^-0.5:
S ← e^g S; u = β (v − Sᵀk); S ← S + k uᵀ; o = Sᵀq (Yang et al. 2024, arXiv 2412.06464). Log-decays below −88 count as
−88. On a tree each node continues from its parent's S, the root from the committed one.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.checks import check_ancestors, check_indices, check_path, checked
from pallas_kernels.constants import PATH
from pallas_kernels.containers import GdnChunkResult, GdnTreeResult, Prefix, TreeGrowth, WeaverWeights
from pallas_kernels.dispatch import (
    Implementation,
    Precision,
    call,
    default_implementation,
    implementations,
    runs_here,
)
from pallas_kernels.xla import take_nodes
from pallas_kernels.xla_commit import write_rows

__all__ = [
    "GdnChunkResult",
    "GdnTreeResult",
    "Implementation",
    "Precision",
    "Prefix",
    "TreeGrowth",
    "WeaverWeights",
    "commit_rows",
    "commit_states",
    "default_implementation",
    "gdn_chunk",
    "gdn_tree_verify",
    "implementations",
    "runs_here",
    "take_nodes",
    "top_k",
    "tree_attention",
    "tree_conv",
    "weaver_tree",
    "write_rows",
]


@checked
def gdn_tree_verify(
    query: Float[Array, "batch nodes key_heads key"],
    key: Float[Array, "batch nodes key_heads key"],
    value: Float[Array, "batch nodes value_heads value"],
    log_decay: Float[Array, "batch nodes value_heads"],
    beta: Float[Array, "batch nodes value_heads"],
    ancestors: Bool[Array, "batch nodes nodes"],
    state: Float[Array, "batch value_heads key value"],
    *,
    implementation: Implementation = "auto",
    precision: Precision = "default",
) -> GdnTreeResult:
    """Gated delta rule on every root-to-node path of a tree at once; the state is read, never written.

    Args:
        query: raw queries.
        key: raw keys.
        value: values.
        log_decay: g ≤ 0, natural logarithm of the decay.
        beta: write strengths in [0, 1].
        ancestors: row i is true at i and at its ancestors. A row after the root's that holds only itself, or nothing,
            belongs to an unused node: its outputs are finite and mean nothing, and no other node sees it. Its operands
            must be finite.
        state: committed state, in which the root is not yet.
        implementation: see the module.
        precision: see the module.

    Returns:
        Outputs, updates and path decays, float32; a commit takes the last two.

    Raises:
        ValueError: shapes that do not fit, ancestors that are no tree, or an implementation that is unknown or cannot
            take the arguments.
    """
    _check_heads(query, key, value)
    _check_gates(value, log_decay, beta)
    _check_shape("ancestors", ancestors, (*value.shape[:2], value.shape[1]), "batch, nodes, nodes")
    check_ancestors(ancestors)
    _check_state(state, key, value)
    operands = (query, key, value, log_decay, beta, ancestors, state)
    return call("gdn_tree_verify", implementation, *operands, precision=precision)


@checked
def commit_states(
    states: tuple[Float[Array, "batch value_heads key value"], ...],
    keys: tuple[Float[Array, "batch nodes key_heads key"], ...],
    updates: tuple[Float[Array, "batch nodes value_heads value"], ...],
    path_decays: tuple[Float[Array, "batch nodes value_heads"], ...],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "batch value_heads key value"], ...]:
    """States of all layers after the accepted path: S ← e^{G_leaf} S + Σ_j e^{G_leaf − G_j} k_j u_jᵀ.

    Args:
        states: per layer, the state that verification read; in place where it is donated.
        keys: per layer, the raw keys as given to verification.
        updates: per layer, the updates that verification returned.
        path_decays: per layer, the path decays that it returned.
        path: node indices, root first; entries at and beyond `count` are ignored.
        count: accepted nodes, at most `steps`; a row with 0 gets its states back bit for bit.
        implementation: see the module.

    Raises:
        ValueError: shapes that do not fit, a path that leaves the tree, or an implementation that is unknown or cannot
            take the arguments.
    """
    _check_layers(states=states, keys=keys, updates=updates, path_decays=path_decays)
    if not states:
        return ()
    for state, key, update, path_decay in zip(states, keys, updates, path_decays, strict=True):
        _check_heads(key, key, update)
        _check_state(state, key, update)
        _check_shape("path_decay", path_decay, update.shape[:3], "batch, nodes, value_heads")
    _check_path(path, count, len(states[0]), keys[0].shape[1])
    return call("commit_states", implementation, states, keys, updates, path_decays, path, count)


@checked
def commit_rows(
    windows: tuple[Float[Array, "batch window channels"], ...],
    inputs: tuple[Float[Array, "batch nodes channels"], ...],
    taps: Int[Array, "batch nodes width"],
    caches: tuple[Shaped[Array, "batch kv_heads capacity head"], ...],
    rows: tuple[Shaped[Array, "batch nodes kv_heads head"], ...],
    lengths: Int[Array, " batch"],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Convolution windows and K/V caches of all layers after the accepted path.

    Args:
        windows: per layer with a convolution, the inputs committed last, oldest first; in place where donated.
        inputs: per such layer, the nodes' inputs of the convolution.
        taps: as given to `tree_conv`.
        caches: keys and values of the attention layers, each an entry of its own; in place where donated.
        rows: per cache, the nodes' rows.
        lengths: row of the caches that the root goes to; rows beyond the capacity fall on the last one.
        path: node indices, root first; entries at and beyond `count` are ignored.
        count: accepted nodes, at most `steps`; a row with 0 keeps everything bit for bit.
        implementation: see the module.

    Returns:
        Windows and caches.

    Raises:
        ValueError: shapes that do not fit, taps or a path that leave the tree, or an implementation that is unknown or
            cannot take the arguments.
    """
    _check_layers(windows=windows, inputs=inputs)
    _check_layers(caches=caches, rows=rows)
    batch, nodes = taps.shape[:2]
    for window, channels in zip(windows, inputs, strict=True):
        _check_shape("window", window, (batch, *window.shape[1:2], channels.shape[2]), "batch, window, channels")
        _check_shape("inputs", channels, (batch, nodes, channels.shape[2]), "batch, nodes, channels")
        if window.shape[1] > taps.shape[2]:
            message = f"a window of {window.shape[1]} rows needs as many taps a node, not {taps.shape[2]}"
            raise ValueError(message)
    for cache, new in zip(caches, rows, strict=True):
        _check_shape("cache", cache, (batch, *cache.shape[1:]), "batch, kv_heads, capacity, head")
        _check_capacity("cache", cache)
        _check_shape("rows", new, (batch, nodes, cache.shape[1], cache.shape[3]), "batch, nodes, kv_heads, head")
    _check_shape("lengths", lengths, (batch,), "batch")
    check_indices("lengths", lengths, 0, 1 << 31, "rows of a cache")
    _check_path(path, count, batch, nodes)
    _check_taps(taps)
    if not windows and not caches:
        return (), ()
    return call("commit_rows", implementation, windows, inputs, taps, caches, rows, lengths, path, count)


@checked
def gdn_chunk(
    query: Float[Array, "batch tokens key_heads key"],
    key: Float[Array, "batch tokens key_heads key"],
    value: Float[Array, "batch tokens value_heads value"],
    log_decay: Float[Array, "batch tokens value_heads"],
    beta: Float[Array, "batch tokens value_heads"],
    valid: Bool[Array, "batch tokens"],
    state: Float[Array, "batch value_heads key value"],
    *,
    implementation: Implementation = "auto",
    precision: Precision = "default",
) -> GdnChunkResult:
    """Gated delta rule over a run of text, from a state to a state, differentiable in reverse.

    Args:
        query: raw queries.
        key: raw keys.
        value: values.
        log_decay: g ≤ 0, natural logarithm of the decay.
        beta: write strengths in [0, 1].
        valid: false at padding, which neither decays nor writes and whose outputs mean nothing.
        state: state before the first token.
        implementation: see the module.
        precision: see the module.

    Returns:
        Outputs and the last state, float32.

    Raises:
        ValueError: shapes that do not fit, or an implementation that is unknown or cannot take the arguments.
    """
    _check_heads(query, key, value)
    _check_gates(value, log_decay, beta)
    _check_shape("valid", valid, value.shape[:2], "batch, tokens")
    _check_state(state, key, value)
    operands = (query, key, value, log_decay, beta, valid, state)
    return call("gdn_chunk", implementation, *operands, precision=precision)


@checked
def tree_conv(
    inputs: Float[Array, "batch nodes channels"],
    window: Float[Array, "batch window channels"],
    kernel: Float[Array, "width channels"],
    taps: Int[Array, "batch nodes width"],
    *,
    widths: tuple[int, ...],
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "batch nodes _"], ...]:
    """Depthwise causal convolution along every root-to-node path, then SiLU; sums in float32, inputs' dtype out.

    Args:
        inputs: channels before the convolution.
        window: the width − 1 inputs committed last, oldest first.
        kernel: its last row multiplies the node itself.
        taps: entry j is the node's j-th ancestor (0: itself); a negative c is row width − 1 + c of the window.
        widths: channels of each result, from the first channel on; in a GDN layer those of queries, keys and values.
        implementation: see the module.

    Returns:
        An array for every width.

    Raises:
        ValueError: shapes or widths that do not fit, taps that leave tree and window, or an implementation that is
            unknown or cannot take the arguments.
    """
    batch, nodes, channels = inputs.shape
    width = kernel.shape[0]
    if 0 in (*inputs.shape, width):
        message = f"there is nothing to convolve: inputs has shape {inputs.shape}, kernel {kernel.shape}"
        raise ValueError(message)
    _check_shape("window", window, (batch, width - 1, channels), "batch, width - 1, channels")
    _check_shape("kernel", kernel, (width, channels), "width, channels")
    _check_shape("taps", taps, (batch, nodes, width), "batch, nodes, width")
    _check_taps(taps)
    if sum(widths) != channels or min(widths) < 1:
        message = f"widths are {widths}, expected positive numbers whose sum is {channels}, the channels"
        raise ValueError(message)
    return call("tree_conv", implementation, inputs, window, kernel, taps, widths=tuple(widths))


@checked
def tree_attention(
    query: Float[Array, "batch nodes heads head"],
    key: Float[Array, "batch nodes kv_heads head"],
    value: Float[Array, "batch nodes kv_heads head"],
    mask: Bool[Array, "batch nodes nodes"],
    *,
    prefix: Prefix | None,
    window: int = 0,
    implementation: Implementation = "auto",
) -> Float[Array, "batch nodes heads head"]:
    """Softmax attention, scaled by head^-0.5, of the nodes over a committed prefix and over each other.

    Differentiable in reverse without a prefix, or with one of at most one block.

    Args:
        query: queries after norm and rope.
        key: the nodes' own keys after norm and rope.
        value: the nodes' own values.
        mask: true where node i may see node j; any window is already in it.
        prefix: committed rows, or none. Node i sees row t if t < length and, with a window, position_i − t < window.
        window: sliding window over the prefix in positions, the node itself counted; 0 for none.
        implementation: see the module.

    Returns:
        The attended values in the queries' dtype; 0 for a node that sees nothing.

    Raises:
        ValueError: shapes that do not fit, a negative window, or an unknown implementation.
    """
    batch, nodes, heads, head = query.shape
    kv_heads = key.shape[2]
    if 0 in query.shape or not kv_heads:
        message = f"there is nothing to attend with: query has shape {query.shape}, key {key.shape}"
        raise ValueError(message)
    if heads % kv_heads:
        message = f"{heads} query heads do not divide among {kv_heads} key/value heads"
        raise ValueError(message)
    if window < 0:
        message = f"window is {window}, expected a number of positions, or 0 for no window"
        raise ValueError(message)
    _check_shape("key", key, (batch, nodes, kv_heads, head), "batch, nodes, kv_heads, head")
    _check_shape("value", value, key.shape, "batch, nodes, kv_heads, head")
    _check_shape("mask", mask, (batch, nodes, nodes), "batch, nodes, nodes")
    if prefix is not None:
        rows = (batch, kv_heads, prefix.keys.shape[2], head)
        _check_shape("prefix.keys", prefix.keys, rows, "batch, kv_heads, capacity, head")
        _check_capacity("prefix.keys", prefix.keys)
        _check_shape("prefix.values", prefix.values, rows, "batch, kv_heads, capacity, head")
        _check_shape("prefix.lengths", prefix.lengths, (batch,), "batch")
        _check_shape("prefix.positions", prefix.positions, (batch, nodes), "batch, nodes")
        check_indices("prefix.lengths", prefix.lengths, 0, rows[2] + 1, f"a prefix of {rows[2]} rows")
    return call("tree_attention", implementation, query, key, value, mask, prefix, window=window)


@checked
def top_k(
    logits: Float[Array, "*batch vocab"], k: int, *, implementation: Implementation = "auto"
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """The `k` largest logits of every row in float32, best first, and their int32 ids; the lowest id wins a tie.

    What `lax.top_k` gives for the float32 row: floats are ordered by their bits, so −0 is below 0. NaNs come first in
    the form "xla"; the others put those whose sign bit is set below −inf.

    Args:
        logits: float32 or bfloat16; compared as float32.
        k: 1 to vocab.
        implementation: see the module.

    Raises:
        ValueError: k is out of range, or an implementation that is unknown or cannot take this.
    """
    vocab = logits.shape[-1]
    if not 1 <= k <= vocab:
        message = f"k is {k}, expected 1 to {vocab}, the logits in a row"
        raise ValueError(message)
    values, ids = call("top_k", implementation, logits.reshape(-1, vocab), k=k)
    shape = (*logits.shape[:-1], k)
    return values.reshape(shape), ids.reshape(shape)


@checked
def weaver_tree(
    root: Int[Array, " one"],
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
    implementation: Implementation = "auto",
) -> TreeGrowth:
    """Grows one tree under a Weaver of generation w1 with one layer; nothing is pruned.

    The root is expanded first; then, `groups` − 1 times, the `width` best entries of the frontier become slots and are
    expanded; then as many become slots that are not. Behind each entry of a step a child, the first candidate of its
    depth, is guessed and expanded in the same step, and a child of that one, `ahead` times; with guesses the first step
    is one chain from the root. Step g has the slots from g · width · (1 + ahead) on.

    Args:
        root: last emitted token.
        candidate_ids: possible children of the nodes of each depth; −1 means no candidate.
        candidate_scores: their logits.
        inputs_table: node inputs before positions, a row a token.
        heads_table: rows whose products with a node's output correct the logits, a row a token.
        positions: added to the inputs, a row a depth; a node at the depth limit takes the last.
        prompt_keys: of depth + 1 prompt tokens.
        prompt_values: of the same.
        weights: of the Weaver.
        width: frontier entries per step.
        groups: steps.
        expand: children per node.
        ahead: guesses behind each entry, so that a step has width · (1 + ahead) nodes.
        implementation: see the module.

    Raises:
        ValueError: shapes or sizes that do not fit, or an implementation that is unknown or cannot take the arguments.
    """
    depth, pool = candidate_ids.shape
    vocab, rank = inputs_table.shape
    if not 1 <= expand <= pool:
        message = f"expand is {expand}, expected 1 to {pool}, the candidates of each depth"
        raise ValueError(message)
    if width < 1 or groups < 1 or ahead < 0:
        message = f"width is {width}, groups {groups} and ahead {ahead}, expected at least 1, 1 and 0"
        raise ValueError(message)
    if not 1 <= depth < PATH:
        message = f"there are candidates of {depth} depths, expected 1 to {PATH - 1}"
        raise ValueError(message)
    _check_shape("root", root, (1,), "one")
    check_indices("root", root, 0, vocab, f"a vocabulary of {vocab}")
    check_indices("candidate_ids", candidate_ids, -1, vocab, f"a vocabulary of {vocab}, none being -1")
    _check_shape("candidate_scores", candidate_scores, (depth, pool), "depth, pool")
    _check_shape("heads_table", heads_table, (vocab, rank), "vocab, rank")
    _check_shape("positions", positions, (max(depth, len(positions)), rank), "at least depth, rank")
    heads = prompt_keys.shape[1]
    _check_shape(
        "prompt_keys", prompt_keys, (depth + 1, heads, rank // max(heads, 1)), "depth + 1, heads, rank / heads"
    )
    _check_shape("prompt_values", prompt_values, prompt_keys.shape, "depth + 1, heads, rank / heads")
    mlp = len(weights.fc1)
    shapes = ((3 * rank, rank), (3 * rank,), (rank, rank), (mlp, rank), (mlp,), (rank, mlp), (rank,), (rank,), (rank,))
    for name, x, shape in zip(WeaverWeights._fields, weights, shapes, strict=True):
        _check_shape(f"weights.{name}", x, shape, f"with a rank of {rank} and an MLP of {mlp}")
    operands = (root, candidate_ids, candidate_scores, inputs_table, heads_table, positions, prompt_keys, prompt_values)
    sizes = {"width": width, "groups": groups, "expand": expand, "ahead": ahead}
    return call("weaver_tree", implementation, *operands, weights, **sizes)


def _check_shape(name: str, x: Array, expected: tuple[int, ...], axes: str) -> None:
    if x.shape != expected:
        message = f"{name} has shape {x.shape}, expected {expected} = [{axes}]"
        raise ValueError(message)


def _check_capacity(name: str, cache: Array) -> None:
    if 0 in cache.shape:
        message = f"{name} has shape {cache.shape}, expected room for at least one row"
        raise ValueError(message)


def _check_layers(**groups: tuple[Array, ...]) -> None:
    if len({len(group) for group in groups.values()}) > 1:
        counts = ", ".join(f"{len(group)} {name}" for name, group in groups.items())
        message = f"there are {counts}, expected as many of each, an entry for every layer"
        raise ValueError(message)


def _check_heads(query: Array, key: Array, value: Array) -> None:
    if 0 in query.shape or 0 in value.shape:
        message = f"there is nothing to compute: query has shape {query.shape}, value {value.shape}"
        raise ValueError(message)
    _check_shape("query", query, key.shape, "batch, nodes, key_heads, key")
    _check_shape("value", value, (*key.shape[:2], *value.shape[2:4]), "batch, nodes, value_heads, value")
    if value.shape[2] % key.shape[2]:
        message = f"{value.shape[2]} value heads do not divide among {key.shape[2]} key heads"
        raise ValueError(message)


def _check_gates(value: Array, log_decay: Array, beta: Array) -> None:
    _check_shape("log_decay", log_decay, value.shape[:3], "batch, nodes, value_heads")
    _check_shape("beta", beta, value.shape[:3], "batch, nodes, value_heads")


def _check_path(path: Array, count: Array, batch: int, nodes: int) -> None:
    if 0 in path.shape or not nodes:
        message = f"there is nothing to commit: path has shape {path.shape}, and the tree {nodes} nodes"
        raise ValueError(message)
    _check_shape("path", path, (batch, *path.shape[1:2]), "batch, steps")
    _check_shape("count", count, (batch,), "batch")
    check_path(path, count, nodes)


def _check_taps(taps: Array) -> None:
    _, nodes, width = taps.shape
    check_indices("taps", taps, 1 - width, nodes, f"{nodes} nodes after a window of {width - 1} rows")


def _check_state(state: Array, key: Array, value: Array) -> None:
    expected = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    _check_shape("state", state, expected, "batch, value_heads, key, value")
