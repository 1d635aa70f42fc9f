"""Time of a fully sharded step from a few visits of each kind of unit.

Follows the issue order of :mod:`simulator.graph.schedules.fsdp`. Runs of equal units and equal
micro-batches are periodic after a few, so only those few are followed and the rest is added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simulator.cost.times import Seconds


@dataclass(frozen=True)
class ShardedUnit:
    """``repeat`` equal units: passes by class, collectives of the whole group, seconds."""

    repeat: int
    forward: Sequence[Seconds]
    backward: Sequence[Seconds]
    gather_forward: Seconds
    gather_backward: Seconds
    reduce: Seconds

    def network_s(self) -> Seconds:
        """All collectives of one forward and backward pass over the units."""
        return self.repeat * (self.gather_forward + self.gather_backward + self.reduce)


class _Visit(NamedTuple):
    """A stay of one gathered unit; ``more`` equal ones follow that aren't listed."""

    gather: Seconds
    work: Sequence[Seconds]
    reduce: Seconds
    more: int


@dataclass
class _State:
    """Clocks of the group: the network, each class, and what has been gathered ahead."""

    classes: int
    prefetch: int
    network: Any = 0.0
    reduced: Any = 0.0
    compute: list[Any] = field(default_factory=list)
    arrived: deque[Any] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.compute = [0.0] * self.classes

    def gather(self, seconds: Seconds) -> None:
        """Issue a gather; a unit whose parameters stayed gathered arrives at once."""
        issued = np.maximum(self.network, self.busiest())
        self.network = np.where(np.asarray(seconds) > 0.0, issued + seconds, self.network)
        self.arrived.append(np.where(np.asarray(seconds) > 0.0, self.network, 0.0))

    def busiest(self) -> Any:
        """When the last class is through with what it was given."""
        if self.classes == 1:
            return self.compute[0]
        return np.max(np.broadcast_arrays(*self.compute), axis=0)

    def visit(self, visit: _Visit, active: Sequence[bool]) -> None:
        """Run the passes of the next gathered unit, then its reduction."""
        ready = self.arrived.popleft()
        for c, work in enumerate(visit.work):
            if active[c]:
                self.compute[c] = np.maximum(self.compute[c], ready) + work
        issued = np.maximum(self.network, self.busiest())
        some = np.asarray(visit.reduce) > 0.0
        self.network = np.where(some, issued + visit.reduce, self.network)
        self.reduced = np.where(some, self.network, self.reduced)

    def clocks(self) -> tuple[Any, Any]:
        """Network and computation."""
        return self.network, self.busiest()

    def advance(self, since: tuple[Any, Any], times: Seconds, active: Sequence[bool]) -> None:
        """Let what happened since ``since`` happen ``times`` more.

        The network may fall behind the computation where nothing is gathered again.
        """
        by, more = (
            np.asarray(now - then) * times for now, then in zip(self.clocks(), since, strict=True)
        )
        self.network = self.network + by
        self.reduced = np.where(np.asarray(self.reduced) > 0.0, self.reduced + by, 0.0)
        self.compute = [t + more if on else t for t, on in zip(self.compute, active, strict=True)]
        self.arrived = deque(np.where(np.asarray(t) > 0.0, t + by, 0.0) for t in self.arrived)


def _visits(units: Sequence[ShardedUnit], prefetch: int, *, backward: bool) -> list[_Visit]:
    """Visits of one pass over the units; long runs are cut to what shows their period."""
    warm, tail = 3 * (prefetch + 1), prefetch + 1
    visits = []
    for unit in reversed(units) if backward else units:
        gather = unit.gather_backward if backward else unit.gather_forward
        work = unit.backward if backward else unit.forward
        kept = min(unit.repeat, warm + tail)
        for n in range(kept):
            more = unit.repeat - kept if n == warm - 1 else 0
            visits.append(_Visit(gather, work, unit.reduce if backward else 0.0, more))
    return visits


