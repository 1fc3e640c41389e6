"""The Mosaic kernel of the tree convolution: interpreted on a CPU and lowered for Hopper, or run there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_cases import random_tree, taps_of

from pallas_kernels import reference
from pallas_kernels.mosaic_conv import tree_conv, unsupported

HOPPERS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
ROUNDING = 2.5e-3  # of bfloat16 results


@pytest.fixture(params=[pytest.param(True, id="interpreted"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)])
def interpreted(request: pytest.FixtureRequest) -> bool:
    return request.param


def operands(nodes: int, channels: int, *, batch: int = 1, width: int = 4) -> tuple[jax.Array, ...]:
    """Trees differ between the rows of a batch."""
    rng = np.random.default_rng(nodes)
    taps = np.stack([taps_of(random_tree(rng, nodes), width) for _ in range(batch)])
    shapes = ((batch, nodes, channels), (batch, width - 1, channels), (width, channels))
    return (*(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes), jnp.asarray(taps))


@pytest.mark.parametrize(
    ("nodes", "widths", "batch", "width"),
    [
        (1, (128,), 1, 4),
        (5, (256, 256, 512), 2, 4),
        (16, (128, 384), 1, 3),
        (7, (1024, 2048), 1, 2),
        (64, (2048, 2048, 6144), 1, 4),
    ],
)
def test_results_agree_with_the_loop_in_float64(
    nodes: int, widths: tuple[int, ...], batch: int, width: int, *, interpreted: bool
) -> None:
    arguments = operands(nodes, sum(widths), batch=batch, width=width)
    assert unsupported(*arguments, widths=widths) is None
    if interpreted:
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
        for kind in HOPPERS:
            device = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
            with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
                lowered = jax.jit(functools.partial(tree_conv, widths=widths)).trace(*structs)
                assert "tree_conv" in lowered.lower(lowering_platforms=("cuda",)).as_text()
        if nodes > 16:  # lowered, which is quick; the interpreter would take minutes
            return
    actual = tree_conv(*arguments, widths=widths, interpret=plgpu.InterpretGPUParams() if interpreted else None)
    inputs, window, kernel, taps = (np.asarray(x, x.dtype if x.dtype == jnp.int32 else np.float64) for x in arguments)
    expected = reference.tree_conv(inputs, window, kernel, taps, widths=widths)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(x, np.float64) - y) < ROUNDING * np.linalg.norm(y)


def test_what_it_cannot_take_is_named() -> None:
    inputs, window, kernel, taps = operands(3, 512)
    assert "window is float32" in str(unsupported(inputs, window.astype(jnp.float32), kernel, taps, widths=(512,)))
    assert "widths are (192, 320)" in str(unsupported(inputs, window, kernel, taps, widths=(192, 320)))
