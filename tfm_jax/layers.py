"""Building blocks shared by the three models.

Arithmetic rule, the only one: products take their operands' dtype. float32 operands are multiplied in float32 on every
device (`Precision.HIGHEST`; tf32 would break token equality), bfloat16 operands accumulate in float32. Norms, rope
angles and softmax are float32 inside and return their input's dtype. Kernels are stored [in, out].
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Initializer = Callable[..., Array]


def precision(dtype: DTypeLike) -> lax.Precision:
    """Matmul precision that keeps float32 arithmetic float32 on every device."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


def dot(x: Float[Array, "... channels"], kernel: Float[Array, "channels out"]) -> Float[Array, "... out"]:
    """Product x @ kernel in x's dtype."""
    return jnp.matmul(x, kernel, precision=precision(x.dtype))


def fan_in_normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> Array:
    """Normal initialisation with variance 1 / fan_in."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)


class Linear(nnx.Module):
    """y = x @ kernel (+ bias)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(fan_in_normal(rngs, (inputs, outputs), inputs, dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... out"]:
        """Apply to the last axis."""
        y = dot(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """RMS norm of dense Qwen3 and every DFlash drafter: normalise in float32, cast, then multiply by the weight."""

    def __init__(self, channels: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((channels,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        """Normalise the last axis."""
        return _normalise(x, self.eps).astype(x.dtype) * self.scale[...].astype(x.dtype)


class UnitOffsetRMSNorm(nnx.Module):
    """RMS norm of the Qwen3.5 family: the stored weight is centred on zero, y = x̂ (1 + w), cast at the end."""

    def __init__(self, channels: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.zeros((channels,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        """Normalise the last axis."""
        return (_normalise(x, self.eps) * (1.0 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class BiasedRMSNorm(nnx.Module):
    """RMS norm of the Weaver: float32 throughout, a plain weight and a bias."""

    def __init__(self, channels: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((channels,), dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        """Normalise the last axis."""
        y = _normalise(x, self.eps) * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def _normalise(x: Float[Array, "... channels"], eps: float) -> Float[Array, "... channels"]:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) · up(x)); gate and up are the two halves of one kernel."""

    def __init__(self, channels: int, inner: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate_up = Linear(channels, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, channels, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        """Apply to the last axis."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(nnx.silu(gate) * up)


def rotary(
    x: Float[Array, "batch tokens heads head"],
    positions: Int[Array, "batch tokens"],
    frequencies: Float[Array, " half"],
    scale: float = 1.0,
) -> Float[Array, "batch tokens heads head"]:
    """Rotate-half rope over the first 2 · half dimensions; the others pass. Angles are float32, cos and sin x's dtype.

    Args:
        x: queries or keys.
        positions: absolute token positions.
        frequencies: radians per position.
        scale: factor on cos and sin (YaRN's attention factor).
    """
    half = frequencies.shape[0]
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = (jnp.cos(angles) * scale).astype(x.dtype), (jnp.sin(angles) * scale).astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rope_frequencies(theta: float, rotary_dim: int) -> Float[Array, " half"]:
    """θ^(−2j / rotary_dim), j = 0 .. rotary_dim/2 − 1 (Su et al. 2021, arXiv 2104.09864)."""
    return theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
