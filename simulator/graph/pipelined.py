"""Pipelines of replicated stages: passes, transfers between stages, gradient synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.cost.times import ClassTimes, Seconds, UnitTimes
from simulator.graph.action import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Action,
    Kind,
)
from simulator.graph.lanes import Lane
from simulator.graph.passes import add_send_recv
from simulator.graph.schedules import pipeline_schedule
from simulator.graph.sharded import expand_units, exposed_fsdp_s, split_units
from simulator.graph.step import CATEGORY, Floats, GraphBuilder, category_seconds, to_ns
from simulator.spec.layout import Layout, RankClass
from simulator.spec.plan import Sharding


@dataclass(frozen=True)
class ChunkWork:
    """One micro-batch through one chunk, seconds by category, and the chunk's once-a-step sync."""

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    grad_reduce_s: float
    param_gather_s: float

    def row(self, kind: Kind) -> Floats:
        """Seconds by category of one pass."""
        if kind is Kind.F:
            return self.forward
        if kind is Kind.I:
            return self.backward_input
        if kind is Kind.W:
            return self.backward_weight
        return self.backward_input + self.backward_weight


def chunk_works(layout: Layout, times: ClassTimes, rank_class: RankClass) -> tuple[ChunkWork, ...]:
    """Work of each model chunk of a class.

    ZeRO-2 reduces gradients with every micro-batch: what its backward pass can't hide counts as
    ``dp`` time of the pass. Fully sharded chunks are taken as one piece: what a pass waits for its
    units' collectives counts as ``fsdp`` time of the pass, and the tail of the reductions as the
    chunk's sync.
    """
    works = [
        ChunkWork(
            category_seconds(chunk.forward),
            category_seconds(chunk.backward_input),
            category_seconds(chunk.backward_weight),
            float(chunk.grad_reduce),
            float(chunk.param_gather),
        )
        for chunk in times.chunks
    ]
    if times.units:
        units = split_units(expand_units(times), rank_class.chunks)
        prefetch = layout.stack.overlap.fsdp_prefetch
        return tuple(_with_units(*pair, prefetch) for pair in zip(works, units, strict=True))
    if layout.plan.sharding == Sharding.ZERO2:
        overlap = layout.stack.overlap.dp
        return tuple(_reduced_each_pass(w, rank_class.micro_batches, overlap) for w in works)
    return tuple(works)


def exposed_reduction_s(
    reduce_s: Seconds, micro_batches: Seconds, backward_s: Seconds, overlap: float
) -> Seconds:
    """What each backward pass waits where a step's reductions are spread over its micro-batches.

    The passes hide ``overlap`` of them as far as they are long enough. Broadcasts.
    """
    each = reduce_s / micro_batches
    return np.maximum(overlap * each - backward_s, 0.0) + (1.0 - overlap) * each


def _reduced_each_pass(work: ChunkWork, micro_batches: int, overlap: float) -> ChunkWork:
    """The step's reductions spread over the backward passes."""
    backward = float(work.row(Kind.B).sum())
    wait = np.zeros(len(CATEGORY))
    wait[CATEGORY["dp"]] = exposed_reduction_s(work.grad_reduce_s, micro_batches, backward, overlap)
    return replace(work, backward_input=work.backward_input + wait, grad_reduce_s=0.0)


def _with_units(work: ChunkWork, units: Sequence[UnitTimes], prefetch: int) -> ChunkWork:
    """A chunk of fully sharded units as one piece."""
    wait = np.zeros((2, len(CATEGORY)))
    wait[0, CATEGORY["fsdp"]], _ = exposed_fsdp_s(units, prefetch, backward=False)
    wait[1, CATEGORY["fsdp"]], tail = exposed_fsdp_s(units, prefetch, backward=True)
    return ChunkWork(
        work.forward + wait[0],
        work.backward_input + wait[1],
        work.backward_weight,
        grad_reduce_s=tail,
        param_gather_s=0.0,
    )


