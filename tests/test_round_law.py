"""The real jitted round on a tiny model: the first three tokens have their exact law, for every method and filter.

Enumeration proves the rules (test_verifiers.py); this proves that the round applies them: that noise of different
positions, rounds and streams is independent, that filters reach every node, that the right state is committed.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filter_cases import CASES, FilterCase
from scipy.stats import chi2
from tiny_model import BATCH, BUDGET, LENGTH, VOCAB, draw, draw_batch, exact_law, optimised, write

import tfm_jax.decode
from tfm_jax.config import Method, Verifier
from tfm_jax.sampling import AcceptedPath
from tfm_jax.tree import DraftTree
from tfm_jax.verifiers import accept

SAMPLED = tuple(case for case in CASES if case.temperature > 0 and not case.joint)
ONE_BY_ONE = tuple(case for case in SAMPLED if case.name != "sequential")
GREEDY = next(case for case in CASES if case.temperature == 0)
JOINT = tuple(case for case in CASES if case.joint)
RULES: tuple[tuple[Method, Verifier], ...] = (
    ("tfm", "target_only"),
    ("tfm", "traversal"),
    ("ddtree", "target_only"),
    ("chain", "target_only"),
    ("chain", "rejection"),
    ("ar", "target_only"),
)

pytestmark = pytest.mark.slow
DRAWS = 20_000
LEAST_P = 1e-5  # some 120 statistics at fixed seeds: a right program fails here once in 800 sets of seeds


def p_values(tokens: np.ndarray, case: FilterCase) -> Iterator[float]:
    """Of Pearson's statistic for the first, second and third token, and for all three at once."""
    law = exact_law(case)
    for step in range(LENGTH):
        marginal = law.sum(axis=tuple(axis for axis in range(LENGTH) if axis != step))
        yield _p_value(np.bincount(tokens[:, step], minlength=VOCAB), marginal * len(tokens))
    number = tokens @ VOCAB ** np.arange(LENGTH)[::-1]
    yield _p_value(np.bincount(number, minlength=VOCAB**LENGTH), law.ravel() * len(tokens))


def _p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Cells that expect fewer than 5 become one; a draw of probability 0 has p-value 0."""
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    cells = int(kept.sum())
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return float(chi2.sf(statistic, cells - 1)) if cells > 1 else 1.0


def check(found: dict[FilterCase, np.ndarray], draws: int) -> None:
    for case, tokens in found.items():
        assert tokens.shape == (draws, LENGTH)
        assert min(p_values(tokens, case)) > LEAST_P, f"{case}: p-values {list(p_values(tokens, case))}"


def test_the_round_has_the_exact_law_and_a_text_its_seed() -> None:
    """One test, so that everything is drawn once: with `target_only`, what is drafted changes none of 100,000 texts."""
    texts = {rule: draw(*rule, ONE_BY_ONE, DRAWS) for rule in RULES}
    for (_, verifier), found in texts.items():
        check(found, DRAWS)
        if verifier == "target_only":
            for case in ONE_BY_ONE:
                np.testing.assert_array_equal(found[case], texts["ar", "target_only"][case])


def test_chosen_steps_and_budgets_keep_the_exact_law() -> None:
    """With the rule whose coins a choice that saw them would bias; texts of `target_only` do not change at all."""
    check(draw("tfm", "traversal", ONE_BY_ONE, DRAWS, budgets=(3, BUDGET)), DRAWS)
    chosen, plain = (
        draw("tfm", "target_only", ONE_BY_ONE[:1], BATCH, budgets=budgets) for budgets in ((3, BUDGET), ())
    )
    np.testing.assert_array_equal(*(texts[ONE_BY_ONE[0]] for texts in (chosen, plain)))


@pytest.mark.slow  # both: whichever of the two `-m` leaves out, this stays out
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("method", "verifier"), [*RULES, ("ddtree", "traversal"), ("chain", "traversal")])
def test_the_round_has_the_exact_law_over_more_draws(method: Method, verifier: Verifier) -> None:
    for cases in (SAMPLED, JOINT):
        check(draw(method, verifier, cases, 10 * DRAWS), 10 * DRAWS)


@pytest.mark.parametrize(("method", "verifier"), RULES)
def test_a_text_depends_neither_on_its_row_nor_on_its_neighbours(method: Method, verifier: Verifier) -> None:
    """Nor does temperature 0 draw anything, whatever the verifier."""
    cases = (*ONE_BY_ONE, GREEDY)
    of_row, seeds = np.arange(BATCH) % len(cases), np.arange(BATCH)
    order = np.random.default_rng(0).permutation(BATCH)
    text = draw_batch(method, verifier, cases, of_row, seeds)
    np.testing.assert_array_equal(draw_batch(method, verifier, cases, of_row[order], seeds[order]), text[order])
    alone = draw_batch(method, verifier, cases, np.zeros(BATCH, int), seeds)
    np.testing.assert_array_equal(alone[of_row == 0], text[of_row == 0])
    likeliest = np.unravel_index(exact_law(GREEDY).argmax(), exact_law(GREEDY).shape)
    np.testing.assert_array_equal(text[of_row == len(cases) - 1], [likeliest] * (of_row == len(cases) - 1).sum())


def raw_bonus(
    tree: DraftTree, logits: jax.Array, lengths: jax.Array, temperature: jax.Array, seed: jax.Array, **options: object
) -> AcceptedPath:
    """Broken on purpose: the token after the path is drawn afresh, from the whole law."""
    accepted = accept(tree, logits, lengths, temperature, seed, **options)
    last = accepted.count[:, None] - 1
    leaf = jnp.take_along_axis(accepted.path, last, axis=1)
    law = jnp.take_along_axis(logits, leaf[..., None], axis=1)[:, 0] / temperature[:, None]
    keys = jax.vmap(jax.random.key)(seed + lengths * 7919)
    bonus = jax.vmap(jax.random.categorical)(keys, law).astype(jnp.int32)
    tokens = jnp.where(jnp.arange(accepted.tokens.shape[1]) == last, bonus[:, None], accepted.tokens)
    return accepted._replace(tokens=tokens, bonus=bonus)


def test_a_broken_verifier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 draws are enough to see it."""
    monkeypatch.setattr(tfm_jax.decode, "accept", raw_bonus)
    broken = optimised(lambda params, state: write(params, state))  # noqa: PLW0108 - jit knows `write` from before
    found = draw("chain", "target_only", ONE_BY_ONE[:1], 2000, broken)
    with pytest.raises(AssertionError, match="plain"):
        check(found, 2000)
