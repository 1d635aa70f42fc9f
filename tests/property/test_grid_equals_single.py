"""A plan priced in a grid is what it is alone: memory exactly, step time within 2 %."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.analysis.predict import evaluate, layout_risk
from simulator.cost.memory import layout_breakdown
from simulator.cost.pricing import price_layout
from simulator.planner.grid import GridPricer
from simulator.planner.plan_grid import PlanGrid, joined
from simulator.planner.space import Space, default_axes
from simulator.spec.layout import Layout, build_layout
from simulator.spec.plan import Plan
from simulator.spec.resolve_plan import Case
from simulator.spec.scenario import scenario_from_mapping

#: The grid's pipeline formula against the exact recurrence; single cases with few micro-batches
#: and many model chunks may be off by a little more.
TIME_TOLERANCE, WORST_TOLERANCE = 0.02, 0.04
ROWS = 12

CASES = {
    "dense pipelines": ("llama-3.1-70b", "megatron-core", 8192, 256, 8),
    "uneven stages": ({"base": "llama-3.1-8b", "layers": 30}, "torchtitan", 8192, 64, 4),
    "experts": ("mixtral-8x7b", "megatron-core", 4096, 128, 8),
    "dense and expert layers": ("deepseek-v2", "megatron-core", 4096, 128, 16),
    "layered": ("llama-3.1-8b", "gpumix", 2048, 64, 2),
    "tied embeddings": ("gpt2-xl", "megatron-deepspeed", 1024, 64, 1),
}


def sample(name: str, where: Any) -> tuple[Case, PlanGrid]:
    """Some legal plans of one of the cases that a mask keeps."""
    model, stack, length, batch, nodes = CASES[name]
    scenario = scenario_from_mapping(
        {
            "model": model,
            "workload": {"sequence_length": length, "global_batch": batch},
            "cluster": {
                "groups": [{"node": "dgx-h100", "count": nodes}],
                "fabric": "ndr-infiniband",
            },
            "stack": stack,
        }
    )
    case = Case(scenario.model, scenario.workload, scenario.cluster, scenario.stack)
    grid = joined(list(Space(case, default_axes(case)).chunks()))
    grid = grid.take(np.flatnonzero(where(grid)))
    rows = np.random.default_rng(5).choice(len(grid), min(ROWS, len(grid)), replace=False)
    return case, grid.take(rows)


def laid(case: Case, plan: Plan) -> Layout:
    return build_layout(case.model, case.workload, case.cluster, plan, case.stack)


def alone_s(case: Case, plan: Plan) -> float:
    layout = laid(case, plan)
    return evaluate(layout, price_layout(layout), "closed form").step_time_s


@pytest.mark.parametrize("name", CASES)
def test_memory_and_risk_are_equal(name: str) -> None:
    case, grid = sample(name, lambda g: g.tp > 0)
    found = GridPricer(case, Plan()).memory(grid)
    for row in range(len(grid)):
        layout = laid(case, grid.plan(row, Plan()))
        peak = layout_breakdown(layout).peak_allocated_bytes.max()
        assert found.peak_allocated_bytes[row] == pytest.approx(peak, rel=1e-12)
        assert found.oom_risk[row] == pytest.approx(layout_risk(layout).oom_risk.max(), abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_without_stages_the_step_is_exact(name: str) -> None:
    case, grid = sample(name, lambda g: (g.pp == 1) & (g.ep <= 8))
    found = GridPricer(case, Plan()).step_time_s(grid)
    for row in range(len(grid)):
        assert found[row] == pytest.approx(alone_s(case, grid.plan(row, Plan())), rel=1e-6)


@pytest.mark.parametrize("name", [n for n in CASES if n != "layered"])
def test_pipelines_follow_the_recurrence(name: str) -> None:
    case, grid = sample(name, lambda g: (g.pp > 1) & (g.pp * g.vpp <= 16))
    found = GridPricer(case, Plan()).step_time_s(grid)
    alone = np.array([alone_s(case, grid.plan(row, Plan())) for row in range(len(grid))])
    errors = np.abs(found / alone - 1.0)
    assert np.percentile(errors, 90) < TIME_TOLERANCE
    assert errors.max() < WORST_TOLERANCE


def test_stopping_at_a_risk_finds_the_same_plans() -> None:
    case, grid = sample("dense pipelines", lambda g: g.pp > 1)
    pricer = GridPricer(case, Plan())
    whole, stopped = pricer.memory(grid), pricer.memory(grid, stop_at_risk=0.05)
    np.testing.assert_array_equal(whole.oom_risk <= 0.05, stopped.oom_risk <= 0.05)
    fits = whole.oom_risk <= 0.05
    np.testing.assert_array_equal(whole.needed_bytes[fits], stopped.needed_bytes[fits])


def test_options_outside_the_grid_count_too() -> None:
    case, grid = sample("dense pipelines", lambda g: g.pp == 1)
    like = Plan(precision="fp8", offload="optimizer", attention="flash3")
    pricer = GridPricer(case, like)
    time, memory = pricer.step_time_s(grid), pricer.memory(grid)
    plan = grid.plan(0, like)
    assert time[0] == pytest.approx(alone_s(case, plan), rel=1e-6)
    peak = layout_breakdown(laid(case, plan)).peak_allocated_bytes.max()
    assert memory.peak_allocated_bytes[0] == pytest.approx(peak, rel=1e-12)
