"""Memory of a rank through one training step, by component.

A step has three moments at which a rank can be fullest: at the loss (all activations in flight and
the logits), inside a layer's backward pass (activations, recomputed tensors, gradients of one unit)
and in the optimiser's step (all gradients and its temporaries). Each component is known at each
moment; the peak is the fullest moment's sum. Pure functions over a batch of rank classes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from simulator.cost.activations import (
    LayerBytes,
    embedding_bytes,
    head_bytes,
    in_flight,
    layer_bytes,
)
from simulator.cost.batch import Array, RankBatch, batch_of
from simulator.cost.operators import LayerContext
from simulator.cost.state import TrainingState, training_state
from simulator.spec.layout import Layout
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Offload
from simulator.spec.stack import PrecisionRecipe, Stack

#: When a rank is fullest, in step order; ``MemoryBreakdown.peak_moment`` indexes it.
MOMENTS = ("loss", "backward", "optimizer step")

#: Size of an NCCL communicator's buffers by architecture over Hopper's: they grow with the channels
#: that the links are worth. Assumed; T4 runs of arXiv 2210.07297 that fit in 15 GB bound it there.
COMMUNICATOR_SCALE = {"pascal": 0.3, "volta": 0.3, "turing": 0.3, "ada": 0.3, "ampere": 0.6}

#: Receive and send buffers of one layer's activations that a pipeline stage holds.
_PIPELINE_BUFFERS = 2.0


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one rank of each row at its fullest moment; arrays over rows.

    The first eight fields are what torch counts as allocated and sum to
    ``peak_allocated_bytes``; with ``fragmentation`` they sum to ``peak_reserved_bytes`` and with
    ``framework`` (CUDA context, NCCL) to ``device_bytes``. ``reclaimable`` is the part of
    ``fragmentation`` in wholly free segments, which torch returns before it gives up.
    ``allocated_by_moment`` has one row per entry of :data:`MOMENTS`.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    unsharded_units: Array
    activations: Array
    recompute_working_set: Array
    logits: Array
    temporaries: Array
    fragmentation: Array
    framework: Array
    reclaimable: Array
    allocated_by_moment: Array
    peak_moment: npt.NDArray[np.intp]
    in_flight: Array

    @property
    def peak_allocated_bytes(self) -> Array:
        """What torch.cuda.max_memory_allocated would say."""
        return np.asarray(self.allocated_by_moment.max(axis=0), float)

    @property
    def peak_reserved_bytes(self) -> Array:
        """What torch.cuda.max_memory_reserved would say."""
        return self.peak_allocated_bytes + self.fragmentation

    @property
    def device_bytes(self) -> Array:
        """Device memory in use, with the CUDA context and NCCL's buffers."""
        return self.peak_reserved_bytes + self.framework

    @property
    def needed_bytes(self) -> Array:
        """Device memory without which the step fails: in use, less what torch can return."""
        return self.device_bytes - self.reclaimable

    def components(self) -> dict[str, Array]:
        """The components by name, in the order in which they are stacked in plots."""
        return {f.name: getattr(self, f.name) for f in fields(self)[:10]}


@dataclass(frozen=True)
class MemoryOptions:
    """What the batch does not hold.

    ``expert_imbalance`` is the fullest rank's routed tokens over the mean (or the capacity factor
    where tokens are dropped). ``communicator_scale`` is the size of NCCL's buffers on the row's GPU
    over that on Hopper (:data:`COMMUNICATOR_SCALE`).
    """

    schedule: str = "1f1b"
    attention: str = "flash2"
    compiled: bool = False
    offload: Offload = "none"
    expert_imbalance: float = 1.0
    expandable_segments: bool = False
    communicator_scale: Array | float = 1.0


#: One forward and one backward pass in turn, flash attention, nothing offloaded.
DEFAULT_OPTIONS = MemoryOptions()


@dataclass(frozen=True)
class MicroBatchBytes:
    """What one micro-batch keeps on a rank, piece by piece; arrays over rows.

    Nothing here depends on data or pipeline parallelism, so that a grid of plans needs it only once
    for each combination of the other degrees, micro-batch and recompute mode. ``dense`` and ``moe``
    are None where the model has no such layers.
    """

    dense: LayerBytes | None
    moe: LayerBytes | None
    embedding: Array
    head: Array
    logits: Array


def micro_batch_bytes(ctx: LayerContext, expert_imbalance: float = 1.0) -> MicroBatchBytes:
    """Kept bytes of one micro-batch on every row of ``ctx.batch``."""
    model = ctx.model
    rest, logits = head_bytes(ctx)
    return MicroBatchBytes(
        dense=layer_bytes(ctx) if model.moe_layers < model.layers else None,
        moe=layer_bytes(ctx, moe=True, imbalance=expert_imbalance) if model.moe_layers else None,
        embedding=embedding_bytes(ctx),
        head=rest,
        logits=logits,
    )


