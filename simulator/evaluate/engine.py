"""The SimPy engine: one step of one plan, task by task, on an integer nanosecond clock."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from simulator.errors import Problem, UserError
from simulator.evaluate.critical_path import longest_path
from simulator.evaluate.resources import SharedLinks
from simulator.evaluate.timeline import Timeline, class_seconds
from simulator.graph.step import CATEGORY, NS_PER_S, Floats, Ints, StepGraph
from simulator.graph.validate import validate_graph


@dataclass(frozen=True)
class EngineOptions:
    """How a step is run.

    ``jitter`` is the sigma of a lognormal factor with mean 1 on every task, drawn from ``seed``.
    ``stragglers`` maps a rank class to the factor by which its computation is slower.
    ``contention`` lets tasks that load the same link share its bandwidth max-min fairly.
    ``record_timeline`` keeps start and end of every task in the result.
    """

    seed: int = 0
    jitter: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    contention: bool = False
    record_timeline: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.jitter < np.inf:
            raise ValueError(f"jitter must be finite and not negative, got {self.jitter}")
        slow = {c: f for c, f in self.stragglers.items() if not 0.0 < f < np.inf}
        if slow:
            raise ValueError(f"straggler factors must be finite and positive, got {slow}")


@dataclass(frozen=True)
class EngineResult:
    """One simulated step.

    ``seconds`` has shape (rank classes, CATEGORIES); each row sums to the step time, ``bubble``
    being what no other category explains. ``n_events`` counts SimPy events.
    """

    step_time_s: float
    seconds: Floats
    n_events: int
    timeline: Timeline | None

    def by_category(self, rank_class: int) -> dict[str, float]:
        """Seconds of one rank class by category name."""
        return {name: float(self.seconds[rank_class, n]) for name, n in CATEGORY.items()}


@dataclass(frozen=True)
class StepDistribution:
    """Step times (s) of several runs with different seeds."""

    step_times_s: Floats

    def percentile(self, percent: float) -> float:
        """A percentile of the step time, s."""
        return float(np.percentile(self.step_times_s, percent))

    @property
    def p10_s(self) -> float:
        """Step time that 10 % of the steps beat."""
        return self.percentile(10)

    @property
    def p50_s(self) -> float:
        """Median step time."""
        return self.percentile(50)

    @property
    def p90_s(self) -> float:
        """Step time that 90 % of the steps beat."""
        return self.percentile(90)


class _Run:
    """State of one simulation; one process per stream."""

    def __init__(self, graph: StepGraph, duration_ns: Ints, contention: bool) -> None:
        self.graph = graph
        self.env = simpy.Environment()
        self.duration = duration_ns.tolist()
        self.start = [-1] * graph.n_tasks
        self.end = [-1] * graph.n_tasks
        self.waited: dict[int, simpy.Event] = {}
        self.arrived: dict[int, int] = {}
        self.links = SharedLinks(self.env) if contention else None
        self.n_events = 0

    def run(self) -> tuple[Ints, Ints]:
        """Run to the end; start and end of every task. Raises ScheduleError on a deadlock."""
        for stream in self.graph.streams:
            self.env.process(self._stream(stream.tasks))
        self.env.run()
        if min(self.end) < 0:
            validate_graph(self.graph)
        return np.array(self.start, np.int64), np.array(self.end, np.int64)

    def _stream(self, tasks: tuple[int, ...]) -> Generator[simpy.Event, Any, None]:
        graph, env, end = self.graph, self.env, self.end
        for task in tasks:
            for dep in graph.deps[task]:
                if end[dep] < 0:
                    yield self._done(dep)
            members = len(graph.task_streams[task])
            if members > 1:
                here = self.arrived.get(task, 0) + 1
                self.arrived[task] = here
                if here < members:
                    yield self._done(task)
                    continue
            self.start[task] = int(env.now)
            if self.duration[task]:
                self.n_events += 1
                yield self._work(task)
            end[task] = int(env.now)
            event = self.waited.pop(task, None)
            if event is not None:
                event.succeed()

    def _work(self, task: int) -> simpy.Event:
        if self.links is not None and task in self.graph.links:
            return self.links.transfer(self.graph.links[task], self.duration[task])
        return self.env.timeout(self.duration[task])

    def _done(self, task: int) -> simpy.Event:
        """The event of a task's end, made only when somebody waits for it."""
        event = self.waited.get(task)
        if event is None:
            self.n_events += 1
            event = self.waited[task] = self.env.event()
        return event


def task_durations(graph: StepGraph, options: EngineOptions) -> Ints:
    """Durations (ns) under stragglers and jitter."""
    factor = _straggler_factors(graph, options.stragglers)
    if options.jitter:
        sigma = options.jitter
        draws = np.random.default_rng(options.seed).lognormal(
            -0.5 * sigma * sigma, sigma, graph.n_tasks
        )
        factor = factor * draws
    return np.rint(graph.duration_ns * factor).astype(np.int64)


def _straggler_factors(
    graph: StepGraph, stragglers: Mapping[int, float]
) -> npt.NDArray[np.float64]:
    unknown = [c for c in stragglers if not 0 <= c < graph.n_classes]
    if unknown:
        found = f"names classes {unknown}, which the layout lacks"
        raise UserError(Problem("stragglers", found, f"0 to {graph.n_classes - 1}"))
    factor = np.ones(graph.n_tasks)
    waits = np.isin(graph.profile, [CATEGORY[name] for name in ("pp", "dp", "fsdp", "bubble")])
    for index in graph.compute_streams:
        tasks = np.array(graph.streams[index].tasks)
        slow = stragglers.get(graph.streams[index].rank_class, 1.0)
        factor[tasks] = np.where(waits[tasks], 1.0, slow)
    return factor


def simulate_step(graph: StepGraph, options: EngineOptions | None = None) -> EngineResult:
    """Run one step. Raises ScheduleError where the graph can't run."""
    chosen = options or EngineOptions()
    run = _Run(graph, task_durations(graph, chosen), chosen.contention)
    start, end = run.run()
    timeline = Timeline(graph, start, end)
    return EngineResult(
        step_time_s=int(end.max()) / NS_PER_S,
        seconds=class_seconds(timeline),
        n_events=run.n_events,
        timeline=timeline if chosen.record_timeline else None,
    )


def simulate_steps(
    graph: StepGraph, n: int, options: EngineOptions, *, samples_at_once: int = 64
) -> StepDistribution:
    """Step times of ``n`` steps with seeds drawn from ``options.seed``.

    Without contention a step's time is its longest path, which is found for many samples at once;
    with contention the engine runs every sample.
    """
    seeds = [int(s.generate_state(1)[0]) for s in np.random.SeedSequence(options.seed).spawn(n)]
    runs = [replace(options, seed=seed, record_timeline=False) for seed in seeds]
    if options.contention:
        return StepDistribution(np.array([simulate_step(graph, r).step_time_s for r in runs]))
    times = []
    for first in range(0, n, samples_at_once):
        part = runs[first : first + samples_at_once]
        durations = np.stack([task_durations(graph, r) for r in part], axis=1)
        times.append(longest_path(graph, durations).max(axis=0) / NS_PER_S)
    return StepDistribution(np.concatenate(times))
