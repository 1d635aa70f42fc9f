"""The answer of ``purchase`` as frozen data, and the JSON document that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from simulator.analysis.assumptions import Assumption
from simulator.analysis.prediction import Prediction, Range
from simulator.analysis.uncertain import BreakEven, Swing

#: Quantities that every feasible candidate has as p10, p50 and p90.
RANGED = (
    "cost_per_1e9_tokens", "total_cost", "time_to_train_s", "energy_kwh", "co2_kg",
    "cost_per_run", "cost_per_pflop_day", "tokens", "goodput", "idle_cost", "upfront_cost",
)  # fmt: skip


@dataclass(frozen=True)
class WorkloadResult:
    """One workload on one candidate: its plan and how long a run takes (goodput included)."""

    name: str
    prediction: Prediction
    headroom: float
    time_to_train_s: Range | None


@dataclass(frozen=True)
class CandidateResult:
    """One candidate.

    ``ranges`` holds :data:`RANGED` (empty where a workload fits nowhere), ``costs`` the median
    cost of each component over the horizon, ``cash_flow`` (month, amount; income positive) and
    ``present_cost`` what that is worth today at the rate of interest.
    ``violations`` say which constraints it breaks, ``missing`` what would make the model fit.
    ``goodput_runs`` is the simulated p10/p50/p90 of one run of the first workload.
    """

    name: str
    hardware: tuple[str, ...]
    workloads: tuple[WorkloadResult, ...]
    ranges: Mapping[str, Range]
    costs: Mapping[str, float]
    cash_flow: tuple[tuple[float, float], ...]
    present_cost: float | None
    violations: tuple[str, ...]
    missing: str
    rated_power_w: float
    headroom: float
    finish_s: float | None
    spares: int
    busy: float | None
    demand_met: float | None
    checkpoint_interval_s: float | None
    goodput_runs: Range | None
    break_even_hours_per_year: float | None
    break_even_against: str = ""

    @property
    def fits(self) -> bool:
        """Whether every workload fits."""
        return not self.missing

    @property
    def is_feasible(self) -> bool:
        """Whether it fits and breaks no constraint."""
        return self.fits and not self.violations


@dataclass(frozen=True)
class Comparison:
    """P(``a`` is better than ``b``) by the objective, over draws that both meet."""

    a: str
    b: str
    probability: float


@dataclass(frozen=True)
class SearchResult:
    """What to buy for a budget: counts by node type, best first; how many mixes were looked at."""

    budget: float
    best: tuple[str, ...]
    combinations: int
    planned: int


@dataclass(frozen=True)
class OldWorth:
    """The standing cluster beside the best new one, in money over the horizon.

    ``value_in_use`` is what its tokens would cost on the new cluster, less its running costs;
    ``resale_value`` what selling it today brings.
    """

    beside: str
    value_in_use: float
    resale_value: float
    running_cost: float
    tokens: float


@dataclass(frozen=True)
class PurchaseResult:
    """The whole answer: ranked candidates, the verdict, and what it depends on.

    ``tornado`` and ``break_even`` are about ``lead``: how far the first feasible candidate is ahead
    of the second by the objective, at the medians (its own outcome where there is no second).
    """

    title: str
    verdict: str
    objective: str
    currency: str
    date: str
    horizon_years: float
    region: str
    candidates: tuple[CandidateResult, ...]
    comparisons: tuple[Comparison, ...]
    tornado: tuple[Swing, ...]
    break_even: tuple[BreakEven, ...]
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    defaults: tuple[str, ...]
    search: SearchResult | None = None
    old_worth: OldWorth | None = None
    workload_names: tuple[str, ...] = field(default=())
    lead: float = 0.0

    @property
    def feasible(self) -> tuple[CandidateResult, ...]:
        """Candidates that fit and break no constraint, best first."""
        return tuple(c for c in self.candidates if c.is_feasible)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "objective": self.objective,
            "currency": self.currency,
            "date": self.date,
            "horizon_years": self.horizon_years,
            "region": self.region,
            "candidates": [_candidate(c, rank) for rank, c in enumerate(self.candidates, 1)],
            "comparisons": [asdict(c) for c in self.comparisons],
            "lead": self.lead,
            "tornado": [asdict(s) for s in self.tornado],
            "break_even": [asdict(b) for b in self.break_even],
            "search": None if self.search is None else asdict(self.search),
            "old_cluster": None if self.old_worth is None else asdict(self.old_worth),
            "assumptions": [_assumption(a) for a in self.assumptions],
            "defaults": list(self.defaults),
            "warnings": list(self.warnings),
        }


def _candidate(c: CandidateResult, rank: int) -> dict[str, Any]:
    """Every quantity is an object with p10, p50 and p90, or null where the model doesn't fit."""
    data: dict[str, Any] = {
        "rank": rank,
        "name": c.name,
        "fits": c.fits,
        "feasible": c.is_feasible,
        "hardware": list(c.hardware),
    }
    for name in RANGED:
        found = c.ranges.get(name)
        data[name] = None if found is None else asdict(found)
    data |= {
        "costs": dict(c.costs),
        "cash_flow": [{"month": month, "amount": amount} for month, amount in c.cash_flow],
        "present_cost": c.present_cost,
        "violations": list(c.violations),
        "missing": c.missing,
        "rated_power_w": c.rated_power_w,
        "memory_headroom": c.headroom,
        "finish_s": c.finish_s,
        "spares": c.spares,
        "busy": c.busy,
        "demand_met": c.demand_met,
        "checkpoint_interval_s": c.checkpoint_interval_s,
        "goodput_simulated": None if c.goodput_runs is None else asdict(c.goodput_runs),
        "break_even_hours_per_year": c.break_even_hours_per_year,
        "break_even_against": c.break_even_against,
        "workloads": [_workload(w) for w in c.workloads],
    }
    return data


def _workload(w: WorkloadResult) -> dict[str, Any]:
    p = w.prediction
    return {
        "name": w.name,
        "model": p.model,
        "gpus": dict(p.gpus),
        "stack": p.stack,
        "plan": dict(p.plan),
        "verdict": p.verdict,
        "oom_risk": p.oom_risk,
        "memory_headroom": w.headroom,
        "step_time_s": asdict(p.step_time_s),
        "tokens_per_s": asdict(p.tokens_per_s),
        "mfu": p.mfu,
        "time_to_train_s": None if w.time_to_train_s is None else asdict(w.time_to_train_s),
    }


def _assumption(a: Assumption) -> dict[str, Any]:
    return {
        "name": a.name, "low": a.amount.low, "value": a.amount.value, "high": a.amount.high,
        "unit": a.unit, "source": a.source, "basis": a.basis,
        "date": None if a.date is None else a.date.isoformat(), "stale": a.stale,
    }  # fmt: skip
