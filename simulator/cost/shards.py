"""Parameters that one rank holds, piece by piece, before its state is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.cost.batch import Array, RankBatch
from simulator.spec.model import ModelSpec
from simulator.spec.parameters import (
    LayerKind,
    embedding_parameters,
    head_parameters,
    layer_parameters,
)
from simulator.spec.plan import Sharding

Split = tuple[Array, Array]


@dataclass(frozen=True)
class ShardParameters:
    """Elements on one tensor- and expert-parallel rank, as (all but routed experts, experts).

    ``dense`` and ``moe`` are one layer, ``embedding`` and ``head`` the ends of the model (held by
    the first and last stage; see ``RankBatch.has_embedding``).
    """

    dense: Split
    moe: Split
    embedding: Split
    head: Split

    def pieces(self) -> tuple[Split, Split, Split, Split]:
        """Dense layer, MoE layer, embedding, head."""
        return self.dense, self.moe, self.embedding, self.head

    def held(self, batch: RankBatch) -> Split:
        """Elements of all pieces that a rank holds, (all but experts, experts)."""
        counts = (batch.dense_layers, batch.moe_layers, batch.has_embedding, batch.has_head)
        plain: Array = np.zeros(())
        experts: Array = np.zeros(())
        for (p, e), count in zip(self.pieces(), counts, strict=True):
            plain, experts = plain + count * p, experts + count * e
        return plain, experts

    def owned(self, batch: RankBatch) -> Array:
        """Elements whose optimiser state the rank holds: its share where state is sharded.

        Experts have dp * cp / ep copies only, so they are spread over that many ranks.
        """
        plain, experts = self.held(batch)
        copies = np.maximum(batch.dp * batch.cp / batch.ep, 1.0)
        share = batch.state_share
        expert_share = np.maximum(share, np.minimum(share * batch.ep, 1.0))
        expert_share = np.maximum(expert_share, 1.0 / copies)
        sharded = batch.sharding > Sharding.NONE
        return np.where(sharded, plain * share + experts * expert_share, plain + experts)


def shard_parameters(model: ModelSpec, batch: RankBatch) -> ShardParameters:
    """Parameters per rank of each piece.

    Tensor parallelism divides matrices and the vocabulary, keys and values only as far as there
    are heads for them; norms, row biases and the router are whole on every rank (arXiv 1909.08053
    section 3). With tied embeddings a pipeline's last stage holds its own copy of the embedding.
    """
    none: Split = (np.zeros(()), np.zeros(()))
    embedding, head = embedding_parameters(model), head_parameters(model)
    rest = embedding.total - embedding.token
    tied_copy = (
        model.vocab * (model.embedding_width or model.hidden) if (model.tied_embeddings) else 0
    )
    lm_head = head.lm_head + np.where(batch.pp > 1, float(tied_copy), 0.0)
    whole = head.total - head.lm_head - head.bias
    return ShardParameters(
        dense=_layer(model, batch, "dense") if model.moe_layers < model.layers else none,
        moe=_layer(model, batch, "moe") if model.moe_layers else none,
        embedding=(embedding.token / batch.tp + rest, np.zeros(())),
        head=((lm_head + head.bias) / batch.tp + whole, np.zeros(())),
    )


def _layer(model: ModelSpec, batch: RankBatch, kind: LayerKind) -> Split:
    parts = layer_parameters(model, kind)
    columns = parts.attention_sharded + parts.mlp_sharded + parts.shared_experts
    kv = parts.attention_kv / np.minimum(batch.tp, model.kv_heads)
    return columns / batch.tp + kv + parts.replicated, parts.experts / (batch.ep * batch.tp)
