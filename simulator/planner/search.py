"""Search of all uniform plans of a homogeneous cluster: the fastest that fit, and what they trade.

Every legal plan is looked at: memory first (a plan that doesn't fit at the accepted risk needs no
time), then step time; the best are priced once more one by one with the closed form. Chunks bound
the memory that a search takes, whatever the number of plans.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.analysis.predict import evaluate
from simulator.cost.pricing import price_layout
from simulator.errors import Problem, UserError
from simulator.planner.grid import GridPricer
from simulator.planner.plan_grid import PlanGrid
from simulator.planner.space import CHUNK, RULE_TEXTS, Rule, Space, default_axes, offloadable
from simulator.planner.tables import Tables
from simulator.spec.cluster import Cluster
from simulator.spec.layout import build_layout
from simulator.spec.plan import SCHEDULES, Plan, Recompute
from simulator.spec.resolve_plan import Case
from simulator.spec.scenario import Scenario

Floats = npt.NDArray[np.float64]

DOES_NOT_FIT = "more memory than the accepted risk allows"

#: Fields of a plan that change how layers are priced: searched only where asked.
OPTIONS = ("precision", "optimizer", "attention", "compile", "offload")


@dataclass(frozen=True)
class FoundPlan:
    """A plan with its predicted step time, rate and memory.

    ``headroom`` is the share of usable memory that the fullest rank leaves free (median).
    """

    plan: Plan
    step_time_s: float
    tokens_per_s: float
    oom_risk: float
    headroom: float


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search.

    ``plans`` are the fastest that fit, best first (closed form); ``front`` those that no other
    beats in both rate and headroom, fastest first (by the grid's formula, but with the closed
    form's times where they are among ``plans``). ``least_risky`` is the plan nearest to
    fitting, told where none does. ``considered`` counts combinations, ``fitting`` those legal and
    within the risk, ``left_out`` the others by reason.
    """

    plans: tuple[FoundPlan, ...]
    front: tuple[FoundPlan, ...]
    least_risky: FoundPlan | None
    considered: int
    legal: int
    fitting: int
    left_out: Mapping[str, int]
    seconds: float


def search(
    scenario: Scenario,
    *,
    top: int = 10,
    risk: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    max_gpus: int | None = None,
) -> SearchResult:
    """Search all uniform plans of a scenario's cluster.

    ``risk`` is the accepted probability of running out of memory (None: the scenario's). ``fixed``
    gives plan fields one value or a list of values (``{"tp": 8, "recompute": ["none", "full"]}``);
    ``options`` lists values of :data:`OPTIONS` to search as well. ``max_gpus`` uses only so many
    GPUs of the cluster, in whole nodes. What is neither is taken from the scenario's plan.

    Raises:
        UserError: the cluster mixes GPU types, or a field or value is unknown.
    """
    started = time.perf_counter()
    accepted = scenario.risk if risk is None else risk
    cluster = scenario.cluster if max_gpus is None else smaller(scenario.cluster, max_gpus)
    case = Case(scenario.model, scenario.workload, cluster, scenario.stack)
    axes = default_axes(case, _axis_codes(fixed or {}))
    best = _Best(top, float(scenario.workload.tokens_per_step))
    tables = Tables()
    variants = _variants(scenario.plan or Plan(), options or {})
    pricers = [GridPricer(case, like, tables) for like in variants]
    for pricer in pricers:
        pricer.prime(axes)
    _look(Space(case, axes), pricers, accepted, best)
    found = sorted((_exact(case, f) for f in best.plans()), key=lambda f: f.step_time_s)
    priced = {f.plan: f for f in found}
    return SearchResult(
        plans=tuple(found),
        front=tuple(priced.get(f.plan, f) for f in best.front()),
        least_risky=best.nearest if not found else None,
        considered=best.considered,
        legal=best.legal,
        fitting=best.fitting,
        left_out={why: n for why, n in best.left_out.most_common() if n},
        seconds=time.perf_counter() - started,
    )


