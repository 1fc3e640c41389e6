"""Tree speculative decoding for hybrid language models in JAX.

    engine = tfm_jax.load_demo()
    engine.generate([engine.tokenizer.encode("def fibonacci(n):")])

Names are imported on first use, so that a command can answer `--help` without loading jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfm_jax.config import DecodePlan, DrafterConfig, Models, TargetConfig, WeaverConfig
    from tfm_jax.decode import RoundOutput, emit_first, empty_state, prefill_piece, run_rounds, speculative_round
    from tfm_jax.engine import Engine, Generation, Round, RoundStats, RoundTrace, load, load_demo
    from tfm_jax.errors import TfmError
    from tfm_jax.state import DecodeState

__version__ = "0.1.0"

_HOME = {
    "config": ("DecodePlan", "DrafterConfig", "Models", "TargetConfig", "WeaverConfig"),
    "decode": ("RoundOutput", "emit_first", "empty_state", "prefill_piece", "run_rounds", "speculative_round"),
    "engine": ("Engine", "Generation", "Round", "RoundStats", "RoundTrace", "load", "load_demo"),
    "errors": ("TfmError",),
    "state": ("DecodeState",),
}
_MODULES = {name: f"tfm_jax.{module}" for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - the names above


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _MODULES:
        message = f"module 'tfm_jax' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(_MODULES[name]), name)
