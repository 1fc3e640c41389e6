"""Model sizes that the training scripts know by name."""

from __future__ import annotations

from typing import NamedTuple

from tfm_jax.config import DrafterConfig, TargetConfig, WeaverConfig
from tfm_jax.errors import TfmError

END_OF_TEXT, MASK = 0, 3  # ids that scripts/make_tokenizer.py gives <|endoftext|> and <|mask|>
_PERIOD = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


class Trio(NamedTuple):
    """Configurations of a target, a drafter on its taps and a Weaver for the two."""

    target: TargetConfig
    drafter: DrafterConfig
    weaver: WeaverConfig


def find_preset(name: str) -> Trio:
    """The trio of a name.

    Raises:
        TfmError: no preset has this name.
    """
    presets = {"demo": demo_trio, "tiny": tiny_trio}
    if name not in presets:
        message = f"no preset is called {name!r}; choose one of {sorted(presets)}."
        raise TfmError(message)
    return presets[name]()


def demo_trio() -> Trio:
    """The shipped demo: 18.0 M + 4.3 M + 0.8 M parameters, which two bytes each keep below 47 MB."""
    target = TargetConfig(
        family="qwen3_5",
        vocab_size=16384,
        hidden_size=384,
        intermediate_size=640,
        layer_types=2 * _PERIOD,
        heads=6,
        kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied_embeddings=True,
        max_positions=4096,
        key_heads=4,
        value_heads=8,
        key_dim=64,
        value_dim=64,
        conv_width=4,
    )
    drafter = DrafterConfig(
        vocab_size=16384,
        hidden_size=384,
        intermediate_size=768,
        layer_causal=(True, True, False),
        layer_windows=(256, 256, 0),
        heads=6,
        kv_heads=2,
        head_dim=64,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        block_size=16,
        mask_token_id=MASK,
        target_layers=(1, 3, 6),
        max_positions=4096,
    )
    weaver = WeaverConfig(
        generation="w1",
        hidden_size=384,
        embed_size=384,
        rank=256,
        layers=1,
        heads=4,
        mlp_size=512,
        max_depth=15,
        pool_size=512,
    )
    return Trio(target, drafter, weaver)


def tiny_trio() -> Trio:
    """Seconds on a CPU: for tests, and to try the scripts before a real run."""
    target = TargetConfig(
        family="qwen3_5",
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        layer_types=_PERIOD,
        heads=2,
        kv_heads=1,
        head_dim=16,
        rotary_dim=8,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied_embeddings=True,
        max_positions=512,
        key_heads=2,
        value_heads=4,
        key_dim=8,
        value_dim=8,
        conv_width=4,
    )
    drafter = DrafterConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        layer_causal=(True, False),
        layer_windows=(16, 0),
        heads=2,
        kv_heads=1,
        head_dim=16,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        block_size=4,
        mask_token_id=MASK,
        target_layers=(0, 2),
        max_positions=512,
    )
    weaver = WeaverConfig(
        generation="w1",
        hidden_size=32,
        embed_size=32,
        rank=16,
        layers=1,
        heads=2,
        mlp_size=24,
        max_depth=3,
        pool_size=8,
    )
    return Trio(target, drafter, weaver)
