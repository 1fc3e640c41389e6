"""Frozen configurations of the three models; standard library only, so that every command can import them at once.

`to_dict` and `from_dict` are the format of `config.json` in a converted directory. Reading Hugging Face files is the
business of `convert`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tfm_jax.errors import TfmError

LayerType = Literal["linear_attention", "full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True)
class _Dict:
    """Exact round trip between a frozen dataclass and plain JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON values (tuples become lists when written)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict[C: _Dict](cls: type[C], values: dict[str, Any]) -> C:  # noqa: PYI019  (beartype cannot check Self)
        """Inverse of `to_dict`.

        A field with a default may be absent: some files are older than it, and its default is what they meant.

        Raises:
            TfmError: a field is missing or unknown.
        """
        fields = dataclasses.fields(cls)
        names = {field.name for field in fields}
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if unknown := sorted(values.keys() - names):
            message = (
                f"{cls.__name__} does not know the keys {unknown}; convert the checkpoint again with this version."
            )
            raise TfmError(message)
        if missing := sorted(required - values.keys()):
            message = f"{cls.__name__} lacks the keys {missing}; convert the checkpoint again with this version."
            raise TfmError(message)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclasses.dataclass(frozen=True)
class TargetConfig(_Dict):
    """Decoder-only target: a Gated DeltaNet hybrid (Qwen3-Next, Qwen3.5 / 3.6, of family `qwen3_5`) or Qwen3.

    `key_heads`, `value_heads`, `key_dim`, `value_dim` and `conv_width` describe the Gated DeltaNet layers and are 0 in
    a model without them. `rotary_dim` is the number of leading head dimensions that rope turns.

    `experts`, `experts_per_token` and `expert_size` (the inner width of one) describe a mixture of experts and are 0 in
    a dense model. In a mixture `intermediate_size` is the inner width of the shared expert, which every token passes,
    and `normalise_experts` says whether the weights of a token's experts are scaled to sum to 1.
    """

    family: Literal["qwen3_5", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_width: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalise_experts: bool = True

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            message = f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})."
            raise TfmError(message)
        if self.key_heads and self.value_heads % self.key_heads:
            message = f"value_heads ({self.value_heads}) must be a multiple of key_heads ({self.key_heads})."
            raise TfmError(message)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            message = f"rotary_dim ({self.rotary_dim}) must be even and at most head_dim ({self.head_dim})."
            raise TfmError(message)
        if self.experts_per_token > self.experts:
            message = f"experts_per_token ({self.experts_per_token}) must be at most experts ({self.experts})."
            raise TfmError(message)

    @property
    def hybrid(self) -> bool:
        """Qwen3.5 family: gated attention and zero-centred norms; Qwen3 has neither."""
        return self.family == "qwen3_5"

    @property
    def conv_widths(self) -> tuple[int, int, int]:
        """Channels of the short convolution, in order: all queries, all keys, all values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """All of them."""
        return sum(self.conv_widths)


@dataclasses.dataclass(frozen=True)
class DrafterConfig(_Dict):
    """DFlash block-diffusion drafter.

    `layer_causal[i]` says whether layer i is causal within the block, `layer_windows[i]` is its window in tokens, self
    included (0 = unlimited). `target_layers` are the 0-based target layers whose outputs it reads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_causal: tuple[bool, ...]
    layer_windows: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    block_size: int
    mask_token_id: int
    target_layers: tuple[int, ...]
    max_positions: int
    yarn_factor: float = 0.0
    yarn_original_positions: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if len(self.layer_causal) != len(self.layer_windows):
            lengths = f"{len(self.layer_causal)} and {len(self.layer_windows)}"
            message = f"layer_causal and layer_windows differ in length: {lengths}."
            raise TfmError(message)
        if self.depth < 1:
            message = f"block_size is {self.block_size}; a drafter needs at least 2."
            raise TfmError(message)

    @property
    def layers(self) -> int:
        """Number of draft layers."""
        return len(self.layer_causal)

    @property
    def depth(self) -> int:
        """Draft depths per block: slot 0 is the last emitted token itself."""
        return self.block_size - 1


