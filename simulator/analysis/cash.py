"""A candidate's payments over the horizon: what leaves and what comes back, by month."""

from __future__ import annotations

from simulator.analysis import economics as eco
from simulator.analysis.assumptions import PLAIN
from simulator.analysis.candidate_cost import Sheet
from simulator.analysis.candidate_facts import CandidateFacts, Terms
from simulator.analysis.uncertain import Inputs

#: Components of a sheet that are paid as time goes by.
RUNNING = ("hosting", "electricity", "maintenance", "staff", "rent")


def cash_flow(
    facts: CandidateFacts, terms: Terms, sheet: Sheet, x: Inputs
) -> tuple[tuple[float, float], ...]:
    """(month, payment) at the medians; income is positive; months count from today.

    Running costs are paid evenly by the quarter, a loan by the quarter, what is bought and sold
    when it changes hands, and what is left is sold at the end of the horizon. The sum is what the
    standing cluster would bring today less the sheet's total cost.
    """
    months = facts.horizon_years * eco.MONTHS_PER_YEAR
    start = facts.wait_years * eco.MONTHS_PER_YEAR
    payments: dict[float, float] = {}

    def pay(month: float, amount: float) -> None:
        payments[round(month, 6)] = payments.get(round(month, 6), 0.0) + amount

    pay(0.0, 0.0)
    pay(start, float(sheet.sale))
    running = sum(float(sheet.costs[name]) for name in RUNNING)
    _spread(pay, 0.0, months, -running)
    upfront = float(sheet.upfront)
    term = min(terms.financing_years * eco.MONTHS_PER_YEAR, months - start)
    if term > 0 and upfront > 0:
        rate = float(x[PLAIN["financing_rate"][1]])
        monthly = float(eco.annuity_per_month(upfront, rate, terms.financing_years))
        owed = float(eco.balance_after(upfront, rate, terms.financing_years, term / 12.0))
        _spread(pay, start, start + term, -monthly * term)
        pay(start + term, -owed)
    else:
        pay(start, -upfront)
    left = -float(sheet.costs["resale"]) + _kept_at_end(facts, sheet)
    pay(months, left)
    return tuple(sorted(payments.items()))


def _kept_at_end(facts: CandidateFacts, sheet: Sheet) -> float:
    """What the kept nodes are worth at the end, from what they lose."""
    return float(sheet.owned_value - sheet.sale - sheet.costs["value lost by what stood"])


def _spread(pay: object, first: float, last: float, amount: float) -> None:
    """Pay an amount in equal rates at the end of each quarter, the last one shorter."""
    assert callable(pay)
    span = last - first
    if span <= 0:
        return
    month = first
    while month < last - 1e-9:
        end = min(month + 3.0, last)
        pay(end, amount * (end - month) / span)
        month = end