def rank_memory(
    model: ModelSpec,
    stack: Stack,
    recipe: PrecisionRecipe,
    optimizer: str,
    batch: RankBatch,
    options: MemoryOptions = DEFAULT_OPTIONS,
    *,
    state: TrainingState | None = None,
    one: MicroBatchBytes | None = None,
    with_components: bool = True,
) -> MemoryBreakdown:
    """Memory of every row of ``batch``.

    ``state`` and ``one`` are what :func:`training_state` and :func:`micro_batch_bytes` give for
    these rows, where the caller has them already. ``with_components`` off leaves the eight
    allocated components zero: grids of plans need only the sums.

    Raises:
        UserError: ``optimizer`` is unknown.
    """
    ctx = LayerContext(model, stack.kept, recipe, batch, options.attention, options.compiled)
    if state is None:
        state = training_state(model, stack, recipe, optimizer, batch, offload=options.offload)
    if one is None:
        one = micro_batch_bytes(ctx, options.expert_imbalance)
    work = _activations(ctx, options, stack, one)
    moments = _moments(ctx, stack, state, work)
    allocated = np.stack([sum(m.values(), np.zeros(len(batch))) for m in moments])
    peak = allocated.argmax(axis=0)
    chosen: dict[str, Array] = dict.fromkeys(moments[0], np.zeros(()))
    if with_components:
        chosen = {name: _pick(peak, [m[name] for m in moments]) for name in moments[0]}
    fragmentation, reclaimable = _fragmentation(stack, state, moments, allocated, options)
    nccl = stack.framework.communicator_bytes * options.communicator_scale
    return MemoryBreakdown(
        **chosen,
        fragmentation=fragmentation,
        framework=stack.framework.context_bytes + nccl * communicators(stack, batch),
        reclaimable=reclaimable,
        allocated_by_moment=allocated,
        peak_moment=peak,
        in_flight=work.in_flight,
    )


@dataclass(frozen=True)
class _Work:
    """Activation bytes of a rank: what is kept, and what exists at the moments alone."""

    kept: Array
    recomputed: Array
    backward: Array
    logits: Array
    transport: Array
    in_flight: Array


def _activations(
    ctx: LayerContext, options: MemoryOptions, stack: Stack, one: MicroBatchBytes
) -> _Work:
    batch, model = ctx.batch, ctx.model
    flying = in_flight(batch, options.schedule)
    kept: Array = np.zeros(len(batch))
    recomputed: Array = np.zeros(len(batch))
    backward: Array = np.zeros(len(batch))
    for layer, layers in ((one.dense, batch.dense_layers), (one.moe, batch.moe_layers)):
        if layer is None:
            continue
        kept = kept + layers * flying * layer.kept(batch)
        held = layers > 0
        recomputed = np.maximum(recomputed, held * layer.recomputed(batch))
        backward = np.maximum(backward, held * layer.backward)
    boundary = batch.residual_tokens * model.hidden * ctx.width
    depth = np.minimum(np.ceil(flying), batch.micro_batches)
    if stack.buffers.outputs:
        kept = kept + np.where(batch.pp > 1, depth * boundary, 0.0)
    if options.offload == "activations":
        # Two layers' worth stays on the device: one in use, one on its way.
        kept = kept * np.minimum(1.0, 2.0 / np.maximum(batch.layers * flying, 1.0))
    kept = kept + batch.has_embedding * depth * one.embedding + batch.has_head * one.head
    if options.schedule == "layered":
        # The gradients of one layer boundary exist for every micro-batch.
        kept = kept + batch.micro_batches * boundary
    transport = np.where(batch.pp > 1, _PIPELINE_BUFFERS * boundary, 0.0)
    ring = 2 * 2 * batch.tokens * model.kv_width / np.minimum(batch.tp, model.kv_heads) * ctx.width
    transport = transport + np.where(batch.cp > 1, ring, 0.0)
    return _Work(kept, recomputed, backward, batch.has_head * one.logits, transport, flying)


def _moments(
    ctx: LayerContext, stack: Stack, state: TrainingState, work: _Work
) -> list[dict[str, Array]]:
    """The eight allocated components at each of :data:`MOMENTS`."""
    batch = ctx.batch
    zero: Array = np.zeros(len(batch))
    # Freed gradients are absent in a step's first backward pass, unless others came before it.
    before = stack.buffers.persistent_gradients | (batch.micro_batches > 1)
    early = np.where(before, state.gradients, 0.0)
    always = stack.framework.workspace_bytes + state.wgrad_buffers + zero
    loss = {
        "parameters": state.parameters + zero,
        "gradients": early + zero,
        "optimizer": state.optimizer + zero,
        "unsharded_units": state.gathered + zero,
        "activations": work.kept + zero,
        "recompute_working_set": zero,
        "logits": work.logits + zero,
        "temporaries": always + work.transport,
    }
    backward = loss | {
        "unsharded_units": state.gathered + state.unit_gradients + zero,
        "recompute_working_set": work.recomputed + work.backward + zero,
        "logits": zero,
        "temporaries": always + work.transport + state.buckets,
    }
    step = loss | {
        "gradients": state.gradients + zero,
        "unsharded_units": zero,
        "activations": zero,
        "logits": zero,
        "temporaries": always + state.buckets + state.step_temporaries,
    }
    return [loss, backward, step]


