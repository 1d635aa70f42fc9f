"""The cost formulas against textbook values and their own definitions."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.analysis import economics as eco


def test_annuity_of_a_textbook_loan() -> None:
    # 100,000 at 6 % over five years: 1,933.28 a month (any annuity table).
    assert float(eco.annuity_per_month(100_000, 0.06, 5)) == pytest.approx(1933.28, abs=0.005)


def test_a_loan_without_interest_is_paid_in_equal_parts() -> None:
    assert float(eco.annuity_per_month(3600, 0.0, 3)) == pytest.approx(100.0)
    assert float(eco.interest_paid(3600, 0.0, 3)) == pytest.approx(0.0)


def test_balance_of_the_loan_month_by_month() -> None:
    payment, balance = float(eco.annuity_per_month(100_000, 0.06, 5)), 100_000.0
    for _ in range(24):
        balance = balance * 1.005 - payment
    assert float(eco.balance_after(100_000, 0.06, 5, 2)) == pytest.approx(balance)
    assert float(eco.balance_after(100_000, 0.06, 5, 7)) == pytest.approx(0.0, abs=1e-6)


def test_interest_is_what_is_paid_beyond_the_principal() -> None:
    assert float(eco.interest_paid(100_000, 0.06, 5)) == pytest.approx(60 * 1933.2802 - 100_000)
    assert float(eco.interest_paid(100_000, 0.06, 0)) == 0.0


def test_resale_share_between_and_beyond_the_points() -> None:
    years, shares = [0.0, 1.0, 3.0], [0.9, 0.6, 0.3]
    found = eco.resale_share([0.5, 2.0, 9.0], years, shares)
    assert found == pytest.approx([0.75, 0.45, 0.3])


def test_power_energy_and_co2_of_a_day() -> None:
    busy = eco.power_w(100, 700, 0.75)  # 100 + 600 * 0.75
    mean = eco.mean_power_w(busy, 100, 0.8)  # 0.8 * 550 + 0.2 * 100
    energy = eco.energy_kwh(mean, 86_400, 1.5)  # 460 W * 24 h * 1.5
    assert (float(busy), float(mean)) == (550.0, 460.0)
    assert float(energy) == pytest.approx(16.56)
    assert float(eco.co2_kg(energy, 400)) == pytest.approx(6.624)


def test_mix_of_workloads_is_a_harmonic_mean() -> None:
    # Half the tokens at 100 and half at 300 tokens/s: 1 / (0.5 / 100 + 0.5 / 300) = 150.
    assert float(eco.mix_rate([1, 1], [100.0, 300.0])) == pytest.approx(150.0)


def test_costs_per_token_and_per_pflop_day() -> None:
    assert float(eco.cost_per_1e9_tokens(500.0, 2e9)) == pytest.approx(250.0)
    assert float(eco.cost_per_pflop_day(10.0, 2 * 8.64e19)) == pytest.approx(5.0)


def test_break_even_against_renting() -> None:
    # 9,000 fixed and 1 an hour against 4 an hour: equal after 3,000 hours.
    assert float(eco.break_even_hours(9000, 1, 4)) == pytest.approx(3000.0)
    assert float(eco.break_even_hours(9000, 4, 4)) == -1.0


def test_present_value_of_two_payments() -> None:
    value = eco.present_value([-100.0, 121.0], 0.1, [0, 24])
    assert float(value) == pytest.approx(0.0, abs=1e-9)


def test_formulas_broadcast_over_draws() -> None:
    rates = np.array([0.0, 0.05, 0.1])
    payments = eco.annuity_per_month(1000.0, rates, 2)
    assert payments.shape == (3,)
    assert np.all(np.diff(payments) > 0)
