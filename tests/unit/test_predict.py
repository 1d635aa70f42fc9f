"""The whole answer: consistent, symmetric, with suggestions that were priced."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import simulator
from simulator import estimate, load_scenario, simulate
from simulator.analysis.predict import verdict
from simulator.errors import UserError
from simulator.spec.scenario import scenario_from_mapping

SCENARIOS = ["llama-3.1-8b-dgx-h100", "gpt3-175b-64-a100", "cephalo-small-gpt-2.7b"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_evaluators_agree(name: str) -> None:
    closed, engine = estimate(name), simulate(name)
    assert closed.step_time_s.p50 == pytest.approx(engine.step_time_s.p50, rel=0.02)
    assert closed.oom_risk == engine.oom_risk


@pytest.mark.parametrize("name", SCENARIOS)
def test_shares_sum_to_one_and_ranges_are_ordered(name: str) -> None:
    p = simulate(name)
    assert sum(p.shares.values()) == pytest.approx(1.0)
    for spread in (p.step_time_s, p.tokens_per_s):
        assert spread.p10 < spread.p50 < spread.p90
    for cls in p.classes:
        assert sum(cls.time_s.values()) == pytest.approx(p.step_time_s.p50, rel=1e-6)
        assert cls.device_p10_bytes <= cls.device_bytes <= cls.device_p90_bytes
    assert 0 < p.mfu <= p.hfu < 1


def test_json_is_standard_and_names_the_contract() -> None:
    data = json.loads(json.dumps(estimate(SCENARIOS[0]).to_json(), allow_nan=False))
    assert {"step_time_s", "tokens_per_s", "oom_risk", "peak_allocated_bytes"} <= data.keys()


def test_homogeneous_cluster_written_as_two_groups_is_the_same() -> None:
    one = load_scenario("llama-3.1-8b-dgx-h100")
    group = one.cluster.groups[0]
    halves = replace(one.cluster, fabric=simulator_fabric())
    two_nodes = replace(halves, groups=(replace(group, count=2),))
    split = replace(halves, groups=(group, replace(group, name="other")))
    assert one.plan is not None
    plan = replace(one.plan, dp=16)
    workload = replace(one.workload, global_batch=2 * one.workload.global_batch)
    a = estimate(replace(one, cluster=two_nodes, plan=plan, workload=workload))
    b = estimate(replace(one, cluster=split, plan=plan, workload=workload))
    assert a.step_time_s.p50 == pytest.approx(b.step_time_s.p50, rel=1e-9)
    assert a.oom_risk == b.oom_risk


def simulator_fabric() -> object:
    import hardware_db

    return hardware_db.fabric("ndr-infiniband")


def test_even_split_is_told_to_split_by_speed() -> None:
    found = simulate("llama-3.1-70b-mixed-even").suggestions
    assert found and found[0].change.startswith("split the batch by speed")
    uneven = estimate("llama-3.1-70b-mixed-gpumix").tokens_per_s.p50
    even = estimate("llama-3.1-70b-mixed-even").tokens_per_s.p50
    assert found[0].gain == pytest.approx(uneven / even - 1, abs=0.15)


def test_host_memory_that_is_too_small_for_offload_is_a_warning() -> None:
    s = load_scenario("llama-3.1-70b-mixed-gpumix")
    small = tuple(
        replace(g, node=replace(g.node, host_memory_bytes=10**9)) for g in s.cluster.groups
    )
    p = estimate(replace(s, cluster=replace(s.cluster, groups=small)))
    assert any("host memory" in w for w in p.warnings)


def test_verdict_words() -> None:
    assert verdict(0.05, 0.05) == "fits"
    assert verdict(0.4, 0.05) == "risky"
    assert verdict(0.6, 0.05) == "does not fit"


def test_a_plan_is_needed() -> None:
    bare = scenario_from_mapping({
        "model": "llama-3.1-8b",
        "workload": {"sequence_length": 4096, "global_batch": 64},
        "cluster": {"groups": [{"node": "dgx-h100", "count": 1}]},
    })  # fmt: skip
    with pytest.raises(UserError, match="plan: missing"):
        estimate(bare)


def test_public_names() -> None:
    assert sorted(simulator.__all__) == dir(simulator)
    for name in simulator.__all__:
        assert getattr(simulator, name) is not None
