"""Gated delta rule and convolution on trees: one suite for every implementation.

The yardsticks are the golden arrays (made by independent code), the token-by-token loops of `pallas_kernels.reference`
in float64 (themselves held to the goldens here), and identities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from kernel_cases import (
    IMPLEMENTATIONS,
    GdnCase,
    ancestors_of,
    chain,
    commit,
    convolve,
    golden,
    golden_group,
    kernel,
    make_case,
    path_to,
    random_tree,
    read_text,
    relative_error,
    taps_of,
    to_device,
    verify,
    with_extreme_gates,
)

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.xla import invert_unit_lower

ALIKE_BAR = 5e-6  # relative to float64
GATES = ("moderate", "extreme")
PRIMITIVES, SMALL, REAL = "gdn_primitives.npz", "tfm/gdn_tree_small.npz", "tfm/gdn_tree_real_shape.npz"
REFUSALS = (ValueError, TypeCheckError)  # the shape checker that runs with the tests may speak first
TREES = ("single", "chain9", "star9", "random16", "random33", "strong_decay33", "quad65", "random65", "comb65")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


# --- goldens ---------------------------------------------------------------------------------------------------------


def primitive_operands(case: str) -> list[np.ndarray]:
    return [golden(PRIMITIVES)[f"{case}/{name}"] for name in ("q", "k", "v", "g", "beta", "s0")]


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_text_reproduces_the_golden_recurrence(implementation: str, case: str) -> None:
    *rows, state = primitive_operands(case)
    result = read_text(implementation, *rows, np.ones(rows[0].shape[:2], bool), state)
    np.testing.assert_allclose(result.output, golden(PRIMITIVES)[f"{case}/out_recurrent"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(result.state, golden(PRIMITIVES)[f"{case}/final_recurrent"], rtol=0, atol=1e-6)


def test_a_chain_reproduces_the_golden_recurrence(implementation: str) -> None:
    *rows, state = primitive_operands("b")
    result = verify(implementation, *rows, ancestors_of(chain(64))[None], state)
    np.testing.assert_allclose(result.output, golden(PRIMITIVES)["b/out_recurrent"], rtol=0, atol=1e-6)


def test_right_padding_stops_the_state_at_every_golden_step(implementation: str) -> None:
    *rows, state = primitive_operands("a")
    for step in range(7):
        valid = np.broadcast_to(np.arange(7) <= step, (2, 7))
        result = read_text(implementation, *rows, valid, state)
        np.testing.assert_allclose(result.state, golden(PRIMITIVES)["a/state_per_step"][:, step], rtol=0, atol=1e-6)


def test_conv_reproduces_the_golden_causal_convolution(implementation: str) -> None:
    x, weight, y = (golden(PRIMITIVES)[f"conv/{name}"] for name in ("x", "weight", "y"))
    taps = np.broadcast_to(taps_of(chain(x.shape[1])), (*x.shape[:2], 4))
    actual = convolve(implementation, x, np.zeros_like(x[:, :3]), weight[:, 0].T, taps)
    np.testing.assert_allclose(actual, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tree", TREES)
def test_trees_reproduce_golden_outputs_and_commits(implementation: str, tree: str) -> None:
    """Every tree is filled up to 65 rows with unused nodes, whose content must not matter."""
    arrays = golden_group(SMALL, tree)
    nodes = len(arrays["parent"])
    q, k, v, g, beta = (
        np.concatenate([arrays[name], np.full((65 - nodes, *arrays[name].shape[1:]), junk)])[None]
        for name, junk in {"q": 3.0, "k": 3.0, "v": 3.0, "g": -3.0, "beta": 1.0}.items()
    )
    ancestors = np.zeros((1, 65, 65), bool)
    ancestors[0, :nodes, :nodes] = ancestors_of(arrays["parent"])

    result = verify(implementation, q, k, v, g, beta, ancestors, arrays["s0"][None])
    np.testing.assert_allclose(result.output[0, :nodes], arrays["out"], rtol=0, atol=1e-5)
    assert all(np.isfinite(x).all() for x in result)

    for accepted in ("accept_leaf", "accept_root"):
        path = arrays[f"{accepted}/path"]
        padded, count = np.pad(path, (0, 17 - len(path)), constant_values=-1), np.array([len(path)], np.int32)
        state = commit(implementation, arrays["s0"][None], k, result.update, result.path_decay, padded[None], count)
        np.testing.assert_allclose(state[0], arrays[f"{accepted}/state"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tree", ["conv_star5", "conv_quad17", "conv_random33"])
def test_tree_conv_reproduces_goldens(implementation: str, tree: str) -> None:
    arrays = golden_group(SMALL, tree)
    np.testing.assert_array_equal(taps_of(arrays["parent"]), arrays["taps"])
    operands = (arrays["x"][None], arrays["state"].T[None], arrays["weight"].T, arrays["taps"][None])
    np.testing.assert_allclose(convolve(implementation, *operands)[0], arrays["out"], rtol=0, atol=1e-5)


class RealShape(NamedTuple):
    """Inputs of a golden tree in the shapes of the 27B model."""

    rows: list[np.ndarray]
    state: np.ndarray
    conv: list[np.ndarray]


def rebuild_real_shape(tree: str) -> RealShape:
    """Redraw the inputs, which the file leaves out, in the order in which it was made, and check their sums."""
    arrays = golden_group(REAL, tree)
    nodes = len(arrays["parent"])
    rng = np.random.Generator(np.random.Philox(key=int(arrays["philox_key"])))
    laws = {
        "q": (0, 1, (nodes, 16, 128)),
        "k": (0, 1, (nodes, 16, 128)),
        "v": (0, 0.1, (nodes, 48, 128)),
        "a": (0, 0.2, (nodes, 48)),
        "b": (0, 1, (nodes, 48)),
        "A_log": (-3, 0.2, (48,)),
        "dt_bias": (0, 0.2, (48,)),
        "s0": (0, 0.05, (48, 128, 128)),
    }
    drawn = {}
    for name, (mean, spread, shape) in laws.items():
        x = drawn[name] = (mean + spread * rng.standard_normal(shape)).astype(np.float32).astype(np.float64)
        np.testing.assert_allclose([x.flat[0], x.flat[-1], x.sum(), np.abs(x).sum()], arrays[f"check/{name}"])
    if tree.endswith("random"):
        np.testing.assert_array_equal(random_tree(rng, nodes), arrays["parent"])
    conv = [rng.standard_normal(shape).astype(np.float32) for shape in ((nodes, 10240), (10240, 4), (10240, 3))]
    log_decay = -np.exp(drawn["A_log"]) * np.log1p(np.exp(drawn["a"] + drawn["dt_bias"]))
    rows = [drawn["q"], drawn["k"], drawn["v"], log_decay, 1 / (1 + np.exp(-drawn["b"]))]
    return RealShape([x[None] for x in rows], drawn["s0"][None], conv)


@pytest.mark.parametrize("tree", ["T1_chain", "T16_random", "T33_quad", "T65_random"])
def test_real_shapes_reproduce_goldens(implementation: str, tree: str) -> None:
    arrays, (rows, state, (x, weight, window)) = golden_group(REAL, tree), rebuild_real_shape(tree)
    parents, path = arrays["parent"], arrays["accept_path"]

    result = verify(implementation, *rows, ancestors_of(parents)[None], state)
    np.testing.assert_allclose(result.output[0, arrays["nodes"]], arrays["out"], rtol=0, atol=1e-5)

    count = np.array([len(path)], np.int32)
    committed = commit(implementation, state, rows[1], result.update, result.path_decay, path[None], count)
    np.testing.assert_allclose(committed[0, arrays["state_heads"]], arrays["accept_state"], rtol=0, atol=1e-5)

    conv = convolve(implementation, x[None], window.T[None], weight.T, taps_of(parents)[None])
    np.testing.assert_allclose(conv[0, path[-1]], arrays["conv_out_leaf"], rtol=0, atol=1e-5)


# --- the gated delta rule against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "ratio"), [(1, 1), (2, 2), (5, 3), (16, 1), (33, 2), (64, 3), (65, 3), (129, 2)])
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), depth=st.integers(1, 40), gates=st.sampled_from(GATES))
def test_random_trees_match_the_float64_recurrence(nodes: int, ratio: int, seed: int, depth: int, gates: str) -> None:
    rng = np.random.default_rng(seed)
    case = make_case(rng, random_tree(rng, nodes, depth), ratio)
    case = with_extreme_gates(case, rng) if gates == "extreme" else case
    expected = reference.gdn_tree_verify(*case)
    for implementation in IMPLEMENTATIONS:
        for x, y in zip(verify(implementation, *case), expected, strict=True):
            assert relative_error(x, y) < 1e-6


@pytest.mark.parametrize("cosine", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("shape", ["depth 15", "chain"])
def test_alike_keys_stay_exact(implementation: str, shape: str, cosine: float) -> None:
    rng = np.random.default_rng(5)
    case = make_case(rng, random_tree(rng, 64) if shape == "depth 15" else chain(64), cosine=cosine)
    for x, y in zip(verify(implementation, *case), reference.gdn_tree_verify(*case), strict=True):
        assert relative_error(x, y) < ALIKE_BAR


def coupling(case: GdnCase) -> np.ndarray:
    """A of a chain's first head: strictly lower, β_i e^{G_i − G_j} k_i·k_j."""
    k, total = reference.l2_normalise(case.key)[0, :, 0], np.cumsum(case.log_decay[0, :, 0])
    return np.tril(case.beta[0, :, :1] * np.exp(total[:, None] - total) * (k @ k.T), -1)


