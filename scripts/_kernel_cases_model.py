"""Workloads of `bench.py kernels` that go through the model: commit of all layers, candidates, the Weaver's tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _kernel_cases import forms_of
from _kernel_workload import (
    WINDOW,
    Normals,
    Shapes,
    Workload,
    ancestors_of,
    exact,
    random_parents,
    relative_error,
    taps_of,
)
from flax import nnx

import pallas_kernels
from pallas_kernels import reference, runs_here
from tfm_jax.config import WeaverConfig
from tfm_jax.growth import pruned_schedule
from tfm_jax.tree import DraftTree
from tfm_jax.weaver import Weaver, WeaverTables

_STATE_BARS = {"default": 5e-4, "highest": 5e-6}
_SCORE_BAR = 1e-2  # scores are sums of rounded logits' differences
_TREE_NODES = 64
_CAPACITY = 4096
_LENGTH = 2048
_TOP_K_LAYERS = 8  # more than a cache holds


class _Caches(NamedTuple):
    """What a commit changes, per layer; keys and values of the attention layers are entries of their own."""

    states: tuple[jax.Array, ...]
    windows: tuple[jax.Array, ...]
    rows: tuple[jax.Array, ...]


class _Tape(NamedTuple):
    """What verification of a tree leaves for it."""

    keys: tuple[jax.Array, ...]
    updates: tuple[jax.Array, ...]
    path_decays: tuple[jax.Array, ...]
    inputs: tuple[jax.Array, ...]
    rows: tuple[jax.Array, ...]


def commit_workloads(shapes: Shapes, precision: str) -> Iterator[Workload]:
    """The accepted path into the caches of all layers."""
    parents = random_parents(_TREE_NODES)
    ancestors = ancestors_of(parents)
    leaf = int(np.argmax(ancestors.sum(axis=1) >= shapes.accepted))
    nodes = np.flatnonzero(ancestors[leaf])

    def operands(layer: int) -> tuple[Any, ...]:
        path, count = jnp.asarray(nodes, jnp.int32)[None], jnp.array([len(nodes)], jnp.int32)
        taps = jnp.asarray(taps_of(parents), jnp.int32)[None]
        return *_caches(shapes, layer), taps, jnp.array([_LENGTH], jnp.int32), path, count

    def run(form: Any, _: str) -> Callable[..., Any]:  # noqa: ANN401
        form_of_rows: Any = form if form in forms_of("commit_rows") else "auto"

        def commit(caches: _Caches, tape: _Tape, taps: Any, lengths: Any, path: Any, count: Any) -> Any:  # noqa: ANN401
            states = pallas_kernels.commit_states(
                caches.states, tape.keys, tape.updates, tape.path_decays, path, count, implementation=form
            )
            old = (caches.windows, tape.inputs, taps, caches.rows, tape.rows, lengths, path, count)
            return _Caches(states, *pallas_kernels.commit_rows(*old, implementation=form_of_rows)), lengths + count

        return commit

    def oracle(caches: _Caches, tape: _Tape, _: Any, __: Any, path: Any, count: Any) -> list[np.ndarray]:  # noqa: ANN401
        """States of the first and the last layer, a window and two caches."""
        layers = (caches.states, tape.keys, tape.updates, tape.path_decays)
        operands = (tuple(exact(x[0], x[-1])) for x in layers)
        states = reference.commit_states(*operands, path=np.asarray(path), count=np.asarray(count))
        window = exact(tape.inputs[-1][:, nodes[-WINDOW:]])
        return [*states, *window, *(exact(x[:, nodes])[0].swapaxes(1, 2) for x in tape.rows[-2:])]

    def error(actual: tuple[_Caches, jax.Array], expected: list[np.ndarray]) -> float:
        caches, _ = actual
        written = (x[:, :, _LENGTH : _LENGTH + len(nodes)] for x in caches.rows[-2:])
        results = (caches.states[0], caches.states[-1], caches.windows[-1], *written)
        return max(relative_error(exact(x)[0], y) for x, y in zip(results, expected, strict=True))

    state = shapes.value_heads * shapes.width**2 * 4
    accepted_delta = len(nodes) * (2 * shapes.key_heads * shapes.width + 4 * shapes.value_heads * (shapes.width + 1))
    window, accepted_rows = 2 * WINDOW * shapes.channels, len(nodes) * 2 * 2 * shapes.kv_heads * shapes.head
    yield Workload(
        op="commit",
        case=f"accepted={len(nodes)}",
        forms=forms_of("commit_states"),
        operands=operands,
        run=run,
        oracle=oracle,
        error=error,
        bar=_STATE_BARS[precision],
        bytes=shapes.gdn_layers * (2 * state + accepted_delta + 2 * window)
        + shapes.attention_layers * 2 * accepted_rows,
        operations=shapes.gdn_layers * shapes.value_heads * 2 * len(nodes) * shapes.width**2,
        buffers=("own",),
        donates=True,
    )


def top_k_workloads(shapes: Shapes, _: str) -> Iterator[Workload]:
    """The drafter's candidates of every depth; ids and values must be exact."""

    def run(form: Any, _: str) -> Callable[..., Any]:  # noqa: ANN401
        return lambda logits: pallas_kernels.top_k(logits, shapes.pool, implementation=form)

    def oracle(logits: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        (rows,) = exact(logits)
        ids = np.argsort(-rows, axis=-1, kind="stable")[..., : shapes.pool]
        return np.take_along_axis(rows, ids, axis=-1), ids

    def error(actual: Any, expected: tuple[np.ndarray, np.ndarray]) -> float:  # noqa: ANN401
        values, ids = actual
        return relative_error(values, expected[0]) + float(np.mean(np.asarray(ids) != expected[1]))

    logits = (1, shapes.depth, shapes.vocab)
    yield Workload(
        op="top_k",
        case=f"k={shapes.pool} of {shapes.depth} x {shapes.vocab}",
        forms=forms_of("top_k"),
        operands=lambda layer: (Normals(layer)(*logits, scale=3.0),),
        run=run,
        oracle=oracle,
        error=error,
        bar=0.0,
        bytes=4 * shapes.depth * shapes.vocab + 8 * shapes.depth * shapes.pool,
        operations=0,
        layers=_TOP_K_LAYERS,
    )


def weaver_workloads(shapes: Shapes, _: str) -> Iterator[Workload]:
    """A whole tree; the oracle is the same tree in float32, compared by its nodes' scores, best first."""
    config = WeaverConfig(
        generation="w1",
        hidden_size=shapes.hidden,
        embed_size=shapes.hidden,
        rank=shapes.rank,
        layers=1,
        heads=shapes.weaver_heads,
        mlp_size=shapes.rank,
        max_depth=shapes.depth,
        pool_size=shapes.pool,
    )
    graph = nnx.graphdef(nnx.eval_shape(lambda: Weaver(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0))))

    def operands(layer: int) -> tuple[Any, ...]:
        normal = Normals(layer)
        weaver = nnx.to_pure_dict(nnx.state(Weaver(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(layer))))
        tables = WeaverTables(
            normal(shapes.vocab, shapes.rank, dtype=jnp.bfloat16),
            normal(shapes.vocab, shapes.rank, dtype=jnp.bfloat16, scale=2 * shapes.rank**-0.5),
            nnx.merge(graph, weaver).kernel_weights() if runs_here("weaver_tree", "triton") else None,
        )
        ids = jax.random.choice(jax.random.key(layer), shapes.vocab, (1, shapes.depth, shapes.pool), replace=False)
        scores = jnp.sort(normal(1, shapes.depth, shapes.pool, scale=2.0), axis=-1, descending=True)
        feature = normal(1, shapes.hidden, dtype=jnp.bfloat16)
        hidden = normal(1, shapes.depth, shapes.hidden, dtype=jnp.bfloat16)
        return weaver, tables, jnp.zeros((1,), jnp.int32), feature, hidden, ids.astype(jnp.int32), scores

    schedule = pruned_schedule(shapes.tree)

    def run(form: str, _: str) -> Any:  # noqa: ANN401
        def build(weaver: Any, tables: Any, root: Any, *drafts: jax.Array) -> DraftTree:  # noqa: ANN401
            if form == "triton" and tables.weights is None:
                message = "weaver_tree cannot run as triton: it needs an NVIDIA GPU and jax-triton"
                raise ValueError(message)
            tables = tables if form == "triton" else tables._replace(weights=None)
            bound = nnx.merge(graph, weaver)
            return bound.build_tree(root, *drafts, tables, budget=shapes.tree, **schedule._asdict())

        return build

    def oracle(*operands: Any) -> np.ndarray:  # noqa: ANN401
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, operands)
        return np.asarray(jax.jit(run("xla", "highest"))(*wide).scores, np.float64)

    weights = 2 * 6 * shapes.rank**2  # q, k, v, out and the two matrices of the MLP, a step
    prompt = 2 * (shapes.hidden + 3 * shapes.rank) * shapes.rank
    gathered = 2 * shapes.depth * shapes.pool * shapes.rank
    steps = schedule.steps or 1
    rows = steps * schedule.width * (1 + schedule.ahead) * (2 * 6 * shapes.rank**2 + 2 * shapes.pool * shapes.rank)
    yield Workload(
        op="weaver_tree",
        case=f"nodes={shapes.tree}",
        forms=("triton", "xla"),
        operands=operands,
        run=run,
        oracle=oracle,
        error=lambda tree, scores: relative_error(tree.scores, scores),
        bar=_SCORE_BAR,
        bytes=steps * weights + prompt + gathered,  # as if no weight stayed in a cache
        operations=rows,
        buffers=("hot",),
    )


