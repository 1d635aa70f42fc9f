"""From shapes to seconds: what the pieces of a step take on every rank class of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hardware_db.schema import GpuSpec
from simulator.cost.batch import Array
from simulator.cost.calibration import UNTUNED, Tuning
from simulator.cost.collectives import Network, all_reduce_s
from simulator.cost.communication import (
    context_parallel_s,
    expert_parallel_s,
    gather_s,
    group_of,
    reduce_s,
    send_s,
    tensor_parallel_s,
)
from simulator.cost.compute import OperatorTimes, kernel_times, step_times
from simulator.cost.kernel_rates import KernelRates
from simulator.cost.kernels import memory_time_s
from simulator.cost.operators import (
    LayerContext,
    Operator,
    embedding_operators,
    head_operators,
    layer_operators,
)
from simulator.cost.shards import ShardParameters, shard_parameters
from simulator.cost.times import PassTimes
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.stack import Stack

#: Host time of launching a tensor-parallel collective, in kernel launches: the autograd function,
#: NCCL's enqueue and the two stream synchronisations around it. Not measured: chosen by hand so
#: that vtrain_single's layer times at tp 1 to 8 are met, so those rows are no test of it.
_COLLECTIVE_LAUNCHES = 1.5

#: Share of the host link that pinned copies reach (NVIDIA's bandwidthTest on PCIe 4: 25 of 32).
_PINNED_COPY = 0.8

#: Rate of an optimiser step on the host, bytes/s of state per GPU: DeepSpeed's CPUAdam is bound by
#: host memory; eight GPUs of a two-socket server share about 300 GB/s.
_HOST_OPTIMIZER_BYTES_PER_S = 38e9


@dataclass(frozen=True)
class Site:
    """Where ranks run: the GPU's measured rates, its network and the host's dispatch speed.

    ``data_network`` is what data-parallel collectives see: the slowest network of all GPUs that
    take part in them. ``tuning`` is the stack's calibration on this GPU, whose network factors the
    two networks already have (``calibration.tuned_network``).
    """

    gpu: GpuSpec
    rates: KernelRates
    network: Network
    data_network: Network
    dispatch_scale: float = 1.0
    tuning: Tuning = UNTUNED


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


#: What stays the same when only some factors of the calibration change: times of kernels alone by
#: piece, and times of communication by network factors.
Memo = dict[str, Any]


def price_ranks(
    stack: Stack, ctx: LayerContext, site: Site, optimizer: str, memo: Memo | None = None
) -> RankTimes:
    """Price every row of ``ctx.batch`` on one site.

    ``optimizer`` sets the bytes that the update moves. Uneven shares are priced by
    ``pricing.price_layout``, which knows all ranks of a collective; here shares are even.
    """
    batch, model = ctx.batch, ctx.model
    memo = {} if memo is None else memo
    shards = shard_parameters(model, batch)
    dispatch = _dispatch_s(stack, site, ctx)
    dense = _layer(ctx, stack, site, dispatch, memo, moe=False)
    moe = _layer(ctx, stack, site, dispatch, memo, moe=True) if model.moe else None
    talk = _communication(stack, ctx, site, shards, memo)
    return RankTimes(
        dense,
        moe,
        _ends(ctx, site, dispatch, memo, head=False),
        _ends(ctx, site, dispatch, memo, head=True),
        talk.reduce[0],
        talk.reduce[1],
        talk.reduce[2],
        talk.reduce[3],
        talk.gather[0],
        talk.gather[1],
        talk.gather[2],
        talk.gather[3],
        talk.send,
        _optimizer_s(stack, ctx, site, shards, optimizer),
    )


@dataclass(frozen=True)
class _Communication:
    """Collectives of all pieces (dense, MoE, embedding, head) and the pipeline's sends."""

    reduce: tuple[Array, ...]
    gather: tuple[Array, ...]
    send: Array


def _communication(
    stack: Stack, ctx: LayerContext, site: Site, shards: ShardParameters, memo: Memo
) -> _Communication:
    key = f"communication {site.tuning.network} {site.tuning.fabric}"
    if key not in memo:
        net, batch, pieces = site.data_network, ctx.batch, shards.pieces()
        memo[key] = _Communication(
            tuple(reduce_s(stack, ctx.recipe, net, batch, p, e) for p, e in pieces),
            tuple(gather_s(ctx.recipe, net, batch, p, e) for p, e in pieces),
            send_s(ctx, site.network),
        )
    found: _Communication = memo[key]
    return found


def _inside_step(
    operators: tuple[Operator, ...], ctx: LayerContext, site: Site, memo: Memo, key: str
) -> OperatorTimes:
    if key not in memo:
        memo[key] = kernel_times(operators, ctx, site.rates)
    return step_times(memo[key], site.tuning)


def _dispatch_s(stack: Stack, site: Site, ctx: LayerContext) -> Array:
    """Host seconds per kernel launch, by row.

    Ranks of a tensor-parallel group meet at every collective, so the slowest of their hosts sets
    the pace: the largest of tp normal deviates is about sqrt(2 ln tp) standard deviations.
    """
    base = site.tuning.dispatch_s
    base = stack.framework.dispatch_s if base is None else base
    factor = stack.framework.compiled_dispatch if ctx.compiled else 1.0
    slowest_of_group = np.sqrt(2.0 * np.log(np.maximum(ctx.batch.tp, 1.0)))
    return np.asarray(
        base / site.dispatch_scale * factor * (1.0 + site.tuning.sync_spread * slowest_of_group)
    )