def invert_by_doubling(a: np.ndarray) -> np.ndarray:
    """(I − a)(I + a²)(I + a⁴)… = (I + a)⁻¹ in exact arithmetic; the mistake that the bar has to catch."""
    inverse, power = np.eye(len(a), dtype=a.dtype) - a, a
    for _ in range(int(np.ceil(np.log2(len(a)))) - 1):
        power = power @ power
        inverse += inverse @ power
    return inverse


def test_the_bar_for_alike_keys_catches_repeated_squaring() -> None:
    a = coupling(make_case(np.random.default_rng(5), chain(64), cosine=0.99))
    expected, narrow = np.linalg.inv(np.eye(64) + a), a.astype(np.float32)
    assert relative_error(invert_by_doubling(narrow), expected) > 1e3 * ALIKE_BAR
    assert relative_error(np.asarray(jax.jit(invert_unit_lower)(narrow)), expected) < ALIKE_BAR


@pytest.mark.parametrize("nodes", [1, 3, 17, 256])
def test_unit_lower_inverse_of_any_size(nodes: int) -> None:
    a = np.random.default_rng(nodes).standard_normal((2, nodes, nodes)).astype(np.float32) * nodes**-0.5
    a = np.tril(a, -1)
    inverse = np.asarray(jax.jit(invert_unit_lower)(a), np.float64)
    np.testing.assert_allclose(inverse @ (np.eye(nodes) + a), np.broadcast_to(np.eye(nodes), a.shape), atol=2e-5)


