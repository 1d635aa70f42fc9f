"""Device memory of a rank over one step, from the timeline and the estimated moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simulator.cost.memory import ClassMemory, layout_memory
from simulator.graph.action import Kind
from simulator.graph.step import KINDS, NS_PER_S, Floats, Ints

if TYPE_CHECKING:
    from simulator.evaluate.timeline import Timeline
    from simulator.spec.layout import Layout

_OPT = KINDS.index(Kind.OPT)


class MemoryCurve(NamedTuple):
    """Device memory of one rank class: a step function, ``bytes_[i]`` from ``times_s[i]`` on."""

    rank_class: int
    times_s: Floats
    bytes_: Floats


def representative_streams(timeline: Timeline) -> dict[int, int]:
    """Rank class -> its compute stream in the first pipeline that has it."""
    first: dict[int, int] = {}
    for index in timeline.graph.compute_streams:
        first.setdefault(timeline.graph.streams[index].rank_class, index)
    return first


def memory_curves(
    layout: Layout, timeline: Timeline, classes: Sequence[int]
) -> tuple[MemoryCurve, ...]:
    """Device memory over the step for some rank classes.

    Between what stays all step (parameters, optimiser state, kept gradients, CUDA context) and the
    fullest moment of forward and backward, memory follows the activations in flight; during the
    optimiser's step it is that moment's estimate. The highest point is the predicted peak.
    """
    memory = layout_memory(layout)
    streams = representative_streams(timeline)
    return tuple(_curve(layout, timeline, memory[c], streams[c]) for c in classes if c in streams)


def _curve(layout: Layout, timeline: Timeline, memory: ClassMemory, stream: int) -> MemoryCurve:
    times, stages, deltas = timeline.in_flight(stream)
    weights = deltas * _chunk_layers(layout, memory.rank_class, stages)
    flying = np.cumsum(weights)
    share = np.clip(flying / max(float(flying.max(initial=0.0)), 1e-12), 0.0, 1.0)
    idle, working, stepping = _levels(layout, memory)
    level = idle + (working - idle) * share
    start, end = _optimizer(timeline, stream)
    last = int(timeline.end_ns.max())
    before = times < start
    at = np.concatenate([[0], times[before], [start, end, last]]) / NS_PER_S
    values = np.concatenate([[idle], level[before], [stepping, idle, idle]])
    outside = memory.device_bytes - memory.peak_allocated_bytes
    return MemoryCurve(memory.rank_class, at, values + outside)


def _levels(layout: Layout, memory: ClassMemory) -> tuple[float, float, float]:
    """Allocated bytes between passes, at the fullest moment of a pass, in the optimiser's step."""
    parts, moments = memory.components, memory.allocated_by_moment
    accumulates = layout.classes[memory.rank_class].micro_batches > 1
    kept = parts["parameters"] + parts["optimizer"]
    if layout.stack.buffers.persistent_gradients or accumulates:
        kept += parts["gradients"]
    working = max(moments["loss"], moments["backward"])
    return min(kept, working), working, moments["optimizer step"]


def _optimizer(timeline: Timeline, stream: int) -> tuple[int, int]:
    """Start and end (ns) of the optimiser on a compute stream; the end of the step without one."""
    graph = timeline.graph
    tasks = np.array(graph.streams[stream].tasks)
    found = tasks[graph.kind[tasks] == _OPT]
    if not len(found):
        end = int(timeline.end_ns.max())
        return end, end
    return int(timeline.start_ns[found[0]]), int(timeline.end_ns[found[-1]])


def _chunk_layers(layout: Layout, rank_class: int, stages: Ints) -> Floats:
    """Layers behind each event: those of the model chunk, or equal weights for FSDP's units."""
    chunks = layout.classes[rank_class].chunks
    pp = layout.classes[rank_class].pp
    index = stages // pp
    if pp == 1 or not len(stages) or int(index.max()) >= len(chunks):
        return np.ones(len(stages))
    return np.asarray(chunks, float)[index]
