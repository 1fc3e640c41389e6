"""The rule that chooses steps and budget keeps the target's law, by enumeration; one that sees coins does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import Draws, coin_draws, make_small_tree, prefix_errors
from test_verifiers import NODES, VOCAB, Case, check_coins, check_traversal, run_rule
from weavers import jit_quickly

from pallas_kernels.xla_growth import NewNodes
from tfm_jax.budget import choose_budget, choose_steps, promised_tokens
from tfm_jax.growth import grow_as_worth, growth_stops
from tfm_jax.state import Ledger
from tfm_jax.tree import first_nodes
from tfm_jax.verifiers import target_only, traversal

pytestmark = pytest.mark.slow

BUDGETS, DEPTH, STEPS, WIDTH = (2, 4, NODES - 1), 3, 5, 1


@jit_quickly
def _grow(ids: jax.Array, table: jax.Array, ledger: Ledger) -> tuple:
    """A round of one prompt with 20 tokens so far, as `tfm_jax.decode` drafts it: tree, steps, index of the budget."""
    emitted = jnp.array([20])

    def step(carry: jax.Array, nodes: NewNodes) -> tuple[jax.Array, jax.Array]:
        return carry, table[nodes.depths, nodes.tokens]

    def choose(waiting: jax.Array) -> jax.Array:
        return choose_steps(jnp.sum(jnp.exp(waiting)), growth_stops(STEPS), emitted, ledger)

    guesses = jnp.full((1, DEPTH), -1.0)
    options = {"budget": BUDGETS[-1], "width": WIDTH, "steps": STEPS, "ahead": 1, "guess_scores": guesses}
    grown = grow_as_worth(jnp.array([0]), ids[None], step, jnp.int32(0), choose, **options)
    promised = promised_tokens(grown.tree.scores, BUDGETS)[0]
    return grown.tree, grown.steps, choose_budget(promised, jnp.int32(1), emitted, ledger)


def random_case(seed: int) -> tuple[Case, int, int]:
    """A random round after a random past, with the tree that the rule chose; its steps and nodes."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((DEPTH, VOCAB)))[:, :5].astype(np.int32)
    table = rng.standard_normal((DEPTH, VOCAB, 5)).astype(np.float32) * 2
    costs = np.cumsum(rng.uniform(0.05, 0.6, len(BUDGETS))) + 1
    past = (*rng.uniform(0, [0.12, 0.1]), *rng.uniform(5, 20, 3))
    ledger = Ledger(*(jnp.asarray(value, jnp.float32) for value in (costs, *past)))
    tree, steps, choice = _grow(jnp.asarray(ids), jnp.asarray(table), ledger)
    tree = jax.tree.map(lambda rows: np.asarray(rows[0]), first_nodes(tree, BUDGETS[int(choice)]))
    nodes = int(tree.valid.sum())
    law = rng.dirichlet(np.ones(VOCAB), nodes)
    small = make_small_tree(tree.tokens[:nodes], tree.parents[:nodes], law)
    return Case(small, tree.scores[:nodes].astype(float), law), int(steps), nodes - 1


def test_chosen_trees_keep_the_law() -> None:
    """With both rules that use up coins; trees of every budget and number of steps are among them."""
    seen = set()
    for seed in range(40):
        case, *chosen = random_case(seed)
        seen.add(tuple(chosen))
        check_coins(target_only, case)
        check_traversal(traversal, case)
    assert {steps for steps, _ in seen} == set(growth_stops(STEPS))
    assert {nodes for _, nodes in seen} == set(BUDGETS)


def mixed_law(case: Case, kept: int, *, sees_coin: bool) -> float:
    """Largest error of the law where the tree is cut to `kept` nodes half of the time.

    The cut is made when the root's coin is below its first child's probability, or whatever the coin is.
    """
    few = Case(make_small_tree(*(part[:kept] for part in (case.small.tokens, case.small.parents, case.rows))),
               case.scores[:kept], case.rows[:kept])  # fmt: skip
    share = case.rows[0, case.small.tokens[1]]
    worst = 0.0
    for draws in coin_draws(case.small):
        cut = (draws.values[:, 0] < share) if sees_coin else np.full(len(draws.weights), 0.5)
        masses = run_rule(target_only, case, Draws(draws.values, draws.weights * (1 - cut)))
        masses[:kept] += run_rule(target_only, few, Draws(draws.values[:, :kept], draws.weights * cut))
        worst = max(worst, float(np.abs(prefix_errors(case.small, masses)).max()))
    return worst


def test_a_rule_that_sees_coins_breaks_the_law() -> None:
    """Growth that leaves out a step just when its nodes would be accepted; the same by a coin of its own does not."""
    for seed in range(5):
        case = random_case(seed)[0]
        assert mixed_law(case, 1, sees_coin=False) < 1e-10
        assert mixed_law(case, 1, sees_coin=True) > 1e-2
