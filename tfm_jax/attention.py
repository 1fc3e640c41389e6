"""Softmax attention of the target: grouped queries, per-head norms, partial rope, and the output gate of Qwen3.5."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Prefix, tree_attention
from tfm_jax.config import TargetConfig
from tfm_jax.layers import Linear, RMSNorm, UnitOffsetRMSNorm, rope_frequencies, rotary
from tfm_jax.state import KVRows


class Attention(nnx.Module):
    """`qkv` holds, side by side, all queries, all gates (hybrid family only), all keys and all values."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        widths = (queries, queries, keys, keys) if config.hybrid else (queries, keys, keys)
        norm = UnitOffsetRMSNorm if config.hybrid else RMSNorm
        self.qkv = Linear(config.hidden_size, sum(widths), dtype=dtype, rngs=rngs)
        self.q_norm = norm(config.head_dim, eps=config.norm_eps, dtype=dtype)
        self.k_norm = norm(config.head_dim, eps=config.norm_eps, dtype=dtype)
        self.out = Linear(queries, config.hidden_size, dtype=dtype, rngs=rngs)
        self.widths = widths
        self.config = config

    def __call__(
        self,
        x: Float[Array, "batch nodes hidden"],
        positions: Int[Array, "batch nodes"],
        mask: Bool[Array, "batch nodes nodes"],
        prefix: Prefix | None,
    ) -> tuple[Float[Array, "batch nodes hidden"], KVRows]:
        """Every node attends to the whole prefix and, within the block, where `mask` is true.

        Returns:
            The layer's output and the nodes' own keys and values; the prefix is only read.
        """
        config = self.config
        splits = [sum(self.widths[:i]) for i in range(1, len(self.widths))]
        *query_and_gate, key, value = jnp.split(self.qkv(x), splits, axis=-1)
        query = query_and_gate[0].reshape(*x.shape[:2], config.heads, config.head_dim)
        key = key.reshape(*x.shape[:2], config.kv_heads, config.head_dim)
        value = value.reshape(key.shape)
        frequencies = rope_frequencies(config.rope_theta, config.rotary_dim)
        query = rotary(self.q_norm(query), positions, frequencies)
        key = rotary(self.k_norm(key), positions, frequencies)
        mixed = tree_attention(query, key, value, mask, prefix=prefix).reshape(query_and_gate[0].shape)
        if config.hybrid:
            mixed = mixed * nnx.sigmoid(query_and_gate[1])
        return self.out(mixed), KVRows(key, value)
