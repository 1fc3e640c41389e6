"""Golden Weavers, with the target matrices that their golden arrays were made with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.hf_config import parse_weaver
from convert.pth_io import PthReader
from convert.rules import map_weaver
from convert.safetensors_io import SafetensorsReader
from tfm_jax.config import WeaverConfig
from tfm_jax.weaver import Weaver, WeaverTables

GOLDENS = Path(__file__).parent / "data" / "goldens"


# Compiling takes these tests' time, running does not.
jit_quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class GoldenWeaver(NamedTuple):
    """A converted Weaver in float32."""

    config: WeaverConfig
    params: dict[str, Any]
    tables: WeaverTables

    def run(self, method: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the method takes
        """Compiled `Weaver.<method>`; options are static."""
        return compile_method(self.config, method, tuple(options.items()))(self.params, *arguments)


@functools.cache
def compile_method(config: WeaverConfig, method: str, options: tuple[tuple[str, Any], ...] = ()) -> Callable:
    """Compiled function of the parameters and the arguments of a method."""
    return jit_quickly(
        lambda params, *arguments: getattr(bind_weaver(config, params), method)(*arguments, **dict(options))
    )


@functools.cache
def load_weaver(name: str) -> GoldenWeaver:
    """Weaver of `tfm/<name>.pth` by way of the conversion rules."""
    file = GOLDENS / "tfm" / f"{name}.pth"
    reader = PthReader(file)
    config = parse_weaver(reader.values, reader.tensors, str(file))
    model = map_weaver(reader, config, str(file))
    params: dict[str, Any] = {}
    for path in model.rules:
        *parents, leaf = (int(part) if part.isdigit() else part for part in path.split("."))
        place: dict[Any, Any] = params
        for part in parents:
            place = place.setdefault(part, {})
        place[leaf] = jnp.asarray(model.make_parameter(path), jnp.float32)
    return GoldenWeaver(config, params, compile_method(config, "tables")(params, *target_matrices()))


def bind_weaver(config: WeaverConfig, params: dict[str, Any]) -> Weaver:
    """NNX module over given arrays."""
    return nnx.merge(_graph(config), params)


@functools.cache
def _graph(config: WeaverConfig) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: Weaver(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))))


@functools.cache
def target_matrices() -> tuple[jnp.ndarray, jnp.ndarray]:
    """Embedding and output head, both [vocab, hidden]."""
    reader = SafetensorsReader(GOLDENS / "qwen3_5_untied")
    embedding = next(name for name in reader.tensors if name.endswith("embed_tokens.weight"))
    return jnp.asarray(reader.read(embedding), jnp.float32), jnp.asarray(reader.read("lm_head.weight"), jnp.float32)


def golden_group(file: str, group: str = "") -> dict[str, np.ndarray]:
    """Arrays of `tfm/<file>.npz` whose names begin with `group/`, by the rest of their names."""
    with np.load(GOLDENS / "tfm" / f"{file}.npz") as arrays:
        prefix = f"{group}/" if group else ""
        return {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}


def round_inputs(golden: dict[str, np.ndarray]) -> tuple[jnp.ndarray, jnp.ndarray]:
    """The target's feature and the drafter's outputs of a golden group, as a batch of one."""
    return jnp.asarray(golden["f"])[None], jnp.asarray(golden["z"])[None]
