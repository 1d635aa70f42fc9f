"""Activations that a rank keeps from forward to backward, and what a layer needs while it runs.

Bytes follow the saved tensors that ``operators.py`` names; here they are counted over layers and
over the micro-batches that a pipeline schedule keeps in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.cost.batch import Array, RankBatch
from simulator.cost.operators import (
    LayerContext,
    Operator,
    embedding_operators,
    head_operators,
    layer_operators,
)
from simulator.spec.plan import Recompute


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps for one micro-batch, by recompute mode; arrays over rows.

    ``boundary`` is the layer's input alone (FULL). ``backward`` is the largest set of gradients
    and gathered inputs that live only while the layer's backward pass runs.
    """

    plain: Array
    selective: Array
    boundary: Array
    backward: Array

    def kept(self, batch: RankBatch) -> Array:
        """Mean bytes per layer under each row's recompute mode.

        FULL recompute of only some layers (``recompute_layers``) keeps the others whole.
        """
        share = batch.recompute_layers / np.maximum(batch.layers, 1.0)
        partly = share * self.boundary + (1.0 - share) * self.plain
        return np.where(
            batch.recompute == Recompute.FULL,
            partly,
            np.where(batch.recompute == Recompute.SELECTIVE, self.selective, self.plain),
        )

    def recomputed(self, batch: RankBatch) -> Array:
        """Bytes that one layer's backward pass builds anew."""
        full = (batch.recompute == Recompute.FULL) & (batch.recompute_layers > 0)
        selective = batch.recompute == Recompute.SELECTIVE
        again = np.where(selective, np.maximum(self.plain - self.selective, 0.0), 0.0)
        return np.where(full, self.plain - self.boundary, again)


def layer_bytes(ctx: LayerContext, *, moe: bool = False, imbalance: float = 1.0) -> LayerBytes:
    """Kept bytes of one layer (arXiv 2205.05198 section 4, arXiv 2411.06465 eq. 12).

    ``imbalance`` is the fullest rank's routed tokens over the mean (MoE, dropless), or the
    capacity factor where tokens beyond it are dropped.
    """
    plain: Array | float = 0.0
    selective: Array | float = 0.0
    for op in layer_operators(ctx, moe=moe):
        for tensor in op.saved:
            size = op.share * tensor.size_bytes * (imbalance if tensor.routed else 1.0)
            plain = plain + size * tensor.plain
            selective = selective + size * tensor.selective
    boundary = ctx.batch.residual_tokens * ctx.model.hidden * ctx.width
    return LayerBytes(
        np.asarray(plain, float),
        np.asarray(selective, float),
        np.asarray(boundary, float),
        np.asarray(_backward_bytes(ctx, moe, imbalance), float),
    )


def _backward_bytes(ctx: LayerContext, moe: bool, imbalance: float) -> Array:
    """Gradients alive at the widest point of a layer's backward pass: inside the MLP.

    The gradient of the residual stream and those of the MLP's first product exist while its
    inputs are still kept; with sequence parallelism the gathered input is there once more.
    """
    model, batch = ctx.model, ctx.batch
    width = ctx.width
    halves = 2.0 if model.gated else 1.0
    inner: Array = batch.tokens * model.ffn / batch.tp
    if moe and model.moe is not None:
        routed = batch.tokens * model.moe.top_k * model.moe.ffn / batch.tp
        inner = np.maximum(routed * imbalance, batch.tokens * model.moe.shared_width / batch.tp)
    gathered = np.where(batch.sequence_parallel > 0, batch.tokens * model.hidden, 0.0)
    return width * (halves * inner + batch.residual_tokens * model.hidden + gathered)


def in_flight(batch: RankBatch, schedule: str) -> Array:
    """Micro-batches (of all a rank's layers) whose activations live at once on a stage.

    1F1B: min(m, p - i). GPipe: m. Interleaved with u chunks: min(2(p-i-1) + (u-1)p + 1, m u)
    chunks of 1/u of the layers (arXiv 2104.04473 section 2.2; on stage 0 this is Megatron-LM's
    factor 1 + (p-1)/(pu)). ZB-H1 as 1F1B (arXiv 2401.10241 section 2.3). Layered accumulation: all
    m, layer by layer.
    """
    m, p, i, u = batch.micro_batches, batch.pp, batch.stage, batch.vpp
    depth = np.minimum(m, p - i)
    if schedule == "gpipe":
        return np.where(p > 1, m, depth)
    if schedule == "layered":
        return m + np.zeros_like(depth)
    if schedule == "interleaved":
        chunks = np.minimum(2 * (p - i - 1) + (u - 1) * p + 1, m * u)
        return np.where((u > 1) & (p > 1), chunks / u, depth)
    return depth


def embedding_bytes(ctx: LayerContext) -> Array:
    """Kept bytes of one micro-batch's embedding (on stages that hold it)."""
    return _saved(embedding_operators(ctx))


def head_bytes(ctx: LayerContext) -> tuple[Array, Array]:
    """(final norm and other kept bytes, logits at their peak) of one micro-batch."""
    logits: Array | float = 0.0
    rest: Array | float = 0.0
    for op in head_operators(ctx):
        for tensor in op.saved:
            if tensor.name == "logits":
                logits = logits + tensor.size_bytes
            else:
                rest = rest + tensor.size_bytes
    return np.asarray(rest, float), np.asarray(logits, float)


def _saved(operators: tuple[Operator, ...]) -> Array:
    total: Array | float = 0.0
    for op in operators:
        for tensor in op.saved:
            total = total + op.share * tensor.size_bytes
    return np.asarray(total, float)


def activation_table(ctx: LayerContext, *, moe: bool = False) -> dict[str, Array]:
    """Bytes of every tensor that one layer keeps without recompute, by name."""
    table: dict[str, Array] = {}
    for op in layer_operators(ctx, moe=moe):
        for tensor in op.saved:
            if tensor.plain:
                size = np.asarray(op.share * tensor.size_bytes, float)
                table[tensor.name] = table.get(tensor.name, np.zeros(())) + size
    return table
