"""Verifiers: rules that accept a path of a draft tree and leave the law from which the next token comes.

All have one interface, `verify(tree, probabilities, noise, max_depth=…) -> Verdict`, are pure and work in the dtype of
their probabilities. The verdict's tokens (the accepted path, then a draw from `rest`) have the target's own law.

- `target_only`: at a node, draw the target's token; if it is a child, go there. No lossless rule accepts more of a tree
  that does not depend on the target's randomness. `accept` runs it in its Gumbel form (`sampling.node_choices` and
  `walk`), which also makes the text a function of the seed alone; the form here takes coins.
- `traversal`: traversal verification (arXiv 2505.12398), leaf by leaf, for trees of any shape.
- `chain_rejection`: speculative sampling's rejection rule (arXiv 2211.17192), for a chain that was itself drawn.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from tfm_jax.config import Verifier
from tfm_jax.filters import node_laws
from tfm_jax.sampling import AcceptedPath, gumbel_noise, node_choices, walk, words_to_gumbel
from tfm_jax.tree import DraftTree, check_depths

_DRAFT, _VERIFY = 1, 2  # streams of a round, apart from the noise field


class Noise(NamedTuple):
    """Randomness of one verification: independent of the tree, and independent entry by entry."""

    order: Float[Array, "batch nodes"]  # standard Gumbel, for the order of siblings
    coins: Float[Array, "batch nodes"]  # uniform in [0, 1)


class Verdict(NamedTuple):
    """What a verifier decided. Entries of `path` at and beyond `count` are 0."""

    path: Int[Array, "batch steps"]  # accepted slots, the root first; steps = depth + 1
    count: Int[Array, " batch"]  # slots on the path, at least 1
    rest: Float[Array, "batch vocab"]  # law of the token after the path, up to a factor


class Verify(Protocol):
    """The interface of all verifiers."""

    def __call__(
        self, tree: DraftTree, probabilities: Float[Array, "batch nodes vocab"], noise: Noise, *, max_depth: int
    ) -> Verdict:
        """Args: the tree, the target's law after each of its nodes, randomness, and the tree's depth (static)."""
        ...


def accept(
    tree: DraftTree,
    logits: Float[Array, "batch nodes vocab"],
    lengths: Int[Array, " batch"],
    temperature: Float[Array, " batch"],
    seed: Int[Array, " batch"],
    *,
    verifier: Verifier,
    max_depth: int,
    sample: bool,
    drafted: Float[Array, "batch nodes vocab"] | None = None,
) -> AcceptedPath:
    """Tokens that a round emits: the accepted path and one more. Temperature 0 is greedy whatever the verifier.

    Args:
        tree: the verified tree.
        logits: the target's filtered logits after each node, not yet divided by the temperature.
        lengths: absolute position of the root, i.e. the committed length.
        temperature: 0 means greedy.
        seed: seed of the row's noise.
        verifier: static.
        max_depth: depth of the tree, static.
        sample: static; False promises that every temperature is 0 and draws no noise.
        drafted: for `rejection`, see `chain_rejection`.

    Raises:
        TfmError: depths exceed `max_depth`; traced ones are not looked at and must not.
    """
    check_depths(tree.depths, max_depth)
    if verifier == "target_only" or not sample:
        choices = node_choices(logits, tree.depths, lengths, temperature, seed, max_depth=max_depth, sample=sample)
        return walk(tree, choices, max_depth=max_depth)
    rules: dict[str, Verify] = {
        "traversal": traversal,
        "rejection": functools.partial(chain_rejection, drafted=drafted),
    }
    noise = verification_noise(seed, lengths, tree.tokens.shape[1])
    verdict = rules[verifier](tree, node_laws(logits, temperature), noise, max_depth=max_depth)
    position = lengths + verdict.count - 1
    return draw_bonus(tree, verdict, gumbel_noise(seed, position[:, None], logits.shape[-1])[:, 0])


def verification_noise(seed: Int[Array, " batch"], lengths: Int[Array, " batch"], nodes: int) -> Noise:
    """Noise of the round whose root stands at `lengths`; independent of the noise field and of `draft_noise`."""
    words = _stream_words(seed, lengths, (2, nodes), _VERIFY)
    uniforms = (words[:, 1].astype(jnp.float32) + 0.5) * 2.0**-32
    return Noise(words_to_gumbel(words[:, 0]), jnp.minimum(uniforms, 1.0 - 2.0**-24))


def draft_noise(
    seed: Int[Array, " batch"], lengths: Int[Array, " batch"], depth: int, vocab: int
) -> Float[Array, "batch depth vocab"]:
    """Standard Gumbel noise to draw a chain with, independent of whatever the target draws with."""
    return words_to_gumbel(_stream_words(seed, lengths, (depth, vocab), _DRAFT))


def draw_bonus(tree: DraftTree, verdict: Verdict, gumbel: Float[Array, "batch vocab"]) -> AcceptedPath:
    """Draws the token after the path, argmax(log rest + G), and lists what is emitted."""
    bonus = jnp.argmax(jnp.log(verdict.rest) + gumbel, axis=-1).astype(jnp.int32)
    steps, last = jnp.arange(verdict.path.shape[1]), verdict.count[:, None] - 1
    following = jnp.pad(jnp.take_along_axis(tree.tokens, verdict.path, axis=1)[:, 1:], ((0, 0), (0, 1)))
    tokens = jnp.where(steps < last, following, jnp.where(steps == last, bonus[:, None], 0))
    return AcceptedPath(verdict.path, verdict.count, tokens, bonus)


def target_only(
    tree: DraftTree, probabilities: Float[Array, "batch nodes vocab"], noise: Noise, *, max_depth: int
) -> Verdict:
    """The `target_only` rule of trymirai/sglang (`tree_sampling.py`), driven by coins.

    At node n, coin n goes to the first child, in slot order, whose running sum of target probabilities exceeds it; if
    none does, the walk ends, and the rest is the row with the children's tokens removed. The comparison is strict, so a
    coin of 0 never picks a token of probability 0. If rounding leaves nothing beside the children, the last child with
    positive probability is taken.
    """
    nodes = tree.tokens.shape[1]
    child = _children(tree)
    mass = jnp.where(child, _columns(probabilities, tree.tokens), 0.0)
    taken = child & (noise.coins[:, :, None] < jnp.cumsum(mass, axis=-1))
    is_child_token = jax.vmap(_mark_tokens, in_axes=(0, 0, None))(child, tree.tokens, probabilities.shape[-1])
    rest = jnp.where(is_child_token, 0.0, probabilities)
    last_positive = nodes - 1 - jnp.argmax((mass > 0)[..., ::-1], axis=-1)

    moves = jnp.any(taken, axis=-1)
    must_move = (jnp.sum(rest, axis=-1) <= 0) & jnp.any(mass > 0, axis=-1)
    following = jnp.where(moves, jnp.argmax(taken, axis=-1), jnp.where(must_move, last_positive, -1))
    slots = jnp.arange(nodes)
    missed = (tree.parents >= 0) & (jnp.take_along_axis(following, jnp.maximum(tree.parents, 0), axis=1) != slots)
    reached = tree.valid & ~jnp.any(tree.ancestors & missed[:, None, :], axis=-1)
    leaf = jnp.argmax(jnp.where(reached, tree.depths, -1), axis=1)
    path, count = _path_to(tree, leaf, max_depth)
    return Verdict(path, count, _row(rest, leaf))


def traversal(
    tree: DraftTree, probabilities: Float[Array, "batch nodes vocab"], noise: Noise, *, max_depth: int
) -> Verdict:
    """Traversal verification (arXiv 2505.12398; `tree_sampling.py` of trymirai/sglang).

    q_n is the drafter's law over n's children, softmax of their scores. Siblings are put in an order drawn without
    replacement from q_n (keys log q + G, descending: Plackett-Luce). a(root) = 1, a(child c of n) = min(a(n) p_n(c) /
    q_n(c), 1). Always descend to the first active child; a node without one is accepted, as the end of the path, if its
    coin is below a, and the root always. After a refusal of c below n, with r = max(a(n) p_n − q_n, 0) and R = Σ r:

        a(n) ← R / (R + 1 − a(n)),    p_n ← r / R,    q_n ← q_n without c, renormalised,    c inactive

    The next token comes from the accepted node's current p. Where R is 0 although a(n) < 1, a(n) becomes 0 and p_n is
    never drawn from. Where it is 0 and a(n) = 1, p and q agreed but for rounding: then p_n only loses c, and no token
    of probability 0 is emitted.

    q is 0 off the children, so p_n is kept as one number per child and one factor for all other tokens.
    """
    child = _children(tree)
    is_child_token = jax.vmap(_mark_tokens, in_axes=(0, 0, None))(child, tree.tokens, probabilities.shape[-1])
    outside = jnp.sum(jnp.where(is_child_token, 0.0, probabilities), axis=-1)
    own = jnp.take_along_axis(_columns(probabilities, tree.tokens), jnp.maximum(tree.parents, 0)[:, None, :], axis=1)[
        :, 0
    ]
    keys = tree.scores.astype(noise.order.dtype) + noise.order
    end = jax.vmap(_traverse)(child, tree.scores.astype(own.dtype), keys, noise.coins, own, outside, tree.valid)
    leaf = end.current
    path, count = _path_to(tree, leaf, max_depth)
    rest = _row(probabilities, leaf) * jnp.take_along_axis(end.tail, leaf[:, None], axis=1)
    of_leaf = jnp.take_along_axis(child, leaf[:, None, None], axis=1)[:, 0]
    where = (jnp.arange(leaf.shape[0])[:, None], jnp.where(of_leaf, tree.tokens, rest.shape[1]))
    return Verdict(path, count, rest.at[where].set(end.own, mode="drop"))


def chain_rejection(
    tree: DraftTree,
    probabilities: Float[Array, "batch nodes vocab"],
    noise: Noise,
    *,
    max_depth: int,
    drafted: Float[Array, "batch nodes vocab"] | None = None,
) -> Verdict:
    """Speculative sampling of a chain: x is accepted with probability min(1, p(x) / q(x)), else (p − q)⁺ is the rest.

    The chain must have been drawn from q, by noise of its own. A drafted token that is merely the likeliest one was not
    drawn from the drafter's law, whatever its score; its q is all on it, and the rule becomes `target_only`'s.

    Args:
        tree: a chain: slot n + 1 is the child of slot n.
        probabilities: p, the target's law after each node.
        noise: coin n decides about the child of node n.
        max_depth: depth of the tree, static.
        drafted: q, the law that the child of each node was drawn from; None for a chain that was not drawn. The row of
            the last node is not read.
    """
    vocab = probabilities.shape[-1]
    following = jnp.concatenate([tree.tokens[:, 1:], jnp.zeros_like(tree.tokens[:, :1])], axis=1)
    if drafted is None:
        drafted = jax.nn.one_hot(following, vocab, dtype=probabilities.dtype)
    p, q = (jnp.take_along_axis(rows, following[..., None], axis=-1)[..., 0] for rows in (probabilities, drafted))
    has_child = jnp.pad(tree.valid[:, 1:], ((0, 0), (0, 1)))
    moves = has_child & (noise.coins * q < p)
    leaf = jnp.sum(jnp.cumprod(moves.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    path, count = _path_to(tree, leaf, max_depth)
    row = _row(probabilities, leaf)
    refused = jnp.take_along_axis(has_child, leaf[:, None], axis=1)
    residual = jnp.where(refused, jnp.maximum(row - _row(drafted, leaf), 0), row)
    empty = jnp.sum(residual, axis=-1, keepdims=True) <= 0  # p and q agreed but for rounding
    return Verdict(path, count, jnp.where(empty, row, residual))


class _Traversal(NamedTuple):
    """Where one row's traversal stands.

    `own[c]` is the current probability of node c's token at its parent, `tail[n]` the factor of node n's other tokens;
    `ratio[n]` is a(n), known once the descent has reached n.
    """

    current: Int[Array, ""]
    accepted: Bool[Array, ""]
    ratio: Float[Array, " nodes"]
    own: Float[Array, " nodes"]
    tail: Float[Array, " nodes"]
    active: Bool[Array, " nodes"]


def _traverse(
    child: Bool[Array, "nodes nodes"],
    scores: Float[Array, " nodes"],
    keys: Float[Array, " nodes"],
    coins: Float[Array, " nodes"],
    own: Float[Array, " nodes"],
    outside: Float[Array, " nodes"],
    valid: Bool[Array, " nodes"],
) -> _Traversal:
    """Each node is entered once and tested once: at most 2 · nodes steps."""

    def draft_law(state: _Traversal, parent: Int[Array, ""]) -> Float[Array, " nodes"]:
        return jax.nn.softmax(jnp.where(child[parent] & state.active, scores, -jnp.inf))

    def descend(state: _Traversal) -> _Traversal:
        best = jnp.argmax(jnp.where(child[state.current] & state.active, keys, -jnp.inf)).astype(jnp.int32)
        q = jnp.maximum(draft_law(state, state.current)[best], jnp.finfo(scores.dtype).tiny)
        ratio = jnp.minimum(state.ratio[state.current] * state.own[best] / q, 1)
        return state._replace(current=best, ratio=state.ratio.at[best].set(ratio))

    def refuse(state: _Traversal, leaf: Int[Array, ""]) -> _Traversal:
        parent = jnp.argmax(child[:, leaf]).astype(jnp.int32)
        siblings, ratio = child[parent], state.ratio[parent]
        q = jnp.where(siblings & state.active, draft_law(state, parent), 0)
        residual = jnp.where(siblings, jnp.maximum(ratio * state.own - q, 0), 0)
        scale = ratio * state.tail[parent]
        total = jnp.sum(residual) + scale * outside[parent]
        # Nothing left: p without the refused token, for which a(n) = 1 goes on; with a(n) < 1 it is never used.
        remaining = jnp.where(siblings, state.own, 0).at[leaf].set(0)
        empty = total <= 0
        residual, scale = jnp.where(empty, remaining, residual), jnp.where(empty, state.tail[parent], scale)
        norm = jnp.where(empty, jnp.sum(remaining) + state.tail[parent] * outside[parent], total)
        norm = jnp.where(norm > 0, norm, 1)
        return state._replace(
            current=parent,
            ratio=state.ratio.at[parent].set(
                jnp.where(empty, (ratio >= 1).astype(ratio.dtype), total / jnp.where(empty, 1, total + (1 - ratio)))
            ),
            own=jnp.where(siblings, residual / norm, state.own),
            tail=state.tail.at[parent].set(scale / norm),
            active=state.active.at[leaf].set(False),
        )

    def test(state: _Traversal) -> _Traversal:
        leaf = state.current
        accepted = (leaf == 0) | (coins[leaf] < state.ratio[leaf])
        refused = refuse(state, leaf)
        return jax.tree.map(functools.partial(jnp.where, accepted), state._replace(accepted=accepted), refused)

    def body(state: _Traversal) -> _Traversal:
        has_child = jnp.any(child[state.current] & state.active)
        return lax.cond(has_child, descend, test, state)

    ones = jnp.ones_like(own)
    start = _Traversal(jnp.zeros((), jnp.int32), jnp.zeros((), bool), ratio=ones, own=own, tail=ones, active=valid)
    return lax.while_loop(lambda state: ~state.accepted, body, start)


def _children(tree: DraftTree) -> Bool[Array, "batch nodes nodes"]:
    """Row n is true at n's children."""
    return (tree.parents[:, None, :] == jnp.arange(tree.tokens.shape[1])[:, None]) & tree.valid[:, None, :]


