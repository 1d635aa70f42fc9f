"""What must hold for every step graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cost.times import ClassTimes
from simulator.evaluate.critical_path import longest_path
from simulator.evaluate.engine import EngineOptions, simulate_step
from simulator.graph.build import build_step
from simulator.spec.layout import Layout
from tests.synthetic import chunk, class_times, layout, unit

SECONDS = st.floats(0.01, 3.0)
QUICK = settings(max_examples=40, deadline=None)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Layout, list[ClassTimes]]:
    """One pipeline of uneven stages with sends and gradient reduction."""
    pp, m = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    times = [
        class_times(
            [chunk(draw(SECONDS), draw(SECONDS), draw(SECONDS), reduce=draw(SECONDS))],
            send=draw(SECONDS) / 5,
            optimizer=draw(SECONDS),
        )
        for _ in range(pp)
    ]
    return layout(m, pp=pp, schedule=schedule), times


@QUICK
@given(pipelines(), st.integers(0, 99))
def test_never_shorter_than_the_critical_path(
    case: tuple[Layout, list[ClassTimes]], seed: int
) -> None:
    graph = build_step(*case)
    critical = longest_path(graph, graph.duration_ns).max() / 1e9
    assert simulate_step(graph).step_time_s == critical
    contended = simulate_step(graph, EngineOptions(seed=seed, contention=True))
    assert contended.step_time_s >= critical


@QUICK
@given(pipelines())
def test_busy_time_is_conserved(case: tuple[Layout, list[ClassTimes]]) -> None:
    """Every rank computes exactly its micro-batches, whatever it waits for."""
    plan, times = case
    result = simulate_step(build_step(plan, times))
    for c, own in enumerate(times):
        piece = own.chunks[0]
        passes = (piece.forward + piece.backward_input + piece.backward_weight).total
        expected = plan.classes[c].micro_batches * passes
        assert result.by_category(c)["compute"] == pytest.approx(float(expected), abs=1e-6)


@QUICK
@given(pipelines(), st.data())
def test_a_slower_gpu_or_link_never_makes_the_step_faster(
    case: tuple[Layout, list[ClassTimes]], data: st.DataObject
) -> None:
    plan, times = case
    before = simulate_step(build_step(plan, times)).step_time_s
    c = data.draw(st.integers(0, len(times) - 1))
    slow = list(times)
    piece = slow[c].chunks[0]
    slow[c] = replace(slow[c], chunks=(replace(piece, forward=piece.forward.scaled(1.5)),))
    assert simulate_step(build_step(plan, slow)).step_time_s >= before
    slow[c] = replace(times[c], send_forward=2 * times[c].send_forward)
    assert simulate_step(build_step(plan, slow)).step_time_s >= before


@QUICK
@given(pipelines(), st.integers(2, 4))
def test_a_homogeneous_plan_written_as_a_mixed_one_is_the_same(
    case: tuple[Layout, list[ClassTimes]], copies: int
) -> None:
    plan, times = case
    m, pp = plan.classes[0].micro_batches, len(times)
    mixed = layout([m] * copies, pp=pp, schedule=plan.plan.schedule)
    one = simulate_step(build_step(plan, times))
    many = simulate_step(build_step(mixed, times * copies))
    assert many.step_time_s == one.step_time_s
    assert many.seconds[:pp] == pytest.approx(one.seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("position", range(4))
def test_a_slow_gpu_in_any_position_sets_the_pace(schedule: str, position: int) -> None:
    """With many micro-batches the step tends to the slow stage's work, wherever it is."""
    times = [class_times([chunk(1, 1, 1)])] * 4
    times[position] = class_times([chunk(2, 2, 2)])
    step = simulate_step(build_step(layout(64, pp=4, schedule=schedule), times)).step_time_s
    assert 64 * 6 <= step <= 64 * 6 + 3 * 3 + 2 * 2


@pytest.mark.parametrize("schedule", ["1f1b", "layered"])
@pytest.mark.parametrize("position", range(3))
def test_a_slow_gpu_among_sharded_ranks(schedule: str, position: int) -> None:
    fast = class_times([chunk(1, 1)], units=[unit("layer", 6, 1, 2, 0.5, 0.5)])
    times = [fast] * 3
    times[position] = class_times([chunk(1, 1)], units=[unit("layer", 6, 2, 4, 0.5, 0.5)])
    result = simulate_step(build_step(layout([4] * 3, schedule=schedule), times))
    assert 4 * 36 <= result.step_time_s <= 4 * 36 * 1.1
    waits = [result.by_category(c)["bubble"] for c in range(3)]
    assert waits.index(min(waits)) == position


@QUICK
@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_layered_work_is_conserved_over_uneven_micro_batches(
    repeat: int, counts: list[int], data: st.DataObject
) -> None:
    units = [
        [unit("layer", repeat, data.draw(SECONDS), data.draw(SECONDS), 0.1, 0.1)] for _ in counts
    ]
    times = [class_times([chunk(1, 1)], units=u) for u in units]
    result = simulate_step(build_step(layout(counts, schedule="layered"), times))
    for c, (m, u) in enumerate(zip(counts, units, strict=True)):
        expected = m * repeat * float((u[0].forward + u[0].backward).total)
        assert result.by_category(c)["compute"] == pytest.approx(expected, abs=1e-6)
