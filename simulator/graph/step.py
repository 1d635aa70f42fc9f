"""One training step as tasks on in-order streams: what both evaluators run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.cost.times import CATEGORIES, PassTimes, Seconds
from simulator.graph.action import Action, Kind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Kinds in the order of their codes in :attr:`StepGraph.kind`.
KINDS = tuple(Kind)
CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
NS_PER_S = 1e9


def category_seconds(times: PassTimes) -> Floats:
    """Seconds by category of one pass, in the order of CATEGORIES. Scalars only."""
    row = np.zeros(len(CATEGORIES))
    for name in times.__dataclass_fields__:
        row[CATEGORY[name]] = float(getattr(times, name))
    return row


def to_ns(seconds: Seconds) -> int:
    """Whole nanoseconds. Raises ValueError for negative or non-finite times."""
    value = float(seconds)
    if not 0.0 <= value < np.inf:
        raise ValueError(f"a task's time must be finite and not negative, got {value} s")
    return round(value * NS_PER_S)


@dataclass(frozen=True)
class Stream:
    """Tasks that run in order, one at a time, on one pipeline's copy of a rank class.

    ``kind`` is ``compute``, ``pp`` (pipeline sends) or ``dp`` (data-parallel collectives).
    """

    pipeline: int
    stage: int
    rank_class: int
    kind: str
    tasks: tuple[int, ...]

    @property
    def name(self) -> str:
        """For people: pipeline, stage, kind."""
        return f"pipeline {self.pipeline} stage {self.stage} {self.kind}"


@dataclass(frozen=True)
class StepGraph:
    """Tasks in structure-of-arrays form; task ids index every per-task field.

    A task starts when it is next on each of ``task_streams`` (several: a collective that joins
    them) and all of ``deps`` have ended. ``profile`` indexes ``profiles``, whose rows say which
    fraction of the task's time belongs to each of CATEGORIES; the first rows are the pure
    categories. ``stage`` is the global stage (or FSDP unit) and ``micro_batch`` -1 where the task
    belongs to none. ``links`` names the shared links that a task loads, each at its full rate when
    alone. ``pipeline_counts`` are the equal copies that each simulated pipeline stands for.
    """

    streams: tuple[Stream, ...]
    duration_ns: Ints
    profile: Ints
    profiles: Floats
    kind: npt.NDArray[np.int8]
    stage: Ints
    micro_batch: Ints
    deps: tuple[tuple[int, ...], ...]
    task_streams: tuple[tuple[int, ...], ...]
    links: Mapping[int, tuple[str, ...]]
    pipeline_counts: tuple[int, ...]
    n_classes: int

    @property
    def n_tasks(self) -> int:
        """Tasks of the step."""
        return len(self.deps)

    def action(self, task: int) -> Action:
        """What the task is, in schedule terms."""
        number = int(self.micro_batch[task])
        return Action(int(self.stage[task]), KINDS[self.kind[task]], None if number < 0 else number)

    @cached_property
    def compute_streams(self) -> tuple[int, ...]:
        """Indices of the streams that compute, one per pipeline and stage."""
        return tuple(i for i, s in enumerate(self.streams) if s.kind == "compute")


@dataclass
class GraphBuilder:
    """Collects tasks and streams; :meth:`finish` freezes them."""

    pipeline_counts: tuple[int, ...]
    n_classes: int
    link_names: Mapping[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)
    _streams: list[tuple[int, int, int, str, list[int]]] = field(default_factory=list)
    _duration: list[int] = field(default_factory=list)
    _profile: list[int] = field(default_factory=list)
    _profiles: list[Floats] = field(default_factory=lambda: list(np.eye(len(CATEGORIES))))
    _what: list[tuple[int, int, int]] = field(default_factory=list)
    _deps: list[list[int]] = field(default_factory=list)
    _task_streams: list[tuple[int, ...]] = field(default_factory=list)
    _links: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def add_stream(self, pipeline: int, stage: int, rank_class: int, kind: str) -> int:
        """A new empty stream; returns its index."""
        self._streams.append((pipeline, stage, rank_class, kind, []))
        return len(self._streams) - 1

    def add_profile(self, seconds: Floats) -> int:
        """Profile id of work that splits over CATEGORIES like ``seconds``."""
        total = float(seconds.sum())
        if total <= 0.0:
            return CATEGORY["compute"]
        self._profiles.append(seconds / total)
        return len(self._profiles) - 1

    def add(
        self,
        action: Action,
        streams: Sequence[int],
        duration_ns: int,
        profile: int,
        deps: Sequence[int] = (),
    ) -> int:
        """Append a task to its streams; returns its id."""
        task = len(self._duration)
        self._duration.append(duration_ns)
        self._profile.append(profile)
        number = -1 if action.micro_batch is None else action.micro_batch
        self._what.append((KINDS.index(action.kind), action.stage, number))
        self._deps.append(list(deps))
        self._task_streams.append(tuple(streams))
        for stream in streams:
            self._streams[stream][4].append(task)
        return task

    def depend(self, task: int, dep: int) -> None:
        """Let ``task`` wait for ``dep``, which may be added later than it."""
        self._deps[task].append(dep)

    def load_links(self, task: int, category: str) -> None:
        """Note the links that a communication task loads: those named for its classes.

        A class without an entry in ``link_names`` has one network link per pipeline and stage.
        """
        names: list[str] = []
        for stream in self._task_streams[task]:
            pipeline, stage, rank_class, _, _ = self._streams[stream]
            own = (f"network of pipeline {pipeline} stage {stage}",)
            names += self.link_names.get((rank_class, category), own)
        self._links[task] = tuple(dict.fromkeys(names))

    def finish(self) -> StepGraph:
        """The frozen graph."""
        kinds, stages, numbers = (np.array(column) for column in (zip(*self._what, strict=True)))
        return StepGraph(
            streams=tuple(
                Stream(p, s, c, kind, tuple(tasks)) for p, s, c, kind, tasks in self._streams
            ),
            duration_ns=np.array(self._duration, np.int64),
            profile=np.array(self._profile, np.int64),
            profiles=np.array(self._profiles),
            kind=kinds.astype(np.int8),
            stage=stages.astype(np.int64),
            micro_batch=numbers.astype(np.int64),
            deps=tuple(tuple(d) for d in self._deps),
            task_streams=tuple(self._task_streams),
            links=self._links,
            pipeline_counts=self.pipeline_counts,
            n_classes=self.n_classes,
        )
