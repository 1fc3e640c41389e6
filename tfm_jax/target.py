"""The target: a hybrid (Qwen3-Next, Qwen3.5 / 3.6: three Gated DeltaNet layers to one of attention) or Qwen3.

Three passes over one stack of layers:

- `sequence`: whole sequences without caches, for training;
- `prefill`: a right-padded piece of every prompt, returns the advanced state;
- `verify`: all nodes of a tree, reads the state and returns what commit needs. One token is a tree of one node.

Layout: hidden [batch, tokens, hidden]; caches in `tfm_jax.state`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Prefix
from tfm_jax.attention import Attention
from tfm_jax.config import TargetConfig
from tfm_jax.deltanet import DeltaNet
from tfm_jax.layers import Linear, RMSNorm, SwiGLU, UnitOffsetRMSNorm, fan_in_normal, precision
from tfm_jax.moe import MixtureOfExperts
from tfm_jax.state import DeltaState, DeltaTape, KVCache, KVRows, TargetState, write_rows


class TargetOutput(NamedTuple):
    """Final-norm output and, side by side, the residual stream after each tapped layer."""

    hidden: Float[Array, "batch tokens hidden"]
    taps: Float[Array, "batch tokens features"]


class VerifyOutput(NamedTuple):
    """`TargetOutput` of all nodes, and per layer what commit writes if a node is accepted."""

    hidden: Float[Array, "batch nodes hidden"]
    taps: Float[Array, "batch nodes features"]
    values: tuple[KVRows | DeltaTape, ...]


class PrefillOutput(NamedTuple):
    """`TargetOutput` of a piece of the prompt, and the state after it."""

    hidden: Float[Array, "batch tokens hidden"]
    taps: Float[Array, "batch tokens features"]
    state: TargetState


class Embedding(nnx.Module):
    """Token embedding table, unscaled."""

    def __init__(self, vocab: int, channels: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(fan_in_normal(rngs, (vocab, channels), channels, dtype))


class DecoderLayer(nnx.Module):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: TargetConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        norm = UnitOffsetRMSNorm if config.hybrid else RMSNorm
        mixer = DeltaNet if config.layer_types[index] == "linear_attention" else Attention
        self.input_norm = norm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mixer = mixer(config, dtype=dtype, rngs=rngs)
        self.post_norm = norm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        if config.experts:
            self.mlp = MixtureOfExperts(config, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)


class Target(nnx.Module):
    """Parameters and maths of the target model."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        norm = UnitOffsetRMSNorm if config.hybrid else RMSNorm
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            DecoderLayer(config, index, dtype=dtype, rngs=rngs) for index in range(len(config.layer_types))
        )
        self.norm = norm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        if not config.tied_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        self.config = config

    def embed(self, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape hidden"]:
        """Rows of the embedding table."""
        return self.embed_tokens.embedding[...][tokens]

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """Next-token logits in float32 from final-norm outputs."""
        return jnp.einsum(
            "...h,vh->...v" if self.config.tied_embeddings else "...h,hv->...v",
            hidden,
            self.embed_tokens.embedding[...] if self.config.tied_embeddings else self.lm_head.kernel[...],
            precision=precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )

    def head_rows(self) -> Float[Array, "vocab hidden"]:
        """The output head, one row a token."""
        return self.embed_tokens.embedding[...] if self.config.tied_embeddings else self.lm_head.kernel[...].T

    def sequence(
        self,
        tokens: Int[Array, "batch tokens"],
        valid: Bool[Array, "batch tokens"],
        *,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Whole right-padded sequences from their first token, without caches."""
        positions, mask = _sequence_mask(valid, 0)
        empty = empty_delta_state(self.config, tokens.shape[0], self.embed_tokens.embedding[...].dtype)

        def mix(_: int, mixer: Attention | DeltaNet, x: Array) -> tuple[Array, None]:
            if isinstance(mixer, DeltaNet):
                return mixer.sequence(x, valid, empty)[0], None
            return mixer(x, positions, mask, None)[0], None

        hidden, taps, _ = self._stack(tokens, tap_layers, mix)
        return TargetOutput(hidden, taps)

    def prefill(
        self,
        tokens: Int[Array, "batch tokens"],
        valid: Bool[Array, "batch tokens"],
        state: TargetState,
        *,
        tap_layers: tuple[int, ...] = (),
    ) -> PrefillOutput:
        """The next piece of every prompt.

        Args:
            tokens: token ids; rows are right-padded.
            valid: true for real tokens, a prefix of every row.
            state: state after the pieces before; rows may have different lengths.
            tap_layers: layers whose outputs the drafter reads.
        """
        positions, mask = _sequence_mask(valid, state.lengths)
        count = jnp.sum(valid, axis=1, dtype=jnp.int32)

        def mix(index: int, mixer: Attention | DeltaNet, x: Array) -> tuple[Array, KVCache | DeltaState]:
            cache: Any = state.layers[index]  # of the mixer's kind
            if isinstance(mixer, DeltaNet):
                return mixer.sequence(x, valid, cache)
            mixed, rows = mixer(x, positions, mask, Prefix(cache.keys, cache.values, state.lengths, positions))
            return mixed, write_rows(cache, rows, state.lengths, count)

        hidden, taps, layers = self._stack(tokens, tap_layers, mix)
        return PrefillOutput(hidden, taps, TargetState(state.lengths + count, layers))

    def verify(
        self,
        tokens: Int[Array, "batch nodes"],
        positions: Int[Array, "batch nodes"],
        ancestors: Bool[Array, "batch nodes nodes"],
        taps: Int[Array, "batch nodes width"],
        state: TargetState,
        *,
        tap_layers: tuple[int, ...] = (),
    ) -> VerifyOutput:
        """All nodes of a tree in one pass; nothing is written.

        Args:
            tokens: token of each node, the root first.
            positions: absolute position of each node (committed length + depth).
            ancestors: row i is true at node i and its ancestors.
            taps: rows that each node's convolution reads, see `tfm_jax.tree.conv_taps`.
            state: state at the committed length.
            tap_layers: layers whose outputs the drafter reads.
        """

        def mix(index: int, mixer: Attention | DeltaNet, x: Array) -> tuple[Array, KVRows | DeltaTape]:
            cache: Any = state.layers[index]  # of the mixer's kind
            if isinstance(mixer, DeltaNet):
                return mixer.verify(x, ancestors, taps, cache)
            return mixer(x, positions, ancestors, Prefix(cache.keys, cache.values, state.lengths, positions))

        hidden, features, values = self._stack(tokens, tap_layers, mix)
        return VerifyOutput(hidden, features, values)

    def _stack(
        self, tokens: Int[Array, "batch tokens"], tap_layers: tuple[int, ...], mix: Callable[..., tuple[Array, Any]]
    ) -> tuple[Array, Array, tuple]:
        x = self.embed(tokens)
        outputs, kept = [], []
        for index, layer in enumerate(self.layers):
            mixed, keep = mix(index, layer.mixer, layer.input_norm(x))
            x = x + mixed
            x = x + layer.mlp(layer.post_norm(x))
            outputs.append(x)
            kept.append(keep)
        taps = [outputs[index] for index in tap_layers]
        features = jnp.concatenate(taps, axis=-1) if taps else x[..., :0]
        return self.norm(x), features, tuple(kept)


def _sequence_mask(
    valid: Bool[Array, "batch tokens"], start: Int[Array, " batch"] | int
) -> tuple[Int[Array, "batch tokens"], Bool[Array, "batch tokens tokens"]]:
    """Positions of consecutive tokens from `start`, and the causal mask over the valid ones."""
    offsets = jnp.arange(valid.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(jnp.asarray(start, jnp.int32)[..., None] + offsets, valid.shape)
    return positions, (offsets[:, None] >= offsets) & valid[:, None, :]


def empty_delta_state(config: TargetConfig, batch: int, dtype: DTypeLike) -> DeltaState:
    """State of a Gated DeltaNet layer before the first token."""
    return DeltaState(
        jnp.zeros((batch, config.value_heads, config.key_dim, config.value_dim), jnp.float32),
        jnp.zeros((batch, max(config.conv_width - 1, 0), config.conv_channels), dtype),
    )


def empty_target_state(config: TargetConfig, batch: int, capacity: int, dtype: DTypeLike) -> TargetState:
    """State before the first token, with room for `capacity` rows in every K/V cache."""

    def cache() -> KVCache:
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    layers = tuple(
        empty_delta_state(config, batch, dtype) if kind == "linear_attention" else cache()
        for kind in config.layer_types
    )
    return TargetState(jnp.zeros((batch,), jnp.int32), layers)
