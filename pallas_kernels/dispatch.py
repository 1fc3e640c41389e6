"""Which form of a kernel runs: the one that is asked for, or the fastest that takes the arguments on this device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


class _Form(NamedTuple):
    """Where a form is. The function has the operation's name.

    `check`, of forms for GPUs, takes the same arguments and says in a sentence which the form cannot take, or nothing.
    """

    module: str
    check: str = "unsupported"


_REFERENCE = _Form("reference")
_XLA = _Form("xla")
_FORMS: dict[str, dict[str, _Form]] = {  # the fastest first (but for small trees: `call`)
    "gdn_tree_verify": {
        "mosaic": _Form("mosaic_gdn"),
        "triton": _Form("triton_gdn"),
        "xla": _XLA,
        "reference": _REFERENCE,
    },
    "commit_states": {"mosaic": _Form("mosaic_commit"), "xla": _Form("xla_commit"), "reference": _REFERENCE},
    "commit_rows": {
        "mosaic": _Form("mosaic_commit", "unsupported_rows"),
        "xla": _Form("xla_commit"),
        "reference": _REFERENCE,
    },
    "gdn_chunk": {"mosaic": _Form("mosaic_chunk"), "xla": _XLA, "reference": _REFERENCE},
    "tree_conv": {"mosaic": _Form("mosaic_conv"), "xla": _XLA, "reference": _REFERENCE},
    "tree_attention": {
        "mosaic": _Form("mosaic_attention"),
        "triton": _Form("triton_attention"),
        "xla": _Form("xla_attention"),
        "reference": _REFERENCE,
    },
    "top_k": {"triton": _Form("triton_top_k"), "xla": _Form("xla_top_k"), "reference": _REFERENCE},
    "weaver_tree": {
        "triton": _Form("triton_weaver_tree"),
        "xla": _Form("xla_weaver_tree"),
        "reference": _Form("reference_weaver_tree"),
    },
}
_GPU_FORMS = ("mosaic", "triton")
_OLDEST_TRITON = 8  # compute capability of Ampere, the first with products of bfloat16
_FEW_NODES = 16  # up to which the Triton form of tree verification is faster (benchmarks/kernels-h200.json)
_log = logging.getLogger("pallas_kernels")


def implementations(op: str) -> tuple[str, ...]:
    """Forms of an operation, the fastest first; whether one runs depends on the device and on the arguments."""
    return tuple(_FORMS[op])


def runs_here(op: str, form: str) -> bool:
    """Whether this device runs a form of an operation, if it takes the arguments."""
    return form in _FORMS[op] and (form not in _GPU_FORMS or device_lacks(form) is None)


def default_implementation() -> str:
    """The form that "auto" prefers on this device; arguments that it cannot take fall back to a slower one."""
    return next((form for form in _GPU_FORMS if device_lacks(form) is None), "xla")


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
        known = ", ".join(map(repr, ("auto", *forms)))
        message = f"unknown implementation {implementation!r} of {op}, choose from {known}"
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
    if op == "gdn_tree_verify" and arrays[0].shape[1] <= _FEW_NODES:
        wanted.reverse()
    reasons = []
    for form in wanted:
        chosen = options if precision is None else {**options, "precision": precision}
        reason = device_lacks(form) or _check(op, form)(*arrays, **chosen)
        if reason is None:
            _say_once(op, form, "")
            return _with_gradients(functools.partial(_function(op, form), **chosen), slow)(*arrays)
        reasons.append(f"{form}: {reason}")
    if implementation != "auto":
        message = f"{op} cannot run as {reasons[0]}; implementation='xla' takes these arguments on every device"
        raise ValueError(message)
    _say_once(op, "xla", "; ".join(reasons))
    return slow(*arrays)


def _module(op: str, form: str) -> ModuleType:
    """Imported when first needed: Mosaic and Triton take a second that a CPU need not spend."""
    return importlib.import_module(f"pallas_kernels.{_FORMS[op][form].module}")


def _function(op: str, form: str) -> Callable:
    return getattr(_module(op, form), op)


def _check(op: str, form: str) -> Callable:
    return getattr(_module(op, form), _FORMS[op][form].check)


@functools.cache
def device_lacks(form: str) -> str | None:
    """What keeps a form for GPUs off the default device, or nothing."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA GPU and this is a {device.platform.upper()}"
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if not major.isdigit():
        return f"it needs an NVIDIA GPU and this is a {device.device_kind}"
    if form == "mosaic" and major != "9":  # its matrix instruction, wgmma, exists in 9.x alone
        return f"it needs a Hopper GPU (compute capability 9.x) and this one has {device.compute_capability}"
    if form == "triton" and int(major) < _OLDEST_TRITON:
        return f"it needs compute capability {_OLDEST_TRITON}.0 or newer and this GPU has {device.compute_capability}"
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
