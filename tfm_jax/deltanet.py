"""Gated DeltaNet mixer (arXiv 2412.06464) in the Qwen3.5 layout: projections, short convolution, gates, gated norm.

The recurrence itself is in `pallas_kernels`. A sequence (prefill, training) advances the state; a tree only reads it
and returns a tape from which `tfm_jax.commit` advances the state along the accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Precision, gdn_chunk, gdn_tree_verify, tree_conv
from tfm_jax.config import TargetConfig
from tfm_jax.layers import Linear
from tfm_jax.state import DeltaState, DeltaTape


class _Projection(NamedTuple):
    channels: Float[Array, "batch tokens channels"]
    gate: Float[Array, "batch tokens value_heads value"]
    log_decay: Float[Array, "batch tokens value_heads"]
    beta: Float[Array, "batch tokens value_heads"]


class GatedRMSNorm(nnx.Module):
    """RMS norm over each value head, one plain weight for all heads, times silu of the gate."""

    def __init__(self, channels: int, *, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((channels,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... value"], gate: Float[Array, "... value"]) -> Float[Array, "... value"]:
        """See `gated_rms_norm`."""
        return gated_rms_norm(x, self.scale[...], gate, self.eps)


def gated_rms_norm(
    x: Float[Array, "... value"], scale: Float[Array, " value"], gate: Float[Array, "... value"], eps: float
) -> Float[Array, "... value"]:
    """x̂ · scale · silu(gate) in the rounding order of transformers 5.17 (`Qwen3_5RMSNormGated`).

    The normalised x returns to x's dtype before the weight; the gate's silu is float32.
    """
    x32 = x.astype(jnp.float32)
    unit = (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return ((unit * scale).astype(jnp.float32) * nnx.silu(gate.astype(jnp.float32))).astype(x.dtype)


class DeltaNet(nnx.Module):
    """`in_proj` holds, side by side, q, k, v (the convolution's channels), the output gate z, and the gates b and a."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        values = config.value_heads * config.value_dim
        self.widths = (config.conv_channels, values, config.value_heads, config.value_heads)
        self.in_proj = Linear(config.hidden_size, sum(self.widths), dtype=dtype, rngs=rngs)
        self.conv = ConvKernel(config.conv_width, config.conv_channels, dtype=dtype, rngs=rngs)
        decay = jax.random.uniform(rngs.params(), (config.value_heads,), jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(decay))
        self.dt_bias = nnx.Param(_inverse_softplus_uniform(rngs, config.value_heads))
        self.norm = GatedRMSNorm(config.value_dim, eps=config.norm_eps)
        self.out = Linear(values, config.hidden_size, dtype=dtype, rngs=rngs)
        self.config = config

    def sequence(
        self,
        x: Float[Array, "batch tokens hidden"],
        valid: Bool[Array, "batch tokens"],
        state: DeltaState,
    ) -> tuple[Float[Array, "batch tokens hidden"], DeltaState]:
        """Consecutive tokens, right-padded: rows that are not `valid` leave the state and the window untouched."""
        projected = self._project(x)
        history = jnp.concatenate([state.conv, projected.channels], axis=1)
        mixed = _causal_conv(history, self.conv.kernel[...], x.shape[1])
        keys, _, values = self.config.conv_widths
        query, key, value = self._heads(jnp.split(mixed, [keys, mixed.shape[-1] - values], axis=-1))
        gates = projected.log_decay, projected.beta
        result = gdn_chunk(query, key, value, *gates, valid, state.recurrent, precision=_precision(x.dtype))
        count = jnp.sum(valid, axis=1)
        newest = jax.vmap(lambda rows, start: lax.dynamic_slice_in_dim(rows, start, state.conv.shape[1]))
        return self._finish(result.output, projected.gate, x.dtype), DeltaState(result.state, newest(history, count))

    def verify(
        self,
        x: Float[Array, "batch nodes hidden"],
        ancestors: Bool[Array, "batch nodes nodes"],
        taps: Int[Array, "batch nodes width"],
        state: DeltaState,
    ) -> tuple[Float[Array, "batch nodes hidden"], DeltaTape]:
        """All nodes of a tree, each seeing the committed state and its own ancestors; the state is only read."""
        projected = self._project(x)
        kernel = self.conv.kernel[...]
        query, key, value = self._heads(
            tree_conv(projected.channels, state.conv, kernel, taps, widths=self.config.conv_widths)
        )
        gates = projected.log_decay, projected.beta
        result = gdn_tree_verify(query, key, value, *gates, ancestors, state.recurrent, precision=_precision(x.dtype))
        tape = DeltaTape(projected.channels, key, result.update, result.path_decay)
        return self._finish(result.output, projected.gate, x.dtype), tape

    def _project(self, x: Float[Array, "batch tokens hidden"]) -> _Projection:
        channels, gate, b, a = jnp.split(self.in_proj(x), [sum(self.widths[:i]) for i in (1, 2, 3)], axis=-1)
        step = nnx.softplus(a.astype(jnp.float32) + self.dt_bias[...])
        return _Projection(
            channels,
            gate.reshape(*x.shape[:2], self.config.value_heads, self.config.value_dim),
            -jnp.exp(self.A_log[...]) * step,
            nnx.sigmoid(b.astype(jnp.float32)),
        )

    def _heads(self, channels: Sequence[Float[Array, "batch tokens _"]]) -> list[Array]:
        config = self.config
        query, key, value = channels
        shape = query.shape[:2]
        return [
            query.reshape(*shape, config.key_heads, config.key_dim),
            key.reshape(*shape, config.key_heads, config.key_dim),
            value.reshape(*shape, config.value_heads, config.value_dim),
        ]

    def _finish(
        self,
        mixed: Float[Array, "batch tokens value_heads value"],
        gate: Float[Array, "batch tokens value_heads value"],
        dtype: DTypeLike,
    ) -> Float[Array, "batch tokens hidden"]:
        return self.out(self.norm(mixed.astype(dtype), gate).reshape(*mixed.shape[:2], -1))


def _precision(dtype: DTypeLike) -> Precision:
    """A float32 model is to be computed in float32; a narrower one has rounded more already than "default" does."""
    return "highest" if dtype == jnp.float32 else "default"


class ConvKernel(nnx.Module):
    """Depthwise kernel; the last row multiplies the current token."""

    def __init__(self, width: int, channels: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        bound = width**-0.5
        kernel = jax.random.uniform(rngs.params(), (width, channels), jnp.float32, -bound, bound)
        self.kernel = nnx.Param(kernel.astype(dtype))


def _causal_conv(
    history: Float[Array, "batch extended channels"], kernel: Float[Array, "width channels"], tokens: int
) -> Float[Array, "batch tokens channels"]:
    """Depthwise convolution over rows that the committed window precedes, then silu; accumulates in float32."""
    taps = (history[:, j : j + tokens].astype(jnp.float32) * kernel[j] for j in range(kernel.shape[0]))
    return nnx.silu(sum(taps)).astype(history.dtype)


def _inverse_softplus_uniform(rngs: nnx.Rngs, heads: int) -> Float[Array, " heads"]:
    """softplus⁻¹ of step sizes log-uniform in [0.001, 0.1], the usual initialisation of gated linear recurrences."""
    step = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, jnp.log(1e-3), jnp.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
