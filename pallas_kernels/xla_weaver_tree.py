"""`weaver_tree` in jnp: rounding as in `tfm_jax.weaver`, but for norms, which are factors here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.constants import NORM_EPS, PATH
from pallas_kernels.containers import TreeGrowth, WeaverWeights
from pallas_kernels.xla_growth import Growth, NewNodes, expand_nodes, guess_chain, start_growth, take_chains


def weaver_tree(
    root: Int[Array, " one"],
    candidate_ids: Int[Array, "depth pool"],
    candidate_scores: Float[Array, "depth pool"],
    inputs_table: Float[Array, "vocab rank"],
    heads_table: Float[Array, "vocab rank"],
    positions: Float[Array, "positions rank"],
    prompt_keys: Float[Array, "prompt heads head"],
    prompt_values: Float[Array, "prompt heads head"],
    weights: WeaverWeights,
    *,
    width: int,
    groups: int,
    expand: int,
    ahead: int = 0,
) -> TreeGrowth:
    """The steps in a loop; each evaluates its nodes side by side."""
    rows = width * (1 + ahead)
    expanded = groups * rows
    heads_rows = heads_table[jnp.maximum(candidate_ids, 0)]
    ids = candidate_ids[None]

    def step(cache: Array, nodes: NewNodes) -> tuple[Array, Array]:
        depths, first = nodes.depths[0], nodes.first_slot
        x = inputs_table[nodes.tokens[0]] + positions[depths]
        query, *fresh = jnp.split(_normed_product(x, weights.qkv, weights.qkv_bias), 3, axis=-1)
        cache = lax.dynamic_update_slice(cache, jnp.stack(fresh), (0, first, 0))
        own = jnp.arange(expanded) == first + jnp.arange(rows)[:, None]
        attended = _attend(query, prompt_keys, prompt_values, cache, nodes.ancestors[0] | own)
        x = x + _dot(attended, weights.out)
        hidden = jax.nn.gelu(_normed_product(x, weights.fc1, weights.fc1_bias), approximate=False)
        x = x + (_dot(hidden, weights.fc2) + weights.fc2_bias)
        unit = x.astype(jnp.float32) * _inverse_rms(x)
        r = unit * weights.out_norm_scale.astype(jnp.float32) + weights.out_norm_bias.astype(jnp.float32)
        products = _contract("wr,wpr->wp", r.astype(x.dtype), heads_rows[depths])
        return cache, (candidate_scores.astype(jnp.float32)[depths] + products)[None]

    def grow(group: Int[Array, ""], state: tuple[Growth, Array], chains: int = width) -> tuple[Growth, Array]:
        growth, cache = expand_nodes(*state, group * rows, rows, ids, step, expanded, chains=chains)
        return take_chains(growth, (group + 1) * rows, width, ids, ahead=ahead, spine=False), cache

    growth = start_growth(root, expanded + rows, expand)
    if ahead:
        growth = guess_chain(growth, rows, ids)
    cache = jnp.zeros((2, expanded, inputs_table.shape[1]), inputs_table.dtype)
    state = grow(jnp.int32(0), (growth, cache), chains=1 if ahead else width)
    growth, _ = lax.fori_loop(1, groups, grow, state)
    return _result(growth, expanded, width, expand)


def _result(growth: Growth, expanded: int, width: int, expand: int) -> TreeGrowth:
    slots = expanded + width  # guesses behind the last entries are not expanded: they are nothing yet
    tokens, parents, depths, scores, ancestors = (rows[0, :slots] for rows in growth[:5])
    at_depth = ancestors[:, None, :slots] & (depths == jnp.arange(PATH)[:, None])
    return TreeGrowth(
        tokens,
        parents,
        depths,
        scores,
        jnp.where(at_depth.any(axis=2), jnp.argmax(at_depth, axis=2), -1).astype(jnp.int32),
        growth.frontier_scores[0, : expanded * expand].reshape(expanded, expand),
        growth.frontier_tokens[0, : expanded * expand].reshape(expanded, expand),
    )


def _contract(axes: str, x: Array, y: Array) -> Array:
    """A sum of products in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(axes, x, y, precision=precision, preferred_element_type=jnp.float32)


def _dot(x: Float[Array, "nodes rank"], matrix: Float[Array, "out rank"]) -> Array:
    return _contract("nr,or->no", x, matrix).astype(x.dtype)


def _inverse_rms(x: Float[Array, "nodes rank"]) -> Float[Array, "nodes one"]:
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + NORM_EPS)


def _normed_product(x: Float[Array, "nodes rank"], matrix: Float[Array, "out rank"], bias: Array) -> Array:
    """The norm of x through a matrix that it is folded into."""
    return (_contract("nr,or->no", x, matrix) * _inverse_rms(x) + bias).astype(x.dtype)


def _attend(
    query: Float[Array, "nodes rank"],
    prompt_keys: Float[Array, "prompt heads head"],
    prompt_values: Float[Array, "prompt heads head"],
    cache: Float[Array, "two slots rank"],
    visible: Bool[Array, "nodes slots"],
) -> Float[Array, "nodes rank"]:
    """Softmax attention over the whole prompt and visible slots, with float32 weights."""
    heads = prompt_keys.shape[1:]
    keys, values = (x.reshape(-1, *heads) for x in cache)
    keys, values = jnp.concatenate([prompt_keys, keys]), jnp.concatenate([prompt_values, values])
    match = _contract("nhd,khd->hnk", query.reshape(-1, *heads), keys) * heads[1] ** -0.5
    seen = jnp.pad(visible, ((0, 0), (len(prompt_keys), 0)), constant_values=True)
    match = jax.nn.softmax(jnp.where(seen, match, -jnp.inf), axis=-1).astype(values.dtype)
    return _contract("hnk,khd->nhd", match, values).astype(values.dtype).reshape(query.shape)
