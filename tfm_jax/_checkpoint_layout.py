"""Layout of a converted checkpoint: the shape of every parameter by dotted path, and the piece that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

Shape = tuple[int, ...]
Tree = dict[Any, Any]  # nested dict, layer numbers as int keys, arrays as leaves

# The recurrence of a Gated DeltaNet layer is float32 whatever the compute dtype.
_FLOAT32_ALWAYS = ("mixer.A_log", "mixer.dt_bias", "mixer.norm.scale")


def target_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Shape of every target parameter by dotted path."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"embed_tokens.embedding": (vocab, hidden)}
    for index, kind in enumerate(config.layer_types):
        mixer = _delta_shapes(config) if kind == "linear_attention" else _attention_shapes(config)
        layer = _target_block_shapes(config) | {f"mixer.{path}": shape for path, shape in mixer.items()}
        shapes |= {f"layers.{index}.{path}": shape for path, shape in layer.items()}
    shapes["norm.scale"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.kernel"] = (hidden, vocab)
    return shapes


def _attention_shapes(config: TargetConfig) -> dict[str, Shape]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gate = query if config.hybrid else 0
    return {
        "qkv.kernel": (config.hidden_size, query + gate + 2 * key),
        "q_norm.scale": (config.head_dim,),
        "k_norm.scale": (config.head_dim,),
        "out.kernel": (query, config.hidden_size),
    }


def _delta_shapes(config: TargetConfig) -> dict[str, Shape]:
    channels, value = config.conv_channels, config.value_heads * config.value_dim
    return {
        "in_proj.kernel": (config.hidden_size, channels + value + 2 * config.value_heads),
        "conv.kernel": (config.conv_width, channels),
        "A_log": (config.value_heads,),
        "dt_bias": (config.value_heads,),
        "norm.scale": (config.value_dim,),
        "out.kernel": (value, config.hidden_size),
    }


def _target_block_shapes(config: TargetConfig) -> dict[str, Shape]:
    hidden, experts, inner = config.hidden_size, config.experts, config.expert_size
    if not experts:
        return _block_shapes(hidden, config.intermediate_size)
    return _block_shapes(hidden, config.intermediate_size, mlp="mlp.shared") | {
        "mlp.shared_gate.kernel": (hidden, 1),
        "mlp.router.kernel": (hidden, experts),
        "mlp.experts.gate_up.kernel": (experts, hidden, 2 * inner),
        "mlp.experts.down.kernel": (experts, inner, hidden),
    }


def _block_shapes(hidden: int, inner: int, mlp: str = "mlp") -> dict[str, Shape]:
    return {
        "input_norm.scale": (hidden,),
        "post_norm.scale": (hidden,),
        f"{mlp}.gate_up.kernel": (hidden, 2 * inner),
        f"{mlp}.down.kernel": (inner, hidden),
    }


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Shape of every drafter parameter by dotted path."""
    hidden, head = config.hidden_size, config.head_dim
    query, key = config.heads * head, config.kv_heads * head
    layer = _block_shapes(hidden, config.intermediate_size) | {
        "q.kernel": (hidden, query),
        "kv.kernel": (hidden, 2 * key),
        "q_norm.scale": (head,),
        "k_norm.scale": (head,),
        "out.kernel": (query, hidden),
    }
    shapes: dict[str, Shape] = {
        "fc.kernel": (len(config.target_layers) * hidden, hidden),
        "hidden_norm.scale": (hidden,),
    }
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{path}": shape for path, shape in layer.items()}
    return shapes | {"norm.scale": (hidden,)}


def weaver_shapes(config: WeaverConfig) -> dict[str, Shape]:
    """Shape of every Weaver parameter by dotted path."""
    hidden, rank, mlp = config.hidden_size, config.rank, config.mlp_size
    if config.generation == "w1":
        inner = {"fc1": (rank, mlp), "fc2": (mlp, rank)}
    else:
        inner = {"mlp.gate_up": (rank, 2 * mlp), "mlp.down": (mlp, rank)}
    block = _norm_shapes("norm_attn", rank) | _norm_shapes("norm_mlp", rank)
    block |= {"qkv.kernel": (rank, 3 * rank), "out.kernel": (rank, rank)}
    for name, (inputs, outputs) in inner.items():
        block |= {f"{name}.kernel": (inputs, outputs), f"{name}.bias": (outputs,)}
    shapes = _norm_shapes("output_norm", hidden) | _norm_shapes("embed_norm", config.embed_size)
    for name, inputs in {"token_in": config.embed_size, "proposal_in": hidden}.items():
        shapes |= {f"{name}.kernel": (inputs, rank), f"{name}.bias": (rank,)}
    if config.generation == "w1":
        shapes["pos_emb"] = (config.max_depth, rank)
    for index in range(config.layers):
        shapes |= {f"blocks.{index}.{path}": shape for path, shape in block.items()}
    return shapes | _norm_shapes("out_norm", rank) | {"query_out.kernel": (rank, hidden)}


def _norm_shapes(name: str, channels: int) -> dict[str, Shape]:
    return {f"{name}.scale": (channels,), f"{name}.bias": (channels,)}


def nest(arrays: Mapping[str, Any]) -> Tree:
    """Nested dict from dotted paths; numbers become int keys."""
    tree: Tree = {}
    for path, array in arrays.items():
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def flatten(tree: Tree) -> dict[str, Any]:
    """Inverse of `nest`."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{path}": array for path, array in flatten(value).items()}
        else:
            flat[str(key)] = value
    return flat


def locate_piece(model: str, path: str) -> tuple[str, str]:
    """Piece that holds a parameter, and its path within the piece."""
    if model == "weaver":
        return model, path
    keys = path.split(".")
    depth = 2 if keys[0] == "layers" else 1
    return f"{model}/{'.'.join(keys[:depth])}", ".".join(keys[depth:])


def stored_dtype(path: str, own: np.dtype, wanted: str | None) -> np.dtype:
    """Dtype of an array of a piece: float32 for the recurrence's, else the wanted one, else its own."""
    if path in _FLOAT32_ALWAYS:
        return np.dtype(np.float32)
    return own if wanted is None else np.dtype(wanted)


def check_shapes(where: str, found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Check that a piece holds the arrays that it should.

    Raises:
        TfmError: an array is missing, superfluous or misshapen.
    """
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            message = f"{where} lacks the array {path} of shape {expected[path]}; convert again."
            raise TfmError(message)
        if path not in expected:
            message = f"{where} holds an unknown array {path} of shape {tuple(found[path])}; convert again."
            raise TfmError(message)
        if tuple(found[path]) != expected[path]:
            message = f"{where}: {path} has shape {tuple(found[path])} but its configuration says {expected[path]}."
            raise TfmError(message)
