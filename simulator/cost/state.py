"""Training state on a rank: parameters, gradients, optimiser state, and the buffers around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.cost.batch import Array, RankBatch
from simulator.cost.shards import ShardParameters, shard_parameters
from simulator.errors import UserError, nearest
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Offload, Sharding
from simulator.spec.stack import PrecisionRecipe, Stack

#: Optimiser moments as a share of Adam's two: what each optimiser keeps per parameter.
#: Lion keeps one (arXiv 2302.06675 algorithm 2), SGD none or one, 8-bit Adam two of one byte each
#: (arXiv 2110.02861), Adafactor only row and column sums (arXiv 1804.04235 section 3).
MOMENT_SHARE: dict[str, float] = {
    "adam": 1.0,
    "adamw": 1.0,
    "fusedadam": 1.0,
    "decoupled_adamw": 1.0,
    "lamb": 1.0,
    "lion": 0.5,
    "decoupled_lionw": 0.5,
    "muon": 0.5,
    "sgd_momentum": 0.5,
    "sgd": 0.0,
    "adafactor": 0.0,
    "adamw_8bit": 0.25,
    "adam_8bit": 0.25,
}


def moment_share(optimizer: str) -> float:
    """Optimiser state over Adam's; UserError lists the known names."""
    key = optimizer.strip().lower().replace("-", "_").replace(" ", "_")
    if key not in MOMENT_SHARE:
        known = nearest(key, list(MOMENT_SHARE)) or list(MOMENT_SHARE)
        raise UserError(f"optimizer {optimizer!r} is unknown; known: {', '.join(known)}")
    return MOMENT_SHARE[key]


@dataclass(frozen=True)
class TrainingState:
    """Bytes of a rank's training state and of the buffers that go with it; arrays over rows.

    ``gathered`` are unsharded parameters while layers run, ``unit_gradients`` the gradients of one
    unit before they are reduced, ``gather_buffers`` what gathers allocate on their own stream.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    gathered: Array
    gather_buffers: Array
    unit_gradients: Array
    buckets: Array
    wgrad_buffers: Array
    step_temporaries: Array


def training_state(
    model: ModelSpec,
    stack: Stack,
    recipe: PrecisionRecipe,
    optimizer: str,
    batch: RankBatch,
    *,
    offload: Offload = "none",
) -> TrainingState:
    """Training state under each row's sharding (arXiv 1910.02054 section 5, figure 1).

    Optimiser state is sharded from ZeRO-1 on, gradients from ZeRO-2, parameters in ZeRO-3; a
    rank's share is ``state_share``, any fraction. ``offload`` moves the optimiser state, or all
    sharded state, to the host.
    """
    shards = shard_parameters(model, batch)
    plain, experts = shards.held(batch)
    held = plain + experts
    owned = shards.owned(batch)
    zero3 = batch.sharding >= Sharding.ZERO3
    moments = recipe.moment_bytes * moment_share(optimizer)
    optimizer_bytes = owned * (recipe.master_bytes + moments)
    parameters = np.where(zero3, owned, held) * recipe.param_bytes
    sharded_gradients = batch.sharding >= Sharding.ZERO2
    gradients = np.where(sharded_gradients, owned, held) * recipe.grad_bytes
    if offload in ("optimizer", "state"):
        optimizer_bytes = optimizer_bytes * 0.0
    if offload == "state":
        parameters = np.where(zero3, 0.0, parameters)
        gradients = np.where(zero3, 0.0, gradients)
    gathered, buffers = _gathered(stack, recipe, batch, shards, held)
    unit = _unit(batch, shards)
    head = batch.has_head * shards.head[0] * recipe.compute_param_bytes
    reduced = zero3 * (unit * (recipe.compute_param_bytes + recipe.reduce_bytes) + head)
    return TrainingState(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer_bytes,
        gathered=gathered,
        gather_buffers=buffers,
        unit_gradients=reduced,
        buckets=_buckets(stack, recipe, batch, held),
        wgrad_buffers=_wgrad(stack, model, batch, shards),
        step_temporaries=owned * stack.buffers.step_bytes,
    )


def _unit(batch: RankBatch, shards: ShardParameters) -> Array:
    """Elements of the largest layer that a rank gathers as one unit."""
    dense = (batch.dense_layers > 0) * (shards.dense[0] + shards.dense[1])
    moe = (batch.moe_layers > 0) * (shards.moe[0] + shards.moe[1])
    return np.maximum(dense, moe)


def _root(batch: RankBatch, shards: ShardParameters) -> Array:
    """Elements of the root unit: embedding and head, gathered from forward to backward."""
    ends = batch.has_embedding * shards.embedding[0] + batch.has_head * shards.head[0]
    return np.asarray(ends, float)


def _gathered(
    stack: Stack, recipe: PrecisionRecipe, batch: RankBatch, shards: ShardParameters, held: Array
) -> tuple[Array, Array]:
    """Gathered parameters in use, and collectives' buffers on other streams.

    Fully sharded stacks keep the root's parameters from forward to backward, the last layer's at
    the loss, and gather ``fsdp_prefetch`` layers ahead. Copying stacks (FSDP2) gather into a
    buffer first: the root's and the next unit's.
    """
    width = recipe.compute_param_bytes
    zero3 = batch.sharding >= Sharding.ZERO3
    unit, root = _unit(batch, shards), _root(batch, shards)
    ahead = np.minimum(stack.overlap.fsdp_prefetch, np.maximum(batch.layers - 1, 0.0))
    live = np.minimum(stack.buffers.live_parameters, held)
    copied = stack.buffers.gather_copies
    in_use = np.maximum(root + unit * (1 if copied else 1 + ahead), live) * zero3 * width
    buffers = (np.maximum(root, unit) + unit * ahead) * (width if copied else 0.0)
    return np.asarray(in_use, float), np.asarray(zero3 * buffers, float)


def _buckets(stack: Stack, recipe: PrecisionRecipe, batch: RankBatch, held: Array) -> Array:
    """Copies of gradients that data parallelism makes (none with one replica)."""
    gradients = held * recipe.reduce_bytes
    replicated = (batch.dp * batch.cp > 1) & (batch.sharding < Sharding.ZERO3)
    copies = stack.buffers.gradient_copies
    if copies == "all":
        whole = replicated & (batch.sharding < Sharding.ZERO2)
        return np.where(whole, gradients, 0.0)
    if copies == "bucket":
        return np.where(replicated, np.minimum(gradients, stack.framework.bucket_bytes), 0.0)
    return np.zeros(len(batch))


def _wgrad(stack: Stack, model: ModelSpec, batch: RankBatch, shards: ShardParameters) -> Array:
    """Dummy weight gradients that Transformer Engine caches: two bytes per element, one per shape.

    One layer of each kind that the rank holds, all experts of a rank sharing theirs, and the
    head's on the last stage.
    """
    if not stack.framework.wgrad_buffers:
        return np.zeros(len(batch))
    elements = batch.has_head * shards.head[0]
    if model.moe_layers < model.layers:
        elements = elements + (batch.dense_layers > 0) * shards.dense[0]
    if model.moe is not None and model.moe_layers:
        expert = shards.moe[1] * batch.ep / model.moe.experts
        attention = np.where(batch.dense_layers > 0, 0.0, 1.0) * shards.moe[0]
        elements = elements + (batch.moe_layers > 0) * (expert + attention)
    return 2.0 * elements
