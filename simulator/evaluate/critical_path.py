"""Longest path through a step graph: the step without contention, for many durations at once."""

from __future__ import annotations

from collections import deque

import numpy as np

from simulator.graph.step import Ints, StepGraph
from simulator.graph.validate import validate_graph


def predecessors(graph: StepGraph) -> list[list[int]]:
    """For every task those that must end before it: dependencies and stream order."""
    before = [list(deps) for deps in graph.deps]
    for stream in graph.streams:
        for first, second in zip(stream.tasks, stream.tasks[1:], strict=False):
            before[second].append(first)
    return before


def topological_order(before: list[list[int]]) -> list[int]:
    """Tasks in an order in which each comes after its predecessors; shorter if there is a cycle."""
    after: list[list[int]] = [[] for _ in before]
    missing = [len(b) for b in before]
    for task, tasks in enumerate(before):
        for other in tasks:
            after[other].append(task)
    ready = deque(task for task, n in enumerate(missing) if n == 0)
    order = []
    while ready:
        task = ready.popleft()
        order.append(task)
        for user in after[task]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return order


def longest_path(graph: StepGraph, duration_ns: Ints) -> Ints:
    """End of every task, ns.

    ``duration_ns`` has shape (tasks,) or (tasks, samples); the result has the same. Raises
    ScheduleError where the graph can't run.
    """
    before = predecessors(graph)
    order = topological_order(before)
    if len(order) < graph.n_tasks:
        validate_graph(graph)
    if duration_ns.ndim == 1:
        spans = duration_ns.tolist()
        ends = [0] * graph.n_tasks
        for task in order:
            ends[task] = max((ends[b] for b in before[task]), default=0) + spans[task]
        return np.array(ends, np.int64)
    result = np.zeros_like(duration_ns)
    for task in order:
        row = result[task]
        for other in before[task]:
            np.maximum(row, result[other], out=row)
        row += duration_ns[task]
    return result


def critical_tasks(graph: StepGraph, end_ns: Ints, duration_ns: Ints) -> list[int]:
    """Tasks of one longest path in order of time; their durations sum to the step time."""
    before = predecessors(graph)
    task: int | None = int(end_ns.argmax())
    path = []
    while task is not None:
        path.append(task)
        start = int(end_ns[task] - duration_ns[task])
        task = next((b for b in before[task] if end_ns[b] == start and start > 0), None)
    return path[::-1]