@pytest.mark.parametrize("gates", GATES)
def test_a_chain_is_a_text(implementation: str, gates: str) -> None:
    rng = np.random.default_rng(11)
    case = make_case(rng, chain(64))
    case = with_extreme_gates(case, rng) if gates == "extreme" else case
    tree, text = verify(implementation, *case), read_text(implementation, *case.text())
    assert relative_error(tree.output, text.output) < 1e-6


@pytest.mark.parametrize("tokens", [64, 130])
@pytest.mark.parametrize("gates", [*GATES, "alike keys"])
def test_text_matches_the_float64_recurrence_and_ignores_padding(implementation: str, tokens: int, gates: str) -> None:
    """Row 0 is full, row 1 ends inside a chunk, row 2 has no token and keeps its state bit for bit."""
    rng = np.random.default_rng(3)
    case = make_case(rng, chain(tokens), batch=3, cosine=0.99 if gates == "alike keys" else 0.0)
    case = with_extreme_gates(case, rng) if gates == "extreme" else case
    valid = np.arange(tokens) < np.array([tokens, tokens - 20, 0])[:, None]
    actual, expected = read_text(implementation, *case.text(valid)), reference.gdn_chunk(*case.text(valid))
    assert relative_error(actual.output[valid], expected.output[valid]) < 2e-6
    assert relative_error(actual.state, expected.state) < 2e-6
    np.testing.assert_array_equal(actual.state[2], case.state[2])


