"""Exact top-k of long rows: values, and ids with ties to the lowest, as `lax.top_k` gives them.

Order: by the bits of the float32 value, so −0 is below 0, a positive NaN above infinity and a negative one below −inf
(the form "xla" compares values: it puts any NaN first).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from types import ModuleType

_GROUP = 128  # elements; of 64, 128 and 256 the fastest on an H200 (docs/kernels.md)


def top_k(
    logits: Float[Array, "*batch vocab"],
    k: int,
    *,
    implementation: Literal["auto", "triton", "xla", "reference"] = "auto",
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """The `k` largest logits of every row in float32, best first, and their int32 ids; the lowest id wins a tie.

    Args:
        logits: float32 or bfloat16; compared as float32.
        k: 1 to vocab.
        implementation: "triton" needs an NVIDIA GPU, jax-triton, k ≤ 1024 and at least 4096 logits in a row; "auto"
            takes it where it can, otherwise "xla".

    Raises:
        ValueError: k is out of range, or "triton" cannot serve this.
    """
    vocab = logits.shape[-1]
    if not 1 <= k <= vocab:
        message = f"k is {k}, expected 1 to {vocab}, the logits in a row"
        raise ValueError(message)
    rows = logits.reshape(-1, vocab)
    match implementation:
        case "auto":
            module = _triton_module()
            usable = module is not None and logits.size > 0 and module.supports(vocab, k)
            values, ids = module.top_k(rows, k) if usable and module is not None else _two_stage(rows, k)
        case "triton":
            module = _triton_module()
            if module is None or not module.supports(vocab, k):
                message = f'top-{k} of {vocab} logits has no "triton" form on this machine; use "xla"'
                raise ValueError(message)
            values, ids = module.top_k(rows, k)
        case "xla":
            values, ids = _two_stage(rows, k)
        case "reference":
            values, ids = map(jnp.asarray, reference_top_k(np.asarray(rows.astype(jnp.float32)), k))
        case _:
            message = f"unknown implementation {implementation!r}, choose from 'auto', 'triton', 'xla', 'reference'"
            raise ValueError(message)
    shape = (*logits.shape[:-1], k)
    return values.reshape(shape), ids.reshape(shape)


def reference_top_k(
    logits: Float[np.ndarray, "rows vocab"], k: int
) -> tuple[Float[np.ndarray, "rows k"], Int[np.ndarray, "rows k"]]:
    """The same by a stable sort, in numpy."""
    bits = logits.astype(np.float32).view(np.int32).astype(np.int64)
    keys = np.where(bits < 0, -(2**31) - bits - 1, bits)
    ids = np.argsort(-keys, axis=-1, kind="stable")[:, :k].astype(np.int32)
    return np.take_along_axis(logits.astype(np.float32), ids, axis=-1), ids


def _two_stage(logits: Float[Array, "rows vocab"], k: int) -> tuple[Array, Array]:
    """Top-k inside the k groups of neighbours with the largest maxima.

    An element outside of them is beaten by one element of each: by a larger one, or by an equal one of a lower id,
    because groups hold neighbours and the lower group wins a tie. The groups stay in their order, so that the second
    selection sees ids in theirs.
    """
    logits = logits.astype(jnp.float32)
    rows, vocab = logits.shape
    groups = -(-vocab // _GROUP)
    if groups <= 2 * k:  # nothing to gain
        values, ids = lax.top_k(logits, k)
        return values, ids.astype(jnp.int32)
    padded = jnp.pad(logits, ((0, 0), (0, groups * _GROUP - vocab)), constant_values=-jnp.inf)
    padded = padded.reshape(rows, groups, _GROUP)
    best = jnp.sort(lax.top_k(jnp.max(padded, axis=-1), k)[1], axis=-1)
    kept = jnp.take_along_axis(padded, best[..., None], axis=1, mode="promise_in_bounds")
    values, index = lax.top_k(kept.reshape(rows, -1), k)
    group = jnp.take_along_axis(best, index // _GROUP, axis=1, mode="promise_in_bounds")
    return values, (group * _GROUP + index % _GROUP).astype(jnp.int32)


@functools.cache
def _triton_module() -> ModuleType | None:
    """The Triton form, or None where there is no NVIDIA GPU or no jax-triton."""
    if jax.default_backend() != "gpu" or importlib.util.find_spec("jax_triton") is None:
        return None
    return importlib.import_module("pallas_kernels.triton_top_k")
