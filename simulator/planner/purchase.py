"""What to buy, rent or keep: plans every candidate, costs it over the draws, ranks, explains."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.assumptions import Assumptions
from simulator.analysis.candidate_cost import Sheet, evaluate_candidate
from simulator.analysis.candidate_facts import Terms
from simulator.analysis.uncertain import (
    BreakEven,
    Inputs,
    Swing,
    break_even,
    draw,
    medians,
    probability_less,
    tornado,
)
from simulator.errors import Problem, UserError
from simulator.planner.budget_search import search_budget
from simulator.planner.old_cluster import old_worth
from simulator.planner.purchase_candidates import Prepared, Workshop
from simulator.planner.purchase_result import (
    CandidateResult,
    Comparison,
    PurchaseResult,
    SearchResult,
)
from simulator.planner.purchase_rows import Costed, candidate_result, unfit_result
from simulator.planner.purchase_verdict import verdict
from simulator.spec.purchase import BudgetSearch, Part, Purchase
from simulator.spec.resolve_purchase import resolve_purchase
from simulator.spec.scenario import Scenario

Numbers = NDArray[np.float64]

#: Quantity that a candidate is ranked by; less is better.
OUTCOMES: Mapping[str, Callable[[Sheet], Numbers]] = {
    "cost_per_1e9_tokens": lambda s: s.cost_per_1e9_tokens,
    "total_cost": lambda s: s.total_cost,
    "time_to_train_s": lambda s: s.run_time_s,
    "energy_kwh": lambda s: s.run_energy_kwh,
}


def evaluate_purchase(
    scenario: Scenario,
    *,
    on: datetime.date | None = None,
    budget: float | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> PurchaseResult:
    """Answer the ``purchase`` section of a scenario.

    ``on`` is the day whose prices count, ``budget`` replaces the budget and, where node types are
    to be searched, what may be spent. ``notify`` is told what is being planned.

    Raises:
        UserError: there is no such section, something in it is impossible or has no price.
    """
    purchase = _with_budget(resolve_purchase(scenario, on), budget)
    assumptions = Assumptions(purchase.economics)
    assumptions.common(purchase.horizon_years)
    workshop = Workshop(scenario, purchase, assumptions, notify)
    prepared = _prepare_all(workshop, purchase)
    terms = _terms(purchase, assumptions)
    outcome = OUTCOMES[purchase.objective]
    found: SearchResult | None = None
    if purchase.search is not None:
        # The cheapest per token would be to buy as little as possible: a budget is for speed.
        aim = OUTCOMES["energy_kwh" if purchase.objective == "energy_kwh" else "time_to_train_s"]
        more, found = search_budget(workshop, purchase.search, terms, aim)
        taken = {p.candidate.name for p in prepared}
        prepared += [p for p in more if p.candidate.name not in taken]
    middle = medians(assumptions.inputs)
    costed = _costed(prepared, terms, purchase, assumptions)
    results = [candidate_result(c, purchase, terms, middle, assumptions) for c in costed]
    results += [unfit_result(p) for p in prepared if p.facts is None]
    ranked = tuple(sorted(results, key=lambda c: _rank(c, purchase.objective)))
    by_name = {c.facts.name: c for c in costed}
    leaders = [by_name[c.name] for c in ranked if c.fits]
    rivals = [by_name[c.name] for c in ranked if c.is_feasible] or leaders[:1]
    lead, swings, turns = _decision(rivals, terms, outcome, assumptions)
    answer = PurchaseResult(
        title=scenario.title,
        verdict="",
        objective=purchase.objective,
        currency=purchase.economics.currency,
        date=purchase.economics.date.isoformat(),
        horizon_years=purchase.horizon_years,
        region=purchase.economics.region,
        candidates=ranked,
        comparisons=_compare(leaders, outcome),
        tornado=swings,
        break_even=turns,
        assumptions=tuple(assumptions.found.values()),
        warnings=_warnings(assumptions),
        defaults=scenario.defaults,
        search=found,
        old_worth=old_worth(workshop, [c.facts for c in leaders], terms, middle),
        workload_names=tuple(w.name for w in purchase.workloads),
        lead=lead,
    )
    return replace(answer, verdict=verdict(answer))


def _costed(
    prepared: Sequence[Prepared], terms: Terms, purchase: Purchase, assumptions: Assumptions
) -> list[Costed]:
    """The sheets of every candidate that fits."""
    inputs = assumptions.inputs
    draws = draw(inputs, purchase.economics.draws, purchase.economics.seed)
    middle = medians(inputs)
    return [
        Costed(
            p,
            p.facts,
            evaluate_candidate(p.facts, terms, draws),
            evaluate_candidate(p.facts, terms, middle),
        )
        for p in prepared
        if p.facts is not None
    ]


def _with_budget(purchase: Purchase, budget: float | None) -> Purchase:
    if budget is None:
        return purchase
    if not 0 < budget <= 1e12:
        raise UserError(Problem("--budget", f"{budget:g} is no budget", "above 0, at most 1e12"))
    search = purchase.search
    if search is None:
        # Every kind of node that some candidate buys is a kind to try.
        parts = {str(p.group.get("node") or p.group): p for c in purchase.candidates for p in c.buy}
        nodes = tuple(Part({**p.group, "count": 1}, p.price) for p in parts.values())[:4]
        keep = purchase.owned is not None
        search = BudgetSearch(budget, nodes, 64, keep) if nodes else None
    else:
        search = replace(search, budget=budget)
    limits = replace(purchase.constraints, budget=budget)
    return replace(purchase, constraints=limits, search=search)


def _prepare_all(workshop: Workshop, purchase: Purchase) -> list[Prepared]:
    """Every candidate; what is wrong with several of them is told together."""
    prepared: list[Prepared] = []
    problems: list[Problem] = []
    for candidate in purchase.candidates:
        try:
            prepared.append(workshop.prepare(candidate))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return prepared


def _terms(purchase: Purchase, assumptions: Assumptions) -> Terms:
    years, shares = assumptions.resale_curve()
    e = purchase.economics
    return Terms(e.financing_years, e.price_change_per_year, years, shares)


def _rank(c: CandidateResult, objective: str) -> tuple[int, float, str]:
    if not c.fits:
        return 2, -c.headroom, c.name
    return (0 if c.is_feasible else 1), c.ranges[objective].p50, c.name


def _compare(
    leaders: Sequence[Costed], outcome: Callable[[Sheet], Numbers]
) -> tuple[Comparison, ...]:
    drawn = [(c.facts.name, outcome(c.drawn)) for c in leaders]
    return tuple(
        Comparison(a, b, probability_less(x, y))
        for i, (a, x) in enumerate(drawn)
        for b, y in drawn[i + 1 :]
    )


def _decision(
    leaders: Sequence[Costed],
    terms: Terms,
    outcome: Callable[[Sheet], Numbers],
    assumptions: Assumptions,
) -> tuple[float, tuple[Swing, ...], tuple[BreakEven, ...]]:
    """What moves the lead of the first over the second (else its own outcome), what ends it."""
    if not leaders:
        return 0.0, (), ()
    first = leaders[0].facts
    second = leaders[1].facts if len(leaders) > 1 else None

    def lead(x: Inputs) -> Numbers:
        own = outcome(evaluate_candidate(first, terms, x))
        if second is None:
            return own
        return np.asarray(outcome(evaluate_candidate(second, terms, x)) - own)

    inputs = assumptions.inputs
    swings = tornado(inputs, lead)
    start = float(lead(medians(inputs)))
    if second is None:
        return start, swings, ()
    turns = [break_even(swing.name, inputs, lead) for swing in swings]
    found = [t for t in turns if t is not None]
    nearest = sorted(found, key=lambda t: (not t.inside, abs(math.log(t.value / t.median))))
    return start, swings, tuple(nearest)


def _warnings(assumptions: Assumptions) -> tuple[str, ...]:
    """Amounts that are more than a year old on the day that counts."""
    old = [a for a in assumptions.found.values() if a.stale]
    if not old:
        return ()
    names = ", ".join(f"{a.name} ({a.date})" for a in old)
    return (f"more than a year old, check them: {names}",)
