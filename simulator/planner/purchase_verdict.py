"""The verdict of a purchase in two sentences."""

from __future__ import annotations

from collections.abc import Callable

from simulator.analysis.prediction import Range
from simulator.planner.purchase_result import CandidateResult, PurchaseResult
from simulator.units import format_seconds

_WORDS = {
    "cost_per_1e9_tokens": "10^9 tokens cost",
    "total_cost": "it costs",
    "time_to_train_s": "training takes",
    "energy_kwh": "a run uses",
}


def amount_text(value: float, objective: str, currency: str) -> str:
    """A quantity of an objective with its unit."""
    if objective == "time_to_train_s":
        return format_seconds(value)
    if objective == "energy_kwh":
        return f"{significant(value)} kWh"
    return f"{compact(value)} {currency}"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many digits that count and thousands apart: 12,300 or 0.0123."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10 ** (digits - 1):
        return f"{rounded:,.0f}"
    return f"{rounded:.{digits}g}"


def compact(value: float, digits: int = 3) -> str:
    """As :func:`significant`, with M and bn for millions and thousands of millions."""
    for scale, unit in ((1e9, " bn"), (1e6, " M")):
        if abs(value) >= scale:
            return f"{float(f'{value / scale:.{digits}g}'):,g}{unit}"
    return significant(value, digits)


def range_text(r: Range, show: Callable[[float], str]) -> str:
    """Median and, in brackets, tenth to ninetieth percentile; a common unit only once."""
    low, middle, high = show(r.p10), show(r.p50), show(r.p90)
    if low == middle == high:
        return middle
    unit = middle.rpartition(" ")[2]
    if " " in middle and low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = low[: -len(unit) - 1], high[: -len(unit) - 1]
    return f"{middle} ({low} to {high})"


def verdict(result: PurchaseResult) -> str:
    """What to do and how sure that is; then what would change it."""
    feasible = result.feasible
    if not feasible:
        return _nothing_works(result)
    best = feasible[0]
    first = _first_sentence(result, best)
    return f"{first} {_second_sentence(result)}"


def _first_sentence(result: PurchaseResult, best: CandidateResult) -> str:
    found = best.ranges[result.objective]
    spread = _spread(found, result)
    text = f"Choose {best.name!r}: {_WORDS[result.objective]} {spread}"
    if len(result.feasible) < 2:
        others = len(result.candidates) - 1
        if others == 0:
            return f"{text}."
        if others == 1:
            return f"{text}; the other candidate doesn't do what is asked."
        return f"{text}; none of the other {others} does what is asked."
    second = result.feasible[1]
    ratio = found.p50 / second.ranges[result.objective].p50
    chance = next(
        (c.probability for c in result.comparisons if (c.a, c.b) == (best.name, second.name)), 0.5
    )
    return (
        f"{text}, {_less(ratio)} the next best, {second.name!r}, which it beats with a probability "
        f"of {_chance(chance)}."
    )


def _less(ratio: float) -> str:
    share = 100 * (1 - ratio)
    return f"{share:.0f} % below" if share >= 1 else "about as much as"


def _chance(p: float) -> str:
    return f"{100 * min(max(p, 0.01), 0.99):.0f} %"


def _spread(r: Range, result: PurchaseResult) -> str:
    return range_text(r, lambda v: amount_text(v, result.objective, result.currency))


def _second_sentence(result: PurchaseResult) -> str:
    widest = result.tornado[0].name if result.tornado else ""
    if len(result.feasible) < 2:
        return _without_rival(result, widest)
    rivals = f"{result.feasible[0].name!r} and {result.feasible[1].name!r}"
    inside = [b for b in result.break_even if b.inside]
    if inside:
        turn = inside[0]
        way = "above" if turn.value > turn.median else "below"
        unit = next((a.unit for a in result.assumptions if a.name == turn.name), "")
        return (
            f"{rivals} change places if the {turn.name} is {way} "
            f"{f'{significant(turn.value)} {unit}'.strip()} (taken as {significant(turn.median)})."
        )
    return (
        f"No single input within its range makes {rivals} change places; the {widest} matters most."
    )


def _without_rival(result: PurchaseResult, widest: str) -> str:
    """The nearest of the others and what it breaks; what the figure itself hangs on."""
    hangs = f"the figure depends most on the {widest}" if widest else "nothing in it is unsure"
    if len(result.candidates) < 2:
        return f"{hangs[0].upper()}{hangs[1:]}."
    other = result.candidates[1]
    why = other.missing or f"it {' and '.join(other.violations)}"
    return f"Nearest is {other.name!r}, but {why}; {hangs}."


def _nothing_works(result: PurchaseResult) -> str:
    count = len(result.candidates)
    nearest = result.candidates[0] if result.candidates else None
    if nearest is None:
        return "No mix of the given nodes fits the budget. Raise it, or name cheaper nodes."
    why = nearest.missing or "it " + " and ".join(nearest.violations)
    return f"None of the {count} candidates does what is asked. Nearest is {nearest.name!r}: {why}."
