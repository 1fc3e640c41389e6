"""Training loop: optimiser, one jitted step, exact resumption, logging.

A run is a directory:

    run.json          settings and inputs; a later call must agree with them
    log.jsonl         one object a logged step; evaluations have "evaluation": true
    checkpoints/      Orbax: float32 parameters and optimiser state, the last two of them

Everything random in a step comes from (seed, step), so that parameters, optimiser state and the step number are the
whole state. A run that is cut anywhere goes on from its last checkpoint and ends with the same bits as an uncut one, as
long as the compiled step is the same and deterministic: on a GPU set the XLA flag xla_gpu_exclude_nondeterministic_ops
and keep the compilation cache, since matrix products are chosen by timing.

Master parameters, optimiser state and losses are float32; the forward pass runs in the objective's dtype.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from tfm_jax.errors import TfmError
from tfm_jax.losses import Loss
from tfm_jax.state import pytree_dataclass

Tree = dict[Any, Any]
type Objective = Callable[[Tree, Any, Int[Array, ""]], Loss]
type Evaluation = Callable[[Tree], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is optimised.

    Attributes:
        steps: in all. May be changed between two calls as long as neither schedule has begun to decay.
        learning_rate: of the plateau.
        warmup: steps of linear growth from 0.
        decay: share of the steps, at the end, of linear decay to 0.
        weight_decay: decoupled; of matrices only.
        clip: largest global norm of the gradient.
        seed: of initialisation, batches and everything else.
        log_every: steps.
        save_every: steps.
        evaluate_every: steps.
    """

    steps: int
    learning_rate: float
    warmup: int = 100
    decay: float = 0.2
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    save_every: int = 500
    evaluate_every: int = 500

    def __post_init__(self) -> None:
        if self.steps < 1 or self.log_every < 1 or self.save_every < 1 or self.evaluate_every < 1:
            message = f"steps, log_every, save_every and evaluate_every must be at least 1: {self}."
            raise TfmError(message)

    @property
    def decay_start(self) -> int:
        """First step of the decay."""
        return self.steps - round(self.decay * self.steps)


@pytree_dataclass
class TrainState:
    """All that a run must keep."""

    step: Int[Array, ""]
    params: Tree
    optimizer: Any


def learning_rate(settings: Settings, step: ArrayLike) -> Float[Array, ""]:
    """Warm-up, plateau, linear decay to 0 ("WSD", Hu et al. 2024, arXiv 2404.06395)."""
    step = jnp.asarray(step, jnp.float32)
    warm = (step + 1.0) / max(settings.warmup, 1)
    cool = (settings.steps - step) / max(settings.steps - settings.decay_start, 1)
    return settings.learning_rate * jnp.clip(jnp.minimum(warm, cool), 0.0, 1.0)


def build_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Muon for the kernels of linear layers, AdamW for everything else, after one clip of the whole gradient.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one
    learning rate serves both. Embeddings, norms, biases and positions have no weight decay.
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.contrib.muon(
            lambda count: learning_rate(settings, count),
            beta=0.95,
            weight_decay=settings.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_muon_axes,  # pyrefly: ignore[bad-argument-type] - a dict is a pytree
        ),
    )


def _muon_axes(params: Tree) -> Tree:
    """`MuonDimensionNumbers` for kernels [in, out]; None, hence AdamW, for the rest and for short convolutions."""

    def axes(path: tuple, _: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", key)) for key in path]
        is_matrix = names[-1] == "kernel" and names[-2] != "conv"
        return optax.contrib.MuonDimensionNumbers() if is_matrix else None

    return jax.tree_util.tree_map_with_path(axes, params)


def make_step(
    objective: Objective, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]:
    """One jitted optimisation step (state, data) → (state, metrics); the state is donated, the data are not."""

    def step(state: TrainState, data: Any) -> tuple[TrainState, dict[str, Array]]:  # noqa: ANN401 - the objective's own
        def value(params: Tree) -> Loss:
            return objective(params, data, state.step)

        (loss, metrics), gradient = jax.value_and_grad(value, has_aux=True)(state.params)
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient)} | metrics
        return TrainState(state.step + 1, params, moments), metrics

    return jax.jit(step, donate_argnums=0)


