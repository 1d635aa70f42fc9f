"""What more GPUs, other risks and other shares do to planned throughput."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulator.planner.candidate import Candidate
from simulator.planner.gpumix import STYLES, Limits, plan_gpumix
from simulator.planner.rank_tables import Job
from simulator.planner.recommend import base_plan
from simulator.spec.scenario import scenario_from_mapping

V100 = {"gpu": "v100-sxm-16gb", "gpus_per_node": 2, "intra_node": "nvlink2"}
A100 = {"gpu": "a100-sxm-40gb", "gpus_per_node": 2}
L4 = {"gpu": "l4", "gpus_per_node": 2}


def job(groups: list[dict[str, Any]], batch: int = 64, model: str = "opt-350m") -> Job:
    """A job on some node groups joined by a slow network."""
    scenario = scenario_from_mapping(
        {
            "model": model,
            "workload": {"sequence_length": 1024, "global_batch": batch},
            "cluster": {"groups": groups, "fabric": "50Gb Ethernet"},
            "stack": "gpumix",
        }
    )
    return Job(scenario.model, scenario.workload, scenario.cluster, scenario.stack, scenario.risk)


def best(asked: Job, style: int = 0) -> Candidate:
    found = plan_gpumix(asked, BASE, style=STYLES[style])
    assert found
    return found[0]


BASE = base_plan(
    scenario_from_mapping(
        {
            "model": "opt-350m",
            "workload": {"sequence_length": 1024, "global_batch": 8},
            "cluster": {"groups": [A100 | {"count": 2}], "fabric": "50Gb Ethernet"},
            "plan": {"precision": "fp16"},
            "stack": "gpumix",
        }
    ),
    {},
)


@pytest.mark.parametrize("style", range(len(STYLES)))
@pytest.mark.parametrize("more", [V100 | {"count": 1}, A100 | {"count": 2}, L4 | {"count": 1}])
def test_more_gpus_never_lower_planned_throughput(more: dict[str, Any], style: int) -> None:
    few = best(job([A100 | {"count": 1}]), style)
    many = best(job([A100 | {"count": 1}, more]), style)
    assert many.tokens_per_s >= few.tokens_per_s * (1.0 - 1e-9)


def test_a_larger_group_never_lowers_planned_throughput() -> None:
    rates = [best(job([V100 | {"count": n}, A100 | {"count": 1}])).tokens_per_s for n in (1, 2, 3)]
    assert rates == sorted(rates)


@pytest.mark.parametrize("batch", [7, 63, 64])
def test_batch_and_shares_are_whole(batch: int) -> None:
    found = best(job([V100 | {"count": 1}, A100 | {"count": 1}], batch))
    classes = found.layout.classes
    assert sum(c.micro_batch * c.micro_batches * c.replicas for c in classes) == batch
    assert sum(c.state_share * c.replicas for c in classes) == pytest.approx(1.0)


@pytest.mark.parametrize("risk", [0.001, 0.05, 0.3])
def test_the_accepted_risk_is_kept(risk: float) -> None:
    asked = replace(job([V100 | {"count": 1}, L4 | {"count": 1}], 16, "opt-2.7b"), risk=risk)
    found = plan_gpumix(asked, BASE)
    assert found and found[0].oom_risk <= risk


def test_accepting_more_risk_never_costs_throughput() -> None:
    small = job([V100 | {"count": 1}, L4 | {"count": 1}], 16, "opt-2.7b")
    rates = [best(replace(small, risk=risk)).tokens_per_s for risk in (0.001, 0.05, 0.3)]
    assert rates == sorted(rates)


def test_no_plan_is_faster_than_its_bound() -> None:
    found = best(job([V100 | {"count": 1}, A100 | {"count": 1}]))
    assert found.bound_s is not None
    assert 0.5 * found.step_time_s < found.bound_s <= found.step_time_s


def test_state_goes_where_the_memory_is() -> None:
    """Four T4 hold less than an even share of Llama-2-7B's state; four A100-40 hold the rest."""
    t4, a100 = {"gpu": "t4", "gpus_per_node": 4}, {"gpu": "a100-sxm-40gb", "gpus_per_node": 4}
    asked = job([t4, a100], 64, "llama-2-7b")
    found = plan_gpumix(asked, BASE, Limits(whole_cluster=True))
    assert found and found[0].oom_risk <= asked.risk
    share = {c.gpu.name: c.state_share for c in found[0].layout.classes}
    assert share["t4"] < 1 / 8 < share["a100-sxm-40gb"]
