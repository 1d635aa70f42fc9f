"""What a replay should measure: a prediction for processes that stand in for devices.

A replay may slow ranks and limit their memory so that one machine stands in for a mixed cluster.
The prediction takes the same factors and limits, so that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.analysis.predict import assemble, evaluate
from simulator.cost.memory import layout_breakdown
from simulator.cost.pricing import price_layout
from simulator.cost.times import ChunkTimes, ClassTimes, UnitTimes
from simulator.errors import Problem, UserError
from simulator.spec.layout import Layout, RankClass, build_layout

if TYPE_CHECKING:
    from simulator.analysis.prediction import Prediction
    from simulator.spec.scenario import Scenario

#: ``GpuSpec.architecture`` of a host that computes on its CPU.
HOST_ARCHITECTURE = "cpu"


@dataclass(frozen=True)
class Emulation:
    """One entry per rank, in rank order: factors of slowing (1: none) and bytes to allocate."""

    slowdown: tuple[float, ...] | None = None
    memory_bytes: tuple[int, ...] | None = None

    @property
    def is_any(self) -> bool:
        """Whether any rank differs from the device that it runs on."""
        return self.memory_bytes is not None or any(f != 1.0 for f in self.slowdown or ())


def replay_layout(scenario: Scenario) -> Layout:
    """The layout of a scenario with a plan. Raises UserError where it can't be laid out."""
    assert scenario.plan is not None
    return build_layout(
        scenario.model, scenario.workload, scenario.cluster, scenario.plan, scenario.stack
    )


def scenario_emulation(scenario: Scenario, layout: Layout) -> Emulation:
    """The emulation of the scenario's ``replay`` section.

    Raises:
        UserError: a list without an entry for each rank.
    """
    section = scenario.replay or {}
    for name in ("slowdown", "memory_bytes"):
        given = section.get(name)
        if given is not None and len(given) != layout.n_gpus:
            text = f"{len(given)} entries for {layout.n_gpus} ranks"
            raise UserError(
                Problem(f"replay.{name}", text, "give one for each rank", scenario.source)
            )
    slow, memory = section.get("slowdown"), section.get("memory_bytes")
    return Emulation(
        slowdown=None if slow is None else tuple(float(f) for f in slow),
        memory_bytes=None if memory is None else tuple(int(b) for b in memory),
    )


def rank_classes(layout: Layout) -> tuple[int, ...]:
    """Rank class of every rank, in rank order."""
    return tuple(c.index for c in layout.classes for _ in range(c.ranks))


def predict_emulated(scenario: Scenario, layout: Layout, emulation: Emulation) -> Prediction:
    """Closed-form prediction of a layout as a replay runs it.

    A class is as slow as its slowest rank and has the memory of its smallest, because equal ranks
    wait for each other.
    """
    shown = emulated_layout(layout, emulation)
    times = emulated_times(shown, emulation.slowdown)
    evaluation = evaluate(shown, times, "closed form")
    return assemble(scenario, shown, times, evaluation, with_suggestions=False)


def emulated_layout(layout: Layout, emulation: Emulation) -> Layout:
    """The layout with limited memory; on CPUs without what only a GPU's runtime holds.

    A CPU process has no CUDA context, NCCL buffers, cuBLAS workspace or caching allocator.
    """
    classes = layout.classes
    if all(c.gpu.architecture == HOST_ARCHITECTURE for c in classes):
        bare = replace(
            layout.stack.framework,
            context_bytes=0.0,
            communicator_bytes=0.0,
            workspace_bytes=0.0,
            fragmentation=0.0,
        )
        layout = replace(layout, stack=replace(layout.stack, framework=bare))
    limits = emulation.memory_bytes
    if limits is None:
        return layout
    # The limit is on what torch allocates; usable memory also holds what lies outside of it.
    outside = np.broadcast_to(layout_breakdown(layout).framework, (len(classes),))
    smallest = _by_class(layout, limits, min)
    limited = tuple(
        _limited(c, limit + float(outside[c.index]))
        for c, limit in zip(classes, smallest, strict=True)
    )
    return replace(layout, classes=limited)


def emulated_times(layout: Layout, slowdown: Sequence[float] | None) -> tuple[ClassTimes, ...]:
    """Priced layout with every unit's passes slowed; communication and optimiser are not."""
    times = tuple(price_layout(layout))
    if slowdown is None:
        return times
    factors = _by_class(layout, slowdown, max)
    return tuple(_slowed(t, factor) for t, factor in zip(times, factors, strict=True))


def _by_class(layout: Layout, values: Sequence[float], choose: Any) -> list[float]:
    """One value for each class, chosen from its ranks' values."""
    classes = rank_classes(layout)
    return [
        float(choose(v for v, c in zip(values, classes, strict=True) if c == index))
        for index in range(len(layout.classes))
    ]


def _limited(c: RankClass, usable_bytes: float) -> RankClass:
    usable = min(float(c.gpu.usable_memory_bytes), usable_bytes)
    return replace(c, gpu=replace(c.gpu, usable_memory_bytes=int(usable)))


def _slowed(times: ClassTimes, factor: float) -> ClassTimes:
    def chunk(c: ChunkTimes) -> ChunkTimes:
        return replace(
            c,
            forward=c.forward.scaled(factor),
            backward_input=c.backward_input.scaled(factor),
            backward_weight=c.backward_weight.scaled(factor),
        )

    def unit(u: UnitTimes) -> UnitTimes:
        return replace(u, forward=u.forward.scaled(factor), backward=u.backward.scaled(factor))

    return replace(
        times,
        chunks=tuple(chunk(c) for c in times.chunks),
        units=tuple(unit(u) for u in times.units),
    )
