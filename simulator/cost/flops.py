"""FLOPs of a model: what MFU and HFU are taken against.

One multiply-add is 2 FLOPs. ``full`` counts the whole score matrix of attention, the convention of
arXiv 2104.04473 (appendix) and of most published MFU figures; ``causal`` counts the half that a
causal model needs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from simulator.cost.batch import Array
from simulator.cost.operators import LayerContext, Operator, head_operators, layer_operators
from simulator.spec.model import ModelSpec
from simulator.spec.parameters import matmul_parameters
from simulator.spec.plan import Recompute

Convention = Literal["full", "causal"]


def attention_flops_per_token(
    model: ModelSpec, sequence_length: Array | float, convention: Convention = "full"
) -> Array:
    """Forward FLOPs per token of QK^T and PV over all layers: 2 s (d_qk + d_v) heads layers.

    Windowed layers see at most ``window`` tokens.
    """
    seq = np.asarray(sequence_length, float)
    width = 2.0 * model.heads * (model.q_width / model.heads + model.v_head_dim)
    half = 0.5 if convention == "causal" and model.causal else 1.0
    full_layers = model.layers - model.window_layers
    spans = full_layers * seq
    if model.window:
        spans = spans + model.window_layers * np.minimum(seq, float(model.window))
    return np.asarray(width * half * spans)


def forward_flops_per_token(
    model: ModelSpec, sequence_length: Array | float, convention: Convention = "full"
) -> Array:
    """Forward FLOPs per token: 2 per active matrix parameter, plus attention.

    The input embedding is a look-up and costs none; the output head counts.
    """
    return np.asarray(
        2.0 * matmul_parameters(model)
        + attention_flops_per_token(model, sequence_length, convention)
    )


def model_flops_per_token(
    model: ModelSpec, sequence_length: Array | float, convention: Convention = "full"
) -> Array:
    """Training FLOPs per token without recomputation: forward plus twice that backward."""
    return 3.0 * forward_flops_per_token(model, sequence_length, convention)


def operator_flops(operators: tuple[Operator, ...], *, recomputed: bool = False) -> Array:
    """Forward FLOPs of a list of operators on one rank and micro-batch.

    With ``recomputed`` only of those that SELECTIVE recompute runs again. Attention counts the
    whole score matrix.
    """
    total: Array = np.zeros(())
    for op in operators:
        if recomputed and not op.recomputed:
            continue
        if op.kind == "gemm":
            total = total + op.share * 2.0 * op.count * op.m * op.n * op.k
        elif op.kind == "attention":
            scores = op.count * op.heads * op.q_len * op.kv_len
            total = total + op.share * 2.0 * scores * (op.head_dim + op.v_head_dim)
    return np.asarray(total)


def rank_forward_flops(ctx: LayerContext) -> Array:
    """Forward FLOPs of one micro-batch on every rank class of the batch."""
    batch = ctx.batch
    total = batch.dense_layers * operator_flops(layer_operators(ctx))
    if ctx.model.moe:
        total = total + batch.moe_layers * operator_flops(layer_operators(ctx, moe=True))
    return np.asarray(total + batch.has_head * operator_flops(head_operators(ctx)))


def rank_recompute_flops(ctx: LayerContext) -> Array:
    """FLOPs that recomputation adds to one micro-batch on every rank class of the batch."""
    batch = ctx.batch
    full = np.where(
        batch.recompute == Recompute.FULL,
        batch.recompute_layers / np.maximum(batch.layers, 1.0),
        0.0,
    )
    some: Array = (batch.recompute == Recompute.SELECTIVE).astype(float)

    def again(*, moe: bool) -> Array:
        operators = layer_operators(ctx, moe=moe)
        return full * operator_flops(operators) + some * operator_flops(operators, recomputed=True)

    total = batch.dense_layers * again(moe=False)
    if ctx.model.moe:
        total = total + batch.moe_layers * again(moe=True)
    return np.asarray(total)
