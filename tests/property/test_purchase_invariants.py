"""What must hold for every purchase, whatever its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.analysis.candidate_cost import Sheet, evaluate_candidate
from simulator.analysis.goodput import Reliability, best_goodput, expected_goodput
from simulator.analysis.uncertain import Uncertain, draw
from simulator.report.purchase_figures import pareto
from tests.purchases import TERMS, facts, inputs, nodes, work

HOWS = st.sampled_from(["bought", "kept", "reserved", "on-demand", "spot"])
FACTOR = st.floats(1.0, 20.0)


@st.composite
def candidates(draw_: st.DrawFn) -> Any:
    parts = tuple(nodes(draw_(HOWS), draw_(st.integers(1, 500))) for _ in range(2))
    runs = draw_(st.one_of(st.none(), st.floats(0.01, 1e4)))
    job = work(rate=draw_(st.floats(1e2, 1e8)), runs_per_year=runs)
    return facts(*parts, years=draw_(st.floats(0.1, 10.0)), work=job,
                 spares=draw_(st.integers(0, 3)), owned=(nodes("kept"),),
                 owned_age_years=draw_(st.floats(0.0, 9.0)))  # fmt: skip


VALUES = st.fixed_dictionaries(
    {
        "price": st.floats(1e3, 1e6),
        "rent": st.floats(0.01, 20.0),
        "electricity": st.floats(0.0, 1.0),
        "utilisation": st.floats(0.01, 1.0),
        "gpu_failures_per_year": st.floats(0.0, 3.0),
        "host_failures_per_year": st.floats(0.0, 10.0),
        "financing_rate": st.floats(0.0, 0.3),
        "gpu_speed_sigma": st.floats(0.0, 0.05),
        "resale": st.floats(0.0, 2.0),
    }
)


def sheet_of(candidate: Any, values: dict[str, float], **changes: float) -> Sheet:
    return evaluate_candidate(candidate, TERMS, inputs(**{**values, **changes}))


@given(candidates(), VALUES)
@settings(max_examples=80, deadline=None)
def test_results_are_finite(candidate: Any, values: dict[str, float]) -> None:
    sheet = sheet_of(candidate, values)
    numbers = [sheet.total_cost, sheet.tokens, sheet.run_time_s, sheet.run_energy_kwh, sheet.flops]
    numbers += [sheet.goodput, sheet.busy, sheet.cost_per_1e9_tokens, *sheet.costs.values()]
    assert np.isfinite(np.array([float(n) for n in numbers])).all()


@given(candidates(), VALUES, FACTOR)
@settings(max_examples=60, deadline=None)
def test_dearer_power_never_lowers_cost(candidate: Any, values: dict[str, float], f: float) -> None:
    dearer = sheet_of(candidate, values, electricity=values["electricity"] * f)
    assert float(dearer.total_cost) >= float(sheet_of(candidate, values).total_cost)


@given(candidates(), VALUES, FACTOR)
@settings(max_examples=60, deadline=None)
def test_a_dearer_price_never_lowers_cost(
    candidate: Any, values: dict[str, float], f: float
) -> None:
    cheap = sheet_of(candidate, values)
    dear = sheet_of(candidate, values, price=values["price"] * f, rent=values["rent"] * f)
    assert float(dear.total_cost) >= float(cheap.total_cost) * (1 - 1e-12)


@given(candidates(), VALUES, FACTOR)
@settings(max_examples=60, deadline=None)
def test_more_failures_never_raise_goodput_or_tokens(
    candidate: Any, values: dict[str, float], f: float
) -> None:
    worse = {k: values[k] * f for k in ("gpu_failures_per_year", "host_failures_per_year")}
    before, after = sheet_of(candidate, values), sheet_of(candidate, values, **worse)
    assert float(after.goodput) <= float(before.goodput) + 1e-6
    assert float(after.run_time_s) >= float(before.run_time_s) * (1 - 1e-6)


@given(candidates(), VALUES, st.floats(1.0, 3.0))
@settings(max_examples=40, deadline=None)
def test_a_faster_machine_is_never_dearer_per_token(
    candidate: Any, values: dict[str, float], f: float
) -> None:
    slow, fast = sheet_of(candidate, values), sheet_of(candidate, values, speed=f)
    if float(slow.total_cost) > 0:
        assert float(fast.cost_per_1e9_tokens) <= float(slow.cost_per_1e9_tokens) * (1 + 1e-9)


@given(
    st.floats(1e-9, 1e-2), st.floats(0.1, 600.0), st.floats(1.0, 3600.0), FACTOR,
    st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_goodput_is_a_share_and_falls_with_every_loss(
    rate: float, checkpoint: float, restart: float, f: float, spares: int
) -> None:
    base = Reliability(rate, checkpoint, restart, 0.3, 86_400.0, spares)
    interval, share = best_goodput(base)
    assert 0.0 <= float(share) <= 1.0
    for worse in (
        Reliability(rate * f, checkpoint, restart, 0.3, 86_400.0, spares),
        Reliability(rate, checkpoint * f, restart, 0.3, 86_400.0, spares),
        Reliability(rate, checkpoint, restart * f, 0.3, 86_400.0, spares),
        Reliability(rate, checkpoint, restart, 0.3, 86_400.0 * f, spares),
    ):
        assert float(expected_goodput(worse, interval)) <= float(share) + 1e-9


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_draws_stay_finite_and_not_negative(a: float, b: float, c: float, seed: int) -> None:
    low, middle, high = sorted([a, b, c])
    drawn = draw({"x": Uncertain(low, middle, high)}, 100, seed)["x"]
    assert np.isfinite(drawn).all()
    assert (drawn >= 0.0).all()


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=30))
def test_no_point_beats_one_on_the_front(points: list[tuple[float, float]]) -> None:
    for index in pareto(points):
        x, y = points[index]
        assert not any((p < x and q <= y) or (p <= x and q < y) for p, q in points)
