"""When every task of a step ran, and what follows from it: shares of time, work in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.cost.times import CATEGORIES
from simulator.graph.action import Kind
from simulator.graph.step import CATEGORY, KINDS, NS_PER_S, Floats, Ints, StepGraph

_END_OF_LIFE = (KINDS.index(Kind.B), KINDS.index(Kind.W))
_FORWARD = KINDS.index(Kind.F)


class Record(NamedTuple):
    """One task on one stream. ``chunk`` is the model chunk (the unit where units are sharded)."""

    pipeline: int
    stage: int
    rank_class: int
    stream: str
    start_ns: int
    end_ns: int
    label: str
    category: str
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task of ``graph``, whole nanoseconds."""

    graph: StepGraph
    start_ns: Ints
    end_ns: Ints

    def records(self) -> Iterator[Record]:
        """All tasks that take time, stream by stream; a collective appears on each of its own."""
        graph = self.graph
        names = [CATEGORIES[int(row.argmax())] for row in graph.profiles]
        for stream in graph.streams:
            width = 1 + max(s.stage for s in graph.streams if s.pipeline == stream.pipeline)
            for task in stream.tasks:
                start, end = int(self.start_ns[task]), int(self.end_ns[task])
                if end > start:
                    yield Record(
                        stream.pipeline,
                        stream.stage,
                        stream.rank_class,
                        stream.kind,
                        start,
                        end,
                        str(graph.action(task)),
                        names[graph.profile[task]],
                        int(graph.micro_batch[task]),
                        int(graph.stage[task]) // width,
                    )

    def in_flight(self, stream: int) -> tuple[Ints, Ints, npt.NDArray[np.int8]]:
        """Times (ns), global stages (or units) and +1/-1 of activations on one compute stream.

        A forward pass takes its activations when it starts; its full backward or weight gradient
        frees them when it ends. Sorted by time, frees first.
        """
        tasks = np.array(self.graph.streams[stream].tasks)
        kinds = self.graph.kind[tasks]
        born, freed = tasks[kinds == _FORWARD], tasks[np.isin(kinds, _END_OF_LIFE)]
        times = np.concatenate([self.end_ns[freed], self.start_ns[born]])
        stages = self.graph.stage[np.concatenate([freed, born])]
        deltas = np.repeat(np.array([-1, 1], np.int8), [len(freed), len(born)])
        order = np.argsort(times, kind="stable")
        return times[order], stages[order], deltas[order]


def lane_seconds(timeline: Timeline) -> Floats:
    """Seconds by category of every compute stream, shape (compute streams, CATEGORIES).

    Rows sum to the step time. Time in which the stream waits counts for the category of the
    communication it waits for as far as that is running on its own streams; all other waiting
    (for a slower rank, for the pipeline to fill) is ``bubble``.
    """
    graph = timeline.graph
    end = int(timeline.end_ns.max())
    rows = np.zeros((len(graph.compute_streams), len(CATEGORIES)))
    before = _previous(graph)
    for row, index in zip(rows, graph.compute_streams, strict=True):
        tasks = np.array(graph.streams[index].tasks)
        start_ns, end_ns = timeline.start_ns[tasks], timeline.end_ns[tasks]
        busy = np.bincount(
            graph.profile[tasks], weights=end_ns - start_ns, minlength=len(graph.profiles)
        )
        row += busy @ graph.profiles
        free_ns = np.concatenate([[0], end_ns[:-1]])
        for n in np.flatnonzero(start_ns > free_ns):
            wait = _Wait(int(free_ns[n]), int(start_ns[n]), graph.streams[index].pipeline)
            wait.split(timeline, int(tasks[n]), before, row, graph.streams[index].stage)
        row[CATEGORY["bubble"]] += end - int(end_ns[-1])
    return rows / NS_PER_S


class _Wait(NamedTuple):
    """A gap on a compute stream."""

    start_ns: int
    end_ns: int
    pipeline: int

    def split(
        self,
        timeline: Timeline,
        task: int,
        before: dict[tuple[int, int], int],
        row: Floats,
        stage: int,
    ) -> None:
        """Add the gap before ``task`` to ``row`` by what the stream waited for."""
        graph, left = timeline.graph, self.end_ns
        cause = max(graph.deps[task], key=lambda d: int(timeline.end_ns[d]), default=None)
        if cause is not None and timeline.end_ns[cause] >= self.end_ns:
            stream = self._stream_of(graph, cause, stage)
            current: int | None = cause if stream is not None else None
            while current is not None and left > self.start_ns:
                ends, starts = int(timeline.end_ns[current]), int(timeline.start_ns[current])
                if ends <= self.start_ns:
                    break
                from_ns = max(starts, self.start_ns)
                row[int(graph.profile[current])] += min(ends, left) - from_ns
                row[CATEGORY["bubble"]] += max(left - ends, 0)
                left = from_ns
                assert stream is not None
                current = before.get((stream, current))
        row[CATEGORY["bubble"]] += left - self.start_ns

    def _stream_of(self, graph: StepGraph, task: int, stage: int) -> int | None:
        """The communication stream to follow back: this rank's own where it has the task."""
        on = graph.task_streams[task]
        if graph.streams[on[0]].kind == "compute":
            return None
        for index in on:
            stream = graph.streams[index]
            if (stream.pipeline, stream.stage) == (self.pipeline, stage):
                return index
        return on[0]


def _previous(graph: StepGraph) -> dict[tuple[int, int], int]:
    """(stream, task) -> the task before it, on communication streams."""
    return {
        (index, after): before
        for index, stream in enumerate(graph.streams)
        if stream.kind != "compute"
        for before, after in zip(stream.tasks, stream.tasks[1:], strict=False)
    }


def class_seconds(timeline: Timeline) -> Floats:
    """Seconds by category of every rank class, shape (classes, CATEGORIES).

    A class that runs in several pipelines gets the mean over its ranks.
    """
    graph = timeline.graph
    lanes = lane_seconds(timeline)
    total = np.zeros((graph.n_classes, len(CATEGORIES)))
    weight = np.zeros((graph.n_classes, 1))
    for row, index in zip(lanes, graph.compute_streams, strict=True):
        stream = graph.streams[index]
        count = graph.pipeline_counts[stream.pipeline]
        total[stream.rank_class] += count * row
        weight[stream.rank_class] += count
    return total / np.maximum(weight, 1.0)