def train(
    run: Path,
    *,
    objective: Objective,
    initial: Callable[[], Tree],
    data: Any,  # noqa: ANN401 - whatever the objective reads
    settings: Settings,
    inputs: dict[str, Any],
    evaluate: Evaluation | None = None,
    deadline: float | None = None,
) -> TrainState:
    """Trains until `settings.steps` or the deadline, from the run's last checkpoint if there is one.

    Args:
        run: directory of the run.
        objective: (parameters, data, step) → loss.
        initial: makes the float32 parameters of a new run.
        data: pytree of arrays, given to the objective in every step and never changed.
        settings: how to optimise.
        inputs: hashes and sizes that identify the data and the model; a later call must repeat them.
        evaluate: measures parameters every `evaluate_every` steps and at the end.
        deadline: `time.monotonic()` at which to save and stop.

    Returns:
        The state reached; finished if its step is `settings.steps`.

    Raises:
        TfmError: the directory belongs to another run, or the loss is not finite.
    """
    run = run.absolute()
    run.mkdir(parents=True, exist_ok=True)
    optimizer = build_optimizer(settings)
    with _open_checkpoints(run) as checkpoints:
        _agree(run, settings, inputs, checkpoints.latest_step() or 0)
        state = _restore(checkpoints, _start(initial, optimizer))
        begun = int(state.step)
        log = Log(run / "log.jsonl", settings.steps, begun)
        advance = make_step(objective, optimizer)
        for number in range(begun + 1, settings.steps + 1):
            state, metrics = advance(state, data)
            last = number == settings.steps
            if last or number % settings.log_every == 0:
                log.write(number, {"learning_rate": learning_rate(settings, number - 1), **metrics})
                last = last or (deadline is not None and time.monotonic() > deadline)
            if evaluate is not None and (number == settings.steps or number % settings.evaluate_every == 0):
                log.write(number, evaluate(state.params), evaluation=True)
            if last or number % settings.save_every == 0:
                checkpoints.save(number, args=ocp.args.StandardSave(_leaves(state)))
            if last:
                break
        checkpoints.wait_until_finished()
    return state


def _start(initial: Callable[[], Tree], optimizer: optax.GradientTransformation) -> TrainState:
    def build() -> TrainState:
        params = initial()
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(build)()  # one compilation, where every initialiser would be one


def _open_checkpoints(run: Path) -> ocp.CheckpointManager:
    logging.getLogger("absl").setLevel(logging.ERROR)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(run / "checkpoints", options=options)


def _leaves(state: TrainState) -> dict[str, Array]:
    """Arrays by their path, since Orbax does not keep the types of optax's containers."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _restore(checkpoints: ocp.CheckpointManager, fresh: TrainState) -> TrainState:
    """The last checkpoint in the containers of `fresh`, or `fresh` if there is none."""
    step = checkpoints.latest_step()
    if step is None:
        return fresh
    leaves = _leaves(fresh)
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in leaves.items()}
    saved = checkpoints.restore(step, args=ocp.args.StandardRestore(like))
    return jax.tree.unflatten(jax.tree.structure(fresh), [saved[name] for name in leaves])


def _agree(run: Path, settings: Settings, inputs: dict[str, Any], step: int) -> None:
    """Writes run.json, or checks it.

    Raises:
        TfmError: the earlier call had other settings or inputs, or another number of steps after the decay had begun.
    """
    path = run / "run.json"
    now = {"settings": dataclasses.asdict(settings), "inputs": inputs}
    if step:
        before = json.loads(path.read_text(encoding="utf-8"))
        earlier = Settings(**before["settings"])
        if earlier.steps != settings.steps and step > min(earlier.decay_start, settings.decay_start):
            message = f"{run} is at step {step}, where the decay has begun; go on with steps={earlier.steps}."
            raise TfmError(message)
        same = dataclasses.replace(earlier, steps=settings.steps) == settings
        if not same or before["inputs"] != json.loads(json.dumps(inputs)):
            message = f"{run} was begun with other settings or inputs (see its run.json); choose another directory."
            raise TfmError(message)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


class Log:
    """Metrics as JSON lines in a file, and for people on stderr. Lines after the step resumed from are dropped."""

    def __init__(self, path: Path, steps: int, begun: int) -> None:
        kept = []
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= begun]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._path, self._steps = path, steps
        self._begun, self._clock = begun, time.monotonic()

    def write(self, step: int, metrics: dict[str, Any], *, evaluation: bool = False) -> None:
        """Waits for the metrics' values and writes them.

        Raises:
            TfmError: the loss is not finite.
        """
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not jnp.isfinite(values.get("loss", 0.0)):
            message = f"the loss is {values['loss']} at step {step}; lower the learning rate and start again."
            raise TfmError(message)
        pace = (time.monotonic() - self._clock) / (step - self._begun)  # compilation included
        record = {"step": step, "evaluation": True} if evaluation else {"step": step, "seconds_a_step": pace}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | values) + "\n")
        kind = "evaluation " if evaluation else ""
        figures = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        left = "" if evaluation else f"  {pace * 1e3:.1f} ms a step, {pace * (self._steps - step):.0f} s left"
        sys.stderr.write(f"{kind}step {step}/{self._steps}  {figures}{left}\n")
