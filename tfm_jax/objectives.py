"""What each model learns from: (trained parameters, data, step) → loss, for `tfm_jax.training`.

Drafter and Weaver learn on the target's own continuations; the target runs inside the same jitted step, frozen, so that
nothing but token ids is ever stored. Only positions of a continuation are supervised, never the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt16

from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.data import Continuations, shuffled_rows, shuffled_windows, step_key, take_rows
from tfm_jax.dflash import Drafter
from tfm_jax.layers import precision
from tfm_jax.losses import DraftTargets, Loss, Pool, drafter_loss, next_token_loss, token_losses, top_pool, weaver_loss
from tfm_jax.target import Target
from tfm_jax.training import Evaluation, Objective, Tree
from tfm_jax.weaver import Weaver


class DraftData(NamedTuple):
    """Data of drafter and Weaver: the frozen models' parameters and the continuations."""

    frozen: dict[str, Tree]
    continuations: Continuations


class Drawn(NamedTuple):
    """Sequences of a step and their anchors.

    Attributes:
        rows: continuations.
        anchors: positions with at least one token before and one after them.
        exists: rows that have such positions.
    """

    rows: Continuations
    anchors: Int[Array, "batch anchors"]
    exists: Bool[Array, " batch"]


class Drafted(NamedTuple):
    """Blocks drafted at the anchors of some sequences, and all that a loss needs around them.

    Attributes:
        hidden: drafter's final-norm outputs at slots 1 .. depth.
        feature: target's final-norm output at a − 1.
        tokens: x_{a+d}, the teacher-forced chain.
        targets: what should be predicted.
    """

    hidden: Float[Array, "batch anchors depth hidden"]
    feature: Float[Array, "batch anchors hidden"]
    tokens: Int[Array, "batch anchors depth"]
    targets: DraftTargets


