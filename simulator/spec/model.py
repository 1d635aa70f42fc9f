"""The transformer that is trained: every dimension that changes its cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "relu", "swiglu", "geglu"]
Position = Literal["learned", "rope", "alibi", "none"]

GATED_ACTIVATIONS = ("swiglu", "geglu")


@dataclass(frozen=True)
class MoeSpec:
    """Mixture-of-experts layers.

    ``experts`` routed experts of FFN width ``ffn`` each, ``top_k`` of them per token;
    ``shared_experts`` always-on experts of width ``shared_ffn`` each (default ``ffn``). The first
    ``dense_layers`` layers stay dense with the model's own ``ffn``; every ``every``-th layer after
    them is an MoE layer.
    """

    experts: int
    top_k: int
    ffn: int
    shared_experts: int = 0
    shared_ffn: int | None = None
    shared_gate: bool = False
    router_bias: bool = False
    dense_layers: int = 0
    every: int = 1

    @property
    def shared_width(self) -> int:
        """FFN width of all shared experts together."""
        return self.shared_experts * (self.shared_ffn if self.shared_ffn is not None else self.ffn)


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

    ``q_lora_rank`` is ``None`` where queries aren't compressed (V2-Lite).
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class VisionSpec:
    """Patch embedding and classifier of a vision transformer encoder."""

    image_size: int
    patch_size: int
    channels: int = 3
    classes: int = 0
    class_token: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A transformer, decoder or encoder, as the cost model sees it.

    Widths are in elements. ``kv_heads`` below ``heads`` is grouped-query attention. ``ffn`` is the
    inner width of the dense MLP (of one of the two halves where the activation is gated).
    ``window`` is the attention span in tokens of the layers that ``window_layers`` counts; the
    other layers attend to the whole sequence. ``norms_per_layer`` counts norms of width ``hidden``
    (4 in Gemma 2/3); ``qk_norm`` adds one norm of width ``head_dim`` each for queries and keys.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    norm: Norm = "rmsnorm"
    activation: Activation = "swiglu"
    position: Position = "rope"
    max_positions: int = 0
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: Literal["none", "head", "full"] = "none"
    final_norm: bool = True
    embedding_norm: bool = False
    parallel_block: bool = False
    causal: bool = True
    dropout: float = 0.0
    window: int | None = None
    window_layers: int = 0
    token_types: int = 0
    pooler: bool = False
    mlm_head: bool = False
    head_bias: bool = False
    embedding_width: int | None = None
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    vision: VisionSpec | None = None
    mtp_layers: int = 0
    source: str = ""
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate and an up projection (SwiGLU, GeGLU)."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.mla.qk_head_dim if self.mla else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Width of all key heads together (values have the same width without MLA)."""
        return self.kv_heads * (self.mla.qk_head_dim if self.mla else self.head_dim)

    @property
    def v_head_dim(self) -> int:
        """Width of one value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def moe_layers(self) -> int:
        """How many of the layers are MoE layers."""
        if self.moe is None:
            return 0
        return max(0, self.layers - self.moe.dense_layers) // self.moe.every

    def with_layers(self, layers: int) -> ModelSpec:
        """The same model cut or stretched to ``layers`` layers."""
        share = self.window_layers / self.layers if self.layers else 0.0
        return replace(self, layers=layers, window_layers=round(share * layers))
