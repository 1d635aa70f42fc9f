"""Step time without simulating: recurrences and formulas for one layout or for grids of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.cost.times import ClassTimes
from simulator.evaluate.recurrence import StageEnds, StageTimes, pipeline_ends
from simulator.evaluate.sharded_form import ShardedUnit, sharded_ends
from simulator.graph.action import Kind
from simulator.graph.build import is_unit_major
from simulator.graph.pipelined import ChunkWork, chunk_works
from simulator.graph.step import CATEGORY, Floats, category_seconds
from simulator.spec.layout import Layout


@dataclass(frozen=True)
class ClosedFormResult:
    """Predicted step of one layout.

    ``seconds`` has shape (rank classes, CATEGORIES) and rows that sum to ``step_time_s``, as the
    engine's result has. Communication is what the computation can't hide; ``pp`` is what sends add
    to the pipeline, ``bubble`` the rest of the waiting.
    """

    step_time_s: float
    seconds: Floats

    def by_category(self, rank_class: int) -> dict[str, float]:
        """Seconds of one rank class by category name."""
        return {name: float(self.seconds[rank_class, n]) for name, n in CATEGORY.items()}


@dataclass(frozen=True)
class _LaneTimes:
    """One stage of one pipeline: busy seconds by category, and when its parts are through.

    At most ``wait_s`` of the waiting before ``finish`` counts for ``wait_category``, at most
    ``sync_s`` (the reductions' own time) of what follows until ``reduced`` for ``sync_category``;
    the rest is waiting for other ranks.
    """

    rank_class: int
    stage: int
    count: int
    busy: Floats
    finish: float
    reduced: float
    wait_s: float
    wait_category: str
    sync_s: float
    sync_category: str


def closed_form(layout: Layout, times: Sequence[ClassTimes]) -> ClosedFormResult:
    """Step time and its shares; the same graph that ``build_step`` gives, not simulated.

    Raises UserError as ``build_step`` does.
    """
    if is_unit_major(layout, times):
        return _sharded(layout, times)
    return _pipelined(layout, times)


def _step_end(
    layout: Layout,
    times: Sequence[ClassTimes],
    lanes: Sequence[_LaneTimes],
    gather_s: Sequence[float],
) -> ClosedFormResult:
    """Gradient norm over all ranks, optimiser, exposed gather and overhead, then the shares."""
    norm = max(max(lane.finish, lane.reduced) for lane in lanes)
    updated: dict[int, float] = {}
    for lane in lanes:
        end = norm + float(times[lane.rank_class].optimizer)
        updated[lane.stage] = max(updated.get(lane.stage, 0.0), end)
    gathered = {s: updated[s] + g for s, g in enumerate(gather_s) if g > 0.0}
    ends = []
    for lane in lanes:
        own = times[lane.rank_class]
        end = max(norm + float(own.optimizer), gathered.get(lane.stage, 0.0))
        ends.append(end + float(own.step_overhead))
    step = max(ends)
    rows = np.zeros((len(layout.classes), len(CATEGORY)))
    weights = np.zeros((len(layout.classes), 1))
    for lane in lanes:
        row = _shares(lane, times[lane.rank_class], gather_s[lane.stage], step)
        rows[lane.rank_class] += row * lane.count
        weights[lane.rank_class] += lane.count
    return ClosedFormResult(step, rows / np.maximum(weights, 1.0))


def _shares(lane: _LaneTimes, times: ClassTimes, gather_s: float, step: float) -> Floats:
    """Seconds by category of one lane; rows sum to ``step``."""
    row = lane.busy.copy()
    waiting = max(lane.finish - float(row.sum()), 0.0)
    row[CATEGORY[lane.wait_category]] += min(lane.wait_s, waiting)
    row[CATEGORY[lane.sync_category]] += min(lane.sync_s, max(lane.reduced - lane.finish, 0.0))
    row[CATEGORY["dp"]] += gather_s
    row[CATEGORY["optimizer"]] += float(times.optimizer)
    row[CATEGORY["overhead"]] += float(times.step_overhead)
    row[CATEGORY["bubble"]] += step - float(row.sum())
    return row


def _sharded(layout: Layout, times: Sequence[ClassTimes]) -> ClosedFormResult:
    """Fully sharded plans without pipeline stages; every pipeline is one class."""
    members = [p.classes[0] for p in layout.pipelines]
    counts = [layout.classes[c].micro_batches for c in members]
    units = [
        ShardedUnit(
            kinds[0].repeat,
            [k.forward.total for k in kinds],
            [k.backward.total for k in kinds],
            max(float(k.gather_forward) for k in kinds),
            max(float(k.gather_backward) for k in kinds),
            max(float(k.reduce) for k in kinds),
        )
        for kinds in zip(*(times[c].units for c in members), strict=True)
    ]
    layered = layout.plan.schedule == "layered"
    prefetch = layout.stack.overlap.fsdp_prefetch
    finish, reduced = sharded_ends(units, counts, prefetch, layered=layered)
    rounds = 1 if layered else max(counts)
    network = rounds * sum(float(u.network_s()) for u in units)
    lanes = []
    for n, c in enumerate(members):
        passes = sum(
            (
                unit.repeat * (category_seconds(unit.forward) + category_seconds(unit.backward))
                for unit in times[c].units
            ),
            np.zeros(len(CATEGORY)),
        )
        lanes.append(
            _LaneTimes(
                rank_class=c,
                stage=0,
                count=layout.pipelines[n].count,
                busy=counts[n] * passes,
                finish=float(finish[n]),
                reduced=float(reduced),
                wait_s=network,
                wait_category="fsdp",
                sync_s=network,
                sync_category="fsdp",
            )
        )
    return _step_end(layout, times, lanes, [0.0])


def _pipelined(layout: Layout, times: Sequence[ClassTimes]) -> ClosedFormResult:
    """Pipelines of replicated (or compactly sharded) stages that synchronise gradients."""
    works = [chunk_works(layout, t, layout.classes[c]) for c, t in enumerate(times)]
    pp, chunks = len(layout.pipelines[0].classes), len(works[0])
    gathers, exposed = _param_gathers(layout, works, pp, chunks)
    ends = []
    waits = []
    for pipeline in layout.pipelines:
        count = layout.classes[pipeline.classes[0]].micro_batches
        stages = _stage_times(layout, times, works, pipeline.classes, gathers)
        ends.append(pipeline_ends(stages, layout.plan.schedule, chunks, count))
        silent = replace(stages, send_forward=[0.0] * pp, send_backward=[0.0] * pp)
        alone = pipeline_ends(silent, layout.plan.schedule, chunks, count).finish
        waits.append([float(a - b) for a, b in zip(ends[-1].finish, alone, strict=True)])
    reduced = _reductions(layout, works, ends, gathers)
    lanes = []
    for q, pipeline in enumerate(layout.pipelines):
        for stage, c in enumerate(pipeline.classes):
            passes = np.sum([w.row(Kind.F) + w.row(Kind.B) for w in works[c]], axis=0)
            lanes.append(
                _LaneTimes(
                    rank_class=c,
                    stage=stage,
                    count=pipeline.count,
                    busy=layout.classes[c].micro_batches * passes,
                    finish=float(ends[q].finish[stage]),
                    reduced=reduced[stage],
                    wait_s=max(waits[q][stage], 0.0),
                    wait_category="pp",
                    sync_s=sum(
                        max(works[p.classes[stage]][k].grad_reduce_s for p in layout.pipelines)
                        for k in range(chunks)
                    ),
                    sync_category="dp",
                )
            )
    return _step_end(layout, times, lanes, exposed)


def _param_gathers(
    layout: Layout, works: Sequence[Sequence[ChunkWork]], pp: int, chunks: int
) -> tuple[list[float], list[float]]:
    """End of the hidden parameter gather by global stage, and what stays exposed by rank."""
    overlap = layout.stack.overlap.param_gather
    ends = [0.0] * (pp * chunks)
    exposed = []
    for stage in range(pp):
        members = [p.classes[stage] for p in layout.pipelines]
        seconds = [max(works[c][k].param_gather_s for c in members) for k in range(chunks)]
        for k in range(chunks):
            ends[k * pp + stage] = overlap * sum(seconds[: k + 1])
        exposed.append((1.0 - overlap) * sum(seconds))
    return ends, exposed


def _stage_times(
    layout: Layout,
    times: Sequence[ClassTimes],
    works: Sequence[Sequence[ChunkWork]],
    classes: Sequence[int],
    gathers: Sequence[float],
) -> StageTimes:
    """Totals of one pipeline's passes by global stage."""
    order = [works[c][k] for k in range(len(works[classes[0]])) for c in classes]
    return StageTimes(
        forward=[float(w.forward.sum()) for w in order],
        backward_input=[float(w.backward_input.sum()) for w in order],
        backward_weight=[float(w.backward_weight.sum()) for w in order],
        send_forward=[times[c].send_forward for c in classes],
        send_backward=[times[c].send_backward for c in classes],
        param_gather=gathers,
        overlap_pp=layout.stack.overlap.pp,
    )


def _reductions(
    layout: Layout,
    works: Sequence[Sequence[ChunkWork]],
    ends: Sequence[StageEnds],
    gathers: Sequence[float],
) -> list[float]:
    """End of each rank's last gradient reduction; chunks reduce last to first over all pipelines.

    The hidden part starts with the chunk's last backward pass, the rest when that pass ends.
    """
    overlap = layout.stack.overlap.dp
    pp, chunks = len(layout.pipelines[0].classes), len(works[0])
    reduced = []
    for stage in range(pp):
        members = [p.classes[stage] for p in layout.pipelines]
        network = gathers[(chunks - 1) * pp + stage]
        done = 0.0
        for k in reversed(range(chunks)):
            s = k * pp + stage
            seconds = max(works[c][k].grad_reduce_s for c in members)
            if overlap * seconds > 0.0:
                start = max(float(e.last_start[s]) for e in ends)
                network = done = max(network, start) + overlap * seconds
            if (1.0 - overlap) * seconds > 0.0:
                start = max(float(e.last_end[s]) for e in ends)
                network = done = max(network, start) + (1.0 - overlap) * seconds
        reduced.append(done)
    return reduced
