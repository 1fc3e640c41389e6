"""The Weaver: a small causal transformer that turns the drafter's marginals into conditionals (arXiv 2607.06763).

Once per round it reads a *prompt*: the target's feature (final-norm output at the last committed token), then the
drafter's outputs at the depth draft slots. A node of the draft tree then attends to the whole prompt, to its ancestors
and to itself, and its output r corrects the drafter's logits of its possible children c:

    logit(c) = drafter logit(c) + ⟨lm_head[c], query_out · r⟩

Generation `w1`, the released one, adds a learned position vector to the input and has a GELU MLP (exact erf);
generation `w2` rotates queries and keys and has a SwiGLU MLP. A node at depth d and the prompt token of draft slot
d + 1 share one position. Sources: `dflash_tfm.py` of trymirai/sglang, `weaver.py` of trymirai/lalamo.

Arithmetic follows `tfm_jax.layers`; attention weights, logits and norms are float32 inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import WeaverWeights, runs_here, weaver_tree
from pallas_kernels.constants import PATH
from pallas_kernels.xla_growth import NewNodes, NodeStep
from tfm_jax.config import WeaverConfig
from tfm_jax.errors import TfmError
from tfm_jax.growth import (
    ChooseSteps,
    Grown,
    best_first_tree,
    check_growth,
    default_width,
    expanded_slots,
    grow_as_worth,
    grown_tree,
)
from tfm_jax.layers import BiasedRMSNorm, Linear, SwiGLU, dot, precision, rope_frequencies, rotary
from tfm_jax.tree import DraftTree

NORM_EPS = 1e-6
POSITION_SCALE = 0.02


class WeaverPrompt(NamedTuple):
    """Keys (rotated in generation 2) and values of the prompt tokens, feature first: prompt = depth + 1."""

    keys: Float[Array, "layers batch prompt heads head"]
    values: Float[Array, "layers batch prompt heads head"]


class NodeCache(NamedTuple):
    """Keys and values of tree nodes; unwritten slots are masked by every reader."""

    keys: Float[Array, "batch nodes layers heads head"]
    values: Float[Array, "batch nodes layers heads head"]


class NodeOutput(NamedTuple):
    """Output after the last norm, and the nodes' own keys and values for their descendants."""

    r: Float[Array, "batch width rank"]
    keys: Float[Array, "batch width layers heads head"]
    values: Float[Array, "batch width layers heads head"]


class WeaverTables(NamedTuple):
    """Precomputed per token of the vocabulary; compute them again whenever weights change."""

    inputs: Float[Array, "vocab rank"]  # token_in(embed_norm(embedding))
    heads: Float[Array, "vocab rank"]  # lm_head · query_out
    weights: WeaverWeights | None = None  # for the kernel that grows a tree, where there is one


class _KeyValue(NamedTuple):
    keys: Float[Array, "batch tokens heads head"]
    values: Float[Array, "batch tokens heads head"]


