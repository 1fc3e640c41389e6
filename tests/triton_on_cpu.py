"""Triton kernels on a CPU: a jax-triton that interprets them, program after program, with numpy.

Triton decides when it is imported whether kernels are compiled or interpreted, its own library's included. So it is
imported a second time, and the tests that compile keep the first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

_SECOND = ("triton", *(f"pallas_kernels.triton_{op}_kernel" for op in ("gdn", "attention", "top_k")))


class _Pointer:
    """What the interpreter takes for a tensor in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.dtype = array.dtype.name
        self._array = array

    def data_ptr(self) -> int:
        return self._array.ctypes.data


def _is_second(name: str) -> bool:
    """Whether a module is imported again; Triton's compiled library cannot be."""
    return not name.startswith("triton._C") and any(name == x or name.startswith(x + ".") for x in _SECOND)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, `import jax_triton` finds the interpreter; results begin as NaN or 77 where no kernel writes."""
    first = {name: module for name, module in sys.modules.items() if _is_second(name) or name == "jax_triton"}
    for name in first:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        sys.modules["jax_triton"] = _stand_in()
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        for name in [name for name in sys.modules if _is_second(name) or name == "jax_triton"]:
            del sys.modules[name]
        sys.modules.update(first)


def _stand_in() -> ModuleType:
    interpreter, language = map(importlib.import_module, ("triton.runtime.interpreter", "triton.language"))
    executor, builder, handle = interpreter.GridExecutor, interpreter.InterpreterBuilder, interpreter.TensorHandle
    executor._init_args_hst = lambda _, args, named: (args, named)  # noqa: SLF001 - for torch's tensors
    executor._restore_args_dev = lambda *_: None  # noqa: SLF001
    dot, patch_tensor = builder.create_dot, interpreter._patch_lang_tensor  # noqa: SLF001

    def widen(x: Any) -> Any:  # noqa: ANN401 - a tensor of the interpreter, which has bfloat16 as uint16
        if x.dtype.scalar != language.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def patch(tensor: Any, scope: Any) -> None:  # noqa: ANN401
        """Also lets an array of one number be an index, which numpy no longer does by itself."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder.create_dot = lambda self, a, b, *others: dot(self, widen(a), widen(b), *others)
    interpreter._patch_lang_tensor = patch  # noqa: SLF001

    def triton_call(
        *operands: jax.Array,
        kernel: Any,  # noqa: ANN401
        out_shape: Any,  # noqa: ANN401
        grid: tuple[int, ...],
        input_output_aliases: dict[int, int] | None = None,
        **sizes: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        shapes, tree = jax.tree.flatten(out_shape)

        def run(*arrays: jax.Array) -> list[np.ndarray]:
            inputs = [np.array(x) for x in arrays]
            fills = [np.nan if jax.dtypes.issubdtype(x.dtype, np.floating) else 77 for x in shapes]
            outputs = [np.full(x.shape, fill, x.dtype) for x, fill in zip(shapes, fills, strict=True)]
            for source, place in (input_output_aliases or {}).items():
                outputs[place] = inputs[source]
            kernel[grid](*map(_Pointer, (*inputs, *outputs)), **sizes)
            return outputs

        return jax.tree.unflatten(tree, jax.pure_callback(run, shapes, *operands))

    module = ModuleType("jax_triton")
    module.triton_call = triton_call  # pyrefly: ignore[missing-attribute]
    return module
