"""What a cluster costs: pure formulas over numbers or arrays that broadcast.

Money is in one currency of the caller's choice, time in seconds or, where contracts count them, in
years, months and hours (the name says which), power in watts, energy in kWh. None of the functions
knows what is uncertain: arrays of draws go through them as numbers do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

HOURS_PER_YEAR = 8766.0  # 365.25 days
SECONDS_PER_YEAR = HOURS_PER_YEAR * 3600.0
MONTHS_PER_YEAR = 12
JOULES_PER_KWH = 3.6e6
#: Floating-point operations of one PFLOP/s kept up for a day.
FLOPS_PER_PFLOP_DAY = 1e15 * 86_400


def annuity_per_month(principal: ArrayLike, rate_per_year: ArrayLike, years: ArrayLike) -> Numbers:
    """Equal monthly payment that repays a loan: P i / (1 - (1 + i)^-n), i the monthly rate.

    Without interest it is P / n. ``years`` must be positive (the textbook annuity formula, for
    example Brealey, Myers, Allen: Principles of Corporate Finance, chapter 2).
    """
    p, rate, n = _arrays(principal, np.divide(rate_per_year, MONTHS_PER_YEAR),
                         np.multiply(years, MONTHS_PER_YEAR))  # fmt: skip
    # -expm1(-n log1p(i)) is 1 - (1 + i)^-n without the cancellation at small rates.
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = rate / -np.expm1(-n * np.log1p(rate))
    return np.asarray(p * np.where(rate > 0, factor, 1.0 / n))


def interest_paid(principal: ArrayLike, rate_per_year: ArrayLike, years: ArrayLike) -> Numbers:
    """Interest over the whole term of a loan repaid by equal monthly payments; 0 for 0 years."""
    p, rate, term = _arrays(principal, rate_per_year, years)
    months = np.maximum(term, 1.0 / MONTHS_PER_YEAR) * MONTHS_PER_YEAR
    total = annuity_per_month(p, rate, months / MONTHS_PER_YEAR) * months
    return np.asarray(np.where(term > 0, total - p, 0.0))


def balance_after(
    principal: ArrayLike, rate_per_year: ArrayLike, years: ArrayLike, paid_years: ArrayLike
) -> Numbers:
    """What is still owed after ``paid_years`` of monthly payments on a loan of ``years``."""
    p, rate, term, paid = _arrays(principal, rate_per_year, years, paid_years)
    i = rate / MONTHS_PER_YEAR
    k = np.minimum(paid, term) * MONTHS_PER_YEAR
    payment = annuity_per_month(p, rate, np.maximum(term, 1.0 / MONTHS_PER_YEAR))
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = np.where(i > 0, np.expm1(k * np.log1p(i)) / i, k)
    left = p * np.exp(k * np.log1p(i)) - payment * grown
    return np.asarray(np.where(term > 0, np.maximum(left, 0.0), 0.0))


def resale_share(
    age_years: ArrayLike, curve_years: Sequence[float], curve_shares: Sequence[float]
) -> Numbers:
    """Share of the purchase price that hardware of an age still brings.

    Linear between the points of the curve; before the first and after the last, the nearest.
    """
    return np.asarray(np.interp(np.asarray(age_years, float), curve_years, curve_shares))


def power_w(idle_w: ArrayLike, limit_w: ArrayLike, load: ArrayLike) -> Numbers:
    """Draw of a device at a load from 0 (idle) to 1 (limit): linear between the two.

    Measured GPU draw rises roughly linearly with the share of time that kernels run (for example
    arXiv 2412.08602, figures of an 8 x H100 node).
    """
    idle, limit, share = _arrays(idle_w, limit_w, load)
    return np.asarray(idle + (limit - idle) * np.clip(share, 0.0, 1.0))


def mean_power_w(busy_w: ArrayLike, idle_w: ArrayLike, utilisation: ArrayLike) -> Numbers:
    """Mean draw of something that is busy ``utilisation`` of the time and idle the rest."""
    busy, idle, share = _arrays(busy_w, idle_w, utilisation)
    return np.asarray(share * busy + (1.0 - share) * idle)


def energy_kwh(it_power_w: ArrayLike, time_s: ArrayLike, pue: ArrayLike) -> Numbers:
    """Energy at the meter: IT power x time x PUE."""
    power, time, factor = _arrays(it_power_w, time_s, pue)
    return np.asarray(power * time * factor / JOULES_PER_KWH)


def co2_kg(energy: ArrayLike, grams_per_kwh: ArrayLike) -> Numbers:
    """Emissions of an energy (kWh) at a grid's intensity."""
    return np.asarray(np.multiply(energy, grams_per_kwh) / 1000.0)


