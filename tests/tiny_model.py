"""A random hybrid trio with a vocabulary of 8, whose law of three tokens can be written down, and draws from it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filter_cases import FilterCase, filtered_law

from tfm_jax.budget import start_ledger
from tfm_jax.config import DecodePlan, Method, Models, TreePlan, Verifier
from tfm_jax.decode import Params, bind, emit_first, empty_state, prefill_piece, run_rounds, start_transcript
from tfm_jax.objectives import drafter_network, target_network, weaver_network
from tfm_jax.presets import tiny_trio
from tfm_jax.state import DecodeState, Filters

VOCAB, BATCH, BUDGET, LENGTH = 8, 1024, 7, 3
PROMPT = (5, 2, 6)
_TRIO = tiny_trio()
_TARGET = dataclasses.replace(
    _TRIO.target,
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    layer_types=("linear_attention", "full_attention"),
    head_dim=8,
    rotary_dim=4,
    tied_embeddings=False,
    max_positions=64,
    key_heads=1,
    value_heads=2,
    key_dim=4,
    value_dim=4,
)
_DRAFTER = dataclasses.replace(
    _TRIO.drafter,
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    layer_causal=(False,),
    layer_windows=(0,),
    head_dim=8,
    target_layers=(0, 1),
    max_positions=64,
)
_WEAVER = dataclasses.replace(_TRIO.weaver, hidden_size=16, embed_size=16, rank=8, mlp_size=8)
MODELS = Models(_TARGET, _DRAFTER, _WEAVER)


@functools.cache
def params() -> Params:
    """Random weights; the head is scaled up, so that the target has opinions."""
    dtype = jnp.dtype(jnp.float32)
    networks = {
        "target": target_network(_TARGET, dtype),
        "drafter": drafter_network(_DRAFTER, dtype),
        "weaver": weaver_network(_WEAVER, dtype),
    }
    made = {name: network.initial(seed) for seed, (name, network) in enumerate(networks.items())}
    made["target"]["lm_head"]["kernel"] *= 5.0
    modules = bind(MODELS, made)
    made["tables"] = modules.weaver.tables(modules.target.embed_tokens.embedding[...], modules.target.head_rows())
    return made


@functools.cache
def exact_law(case: FilterCase) -> np.ndarray:
    """Law of the first three tokens after the prompt, from whole sequences and the oracle's filters: [8, 8, 8]."""
    law = np.ones(())
    for step in range(LENGTH):
        rows = np.array([filtered_law(row, case) for row in _logits(step)]).reshape(*[VOCAB] * (step + 1))
        law = law[..., None] * rows
    return law


@functools.cache
def _logits(step: int) -> np.ndarray:
    """The target's logits after the prompt and every prefix of `step` tokens, in the order of their numbers."""
    texts = jnp.asarray([[*PROMPT, *prefix] for prefix in itertools.product(range(VOCAB), repeat=step)])
    target = bind(MODELS, params()).target
    hidden = jax.jit(lambda texts: target.sequence(texts, jnp.ones(texts.shape, bool)).hidden[:, -1])(texts)
    return np.asarray(target.logits(hidden), np.float64)


def optimised(function: Callable, **options: Any) -> Callable:  # noqa: ANN401 - options of `jax.jit`
    """For programs that, unlike the rest of the suite's, take their time to run, not to compile."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 1}, **options)


def write(params: Params, state: DecodeState) -> jax.Array:
    """The whole text of every row, after `emit_first`: [batch, 3]."""
    return run_rounds(params, state, start_transcript(state, LENGTH), jnp.asarray(LENGTH))[1].tokens


_first, _write = optimised(emit_first), optimised(write)


def draw(
    method: Method,
    verifier: Verifier,
    cases: Sequence[FilterCase],
    draws: int,
    jitted_write: Callable = _write,
    budgets: tuple[int, ...] = (),
) -> dict[FilterCase, np.ndarray]:
    """`draws` texts of three tokens for every case, [draws, 3] each; the cases share the batches of 1,024."""
    of_row = np.arange(BATCH) % len(cases)
    batches = -(-draws // (BATCH // len(cases)))
    seeds = np.arange(batches * BATCH).reshape(batches, BATCH)
    texts = [draw_batch(method, verifier, cases, of_row, some, jitted_write, budgets) for some in seeds]
    tokens, of_text = np.concatenate(texts), np.tile(of_row, batches)
    return {case: tokens[of_text == index][:draws] for index, case in enumerate(cases)}


def draw_batch(
    method: Method,
    verifier: Verifier,
    cases: Sequence[FilterCase],
    of_row: np.ndarray,
    seeds: np.ndarray,
    jitted_write: Callable = _write,
    budgets: tuple[int, ...] = (),
) -> np.ndarray:
    """One batch: row i has the filters of case `of_row[i]` and its own seed; any budgets are chosen round by round."""
    shared = verifier == "target_only" and method != "ar"
    tree = TreePlan(pruned=method == "tfm", shared_noise=shared, budgets=budgets)
    ledger = start_ledger(1.0 + 0.02 * jnp.array(budgets), step_seconds=0.2) if budgets else None
    plan = DecodePlan(MODELS, method, BUDGET, sample=True, verifier=verifier, tree=tree)
    temperature, filters = _mixed(cases, of_row)
    asked = {"temperature": temperature, "filters": filters, "seed": jnp.asarray(seeds, jnp.int32)}
    state = _first(params(), dataclasses.replace(_prefilled(method == "ar"), **asked))
    return np.asarray(jitted_write(params(), dataclasses.replace(state, plan=plan, ledger=ledger)))


@functools.cache
def _prefilled(plain: bool) -> DecodeState:  # noqa: FBT001
    plan = DecodePlan(MODELS, "ar" if plain else "tfm", BUDGET, sample=True)
    state = empty_state(
        plan,
        capacity=16,
        limit=jnp.full(BATCH, LENGTH, jnp.int32),
        temperature=jnp.ones(BATCH),
        seed=jnp.zeros(BATCH, jnp.int32),
        stop_ids=jnp.full(1, -1, jnp.int32),
        dtype=jnp.float32,
    )
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (BATCH, len(PROMPT)))
    return jax.jit(prefill_piece)(params(), state, tokens, jnp.ones(tokens.shape, bool))


def _mixed(cases: Sequence[FilterCase], of_row: np.ndarray) -> tuple[jax.Array, Filters]:
    """Temperature and filters of a batch whose row i has the case `of_row[i]`."""
    column = {
        name: jnp.asarray(np.array([getattr(case, name) for case in cases])[of_row], dtype)
        for name, dtype in (("temperature", "float32"), ("top_k", "int32"), ("top_p", "float32"), ("min_p", "float32"))
    }
    bias = np.zeros((len(cases), VOCAB), np.float32)
    for row, case in enumerate(cases):
        for token, value in case.bias:
            bias[row, token] = value
    (joint,) = {case.joint for case in cases}
    temperature = column.pop("temperature")
    return temperature, Filters(bias=jnp.asarray(bias[of_row]), joint=joint, **column)
