"""Goodput: intervals, closed form, simulation, and Meta's published run."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.analysis.failure_runs import best_interval_by_simulation, simulate_failures
from simulator.analysis.goodput import (
    Reliability,
    best_goodput,
    checkpoint_bytes,
    daly_interval_s,
    erlang_b,
    expected_goodput,
    interruptions_per_s,
    spares_that_pay,
    straggler_slowdown,
    wait_per_interruption_s,
    young_interval_s,
)

YEAR_S = 365.25 * 86_400


def test_young_and_daly_intervals() -> None:
    # delta 60 s, M 24 h: sqrt(2 * 60 * 86400) = 3219.9; Daly's correction by hand: + 20.0 ... - 60.
    assert float(young_interval_s(60, 86_400)) == pytest.approx(3219.94, abs=0.01)
    ratio = 60 / (2 * 86_400)
    by_hand = 3219.938 * (1 + ratio**0.5 / 3 + ratio / 9) - 60
    assert float(daly_interval_s(60, 86_400)) == pytest.approx(by_hand, abs=0.01)
    assert float(daly_interval_s(100, 40)) == 40.0  # delta >= 2 M: Daly takes M


def test_without_interruptions_only_checkpoints_cost() -> None:
    r = Reliability(0.0, checkpoint_s=30.0, restart_s=600.0)
    assert float(expected_goodput(r, 570.0)) == pytest.approx(0.95)


def test_first_order_limit_of_the_closed_form() -> None:
    # Rare interruptions: loss = delta / tau + (tau / 2 + delta + R) / M, Young's expansion.
    r = Reliability(1e-8, checkpoint_s=10.0, restart_s=300.0)
    loss = 10 / 4000 + (4000 / 2 + 10 + 300) * 1e-8
    assert 1 - float(expected_goodput(r, 4000.0)) == pytest.approx(loss, rel=0.01)


def test_daly_s_interval_is_the_best_of_the_closed_form() -> None:
    r = Reliability(1 / 7200, checkpoint_s=45.0, restart_s=300.0)
    best, share = best_goodput(r)
    grid = np.linspace(50, 5000, 2000)
    assert float(share) == pytest.approx(float(expected_goodput(r, grid).max()), abs=2e-5)
    assert float(best) == pytest.approx(float(grid[expected_goodput(r, grid).argmax()]), rel=0.03)


def test_erlang_b_of_a_telephone_table() -> None:
    # 5 erlangs on 10 lines: 1.84 % (any Erlang B table).
    assert float(erlang_b(10, 5.0)) == pytest.approx(0.0184, abs=5e-5)
    assert float(erlang_b(0, 5.0)) == 1.0


def test_without_spares_every_exchange_waits_for_the_repair() -> None:
    r = Reliability(1e-6, 0.0, 0.0, swap_share=0.25, repair_s=86_400, spares=0)
    assert float(wait_per_interruption_s(r)) == pytest.approx(0.25 * 86_400)


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_simulation_agrees_with_the_closed_form_over_long_runs(spares: int) -> None:
    r = Reliability(1e-5, 60.0, 600.0, swap_share=0.3, repair_s=172_800.0, spares=spares)
    interval, expected = best_goodput(r)
    runs = simulate_failures(r, float(interval), 400 * 86_400.0, n_runs=200, seed=1)
    assert runs.goodput.mean() == pytest.approx(float(expected), abs=0.006)


def test_simulated_interruptions_are_poisson() -> None:
    r = Reliability(1 / 36_000, 0.0, 60.0)
    runs = simulate_failures(r, 600.0, 100 * 86_400.0, n_runs=300)
    mean = (runs.wall_s / 36_000).mean()
    assert runs.interruptions.mean() == pytest.approx(mean, rel=0.02)
    assert runs.interruptions.var() == pytest.approx(mean, rel=0.25)


def test_best_interval_by_simulation_is_near_daly_s() -> None:
    r = Reliability(1 / 7200, checkpoint_s=60.0, restart_s=300.0)
    interval, share = best_goodput(r)
    found, simulated = best_interval_by_simulation(r, float(interval), 20 * 86_400.0, n_runs=60)
    assert 0.5 < found / float(interval) < 2.0
    assert simulated == pytest.approx(float(share), abs=0.01)


def test_meta_s_run_of_54_days() -> None:
    # arXiv 2407.21783 section 3.3.4: 16,384 H100, 54 days, 419 unexpected interruptions (268 of
    # GPUs and their memory, 151 of the rest), over 90 % effective time. Checkpoints of 405e9
    # parameters at the sustained 2 TB/s of its storage (section 3.3.1).
    per_gpu = 268 / (16_384 * 54 * 86_400)
    per_host = 151 / (2_048 * 54 * 86_400)
    rate = interruptions_per_s(16_384, 2_048, per_gpu, per_host)
    assert float(rate) * 54 * 86_400 == pytest.approx(419)
    write = float(checkpoint_bytes(405e9)) / 2e12
    swaps = 0.3 * float(rate)
    spares = spares_that_pay(swaps, 172_800, 2_048)
    r = Reliability(float(rate), write, 600.0, 0.3, 172_800.0, spares)
    interval, expected = best_goodput(r)
    runs = simulate_failures(r, float(interval), 54 * 86_400 * float(expected), n_runs=200)
    assert 0.90 < float(expected) < 0.95
    assert runs.goodput.mean() == pytest.approx(float(expected), abs=0.005)
    assert runs.interruptions.mean() == pytest.approx(419, rel=0.02)
    assert np.percentile(runs.goodput, 5) > 0.90


def test_price_list_s_rates_are_meta_s() -> None:
    from hardware_db.price_list import price

    gpu = price("reliability", "gpu_failures_per_year").value
    host = price("reliability", "host_failures_per_year").value
    assert (gpu * 16_384 + host * 2_048) * 54 / 365.25 == pytest.approx(419, rel=1e-3)


def test_stragglers_slow_large_jobs_down() -> None:
    assert float(straggler_slowdown(1, 0.02)) == 1.0
    # The largest of 1,000 normals is 3.24 standard deviations out on average (order statistics).
    assert float(np.log(straggler_slowdown(1000, 0.01))) == pytest.approx(0.0324, abs=2e-4)


def test_simulation_is_reproducible() -> None:
    r = Reliability(1 / 7200, 60.0, 300.0, 0.3, 86_400.0, 1)
    one = simulate_failures(r, 900.0, 86_400.0, n_runs=20, seed=5)
    two = simulate_failures(r, 900.0, 86_400.0, n_runs=20, seed=5)
    assert np.array_equal(one.wall_s, two.wall_s)


def test_a_hopeless_run_ends() -> None:
    r = Reliability(1.0, checkpoint_s=60.0, restart_s=60.0)
    assert float(expected_goodput(r, 600.0)) == pytest.approx(0.0, abs=1e-12)
