"""Process-wide set-up: the one place that sets environment variables for jax, and what it reports about the device.

`configure` must run before jax is imported, so this module imports jax only inside functions. Everything is a default:
a variable that the user has set stays as it is.
"""

from __future__ import annotations

import os
import resource
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax.numpy as jnp


def configure() -> None:
    """Set jax's environment defaults: GPU memory share and the persistent compilation cache.

    The cache lies in `$XDG_CACHE_HOME/tfm_jax` (`~/.cache/tfm_jax`). JAX_COMPILATION_CACHE_DIR moves it,
    JAX_ENABLE_COMPILATION_CACHE=false turns it off. Programs are loaded from it and run, so a folder that others can
    write to is not used.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")  # jax takes 0.75; weights and caches need the rest
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and (folder := _private_cache()):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


def _private_cache() -> Path | None:
    """The user's cache folder, made where it is missing; None where it cannot be made or is not the user's alone."""
    try:
        root = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(root) if root else Path.home() / ".cache") / "tfm_jax"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # read-only or no home folder: compile without a cache
        return None
    shared = status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if shared else folder


def default_dtype() -> jnp.dtype:
    """Compute dtype where the user names none: float32 on a CPU, bfloat16 on an accelerator."""
    import jax
    import jax.numpy as jnp

    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def device_name() -> str:
    """Backend and kind of the first device, such as `gpu NVIDIA H200` or `cpu`."""
    import jax

    device = jax.devices()[0]
    return device.platform if device.device_kind == device.platform else f"{device.platform} {device.device_kind}"


def peak_memory_bytes() -> int:
    """Largest memory use so far: of the device's allocator, or on a CPU of the whole process (resident set)."""
    import jax

    if statistics := jax.devices()[0].memory_stats():
        return statistics["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
