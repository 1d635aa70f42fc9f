"""A transformer layer as operators: shapes, launches and the tensors that autograd keeps.

This is the single description of the work. FLOPs (``flops.py``), time (``compute.py``) and
activation memory (``memory.py``) are three readings of it. Shapes are per rank, for one
micro-batch, as arrays that broadcast over a batch of rank classes.

Kept tensors follow arXiv 2205.05198 (GPT, section 4) and arXiv 2411.06465 (Llama); each is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from simulator.cost.batch import Array, RankBatch
from simulator.spec.model import ModelSpec
from simulator.spec.stack import Kept, PrecisionRecipe

Kind = Literal["gemm", "attention", "memory"]

#: Bytes of one dropout-mask element (torch keeps booleans).
MASK_BYTES = 1.0


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept from forward to backward.

    ``plain`` keeps it without recompute, ``selective`` under SELECTIVE recompute; everything but
    the layer's input is dropped under FULL. ``routed`` marks tokens sent to experts, whose number
    depends on the router's balance.
    """

    name: str
    size_bytes: Array
    selective: bool = True
    plain: bool = True
    routed: bool = False


@dataclass(frozen=True)
class Operator:
    """One operator of a layer.

    ``gemm``: ``count`` products of (m, k) by (k, n); ``weight`` says whether k*n are parameters
    (then the backward pass is a data and a weight gradient; otherwise two products of
    activations). ``attention``: ``count`` sequences, q_len by kv_len. ``memory``: bytes moved.
    ``launches`` and ``backward_launches`` are kernel launches. ``recomputed`` marks what SELECTIVE
    recompute runs again. ``share`` is the fraction of layers that run it (windowed layers).
    """

    name: str
    kind: Kind
    m: Array | float = 0.0
    n: Array | float = 0.0
    k: Array | float = 0.0
    count: Array | float = 1.0
    heads: Array | float = 0.0
    kv_heads: Array | float = 0.0
    q_len: Array | float = 0.0
    kv_len: Array | float = 0.0
    head_dim: int = 0
    v_head_dim: int = 0
    causal: bool = True
    forward_bytes: Array | float = 0.0
    backward_bytes: Array | float = 0.0
    launches: float = 1.0
    backward_launches: float = 2.0
    saved: tuple[SavedTensor, ...] = ()
    recomputed: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class LayerContext:
    """What the operators of one layer are built from."""

    model: ModelSpec
    kept: Kept
    recipe: PrecisionRecipe
    batch: RankBatch
    attention: str = "flash2"
    compiled: bool = False
    offload_activations: bool = False
    offload_state: bool = False

    @property
    def width(self) -> float:
        """Bytes of one activation element."""
        return self.recipe.activation_bytes

    @property
    def operand_width(self) -> float:
        """Bytes of one element of a kept input of a weight product (1 under fp8)."""
        return self.recipe.operand_bytes or self.recipe.activation_bytes

    @property
    def op_policy(self) -> bool:
        """Whether SELECTIVE recompute works by operator (torchtitan) and not by the core."""
        return self.kept.selective == "op-policy"

    @property
    def fused(self) -> Kept:
        """Fusion switches; a compiled layer fuses all pointwise work."""
        if not self.compiled:
            return self.kept
        from dataclasses import replace

        return replace(
            self.kept,
            fused_norm=True,
            fused_activation=True,
            fused_rope=True,
            fused_softmax=True,
            fused_residual_dropout=True,
            fp32_norm=False,
            rope_kept_bytes=0.0,
        )


def layer_operators(ctx: LayerContext, *, moe: bool = False) -> tuple[Operator, ...]:
    """Operators of one transformer layer in execution order."""
    parts: list[Operator] = []
    if ctx.model.norms_per_layer > 0:
        parts.append(_norm(ctx, "attention norm", keep_input=True))
    parts.extend(_mla(ctx) if ctx.model.mla else _attention(ctx))
    if ctx.model.norms_per_layer >= 4:
        parts.append(_norm(ctx, "attention output norm", keep_input=True))
    parts.append(_residual(ctx, "attention residual"))
    if ctx.model.norms_per_layer >= 2:
        shared_input = ctx.model.parallel_block
        parts.append(_norm(ctx, "mlp norm", keep_input=not shared_input))
    parts.extend(_moe(ctx) if moe else _mlp(ctx, ctx.model.ffn))
    if ctx.model.norms_per_layer >= 4:
        parts.append(_norm(ctx, "mlp output norm", keep_input=True))
    parts.append(_residual(ctx, "mlp residual"))
    return tuple(parts)