def _path_to(
    tree: DraftTree, leaf: Int[Array, " batch"], max_depth: int
) -> tuple[Int[Array, "batch steps"], Int[Array, " batch"]]:
    """Slots from the root to `leaf`, and how many."""
    on_path = jnp.take_along_axis(tree.ancestors, leaf[:, None, None], axis=1)
    at_depth = on_path & (tree.depths[:, None, :] == jnp.arange(max_depth + 1)[:, None])
    count = jnp.take_along_axis(tree.depths, leaf[:, None], axis=1)[:, 0] + 1
    return jnp.argmax(at_depth, axis=-1).astype(jnp.int32), count.astype(jnp.int32)


def _row(rows: Float[Array, "batch nodes vocab"], node: Int[Array, " batch"]) -> Float[Array, "batch vocab"]:
    return jnp.take_along_axis(rows, node[:, None, None], axis=1)[:, 0]


def _columns(
    probabilities: Float[Array, "batch nodes vocab"], tokens: Int[Array, "batch nodes"]
) -> Float[Array, "batch nodes nodes"]:
    """Entry (n, c): probability of node c's token after node n."""
    return jax.vmap(lambda rows, columns: rows[:, columns])(probabilities, tokens)


def _mark_tokens(
    child: Bool[Array, "nodes nodes"], tokens: Int[Array, " nodes"], vocab: int
) -> Bool[Array, "nodes vocab"]:
    """Row n is true at the tokens of n's children."""
    return jnp.zeros((child.shape[0], vocab), bool).at[:, tokens].max(child)


def _stream_words(
    seed: Int[Array, " batch"], lengths: Int[Array, " batch"], shape: tuple[int, ...], stream: int
) -> UInt32[Array, "batch ..."]:
    """Uniform words of one round and stream. Two rounds of a text never share their committed length."""

    def words(seed: Int[Array, ""], length: Int[Array, ""]) -> UInt32[Array, ...]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), length)
        return jax.random.bits(jax.random.fold_in(key, stream), shape, jnp.uint32)

    return jax.vmap(words)(seed, lengths)
