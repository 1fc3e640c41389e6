"""Drafters unlike the goldens (more layers, other widths, windows, YaRN) against a slow float64 form."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import largest_difference

from tfm_jax.config import DrafterConfig
from tfm_jax.dflash import Drafter, empty_caches
from tfm_jax.state import write_rows

BASE = {
    "vocab_size": 50, "hidden_size": 40, "intermediate_size": 56, "rope_theta": 1e4, "norm_eps": 1e-6,
    "mask_token_id": 49, "max_positions": 512,
}  # fmt: skip
CONFIGS = {
    "four layers, group of 3, window beyond one cache block": DrafterConfig(
        **BASE, layer_causal=(True, False, True, False), layer_windows=(530, 0, 9, 0), heads=6, kv_heads=2, head_dim=24,
        block_size=16, target_layers=(0, 2, 5, 7),
    ),
    "bidirectional windows, as many kv heads as heads": DrafterConfig(
        **BASE, layer_causal=(False, False), layer_windows=(7, 3), heads=2, kv_heads=2, head_dim=10,
        block_size=8, target_layers=(1,),
    ),
    "one causal layer without a window, YaRN": DrafterConfig(
        **BASE, layer_causal=(True,), layer_windows=(0,), heads=4, kv_heads=1, head_dim=32, block_size=5,
        target_layers=(0, 1), yarn_factor=4.0, yarn_original_positions=64, yarn_attention_factor=0.1 * math.log(4) + 1,
    ),
}  # fmt: skip


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def inverse_frequencies(config: DrafterConfig) -> np.ndarray:
    """Rope frequencies; YaRN dimension by dimension, as in section 3.2 of arXiv 2309.00071."""
    head, theta, factor = config.head_dim, config.rope_theta, config.yarn_factor
    values = []
    edges = []
    for rotations in (config.yarn_beta_fast, config.yarn_beta_slow):
        span = config.yarn_original_positions / (rotations * 2 * math.pi) if factor else 1.0
        edges.append(head * math.log(span) / (2 * math.log(theta)))
    low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), head - 1)
    for j in range(head // 2):
        frequency = theta ** (-2 * j / head)
        if factor:
            slow = min(max((j - low) / (high - low), 0.0), 1.0)
            frequency = (1 - slow) * frequency + slow * frequency / factor
        values.append(frequency)
    return np.array(values)


def rotate(x: np.ndarray, position: int, config: DrafterConfig) -> np.ndarray:
    angle = position * inverse_frequencies(config)
    half = len(angle)
    a, b = x[..., :half], x[..., half:]
    scale = config.yarn_attention_factor if config.yarn_factor else 1.0
    return scale * np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def slow_draft(config: DrafterConfig, params: dict, embeddings: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """One block behind all of `taps`: a query at a time, a key at a time."""
    length, group = len(taps), config.heads // config.kv_heads
    context = norm(taps @ params["fc"]["kernel"], params["hidden_norm"]["scale"])
    x = embeddings
    for index in range(config.layers):
        layer = params["layers"][index]

        def keys_values(rows: np.ndarray, first: int, layer: dict = layer) -> tuple[list, list]:
            key, value = np.split(rows @ layer["kv"]["kernel"], 2, -1)
            key = norm(key.reshape(len(rows), config.kv_heads, -1), layer["k_norm"]["scale"])
            return [rotate(k, first + i, config) for i, k in enumerate(key)], list(value.reshape(key.shape))

        normed = norm(x, layer["input_norm"]["scale"])
        keys, values = (a + b for a, b in zip(keys_values(context, 0), keys_values(normed, length), strict=True))
        query = norm((normed @ layer["q"]["kernel"]).reshape(len(x), config.heads, -1), layer["q_norm"]["scale"])
        mixed = np.zeros((len(x), config.heads, config.head_dim))
        for slot in range(len(x)):
            place = length + slot
            seen = [
                at for at in range(length + len(x))
                if (at <= place or not config.layer_causal[index])
                and (not config.layer_windows[index] or abs(place - at) < config.layer_windows[index])
            ]  # fmt: skip
            for head in range(config.heads):
                q = rotate(query[slot, head], place, config)
                scores = np.array([q @ keys[at][head // group] for at in seen]) / math.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[slot, head] = (
                    sum(w * values[at][head // group] for w, at in zip(weights, seen, strict=True)) / weights.sum()
                )
        x = x + mixed.reshape(len(x), -1) @ layer["out"]["kernel"]
        gate, up = np.split(norm(x, layer["post_norm"]["scale"]) @ layer["mlp"]["gate_up"]["kernel"], 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"]
    return norm(x, params["norm"]["scale"])


@pytest.mark.parametrize("name", CONFIGS)
def test_drafter_equals_its_slow_form(name: str) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng(1)
    length = 540 if max(config.layer_windows) > 512 else 21
    drafter = Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.graphdef(drafter), nnx.to_pure_dict(nnx.state(drafter))
    params = jax.tree.map(lambda x: x if x.ndim > 1 else jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype), params)
    taps = rng.normal(size=(1, length, len(config.target_layers) * config.hidden_size)).astype(np.float32)
    embeddings = rng.normal(size=(1, config.block_size, config.hidden_size)).astype(np.float32)

    @jax.jit
    def draft(params: dict, taps: jax.Array, embeddings: jax.Array) -> tuple[jax.Array, jax.Array]:
        drafter = nnx.merge(graph, params)
        rows = drafter.context_rows(taps, jnp.arange(length, dtype=jnp.int32)[None])
        start, count = jnp.zeros((1,), jnp.int32), jnp.full((1,), length, jnp.int32)
        empty = empty_caches(config, 1, length + 64, jnp.float32)
        caches = tuple(write_rows(cache, new, start, count) for cache, new in zip(empty, rows, strict=True))
        blocks = drafter.blocks(embeddings[:, None], count[:, None], taps)
        return drafter.draft(embeddings, count, caches), blocks[:, 0]

    decoding, training = draft(params, jnp.asarray(taps), jnp.asarray(embeddings))
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected = slow_draft(config, wide, embeddings[0].astype(np.float64), taps[0].astype(np.float64))
    assert largest_difference(decoding[0], expected) < 2e-5
    assert largest_difference(training[0], expected) < 2e-5