def test_nodes_see_their_ancestors_only(implementation: str) -> None:
    """Other contents in every stranger of node 40 leave its whole path as it was, bit for bit."""
    rng = np.random.default_rng(2)
    parents = random_tree(rng, 64)
    case, other = make_case(rng, parents), make_case(rng, parents)
    path = path_to(40, parents)
    for x, y in zip(case.rows, other.rows, strict=True):
        y[:, path] = x[:, path]
    before, after = verify(implementation, *case), verify(implementation, *other.rows, case.ancestors, case.state)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, path], y[:, path])


def test_the_order_of_siblings_does_not_matter(implementation: str) -> None:
    rng = np.random.default_rng(4)
    parents = random_tree(rng, 64)
    order = [0]
    while len(order) < 64:
        ready = [node for node in range(64) if node not in order and parents[node] in order]
        order.append(int(rng.choice(ready)))
    case = make_case(rng, parents)
    for x, y in zip(verify(implementation, *case), verify(implementation, *case.pick(order)), strict=True):
        assert relative_error(y, x[:, order]) < 1e-6


def test_commit_of_every_length_equals_reading_the_accepted_tokens(implementation: str) -> None:
    """Row n accepts n nodes of the deepest path; neither the other nodes nor the rest of `path` leave a trace."""
    rng = np.random.default_rng(7)
    parents = random_tree(rng, 64)
    path = max((path_to(node, parents) for node in range(64)), key=len)
    case, counts = make_case(rng, parents, cosine=0.5), np.arange(len(path) + 1, dtype=np.int32)
    result = verify(implementation, *case)
    rows = [np.repeat(x, len(counts), axis=0) for x in (case.state, case.key, result.update, result.path_decay)]
    paths = np.where(np.arange(len(path)) < counts[:, None], np.array(path), 63).astype(np.int32)
    committed = commit(implementation, *rows, paths, counts)
    np.testing.assert_array_equal(committed[0], case.state[0])
    for count in counts[1:]:
        expected = reference.gdn_chunk(*case.pick(path[:count]).text())
        assert relative_error(committed[count], expected.state[0]) < 1e-6


