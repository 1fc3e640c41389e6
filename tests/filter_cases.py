"""Filters to test with, and their law as one would compute it by hand: sorted, in float64, one row at a time."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from tfm_jax.state import Filters


@dataclasses.dataclass(frozen=True)
class FilterCase:
    """One row's filters."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    joint: bool = False
    bias: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        return self.name

    def batch(self, rows: int, vocab: int) -> Filters:
        """The same for every row; what is off is left out."""
        bias = np.zeros((rows, vocab))
        for token, value in self.bias:
            bias[:, token] = value
        return Filters(
            bias=jnp.asarray(bias) if self.bias else None,
            top_k=jnp.full(rows, self.top_k) if self.top_k else None,
            top_p=jnp.full(rows, self.top_p) if self.top_p < 1 else None,
            min_p=jnp.full(rows, self.min_p) if self.min_p > 0 else None,
            joint=self.joint,
        )


CASES = (
    FilterCase("plain"),
    FilterCase("greedy", temperature=0.0, top_k=3),
    FilterCase("top_k", top_k=3),
    FilterCase("top_p", top_p=0.7, temperature=1.3),
    FilterCase("min_p", min_p=0.15, temperature=0.8),
    FilterCase("sequential", temperature=1.4, top_k=4, top_p=0.8, min_p=0.1),
    FilterCase("joint", temperature=1.4, top_k=4, top_p=0.8, min_p=0.1, joint=True),
    FilterCase("biased", top_p=0.9, bias=((0, 1.5), (1, -np.inf))),
)


def filtered_law(logits: np.ndarray, case: FilterCase) -> np.ndarray:
    """The law of one row."""
    logits = logits.astype(np.float64)
    for token, value in case.bias:
        logits[token] += value
    order = np.argsort(-logits, kind="stable")  # the lower id first among equals
    scaled = (logits - logits.max()) / (case.temperature or 1)
    law = np.exp(scaled) / np.exp(scaled).sum()

    def keep_first(count: int) -> None:
        law[order[count:]] = 0
        law[:] /= law.sum()

    def keep_top_p() -> None:
        if case.top_p < 1:
            before = np.cumsum(law[order]) - law[order]
            keep_first(int((before < case.top_p).sum()))

    def keep_top_k() -> None:
        if case.top_k:
            keep_first(case.top_k)

    for step in (keep_top_p, keep_top_k) if case.joint else (keep_top_k, keep_top_p):
        step()
    law[law < case.min_p * law.max()] = 0
    law /= law.sum()
    return law if case.temperature else np.eye(len(law))[order[0]]
