"""DFlash: a block-diffusion drafter that reads the target's hidden states.

One pass over the block [last token, mask, … mask] gives, for every following position, the marginal law of its token.
Context enters as keys and values only: features of the committed tokens, one projection of the target's tapped layers,
serve every draft layer unchanged. Slot j of a block whose first token stands at position L has position L + j, and its
output predicts the token at that position.

Formulas: z-lab `dflash` 0.1.0 (`dflash/model.py`); norms are plain RMS norms, rope turns the whole head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Prefix, tree_attention
from tfm_jax.config import DrafterConfig
from tfm_jax.layers import Linear, RMSNorm, SwiGLU, precision, rope_frequencies, rotary
from tfm_jax.state import KVCache, KVRows


class DraftLayer(nnx.Module):
    """Qwen3 layer whose attention also sees the context's keys and values (no input norm on those)."""

    def __init__(self, config: DrafterConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.input_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.q = Linear(config.hidden_size, queries, dtype=dtype, rngs=rngs)
        self.kv = Linear(config.hidden_size, 2 * keys, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype)
        self.out = Linear(queries, config.hidden_size, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.config = config
        self.causal = config.layer_causal[index]
        self.window = config.layer_windows[index]

    def queries(self, x: Float[Array, "batch tokens hidden"], positions: Int[Array, "batch tokens"]) -> Array:
        """Normed, rotated queries [batch, tokens, heads, head]."""
        query = self.q(x).reshape(*x.shape[:2], self.config.heads, self.config.head_dim)
        return _rotate(self.q_norm(query), positions, self.config)

    def rows(self, x: Float[Array, "batch tokens hidden"], positions: Int[Array, "batch tokens"]) -> KVRows:
        """Normed, rotated keys, and values, of context features or of normed block activations."""
        key, value = jnp.split(self.kv(x), 2, axis=-1)
        key = key.reshape(*x.shape[:2], self.config.kv_heads, self.config.head_dim)
        return KVRows(_rotate(self.k_norm(key), positions, self.config), value.reshape(key.shape))

    def block_mask(self) -> Bool[Array, "block block"]:
        """Which slots of its own block a slot sees."""
        slot = jnp.arange(self.config.block_size)
        distance = slot[:, None] - slot
        mask = distance >= 0 if self.causal else jnp.ones_like(distance, bool)
        return mask & (jnp.abs(distance) < self.window) if self.window else mask

    def finish(
        self, x: Float[Array, "*batch hidden"], mixed: Float[Array, "*batch queries"]
    ) -> Float[Array, "*batch hidden"]:
        """Residual of the attention, then of the MLP."""
        x = x + self.out(mixed)
        return x + self.mlp(self.post_norm(x))


class Drafter(nnx.Module):
    """Parameters and maths of the drafter; embedding and output head are the target's."""

    def __init__(self, config: DrafterConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        features = len(config.target_layers) * config.hidden_size
        self.fc = Linear(features, config.hidden_size, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.layers = nnx.List(DraftLayer(config, index, dtype=dtype, rngs=rngs) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.config = config

    def context_rows(
        self, taps: Float[Array, "batch tokens features"], positions: Int[Array, "batch tokens"]
    ) -> tuple[KVRows, ...]:
        """Keys and values of committed tokens, one pair a layer, from the target's tapped layers."""
        context = self.hidden_norm(self.fc(taps))
        return tuple(layer.rows(context, positions) for layer in self.layers)

    def draft(
        self,
        embeddings: Float[Array, "batch block hidden"],
        lengths: Int[Array, " batch"],
        caches: tuple[KVCache, ...],
    ) -> Float[Array, "batch block hidden"]:
        """One block at positions lengths .. lengths + block − 1; the caches are only read.

        Args:
            embeddings: target embeddings of [last token, mask, … mask].
            lengths: committed tokens, which is also the number of valid rows of every cache.
            caches: context keys and values, one cache a layer.

        Returns:
            Final-norm outputs; slot j ≥ 1 through the target's head gives the marginal of position lengths + j.
        """
        x = embeddings
        positions = lengths[:, None] + jnp.arange(self.config.block_size, dtype=jnp.int32)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.input_norm(x)
            rows = layer.rows(hidden, positions)
            mask = jnp.broadcast_to(layer.block_mask(), (x.shape[0], *layer.block_mask().shape))
            mixed = tree_attention(
                layer.queries(hidden, positions),
                rows.keys,
                rows.values,
                mask,
                prefix=Prefix(cache.keys, cache.values, lengths, positions),
                window=layer.window,
            )
            x = layer.finish(x, mixed.reshape(*x.shape[:2], -1))
        return self.norm(x)

    def blocks(
        self,
        embeddings: Float[Array, "batch anchors block hidden"],
        anchors: Int[Array, "batch anchors"],
        taps: Float[Array, "batch tokens features"],
    ) -> Float[Array, "batch anchors block hidden"]:
        """Many blocks of one sequence at once, for training: the block at anchor a sees the context t < a and itself.

        Args:
            embeddings: target embeddings of [token at the anchor, mask, … mask].
            anchors: positions of the blocks' first tokens.
            taps: the target's tapped layers for the whole sequence.
        """
        batch, count, block, hidden = embeddings.shape
        positions = (anchors[..., None] + jnp.arange(block, dtype=jnp.int32)).reshape(batch, count * block)
        time = jnp.broadcast_to(jnp.arange(taps.shape[1], dtype=jnp.int32), taps.shape[:2])
        before = time[:, None, :] < jnp.repeat(anchors, block, axis=1)[..., None]
        x = embeddings.reshape(batch, count * block, hidden)
        for layer, context in zip(self.layers, self.context_rows(taps, time), strict=True):
            normed = layer.input_norm(x)
            visible = before & (positions[..., None] - time[:, None, :] < layer.window) if layer.window else before
            mixed = _blocks_attention(
                layer.queries(normed, positions), layer.rows(normed, positions), layer.block_mask(), context, visible
            )
            x = layer.finish(x, mixed)
        return self.norm(x).reshape(embeddings.shape)


def _blocks_attention(
    query: Float[Array, "batch queries heads head"],
    own: KVRows,
    own_mask: Bool[Array, "block block"],
    context: KVRows,
    context_mask: Bool[Array, "batch queries tokens"],
) -> Float[Array, "batch queries channels"]:
    """One softmax over the visible context and the query's own block."""
    batch, queries, heads, head = query.shape
    kv_heads, block = own.keys.shape[2], own_mask.shape[0]
    # b batch, a anchor, i / j slots, h kv head, r query head of its group, t context token, d head
    grouped = query.reshape(batch, queries // block, block, kv_heads, heads // kv_heads, head)
    keys, values = (x.reshape(batch, queries // block, block, kv_heads, head) for x in own)
    mask = context_mask.reshape(batch, queries // block, 1, 1, block, -1)
    high = precision(query.dtype)

    def scores(pattern: str, key: Array) -> Array:
        product = jnp.einsum(pattern, grouped, key, precision=high, preferred_element_type=jnp.float32)
        return product * head**-0.5

    outer = jnp.where(mask, scores("baihrd,bthd->bahrit", context.keys), -jnp.inf)
    inner = jnp.where(own_mask, scores("baihrd,bajhd->bahrij", keys), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([outer, inner], axis=-1), axis=-1).astype(query.dtype)
    outer, inner = weights[..., : outer.shape[-1]], weights[..., outer.shape[-1] :]
    mixed = jnp.einsum("bahrit,bthd->baihrd", outer, context.values, precision=high)
    mixed = mixed + jnp.einsum("bahrij,bajhd->baihrd", inner, values, precision=high)
    return mixed.reshape(batch, queries, heads * head)


def _rotate(
    x: Float[Array, "batch tokens heads head"], positions: Int[Array, "batch tokens"], config: DrafterConfig
) -> Float[Array, "batch tokens heads head"]:
    frequencies = rope_frequencies(config.rope_theta, config.head_dim)
    if not config.yarn_factor:
        return rotary(x, positions, frequencies)
    return rotary(x, positions, _yarn(frequencies, config), config.yarn_attention_factor)


def _yarn(frequencies: Float[Array, " half"], config: DrafterConfig) -> Float[Array, " half"]:
    """YaRN (arXiv 2309.00071, §3.2): slow dimensions are interpolated, fast ones kept, a ramp in between."""

    def dimension(rotations: float) -> float:
        span = config.yarn_original_positions / (rotations * 2 * math.pi)
        return config.head_dim * math.log(span) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(config.yarn_beta_fast)), 0)
    high = min(math.ceil(dimension(config.yarn_beta_slow)), config.head_dim - 1)
    ramp = jnp.clip((jnp.arange(frequencies.shape[0]) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return frequencies / config.yarn_factor * ramp + frequencies * (1.0 - ramp)


def empty_caches(config: DrafterConfig, batch: int, capacity: int, dtype: DTypeLike) -> tuple[KVCache, ...]:
    """Context caches before the first token."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)
    return tuple(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.layers))