def recurrent_outputs(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrence as a scan over single tokens, whose gradient is beyond doubt."""
    query, key, value, log_decay, beta, state = operands

    def unit(x: jax.Array) -> jax.Array:
        return jnp.repeat(x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6), value.shape[2] // x.shape[2], axis=2)

    def step(s: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, b = token
        decayed = jnp.exp(g)[..., None, None] * s
        u = b[..., None] * (v - jnp.sum(decayed * k[..., None], axis=-2))
        s = decayed + k[..., None] * u[..., None, :]
        return s, jnp.sum(s * q[..., None], axis=-2)

    rows = (unit(query) * query.shape[-1] ** -0.5, unit(key), value, log_decay, beta)
    final, output = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in rows))
    return jnp.moveaxis(output, 0, 1), final


def test_gradients_of_the_chunk_form_are_those_of_the_recurrence() -> None:
    rng = np.random.default_rng(9)
    case = make_case(rng, chain(130), cosine=0.9)
    weights = to_device(rng.standard_normal(case.value.shape))

    def chunked_loss(*operands: jax.Array) -> jax.Array:
        query, key, value, log_decay, beta, state = operands
        output, final = pallas_kernels.gdn_chunk(query, key, value, log_decay, beta, jnp.ones((1, 130), bool), state)
        return jnp.sum(output * weights) + jnp.sum(final**2)

    def recurrent_loss(*operands: jax.Array) -> jax.Array:
        output, final = recurrent_outputs(*operands)
        return jnp.sum(output * weights) + jnp.sum(final**2)

    operands = [to_device(x) for x in (*case.rows, case.state)]
    actual, expected = (jax.jit(jax.grad(f, argnums=range(6)))(*operands) for f in (chunked_loss, recurrent_loss))
    for x, y in zip(actual, expected, strict=True):
        assert relative_error(np.asarray(x), np.asarray(y)) < 1e-5


# --- convolution -----------------------------------------------------------------------------------------------------


def test_conv_reads_across_the_window_and_not_across_branches(implementation: str) -> None:
    rng = np.random.default_rng(1)
    parents = np.array([-1, 0, 0, 1, 1, 2, 3, 5, 6])
    x, window, weight = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, 8), (2, 3, 8), (4, 8)))
    actual = convolve(implementation, x, window, weight, np.broadcast_to(taps_of(parents), (2, 9, 4)))
    for row, node in np.ndindex(2, 9):
        path = np.concatenate([window[row], x[row, path_to(node, parents)]]).astype(np.float64)[-4:]
        total = np.sum(path * weight, axis=0)
        np.testing.assert_allclose(actual[row, node], total / (1 + np.exp(-total)), rtol=0, atol=1e-6)


def test_conv_sums_bfloat16_inputs_in_float32(implementation: str) -> None:
    x = jnp.asarray([[[1.0], [2**-9], [2**-9], [2**-9]]], jnp.bfloat16)  # 1 + 2^-9 rounds to 1
    ones, taps = jnp.ones((4, 1), jnp.bfloat16), jnp.asarray(taps_of(chain(4)))[None]
    (actual,) = kernel("tree_conv", implementation, widths=(1,))(x, jnp.zeros((1, 3, 1), jnp.bfloat16), ones, taps)
    total = 1 + 3 * 2**-9
    assert actual.dtype == jnp.bfloat16
    assert actual[0, 3, 0] == jnp.asarray(total / (1 + np.exp(-total)), jnp.bfloat16)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_no_nodes_are_refused() -> None:
    operands = [to_device(x[:, :0]) for x in make_case(np.random.default_rng(0), chain(2)).rows]
    with pytest.raises(ValueError, match="there is nothing to compute: query has shape"):
        pallas_kernels.gdn_tree_verify(*operands, jnp.ones((1, 0, 0), bool), jnp.ones((1, 6, 16, 16)))


def test_value_heads_that_key_heads_do_not_divide_are_refused() -> None:
    q, k, v, g, beta, ancestors, state = map(to_device, make_case(np.random.default_rng(0), chain(2)))
    with pytest.raises(ValueError, match="5 value heads do not divide among 2 key heads"):
        pallas_kernels.gdn_tree_verify(q, k, v[:, :, :5], g[:, :, :5], beta[:, :, :5], ancestors, state[:, :5])


def test_a_state_with_other_heads_is_refused() -> None:
    q, k, v, g, beta, ancestors, state = map(to_device, make_case(np.random.default_rng(0), chain(2)))
    with pytest.raises(REFUSALS, match="state"):
        pallas_kernels.gdn_tree_verify(q, k, v, g, beta, ancestors, state[:, :5])


def test_a_convolution_window_of_another_length_is_refused() -> None:
    x, taps = jnp.ones((1, 5, 8)), jnp.zeros((1, 5, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"window has shape \(1, 2, 8\), expected \(1, 3, 8\)"):
        pallas_kernels.tree_conv(x, x[:, :2], x[0, :4], taps, widths=(8,))


@pytest.mark.parametrize("widths", [(4, 3), (9, -1), (8, 0)])
def test_results_of_a_convolution_take_all_channels(widths: tuple[int, ...]) -> None:
    x, taps = jnp.ones((1, 5, 8)), jnp.zeros((1, 5, 4), jnp.int32)
    with pytest.raises(ValueError, match="expected positive numbers whose sum is 8, the channels"):
        pallas_kernels.tree_conv(x, x[:, :3], x[0, :4], taps, widths=widths)


def changed_mask(changes: dict[tuple[int, int], bool]) -> jax.Array:
    """Ancestors of 0 → 1 → 2, 0 → 3, and slot 4 unused; then some entries changed."""
    mask = np.zeros((1, 5, 5), bool)
    mask[0, :4, :4] = ancestors_of(np.array([-1, 0, 1, 0]))
    for (row, column), entry in changes.items():
        mask[0, row, column] = entry
    return jnp.asarray(mask)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({(1, 1): False}, r"row 1 of ancestors of tree 0 is no path: expected true at 1, its parent 0 and the ances"),
        ({(0, 3): True}, "row 0 of ancestors of tree 0 is no path: expected true at 0, nowhere else"),
        ({(2, 0): False}, "row 2 .* expected true at 2, its parent 1 and the ancestors of that, nowhere else"),
        ({(3, 1): True, (3, 0): False}, "row 3 .* expected true at 3, its parent 1 and the ancestors of that"),
        ({(3, 2): True}, "row 3 .* expected true at 3, its parent 2 and the ancestors of that"),
        ({(1, 4): True}, "row 1 .* expected true at 1, its parent 0"),
    ],
)
def test_what_is_no_tree_is_refused(changes: dict[tuple[int, int], bool], sentence: str) -> None:
    rows = map(to_device, make_case(np.random.default_rng(0), chain(5)).rows)
    operands = [*rows, changed_mask(changes), jnp.ones((1, 6, 16, 16))]
    with pytest.raises(ValueError, match=sentence):
        pallas_kernels.gdn_tree_verify(*operands, implementation="xla")
    traced = kernel("gdn_tree_verify", "xla")(*operands)  # under jit the numbers are not there to be looked at
    assert traced.output.shape == (1, 5, 6, 16)


@pytest.mark.parametrize("changes", [{}, {(4, 4): True}, {(4, 4): True, (4, 3): True, (4, 0): True}])
def test_trees_and_unused_nodes_are_taken(changes: dict[tuple[int, int], bool]) -> None:
    case = make_case(np.random.default_rng(0), chain(5))._replace(ancestors=np.asarray(changed_mask(changes)))
    concrete = pallas_kernels.gdn_tree_verify(*map(to_device, case), implementation="xla")
    np.testing.assert_array_equal(concrete.output, verify("xla", *case).output)


@pytest.mark.parametrize("tap", [-4, 5])
def test_taps_out_of_range_are_refused(tap: int) -> None:
    x, taps = jnp.ones((1, 5, 8)), jnp.zeros((1, 5, 4), jnp.int32).at[0, 2, 3].set(tap)
    with pytest.raises(ValueError, match=f"taps holds {tap}, expected -3 to 4 for 5 nodes after a window of 3 rows"):
        pallas_kernels.tree_conv(x, x[:, :3], x[0, :4], taps, widths=(8,))
    for edge in (-3, 4):
        pallas_kernels.tree_conv(x, x[:, :3], x[0, :4], taps.at[0, 2, 3].set(edge), widths=(8,))


@pytest.mark.parametrize(
    ("path", "count", "sentence"),
    [
        ([0, 5, 1], 2, "path holds 5, expected 0 to 4 for a tree of 5 nodes"),
        ([-1, 0, 0], 1, "path holds -1, expected 0 to 4 for a tree of 5 nodes"),
        ([0, 1, 2], 4, "count holds 4, expected 0 to 3 for a path of 3 steps"),
        ([0, 1, 2], -1, "count holds -1, expected 0 to 3 for a path of 3 steps"),
        ([0, 1, 9], 2, None),  # entries beyond the count are ignored
    ],
)
def test_paths_that_leave_the_tree_are_refused(path: list[int], count: int, sentence: str | None) -> None:
    state, key = jnp.ones((1, 2, 4, 4)), jnp.ones((1, 5, 2, 4))
    where = jnp.array([path], jnp.int32), jnp.array([count], jnp.int32)
    commits: tuple[Callable, ...] = (
        lambda: pallas_kernels.commit_states((state,), (key,), (key,), (key[..., 0],), *where, implementation="xla"),
        lambda: pallas_kernels.commit_rows(
            (), (), jnp.zeros((1, 5, 4), jnp.int32), (state,), (key,), jnp.array([0]), *where, implementation="xla"
        ),
    )
    for commit_path in commits:
        if sentence is None:
            commit_path()
        else:
            with pytest.raises(ValueError, match=sentence):
                commit_path()
