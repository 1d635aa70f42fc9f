"""Exact parameter counts of a model, and how tensor and expert parallelism divide them.

Counts are elements, not bytes. The shapes are those of the published implementations; where a
count is published, the golden tests hold it. Matrices follow arXiv 1909.08053 section 3: the query,
key, value and first MLP matrices are split by columns (their biases with them), the attention
output and second MLP matrices by rows (their biases stay whole on every rank).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from simulator.spec.model import ModelSpec

LayerKind = Literal["dense", "moe"]


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer by how parallelism divides them (elements).

    The parts are disjoint; :attr:`total` is their sum.

    Attributes:
        attention_sharded: query (or latent up-projection) and output matrices with the query
            bias: divided by tp.
        attention_kv: key and value matrices with their biases: divided by min(tp, kv_heads).
        attention_replicated: latent down-projections (MLA): whole on every tp rank.
        mlp_sharded: dense MLP matrices and column biases: divided by tp.
        experts: routed experts, all of them: divided by ep, and by tp inside an expert.
        shared_experts: always-on experts: divided by tp.
        router: router matrix, its bias and the shared experts' gate: replicated.
        norms: weights and biases of all norms: replicated.
        row_biases: biases of the attention output and of the second MLP matrix: replicated.
    """

    attention_sharded: int = 0
    attention_kv: int = 0
    attention_replicated: int = 0
    mlp_sharded: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    row_biases: int = 0

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return _sum(self)

    @property
    def tp_sharded(self) -> int:
        """What tensor parallelism divides, routed experts aside (keys and values included)."""
        return self.attention_sharded + self.attention_kv + self.mlp_sharded + self.shared_experts

    @property
    def replicated(self) -> int:
        """What every tensor-parallel rank holds whole."""
        return self.attention_replicated + self.router + self.norms + self.row_biases


@dataclass(frozen=True)
class EmbeddingParameters:
    """Parameters before the first layer (elements).

    ``token`` is divided by tp (vocabulary parallel, arXiv 1909.08053 section 3); the rest is
    replicated. ``projection`` widens narrow embeddings (OPT-350M); ``patch`` is a vision
    transformer's patch embedding with its bias and class token.
    """

    token: int = 0
    position: int = 0
    token_types: int = 0
    norm: int = 0
    projection: int = 0
    patch: int = 0

    @property
    def total(self) -> int:
        """All parameters before the first layer."""
        return _sum(self)


@dataclass(frozen=True)
class HeadParameters:
    """Parameters after the last layer (elements).

    ``lm_head`` (zero if tied to the token embedding) and ``bias`` are divided by tp; the rest is
    replicated. ``mlm`` is BERT's transform (matrix, bias, norm); ``pooler`` is its pooled output
    with, next to an MLM head, the next-sentence classifier; ``classifier`` is a vision
    transformer's.
    """

    final_norm: int = 0
    projection: int = 0
    lm_head: int = 0
    bias: int = 0
    mlm: int = 0
    pooler: int = 0
    classifier: int = 0

    @property
    def total(self) -> int:
        """All parameters after the last layer."""
        return _sum(self)


def _sum(parts: LayerParameters | EmbeddingParameters | HeadParameters) -> int:
    return sum(getattr(parts, f.name) for f in fields(parts))


