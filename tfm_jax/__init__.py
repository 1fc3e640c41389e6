"""Tree speculative decoding for hybrid language models in JAX.

    engine = tfm_jax.load_demo()
    engine.generate([engine.tokenizer.encode("def fibonacci(n):")])

Names are imported on first use, so that a command can answer `--help` without loading jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfm_jax.config import DecodePlan as DecodePlan
    from tfm_jax.config import DrafterConfig as DrafterConfig
    from tfm_jax.config import Models as Models
    from tfm_jax.config import TargetConfig as TargetConfig
    from tfm_jax.config import WeaverConfig as WeaverConfig
    from tfm_jax.decode import RoundOutput as RoundOutput
    from tfm_jax.decode import propose as propose
    from tfm_jax.decode import speculative_round as speculative_round
    from tfm_jax.decode import verify_and_commit as verify_and_commit
    from tfm_jax.engine import Engine as Engine
    from tfm_jax.engine import Generation as Generation
    from tfm_jax.engine import Round as Round
    from tfm_jax.engine import RoundStats as RoundStats
    from tfm_jax.engine import RoundTrace as RoundTrace
    from tfm_jax.engine import TokenLogprobs as TokenLogprobs
    from tfm_jax.engine import load as load
    from tfm_jax.engine import load_demo as load_demo
    from tfm_jax.errors import TfmError as TfmError
    from tfm_jax.state import DecodeState as DecodeState

__version__ = "0.1.0"

_HOME = {
    "config": ("DecodePlan", "DrafterConfig", "Models", "TargetConfig", "WeaverConfig"),
    "decode": ("RoundOutput", "propose", "speculative_round", "verify_and_commit"),
    "engine": ("Engine", "Generation", "Round", "RoundStats", "RoundTrace", "TokenLogprobs", "load", "load_demo"),
    "errors": ("TfmError",),
    "state": ("DecodeState",),
}
_MODULES = {name: f"tfm_jax.{module}" for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _MODULES:
        message = f"module 'tfm_jax' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