def hosting_cost(rated_w: ArrayLike, per_kw_month: ArrayLike, years: ArrayLike) -> Numbers:
    """Room and cooling plant, paid by contracted (rated) kW whether used or not."""
    watts, rate, time = _arrays(rated_w, per_kw_month, years)
    return np.asarray(watts / 1000.0 * rate * time * MONTHS_PER_YEAR)


def rent_cost(per_gpu_hour: ArrayLike, n_gpus: ArrayLike, hours: ArrayLike) -> Numbers:
    """Rented GPUs for some hours."""
    rate, count, time = _arrays(per_gpu_hour, n_gpus, hours)
    return np.asarray(rate * count * time)


def mix_rate(weights: Sequence[float], rates: Sequence[ArrayLike]) -> Numbers:
    """Tokens per second of a mix of workloads run one after another on the whole cluster.

    ``weights`` are shares of the tokens: the harmonic mean 1 / sum(w_i / r_i).
    """
    total = float(sum(weights))
    slowness = sum(w / total / np.asarray(r, float) for w, r in zip(weights, rates, strict=True))
    return np.asarray(1.0 / slowness)


def cost_per_1e9_tokens(total_cost: ArrayLike, tokens: ArrayLike) -> Numbers:
    """Cost of 10^9 tokens where ``tokens`` were trained for ``total_cost``."""
    return np.asarray(np.divide(total_cost, tokens) * 1e9)


def cost_per_pflop_day(total_cost: ArrayLike, model_flops: ArrayLike) -> Numbers:
    """Cost per delivered PFLOP/s-day; ``model_flops`` counts no recomputation."""
    return np.asarray(np.divide(total_cost, model_flops) * FLOPS_PER_PFLOP_DAY)


def time_to_train_s(tokens: ArrayLike, tokens_per_s: ArrayLike, goodput: ArrayLike) -> Numbers:
    """Wall-clock time of a run: its tokens over the rate that failures leave."""
    amount, rate, share = _arrays(tokens, tokens_per_s, goodput)
    return np.asarray(amount / (rate * share))


def idle_cost(fixed_cost: ArrayLike, utilisation: ArrayLike) -> Numbers:
    """What the unused time costs: its share of all that is paid whether used or not."""
    return np.asarray(np.multiply(fixed_cost, 1.0 - np.asarray(utilisation, float)))


def break_even_hours(
    owned_fixed: ArrayLike, owned_per_hour: ArrayLike, rented_per_hour: ArrayLike
) -> Numbers:
    """Busy hours from which owning is cheaper than renting on demand.

    ``owned_fixed`` is all that owning costs before an hour is used (purchase less resale,
    hosting, ...), the others what a busy hour costs in each case; -1 where renting is never dearer.
    """
    fixed, own, rent = _arrays(owned_fixed, owned_per_hour, rented_per_hour)
    gap = rent - own
    safe = np.where(gap > 0, gap, 1.0)
    return np.asarray(np.where(gap > 0, np.maximum(fixed, 0.0) / safe, -1.0))


def present_value(
    cash_flows: ArrayLike, rate_per_year: ArrayLike, month: Sequence[float]
) -> Numbers:
    """Value today of payments at the end of some months, along the last axis.

    ``cash_flows`` has shape (..., payments), ``month`` (payments,): sum c_k / (1 + r)^(month / 12).
    """
    flows = np.asarray(cash_flows, float)
    rate = np.asarray(rate_per_year, float)[..., None]
    years = np.asarray(month, float) / MONTHS_PER_YEAR
    return np.asarray((flows * np.exp(-years * np.log1p(rate))).sum(axis=-1))


def _arrays(*values: ArrayLike) -> tuple[Numbers, ...]:
    return tuple(np.asarray(value, dtype=np.float64) for value in values)