def _pick(peak: npt.NDArray[np.intp], values: list[Array]) -> Array:
    return np.asarray(np.take_along_axis(np.stack(values), peak[None, :], axis=0)[0], float)


def _fragmentation(
    stack: Stack,
    state: TrainingState,
    moments: list[dict[str, Array]],
    allocated: Array,
    options: MemoryOptions,
) -> tuple[Array, Array]:
    """Peak reserved minus peak allocated, and the part of it that torch can return.

    Torch caches freed blocks per stream. Stacks that gather and reduce on their own streams
    (``stream_pools``) hold the gather buffers there, and the reduced gradients even at moments that
    do not have them yet: those of the step before. The loss frees 16-bit logits whose blocks its
    fp32 gradients can't use. Everything splinters by the stack's share but logits: few large
    blocks with segments of their own.
    """
    share = 0.0 if options.expandable_segments else stack.framework.fragmentation
    logits = np.stack([m["logits"] for m in moments])
    gradients = np.stack([m["gradients"] for m in moments])
    pooled, stranded = np.zeros_like(gradients), np.zeros_like(logits[0])
    if stack.buffers.stream_pools:
        pooled = state.gradients - gradients
        if not options.expandable_segments:
            cached = stack.buffers.logits_cached_bytes / stack.kept.logits_bytes
            stranded = logits.max(axis=0) * cached
    needed = allocated + share * (allocated - logits)
    always = state.gather_buffers * stack.buffers.stream_pools
    reserved = (needed + pooled).max(axis=0) + stranded
    return reserved + always - allocated.max(axis=0), reserved - needed.max(axis=0)


def communicators(stack: Stack, batch: RankBatch) -> Array:
    """NCCL communicators of a rank: one for each parallel dimension above 1, or the stack's own."""
    dims = (batch.tp, batch.pp, batch.cp, batch.dp, batch.ep)
    count = sum((np.asarray(d > 1, float) for d in dims), np.zeros(len(batch)))
    return np.maximum(count, stack.buffers.communicators)


@dataclass(frozen=True)
class ClassMemory:
    """Memory of one rank class of a layout, in bytes."""

    rank_class: int
    stage: int
    gpu: str
    components: dict[str, float]
    allocated_by_moment: dict[str, float]
    peak_moment: str
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    device_bytes: float
    needed_bytes: float
    usable_bytes: float


def layout_options(layout: Layout, *, expert_imbalance: float = 1.0) -> MemoryOptions:
    """What a layout's plan says beside its batch of rank classes, for every class in order."""
    plan = layout.plan
    scale = np.array([COMMUNICATOR_SCALE.get(c.gpu.architecture, 1.0) for c in layout.classes])
    return MemoryOptions(
        schedule=plan.schedule,
        attention=layout.stack.kept.attention if plan.attention == "auto" else plan.attention,
        compiled=plan.compile,
        offload=plan.offload,
        expert_imbalance=expert_imbalance,
        communicator_scale=scale,
    )


def layout_breakdown(layout: Layout, *, expert_imbalance: float = 1.0) -> MemoryBreakdown:
    """Memory of every rank class of a layout as one batch, in the layout's class order."""
    plan, stack = layout.plan, layout.stack
    options = layout_options(layout, expert_imbalance=expert_imbalance)
    recipe = stack.recipe(plan.precision)
    return rank_memory(layout.model, stack, recipe, plan.optimizer, batch_of(layout), options)


def layout_memory(layout: Layout, *, expert_imbalance: float = 1.0) -> tuple[ClassMemory, ...]:
    """Memory of every rank class of a layout, one by one."""
    found = layout_breakdown(layout, expert_imbalance=expert_imbalance)
    parts = found.components()
    return tuple(
        ClassMemory(
            rank_class=c.index,
            stage=c.stage,
            gpu=c.gpu.name,
            components={name: float(column[i]) for name, column in parts.items()},
            allocated_by_moment={
                name: float(found.allocated_by_moment[k, i]) for k, name in enumerate(MOMENTS)
            },
            peak_moment=MOMENTS[found.peak_moment[i]],
            peak_allocated_bytes=float(found.peak_allocated_bytes[i]),
            peak_reserved_bytes=float(found.peak_reserved_bytes[i]),
            device_bytes=float(found.device_bytes[i]),
            needed_bytes=float(found.needed_bytes[i]),
            usable_bytes=float(c.gpu.usable_memory_bytes),
        )
        for i, c in enumerate(layout.classes)
    )