class _Passes:
    """Adds one lane's passes and transfers in schedule order."""

    def __init__(
        self, builder: GraphBuilder, lane: Lane, times: ClassTimes, pp: int, overlap_pp: float
    ) -> None:
        self.builder, self.lane, self.times = builder, lane, times
        self.pp, self.overlap_pp = pp, overlap_pp
        self.done: dict[Action, int] = {}
        self.sent: dict[Action, int] = {}
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.slots: list[tuple[int, Action]] = []
        self.received: list[tuple[int, Action]] = []

    def run(
        self,
        actions: Sequence[Action],
        works: Sequence[ChunkWork],
        gathers: dict[tuple[int, int], int],
        mark_last: bool,
    ) -> None:
        """Add everything; dependencies on other lanes are noted in ``slots``, ``received``."""
        cost = {
            (chunk, kind): (to_ns(float(row.sum())), self.builder.add_profile(row))
            for chunk, work in enumerate(works)
            for kind in COMPUTE_KINDS
            for row in (work.row(kind),)
        }
        last = {a.stage: a for a in actions if a.kind in (Kind.B, Kind.W)}
        pending: list[Action] = []
        opened: set[int] = set()
        for action in actions:
            if action.kind not in COMPUTE_KINDS:
                pending.append(action)
                continue
            self._transfer(pending)
            receives = [a for a in pending if a.kind in RECV_KINDS]
            pending = []
            chunk = action.chunk(self.pp)
            deps: list[int] = []
            if mark_last and last[action.stage] == action:
                self.starts[chunk] = self._ready(action.stage, deps)
                self.received += [(self.starts[chunk], a) for a in receives]
            duration, profile = cost[chunk, action.kind]
            task = self.builder.add(action, [self.lane.compute], duration, profile, deps)
            self.received += [(task, a) for a in receives]
            if action.kind is Kind.F and chunk not in opened:
                opened.add(chunk)
                if (self.lane.stage, chunk) in gathers:
                    task = self._ready(action.stage, [gathers[self.lane.stage, chunk]])
            if action.kind in BACKWARD_KINDS and last[action.stage] == action:
                self.ends[chunk] = task
            self.done[_result(action)] = task
        self._transfer(pending)

    def _ready(self, stage: int, deps: Sequence[int]) -> int:
        action = Action(stage, Kind.READY)
        return self.builder.add(action, [self.lane.compute], 0, CATEGORY["dp"], deps)

    def _seconds(self, action: Action) -> float:
        forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        return float(self.times.send_forward if forward else self.times.send_backward)

    def _transfer(self, actions: Sequence[Action]) -> None:
        """Sends and receives between two passes: on their own stream, on this one, or in part."""
        sends = [a for a in actions if a.kind in SEND_KINDS]
        if self.overlap_pp > 0.0:
            for action in sends:
                task = self.builder.add(
                    action,
                    [self.lane.pp],
                    to_ns(self._seconds(action)),
                    CATEGORY["pp"],
                    [self.done[_source(action)]],
                )
                self.builder.load_links(task, "pp")
                self.sent[_source(action)] = task
        if self.overlap_pp < 1.0 and actions:
            self._slot(actions, sends)

    def _slot(self, actions: Sequence[Action], sends: Sequence[Action]) -> None:
        """Time that transfers hold the computation up: both directions run at once."""
        receives = [a for a in actions if a.kind in RECV_KINDS]
        out = sum(self._seconds(a) for a in sends)
        into = sum(self._seconds(a) for a in receives)
        task = self.builder.add(
            actions[0],
            [self.lane.compute],
            to_ns((1.0 - self.overlap_pp) * max(out, into)),
            CATEGORY["pp"],
        )
        if self.overlap_pp == 0.0:  # otherwise the send on its own stream is the link's load
            self.builder.load_links(task, "pp")
        self.slots += [(task, a) for a in receives]


def _result(action: Action) -> Action:
    """Key under which a pass's output is found: B and I both yield the input gradient."""
    return action._replace(kind=Kind.B) if action.kind is Kind.I else action


def _source(action: Action) -> Action:
    """The pass whose output a send or receive moves."""
    stage, kind, number = action
    if kind is Kind.SEND_F:
        return Action(stage, Kind.F, number)
    if kind is Kind.RECV_F:
        return Action(stage - 1, Kind.F, number)
    return Action(stage if kind is Kind.SEND_B else stage + 1, Kind.B, number)


