"""Bubble fractions that papers publish, from both evaluators."""

from __future__ import annotations

import pytest

from simulator.evaluate.closed_form import closed_form
from simulator.evaluate.engine import simulate_step
from simulator.evaluate.uniform import Kinds, UniformPipeline, uniform_pipeline_s
from simulator.graph.build import build_step
from tests.synthetic import chunk, class_times, layout

SHAPES = [(1, 4), (2, 2), (4, 4), (4, 16), (8, 8), (8, 64)]


def step_times(schedule: str, pp: int, vpp: int, m: int, w: float = 1.0) -> tuple[float, ...]:
    """Step (s) by engine, closed form and formula; a micro-batch takes 1 + 1 + w s per rank."""
    plan = layout(m, pp=pp, vpp=vpp, schedule=schedule)
    times = [class_times([chunk(1 / vpp, 1 / vpp, w / vpp)] * vpp)] * pp
    kinds = [Kinds(t / vpp, t / vpp, t / vpp) for t in (1.0, 1.0, w)]
    return (
        simulate_step(build_step(plan, times)).step_time_s,
        closed_form(plan, times).step_time_s,
        float(uniform_pipeline_s(schedule, UniformPipeline(*kinds), pp, vpp, m)),
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_gpipe_and_1f1b(schedule: str, pp: int, m: int) -> None:
    """arXiv 2104.04473 section 2.2.1: bubble over ideal time is (p - 1) / m."""
    for step in step_times(schedule, pp, 1, m):
        assert 1 - 3 * m / step == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (4, 2, 16), (4, 3, 8), (8, 4, 32)])
def test_interleaved(pp: int, vpp: int, m: int) -> None:
    """arXiv 2104.04473 section 2.2.2: bubble over ideal time is (p - 1) / (v m)."""
    for step in step_times("interleaved", pp, vpp, m):
        assert step / (3 * m) - 1 == pytest.approx((pp - 1) / (vpp * m))


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("w", [1.0, 0.5])
def test_zb_h1(pp: int, m: int, w: float) -> None:
    """arXiv 2401.10241 table 2: ZB-H1's bubble is (p - 1)(T_F + T_B - T_W), T_B input gradient."""
    zb = step_times("zb-h1", pp, 1, m, w)
    for step, plain in zip(zb, step_times("1f1b", pp, 1, m, w), strict=True):
        assert step - (2 + w) * m == pytest.approx((pp - 1) * (2 - w))
        assert step < plain
