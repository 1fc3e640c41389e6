"""The public kernel that `bench.py kernels` compares text with: fla-core's chunk_gated_delta_rule (torch and Triton).

It is installed by hand for a comparison (`pip install fla-core==0.6.0 torch einops`) and no dependency of anything.
"""

from __future__ import annotations

import importlib.util
import os

import jax.numpy as jnp
from _kernel_timing import Layers

from pallas_kernels import GdnChunkResult

NAME = "fla-core"


class FlaProgram:
    """Called like a `Program` of `pallas_kernels.gdn_chunk`, on the same arrays; the profiler sees its kernels too."""

    def __init__(self) -> None:
        """Imports it.

        Raises:
            ValueError: it is not installed.
        """
        if importlib.util.find_spec("fla") is None:
            message = f"{NAME} is not installed"
            raise ValueError(message)
        if not os.environ.get("TRITON_CACHE_DIR", "unset"):
            del os.environ["TRITON_CACHE_DIR"]  # jax-triton empties it, and Triton then finds no cache
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

        self._torch, self._rule = torch, chunk_gated_delta_rule

    def __call__(self, layers: Layers) -> list[GdnChunkResult]:
        """All layers in turn, all of whose tokens must be valid."""
        results = []
        for *rows, _, state in layers:
            q, k, v, g, beta, start = map(self._torch.from_dlpack, (*rows, state))
            results += self._rule(
                q, k, v, g, beta, initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
        self._torch.cuda.synchronize()
        arrays = [jnp.from_dlpack(x) for x in results]
        return [GdnChunkResult(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