def add_pipelines(
    builder: GraphBuilder, layout: Layout, times: Sequence[ClassTimes], lanes: list[list[Lane]]
) -> tuple[dict[int, list[int]], list[float]]:
    """Tasks of all pipelines.

    Returns the gradient reductions by stage and the exposed parameter gather (s) of each stage.
    """
    overlap = layout.stack.overlap
    works = [chunk_works(layout, t, layout.classes[c]) for c, t in enumerate(times)]
    gathers, exposed = _add_param_gathers(builder, works, lanes, overlap.param_gather)
    mark = overlap.dp > 0.0 and any(w.grad_reduce_s > 0.0 for chunks in works for w in chunks)
    passes: list[list[_Passes]] = []
    for row in lanes:
        pp, chunks = len(row), len(works[row[0].rank_class])
        count = layout.classes[row[0].rank_class].micro_batches
        schedule = add_send_recv(pipeline_schedule(layout.plan.schedule, pp, chunks, count))
        built = [_Passes(builder, lane, times[lane.rank_class], pp, overlap.pp) for lane in row]
        for lane, rank, actions in zip(row, built, schedule, strict=True):
            rank.run(actions, works[lane.rank_class], gathers, mark)
        _join(builder, built, overlap.pp)
        passes.append(built)
    return _add_reductions(builder, works, passes, overlap.dp), exposed


def _join(builder: GraphBuilder, ranks: Sequence[_Passes], overlap_pp: float) -> None:
    """Dependencies between the stages of one pipeline."""
    pp = len(ranks)
    for rank in ranks:
        for task, receive in rank.received if overlap_pp > 0.0 else ():
            source = _source(receive)
            builder.depend(task, ranks[source.stage % pp].sent[source])
        for task, receive in rank.slots:
            source = _source(receive)
            builder.depend(task, ranks[source.stage % pp].done[source])


def _add_param_gathers(
    builder: GraphBuilder,
    works: Sequence[Sequence[ChunkWork]],
    lanes: list[list[Lane]],
    overlap: float,
) -> tuple[dict[tuple[int, int], int], list[float]]:
    """Gathers of updated parameters that hide behind each chunk's first forward pass.

    Returns their tasks by (stage, chunk), and for each stage the seconds that can't hide.
    """
    gathers: dict[tuple[int, int], int] = {}
    exposed: list[float] = []
    for stage in range(len(lanes[0])):
        members = [row[stage] for row in lanes]
        rest = 0.0
        for chunk in range(len(works[members[0].rank_class])):
            seconds = max(works[m.rank_class][chunk].param_gather_s for m in members)
            rest += (1.0 - overlap) * seconds
            if to_ns(overlap * seconds):
                action = Action(chunk * len(lanes[0]) + stage, Kind.UNSHARD)
                streams = [m.dp for m in members]
                task = builder.add(action, streams, to_ns(overlap * seconds), CATEGORY["dp"])
                builder.load_links(task, "dp")
                gathers[stage, chunk] = task
        exposed.append(rest)
    return gathers, exposed


def _add_reductions(
    builder: GraphBuilder,
    works: Sequence[Sequence[ChunkWork]],
    passes: list[list[_Passes]],
    overlap: float,
) -> dict[int, list[int]]:
    """Gradient reductions of every stage over all pipelines.

    The part that may hide starts with the chunk's last backward pass (buckets), the rest when that
    pass is finished. Chunks finish last to first.
    """
    reduced: dict[int, list[int]] = {}
    for stage in range(len(passes[0])):
        members = [row[stage] for row in passes]
        for chunk in reversed(range(len(works[members[0].lane.rank_class]))):
            seconds = max(works[m.lane.rank_class][chunk].grad_reduce_s for m in members)
            parts = (
                (overlap * seconds, [m.starts.get(chunk, m.ends[chunk]) for m in members]),
                ((1.0 - overlap) * seconds, [m.ends[chunk] for m in members]),
            )
            for part, deps in parts:
                if to_ns(part):
                    action = Action(chunk * len(passes[0]) + stage, Kind.REDUCE_GRAD)
                    streams = [m.lane.dp for m in members]
                    task = builder.add(action, streams, to_ns(part), CATEGORY["dp"], deps)
                    builder.load_links(task, "dp")
                    reduced.setdefault(stage, []).append(task)
    return reduced
