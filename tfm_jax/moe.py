"""Mixture of experts of Qwen3-Next and Qwen3.5-MoE: routed experts, and a gated shared one that every token passes.

p = softmax(x W_router) in float32 over all experts; the k largest, scaled to sum to 1 if the configuration says so,
weigh the SwiGLU of their experts; σ(x W_shared_gate) weighs that of the shared one. Formulas: transformers 5.17
(`Qwen3NextSparseMoeBlock`, `Qwen3_5MoeSparseMoeBlock`).

Every shape is static. Of a few tokens the chosen experts' kernels are gathered; of many, whose experts together are
most of them, every expert sees every token and all but the chosen weights are 0. Up to about 200 tokens that costs a
GPU little, since reading the kernels takes longer than multiplying with them. Sorting the tokens by expert for
`jax.lax.ragged_dot` would be k times the work today: XLA expands it (in the CPU's HLO of jax 0.11.2; reported of CUDA)
to a dense product with a masked [tokens · k, experts · hidden].

Layout: kernels [experts, in, out], gate and up side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tfm_jax.config import TargetConfig
from tfm_jax.layers import Linear, SwiGLU, fan_in_normal, precision

_TOKENS = 256  # that every expert sees at once; bounds the activations [experts, tokens, channels]


class Routing(NamedTuple):
    """Experts of every token, the most probable first, and their float32 weights."""

    experts: Int[Array, "tokens chosen"]
    weights: Float[Array, "tokens chosen"]


class MixtureOfExperts(nnx.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.router = Linear(config.hidden_size, config.experts, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)
        self.shared = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.shared_gate = Linear(config.hidden_size, 1, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(self, x: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens hidden"]:
        """Apply to every token on its own."""
        rows = x.reshape(-1, x.shape[-1])
        routed = self.experts(rows, self.route(rows))
        return (routed + nnx.sigmoid(self.shared_gate(rows)) * self.shared(rows)).reshape(x.shape)

    def route(self, x: Float[Array, "tokens hidden"]) -> Routing:
        """Choose every token's experts; of equally probable ones the first."""
        probabilities = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        weights, experts = lax.top_k(probabilities, self.config.experts_per_token)
        if self.config.normalise_experts:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(experts, weights)


class ExpertKernels(nnx.Module):
    """One kernel an expert."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(fan_in_normal(rngs, (experts, inputs, outputs), inputs, dtype))


class Experts(nnx.Module):
    """SwiGLU experts; a token's result is the weighted sum of those that it chose."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.expert_size
        self.gate_up = ExpertKernels(config.experts, hidden, 2 * inner, dtype=dtype, rngs=rngs)
        self.down = ExpertKernels(config.experts, inner, hidden, dtype=dtype, rngs=rngs)
        self.count = config.experts

    def __call__(self, x: Float[Array, "tokens hidden"], routing: Routing) -> Float[Array, "tokens hidden"]:
        """Apply the chosen experts, in whichever way moves less memory."""
        # A gathered kernel is written and read again, so gathering half as many kernels as there are breaks even.
        return self.apply_chosen(x, routing) if 2 * routing.experts.size <= self.count else self.apply_every(x, routing)

    def apply_chosen(self, x: Float[Array, "tokens hidden"], routing: Routing) -> Float[Array, "tokens hidden"]:
        """Gather the kernels of every (token, expert) pair."""
        tokens, chosen = routing.experts.shape
        high = precision(x.dtype)
        flat = routing.experts.reshape(-1)
        # p pair, t token, k its choice, h hidden, f inner
        rows = jnp.repeat(x, chosen, axis=0)
        gate_up = jnp.einsum("ph,phf->pf", rows, self.gate_up.kernel[...][flat], precision=high)
        inner = _weigh(gate_up, routing.weights.reshape(-1)).reshape(tokens, chosen, -1)
        down = self.down.kernel[...][flat].reshape(tokens, chosen, inner.shape[-1], x.shape[-1])
        return jnp.einsum("tkf,tkfh->th", inner, down, precision=high)

    def apply_every(self, x: Float[Array, "tokens hidden"], routing: Routing) -> Float[Array, "tokens hidden"]:
        """Show every token to every expert, `_TOKENS` at a time."""
        one_hot = jax.nn.one_hot(routing.experts, self.count, dtype=jnp.float32)
        weights = jnp.einsum("tk,tke->te", routing.weights, one_hot, precision=lax.Precision.HIGHEST)
        if len(x) <= _TOKENS:
            return self._apply_block((x, weights))
        blocks = [jnp.pad(rows, ((0, -len(x) % _TOKENS), (0, 0))) for rows in (x, weights)]
        blocks = [rows.reshape(-1, _TOKENS, rows.shape[-1]) for rows in blocks]
        return lax.map(self._apply_block, tuple(blocks)).reshape(-1, x.shape[-1])[: len(x)]

    def _apply_block(
        self, block: tuple[Float[Array, "tokens hidden"], Float[Array, "tokens experts"]]
    ) -> Float[Array, "tokens hidden"]:
        x, weights = block
        high = precision(x.dtype)
        # Experts as a batch axis on both sides: without it XLA would transpose the kernels in every pass.
        rows = jnp.broadcast_to(x, (self.count, *x.shape))
        gate_up = jnp.einsum("eth,ehf->etf", rows, self.gate_up.kernel[...], precision=high)
        return jnp.einsum("etf,efh->th", _weigh(gate_up, weights.T), self.down.kernel[...], precision=high)


def _weigh(gate_up: Float[Array, "*rows channels"], weights: Float[Array, "*rows"]) -> Float[Array, "*rows inner"]:
    """silu(gate) · up · weight; exactly 0 where the weight is, whatever an expert makes of a foreign token."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = (nnx.silu(gate) * up).astype(jnp.float32)
    weights = weights[..., None]
    return jnp.where(weights > 0, inner * weights, 0.0).astype(gate_up.dtype)
