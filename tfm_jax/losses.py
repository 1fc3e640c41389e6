"""Training losses of the three models as pure functions of arrays, in float32.

Indices, the same for drafter and Weaver: an anchor at position a is the token x_a that a decode round would have as its
root. Depth d = 0 .. D − 1 (D = block size − 1) belongs to the token x_{a+d} and to the law of x_{a+d+1}: the target's
output at position a + d, the drafter's at slot d + 1, the Weaver's at a node of depth d.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

GAMMA = 7.0  # decay of the drafter's weights over a block of 16, in positions (DFlash paper, eq. 4)
LK_ETA = 2.0  # Trees from Marginals, arXiv 2607.06763, eq. 17
LK_GAMMA = 0.1  # the same, eq. 18
_GROUP = 16  # logits whose maximum stands for them in the first pass of `top_pool`


class Loss(NamedTuple):
    """A scalar to minimise, and scalars to log."""

    value: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]


class DraftTargets(NamedTuple):
    """What the blocks of some anchors should predict.

    Attributes:
        logits: the target's logits at a + d.
        tokens: x_{a+d+1}.
        valid: x_{a+d+1} exists.
    """

    logits: Float[Array, "batch anchors depth vocab"]
    tokens: Int[Array, "batch anchors depth"]
    valid: Bool[Array, "batch anchors depth"]


class Pool(NamedTuple):
    """The candidates of each depth: the drafter's best tokens and their logits."""

    ids: Int[Array, "*batch pool"]
    scores: Float[Array, "*batch pool"]


class LkTerms(NamedTuple):
    """Loss of single positions, and the acceptance 1 − TV under speculative sampling."""

    loss: Float[Array, "*batch"]
    acceptance: Float[Array, "*batch"]


def weighted_mean(
    x: Float[Array, "*shape"], weights: Float[Array, "*shape"] | Bool[Array, "*shape"]
) -> Float[Array, ""]:
    """Σ w x / Σ w; 0 if all weights are 0."""
    weights = weights.astype(jnp.float32)
    return jnp.sum(weights * x) / jnp.maximum(jnp.sum(weights), 1e-6)


def token_losses(logits: Float[Array, "*batch vocab"], labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """−log softmax(logits)[label], nats."""
    return jax.nn.logsumexp(logits, axis=-1) - _pick(logits, labels)


def _pick(x: Float[Array, "*batch vocab"], index: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """x[index] along the last axis; a masked sum, whose gradient needs no scatter and so is the same in every run."""
    return jnp.sum(jnp.where(jnp.arange(x.shape[-1]) == index[..., None], x, 0.0), axis=-1)


def next_token_loss(
    logits: Float[Array, "batch tokens vocab"], labels: Int[Array, "batch tokens"], valid: Bool[Array, "batch tokens"]
) -> Loss:
    """Cross-entropy of the target, nats a token."""
    loss = weighted_mean(token_losses(logits, labels), valid)
    return Loss(loss, {"accuracy": weighted_mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32), valid)})


def depth_weights(depth: int, gamma: float = GAMMA) -> Float[Array, " depth"]:
    """exp(−d / γ), d = 0 .. depth − 1: an early mistake costs the whole rest of the block."""
    return jnp.exp(-jnp.arange(depth, dtype=jnp.float32) / gamma)


