"""The search: what it returns is the best of all plans that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.analysis.predict import predict
from simulator.errors import UserError
from simulator.planner.grid import GridPricer
from simulator.planner.plan_grid import joined
from simulator.planner.search import DOES_NOT_FIT, front_rows, search, smaller
from simulator.planner.space import Space, default_axes
from simulator.planner.tables import Table
from simulator.spec.plan import Plan
from simulator.spec.resolve_plan import Case
from simulator.spec.scenario import Scenario, scenario_from_mapping


def scenario(model: Any = "llama-3.1-8b", nodes: int = 2, **changes: Any) -> Scenario:
    data: dict[str, Any] = {
        "model": model,
        "workload": {"sequence_length": 4096, "global_batch": 64},
        "cluster": {"groups": [{"node": "dgx-a100-40gb", "count": nodes}],
                    "fabric": "hdr-infiniband"},
        "stack": "megatron-core",
    }  # fmt: skip
    return scenario_from_mapping(data | changes)


def test_the_first_plan_is_the_fastest_that_fits() -> None:
    asked = scenario()
    found = search(asked, top=5)
    case = Case(asked.model, asked.workload, asked.cluster, asked.stack)
    grid = joined(list(Space(case, default_axes(case)).chunks()))
    pricer = GridPricer(case, Plan())
    step, risk = pricer.step_time_s(grid), pricer.memory(grid).oom_risk
    fits = risk <= asked.risk
    assert found.fitting == int(fits.sum()) > 0
    assert found.legal == len(grid)
    assert found.left_out[DOES_NOT_FIT] == int((~fits).sum())
    assert found.considered == found.fitting + sum(found.left_out.values())
    # Ranked by formula, then priced alone: within the formula's error of the best.
    assert found.plans[0].step_time_s <= step[fits].min() * 1.02
    times = [p.step_time_s for p in found.plans]
    assert times == sorted(times)
    assert all(p.oom_risk <= asked.risk for p in found.plans)


def test_a_found_plan_is_what_estimate_says() -> None:
    asked = scenario()
    best = search(asked, top=1).plans[0]
    told, _, _ = predict(replace(asked, plan=best.plan), with_suggestions=False)
    assert told.oom_risk == pytest.approx(best.oom_risk, abs=1e-12)
    assert told.tokens_per_s.p50 == pytest.approx(best.tokens_per_s, rel=1e-9)


def test_fixed_fields_and_options_are_kept_to() -> None:
    found = search(
        scenario(), fixed={"tp": 4, "recompute": "full", "sharding": ["zero1"]},
        options={"precision": ["bf16", "fp16"]},
    )  # fmt: skip
    assert {p.plan.tp for p in found.plans} == {4}
    assert {p.plan.recompute.name for p in found.plans} == {"FULL"}
    assert {p.plan.precision for p in found.plans} <= {"bf16", "fp16"}
    with pytest.raises(UserError, match="no option"):
        search(scenario(), options={"colour": ["red"]})


def test_a_lower_risk_never_gives_a_faster_plan() -> None:
    careful, bold = search(scenario(), risk=0.001), search(scenario(), risk=0.4)
    assert careful.fitting <= bold.fitting
    assert careful.plans[0].step_time_s >= bold.plans[0].step_time_s * 0.98


def test_nothing_fits_names_the_plan_nearest_to_fitting() -> None:
    found = search(scenario("llama-3.1-405b", nodes=1))
    assert found.plans == ()
    assert found.least_risky is not None
    assert found.least_risky.headroom < 0
    assert found.least_risky.oom_risk > 0.05


def test_the_front_trades_rate_for_headroom() -> None:
    front = search(scenario()).front
    steps = [p.step_time_s for p in front]
    rooms = [p.headroom for p in front]
    assert len(front) > 1
    assert np.all(np.diff(rooms) > 0)
    # The first may carry the closed form's time instead of the formula's.
    assert np.all(np.diff(steps[1:]) >= -0.02 * np.array(steps[1:-1]))


def test_rows_of_a_front() -> None:
    step = np.array([3.0, 1.0, 2.0, 2.0, 5.0])
    room = np.array([0.3, 0.1, 0.1, 0.2, 0.25])
    assert list(front_rows(step, room)) == [1, 3, 0]


def test_fewer_gpus_in_whole_nodes() -> None:
    cluster = scenario(nodes=4).cluster
    assert smaller(cluster, 17).n_gpus == 16
    assert smaller(cluster, 1000).n_gpus == 32
    with pytest.raises(UserError, match="whole node"):
        smaller(cluster, 7)
    best = search(scenario(nodes=4), max_gpus=16, top=1).plans[0].plan
    assert best.world_size == 16


def test_mixed_clusters_are_for_the_planner() -> None:
    groups = [{"node": "dgx-a100-40gb", "count": 1}, {"node": "dgx-h100", "count": 1}]
    mixed = scenario(cluster={"groups": groups, "fabric": "hdr-infiniband"})
    with pytest.raises(UserError, match="equal GPUs"):
        search(mixed)


def test_tables_price_each_combination_once() -> None:
    asked: list[int] = []

    def price(a: Any, b: Any) -> Any:
        asked.append(len(a))
        return np.stack([10.0 * a + b])

    table = Table(price)
    a, b = np.array([1, 2, 1, 2]), np.array([3, 3, 3, 4])
    rows = table.rows(a, b)
    np.testing.assert_array_equal(table.values[0][rows], 10 * a + b)
    more = np.array([1, 7, 2])
    rows = table.rows(more, np.array([3, 9, 4]))
    np.testing.assert_array_equal(table.values[0][rows], [13, 79, 24])
    assert asked == [3, 1]


def test_activations_are_offloaded_only_under_full_recompute() -> None:
    found = search(scenario(), options={"offload": ["activations"]})
    assert {p.plan.recompute.name for p in found.plans} == {"FULL"}
    assert any("offloading" in reason for reason in found.left_out)
    assert found.considered == found.fitting + sum(found.left_out.values())
