"""From shapes to seconds: what each rank class's pieces of a step take.

``price_ranks`` prices a whole batch of rank classes on one GPU type at once; ``price_layout`` does
it for the classes of one layout and hands the task graph its :class:`ClassTimes`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hardware_db.schema import GpuSpec
from simulator.cost.batch import Array, RankBatch, batch_of
from simulator.cost.collectives import (
    Network,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    network,
    placement,
    reduce_scatter_s,
    send_recv_s,
    slowest,
    uneven_all_gather_s,
)
from simulator.cost.compute import OperatorTimes, attention_kernel, operator_times
from simulator.cost.kernel_rates import KernelRates, rates
from simulator.cost.kernels import memory_time_s
from simulator.cost.operators import (
    LayerContext,
    embedding_operators,
    head_operators,
    layer_operators,
)
from simulator.cost.shards import ShardParameters, shard_parameters
from simulator.cost.times import ChunkTimes, ClassTimes, PassTimes, UnitTimes
from simulator.spec.layout import Layout, RankClass
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.stack import PrecisionRecipe, Stack

__all__ = ["PieceTimes", "RankTimes", "Site", "price_layout", "price_ranks"]

#: Ranks of one uneven collective are priced one by one up to here; beyond, in this many groups.
_MAX_UNEVEN_RANKS = 4096


@dataclass(frozen=True)
class Site:
    """Where ranks run: the GPU's measured rates, its network and the host's dispatch speed.

    ``data_network`` is what data-parallel collectives see: the slowest network of all GPUs that
    take part in them.
    """

    gpu: GpuSpec
    rates: KernelRates
    network: Network
    data_network: Network
    dispatch_scale: float = 1.0


@dataclass(frozen=True)
class PieceTimes:
    """One micro-batch through one piece (a layer, the embedding, the head), arrays over rows."""

    forward: PassTimes
    backward_input: PassTimes
    backward_weight: PassTimes


@dataclass(frozen=True)
class RankTimes:
    """All prices of a batch of rank classes, per piece and per step; arrays over rows.

    ``reduce_*`` and ``gather_*`` are the data-parallel collectives of one piece's gradients and
    parameters (one dense layer, one MoE layer, embedding, head).
    """

    dense: PieceTimes
    moe: PieceTimes | None
    embedding: PieceTimes
    head: PieceTimes
    reduce_dense: Array
    reduce_moe: Array
    reduce_embedding: Array
    reduce_head: Array
    gather_dense: Array
    gather_moe: Array
    gather_embedding: Array
    gather_head: Array
    send: Array
    optimizer: Array


def price_ranks(layout_stack: Stack, ctx: LayerContext, site: Site, optimizer: str) -> RankTimes:
    """Price every row of ``ctx.batch`` on one site.

    ``optimizer`` sets the bytes that the update moves. Uneven shares are priced by
    :func:`price_layout`, which knows all ranks of a collective; here shares are even.
    """
    stack, batch, model = layout_stack, ctx.batch, ctx.model
    shards = shard_parameters(model, batch)
    dispatch = _dispatch_s(stack, site, ctx.compiled)
    dense = _layer(ctx, stack, site, dispatch, moe=False)
    moe = _layer(ctx, stack, site, dispatch, moe=True) if model.moe else None
    reduce = [_reduce_s(stack, ctx.recipe, site, batch, p, e) for p, e in shards.pieces()]
    gather = [_gather_s(ctx.recipe, site, batch, p, e) for p, e in shards.pieces()]
    return RankTimes(
        dense,
        moe,
        _ends(ctx, site, dispatch, head=False),
        _ends(ctx, site, dispatch, head=True),
        *reduce,
        *gather,
        _send_s(ctx, site),
        _optimizer_s(stack, ctx, site, shards, optimizer),
    )


def _dispatch_s(stack: Stack, site: Site, compiled: bool) -> float:
    """Host seconds per kernel launch."""
    factor = stack.framework.compiled_dispatch if compiled else 1.0
    return stack.framework.dispatch_s / site.dispatch_scale * factor


def _layer(
    ctx: LayerContext, stack: Stack, site: Site, dispatch: float, *, moe: bool
) -> PieceTimes:
    """One transformer layer with its communication inside."""
    batch = ctx.batch
    times = operator_times(layer_operators(ctx, moe=moe), ctx, site.rates)
    times = _with_casts(times, ctx, site, moe)
    tp_forward, tp_backward = _tensor_parallel_s(ctx, site)
    tp_forward, tp_backward = (t * (1 - stack.overlap.tp) for t in (tp_forward, tp_backward))
    cp = _context_parallel_s(ctx, site, times)
    ep = _expert_parallel_s(ctx, site) * (1 - stack.overlap.ep) if moe else np.zeros(())
    full = np.where(
        batch.recompute == Recompute.FULL,
        batch.recompute_layers / np.maximum(batch.layers, 1.0),
        0.0,
    )
    selective = (batch.recompute == Recompute.SELECTIVE).astype(float)
    again = full * times.forward_s + selective * times.recompute_s
    backward_gpu = times.input_s + times.weight_s + again
    backward_launches = (
        times.backward_launches
        + full * times.forward_launches
        + selective * times.recompute_launches
    )
    host = np.maximum(backward_launches * dispatch - backward_gpu, 0.0)
    return PieceTimes(
        forward=PassTimes(
            compute=times.forward_s,
            dispatch=np.maximum(times.forward_launches * dispatch - times.forward_s, 0.0),
            tp=tp_forward,
            cp=cp,
            ep=ep,
        ),
        backward_input=PassTimes(
            compute=times.input_s,
            recompute=again,
            dispatch=host,
            tp=tp_backward + full * tp_forward,
            cp=2 * cp + full * cp,
            ep=ep + full * ep,
        ),
        backward_weight=PassTimes(compute=times.weight_s),
    )


def _with_casts(times: OperatorTimes, ctx: LayerContext, site: Site, moe: bool) -> OperatorTimes:
    """Add autocast's weight casts and the gradient accumulation of unfused stacks.

    Casting reads 4 and writes 2 bytes per weight in the forward pass; accumulation reads the new
    gradient and reads and writes the buffer, once per micro-batch (FACTS on Cephalo's profiles:
    the intercept of the backward time is 24 bytes per parameter over the memory bandwidth).
    """
    recipe = ctx.recipe
    shards = shard_parameters(ctx.model, ctx.batch)
    dense, experts = shards.moe if moe else shards.dense
    weights = dense + experts
    zero = np.zeros(())
    cast = memory_time_s(site.rates, 6.0 * weights) if recipe.autocast else zero
    fused = recipe.fused_grad_accumulation
    sharded = ctx.batch.sharding == Sharding.ZERO3
    moved = recipe.compute_param_bytes + np.where(
        sharded, recipe.reduce_bytes, 2.0 * recipe.grad_bytes
    )
    accumulate = zero if fused else memory_time_s(site.rates, weights * moved)
    return OperatorTimes(
        times.forward_s + cast,
        times.input_s,
        times.weight_s + accumulate,
        times.recompute_s,
        times.forward_launches,
        times.backward_launches,
        times.recompute_launches,
    )


def _ends(ctx: LayerContext, site: Site, dispatch: float, *, head: bool) -> PieceTimes:
    """Embedding or head; zero-weighted by the caller where a rank has none."""
    operators = head_operators(ctx) if head else embedding_operators(ctx)
    times = operator_times(operators, ctx, site.rates)
    batch = ctx.batch
    group = placement(degree=_int(batch.tp), stride=1, gpus_per_node=site.network.gpus_per_node)
    # The embedding's output is reduced over the vocabulary's shards; so is the head's input
    # gradient. The loss adds three reductions of one number per token (Megatron-LM section 3).
    activations = batch.tokens * ctx.model.hidden * ctx.width
    reduce = all_reduce_s(site.network, group, activations)
    loss = 3 * all_reduce_s(site.network, group, batch.tokens * 4.0) if head else np.zeros(())
    backward_gpu = times.input_s + times.weight_s
    host = np.maximum(times.backward_launches * dispatch - backward_gpu, 0.0)
    return PieceTimes(
        forward=PassTimes(
            compute=times.forward_s,
            dispatch=np.maximum(times.forward_launches * dispatch - times.forward_s, 0.0),
            tp=loss if head else reduce,
        ),
        backward_input=PassTimes(
            compute=times.input_s, dispatch=host, tp=reduce if head else np.zeros(())
        ),
        backward_weight=PassTimes(compute=times.weight_s),
    )


def _int(values: Array) -> Array:
    return np.maximum(np.rint(values), 1).astype(np.int64)


def _tensor_parallel_s(ctx: LayerContext, site: Site) -> tuple[Array, Array]:
    """Collectives of one layer over the tensor-parallel group, forward and backward.

    Two all-reduces per pass (arXiv 1909.08053 section 3); with sequence parallelism each becomes
    a gather and a reduce-scatter, and backward gathers once more for each weight gradient (arXiv
    2205.05198 section 4.2.2). One of each where attention and MLP are parallel.
    """
    batch, model = ctx.batch, ctx.model
    group = placement(degree=_int(batch.tp), stride=1, gpus_per_node=site.network.gpus_per_node)
    size = batch.tokens * model.hidden * ctx.width
    blocks = 1.0 if model.parallel_block else 2.0
    reduce = blocks * all_reduce_s(site.network, group, size)
    gather = all_gather_s(site.network, group, size)
    scatter = reduce_scatter_s(site.network, group, size)
    split = batch.sequence_parallel > 0
    forward = np.where(split, blocks * (gather + scatter), reduce)
    backward = np.where(split, blocks * (2 * gather + scatter), reduce)
    return forward, backward


def _context_parallel_s(ctx: LayerContext, site: Site, times: OperatorTimes) -> Array:
    """Exposed part of ring attention's exchange of keys and values in one forward pass.

    cp - 1 steps each send one rank's K and V while the previous block is computed; what is longer
    than a block's attention stays visible (Ring Attention, arXiv 2310.01889 section 3).
    """
    batch, model = ctx.batch, ctx.model
    kv_tp = np.minimum(batch.tp, model.kv_heads)
    block = 2.0 * batch.tokens * (model.kv_width / kv_tp) * ctx.width
    stride = batch.tp
    per_node = site.network.gpus_per_node
    crosses = batch.cp * stride > per_node
    send = send_recv_s(site.network, block, crosses, senders_per_node=per_node)
    core = 0.25 * times.forward_s / np.maximum(batch.cp, 1.0)
    return np.where(batch.cp > 1, (batch.cp - 1) * np.maximum(send - core, 0.0), 0.0)


def _expert_parallel_s(ctx: LayerContext, site: Site) -> Array:
    """Two all-to-alls (dispatch and combine) of one MoE layer's pass."""
    batch, model = ctx.batch, ctx.model
    assert model.moe is not None
    group = placement(
        degree=_int(batch.ep), stride=_int(batch.tp), gpus_per_node=site.network.gpus_per_node
    )
    moved = batch.residual_tokens * model.moe.top_k * model.hidden * ctx.width
    return 2.0 * all_to_all_s(site.network, group, moved)