def _run(
    state: _State, visits: Sequence[_Visit], ahead: Sequence[_Visit], active: Sequence[bool]
) -> None:
    """One micro-batch (or layered step); ``ahead`` are the visits that follow it."""
    period = state.prefetch + 1
    sequence = [*visits, *ahead[: state.prefetch]]
    issued = len(state.arrived)
    marks: list[tuple[Any, Any]] = []
    for index, visit in enumerate(visits):
        for other in sequence[issued : index + period]:
            state.gather(other.gather)
        issued = max(issued, min(index + period, len(sequence)))
        state.visit(visit, active)
        marks.append(state.clocks())
        if visit.more:
            state.advance(marks[-1 - period], visit.more / period, active)


def sharded_ends(
    units: Sequence[ShardedUnit],
    micro_batches: Sequence[int],
    prefetch: int,
    *,
    layered: bool,
    extra_rounds: Seconds = 0.0,
) -> tuple[list[Any], Any]:
    """Finish of each class's computation and of the last reduction, seconds.

    ``micro_batches`` by class. ``extra_rounds`` more micro-batches (an array over a batch of plans
    too) run on every class, and need at least three micro-batches to extrapolate from.
    """
    state = _State(len(micro_batches), prefetch)
    if layered:
        visits = _layered_visits(units, micro_batches, prefetch)
        _run(state, visits, (), [True] * len(micro_batches))
        return state.compute, state.reduced
    visits = _visits(units, prefetch, backward=False) + _visits(units, prefetch, backward=True)
    rounds = max(micro_batches)
    before: tuple[Any, Any] = (0.0, 0.0)
    for first, length in _segments(micro_batches):
        active = [first < m for m in micro_batches]
        kept = min(length, 3)
        for n in range(kept):
            final = first + length == rounds and n == kept - 1
            if n == kept - 1 and kept == 3:
                more = length - kept + (extra_rounds if first + length == rounds else 0.0)
                state.advance(before, more, active)
            before = state.clocks()
            _run(state, visits, () if final else visits, active)
    return state.compute, state.reduced


def _segments(micro_batches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, length) of the stretches of micro-batches in which the same classes compute."""
    first = 0
    for count in sorted(set(micro_batches)):
        yield first, count - first
        first = count


def _layered_visits(
    units: Sequence[ShardedUnit], micro_batches: Sequence[int], prefetch: int
) -> list[_Visit]:
    """All micro-batches of a class on one unit are one piece of work."""
    scaled = [
        ShardedUnit(
            u.repeat,
            [m * t for m, t in zip(micro_batches, u.forward, strict=True)],
            [m * t for m, t in zip(micro_batches, u.backward, strict=True)],
            u.gather_forward,
            u.gather_backward,
            u.reduce,
        )
        for u in units
    ]
    return _visits(scaled, prefetch, backward=False) + _visits(scaled, prefetch, backward=True)


def sharded_pass_s(
    units: Sequence[ShardedUnit], micro_batches: Any, prefetch: int, *, layered: bool
) -> Any:
    """Seconds until the last pass and the last reduction of equal ranks; arrays broadcast.

    ``micro_batches`` may differ over the batch of plans. Units have one class each.
    """
    counts = np.asarray(micro_batches)

    def end(rounds: Any, extra: Any) -> Any:
        compute, reduced = sharded_ends(
            units, [rounds], prefetch, layered=layered, extra_rounds=extra
        )
        return np.maximum(compute[0], reduced)

    if layered:
        return end(counts, 0.0)
    few = [end(n, 0.0) for n in (1, 2)]
    return np.select([counts == 1, counts == 2], few, end(3, np.maximum(counts - 3, 0)))


def sharded_waits_s(units: Sequence[ShardedUnit], prefetch: int) -> tuple[Any, Any, Any]:
    """Waiting of one forward and one backward pass over units that start with an idle network.

    Also how long the last reduction outlasts the backward pass. What
    :func:`simulator.graph.sharded.exposed_fsdp_s` gives for one pipeline stage, for a batch of
    plans; units have one class each.
    """
    waits = []
    tail: Any = 0.0
    for backward in (False, True):
        state = _State(1, prefetch)
        _run(state, _visits(units, prefetch, backward=backward), (), [True])
        busy = sum(u.repeat * (u.backward if backward else u.forward)[0] for u in units)
        waits.append(np.maximum(state.compute[0] - busy, 0.0))
        tail = np.maximum(np.asarray(state.network) - state.compute[0], 0.0)
    return waits[0], waits[1], tail
