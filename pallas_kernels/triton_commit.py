"""Commit of the accepted path into the recurrent states of all layers on NVIDIA GPUs, in Triton (through jax-triton).

A state is read once and written once, in place; nothing else is large, so that copy bandwidth is the bound. A launch
serves `LAYERS` layers: one layer alone ends before the memory system is busy.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

LAYERS = 4  # a launch; the kernel has as many pointers of each kind
BLOCK = 64  # key rows of a state a program
MAX_STEPS = 64
_WIDTHS = (16, 32, 64, 128, 256)
_SMALLEST_DOT = 16  # rows of an operand


def unsupported(
    states: tuple[Array, ...],
    keys: tuple[Array, ...],
    updates: tuple[Array, ...],
    path_decays: tuple[Array, ...],
    path: Array,
    count: Array,  # noqa: ARG001 - any is taken
) -> str | None:
    """What keeps these arguments from `commit_states`, in one sentence, or nothing."""
    for name, layers in (("state", states), ("key", keys), ("update", updates), ("path_decay", path_decays)):
        kinds = sorted({f"{x.dtype.name}{list(x.shape)}" for x in layers})
        if len(kinds) > 1:
            return f"it takes layers that are alike and these have a {name} of {' and '.join(kinds)}"
    if any(x.dtype.name != "float32" for x in (states[0], updates[0], path_decays[0])):
        return f"it takes states in float32 and these are {states[0].dtype.name}"
    key, value = states[0].shape[2:]
    if key not in _WIDTHS or value not in _WIDTHS:
        return f"it takes heads of 16, 32, 64, 128 or 256 and these are {key} and {value}"
    if path.shape[1] > MAX_STEPS:
        return f"it takes paths of up to {MAX_STEPS} nodes and this one may have {path.shape[1]}"
    return None


def commit_states(
    states: tuple[Float[Array, "batch value_heads key value"], ...],
    keys: tuple[Float[Array, "batch nodes key_heads key"], ...],
    updates: tuple[Float[Array, "batch nodes value_heads value"], ...],
    path_decays: tuple[Float[Array, "batch nodes value_heads"], ...],
    path: Int[Array, "batch steps"],
    count: Int[Array, " batch"],
    *,
    block: int = BLOCK,
    warps: int = 4,
) -> tuple[Float[Array, "batch value_heads key value"], ...]:
    """See `pallas_kernels.commit_states`; the arguments must be ones that `unsupported` has nothing against."""
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_commit_kernel import commit_layers

    batch, value_heads, key_size, value_size = states[0].shape
    nodes, key_heads = keys[0].shape[1:3]
    block = min(block, key_size)
    committed = []
    for first in range(0, len(states), LAYERS):
        group = [layer[first : first + LAYERS] for layer in (keys, updates, path_decays, states)]
        used = len(group[0])
        unused = LAYERS - used  # pointers that the grid leaves alone
        filled = [x for layers in group for x in (*layers, *[path_decays[0]] * unused)]
        shapes = [jax.ShapeDtypeStruct(state.shape, state.dtype) for state in group[-1]]
        results = jax_triton.triton_call(
            path,
            count,
            *filled,
            kernel=commit_layers,
            out_shape=[*shapes, *[jax.ShapeDtypeStruct((1,), "float32")] * unused],
            input_output_aliases={2 + 3 * LAYERS + i: i for i in range(used)},
            grid=(key_size // block, value_heads * batch, used),
            name="commit_states",
            num_warps=warps,
            nodes=nodes,
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
            max_steps=path.shape[1],
            steps=max(_SMALLEST_DOT, 1 << (path.shape[1] - 1).bit_length()),
            block=block,
        )
        committed += results[:used]
    return tuple(committed)
