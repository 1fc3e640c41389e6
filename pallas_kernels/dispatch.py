"""Which form of a kernel runs: the one that is asked for, or the fastest that takes the arguments on this device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from jaxtyping import Array

type Implementation = Literal["auto", "mosaic", "triton", "xla", "reference"]
type Precision = Literal["default", "highest"]

# The module of each form, the fastest first. A form for GPUs also has `unsupported`, which takes the same arguments and
# says in one sentence which of them it cannot take, or nothing.
_FORMS: dict[str, dict[str, str]] = {
    "l2_normalise": {"xla": "xla", "reference": "reference"},
    "gdn_tree_verify": {"xla": "xla", "reference": "reference"},
    "gdn_commit": {"xla": "xla", "reference": "reference"},
    "gdn_chunk": {"xla": "xla", "reference": "reference"},
    "tree_conv": {"xla": "xla", "reference": "reference"},
    "tree_attention": {"xla": "xla_attention", "reference": "reference"},
    "top_k": {"triton": "triton_top_k", "xla": "xla_top_k", "reference": "reference"},
}
_GPU_FORMS = ("mosaic", "triton")
_log = logging.getLogger("pallas_kernels")


def implementations(op: str) -> tuple[str, ...]:
    """Forms of an operation, the fastest first; whether one runs depends on the device and on the arguments."""
    return tuple(_FORMS[op])


def default_implementation() -> str:
    """The form that "auto" prefers on this device; arguments that it cannot take fall back to a slower one."""
    return next((form for form in _GPU_FORMS if _device_lacks(form) is None), "xla")


def call(op: str, implementation: str, *arrays: Any, precision: str | None = None, **options: Any) -> Any:  # noqa: ANN401
    """One operation in one form.

    Args:
        op: name of the front door, and of the function in the form's module.
        implementation: a form, or "auto".
        arrays: operands, arrays or named tuples of them.
        precision: for operations that have the choice. "default" lets a form for GPUs spend fewer products, as its
            documented error allows; the other forms always compute as "highest".
        options: static arguments of the form.

    Raises:
        ValueError: unknown implementation or precision, or a form that cannot run here or take these arguments; the
            sentence says why and names one that can.
    """
    forms = _FORMS[op]
    if implementation not in ("auto", *forms):
        message = (
            f"unknown implementation {implementation!r} of {op}, choose from {', '.join(map(repr, forms))}, 'auto'"
        )
        raise ValueError(message)
    if precision not in (None, "default", "highest"):
        message = f"unknown precision {precision!r}, choose from 'default', 'highest'"
        raise ValueError(message)
    if implementation == "reference":
        return _on_host(_function(op, "reference"))(*arrays, **options)
    slow = functools.partial(_function(op, "xla"), **options)
    if implementation == "xla":
        return slow(*arrays)
    wanted = [form for form in forms if form in _GPU_FORMS and implementation in ("auto", form)]
    reasons = []
    for form in wanted:
        reason = _device_lacks(form) or _module(op, form).unsupported(*arrays, **options)
        if reason is None:
            _say_once(op, form, "")
            chosen = options if precision is None else {**options, "precision": precision}
            return _with_gradients(functools.partial(_function(op, form), **chosen), slow)(*arrays)
        reasons.append(f"{form}: {reason}")
    if implementation != "auto":
        message = f"{op} cannot run as {reasons[0]}; implementation='xla' takes these arguments on every device"
        raise ValueError(message)
    _say_once(op, "xla", "; ".join(reasons))
    return slow(*arrays)


def _module(op: str, form: str) -> ModuleType:
    """Imported when first needed: Mosaic and Triton take a second that a CPU need not spend."""
    return importlib.import_module(f"pallas_kernels.{_FORMS[op][form]}")


def _function(op: str, form: str) -> Callable:
    return getattr(_module(op, form), op)


@functools.cache
def _device_lacks(form: str) -> str | None:
    """What keeps a form for GPUs off the default device, or nothing."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA GPU and this is a {device.platform.upper()}"
    major = int(device.compute_capability.partition(".")[0])
    if form == "mosaic" and major != 9:  # noqa: PLR2004 - its matrix instruction, wgmma, exists in 9.x alone
        return f"it needs a Hopper GPU (compute capability 9.x) and this one has {device.compute_capability}"
    if form == "triton" and importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'tfm-jax[cuda]')"
    return None


def _with_gradients(fast: Callable, slow: Callable) -> Callable:
    """`fast` where only values are wanted and the program is lowered for a GPU, else `slow`, which has gradients."""

    @jax.custom_vjp
    def run(*arrays: Array) -> Any:  # noqa: ANN401 - whatever the operation returns
        return lax.platform_dependent(*arrays, cuda=fast, default=slow)

    run.defvjp(lambda *arrays: jax.vjp(slow, *arrays), lambda pull, cotangent: pull(cotangent))
    return run


@functools.cache
def _say_once(op: str, form: str, reasons: str) -> None:
    _log.info("%s runs as %s%s", op, form, f" ({reasons})" if reasons else "")


def _on_host(oracle: Callable) -> Callable:
    """The numpy oracle as a function of jax arrays."""

    def to_host(x: Array | int) -> np.ndarray | int:
        return np.asarray(x) if isinstance(x, jax.Array) else x

    def run(*arrays: Any, **options: Any) -> Any:  # noqa: ANN401
        arrays, options = jax.tree.map(to_host, (arrays, options))
        return jax.tree.map(jnp.asarray, oracle(*arrays, **options))

    return run