def _norm(ctx: LayerContext, name: str, *, keep_input: bool) -> Operator:
    """Norm over the residual stream: input kept, output kept as the next product's operand.

    An unfused RMSNorm in fp32 keeps the fp32 copy and the normalised fp32 value.
    """
    elements = ctx.batch.residual_tokens * ctx.model.hidden
    kept = ctx.fused
    moved = elements * ctx.width
    saved = []
    if keep_input:
        saved.append(
            SavedTensor(
                f"{name} input",
                moved,
                selective=name == "attention norm" or not ctx.op_policy,
            )
        )
    if kept.norm_output_kept:
        saved.append(
            SavedTensor(f"{name} output", elements * ctx.operand_width, selective=not ctx.op_policy)
        )
    if kept.fp32_norm:
        saved.append(
            SavedTensor(f"{name} fp32 copies", 2 * 4.0 * elements, selective=not ctx.op_policy)
        )
    passes = 1.0 if kept.fused_norm else 3.0
    return Operator(
        name,
        "memory",
        forward_bytes=2 * moved * passes,
        backward_bytes=3.5 * moved * passes,
        launches=1.0 if kept.fused_norm else 6.0,
        backward_launches=2.0 if kept.fused_norm else 12.0,
        saved=tuple(saved),
        recomputed=ctx.op_policy,
    )


def _residual(ctx: LayerContext, name: str) -> Operator:
    """Bias, dropout and add. Only the dropout mask is kept."""
    elements = ctx.batch.residual_tokens * ctx.model.hidden
    moved = elements * ctx.width
    drop = ctx.model.dropout > 0
    saved: tuple[SavedTensor, ...] = ()
    if drop and ctx.kept.dropout_masks:
        saved = (SavedTensor(f"{name} mask", elements * MASK_BYTES),)
    fused = ctx.fused.fused_residual_dropout
    launches = 1.0 if fused else 1.0 + drop + bool(ctx.model.mlp_bias)
    return Operator(
        name,
        "memory",
        forward_bytes=(3.0 if fused else 3.0 + 2.0 * drop) * moved,
        backward_bytes=(2.0 if drop else 1.0) * moved,
        launches=launches,
        backward_launches=1.0,
        saved=saved,
        recomputed=ctx.op_policy,
    )


def _linear(
    ctx: LayerContext,
    name: str,
    *,
    m: Array,
    n: Array | float,
    k: Array | float,
    count: Array | float = 1.0,
    saved: tuple[SavedTensor, ...] = (),
    policy_saves: bool = True,
) -> Operator:
    """A product with a weight. Backward: data gradient, weight gradient, bias gradient."""
    return Operator(
        name,
        "gemm",
        m=m,
        n=n,
        k=k,
        count=count,
        launches=1.0,
        backward_launches=2.0,
        saved=saved,
        recomputed=ctx.op_policy and not policy_saves,
    )


def _attention(ctx: LayerContext) -> Iterator[Operator]:
    """QKV projection, rotary embedding, attention core and output projection."""
    model, batch, width = ctx.model, ctx.batch, ctx.width
    tokens, tp = batch.tokens, batch.tp
    kv_tp = np.minimum(tp, model.kv_heads)  # K and V are replicated where tp exceeds their heads
    q_out, kv_out = model.q_width / tp, model.kv_width / kv_tp
    # The op policy keeps every other product: of q, k, v it keeps q and v (see _policy below).
    if ctx.op_policy:
        yield _linear(ctx, "q projection", m=tokens, n=q_out + kv_out, k=model.hidden)
        yield _linear(ctx, "k projection", m=tokens, n=kv_out, k=model.hidden, policy_saves=False)
    else:
        yield _linear(ctx, "qkv projection", m=tokens, n=q_out + 2 * kv_out, k=model.hidden)
    if model.qk_norm != "none":
        moved = tokens * (q_out + kv_out) * width
        yield Operator(
            "query and key norm",
            "memory",
            forward_bytes=2 * moved,
            backward_bytes=3 * moved,
            launches=2.0,
            backward_launches=4.0,
            recomputed=ctx.op_policy,
            saved=(SavedTensor("query and key before norm", moved, selective=not ctx.op_policy),),
        )
    if model.position == "rope":
        yield _rope(ctx, tokens * (q_out + kv_out))
    yield from _cores(ctx, q_out, kv_out)
    # Under the op policy the kept output of attention is this product's operand.
    yield _linear(
        ctx,
        "output projection",
        m=tokens,
        n=model.hidden,
        k=model.heads * model.v_head_dim / tp,
        policy_saves=False,
    )