def _caches(shapes: Shapes, seed: int) -> tuple[_Caches, _Tape]:
    """Of all layers."""
    normal = Normals(seed)
    gates = (1, _TREE_NODES, shapes.value_heads)
    state = (1, shapes.value_heads, shapes.width, shapes.width)
    key = (1, _TREE_NODES, shapes.key_heads, shapes.width)
    cache, rows = (1, shapes.kv_heads, _CAPACITY, shapes.head), (1, _TREE_NODES, shapes.kv_heads, shapes.head)

    def layers(count: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> tuple[jax.Array, ...]:  # noqa: ANN401
        return tuple(normal(*shape, dtype=dtype, scale=scale) for _ in range(count))

    deltas, caches = shapes.gdn_layers, 2 * shapes.attention_layers
    return (
        _Caches(
            layers(deltas, *state, dtype=jnp.float32, scale=0.05),
            layers(deltas, 1, WINDOW, shapes.channels),
            layers(caches, *cache),
        ),
        _Tape(
            layers(deltas, *key),
            layers(deltas, *gates, shapes.width, dtype=jnp.float32, scale=0.1),
            tuple(-jnp.abs(x) for x in layers(deltas, *gates, dtype=jnp.float32, scale=0.1)),
            layers(deltas, 1, _TREE_NODES, shapes.channels),
            layers(caches, *rows),
        ),
    )