def _data_group(site: Site, batch: RankBatch, degree: Array) -> object:
    return placement(
        degree=_int(degree),
        stride=_int(batch.tp),
        gpus_per_node=site.data_network.gpus_per_node,
    )


def _reduce_s(
    stack: Stack,
    recipe: PrecisionRecipe,
    site: Site,
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
        whole = placement(
            degree=_int(ranks), stride=_int(batch.tp), gpus_per_node=site.data_network.gpus_per_node
        )
        shard = placement(
            degree=_int(degree),
            stride=_int(batch.tp),
            gpus_per_node=site.data_network.gpus_per_node,
        )
        copies = placement(
            degree=_int(ranks / degree),
            stride=_int(batch.tp * degree),
            gpus_per_node=site.data_network.gpus_per_node,
        )
        net = site.data_network
        none = pieces * all_reduce_s(net, whole, bucket)
        scattered = pieces * reduce_scatter_s(net, shard, bucket) + all_reduce_s(
            net, copies, size / degree
        )
        return np.where(batch.sharding == Sharding.NONE, none, scattered)

    ranks = batch.dp * batch.cp
    degree = np.where(batch.sharding == Sharding.NONE, ranks, batch.shard_degree)
    expert_ranks = np.maximum(ranks / batch.ep, 1.0)
    return one(dense, ranks, degree) + one(experts, expert_ranks, np.minimum(degree, expert_ranks))


def _gather_s(
    recipe: PrecisionRecipe, site: Site, batch: RankBatch, dense: Array, experts: Array
) -> Array:
    """Gather of one piece's parameters over the ranks that share their state."""
    ranks = batch.dp * batch.cp
    degree = np.where(batch.sharding == Sharding.NONE, 1.0, batch.shard_degree)
    expert_degree = np.minimum(degree, np.maximum(ranks / batch.ep, 1.0))
    total: Array = np.zeros(())
    for parameters, size in ((dense, degree), (experts, expert_degree)):
        group = placement(
            degree=_int(size), stride=_int(batch.tp), gpus_per_node=site.data_network.gpus_per_node
        )
        total = total + all_gather_s(
            site.data_network, group, parameters * recipe.compute_param_bytes
        )
    return total


def _send_s(ctx: LayerContext, site: Site) -> Array:
    """One micro-batch's activations to the next stage; tp ranks send a slice each."""
    batch = ctx.batch
    stride = batch.tp * batch.cp * batch.dp
    per_node = site.network.gpus_per_node
    here, there = (
        np.floor(batch.stage * stride / per_node),
        np.floor((batch.stage + 1) * stride / per_node),
    )
    size = batch.tokens * ctx.model.hidden * ctx.width / batch.tp
    senders = np.minimum(stride, per_node)
    crosses = (here != there) & (batch.stage + 1 < batch.pp)
    time = send_recv_s(site.network, size, crosses, senders_per_node=senders)
    return np.where(batch.pp > 1, time, 0.0)


def _optimizer_s(
    stack: Stack, ctx: LayerContext, site: Site, shards: ShardParameters, optimizer: str
) -> Array:
    """Update of the local shard: reads gradients and state, writes state and parameters.

    Unfused optimisers pass over the state once per elementary operation, about three times as
    many bytes. Clipping reads the gradients once more.
    """
    recipe = ctx.recipe
    moments = recipe.moment_bytes * {"lion": 0.5, "sgd": 0.0}.get(optimizer, 1.0)
    moved = 2 * recipe.grad_bytes + 2 * (recipe.master_bytes + moments) + 2 * recipe.param_bytes
    passes = 1.0 if stack.framework.optimizer_fused else 3.0
    owned = shards.owned(ctx.batch)
    return memory_time_s(site.rates, owned * moved * passes)


def _site_networks(layout: Layout) -> dict[int, Network]:
    """Network by node group."""
    found = {}
    for index, group in enumerate(layout.cluster.groups):
        fabric = layout.cluster.fabric
        found[index] = slowest([network(group.node, fabric, g) for g in dict.fromkeys(group.gpus)])
    return found


def price_layout(layout: Layout) -> tuple[ClassTimes, ...]:
    """Times of every rank class of a layout, in class order."""
    networks = _site_networks(layout)
    everywhere = slowest(list({c.group: networks[c.group] for c in layout.classes}.values()))
    recipe = layout.stack.recipe(layout.plan.precision)
    found: dict[int, ClassTimes] = {}
    sites = {(c.gpu.name, c.group) for c in layout.classes}
    for key in sorted(sites):
        members = tuple(c for c in layout.classes if (c.gpu.name, c.group) == key)
        gpu, group = members[0].gpu, layout.cluster.groups[members[0].group]
        site = Site(
            gpu, rates(gpu), networks[members[0].group], everywhere, group.node.dispatch_scale
        )
        ctx = LayerContext(
            layout.model,
            layout.stack.kept,
            recipe,
            batch_of(layout, members),
            attention_kernel(gpu, layout.plan.attention, layout.stack.kept.attention),
            layout.plan.compile,
        )
        priced = price_ranks(layout.stack, ctx, site, layout.plan.optimizer)
        for row, rank_class in enumerate(members):
            found[rank_class.index] = _class_times(layout, rank_class, priced, row, everywhere)
    return tuple(found[c.index] for c in layout.classes)


def _at(times: PassTimes, row: int) -> PassTimes:
    """One row of a batch of pass times as floats."""
    values = {f.name: np.asarray(getattr(times, f.name)) for f in fields(times)}
    return PassTimes(**{k: float(v[row] if v.ndim else v) for k, v in values.items()})


def _scalar(values: Array, row: int) -> float:
    array = np.asarray(values)
    return float(array[row] if array.ndim else array)


def _piece(piece: PieceTimes, row: int) -> PieceTimes:
    return PieceTimes(
        _at(piece.forward, row), _at(piece.backward_input, row), _at(piece.backward_weight, row)
    )


def _class_times(
    layout: Layout, c: RankClass, priced: RankTimes, row: int, everywhere: Network
) -> ClassTimes:
    dense = _piece(priced.dense, row)
    moe = _piece(priced.moe, row) if priced.moe else dense
    ends = (_piece(priced.embedding, row), _piece(priced.head, row))
    extra = layout.stack.framework.micro_batch_overhead_s
    chunks = tuple(
        _chunk(layout, c, i, dense, moe, ends, priced, row, extra) for i in range(len(c.chunks))
    )
    units: tuple[UnitTimes, ...] = ()
    if layout.plan.sharding == Sharding.ZERO3:
        units = _units(layout, c, dense, moe, ends, priced, row, everywhere)
    send = _scalar(priced.send, row)
    return ClassTimes(
        chunks=chunks,
        units=units,
        send_forward=send,
        send_backward=send,
        optimizer=_scalar(priced.optimizer, row),
        step_overhead=layout.stack.framework.step_overhead_s,
    )


def _chunk(
    layout: Layout,
    c: RankClass,
    index: int,
    dense: PieceTimes,
    moe: PieceTimes,
    ends: tuple[PieceTimes, PieceTimes],
    priced: RankTimes,
    row: int,
    overhead: float,
) -> ChunkTimes:
    n_moe = c.moe_chunks[index]
    n_dense = c.chunks[index] - n_moe
    first = float(c.is_first and index == 0)
    last = float(c.is_last and index == len(c.chunks) - 1)
    weights = ((dense, n_dense), (moe, n_moe), (ends[0], first), (ends[1], last))

    def total(name: str) -> PassTimes:
        result = PassTimes()
        for piece, count in weights:
            result = result + getattr(piece, name).scaled(count)
        return result

    def collective(kind: str) -> float:
        names = ("dense", "moe", "embedding", "head")
        return sum(
            count * _scalar(getattr(priced, f"{kind}_{name}"), row)
            for name, (_, count) in zip(names, weights, strict=True)
            if count
        )

    sharding = layout.plan.sharding
    zero3 = sharding == Sharding.ZERO3
    reduce = 0.0 if zero3 else collective("reduce")
    # ZeRO-2 reduces after every micro-batch: whole gradients are never kept.
    reduce *= c.micro_batches if sharding == Sharding.ZERO2 else 1
    gather = collective("gather") if sharding in (Sharding.ZERO1, Sharding.ZERO2) else 0.0
    return ChunkTimes(
        forward=total("forward") + PassTimes(overhead=overhead),
        backward_input=total("backward_input"),
        backward_weight=total("backward_weight"),
        grad_reduce=reduce,
        param_gather=gather,
    )


def _units(
    layout: Layout,
    c: RankClass,
    dense: PieceTimes,
    moe: PieceTimes,
    ends: tuple[PieceTimes, PieceTimes],
    priced: RankTimes,
    row: int,
    everywhere: Network,
) -> tuple[UnitTimes, ...]:
    """FSDP units in forward order: embedding, layers, head."""
    n_moe, n_dense = c.moe_layers, c.layers - c.moe_layers
    scale = _uneven_factor(layout, everywhere)
    pieces = (
        ("embedding", int(c.is_first), ends[0], "embedding"),
        ("dense layer", n_dense, dense, "dense"),
        ("moe layer", n_moe, moe, "moe"),
        ("head", int(c.is_last), ends[1], "head"),
    )
    units = []
    for name, repeat, piece, key in pieces:
        if not repeat:
            continue
        gather = scale * _scalar(getattr(priced, f"gather_{key}"), row)
        reduce = scale * _scalar(getattr(priced, f"reduce_{key}"), row)
        backward = piece.backward_input + piece.backward_weight
        # The head is gathered last in forward and first in backward: it stays.
        again = 0.0 if key == "head" else gather
        units.append(UnitTimes(name, repeat, piece.forward, backward, gather, again, reduce))
    return tuple(units)


def _uneven_factor(layout: Layout, net: Network) -> float:
    """Time of collectives over uneven state shares relative to even ones, for one layer's bytes.

    Every rank of the data-parallel world takes part with its own share.
    """
    shares = np.repeat(
        [c.state_share for c in layout.classes],
        [c.replicas * c.cp for c in layout.classes],
    )
    if len(shares) < 2 or len(shares) > _MAX_UNEVEN_RANKS or np.ptp(shares) < 1e-9:
        return 1.0
    degree = layout.plan.shard_degree or len(shares)
    if degree != len(shares):
        return 1.0
    group = placement(degree=degree, stride=layout.plan.tp, gpus_per_node=net.gpus_per_node)
    layer = layout.model.hidden**2 * 12 * 2.0 / layout.plan.tp
    even = all_gather_s(net, group, layer)
    uneven = uneven_all_gather_s(net, group, layer * shares)
    return float(uneven / even)
