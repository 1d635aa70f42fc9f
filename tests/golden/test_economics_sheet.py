"""A candidate's cost sheet against one worked by hand.

Two nodes of eight GPUs at 300,000 each, two years, half of the time busy; the other values stand in
``tests/purchases.py``. Each expected number is worked in the comment beside it.
"""

from __future__ import annotations

from decimal import Decimal, getcontext

import pytest

from simulator.analysis.candidate_cost import Sheet, evaluate_candidate
from simulator.analysis.cash import cash_flow
from tests.purchases import TERMS, facts, inputs, nodes, work

HOURS = 2 * 8766


@pytest.fixture(scope="module")
def bought() -> Sheet:
    return evaluate_candidate(facts(), TERMS, inputs())


def _loan_interest() -> float:
    """690,000 over 24 months at half a per cent a month, in decimal arithmetic."""
    getcontext().prec = 30
    growth = Decimal("1.005") ** 24
    payment = Decimal(690_000) * Decimal("0.005") * growth / (growth - 1)
    return float(payment * 24 - 690_000)


@pytest.mark.parametrize(
    ("component", "by_hand"),
    [
        ("hardware", 600_000.0),  # 2 x 300,000
        ("network", 60_000.0),  # 10 % of it
        ("installation", 30_000.0),  # 5 % of it
        ("interest", _loan_interest()),  # 43,949: 24 payments of 30,581.22 less 690,000
        ("resale", -300_000.0),  # half of 600,000 after two years
        ("hosting", 36_480.0),  # 2 x 7.6 kW x 100 x 24 months
        # Busy 2 x (8 x (100 + 600 x 0.8) + 2000) = 13,280 W, idle 2 x (800 + 1000) = 3,600 W;
        # half and half 8,440 W x 17,532 h x 1.5 = 221,955 kWh at 0.10
        ("electricity", 22_195.512),
        ("maintenance", 24_000.0),  # 2 % a year of 600,000
        ("staff", 56_000.0),  # 3 % a year of 600,000 and 10,000 a year
        ("rent", 0.0),
        ("value lost by what stood", 0.0),
    ],
)
def test_components_of_buying(bought: Sheet, component: str, by_hand: float) -> None:
    assert float(bought.costs[component]) == pytest.approx(by_hand, rel=1e-9)


def test_totals_of_buying(bought: Sheet) -> None:
    # 600,000 + 60,000 + 30,000 + 43,949.4 - 300,000 + 36,480 + 22,195.5 + 24,000 + 56,000
    assert float(bought.total_cost) == pytest.approx(572_624.9, abs=0.1)
    # A million tokens a second for half of 2 x 31,557,600 s; checkpoints take some millionths.
    assert float(bought.tokens) == pytest.approx(3.15576e13, rel=1e-5)
    assert float(bought.cost_per_1e9_tokens) == pytest.approx(572_624.9 / 31_557.6, rel=1e-5)
    # 6e9 FLOP a token: 3.15576e13 x 6e9 / 8.64e19 = 2,191.5 PFLOP/s-days
    assert float(bought.cost_per_pflop_day) == pytest.approx(572_624.9 / 2_191.5, rel=1e-5)


def test_one_run(bought: Sheet) -> None:
    assert float(bought.run_time_s) == pytest.approx(10_000.0, rel=1e-5)  # 1e10 / 1e6
    assert float(bought.run_energy_kwh) == pytest.approx(55.3333, rel=1e-4)  # 13.28 x 2.778 x 1.5
    assert float(bought.run_co2_kg) == pytest.approx(22.1333, rel=1e-4)  # at 400 g


def test_reserved_rent_is_paid_all_the_time_and_on_demand_while_used() -> None:
    reserved = evaluate_candidate(facts(nodes("reserved")), TERMS, inputs())
    on_demand = evaluate_candidate(facts(nodes("on-demand")), TERMS, inputs())
    assert float(reserved.total_cost) == pytest.approx(16 * 2.0 * HOURS)  # 561,024
    assert float(on_demand.total_cost) == pytest.approx(16 * 2.0 * HOURS / 2)  # 280,512


def test_keeping_costs_the_value_lost() -> None:
    # Two years old, worth 0.5 x 600,000 today and 0.2 x 600,000 at the end.
    kept = nodes("kept")
    sheet = evaluate_candidate(
        facts(kept, owned=(kept,), owned_age_years=2.0), TERMS, inputs()
    )  # fmt: skip
    assert float(sheet.costs["value lost by what stood"]) == pytest.approx(180_000.0)
    assert float(sheet.upfront) == 0.0


def test_selling_at_once_brings_today_s_value() -> None:
    standing = nodes("kept")
    sheet = evaluate_candidate(
        facts(nodes("reserved"), owned=(standing,), sold=(standing,), owned_age_years=2.0),
        TERMS,
        inputs(),
    )
    assert float(sheet.sale) == pytest.approx(300_000.0)
    assert float(sheet.costs["value lost by what stood"]) == pytest.approx(0.0, abs=1e-6)


def test_fixed_demand_sets_how_long_the_cluster_is_busy() -> None:
    # 1,000 runs of 10,000 s a year: 1e7 of 31,557,600 s.
    wanted = work(runs_per_year=1000.0)
    sheet = evaluate_candidate(facts(work=wanted), TERMS, inputs())
    assert float(sheet.busy) == pytest.approx(1e7 / 31_557_600, rel=1e-5)
    assert float(sheet.demand_met) == 1.0
    assert float(sheet.tokens) == pytest.approx(2e13)
    hard = evaluate_candidate(facts(work=work(runs_per_year=4000.0)), TERMS, inputs())
    assert float(hard.demand_met) == pytest.approx(0.5 * 31_557_600 / 4e7, rel=1e-5)


def test_payments_add_up_to_the_total() -> None:
    kept = nodes("kept", 1)
    candidate = facts(nodes(), kept, owned=(kept,), owned_age_years=2.0, spares=1)
    sheet = evaluate_candidate(candidate, TERMS, inputs())
    paid = sum(amount for _, amount in cash_flow(candidate, TERMS, sheet, inputs()))
    assert paid == pytest.approx(float(sheet.owned_value - sheet.total_cost), rel=1e-9)
