"""Loads an OUT on eight CPU devices; a program for `test_checkpoint`, since the number of devices is fixed at start.

`python sharded_loading.py OUT TARGET` prints one line of JSON: how many arrays of OUT hold the values of a plain load,
how many are split, and the tokens that TARGET generates on one device and on eight.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tfm_jax
from tfm_jax._checkpoint_layout import flatten
from tfm_jax.checkpoint import load_checkpoint

MESH = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto, AxisType.Auto))


def split(name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Kernels over the whole mesh where it divides them, everything else on every device."""
    spec = PartitionSpec()
    if name.endswith("kernel") and shape[0] % 2 == 0 and shape[-1] % 4 == 0:
        spec = PartitionSpec("rows", "columns")
    elif shape[-1] % 8 == 0:
        spec = PartitionSpec(*[None] * (len(shape) - 1), ("rows", "columns"))
    return NamedSharding(MESH, spec)


def main() -> None:
    """Compare."""
    plain = load_checkpoint(sys.argv[1], "bfloat16")
    exact, parts = 0, 0
    for dtype in ("bfloat16", "float32"):
        sharded = load_checkpoint(sys.argv[1], dtype, sharding=split)
        for model in ("target", "drafter", "weaver"):
            expected = flatten(getattr(plain, model))
            for path, array in flatten(getattr(sharded, model)).items():
                assert array.sharding == split(f"{model}/{path}", array.shape), path
                assert len(array.addressable_shards) == 8
                exact += np.array_equal(np.asarray(array), np.asarray(expected[path]).astype(array.dtype))
                parts += not array.is_fully_replicated
    replicated = NamedSharding(MESH, PartitionSpec())
    engines = tfm_jax.load(sys.argv[2]), tfm_jax.load(sys.argv[2], sharding=replicated)
    options = {"method": "ar", "max_new_tokens": 8, "ignore_eos": True}
    tokens = [engine.generate([[1, 2, 3]], **options)[0].token_ids for engine in engines]
    sys.stdout.write(json.dumps({"exact": exact, "split": parts, "tokens": tokens}))


if __name__ == "__main__":
    main()