def smaller(cluster: Cluster, max_gpus: int) -> Cluster:
    """The cluster with as many whole nodes of its one group as have ``max_gpus`` GPUs."""
    group = cluster.groups[0]
    count = min(group.count, max_gpus // len(group.gpus))
    if len(cluster.groups) != 1 or count < 1:
        raise UserError(
            Problem("max_gpus", f"{max_gpus} GPUs are no whole node of a uniform cluster")
        )
    return replace(cluster, groups=(replace(group, count=count),))


def _axis_codes(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Fixed plan fields in the codes of the axes."""
    codes: dict[str, Any] = {}
    words = {mode.name.lower(): int(mode) for mode in Recompute}
    for name, value in fixed.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if name == "recompute":
            values = [words.get(str(v).lower(), v) for v in values]
        elif name == "sequence_parallel":
            values = [int(bool(v)) for v in values]
        elif name == "schedule" and not set(values) <= set(SCHEDULES):
            raise UserError(
                Problem("plan.schedule", f"{values} unknown", f"one of {', '.join(SCHEDULES)}")
            )
        codes[name] = values
    return codes


def _variants(like: Plan, options: Mapping[str, Sequence[Any]]) -> Iterator[Plan]:
    """The plan with every combination of the searched options."""
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise UserError(f"no option of a search: {', '.join(unknown)}; {', '.join(OPTIONS)}")
    for values in itertools.product(*options.values()):
        yield replace(like, **dict(zip(options, values, strict=True)))


def _look(space: Space, pricers: Sequence[GridPricer], risk: float, best: _Best) -> None:
    """All plans of a space, each as every pricer's variant."""
    usable = float(pricers[0].gpu.usable_memory_bytes)
    for whole in space.chunks(CHUNK):
        for pricer in pricers:
            chunk = offloadable(whole, pricer.like)
            best.left_out[RULE_TEXTS[Rule.OFFLOAD]] += len(whole) - len(chunk)
            best.legal += len(chunk)
            memory = pricer.memory(chunk, stop_at_risk=risk)
            fits = np.flatnonzero(memory.oom_risk <= risk)
            if not len(fits):
                if not best.fitting and len(chunk):
                    best.note_nearest(chunk, memory.oom_risk, memory.needed_bytes / usable, pricer)
                continue
            some = chunk if len(fits) == len(chunk) else chunk.take(fits)
            headroom = 1.0 - memory.needed_bytes[fits] / usable
            step = pricer.step_time_s(some)
            best.add(some, step, memory.oom_risk[fits], headroom, pricer.like)
    best.considered = space.considered * len(pricers)
    best.left_out.update({RULE_TEXTS[rule]: n * len(pricers) for rule, n in space.left_out.items()})
    best.left_out[DOES_NOT_FIT] = best.legal - best.fitting


class _Best:
    """The fastest plans and the front of rate against headroom among all that were added."""

    def __init__(self, top: int, tokens: float) -> None:
        self.top, self.tokens = top, tokens
        self.considered = self.legal = self.fitting = 0
        self.left_out: Counter[str] = Counter()
        self.nearest: FoundPlan | None = None
        self._fastest: list[FoundPlan] = []
        self._front: list[FoundPlan] = []

    def add(self, grid: PlanGrid, step: Floats, risk: Floats, headroom: Floats, like: Plan) -> None:
        """Take up a chunk of plans that fit."""
        self.fitting += len(grid)
        limit = self._fastest[-1].step_time_s if len(self._fastest) >= self.top else np.inf
        rows = np.flatnonzero(step < limit)
        if len(rows) > self.top:
            rows = rows[np.argpartition(step[rows], self.top)[: self.top]]
        fast = [self._found(grid, r, step, risk, headroom, like) for r in rows]
        self._fastest = sorted(self._fastest + fast, key=_by_speed)[: self.top]
        open_rows = np.flatnonzero(~self._beaten(step, headroom))
        rows = open_rows[front_rows(step[open_rows], headroom[open_rows])]
        new = [self._found(grid, r, step, risk, headroom, like) for r in rows]
        if new:
            self._front = _front_of(self._front + new)

    def _beaten(self, step: Floats, headroom: Floats) -> npt.NDArray[np.bool_]:
        """Which points some plan of the front equals or beats in both."""
        if not self._front:
            return np.zeros(len(step), bool)
        steps = np.array([f.step_time_s for f in self._front])
        rooms = np.array([f.headroom for f in self._front])
        # Along the front both rise: the slowest member that is as fast has the most headroom.
        at = np.searchsorted(steps, step, side="right") - 1
        return np.asarray((at >= 0) & (rooms[np.maximum(at, 0)] >= headroom))

    def _found(
        self, grid: PlanGrid, row: Any, step: Floats, risk: Floats, room: Floats, like: Plan
    ) -> FoundPlan:
        seconds = float(step[row])
        return FoundPlan(
            grid.plan(int(row), like), seconds, self.tokens / seconds, float(risk[row]),
            float(room[row]),
        )  # fmt: skip

    def note_nearest(self, grid: PlanGrid, risk: Floats, fill: Floats, pricer: GridPricer) -> None:
        """Keep the plan that is nearest to fitting, while none does."""
        row = int(fill.argmin())
        if self.nearest is None or 1.0 - fill[row] > self.nearest.headroom:
            step = np.zeros(len(grid))
            step[row] = pricer.step_time_s(grid.take(np.array([row])))[0]
            self.nearest = self._found(grid, row, step, risk, 1.0 - fill, pricer.like)

    def plans(self) -> list[FoundPlan]:
        """The fastest plans, best first."""
        return list(self._fastest)

    def front(self) -> list[FoundPlan]:
        """Plans that none beats in rate and headroom, fastest first."""
        return list(self._front)


def _by_speed(found: FoundPlan) -> tuple[float, float]:
    return found.step_time_s, -found.headroom


def front_rows(step: Floats, headroom: Floats) -> npt.NDArray[np.intp]:
    """Rows that no other row beats in both (smaller step, larger headroom), fastest first."""
    order = np.lexsort((-headroom, step))
    highest = np.maximum.accumulate(headroom[order])
    before = np.concatenate([[-np.inf], highest[:-1]])
    return order[headroom[order] > before]


def _front_of(found: list[FoundPlan]) -> list[FoundPlan]:
    step = np.array([f.step_time_s for f in found])
    rows = front_rows(step, np.array([f.headroom for f in found]))
    return [found[row] for row in rows]


def _exact(case: Case, found: FoundPlan) -> FoundPlan:
    """The plan priced alone by the closed form."""
    layout = build_layout(case.model, case.workload, case.cluster, found.plan, case.stack)
    step = evaluate(layout, price_layout(layout), "closed form").step_time_s
    return replace(found, step_time_s=step, tokens_per_s=case.workload.tokens_per_step / step)