def _rope(ctx: LayerContext, elements: Array) -> Operator:
    """Rotary embedding of queries and keys."""
    fused = ctx.fused.fused_rope
    moved = elements * ctx.width
    saved: tuple[SavedTensor, ...] = ()
    if ctx.fused.rope_kept_bytes:
        saved = (
            SavedTensor(
                "rotary operands",
                elements * ctx.fused.rope_kept_bytes,
                selective=not ctx.op_policy,
            ),
        )
    return Operator(
        "rotary embedding",
        "memory",
        forward_bytes=(2.0 if fused else 8.0) * moved,
        backward_bytes=(2.0 if fused else 8.0) * moved,
        launches=2.0 if fused else 10.0,
        backward_launches=2.0 if fused else 10.0,
        saved=saved,
        recomputed=ctx.op_policy,
    )


def _cores(ctx: LayerContext, q_out: Array, kv_out: Array) -> Iterator[Operator]:
    """The attention core, once for full layers and once for windowed ones."""
    model, batch = ctx.model, ctx.batch
    windowed = model.window_layers / model.layers if model.window else 0.0
    spans = [(1.0 - windowed, batch.sequence_length)]
    if model.window and windowed:
        spans.append((windowed, np.minimum(batch.sequence_length, float(model.window))))
    for share, kv_len in spans:
        if share > 0:
            yield _core(ctx, q_out, kv_out, share, kv_len)


def _core(ctx: LayerContext, q_out: Array, kv_out: Array, share: float, kv_len: Array) -> Operator:
    model, batch, width = ctx.model, ctx.batch, ctx.width
    tokens, tp = batch.tokens, batch.tp
    v_head = model.v_head_dim
    heads = model.heads / tp
    expanded = ctx.kept.kv_expanded and model.kv_heads < model.heads
    kept_kv = q_out if expanded else kv_out
    value_width = kept_kv * v_head / (model.mla.qk_head_dim if model.mla else model.head_dim)
    flash = ctx.attention != "unfused"
    policy = ctx.op_policy
    saved = [
        SavedTensor("query", tokens * q_out * width),
        SavedTensor("key", tokens * kept_kv * width, selective=not policy),
        SavedTensor("value", tokens * value_width * width, selective=not (policy and expanded)),
        SavedTensor("attention output", tokens * heads * v_head * width),
    ]
    if policy and expanded:
        # The policy keeps the value product's output, from before its heads were repeated.
        size = tokens * value_width * width * model.kv_heads / model.heads
        saved.append(SavedTensor("value product", size, plain=False))
    if ctx.operand_width != width:
        size = tokens * heads * v_head * ctx.operand_width
        saved.append(SavedTensor("attention output as operand", size))
    if flash:
        saved.append(SavedTensor("log-sum-exp", tokens * heads * 4.0))
    else:
        scores = tokens * heads * kv_len
        drop = model.dropout > 0
        saved.append(SavedTensor("softmax output", scores * width, selective=False))
        if not ctx.fused.fused_softmax:
            saved.append(SavedTensor("softmax input", scores * width, selective=False))
        if drop:
            saved.append(SavedTensor("dropout mask of scores", scores * MASK_BYTES, False))
            saved.append(SavedTensor("dropped scores", scores * width, selective=False))
    return Operator(
        "attention",
        "attention",
        count=batch.micro_batch,
        heads=heads,
        kv_heads=model.kv_heads / np.minimum(tp, model.kv_heads),
        q_len=batch.sequence_length / batch.cp,
        kv_len=kv_len,
        head_dim=model.mla.qk_head_dim if model.mla else model.head_dim,
        v_head_dim=v_head,
        causal=model.causal,
        launches=1.0 if flash else 4.0,
        backward_launches=2.0 if flash else 6.0,
        saved=tuple(saved),
        recomputed=not policy,
        share=share,
    )