def layer_parameters(model: ModelSpec, layer_kind: LayerKind = "dense") -> LayerParameters:
    """Parameters of one layer; ``moe`` has the model's experts in the dense MLP's place.

    Sources: arXiv 1706.03762 section 3 (attention, MLP), arXiv 2002.05202 (gated MLP), arXiv
    2305.13245 (grouped keys and values), arXiv 2405.04434 section 2.1 and eq. 20 to 22 (latent
    attention, shared experts), arXiv 2101.03961 section 2 (router).

    Raises:
        ValueError: ``layer_kind`` is ``moe`` but the model has no experts.
    """
    query_output, kv, latent = _attention_matrices(model)
    query_bias = model.q_width if model.qkv_bias else 0
    kv_bias = 2 * model.kv_width if model.qkv_bias and model.mla is None else 0
    row_biases = model.hidden if model.attention_out_bias else 0
    mlp = experts = shared = router = 0
    if layer_kind == "dense":
        mlp = mlp_matrix_parameters(model, model.ffn) + _column_biases(model, model.ffn)
        row_biases += model.hidden if model.mlp_bias else 0
    else:
        moe = model.moe
        if moe is None:
            raise ValueError(f"{model.name} has no mixture-of-experts layers")
        row_bias = model.hidden if model.mlp_bias else 0
        expert = mlp_matrix_parameters(model, moe.ffn) + _column_biases(model, moe.ffn)
        experts = moe.experts * (expert + row_bias)
        shared = mlp_matrix_parameters(model, moe.shared_width)
        router = model.hidden * (moe.experts + moe.shared_gate)
        router += moe.experts if moe.router_bias else 0
    return LayerParameters(
        attention_sharded=query_output + query_bias,
        attention_kv=kv + kv_bias,
        attention_replicated=latent,
        mlp_sharded=mlp,
        experts=experts,
        shared_experts=shared,
        router=router,
        norms=_layer_norms(model),
        row_biases=row_biases,
    )


def _attention_matrices(model: ModelSpec) -> tuple[int, int, int]:
    """Elements of (query and output or latent up, key and value, latent down) matrices."""
    hidden, mla = model.hidden, model.mla
    output = model.heads * model.v_head_dim * hidden
    if mla is None:
        return hidden * model.q_width + output, 2 * hidden * model.kv_width, 0
    down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.q_lora_rank is None:
        return hidden * model.q_width + up + output, 0, down
    down += hidden * mla.q_lora_rank
    return mla.q_lora_rank * model.q_width + up + output, 0, down


def mlp_matrix_parameters(model: ModelSpec, width: int) -> int:
    """Elements of the MLP's matrices at inner width ``width`` (three where it is gated)."""
    return (3 if model.gated else 2) * model.hidden * width


def _column_biases(model: ModelSpec, width: int) -> int:
    return (2 if model.gated else 1) * width if model.mlp_bias else 0


def _norm_width(model: ModelSpec) -> int:
    """Parameters of one norm of width ``hidden``."""
    return model.hidden * (2 if model.norm_bias else 1)


def _layer_norms(model: ModelSpec) -> int:
    norms = model.norms_per_layer * _norm_width(model)
    if model.mla is not None:
        norms += model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0)
    if model.qk_norm == "head":
        norms += 2 * model.head_dim
    elif model.qk_norm == "full":
        norms += model.q_width + model.kv_width
    return norms


def embedding_parameters(model: ModelSpec) -> EmbeddingParameters:
    """Parameters before the first layer.

    Sources: arXiv 1810.04805 section 3 (token, position and type embeddings with a norm), arXiv
    2010.11929 eq. 1 (patches, class token, positions), arXiv 2205.01068 (OPT-350M's projection).
    """
    hidden, vision = model.hidden, model.vision
    width = model.embedding_width or hidden
    position = model.max_positions
    patch = 0
    if vision is not None:
        cell = vision.channels * vision.patch_size**2
        patch = cell * hidden + hidden + (hidden if vision.class_token else 0)
        position = vision_tokens(model)
    return EmbeddingParameters(
        token=model.vocab * width,
        position=position * hidden if model.position == "learned" else 0,
        token_types=model.token_types * hidden,
        norm=_norm_width(model) if model.embedding_norm else 0,
        projection=width * hidden if width != hidden else 0,
        patch=patch,
    )


def vision_tokens(model: ModelSpec) -> int:
    """Sequence length of a vision transformer: patches and class token (0 without vision)."""
    if model.vision is None:
        return 0
    side = model.vision.image_size // model.vision.patch_size
    return side * side + model.vision.class_token


