"""Verifiers where arithmetic is at its edges, the order of siblings, and the noise that drives a round."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from small_trees import compiled, draft_tree

from tfm_jax.verifiers import Noise, Verdict, chain_rejection, target_only, traversal, verification_noise


def decide(rule: Callable, row: list[float], coins: list[float], order: tuple[float, ...] = (0, 0, 0)) -> Verdict:
    """A root with children of tokens 0 and 1, equally likely drafts; their own rows are uniform."""
    tree = draft_tree(np.array([0, 0, 1]), np.array([-1, 0, 0]))
    rows = jnp.array([[row, [1 / 3] * 3, [1 / 3] * 3]], jnp.float32)
    noise = Noise(jnp.array([order], jnp.float32), jnp.array([coins], jnp.float32))
    return compiled(rule, 1)(tree, rows, noise)


ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def test_target_only_at_the_edges() -> None:
    assert decide(target_only, [0.0, 0.4, 0.6], [0, 0, 0]).path[0].tolist() == [0, 2]  # no child of probability 0
    verdict = decide(target_only, [0.2, 0.3, 0.5], [0.9, 0, 0])  # a miss leaves the rest of the row
    assert (int(verdict.count[0]), verdict.rest[0].tolist()) == (1, [0, 0, 0.5])
    # Children that sum to a little less than 1 while nothing else has any mass: the last positive child.
    assert decide(target_only, [0.5, 0.4999999, 0.0], [ALMOST_ONE, 0, 0]).path[0].tolist() == [0, 2]
    assert decide(target_only, [0.9999999, 0.0, 0.0], [ALMOST_ONE, 0, 0]).path[0].tolist() == [0, 1]


@pytest.mark.parametrize("order", [(0, 1, 0), (0, 0, 1)])
def test_traversal_at_the_edges(order: tuple[float, ...]) -> None:
    # One-hot rows are greedy whatever the coins and the order; a coin of 0 accepts nothing of probability 0.
    for coins in ([0, 0, 0], [ALMOST_ONE] * 3):
        assert decide(traversal, [0.0, 1.0, 0.0], coins, order).path[0].tolist() == [0, 2]
        verdict = decide(traversal, [0.0, 0.0, 1.0], coins, order)
        assert (int(verdict.count[0]), verdict.rest[0].argmax()) == (1, 2)
        assert verdict.rest[0, :2].tolist() == [0, 0]
    # All mass on the children, as the drafter has it: the first one is taken, and the residual is 0.
    verdict = decide(traversal, [0.5, 0.5, 0.0], [ALMOST_ONE] * 3, order)
    assert verdict.path[0].tolist() == [0, 1 + int(order[2])]
    # The same but for rounding: a residual of a few units in the last place, or of none, never leaves an empty law.
    for row in ([0.49999994, 0.50000006, 0.0], [0.49999994, 0.49999994, 1e-8]):
        for coin in (0, 0.5, ALMOST_ONE):
            verdict = decide(traversal, row, [coin] * 3, order)
            assert np.isfinite(verdict.rest).all()
            assert verdict.rest[0].sum() > 0
            assert not ((verdict.rest[0] > 0) & (jnp.array(row) == 0)).any() or int(verdict.count[0]) == 2


def test_rejection_at_the_edges() -> None:
    tree = draft_tree(np.array([0, 1, 2]), np.arange(3) - 1)

    def reject(p: list[float], q: list[float], coin: float) -> Verdict:
        rows, drafted = (jnp.array([[law, [0.2, 0.3, 0.5], [1 / 3] * 3]], jnp.float32) for law in (p, q))
        coins = jnp.array([[coin, ALMOST_ONE, 0]], jnp.float32)
        return chain_rejection(tree, rows, Noise(coins, coins), max_depth=2, drafted=drafted)

    assert int(reject([0.5, 0.0, 0.5], [0.0, 1.0, 0.0], 0.0).count[0]) == 1  # never a token of probability 0
    assert int(reject([0.2, 0.6, 0.2], [0.4, 0.2, 0.4], ALMOST_ONE).count[0]) == 3  # p >= q is always accepted
    verdict = reject([0.6, 0.2, 0.2], [0.2, 0.4, 0.4], 0.75)
    np.testing.assert_allclose(verdict.rest[0], [0.4, 0, 0], atol=1e-7)
    verdict = reject([0.0, 0.9999999, 0.0], [0.0, 1.0, 0.0], ALMOST_ONE)  # nothing is left but what p holds
    np.testing.assert_allclose(verdict.rest[0], [0, 0.9999999, 0])


def test_order_of_siblings_is_plackett_luce() -> None:
    """Keys log q + G with G = -log(-log u): probabilities .6, .3, .1 and uniforms .5, .9, .1 give the order 1, 0, 2.

    A coin of 0 accepts the first child in the order that the target finds possible.
    """
    scores, gumbel = np.log([1, 0.6, 0.3, 0.1]), -np.log(-np.log([0.5, 0.5, 0.9, 0.1]))
    tree = draft_tree(np.array([0, 0, 1, 2]), np.array([-1, 0, 0, 0]), scores=scores)
    rows = jnp.full((1, 4, 4), 0.25)
    noise = Noise(jnp.asarray(gumbel[None], jnp.float32), jnp.zeros((1, 4)))
    assert compiled(traversal, 1)(tree, rows, noise).path[0].tolist() == [0, 2]
    rows = rows.at[0, 0].set(jnp.array([0.65, 0, 0.35, 0]))  # both others keep a residual: p - q = .05 and .25
    assert compiled(traversal, 1)(tree, rows, noise).path[0].tolist() == [0, 1]
    rows = rows.at[0, 0].set(jnp.array([0, 0, 0.5, 0.5]))
    assert compiled(traversal, 1)(tree, rows, noise).path[0].tolist() == [0, 3]


def test_noise_of_a_round_depends_on_its_seed_and_place_only() -> None:
    noise = verification_noise(jnp.array([3, 4, 3]), jnp.array([7, 7, 8]), 64)
    np.testing.assert_array_equal(noise.coins[1], verification_noise(jnp.array([4]), jnp.array([7]), 64).coins[0])
    values = np.concatenate([np.asarray(part).ravel() for part in noise])
    assert len(np.unique(values)) == values.size
    assert np.asarray(noise.coins).min() >= 0
    assert np.asarray(noise.coins).max() < 1
    assert np.abs(np.corrcoef(np.concatenate([noise.coins, noise.order]))[~np.eye(6, dtype=bool)]).max() < 5 / 8
