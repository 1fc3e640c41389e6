"""Workloads of `bench.py kernels` that are front doors of `pallas_kernels`: trees, attention, text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _kernel_fla import NAME as FLA
from _kernel_fla import FlaProgram
from _kernel_workload import (
    Normals,
    Shapes,
    Workload,
    ancestors_of,
    exact,
    nbytes,
    random_parents,
    relative_error,
    taps_of,
)

import pallas_kernels
from pallas_kernels import GdnChunkResult, GdnTreeResult, Prefix, reference

_BARS = {"default": 5e-4, "highest": 5e-6}
_ROUNDING_BAR = 2.5e-3  # bfloat16 results: rounding alone is 1.7e-3
_CHUNK = 64
_SPARE_ROWS = 256  # a cache is never exactly full
_TEXT_LAYERS = 4  # one layer of a long text is larger than any cache


def forms_of(op: str) -> tuple[str, ...]:
    """Implementations behind a front door, without the oracle."""
    return tuple(form for form in pallas_kernels.implementations(op) if form != "reference")


def gdn_tree_workloads(shapes: Shapes, precision: str) -> Iterator[Workload]:
    """Verification of trees by one GDN layer."""
    for nodes in shapes.nodes:
        ancestors = ancestors_of(random_parents(nodes))[None]

        def operands(layer: int, nodes: int = nodes, ancestors: np.ndarray = ancestors) -> tuple[Any, ...]:
            *rows, state = _gdn_operands(shapes, nodes, layer)
            return (*rows, jnp.asarray(ancestors), state)

        matrix, wide, group = shapes.width**2, shapes.width * nodes**2, shapes.value_heads
        yield Workload(
            op="gdn_tree_verify",
            case=f"nodes={nodes}",
            forms=forms_of("gdn_tree_verify"),
            operands=operands,
            run=_front_door("gdn_tree_verify"),
            oracle=_tree_oracle,
            error=_worst_of("output", "update"),
            bar=_BARS[precision],
            bytes=_traffic("gdn_tree_verify", operands),
            # K S and Q S; then, of lower triangles, the solve and the read-out, and the two Gram matrices.
            operations=group * (4 * nodes * matrix + 2 * wide) + shapes.key_heads * 2 * wide,
            layers=shapes.gdn_layers,
            shared={5: ancestors},
        )


def gdn_chunk_workloads(shapes: Shapes, precision: str) -> Iterator[Workload]:
    """A long text read by one GDN layer; the oracle computes one key head."""
    group = shapes.value_heads // shapes.key_heads

    def operands(layer: int) -> tuple[Any, ...]:
        *rows, state = _gdn_operands(shapes, shapes.tokens, layer)
        return (*rows, jnp.ones((1, shapes.tokens), bool), state)

    def oracle(*operands: jax.Array) -> GdnChunkResult:
        query, key, value, log_decay, beta, valid, state = operands
        parts = (query[:, :, :1], key[:, :, :1], value[:, :, :group], log_decay[..., :group], beta[..., :group])
        q, k, v, g, b, s = exact(*parts, state[:, :group])
        return reference.gdn_chunk(q, k, v, g, b, np.asarray(valid), s)

    def error(actual: GdnChunkResult, expected: GdnChunkResult) -> float:
        output = relative_error(actual.output[:, :, :group], np.asarray(expected.output))
        return max(output, relative_error(actual.state[:, :group], np.asarray(expected.state)))

    matrix, square = shapes.width**2, shapes.width * _CHUNK
    yield Workload(
        op="gdn_chunk",
        case=f"tokens={shapes.tokens}",
        forms=forms_of("gdn_chunk"),
        operands=operands,
        run=_front_door("gdn_chunk"),
        oracle=oracle,
        error=error,
        bar=_BARS[precision],
        bytes=_traffic("gdn_chunk", operands),
        # W S, Q S and the new state; of lower triangles U, W and the read-out, and the two Gram matrices.
        operations=shapes.tokens * (shapes.value_heads * (6 * matrix + 3 * square) + shapes.key_heads * 2 * square),
        layers=min(_TEXT_LAYERS, shapes.gdn_layers),
        foreign={FLA: FlaProgram},
    )


def conv_workloads(shapes: Shapes, _: str) -> Iterator[Workload]:
    """The short convolution of a tree in one GDN layer; its results are what verification reads."""
    keys = shapes.key_heads * shapes.width
    widths = (keys, keys, shapes.channels - 2 * keys)
    for nodes in shapes.nodes:
        taps = taps_of(random_parents(nodes))

        def operands(layer: int, nodes: int = nodes, taps: np.ndarray = taps) -> tuple[Any, ...]:
            normal, width = Normals(layer), taps.shape[1]
            rows = ((1, nodes, shapes.channels), (1, width - 1, shapes.channels), (width, shapes.channels))
            return (*(normal(*shape, dtype=jnp.bfloat16) for shape in rows), jnp.asarray(taps, jnp.int32)[None])

        yield Workload(
            op="tree_conv",
            case=f"nodes={nodes}",
            forms=forms_of("tree_conv"),
            operands=operands,
            run=lambda form, _: functools.partial(_convolve, form, widths),
            oracle=functools.partial(_conv_oracle, widths),
            error=lambda actual, expected: max(map(relative_error, actual, expected)),
            bar=_ROUNDING_BAR,
            bytes=2 * shapes.channels * (2 * nodes + 2 * taps.shape[1] - 1) + 4 * taps.size,
            operations=2 * taps.size * shapes.channels,
            layers=shapes.gdn_layers,
        )


def attention_workloads(shapes: Shapes, _: str) -> Iterator[Workload]:
    """Attention of a tree, and of one node, over a long cache; the oracle computes one key/value head."""
    group = shapes.heads // shapes.kv_heads
    for nodes in shapes.attention_nodes:
        for context in shapes.contexts:
            mask = ancestors_of(random_parents(nodes))[None]
            yield Workload(
                op="tree_attention",
                case=f"nodes={nodes} context={context}",
                forms=forms_of("tree_attention"),
                operands=functools.partial(_attention_operands, shapes, mask, context),
                run=lambda form, _: functools.partial(_attend, form),
                oracle=functools.partial(_dense_attention, group),
                error=lambda actual, expected: relative_error(actual[:, :, :group], expected),
                bar=_ROUNDING_BAR,
                bytes=2 * 2 * shapes.head * ((context + nodes) * shapes.kv_heads + nodes * shapes.heads),
                operations=4 * nodes * shapes.heads * shapes.head * (context + nodes),
                layers=shapes.attention_layers,
                shared={3: mask},
            )


def _front_door(op: str) -> Callable[[str, str], Callable[..., Any]]:
    def choose(form: str, precision: str) -> Callable[..., Any]:
        return functools.partial(getattr(pallas_kernels, op), implementation=form, precision=precision)

    return choose


def _gdn_operands(shapes: Shapes, tokens: int, layer: int) -> tuple[jax.Array, ...]:
    """Query, key, value, log-decay, beta and state, as wide as those of a trained layer."""
    normal, gates = Normals(layer), (1, tokens, shapes.value_heads)
    keys = (1, tokens, shapes.key_heads, shapes.width)
    rate = jnp.exp(normal(shapes.value_heads, scale=0.2) - 3.0)
    return (
        normal(*keys, dtype=jnp.bfloat16),
        normal(*keys, dtype=jnp.bfloat16),
        normal(*gates, shapes.width, dtype=jnp.bfloat16, scale=0.1),
        -rate * jax.nn.softplus(normal(*gates, scale=0.3)),
        jax.nn.sigmoid(normal(*gates)),
        normal(1, shapes.value_heads, shapes.width, shapes.width, scale=0.05),
    )


def _tree_oracle(*operands: jax.Array) -> GdnTreeResult:
    query, key, value, log_decay, beta, ancestors, state = operands
    q, k, v, g, b, s = exact(query, key, value, log_decay, beta, state)
    return reference.gdn_tree_verify(q, k, v, g, b, np.asarray(ancestors), s)


def _worst_of(*fields: str) -> Callable[[GdnTreeResult, GdnTreeResult], float]:
    def error(actual: GdnTreeResult, expected: GdnTreeResult) -> float:
        pairs = ((getattr(actual, field), np.asarray(getattr(expected, field))) for field in fields)
        return max(relative_error(*pair) for pair in pairs)

    return error


def _traffic(op: str, operands: Callable[[int], tuple[Any, ...]]) -> int:
    """Bytes of all operands and results."""
    inputs = jax.eval_shape(lambda: operands(0))
    return nbytes(inputs) + nbytes(
        jax.eval_shape(functools.partial(getattr(pallas_kernels, op), implementation="xla"), *inputs)
    )


def _convolve(form: Any, widths: tuple[int, ...], *operands: Any) -> tuple[jax.Array, ...]:  # noqa: ANN401
    return pallas_kernels.tree_conv(*operands, widths=widths, implementation=form)


def _conv_oracle(widths: tuple[int, ...], *operands: jax.Array) -> tuple[np.ndarray, ...]:
    *arrays, taps = operands
    inputs, window, kernel = exact(*arrays)
    return reference.tree_conv(inputs, window, kernel, np.asarray(taps), widths=widths)


def _attention_operands(shapes: Shapes, mask: np.ndarray, context: int, layer: int) -> tuple[Any, ...]:
    normal, nodes = Normals(layer), mask.shape[1]
    rows = (1, shapes.kv_heads, context + _SPARE_ROWS, shapes.head)
    own = (1, nodes, shapes.kv_heads, shapes.head)
    prefix = Prefix(
        keys=normal(*rows, dtype=jnp.bfloat16),
        values=normal(*rows, dtype=jnp.bfloat16),
        lengths=jnp.array([context], jnp.int32),
        positions=jnp.asarray(context + mask.sum(axis=2) - 1, jnp.int32),
    )
    query = normal(1, nodes, shapes.heads, shapes.head, dtype=jnp.bfloat16)
    key, value = normal(*own, dtype=jnp.bfloat16), normal(*own, dtype=jnp.bfloat16)
    return query, key, value, jnp.asarray(mask), prefix


def _attend(form: Any, query: Any, key: Any, value: Any, mask: Any, prefix: Prefix) -> jax.Array:  # noqa: ANN401
    return pallas_kernels.tree_attention(query, key, value, mask, prefix=prefix, implementation=form)


def _dense_attention(group: int, query: Any, key: Any, value: Any, mask: Any, prefix: Prefix) -> np.ndarray:  # noqa: ANN401
    """One softmax per row over prefix and nodes, for the query heads of the first key/value head."""
    length = int(prefix.lengths[0])
    q, k, v = exact(query[0, :, :group], key[0, :, 0], value[0, :, 0])
    keys, values = exact(prefix.keys[0, 0, :length], prefix.values[0, 0, :length])
    seen = np.concatenate([np.ones((len(q), length), bool), np.asarray(mask[0])], axis=1)
    scores = np.einsum("ngd,td->ngt", q, np.concatenate([keys, k]), optimize=True) * q.shape[-1] ** -0.5
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("ngt,td->ngd", weights, np.concatenate([values, v]), optimize=True)[None]
