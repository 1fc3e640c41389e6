"""Transforms from the tensors of a rule to a parameter, written once for every model.

Each takes the tensors in the order of the rule, one at a time, and the sizes that the rule's shapes refer to. Tensors
are torch's ([out, in]); kernels become [in, out].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Sizes = Mapping[str, int]
Transform = Callable[[Iterator[np.ndarray], Sizes], np.ndarray]

_BAND = 256  # rows


def keep(tensors: Iterator[np.ndarray], _: Sizes) -> np.ndarray:
    """The tensor as it is."""
    return next(tensors)


def transpose(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """[out, in] → [in, out]."""
    return fuse(tensors, sizes)


def fuse(tensors: Iterator[np.ndarray], _: Sizes) -> np.ndarray:
    """Several [out, in] → one [in, out | out | …], in the order of the rule."""
    parts = list(tensors)
    fused = np.empty((parts[0].shape[1], sum(map(len, parts))), np.result_type(*parts))
    start = 0
    for part in parts:
        for first in range(0, len(part), _BAND):  # in bands that stay in the cache: twice as fast as all at once
            band = part[first : first + _BAND].T
            fused[:, start + first : start + first + band.shape[1]] = band
        start += len(part)
    return fused


def fuse_gated(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """As `fuse`; the first tensor interleaves [query | gate] per head and is split into all queries, then all gates."""
    interleaved = next(tensors)
    heads = interleaved.reshape(-1, 2, sizes["head"], sizes["hidden"])
    split = (heads[:, part].reshape(-1, sizes["hidden"]) for part in range(2))
    return fuse(iter([*split, *tensors]), sizes)


def fuse_grouped(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """As `fuse`, of two tensors that hold [q | k | v | z] and [b | a] per key head: all q, then all k, v, z, b, a."""
    key, value = sizes["key_dim"], sizes["value"] // sizes["key_heads"]
    gates = sizes["value_heads"] // sizes["key_heads"]
    widths = ((key, key, value, value), (gates, gates))
    parts = []
    for tensor, group in zip(tensors, widths, strict=True):
        heads = tensor.reshape(sizes["key_heads"], -1, sizes["hidden"])
        parts += [part.reshape(-1, sizes["hidden"]) for part in np.split(heads, np.cumsum(group)[:-1], axis=1)]
    return fuse(iter(parts), sizes)


def stack_pairs(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """Two tensors of every expert, each pair as in `fuse`: [experts, in, out | out]."""
    return _stack((fuse(iter(pair), sizes) for pair in zip(tensors, tensors, strict=True)), sizes)


def stack(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """One [out, in] of every expert → [experts, in, out]."""
    return _stack((fuse(iter([tensor]), sizes) for tensor in tensors), sizes)


def transpose_each(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """[experts, out, in] → [experts, in, out]."""
    return stack(iter(next(tensors)), sizes)


def _stack(kernels: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """Kernels of all experts, one in memory at a time besides the result."""
    first = next(kernels)
    stacked = np.empty((sizes["experts"], *first.shape), first.dtype)
    for index, kernel in enumerate(itertools.chain([first], kernels)):
        stacked[index] = kernel
    return stacked


def take_query(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """The query's part of a fused [query | key | value]."""
    return fuse(iter([next(tensors)[: sizes["query"]]]), sizes)


def take_key_value(tensors: Iterator[np.ndarray], sizes: Sizes) -> np.ndarray:
    """The rest of a fused [query | key | value]."""
    return fuse(iter([next(tensors)[sizes["query"] :]]), sizes)


def unroll_conv(tensors: Iterator[np.ndarray], _: Sizes) -> np.ndarray:
    """Depthwise [channels, 1, width] → [width, channels]; the last row still multiplies the current token."""
    return np.ascontiguousarray(next(tensors)[:, 0].T)