def _mla(ctx: LayerContext) -> Iterator[Operator]:
    """Latent attention: down and up projections around the core (arXiv 2405.04434 eq. 9-19)."""
    model, batch, width = ctx.model, ctx.batch, ctx.width
    mla = model.mla
    assert mla is not None
    tokens, tp = batch.tokens, batch.tp
    # Down projections are replicated over tp and run on the sequence-parallel part.
    local = batch.residual_tokens
    q_out = model.heads * mla.qk_head_dim / tp
    if mla.q_lora_rank:
        latent = local * mla.q_lora_rank * width
        yield _linear(ctx, "q down projection", m=local, n=mla.q_lora_rank, k=model.hidden)
        yield _latent_norm("query latent norm", latent)
        yield _linear(ctx, "q up projection", m=tokens, n=q_out, k=mla.q_lora_rank)
    else:
        yield _linear(ctx, "q projection", m=tokens, n=q_out, k=model.hidden)
    kv_rank = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield _linear(ctx, "kv down projection", m=local, n=kv_rank, k=model.hidden)
    yield _latent_norm("key-value latent norm", local * mla.kv_lora_rank * width)
    kv_up = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp
    yield _linear(ctx, "kv up projection", m=tokens, n=kv_up, k=mla.kv_lora_rank)
    yield _rope(ctx, tokens * (model.heads / tp + 1) * mla.qk_rope_head_dim)
    yield from _cores(ctx, q_out, q_out)
    yield _linear(
        ctx,
        "output projection",
        m=tokens,
        n=model.hidden,
        k=model.heads * mla.v_head_dim / tp,
    )


def _latent_norm(name: str, moved: Array) -> Operator:
    """Norm of a latent: input and output kept."""
    return Operator(
        name,
        "memory",
        forward_bytes=2 * moved,
        backward_bytes=3.5 * moved,
        saved=(
            SavedTensor(f"{name} input", moved),
            SavedTensor(f"{name} output", moved),
        ),
    )


def _mlp(ctx: LayerContext, ffn: float, label: str = "mlp") -> Iterator[Operator]:
    """Dense MLP: first product (both halves where gated), activation, second product."""
    model, tokens = ctx.model, ctx.batch.tokens
    inner = ffn / ctx.batch.tp
    halves = 2 if model.gated else 1
    if ctx.op_policy and model.gated:
        yield _linear(ctx, f"{label} gate product", m=tokens, n=inner, k=model.hidden)
        yield _linear(
            ctx,
            f"{label} up product",
            m=tokens,
            n=inner,
            k=model.hidden,
            policy_saves=False,
        )
    else:
        yield _linear(ctx, f"{label} first product", m=tokens, n=halves * inner, k=model.hidden)
    yield _activation(ctx, tokens * inner, label)
    output = SavedTensor(f"{label} output", tokens * model.hidden * ctx.width, plain=False)
    yield _linear(
        ctx,
        f"{label} second product",
        m=tokens,
        n=model.hidden,
        k=inner,
        # A compiled layer drops it: no operator of the backward pass reads it.
        saved=(output,) if ctx.op_policy and not ctx.compiled else (),
    )


def _activation(ctx: LayerContext, elements: Array, label: str) -> Operator:
    """Activation, times the up half where gated; its input and output are kept.

    An unfused gate also keeps the activated gate (the 8f/h of arXiv 2411.06465 against 6f/h).
    """
    gated, width, policy = ctx.model.gated, ctx.width, ctx.op_policy
    size = elements * width
    routed = label == "expert"
    saved = [SavedTensor(f"{label} activation input", size, routed=routed)]
    if gated:
        saved.append(SavedTensor(f"{label} up half", size, not policy, routed=routed))
        if not ctx.fused.fused_activation:
            saved.append(SavedTensor(f"{label} activated gate", size, not policy, routed=routed))
    output = elements * ctx.operand_width
    saved.append(SavedTensor(f"{label} activation output", output, not policy, routed=routed))
    fused = ctx.fused.fused_activation or not gated
    forward = 3.0 if gated and fused else 5.0 if gated else 2.0
    backward = 5.0 if gated and fused else 8.0 if gated else 3.0
    return Operator(
        f"{label} activation",
        "memory",
        forward_bytes=forward * size,
        backward_bytes=backward * size,
        launches=1.0 if fused else 2.0,
        backward_launches=1.0 if fused else 3.0,
        saved=tuple(saved),
        recomputed=policy,
    )