class WeaverBlock(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: WeaverConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        rank, mlp = config.rank, config.mlp_size
        self.norm_attn = BiasedRMSNorm(rank, eps=NORM_EPS, dtype=dtype)
        self.qkv = Linear(rank, 3 * rank, dtype=dtype, rngs=rngs)
        self.out = Linear(rank, rank, dtype=dtype, rngs=rngs)
        self.norm_mlp = BiasedRMSNorm(rank, eps=NORM_EPS, dtype=dtype)
        if config.generation == "w1":
            self.fc1 = Linear(rank, mlp, bias=True, dtype=dtype, rngs=rngs)
            self.fc2 = Linear(mlp, rank, bias=True, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SwiGLU(rank, mlp, bias=True, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "batch tokens rank"],
        positions: Int[Array, "batch tokens"],
        context: _KeyValue | None,
        mask: Bool[Array, "#batch tokens keys"],
    ) -> tuple[Float[Array, "batch tokens rank"], _KeyValue]:
        """One block over new tokens; `mask` covers the context's keys, then the new tokens' own."""
        config = self.config
        heads = (*x.shape[:2], config.heads, config.head_dim)
        query, key, value = (part.reshape(heads) for part in jnp.split(self.qkv(self.norm_attn(x)), 3, axis=-1))
        if config.generation == "w2":
            query, key = self._rotate(query, positions), self._rotate(key, positions)
        keys = key if context is None else jnp.concatenate([context.keys, key], axis=1)
        values = value if context is None else jnp.concatenate([context.values, value], axis=1)
        x = x + self.out(_attend(query, keys, values, mask).reshape(x.shape))
        hidden = self.norm_mlp(x)
        if config.generation == "w1":
            return x + self.fc2(jax.nn.gelu(self.fc1(hidden), approximate=False)), _KeyValue(key, value)
        return x + self.mlp(hidden), _KeyValue(key, value)

    def _rotate(
        self, x: Float[Array, "batch tokens heads head"], positions: Int[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens heads head"]:
        frequencies = rope_frequencies(self.config.rope_base, self.config.head_dim)
        return rotary(x.astype(jnp.float32), positions, frequencies).astype(x.dtype)


class Weaver(nnx.Module):
    """Parameters and maths of both generations.

    `query_out` starts at zero, so that an untrained Weaver returns the drafter's marginals.
    """

    def __init__(self, config: WeaverConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        rank = config.rank
        self.output_norm = BiasedRMSNorm(config.hidden_size, eps=NORM_EPS, dtype=dtype)
        self.embed_norm = BiasedRMSNorm(config.embed_size, eps=NORM_EPS, dtype=dtype)
        self.out_norm = BiasedRMSNorm(rank, eps=NORM_EPS, dtype=dtype)
        self.proposal_in = Linear(config.hidden_size, rank, bias=True, dtype=dtype, rngs=rngs)
        self.token_in = Linear(config.embed_size, rank, bias=True, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(WeaverBlock(config, dtype=dtype, rngs=rngs) for _ in range(config.layers))
        self.query_out = Linear(rank, config.hidden_size, dtype=dtype, rngs=rngs)
        self.query_out.kernel = nnx.Param(jnp.zeros((rank, config.hidden_size), dtype))
        if config.generation == "w1":
            noise = jax.random.normal(rngs.params(), (config.max_depth, rank), jnp.float32)
            self.pos_emb = nnx.Param((noise * POSITION_SCALE).astype(dtype))
        self.config = config

    def prompt(
        self, feature: Float[Array, "batch hidden"], draft_hidden: Float[Array, "batch depth hidden"]
    ) -> WeaverPrompt:
        """Keys and values that every node of this round's tree attends to.

        Args:
            feature: the target's final-norm output at the last committed token (not at the root).
            draft_hidden: the drafter's final-norm outputs at block slots 1 .. depth, without slot 0, the root's own.

        Raises:
            TfmError: the block is deeper than the Weaver's positions.
        """
        batch, depth, _ = draft_hidden.shape
        if depth > self.config.max_depth:
            message = f"The Weaver predicts {self.config.max_depth} depths, not {depth}; use a smaller draft block."
            raise TfmError(message)
        x = self.proposal_in(self.output_norm(jnp.concatenate([feature[:, None], draft_hidden], axis=1)))
        if self.config.generation == "w1":
            x = x.at[:, 1:].add(self.pos_emb[...][:depth])
        positions = jnp.broadcast_to(jnp.arange(depth + 1), (batch, depth + 1))
        causal = jnp.tril(jnp.ones((1, depth + 1, depth + 1), bool))
        rows = []
        for block in self.blocks:  # the last block's output is not used, so the compiler keeps only its keys and values
            x, row = block(x, positions, None, causal)
            rows.append(row)
        return WeaverPrompt(jnp.stack([row.keys for row in rows]), jnp.stack([row.values for row in rows]))

    def step(
        self,
        inputs: Float[Array, "batch width rank"],
        depths: Int[Array, "batch width"],
        prompt: WeaverPrompt,
        cache: NodeCache,
        ancestors: Bool[Array, "batch width nodes"],
        among: Bool[Array, "batch width width"] | None = None,
    ) -> NodeOutput:
        """Evaluates tree nodes whose ancestors are in the cache or among themselves.

        Args:
            inputs: rows of `token_table` at the nodes' tokens.
            depths: depth of each node; deeper than the last candidate row counts as that.
            prompt: this round's prompt.
            cache: keys and values of earlier nodes.
            ancestors: strict ancestors of each node among the cache's slots.
            among: strict ancestors of each node among the nodes themselves, if there are any.
        """
        batch, width, _ = inputs.shape
        prompt_length = prompt.keys.shape[2]
        own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
        own = own if among is None else own | among
        mask = jnp.concatenate([jnp.ones((batch, width, prompt_length), bool), ancestors, own], axis=-1)

        def context(layer: int) -> _KeyValue:
            return _KeyValue(
                jnp.concatenate([prompt.keys[layer], cache.keys[:, :, layer]], axis=1),
                jnp.concatenate([prompt.values[layer], cache.values[:, :, layer]], axis=1),
            )

        x, rows = self._nodes(inputs, jnp.minimum(depths, prompt_length - 2), context, mask)
        keys, values = (jnp.stack(part, axis=2) for part in zip(*rows, strict=True))
        return NodeOutput(x, keys, values)

    def chain(
        self,
        feature: Float[Array, "batch hidden"],
        draft_hidden: Float[Array, "batch depth hidden"],
        embeddings: Float[Array, "batch depth embed"],
    ) -> Float[Array, "batch depth rank"]:
        """Outputs r of a teacher-forced chain of nodes in one dense pass: the training form of `step`.

        Args:
            feature: as in `prompt`.
            draft_hidden: as in `prompt`.
            embeddings: the target's embedding rows of the nodes' tokens; the node at depth 0 is the root.
        """
        batch, depth, _ = embeddings.shape
        prompt = self.prompt(feature, draft_hidden)
        chain = jnp.tril(jnp.ones((depth, depth), bool))
        mask = jnp.concatenate([jnp.ones((depth, prompt.keys.shape[2]), bool), chain], axis=-1)
        depths = jnp.broadcast_to(jnp.arange(depth), (batch, depth))

        def context(layer: int) -> _KeyValue:
            return _KeyValue(prompt.keys[layer], prompt.values[layer])

        return self._nodes(self.token_table(embeddings), depths, context, mask[None])[0]

    def query(self, r: Float[Array, "*nodes rank"]) -> Float[Array, "*nodes hidden"]:
        """Vector to multiply with the raw rows of the output head: the training order of `residual`."""
        return self.query_out(r)

    def token_table(self, embedding: Float[Array, "*vocab embed"]) -> Float[Array, "*vocab rank"]:
        """Node inputs, before positions, of rows of the target's embedding."""
        return self.token_in(self.embed_norm(embedding))

    def head_table(self, lm_head_rows: Float[Array, "vocab hidden"]) -> Float[Array, "vocab rank"]:
        """Rows of the target's output head seen through `query_out`, so that a residual is a dot product with r."""
        return dot(lm_head_rows, self.query_out.kernel[...].T)

    def tables(
        self, embedding: Float[Array, "vocab embed"], lm_head_rows: Float[Array, "vocab hidden"]
    ) -> WeaverTables:
        """Both serving tables; cast the target's weights to the Weaver's dtype first."""
        weights = self.kernel_weights() if runs_here("weaver_tree", "triton") else None
        return WeaverTables(self.token_table(embedding), self.head_table(lm_head_rows), weights)

    def build_tree(
        self,
        root: Int[Array, " batch"],
        feature: Float[Array, "batch hidden"],
        draft_hidden: Float[Array, "batch depth hidden"],
        candidate_ids: Int[Array, "batch depth pool"],
        candidate_scores: Float[Array, "batch depth pool"],
        tables: WeaverTables,
        *,
        budget: int,
        width: int | None = None,
        expand: int | None = None,
        steps: int | None = None,
        spine: bool = False,
        ahead: int = 0,
    ) -> DraftTree:
        """Best-first tree under the Weaver's conditionals.

        Args:
            root: last emitted token.
            feature: as in `prompt`.
            draft_hidden: as in `prompt`.
            candidate_ids: the drafter's best tokens per depth; −1 means no candidate.
            candidate_scores: their raw logits.
            tables: of the current weights.
            budget: draft nodes, the root not counted.
            width: see `best_first_tree`.
            expand: see `best_first_tree`.
            steps: see `best_first_tree`.
            spine: see `best_first_tree`.
            ahead: see `best_first_tree`.

        Raises:
            TfmError: a size is out of range.
        """
        depth, pool = candidate_ids.shape[1:]
        width = default_width(budget) if width is None else width
        expand = min(8, pool) if expand is None else expand
        check_growth(
            budget=budget, depth=depth, pool=pool, width=width, expand=expand, steps=steps, spine=spine, ahead=ahead
        )
        prompt = self.prompt(feature, draft_hidden)
        groups = -(-budget // width) if steps is None else steps
        if tables.weights is not None and len(root) == 1 and not spine and depth < PATH:
            sizes = {"width": width, "groups": groups, "expand": expand, "ahead": ahead}
            growth = weaver_tree(*self._operands(root, prompt, candidate_ids, candidate_scores, tables), **sizes)
            return grown_tree(growth, budget=budget, max_depth=depth, pruned=steps is not None)
        slots = expanded_slots(budget, width, steps, ahead)
        step, cache = self._expansion(prompt, candidate_ids, candidate_scores, tables, slots, guesses=ahead > 0)
        return best_first_tree(
            root, candidate_ids, step, cache,
            budget=budget, width=width, expand=expand, steps=steps, spine=spine, ahead=ahead,
        )  # fmt: skip

    def grow_tree(
        self,
        root: Int[Array, " batch"],
        feature: Float[Array, "batch hidden"],
        draft_hidden: Float[Array, "batch depth hidden"],
        candidate_ids: Int[Array, "batch depth pool"],
        candidate_scores: Float[Array, "batch depth pool"],
        tables: WeaverTables,
        choose: ChooseSteps,
        *,
        budget: int,
        width: int,
        steps: int,
        ahead: int,
    ) -> Grown:
        """The pruned tree of `build_tree`, grown only as far as `choose` says: see `grow_as_worth`.

        A kernel makes all steps at once: where there is one, they are all made.

        Raises:
            TfmError: a size is out of range.
        """
        depth, pool = candidate_ids.shape[1:]
        prompt = self.prompt(feature, draft_hidden)
        if tables.weights is not None and len(root) == 1:
            sizes = {"width": width, "groups": steps, "expand": min(8, pool), "ahead": ahead}
            operands = self._operands(root, prompt, candidate_ids, candidate_scores, tables)
            growth = None
            with contextlib.suppress(ValueError):  # the kernel cannot take these sizes, or not on this device
                growth = weaver_tree(*operands, **sizes, implementation="triton")
            if growth is not None:
                tree = grown_tree(growth, budget=budget, max_depth=depth, pruned=True)
                return Grown(tree, jnp.int32(steps), jnp.full((1, width), -jnp.inf))
        slots = expanded_slots(budget, width, steps, ahead)
        step, cache = self._expansion(prompt, candidate_ids, candidate_scores, tables, slots, guesses=ahead > 0)
        marginals = jnp.where(candidate_ids >= 0, candidate_scores.astype(jnp.float32), -jnp.inf)
        return grow_as_worth(
            root, candidate_ids, step, cache, choose, budget=budget, width=width, steps=steps, ahead=ahead,
            guess_scores=jax.nn.log_softmax(marginals)[..., 0],
        )  # fmt: skip

    def _operands(
        self, root: Array, prompt: WeaverPrompt, candidate_ids: Array, candidate_scores: Array, tables: WeaverTables
    ) -> tuple:
        """What the operation that grows the tree of one row takes."""
        return (
            root, candidate_ids[0], candidate_scores[0], tables.inputs, tables.heads, self.pos_emb[...],
            prompt.keys[0, 0], prompt.values[0, 0], tables.weights,
        )  # fmt: skip

    def _expansion(
        self,
        prompt: WeaverPrompt,
        candidate_ids: Array,
        candidate_scores: Array,
        tables: WeaverTables,
        slots: int,
        *,
        guesses: bool,
    ) -> tuple[NodeStep[NodeCache], NodeCache]:
        """The step that expands nodes of this round's tree, and the empty cache that it starts from."""
        config = self.config
        head_rows = tables.heads[jnp.maximum(candidate_ids, 0)]
        scores = candidate_scores.astype(jnp.float32)

        def step(cache: NodeCache, nodes: NewNodes) -> tuple[NodeCache, Array]:
            ancestors, among = nodes.ancestors, None
            if guesses:
                rows = nodes.tokens.shape[1]
                among = jax.lax.dynamic_slice_in_dim(ancestors, nodes.first_slot, rows, axis=2)
                ancestors &= jnp.arange(slots) < nodes.first_slot
            output = self.step(tables.inputs[nodes.tokens], nodes.depths, prompt, cache, ancestors, among)
            logits = _take_depth(scores, nodes.depths) + residual(output.r, _take_depth(head_rows, nodes.depths))
            start = (0, nodes.first_slot, 0, 0, 0)
            cache = NodeCache(
                jax.lax.dynamic_update_slice(cache.keys, output.keys, start),
                jax.lax.dynamic_update_slice(cache.values, output.values, start),
            )
            return cache, logits

        batch = candidate_ids.shape[0]
        empty = jnp.zeros((batch, slots, config.layers, config.heads, config.head_dim), prompt.keys.dtype)
        return step, NodeCache(empty, empty)

    def kernel_weights(self) -> WeaverWeights | None:
        """Parameters as the kernel that grows a tree takes them, or None if it cannot run this Weaver."""
        if self.config.generation != "w1" or self.config.layers != 1:
            return None
        block = self.blocks[0]
        qkv, out, fc1, fc2 = (layer.kernel[...].T for layer in (block.qkv, block.out, block.fc1, block.fc2))
        fc1_bias, fc2_bias = (layer.bias[...] for layer in (block.fc1, block.fc2) if layer.bias is not None)
        qkv, qkv_bias = _fold(block.norm_attn, qkv)
        fc1, more = _fold(block.norm_mlp, fc1)
        last = self.out_norm.scale[...], self.out_norm.bias[...]
        return WeaverWeights(qkv, qkv_bias, out, fc1, fc1_bias + more, fc2, fc2_bias, *last)

    def _nodes(
        self, inputs: Array, depths: Array, context: Callable[[int], _KeyValue], mask: Array
    ) -> tuple[Array, list[_KeyValue]]:
        x = inputs + self.pos_emb[...][depths] if self.config.generation == "w1" else inputs
        rows = []
        for layer, block in enumerate(self.blocks):
            x, row = block(x, depths + 1, context(layer), mask)
            rows.append(row)
        return self.out_norm(x), rows


def _fold(norm: BiasedRMSNorm, matrix: Float[Array, "out rank"]) -> tuple[Array, Array]:
    """The matrix behind a norm with its scale in it, and the norm's bias seen through it, in float32."""
    wide = matrix.astype(jnp.float32)
    scale, bias = norm.scale[...].astype(jnp.float32), norm.bias[...].astype(jnp.float32)
    return (wide * scale).astype(matrix.dtype), jnp.matmul(wide, bias, precision=jax.lax.Precision.HIGHEST)


def residual(
    r: Float[Array, "batch width rank"], head_rows: Float[Array, "batch width pool rank"]
) -> Float[Array, "batch width pool"]:
    """What the Weaver adds to the drafter's logits, float32, from rows of `head_table`."""
    return jnp.einsum("bwr,bwpr->bwp", r, head_rows, precision=precision(r.dtype), preferred_element_type=jnp.float32)


def _take_depth(rows: Float[Array, "batch depth *rest"], depths: Int[Array, "batch width"]) -> Array:
    return jax.vmap(lambda row, depth: row[depth])(rows, depths)


def _attend(
    query: Float[Array, "batch tokens heads head"],
    keys: Float[Array, "batch keys heads head"],
    values: Float[Array, "batch keys heads head"],
    mask: Bool[Array, "#batch tokens keys"],
) -> Float[Array, "batch tokens heads head"]:
    """Softmax attention with float32 weights; every token sees at least itself."""
    scores = jnp.einsum(
        "bthd,bkhd->bhtk", query, keys, precision=precision(query.dtype), preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores * query.shape[-1] ** -0.5, -jnp.inf), axis=-1)
    return jnp.einsum("bhtk,bkhd->bthd", weights.astype(values.dtype), values, precision=precision(values.dtype))