class TrainedTarget(Target):
    """Target whose embedding gradient is one matrix product.

    The gradient of a gather is a scatter-add: in bfloat16 it would lose the contributions of frequent tokens, and on a
    GPU it adds in any order.
    """

    def embed(self, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape hidden"]:
        """Rows of the embedding table."""
        return _look_up(self.embed_tokens.embedding[...], tokens)


@jax.custom_vjp
def _look_up(table: Float[Array, "vocab hidden"], tokens: Int[Array, "*shape"]) -> Float[Array, "*shape hidden"]:
    return table[tokens]


def _look_up_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[tokens], (table, tokens)


def _look_up_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    table, tokens = residuals
    chosen = jax.nn.one_hot(tokens.reshape(-1), table.shape[0], dtype=cotangent.dtype)
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    gradient = jnp.einsum("tv,th->vh", chosen, flat, preferred_element_type=jnp.float32)
    return gradient.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


@dataclasses.dataclass(frozen=True)
class Network:
    """A model in training: how to initialise it, and how to run it in a dtype on float32 master parameters."""

    build: Callable[..., nnx.Module]
    dtype: jnp.dtype

    def initial(self, seed: int) -> Tree:
        """Fresh float32 parameters."""
        module = self.build(dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(seed))
        return nnx.to_pure_dict(nnx.state(module))

    def cast(self, params: Tree) -> Tree:
        """Parameters in the dtypes in which the model computes; what it keeps in float32 stays so."""
        like = nnx.to_pure_dict(nnx.state(self._abstract()))
        return jax.tree.map(lambda master, abstract: master.astype(abstract.dtype), params, like)

    def bind(self, params: Tree) -> Any:  # noqa: ANN401 - the module that `build` makes
        """The module over cast parameters."""
        return nnx.merge(nnx.graphdef(self._abstract()), self.cast(params))

    def _abstract(self) -> nnx.Module:
        return nnx.eval_shape(lambda: self.build(dtype=self.dtype, rngs=nnx.Rngs(0)))


def target_network(config: TargetConfig, dtype: jnp.dtype) -> Network:
    """The target, trainable."""
    return Network(lambda **options: TrainedTarget(config, **options), dtype)


def target_objective(network: Network, *, seed: int, batch: int, length: int) -> Objective:
    """Next-token cross-entropy on windows of the packed corpus, which is the data."""

    def objective(params: Tree, tokens: UInt16[Array, " tokens"], step: Int[Array, ""]) -> Loss:
        windows = shuffled_windows(tokens, seed, step, batch, length)
        target = network.bind(params)
        valid = jnp.ones((batch, length), bool)
        hidden = target.sequence(windows[:, :-1], valid).hidden
        return next_token_loss(target.logits(hidden), windows[:, 1:], valid)

    return objective


def bits_per_character(
    network: Network, tokens: UInt16[np.ndarray, " tokens"], characters: int, *, batch: int, length: int
) -> Evaluation:
    """Measures the cross-entropy of a held-out text in bits per character of it, separators predicted too.

    Windows overlap by half and only second halves count, so that every token is judged once, with at least length / 2
    tokens of context; before the first token the context is end-of-text ids.

    Args:
        network: the target.
        tokens: held-out text.
        characters: of the text.
        batch: windows at once.
        length: of a window.
    """
    half = length // 2
    padded = np.zeros(len(tokens) + 2 * length, np.int32)
    padded[half + 1 : half + 1 + len(tokens)] = tokens
    starts = np.arange(0, len(tokens), half)  # the window at s judges s + half + 1 .. s + length
    starts = np.concatenate([starts, np.full(-len(starts) % batch, len(tokens) + half)])
    text = jnp.asarray(padded)

    @jax.jit
    def nats(params: Tree, text: Int[Array, " tokens"], starts: Int[Array, " batch"]) -> Float[Array, ""]:
        index = starts[:, None] + jnp.arange(length + 1)
        windows = text[index]
        target = network.bind(params)
        hidden = target.sequence(windows[:, :-1], jnp.ones_like(windows[:, :-1], bool)).hidden
        losses = token_losses(target.logits(hidden[:, half:]), windows[:, half + 1 :])
        return jnp.sum(jnp.where(index[:, half + 1 :] < half + 1 + len(tokens), losses, 0.0))

    def evaluate(params: Tree) -> dict[str, float]:
        total = sum(float(nats(params, text, jnp.asarray(rows))) for rows in starts.reshape(-1, batch))
        return {"bits_per_character": total / np.log(2.0) / characters, "nats_a_token": total / len(tokens)}

    return evaluate


def average_loss(objective: Objective, data: Any, steps: int) -> Evaluation:  # noqa: ANN401 - the objective's own
    """Measures an objective and its metrics on held-out data: the mean over its first batches."""
    measure = jax.jit(objective)

    def evaluate(params: Tree) -> dict[str, float]:
        losses = [measure(params, data, jnp.asarray(step, jnp.int32)) for step in range(steps)]
        rows = jax.device_get([{"loss": loss.value} | loss.metrics for loss in losses])
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    return evaluate


def drafter_objective(
    target: TargetConfig, drafter: DrafterConfig, dtype: jnp.dtype, *, seed: int, batch: int, anchors: int
) -> Objective:
    """`drafter_loss` at fresh random anchors in every step; `DraftData.frozen` holds the target."""
    frozen, trained = target_network(target, dtype), drafter_network(drafter, dtype)

    def objective(params: Tree, data: DraftData, step: Int[Array, ""]) -> Loss:
        model = frozen.bind(data.frozen["target"])
        drawn = _draw(data.continuations, seed, step, batch, anchors)
        drafted = draft_blocks(model, trained.bind(params), drawn)
        return drafter_loss(model.logits(drafted.hidden), drafted.targets)

    return objective


def drafter_network(config: DrafterConfig, dtype: jnp.dtype) -> Network:
    """The drafter, trainable."""
    return Network(lambda **options: Drafter(config, **options), dtype)


def weaver_network(config: WeaverConfig, dtype: jnp.dtype) -> Network:
    """The Weaver, trainable."""
    return Network(lambda **options: Weaver(config, **options), dtype)


def weaver_objective(
    target: TargetConfig,
    drafter: DrafterConfig,
    weaver: WeaverConfig,
    dtype: jnp.dtype,
    *,
    seed: int,
    batch: int,
    anchors: int,
) -> Objective:
    """`weaver_loss` at fresh random anchors in every step; `DraftData.frozen` holds target and drafter."""
    frozen_target, frozen_drafter = target_network(target, dtype), drafter_network(drafter, dtype)
    trained = weaver_network(weaver, dtype)

    def objective(params: Tree, data: DraftData, step: Int[Array, ""]) -> Loss:
        model = frozen_target.bind(data.frozen["target"])
        drawn = _draw(data.continuations, seed, step, batch, anchors)
        drafted = draft_blocks(model, frozen_drafter.bind(data.frozen["drafter"]), drawn)
        pool = top_pool(model.logits(drafted.hidden), weaver.pool_size)
        logits = weaver_logits(model, trained.bind(params), drafted, pool)
        uniforms = jax.random.uniform(jax.random.fold_in(step_key(seed, step), 1), drafted.tokens.shape)
        return weaver_loss(logits, pool, drafted.targets, uniforms)

    return objective


def draft_blocks(target: Target, drafter: Drafter, drawn: Drawn) -> Drafted:
    """Runs the target over whole rows and the drafter's block at every anchor."""
    config, rows, anchors = drafter.config, drawn.rows, drawn.anchors
    tokens = rows.tokens.astype(jnp.int32)
    inside = jnp.arange(tokens.shape[1]) < rows.lengths[:, None]
    output = target.sequence(tokens, inside, tap_layers=config.target_layers)

    def take(x: Array, positions: Int[Array, "batch anchors *depth"]) -> Array:
        return jax.vmap(lambda row, index: row[jnp.minimum(index, row.shape[0] - 1)])(x, positions)

    positions = anchors[..., None] + jnp.arange(config.depth)  # a + d
    chain = take(tokens, positions)
    masks = jnp.full((*anchors.shape, config.depth), config.mask_token_id, jnp.int32)
    block = target.embed(jnp.concatenate([chain[..., :1], masks], axis=-1))
    targets = DraftTargets(
        logits=target.logits(take(output.hidden, positions)),
        tokens=take(tokens, positions + 1),
        valid=(positions + 1 < rows.lengths[:, None, None]) & drawn.exists[:, None, None],
    )
    hidden = drafter.blocks(block, anchors, output.taps)[:, :, 1:]
    return Drafted(hidden, take(output.hidden, anchors - 1), chain, targets)


def weaver_logits(
    target: Target, weaver: Weaver, drafted: Drafted, pool: Pool
) -> Float[Array, "batch anchors depth pool"]:
    """The Weaver's logits of the candidates of every depth along the true chain.

    The head's rows are used raw: a table of projected rows would have to be recomputed in every step.
    """
    batch, anchors, depth, hidden = drafted.hidden.shape
    flat = batch * anchors
    r = weaver.chain(
        drafted.feature.reshape(flat, hidden),
        drafted.hidden.reshape(flat, depth, hidden),
        target.embed(drafted.tokens.reshape(flat, depth)),
    )
    query = weaver.query(r).reshape(batch, anchors, depth, hidden)
    head = target.head_rows()[pool.ids]
    high = precision(query.dtype)
    return pool.scores + jnp.einsum("badh,badch->badc", query, head, precision=high, preferred_element_type=jnp.float32)


def _draw(data: Continuations, seed: int, step: Int[Array, ""], batch: int, anchors: int) -> Drawn:
    """The step's rows, and as anchors positions of continuation tokens that another one follows."""
    rows = take_rows(data, shuffled_rows(seed, step, data.tokens.shape[0], batch))
    first, last = rows.prompt_lengths, rows.lengths - 2
    u = jax.random.uniform(step_key(seed, step), (batch, anchors))
    span = jnp.maximum(last - first + 1, 1)[:, None]
    places = first[:, None] + jnp.minimum((u * span).astype(jnp.int32), span - 1)
    return Drawn(rows, places, last >= first)
