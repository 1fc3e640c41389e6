"""What is kept between two rounds, what one forward pass leaves for commit, and how rows enter a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple, dataclass_transform

import jax
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from tfm_jax.config import DecodePlan


@dataclass_transform(frozen_default=True)
def pytree_dataclass[Class](cls: type[Class]) -> type[Class]:
    """Frozen dataclass registered as a pytree; fields with `metadata={"static": True}` belong to its structure.

    Unflattening does not call `__init__`: transformations put objects, shapes and shardings where arrays were, and a
    run-time type check of the constructor must not see those.
    """
    data = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(data)  # pyrefly: ignore[bad-argument-type]
    leaves = [field.name for field in fields if not field.metadata.get("static")]
    static = [field.name for field in fields if field.metadata.get("static")]

    def flatten(value: Class) -> tuple[list, tuple]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in leaves]
        return children, tuple(getattr(value, name) for name in static)

    def unflatten(aux: tuple, children: Iterable) -> Class:
        value = object.__new__(data)
        for name, child in zip((*leaves, *static), (*children, *aux), strict=True):
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(data, flatten, unflatten)
    return data


@pytree_dataclass
class KVCache:
    """Keys (after norm and rope) and values of one attention layer; rows at and beyond a row's length are free."""

    keys: Float[Array, "batch kv_heads capacity head"]
    values: Float[Array, "batch kv_heads capacity head"]


@pytree_dataclass
class DeltaState:
    """One Gated DeltaNet layer: recurrent state in float32, key axis first, and the last inputs of the convolution."""

    recurrent: Float[Array, "batch value_heads key value"]
    conv: Float[Array, "batch window channels"]


class KVRows(NamedTuple):
    """Keys (after norm and rope) and values of the tokens of one forward pass, not yet in any cache."""

    keys: Float[Array, "batch nodes kv_heads head"]
    values: Float[Array, "batch nodes kv_heads head"]


class DeltaTape(NamedTuple):
    """What commit needs of one Gated DeltaNet layer's tree pass: see `pallas_kernels.commit_states`."""

    inputs: Float[Array, "batch nodes channels"]  # before the convolution
    key: Float[Array, "batch nodes key_heads key"]
    update: Float[Array, "batch nodes value_heads value"]
    path_decay: Float[Array, "batch nodes value_heads"]


@pytree_dataclass
class TargetState:
    """Caches of the target; `lengths` counts the tokens that every one of them holds."""

    lengths: Int[Array, " batch"]
    layers: tuple[KVCache | DeltaState, ...]


@pytree_dataclass
class Filters:
    """What of the target's law may be drawn, one value a row; None where no row of the batch asks for a filter.

    `joint` says that top-p looks at the whole law and comes before top-k, instead of at what top-k left.
    """

    bias: Float[Array, "batch vocab"] | None = None  # added to the logits; −inf bans a token
    top_k: Int[Array, " batch"] | None = None  # 0: off
    top_p: Float[Array, " batch"] | None = None  # 1: off
    min_p: Float[Array, " batch"] | None = None  # 0: off
    joint: bool = dataclasses.field(default=False, metadata={"static": True})


@pytree_dataclass
class Penalties:
    """What the text so far costs a token, one value a row, and that text: see `filters.penalise`."""

    repetition: Float[Array, " batch"]  # 1: off
    frequency: Float[Array, " batch"]  # 0: off
    presence: Float[Array, " batch"]  # 0: off
    prompted: Bool[Array, "batch vocab"]  # tokens of the prompt
    counts: Int[Array, "batch vocab"]  # committed new tokens


class Ledger(NamedTuple):
    """What the choice of budgets knows of the past; see `tfm_jax.budget`."""

    costs: Float[Array, " budgets"]  # seconds of a round with each of the plan's budgets and the largest tree
    step_seconds: Float[Array, ""]  # that it takes less for every step that the growth of the tree leaves out
    node_seconds: Float[Array, ""]  # that a round takes more for every node that is verified
    seconds: Float[Array, ""]  # of all rounds so far, by these costs
    promised: Float[Array, ""]  # drafted tokens that the scores of the verified nodes promised
    accepted: Float[Array, ""]  # drafted tokens that were emitted


@pytree_dataclass
class DecodeState:
    """Everything a decode round reads and writes.

    Invariant for a live row: `target.lengths` = rows of the drafter's caches = prompt length + emitted − 1, because the
    last emitted token (`root`) has not been through the target yet.
    """

    target: TargetState
    drafter: tuple[KVCache, ...]
    root: Int[Array, " batch"]
    feature: Float[Array, "batch hidden"]  # the target's final-norm output at the last committed token
    emitted: Int[Array, " batch"]
    limit: Int[Array, " batch"]  # new tokens wanted
    done: Bool[Array, " batch"]
    temperature: Float[Array, " batch"]
    seed: Int[Array, " batch"]
    stop_ids: Int[Array, " stops"]
    filters: Filters
    penalties: Penalties | None
    ledger: Ledger | None  # None unless budgets are chosen round by round
    plan: DecodePlan = dataclasses.field(metadata={"static": True})


def write_rows(cache: KVCache, rows: KVRows, start: Int[Array, " batch"], count: Int[Array, " batch"]) -> KVCache:
    """Writes the first `count` rows at `start`, in place; see `pallas_kernels.write_rows`."""
    write = functools.partial(pallas_kernels.write_rows, start=start, count=count)
    return KVCache(write(cache.keys, rows.keys), write(cache.values, rows.values))
