"""Communication of one piece of a step: who talks to whom, how many bytes, how long.

Times are what the network takes; what hides behind compute is decided by the caller.
"""

from __future__ import annotations

import numpy as np

from simulator.cost.batch import Array, RankBatch
from simulator.cost.collectives import (
    Network,
    Placement,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    placement,
    reduce_scatter_s,
    send_recv_s,
    uneven_all_gather_s,
)
from simulator.cost.compute import OperatorTimes
from simulator.cost.operators import LayerContext
from simulator.spec.layout import Layout
from simulator.spec.plan import Sharding
from simulator.spec.stack import PrecisionRecipe, Stack

#: Uneven shares are priced rank by rank up to this many; beyond, shares count as even.
MAX_UNEVEN_RANKS = 4096


def whole(values: Array) -> Array:
    """Degrees as positive integers."""
    return np.maximum(np.rint(values), 1).astype(np.int64)


def group_of(net: Network, degree: Array, stride: Array | int) -> Placement:
    """Placement of groups of ``degree`` ranks that are ``stride`` apart on a network's nodes.

    Without a fabric there is one node and every group is inside it (``pricing.price_layout``
    refuses several nodes without a fabric).
    """
    size, step = whole(np.asarray(degree)), whole(np.asarray(stride))
    alone = int(np.max(size) * np.max(step))
    return placement(
        degree=size,
        stride=step,
        gpus_per_node=net.gpus_per_node if net.inter is not None else alone,
    )


def tensor_parallel_s(ctx: LayerContext, net: Network) -> tuple[Array, Array]:
    """Collectives of one layer over the tensor-parallel group, forward and backward.

    Two all-reduces per pass (arXiv 1909.08053 section 3); with sequence parallelism each becomes
    a gather and a reduce-scatter, and backward gathers once more for each weight gradient (arXiv
    2205.05198 section 4.2.2). One of each where attention and MLP are parallel.
    """
    batch, model = ctx.batch, ctx.model
    group = group_of(net, batch.tp, 1)
    size = batch.tokens * model.hidden * ctx.width
    blocks = 1.0 if model.parallel_block else 2.0
    reduce = blocks * all_reduce_s(net, group, size)
    gather = all_gather_s(net, group, size)
    scatter = reduce_scatter_s(net, group, size)
    split = batch.sequence_parallel > 0
    forward = np.where(split, blocks * (gather + scatter), reduce)
    backward = np.where(split, blocks * (2 * gather + scatter), reduce)
    return forward, backward


def context_parallel_s(ctx: LayerContext, net: Network, times: OperatorTimes) -> Array:
    """Exposed part of ring attention's exchange of keys and values in one forward pass.

    cp - 1 steps each send one rank's K and V while the previous block is computed; what is longer
    than a block's attention stays visible (Ring Attention, arXiv 2310.01889 section 3).
    """
    batch, model = ctx.batch, ctx.model
    kv_tp = np.minimum(batch.tp, model.kv_heads)
    block = 2.0 * batch.tokens * (model.kv_width / kv_tp) * ctx.width
    stride = batch.tp
    per_node = net.gpus_per_node
    crosses = (batch.cp * stride > per_node) & (net.inter is not None)
    send = send_recv_s(net, block, crosses, senders_per_node=per_node)
    core = 0.25 * times.forward_s / np.maximum(batch.cp, 1.0)
    return np.where(batch.cp > 1, (batch.cp - 1) * np.maximum(send - core, 0.0), 0.0)


def expert_parallel_s(ctx: LayerContext, net: Network) -> Array:
    """Two all-to-alls (dispatch and combine) of one MoE layer's pass."""
    batch, model = ctx.batch, ctx.model
    assert model.moe is not None
    group = group_of(net, batch.ep, batch.tp)
    moved = batch.residual_tokens * model.moe.top_k * model.hidden * ctx.width
    return 2.0 * all_to_all_s(net, group, moved)


