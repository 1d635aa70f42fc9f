"""The allocations of a training step in order, for the replay of torch's allocator.

A simple generator from the estimator's named tensors: state first, then micro-batches in 1F1B
order, layer by layer and operator by operator, forward and backward. Sizes are exact where the
estimator's are; short-lived tensors (outputs that nobody keeps, gradients) come and go around each
operator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from simulator.cost.activations import in_flight
from simulator.cost.allocator import Allocate, AllocatorTrace, Event, Release, replay
from simulator.cost.batch import RankBatch, batch_of
from simulator.cost.memory import DEFAULT_OPTIONS, MemoryOptions, layout_options
from simulator.cost.operators import (
    LayerContext,
    Operator,
    embedding_operators,
    head_operators,
    layer_operators,
)
from simulator.cost.shards import shard_parameters
from simulator.cost.state import training_state
from simulator.spec.layout import Layout
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.stack import PrecisionRecipe, Stack

#: Micro-batches of a step that are replayed beyond those in flight: later ones repeat them.
_EXTRA_MICRO_BATCHES = 2


def step_events(
    model: ModelSpec,
    stack: Stack,
    recipe: PrecisionRecipe,
    optimizer: str,
    batch: RankBatch,
    options: MemoryOptions = DEFAULT_OPTIONS,
    steps: int = 2,
) -> Iterator[Event]:
    """Allocations and releases of ``steps`` training steps of one rank.

    ``batch`` has one row. Pipelined stages run their warm-up, then one forward and one backward
    pass in turn; more micro-batches than two beyond those in flight are left out.

    Raises:
        ValueError: ``batch`` has more than one row.
    """
    if len(batch) != 1:
        raise ValueError(f"one rank class expected, got {len(batch)}")
    step = _Step(model, stack, recipe, optimizer, batch, options)
    yield from step.state()
    depth = int(np.ceil(in_flight(batch, options.schedule).max()))
    total = min(int(batch.micro_batches.max()), depth + _EXTRA_MICRO_BATCHES)
    for _ in range(steps):
        waiting: deque[int] = deque()
        for index in range(total):
            yield from step.forward(index)
            waiting.append(index)
            if len(waiting) == depth:
                yield from step.backward(waiting.popleft())
        while waiting:
            yield from step.backward(waiting.popleft())
        yield from step.update()


def replay_class(
    layout: Layout, index: int, *, expandable_segments: bool = False, steps: int = 2
) -> AllocatorTrace:
    """Replay the steps of one rank class of a layout through the allocator, on its GPU's memory.

    ``failed_key`` of the result is set where a request fits neither free nor returned memory.

    Raises:
        IndexError: the layout has no such class.
    """
    ranks = layout.classes[index]
    options = layout_options(layout)
    recipe = layout.stack.recipe(layout.plan.precision)
    batch = batch_of(layout, (ranks,))
    events = step_events(
        layout.model, layout.stack, recipe, layout.plan.optimizer, batch, options, steps
    )
    return replay(
        events,
        expandable_segments=expandable_segments,
        capacity_bytes=int(ranks.gpu.usable_memory_bytes),
    )


class _Step:
    """Emits events; ``_live`` holds what a micro-batch keeps, in order of allocation."""

    def __init__(
        self,
        model: ModelSpec,
        stack: Stack,
        recipe: PrecisionRecipe,
        optimizer: str,
        batch: RankBatch,
        options: MemoryOptions,
    ) -> None:
        self._stack, self._recipe = stack, recipe
        ctx = LayerContext(model, stack.kept, recipe, batch, options.attention, options.compiled)
        dense, moe = int(batch.dense_layers.max()), int(batch.moe_layers.max())
        dense_ops = layer_operators(ctx) if dense else ()
        moe_ops = layer_operators(ctx, moe=True) if moe else ()
        self._layers: list[tuple[Operator, ...]] = [dense_ops] * dense + [moe_ops] * moe
        shards = shard_parameters(model, batch)
        self._units = [_size(shards.dense)] * dense + [_size(shards.moe)] * moe
        self._recompute = Recompute(int(batch.recompute.max()))
        self._full_layers = int(batch.recompute_layers.max())
        self._has_head = bool(batch.has_head.max())
        self._head = head_operators(ctx) if self._has_head else ()
        self._head_elements = _size(shards.head)
        self._embedding = embedding_operators(ctx) if bool(batch.has_embedding.max()) else ()
        root = _size(shards.embedding) * bool(batch.has_embedding.max())
        self._root = root + self._head_elements * self._has_head
        self._boundary = int((batch.residual_tokens * model.hidden * ctx.width).max())
        self._width = ctx.width
        self._sharded = bool((batch.sharding >= Sharding.ZERO3).max())
        self._state = training_state(
            model, stack, recipe, optimizer, batch, offload=options.offload
        )
        self._count = 0
        self._saved: dict[tuple[int, int], list[str]] = {}
        self._gathered: list[str] = []
        self._gradients: list[str] = []

    def _new(self, size: float, stream: str = "compute") -> tuple[str, Allocate]:
        self._count += 1
        key = f"t{self._count}"
        return key, Allocate(key, int(size), stream)

    def state(self) -> Iterator[Event]:
        """Parameters, persistent gradients, optimiser state and workspaces, layer by layer."""
        state, pieces = self._state, max(len(self._units), 1) + 1
        parts = [float(np.max(state.parameters)), float(np.max(state.optimizer))]
        if self._stack.buffers.persistent_gradients:
            parts.append(float(np.max(state.gradients)))
        for part in parts:
            for _ in range(pieces if part else 0):
                yield self._new(part / pieces)[1]
        for part in (self._stack.framework.workspace_bytes, float(np.max(state.wgrad_buffers))):
            if part:
                yield self._new(part)[1]

    def forward(self, index: int) -> Iterator[Event]:
        """All layers of a micro-batch, with the head's loss where the rank has it."""
        yield from self._gather_root()
        keep = self._saved.setdefault((index, -1), [])
        yield from self._keep(self._embedding, keep, "plain")
        for layer, operators in enumerate(self._layers):
            gathered: list[str] = []
            yield from self._gather(layer, gathered)
            keep = self._saved.setdefault((index, layer), [])
            mode = self._mode(layer)
            if mode == "none":
                key, event = self._new(self._boundary)
                keep.append(key)
                yield event
            yield from self._run(operators, keep, mode)
            yield from (Release(key) for key in gathered)

    def backward(self, index: int) -> Iterator[Event]:
        """The loss, then all layers in reverse order."""
        yield from self._loss(index)
        flowing, started = self._new(self._boundary)
        yield started
        for layer in reversed(range(len(self._layers))):
            gathered: list[str] = []
            yield from self._gather(layer, gathered)
            again: list[str] = []
            mode = self._mode(layer)
            if mode != "plain":
                yield from self._run(self._layers[layer], again, "missing" + mode)
            keep = self._saved.pop((index, layer)) + again
            yield from self._gradients_of(self._layers[layer], keep)
            following, event = self._new(self._boundary)
            yield event
            yield Release(flowing)
            flowing = following
            yield from self._reduce(layer)
            yield from (Release(key) for key in gathered)
        yield Release(flowing)
        yield from (Release(key) for key in self._saved.pop((index, -1)))
        yield from (Release(key) for key in self._gathered)
        self._gathered = []

    def update(self) -> Iterator[Event]:
        """The optimiser's temporaries, and the end of gradients that do not stay."""
        if np.max(self._state.step_temporaries):
            key, event = self._new(float(np.max(self._state.step_temporaries)))
            yield event
            yield Release(key)
        yield from (Release(key) for key in self._gradients)
        self._gradients = []

    def _mode(self, layer: int) -> str:
        """Which tensors a layer keeps: all, those of SELECTIVE, or none but its input."""
        if self._recompute == Recompute.SELECTIVE:
            return "selective"
        full = self._recompute == Recompute.FULL and layer < self._full_layers
        return "none" if full else "plain"

    def _keep(self, operators: tuple[Operator, ...], keep: list[str], mode: str) -> Iterator[Event]:
        for operator in operators:
            for tensor in operator.saved:
                if tensor.name != "logits" and _kept(tensor.plain, tensor.selective, mode):
                    key, event = self._new(float(np.max(tensor.size_bytes)) * operator.share)
                    keep.append(key)
                    yield event

    def _run(self, operators: tuple[Operator, ...], keep: list[str], mode: str) -> Iterator[Event]:
        """Forward: outputs that nobody keeps live until the next operator is done."""
        passing: list[str] = []
        for operator in operators:
            fresh: list[str] = []
            if operator.kind == "gemm":
                size = np.max(np.asarray(operator.count * operator.m * operator.n)) * self._width
                key, event = self._new(float(size))
                fresh.append(key)
                yield event
            yield from self._keep((operator,), keep, mode)
            yield from (Release(key) for key in passing)
            passing = fresh
        yield from (Release(key) for key in passing)

    def _gradients_of(self, operators: tuple[Operator, ...], keep: list[str]) -> Iterator[Event]:
        """Backward: each product's input gradient appears, then its kept tensors go."""
        products = [op for op in operators if op.kind == "gemm"]
        passing: list[str] = []
        stack = list(keep)
        share = -(-len(stack) // max(len(products), 1))
        for operator in reversed(products):
            size = np.max(np.asarray(operator.count * operator.m * operator.k)) * self._width
            key, event = self._new(float(size))
            yield event
            for _ in range(min(share, len(stack))):
                yield Release(stack.pop())
            yield from (Release(old) for old in passing)
            passing = [key]
        yield from (Release(key) for key in stack + passing)

    def _loss(self, index: int) -> Iterator[Event]:
        """Logits and cross-entropy: 16-bit logits, fp32 copies, gradients."""
        if not self._has_head:
            return
        keep: list[str] = []
        yield from self._keep(self._head, keep, "plain")
        logits = [t for op in self._head for t in op.saved if t.name == "logits"]
        if logits:
            per_byte = float(np.max(logits[0].size_bytes)) / self._stack.kept.logits_bytes
            yield from self._cross_entropy(per_byte)
        yield from (Release(key) for key in keep)

    def _cross_entropy(self, elements: float) -> Iterator[Event]:
        total = self._stack.kept.logits_bytes
        first, event = self._new(self._width * elements)
        yield event
        if self._stack.buffers.logits_cached_bytes:
            # torch cross_entropy: fp32 copy and log-softmax; then two fp32 gradients.
            copy, event = self._new(4 * elements)
            yield event
            kept, event = self._new(4 * elements)
            yield event
            yield from (Release(first), Release(copy))
            inner, event = self._new(4 * elements)
            yield event
            outer, event = self._new(4 * elements)
            yield event
            yield from (Release(inner), Release(kept))
            cast, event = self._new(self._width * elements)
            yield event
            yield from (Release(outer), Release(cast))
            return
        blocks = [first]
        rest = total - self._width
        while rest > 0:
            key, event = self._new(min(rest, 4.0) * elements)
            blocks.append(key)
            rest -= 4.0
            yield event
        yield from (Release(key) for key in reversed(blocks))

    def _gather_root(self) -> Iterator[Event]:
        if self._sharded and not self._gathered and self._root:
            yield from self._collect(self._root, self._gathered)

    def _gather(self, layer: int, gathered: list[str]) -> Iterator[Event]:
        if self._sharded:
            yield from self._collect(self._units[layer], gathered)

    def _collect(self, elements: float, gathered: list[str]) -> Iterator[Event]:
        """Gather one unit, through a buffer on the gather stream where the stack copies."""
        size = elements * self._recipe.compute_param_bytes
        pools = self._stack.buffers.stream_pools
        stream = "gather" if pools else "compute"
        if not self._stack.buffers.gather_copies:
            key, event = self._new(size, stream)
            gathered.append(key)
            yield event
            return
        buffer, event = self._new(size, stream)
        yield event
        key, event = self._new(size)
        gathered.append(key)
        yield event
        yield Release(buffer)

    def _reduce(self, layer: int) -> Iterator[Event]:
        """Gradients of one unit: unsharded, reduced, and the shard that stays."""
        if not self._sharded:
            return
        elements = self._units[layer]
        raw, event = self._new(elements * self._recipe.compute_param_bytes)
        yield event
        buffer, event = self._new(elements * self._recipe.reduce_bytes)
        yield event
        yield Release(raw)
        if not self._stack.buffers.persistent_gradients and len(self._gradients) < len(self._units):
            size = float(np.max(self._state.gradients)) / len(self._units)
            stream = "reduce" if self._stack.buffers.stream_pools else "compute"
            key, event = self._new(size, stream)
            self._gradients.append(key)
            yield event
        yield Release(buffer)


def _size(split: tuple[object, object]) -> float:
    return float(np.max(np.asarray(split[0], float)) + np.max(np.asarray(split[1], float)))


def _kept(plain: bool, selective: bool, mode: str) -> bool:
    return {
        "plain": plain,
        "selective": selective,
        "none": False,
        "missingselective": plain and not selective,
        "missingnone": plain,
    }[mode]