def drafter_loss(
    logits: Float[Array, "batch anchors depth vocab"], targets: DraftTargets, gamma: float = GAMMA
) -> Loss:
    """Cross-entropy of every slot against the target's law on the true path, weighted by `depth_weights`.

    Averaged over paths that the target itself wrote, the law given the path is the marginal that the slot should learn.
    Using it as the label in place of the token drawn from it changes the expected gradient by nothing and its variance
    by much.

    Returns:
        The loss, and: `accuracy`, the share of slots whose argmax is the true token; `chain`, tokens a round that a
        chain of argmaxes would emit on these paths, bonus included.
    """
    weights = depth_weights(logits.shape[2], gamma) * targets.valid
    label = jax.nn.softmax(targets.logits, axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(label * logits, axis=-1)
    hit = (jnp.argmax(logits, axis=-1) == targets.tokens) & targets.valid
    chain = 1.0 + jnp.sum(jnp.cumprod(hit.astype(jnp.float32), axis=-1), axis=-1)
    metrics = {
        "accuracy": weighted_mean(hit.astype(jnp.float32), targets.valid),
        "chain": weighted_mean(chain, targets.valid[..., 0]),
    }
    return Loss(weighted_mean(losses, weights), metrics)


def top_pool(logits: Float[Array, "*batch vocab"], size: int) -> Pool:
    """The `size` largest logits of every row, exactly, by two small sorts in place of one over the vocabulary.

    A logit among the `size` largest lies in one of the `size` groups with the largest maxima.
    """
    vocab = logits.shape[-1]
    if vocab % _GROUP or vocab // _GROUP <= size:
        scores, ids = lax.top_k(logits, size)
        return Pool(ids, scores)
    groups = logits.reshape(*logits.shape[:-1], vocab // _GROUP, _GROUP)
    _, best = lax.top_k(jnp.max(groups, axis=-1), size)
    members = jnp.take_along_axis(groups, best[..., None], axis=-2).reshape(*logits.shape[:-1], size * _GROUP)
    scores, index = lax.top_k(members, size)
    group = jnp.take_along_axis(best, index // _GROUP, axis=-1)
    return Pool(group * _GROUP + index % _GROUP, scores)


def lk_terms(target_logits: Float[Array, "*batch pool"], weaver_logits: Float[Array, "*batch pool"]) -> LkTerms:
    """λ KL(p‖q) + (1 − λ) TV(p, q) − γ log q(argmax p), λ = exp(−η (1 − TV)) without gradient.

    p is the target's and q the Weaver's law, both renormalised over the pool; Trees from Marginals (arXiv 2607.06763),
    eq. 17 and 18. 1 − TV is the probability of acceptance: λ falls, and TV takes over, as it grows.
    """
    log_p, log_q = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(weaver_logits)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    divergence = jnp.sum(p * (log_p - log_q), axis=-1)
    variation = 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)
    acceptance = lax.stop_gradient(1.0 - variation)
    mix = jnp.exp(-LK_ETA * acceptance)
    argmax_term = -_pick(log_q, jnp.argmax(target_logits, axis=-1))
    return LkTerms(mix * divergence + (1.0 - mix) * variation + LK_GAMMA * argmax_term, acceptance)


def reached(
    target_logits: Float[Array, "*batch depth pool"],
    weaver_logits: Float[Array, "*batch depth pool"],
    is_true: Bool[Array, "*batch depth pool"],
    uniforms: Float[Array, "*batch depth"],
) -> Bool[Array, "*batch depth"]:
    """Depths that speculative sampling along the true path would come to.

    The walk leaves depth d for d + 1 if the true token is in the pool and u < p / q there; depth 0 is always reached.

    Args:
        target_logits: over the pool.
        weaver_logits: over the pool.
        is_true: the candidate that is the true token; no candidate, if the pool lacks it.
        uniforms: u, in [0, 1).
    """
    log_p, log_q = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(weaver_logits)
    log_ratio = jnp.sum(jnp.where(is_true, log_p - log_q, 0.0), axis=-1)
    survives = (uniforms < jnp.exp(jnp.minimum(log_ratio, 0.0))) & is_true.any(axis=-1)
    walk = jnp.cumprod(survives.astype(jnp.int32), axis=-1)[..., :-1]
    return jnp.pad(walk, [(0, 0)] * (walk.ndim - 1) + [(1, 0)], constant_values=1) > 0


def weaver_loss(
    weaver_logits: Float[Array, "batch anchors depth pool"],
    pool: Pool,
    targets: DraftTargets,
    uniforms: Float[Array, "batch anchors depth"],
) -> Loss:
    """`lk_terms` averaged over the positions that speculative sampling would reach.

    Returns:
        The loss, and at the reached positions: `acceptance` of the Weaver's law and `marginal_acceptance` of the
        drafter's, both within the pool; `pool_mass`, the target's probability of the pool; `reached`, their number in a
        block.
    """
    target_logits = jnp.take_along_axis(targets.logits, pool.ids, axis=-1)
    is_true = pool.ids == targets.tokens[..., None]
    mask = targets.valid & lax.stop_gradient(reached(target_logits, weaver_logits, is_true, uniforms))
    terms = lk_terms(target_logits, weaver_logits)
    log_mass = jax.nn.logsumexp(target_logits, axis=-1) - jax.nn.logsumexp(targets.logits, axis=-1)
    metrics = {
        "acceptance": weighted_mean(terms.acceptance, mask),
        "marginal_acceptance": weighted_mean(lk_terms(target_logits, pool.scores).acceptance, mask),
        "pool_mass": weighted_mean(jnp.exp(log_mass), mask),
        "reached": weighted_mean(jnp.sum(mask, axis=-1).astype(jnp.float32), targets.valid[..., 0]),
    }
    return Loss(weighted_mean(terms.loss, mask), metrics)