def head_parameters(model: ModelSpec) -> HeadParameters:
    """Parameters after the last layer; a tied lm head counts with the token embedding.

    Sources: arXiv 1810.04805 section 3.1 and its released code (MLM transform, pooler,
    next-sentence classifier), arXiv 2010.11929 section 3.1 (classifier).
    """
    hidden = model.hidden
    width = model.embedding_width or hidden
    classes = model.vision.classes if model.vision else 0
    pooler = hidden * hidden + hidden if model.pooler else 0
    if model.pooler and model.mlm_head:
        pooler += 2 * hidden + 2
    return HeadParameters(
        final_norm=_norm_width(model) if model.final_norm else 0,
        projection=width * hidden if width != hidden else 0,
        lm_head=0 if model.tied_embeddings else model.vocab * width,
        bias=model.vocab if model.head_bias else 0,
        mlm=hidden * hidden + hidden + _norm_width(model) if model.mlm_head else 0,
        pooler=pooler,
        classifier=(hidden + 1) * classes,
    )


def mtp_parameters(model: ModelSpec) -> int:
    """Parameters of the multi-token-prediction modules beyond the main model (elements).

    Each has one layer like the main model's last, two input norms, a projection of width 2 hidden
    and an output norm; embedding and head are the main model's (arXiv 2412.19437 section 2.2).
    """
    if model.mtp_layers == 0:
        return 0
    layer = layer_parameters(model, "moe" if model.moe else "dense").total
    module = layer + 2 * model.hidden**2 + 3 * _norm_width(model)
    return model.mtp_layers * module


def total_parameters(model: ModelSpec) -> int:
    """All parameters of the main model, multi-token-prediction modules left out.

    This is the count that a model card names. A tied embedding counts once.
    """
    dense = model.layers - model.moe_layers
    total = embedding_parameters(model).total + head_parameters(model).total
    total += dense * layer_parameters(model).total if dense else 0
    if model.moe_layers:
        total += model.moe_layers * layer_parameters(model, "moe").total
    return total


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token uses: all but the routed experts it is not sent to."""
    total = total_parameters(model)
    if model.moe is None or model.moe_layers == 0:
        return total
    experts = layer_parameters(model, "moe").experts
    idle = experts // model.moe.experts * (model.moe.experts - model.moe.top_k)
    return total - model.moe_layers * idle


def layer_matmul_parameters(model: ModelSpec, layer_kind: LayerKind = "dense") -> int:
    """Matrix elements of one layer that multiply one token: norms and biases left out."""
    matrices = sum(_attention_matrices(model))
    if layer_kind == "dense":
        return matrices + mlp_matrix_parameters(model, model.ffn)
    moe = model.moe
    if moe is None:
        raise ValueError(f"{model.name} has no mixture-of-experts layers")
    routed = moe.top_k * mlp_matrix_parameters(model, moe.ffn)
    shared = mlp_matrix_parameters(model, moe.shared_width)
    return matrices + routed + shared + model.hidden * (moe.experts + moe.shared_gate)


def matmul_parameters(model: ModelSpec) -> int:
    """Matrix elements that multiply one token; 2 FLOP each forward, 6 with backward.

    Counts the layers, the lm head (tied or not), embedding projections, the MLM transform and the
    patch embedding. Left out: embedding look-ups, norms, biases, and what runs once per sequence
    (pooler, classifier). Source: arXiv 2001.08361 section 2.1, with the head added.
    """
    hidden = model.hidden
    width = model.embedding_width or hidden
    moe_layers = model.moe_layers
    total = model.vocab * width + (2 * width * hidden if width != hidden else 0)
    total += (model.layers - moe_layers) * layer_matmul_parameters(model)
    if moe_layers:
        total += moe_layers * layer_matmul_parameters(model, "moe")
    if model.mlm_head:
        total += hidden * hidden
    if model.vision is not None:
        total += model.vision.channels * model.vision.patch_size**2 * hidden
    return total