def _layer(
    ctx: LayerContext, stack: Stack, site: Site, dispatch: Array, memo: Memo, *, moe: bool
) -> PieceTimes:
    """One transformer layer with its communication inside."""
    batch = ctx.batch
    times = _inside_step(layer_operators(ctx, moe=moe), ctx, site, memo, f"layer moe={moe}")
    times = _with_casts(times, ctx, site, moe)
    full = np.where(
        batch.recompute == Recompute.FULL,
        batch.recompute_layers / np.maximum(batch.layers, 1.0),
        0.0,
    )
    selective = (batch.recompute == Recompute.SELECTIVE).astype(float)
    tp_forward, tp_backward = tensor_parallel_s(ctx, site.network)
    visible = 1 - stack.overlap.tp
    tp_forward, tp_backward = tp_forward * visible, (tp_backward + full * tp_forward) * visible
    cp = context_parallel_s(ctx, site.network, times)
    ep: Array = np.zeros(())
    if moe:
        ep = (1 - stack.overlap.ep) * expert_parallel_s(ctx, site.network)
    again = full * times.forward_s + selective * times.recompute_s
    backward_gpu = times.input_s + times.weight_s + again
    # Every pass launches two collectives where tensor parallelism is on.
    calls = np.where(batch.tp > 1, 2 * _COLLECTIVE_LAUNCHES, 0.0)
    forward_launches = times.forward_launches + calls
    backward_launches = (
        times.backward_launches
        + calls
        + full * forward_launches
        + selective * times.recompute_launches
    )
    forward_busy = times.forward_s + tp_forward
    offload = _offload_s(ctx, site)
    return PieceTimes(
        forward=PassTimes(
            compute=times.forward_s,
            dispatch=np.maximum(forward_launches * dispatch - forward_busy, 0.0),
            tp=tp_forward,
            cp=cp,
            ep=ep,
            overhead=np.maximum(offload - forward_busy, 0.0),
        ),
        backward_input=PassTimes(
            compute=times.input_s,
            recompute=again,
            dispatch=np.maximum(backward_launches * dispatch - backward_gpu - tp_backward, 0.0),
            tp=tp_backward,
            cp=2 * cp + full * cp,
            ep=ep + full * ep,
            overhead=np.maximum(offload - backward_gpu, 0.0),
        ),
        backward_weight=PassTimes(compute=times.weight_s),
    )


def _offload_s(ctx: LayerContext, site: Site) -> Array:
    """Copy of one layer's boundary activation to pinned host memory (or back), 0 without offload.

    Copies run beside compute; only what is longer stays visible.
    """
    if not ctx.offload_activations:
        return np.zeros(())
    size = ctx.batch.residual_tokens * ctx.model.hidden * ctx.width
    return np.asarray(size / (site.gpu.pcie_bytes_per_s * _PINNED_COPY))


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
    factor = site.tuning.memory
    cast = factor * memory_time_s(site.rates, 6.0 * weights) if recipe.autocast else zero
    fused = recipe.fused_grad_accumulation
    sharded = ctx.batch.sharding == Sharding.ZERO3
    moved = recipe.compute_param_bytes + np.where(
        sharded, recipe.reduce_bytes, 2.0 * recipe.grad_bytes
    )
    accumulate = zero if fused else factor * memory_time_s(site.rates, weights * moved)
    return OperatorTimes(
        times.forward_s + cast,
        times.input_s,
        times.weight_s + accumulate,
        times.recompute_s,
        times.forward_launches,
        times.backward_launches,
        times.recompute_launches,
    )


def _ends(ctx: LayerContext, site: Site, dispatch: Array, memo: Memo, *, head: bool) -> PieceTimes:
    """Embedding or head; zero-weighted by the caller where a rank has none."""
    operators = head_operators(ctx) if head else embedding_operators(ctx)
    times = _inside_step(operators, ctx, site, memo, f"end head={head}")
    batch = ctx.batch
    group = group_of(site.network, batch.tp, 1)
    # The embedding's output is reduced over the vocabulary's shards; so is the head's input
    # gradient. The loss adds three reductions of one number per token (Megatron-LM section 3).
    activations = batch.tokens * ctx.model.hidden * ctx.width
    reduce = all_reduce_s(site.network, group, activations)
    loss: Array = np.zeros(())
    if head:
        loss = 3 * all_reduce_s(site.network, group, batch.tokens * 4.0)
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


def _optimizer_s(
    stack: Stack, ctx: LayerContext, site: Site, shards: ShardParameters, optimizer: str
) -> Array:
    """Update of the local shard: reads gradients and state, writes state and parameters.

    Unfused optimisers pass over the state once per elementary operation, about three times as
    many bytes. Clipping reads the gradients once more. Offloaded state is updated by the host:
    gradients go there and parameters come back.
    """
    recipe = ctx.recipe
    moments = recipe.moment_bytes * {"lion": 0.5, "sgd": 0.0}.get(optimizer, 1.0)
    moved = 2 * recipe.grad_bytes + 2 * (recipe.master_bytes + moments) + 2 * recipe.param_bytes
    passes = 1.0 if stack.framework.optimizer_fused else 3.0
    owned = shards.owned(ctx.batch)
    if ctx.offload_state:
        copied = owned * (recipe.grad_bytes + recipe.compute_param_bytes)
        link = site.gpu.pcie_bytes_per_s * _PINNED_COPY
        return np.asarray(copied / link + owned * moved / _HOST_OPTIMIZER_BYTES_PER_S)
    return site.tuning.memory * memory_time_s(site.rates, owned * moved * passes)