@dataclasses.dataclass(frozen=True)
class WeaverConfig(_Dict):
    """Weaver adapter, generation 1 (`w1`: GELU, position table) or 2 (`w2`: SwiGLU, rotary)."""

    generation: Literal["w1", "w2"]
    hidden_size: int
    embed_size: int
    rank: int
    layers: int
    heads: int
    mlp_size: int
    max_depth: int
    pool_size: int
    rope_base: float = 0.0

    def __post_init__(self) -> None:
        if self.rank % self.heads:
            message = f"rank ({self.rank}) must be a multiple of heads ({self.heads})."
            raise TfmError(message)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.rank // self.heads


Method = Literal["tfm", "ddtree", "chain", "ar"]
METHODS: tuple[Method, ...] = ("tfm", "ddtree", "chain", "ar")
Verifier = Literal["target_only", "traversal", "rejection"]
VERIFIERS: tuple[Verifier, ...] = ("target_only", "traversal", "rejection")
FilterOrder = Literal["sequential", "joint"]
FILTER_ORDERS: tuple[FilterOrder, ...] = ("sequential", "joint")


@dataclasses.dataclass(frozen=True)
class Models:
    """Configurations of the models at hand; drafter and Weaver may be missing."""

    target: TargetConfig
    drafter: DrafterConfig | None = None
    weaver: WeaverConfig | None = None

    @property
    def methods(self) -> tuple[Method, ...]:
        """Methods that these models can run, the best first."""
        if self.drafter is None:
            return ("ar",)
        return METHODS if self.weaver is not None else ("ddtree", "chain", "ar")


TreeKind = Literal["pruned", "reference"]
TREE_KINDS: tuple[TreeKind, ...] = ("pruned", "reference")
DraftNoise = Literal["shared", "none"]
DRAFT_NOISES: tuple[DraftNoise, ...] = ("shared", "none")


@dataclasses.dataclass(frozen=True)
class TreePlan:
    """How trees grow.

    Attributes:
        pruned: keep the best of everything that the Weaver scored, not the nodes that it expanded; see
            `tfm_jax.growth.best_first_tree`.
        spine: keep the likeliest chain; see the same.
        shared_noise: drafts know the noise that the target draws with; without effect at temperature 0.
        budgets: ascending; if any, every round verifies the best so many nodes (see `tfm_jax.budget`), and the largest
            is the plan's budget.
    """

    pruned: bool = False
    spine: bool = False
    shared_noise: bool = False
    budgets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Static choices of decoding; every distinct plan is one compilation.

    `budget` bounds the tree's nodes without the root; `sample` says whether any row has a temperature above 0.
    `logprobs` is how many of the likeliest tokens are reported beside every emitted one; None reports nothing.
    """

    models: Models
    method: Method
    budget: int
    sample: bool
    verifier: Verifier = "target_only"
    logprobs: int | None = None
    tree: TreePlan = TreePlan()

    @property
    def depth(self) -> int:
        """Draft depths that a round works with; it emits at most one token more.

        The Weaver's prompt holds every slot of the block, so a small budget shortens the other methods only.
        """
        if self.method == "ar" or self.models.drafter is None:
            return 0
        depth = self.models.drafter.depth
        if self.method == "tfm" and self.models.weaver is not None:
            return min(depth, self.models.weaver.max_depth)
        return min(depth, self.budget)

    @property
    def for_prompts(self) -> DecodePlan:
        """The plan to read prompts with: all methods that use the drafter, and all budgets, share one compilation."""
        method = "ar" if self.method == "ar" else self.models.methods[0]
        return DecodePlan(self.models, method, budget=1, sample=False)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers that feed the drafter; none where no drafter runs."""
        return () if self.method == "ar" or self.models.drafter is None else self.models.drafter.target_layers