def reduce_s(
    stack: Stack,
    recipe: PrecisionRecipe,
    net: Network,
    batch: RankBatch,
    dense: Array,
    experts: Array,
) -> Array:
    """Gradient reduction of one piece over its data-parallel ranks, in buckets.

    All-reduce without sharding, reduce-scatter with it; HSDP reduces over the copies after that.
    Experts have dp * cp / ep copies.
    """

    def one(parameters: Array, ranks: Array, degree: Array) -> Array:
        size = parameters * recipe.reduce_bytes
        # Fully sharded units are reduced whole, everything else in the stack's buckets.
        limit = np.where(
            batch.sharding == Sharding.ZERO3, np.inf, max(stack.framework.bucket_bytes, 1.0)
        )
        bucket = np.minimum(size, limit)
        pieces = size / np.maximum(bucket, 1.0)
        everyone = group_of(net, ranks, batch.tp)
        shard = group_of(net, degree, batch.tp)
        copies = group_of(net, ranks / degree, batch.tp * degree)
        none = pieces * all_reduce_s(net, everyone, bucket)
        scattered = pieces * reduce_scatter_s(net, shard, bucket) + all_reduce_s(
            net, copies, size / degree
        )
        return np.where(batch.sharding == Sharding.NONE, none, scattered)

    ranks = batch.dp * batch.cp
    degree = np.where(batch.sharding == Sharding.NONE, ranks, batch.shard_degree)
    expert_ranks = np.maximum(ranks / batch.ep, 1.0)
    return one(dense, ranks, degree) + one(experts, expert_ranks, np.minimum(degree, expert_ranks))


def gather_s(
    recipe: PrecisionRecipe, net: Network, batch: RankBatch, dense: Array, experts: Array
) -> Array:
    """Gather of one piece's parameters over the ranks that share their state."""
    ranks = batch.dp * batch.cp
    degree = np.where(batch.sharding == Sharding.NONE, 1.0, batch.shard_degree)
    expert_degree = np.minimum(degree, np.maximum(ranks / batch.ep, 1.0))
    total: Array = np.zeros(())
    for parameters, size in ((dense, degree), (experts, expert_degree)):
        group = group_of(net, size, batch.tp)
        total = total + all_gather_s(net, group, parameters * recipe.compute_param_bytes)
    return total


def send_s(ctx: LayerContext, net: Network) -> Array:
    """One micro-batch's activations to the next stage; tp ranks send a slice each."""
    batch = ctx.batch
    stride = batch.tp * batch.cp * batch.dp
    per_node = net.gpus_per_node
    here, there = (
        np.floor(batch.stage * stride / per_node),
        np.floor((batch.stage + 1) * stride / per_node),
    )
    size = batch.tokens * ctx.model.hidden * ctx.width / batch.tp
    senders = np.minimum(stride, per_node)
    # Interleaved chunks also go from the last stage back to the first.
    around = (batch.vpp > 1) & (batch.pp * stride > per_node)
    crosses = np.where(batch.stage + 1 < batch.pp, here != there, around)
    crosses = crosses & (net.inter is not None)
    time = send_recv_s(net, size, crosses, senders_per_node=senders)
    return np.where(batch.pp > 1, time, 0.0)


def uneven_factor(layout: Layout, net: Network) -> float:
    """Time of collectives over uneven state shares relative to even ones, for one layer's bytes.

    Every rank of the data-parallel world takes part with its own share.
    """
    shares = np.repeat(
        [c.state_share for c in layout.classes],
        [c.replicas * c.cp for c in layout.classes],
    )
    if len(shares) < 2 or len(shares) > MAX_UNEVEN_RANKS or np.ptp(shares) < 1e-9:
        return 1.0
    degree = layout.plan.shard_degree or len(shares)
    if degree != len(shares):
        return 1.0
    group = group_of(net, np.asarray(float(degree)), layout.plan.tp)
    layer = layout.model.hidden**2 * 12 * 2.0 / layout.plan.tp
    even = all_gather_s(net, group, layer)
    uneven = uneven_all_gather_s(net, group, layer * shares)
    return float(uneven / even)
