"""A simulated step as a Chrome trace, in the form that Kineto (torch.profiler) writes.

Opens in ui.perfetto.dev and chrome://tracing. One process per rank class and pipeline, one thread
per stream. Communication kernels bear NCCL's names, so that tools which read profiler traces sort
them as they sort measured ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from simulator.graph.action import Kind, parse_action
from simulator.report.curves import representative_streams
from simulator.report.gantt import KIND_WORDS
from simulator.report.words import class_names

if TYPE_CHECKING:
    from simulator.analysis.prediction import Prediction
    from simulator.evaluate.timeline import Record, Timeline
    from simulator.graph.step import StepGraph

#: Above this many events only the first pipeline of every rank class is written.
MAX_EVENTS = 500_000

#: CUDA streams as torch numbers them: the default stream computes.
_TIDS = {"compute": 7, "pp": 20, "dp": 24}
_THREADS = {"compute": "compute", "pp": "pipeline sends", "dp": "collectives"}
_HOST_TID = 1

_NCCL = {
    Kind.SEND_F: "ncclDevKernel_SendRecv",
    Kind.SEND_B: "ncclDevKernel_SendRecv",
    Kind.RECV_F: "ncclDevKernel_SendRecv",
    Kind.RECV_B: "ncclDevKernel_SendRecv",
    Kind.UNSHARD: "ncclDevKernel_AllGather_RING_LL",
    Kind.REDUCE_GRAD: "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
    Kind.NORM: "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
}

Lane = tuple[int, int]
Event = dict[str, Any]


def step_trace(p: Prediction, timeline: Timeline, max_events: int = MAX_EVENTS) -> dict[str, Any]:
    """The trace as plain data for ``json.dump``; times in microseconds, sorted."""
    graph = timeline.graph
    lanes = _lanes(graph)
    left_out = 0
    if sum(len(s.tasks) for s in graph.streams) > max_events:
        first = representative_streams(timeline).values()
        kept = {(graph.streams[i].pipeline, graph.streams[i].stage) for i in first}
        left_out = len(lanes) - len(kept)
        lanes = {lane: c for lane, c in lanes.items() if lane in kept}
    pids = {lane: pid for pid, lane in enumerate(lanes)}
    end_us = float(timeline.end_ns.max()) / 1e3
    events = [e for lane, pid in pids.items() for e in _process(p, graph, lane, pid, end_us)]
    tasks = list(_tasks(timeline, pids))
    events += sorted(tasks, key=lambda e: (e["ts"], e["pid"], e["tid"]))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": p.n_gpus},
        "deviceProperties": [
            {"id": pid, "name": p.classes[lanes[lane]].gpu,
             "totalGlobalMem": int(p.classes[lanes[lane]].usable_bytes)}
            for lane, pid in pids.items()
        ],
        "traceName": p.title,
        "simulated": True,
        "processes_left_out": left_out,
        "traceEvents": events,
    }  # fmt: skip


def _lanes(graph: StepGraph) -> dict[Lane, int]:
    """(pipeline, stage) -> rank class, in stream order."""
    return {(s.pipeline, s.stage): s.rank_class for s in graph.streams}


def _process(
    p: Prediction, graph: StepGraph, lane: Lane, pid: int, end_us: float
) -> Iterator[Event]:
    """Names and order of a process and its threads, and the mark of the step."""
    pipeline, stage = lane
    own = [s for s in graph.streams if (s.pipeline, s.stage) == lane and s.tasks]
    name = class_names(p)[own[0].rank_class]
    copies = graph.pipeline_counts[pipeline]
    title = f"{name}, pipeline {pipeline}" + (f" (one of {copies} alike)" if copies > 1 else "")
    yield _named("process_name", pid, 0, name=title)
    yield _named("process_labels", pid, 0, labels=f"stage {stage}")
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    yield _named("thread_name", pid, _HOST_TID, name="step")
    yield _named("thread_sort_index", pid, _HOST_TID, sort_index=_HOST_TID)
    for stream in own:
        tid = _TIDS[stream.kind]
        yield _named("thread_name", pid, tid, name=f"stream {tid}: {_THREADS[stream.kind]}")
        yield _named("thread_sort_index", pid, tid, sort_index=tid)
    yield {
        "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": pid,
        "tid": _HOST_TID, "ts": 0.0, "dur": end_us, "args": {},
    }  # fmt: skip


def _named(what: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0.0, "args": args}


def _tasks(timeline: Timeline, pids: dict[Lane, int]) -> Iterator[Event]:
    numbers = count(1)
    for record in timeline.records():
        pid = pids.get((record.pipeline, record.stage))
        if pid is not None:
            yield _task(record, pid, next(numbers))


def _task(r: Record, pid: int, correlation: int) -> Event:
    tid = _TIDS[r.stream]
    kind = parse_action(r.label).kind
    args: dict[str, Any] = {
        "device": pid, "stream": tid, "correlation": correlation, "action": r.label,
        "category": r.category, "chunk": r.chunk,
    }  # fmt: skip
    if r.micro_batch >= 0:
        args["micro_batch"] = r.micro_batch
    name = f"{KIND_WORDS[kind]} {r.label}"
    if r.stream != "compute" and kind in _NCCL:
        name = f"{_NCCL[kind]}({r.label})"
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": pid, "tid": tid, "ts": r.start_ns / 1e3,
        "dur": (r.end_ns - r.start_ns) / 1e3, "args": args,
    }  # fmt: skip
