"""A candidate's row of the answer: ranges, cash flow, violations, goodput, break-even hours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.analysis import economics as eco
from simulator.analysis.assumptions import PLAIN, UTILISATION, Assumptions
from simulator.analysis.candidate_cost import Sheet, evaluate_candidate, reliability
from simulator.analysis.candidate_facts import CandidateFacts, Terms
from simulator.analysis.cash import cash_flow
from simulator.analysis.failure_runs import simulate_failures
from simulator.analysis.goodput import best_goodput
from simulator.analysis.prediction import Range
from simulator.analysis.uncertain import Inputs, percentiles
from simulator.planner.purchase_candidates import Prepared
from simulator.planner.purchase_result import CandidateResult, WorkloadResult
from simulator.spec.purchase import Constraints, Purchase
from simulator.units import SECONDS_PER_DAY

#: Simulated runs and the longest of them: more is no more telling.
_RUNS, _LONGEST_S = 200, 120 * SECONDS_PER_DAY
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Costed:
    """A prepared candidate with its sheet over the draws and at the medians."""

    prepared: Prepared
    facts: CandidateFacts
    drawn: Sheet
    middle: Sheet


def candidate_result(
    c: Costed, purchase: Purchase, terms: Terms, middle: Inputs, assumptions: Assumptions
) -> CandidateResult:
    """The row of a candidate that fits."""
    facts, sheet, s = c.facts, c.drawn, c.middle
    last = facts.phases[-1]
    payments = cash_flow(facts, terms, s, middle)
    rate = float(middle[PLAIN["financing_rate"][1]])
    worth = eco.present_value([a for _, a in payments], rate, [m for m, _ in payments])
    interval, _ = best_goodput(reliability(last, last.work[0], middle))
    headroom = min(p.headroom for p in c.prepared.planned)
    rated = sum(n.count * n.rated_w for n in last.nodes if n.is_own)
    if last.spare_nodes is not None:
        rated += last.spares * last.spare_nodes.rated_w
    finish = facts.wait_years * eco.SECONDS_PER_YEAR + float(s.run_time_s)
    hours, against = _break_even_hours(c, terms, middle, assumptions)
    return CandidateResult(
        name=facts.name,
        hardware=tuple(f"{n.count:,} {n.name} {n.how}" for n in last.nodes),
        workloads=tuple(
            WorkloadResult(p.workload.name, p.prediction, p.headroom, percentiles(t))
            for p, t in zip(c.prepared.planned, sheet.workload_times_s, strict=True)
        ),
        ranges=_ranges(sheet, last.n_gpus, purchase),
        costs={name: float(amount) for name, amount in s.costs.items()},
        cash_flow=payments,
        present_cost=-float(worth),
        violations=tuple(_violations(purchase.constraints, s, rated, finish, headroom, purchase)),
        missing="",
        rated_power_w=rated,
        headroom=headroom,
        finish_s=finish,
        spares=last.spares,
        busy=float(s.busy),
        demand_met=float(s.demand_met),
        checkpoint_interval_s=float(interval),
        goodput_runs=_simulated(facts, middle, float(interval)),
        break_even_hours_per_year=hours,
        break_even_against=against,
    )


def _ranges(sheet: Sheet, n_gpus: int, purchase: Purchase) -> dict[str, Range]:
    per_token = sheet.cost_per_1e9_tokens / 1e9
    once = sum(w.tokens for w in purchase.workloads)
    fixed = sheet.total_cost - sheet.costs["electricity"]
    arrays = [*sheet.costs.values(), sheet.tokens]
    shape = np.broadcast_shapes(*(np.shape(a) for a in arrays))
    found = {
        "cost_per_1e9_tokens": sheet.cost_per_1e9_tokens,
        "total_cost": sheet.total_cost,
        "time_to_train_s": sheet.run_time_s,
        "energy_kwh": sheet.run_energy_kwh,
        "co2_kg": sheet.run_co2_kg,
        "cost_per_run": per_token * once,
        "cost_per_pflop_day": sheet.cost_per_pflop_day,
        "tokens": sheet.tokens,
        "goodput": sheet.goodput,
        "idle_cost": eco.idle_cost(fixed, sheet.busy),
        "upfront_cost": sheet.upfront,
    }
    return {name: percentiles(np.broadcast_to(value, shape)) for name, value in found.items()}


def _simulated(facts: CandidateFacts, x: Inputs, interval_s: float) -> Range | None:
    """Goodput of single runs of the first workload, by Monte-Carlo."""
    last = facts.phases[-1]
    r = reliability(last, last.work[0], x)
    work_s = min(last.work[0].tokens / last.work[0].rate, float(_LONGEST_S))
    runs = simulate_failures(r, interval_s, work_s, n_runs=_RUNS)
    return Range(*runs.percentiles())


def _violations(
    limits: Constraints,
    s: Sheet,
    rated_w: float,
    finish_s: float,
    headroom: float,
    purchase: Purchase,
) -> list[str]:
    """What a candidate breaks, at the medians, a sentence each."""
    money = purchase.economics.currency
    spent = float(s.upfront + s.rent - s.sale)
    broken = []
    if limits.budget is not None and spent > limits.budget * (1 + _TOLERANCE):
        broken.append(f"spends {spent:,.0f} {money}, the budget is {limits.budget:,.0f}")
    if limits.power_limit_w is not None and rated_w > limits.power_limit_w * (1 + _TOLERANCE):
        broken.append(
            f"needs {rated_w / 1e3:,.1f} kW, the room has {limits.power_limit_w / 1e3:,.1f}"
        )
    if limits.deadline_s is not None and finish_s > limits.deadline_s * (1 + _TOLERANCE):
        broken.append(
            f"is done after {finish_s / SECONDS_PER_DAY:,.0f} days, the deadline is "
            f"{limits.deadline_s / SECONDS_PER_DAY:,.0f}"
        )
    if headroom < limits.memory_headroom - _TOLERANCE:
        broken.append(
            f"leaves {100 * headroom:.0f} % of memory free, {100 * limits.memory_headroom:.0f} % "
            "is wanted"
        )
    if float(s.demand_met) < 1 - 1e-6:
        broken.append(f"does {100 * float(s.demand_met):.0f} % of the wanted runs")
    return broken


def _break_even_hours(
    c: Costed, terms: Terms, x: Inputs, assumptions: Assumptions
) -> tuple[float | None, str]:
    """Busy hours a year from which owning beats renting the same GPUs on demand."""
    last = c.facts.phases[-1]
    if not all(n.is_own for n in last.nodes) or not any(n.how == "bought" for n in last.nodes):
        return None, ""
    rent = 0.0
    for group in c.prepared.planned[0].scenario.cluster.groups:
        for gpu in group.gpus:
            price = assumptions.on_demand_rent(gpu.name)
            if price is None:
                return None, ""
            rent += price * group.count
    free = replace(last, work=tuple(replace(w, runs_per_year=None) for w in last.work))
    facts = replace(c.facts, phases=(free,))
    idle = evaluate_candidate(facts, terms, {**x, UTILISATION: np.zeros(())})
    full = evaluate_candidate(facts, terms, {**x, UTILISATION: np.ones(())})
    hours = last.years * eco.HOURS_PER_YEAR
    per_hour = (full.total_cost - idle.total_cost) / hours
    needed = float(eco.break_even_hours(idle.total_cost, per_hour, rent)) / last.years
    return (None, "") if needed < 0 else (needed, "the same GPUs on demand")


def unfit_result(p: Prepared) -> CandidateResult:
    """The row of a candidate on which a workload fits under no plan."""
    return CandidateResult(
        name=p.candidate.name,
        hardware=tuple(
            f"{g.count:,} {g.name}" for g in p.planned[0].scenario.cluster.groups
        ),
        workloads=tuple(WorkloadResult(q.workload.name, q.prediction, q.headroom, None)
                        for q in p.planned),
        ranges={}, costs={}, cash_flow=(), present_cost=None, violations=(), missing=p.missing,
        rated_power_w=0.0, headroom=min(q.headroom for q in p.planned), finish_s=None, spares=0,
        busy=None, demand_met=None, checkpoint_interval_s=None, goodput_runs=None,
        break_even_hours_per_year=None,
    )  # fmt: skip