def _moe(ctx: LayerContext) -> Iterator[Operator]:
    """Router, permutation, grouped expert products, combination, shared experts.

    Tokens are assumed balanced over experts (dropless); ``memory.py`` adds the imbalance margin.
    Each rank of an expert-parallel group holds experts/ep experts and receives as many routed
    tokens as it sends.
    """
    model, batch, width = ctx.model, ctx.batch, ctx.width
    moe = model.moe
    assert moe is not None
    tokens = batch.tokens
    routed = tokens * moe.top_k
    experts = moe.experts / batch.ep
    hidden_bytes = routed * model.hidden * width
    operand_bytes = routed * model.hidden * ctx.operand_width
    yield _linear(
        ctx,
        "router",
        m=batch.residual_tokens,
        n=float(moe.experts),
        k=model.hidden,
        saved=(SavedTensor("router probabilities", batch.residual_tokens * moe.experts * 4.0),),
    )
    yield Operator(
        "token permutation",
        "memory",
        forward_bytes=2 * hidden_bytes,
        backward_bytes=2 * hidden_bytes,
        launches=6.0,
        backward_launches=4.0,
        saved=(SavedTensor("permuted tokens", operand_bytes, not ctx.op_policy, routed=True),),
    )
    inner = moe.ffn / batch.tp
    halves = 2 if model.gated else 1
    per_expert = routed / experts
    yield _linear(
        ctx,
        "expert first product",
        m=per_expert,
        n=halves * inner,
        k=model.hidden,
        count=experts,
    )
    yield _activation(ctx, routed * inner, "expert")
    yield _linear(
        ctx,
        "expert second product",
        m=per_expert,
        n=model.hidden,
        k=inner,
        count=experts,
    )
    yield Operator(
        "token combination",
        "memory",
        forward_bytes=2 * hidden_bytes,
        backward_bytes=3 * hidden_bytes,
        launches=4.0,
        backward_launches=4.0,
        saved=(SavedTensor("expert outputs", hidden_bytes, not ctx.op_policy, routed=True),),
    )
    if moe.shared_width:
        yield from _mlp(ctx, moe.shared_width, "shared expert")


def embedding_operators(ctx: LayerContext) -> tuple[Operator, ...]:
    """Token (and position) embedding; dropout mask kept where the model has dropout."""
    model, batch = ctx.model, ctx.batch
    elements = batch.residual_tokens * model.hidden
    moved = elements * ctx.width
    saved = [SavedTensor("token ids", batch.tokens * 8.0)]
    if model.dropout > 0 and ctx.kept.dropout_masks:
        saved.append(SavedTensor("embedding dropout mask", elements * MASK_BYTES))
    if model.embedding_norm:
        saved.append(SavedTensor("embedding norm input", moved))
    return (
        Operator(
            "embedding",
            "memory",
            forward_bytes=(2 + 2 * model.embedding_norm) * moved,
            backward_bytes=3 * moved,
            launches=2.0 + (model.position == "learned"),
            backward_launches=2.0,
            saved=tuple(saved),
        ),
    )


def head_operators(ctx: LayerContext) -> tuple[Operator, ...]:
    """Final norm, logits and cross-entropy on the last stage.

    ``Kept.logits_bytes`` per local logit is what lives at the peak: fp16 logits and their gradient
    (4) with a fused loss, up to 10 with an fp32 one (see FACTS in arXiv 2411.06465's terms).
    """
    model, batch = ctx.model, ctx.batch
    parts: list[Operator] = []
    if model.final_norm:
        parts.append(_norm(ctx, "final norm", keep_input=True))
    if model.vocab <= 0:
        return tuple(parts)
    logits = batch.tokens * model.vocab / batch.tp
    parts.append(_linear(ctx, "logits", m=batch.tokens, n=model.vocab / batch.tp, k=model.hidden))
    parts.append(
        Operator(
            "cross-entropy",
            "memory",
            forward_bytes=logits * ctx.kept.loss_bytes * 2.0 / 3.0,
            backward_bytes=logits * ctx.kept.loss_bytes / 3.0,
            launches=5.0,
            backward_launches=3.0,
            saved=(SavedTensor("logits", logits * ctx.kept.logits_bytes),),
        )
    )
    return tuple(parts)


def saved_bytes(operators: tuple[Operator, ...], *, selective: bool = False) -> Array | float:
    """Bytes that the operators keep for backward, all of them or those SELECTIVE keeps."""
    total: Array | float = 0.0
    for op in operators:
        for tensor in op.saved:
            if tensor.selective if selective else tensor.plain:
                total = total + op.share * tensor.size_bytes
    return total


def launches(operators: tuple[Operator, ...]) -> tuple[float, float]:
    """Kernel launches of the forward and of the backward pass."""
    forward = sum(op.share * op.launches for op in operators)
    return forward, sum(op.share * op.backward_launches for op in operators)
