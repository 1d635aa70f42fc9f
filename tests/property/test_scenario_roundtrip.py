"""Any scenario that loads is written out and loads to the same; units survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.spec.dump import dump_yaml, plan_to_mapping, scenario_to_mapping
from simulator.spec.scenario import plan_from_mapping, scenario_from_mapping, scenario_from_source
from simulator.spec.yaml_source import parse_source

POWERS = st.sampled_from([1, 2, 4])
RATES = st.floats(1.0, 1e4, allow_nan=False)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """One or two groups of eight-GPU nodes, named, overridden or described, and a fabric."""
    groups: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 2))):
        group: dict[str, Any] = draw(
            st.sampled_from(
                [
                    {"node": "dgx-h100"},
                    {"node": "dgx-a100-80gb", "host_power_w": 1234.5},
                    {"gpu": "l40s", "gpus_per_node": 8, "intra_node": "pcie4"},
                    {"gpus": ["l4"] * 4 + ["t4"] * 4},
                ]
            )
        ).copy()
        group["count"] = draw(st.sampled_from([1, 2, 4]))
        if draw(st.booleans()):
            group |= {"nic_gbps": draw(RATES), "nics": draw(st.integers(1, 8))}
        groups.append(group)
    fabric: Any = draw(
        st.sampled_from(["ndr-infiniband", "8x400Gb NDR InfiniBand", "100gbe"])
        | st.fixed_dictionaries({"nic_gbps": RATES, "latency_s": st.floats(1e-7, 1e-3)})
    )
    return {"groups": groups, "fabric": fabric}


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario whose degrees divide the cluster's GPUs."""
    cluster = draw(clusters())
    gpus = 8 * sum(group["count"] for group in cluster["groups"])
    tp, pp = draw(POWERS), draw(st.sampled_from([1, 2]))
    micro_batch = draw(POWERS)
    dp = gpus // (tp * pp)
    plan = {
        "tp": tp,
        "pp": pp,
        "micro_batch": micro_batch,
        "sharding": draw(st.sampled_from(["none", "zero1", "zero2", "zero3", "hsdp"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full", {"full": 3}])),
        "precision": draw(st.sampled_from(["bf16", "fp16"])),
        "compile": draw(st.booleans()),
        "offload": draw(st.sampled_from(["none", "optimizer"])),
    }
    if plan["recompute"] == "full" and draw(st.booleans()):
        plan["offload"] = "activations"
    return {
        "model": draw(st.sampled_from(["llama-3.1-8b", {"base": "gpt3-13b", "dropout": 0.1}])),
        "workload": {
            "sequence_length": 4096,
            "global_batch": dp * micro_batch * draw(st.integers(1, 9)),
            "tokens": draw(st.floats(1.0, 1e15)),
        },
        "cluster": cluster,
        "stack": draw(st.sampled_from(["gpumix", "megatron-core"])),
        "plan": plan,
        "sweep": {"plan.micro_batch": [1, 2]},
        "risk": draw(st.floats(0, 1)),
        "economics": {"currency": "USD", "pue": draw(st.floats(1, 4)), "prices": {"h100": 3e4}},
    }


@given(scenarios())
@settings(max_examples=60, deadline=None)
def test_scenario_survives_the_round_trip(data: dict[str, Any]) -> None:
    scenario = scenario_from_mapping(data)
    plain = scenario_to_mapping(scenario)
    assert scenario_from_mapping(plain) == scenario
    source = parse_source(dump_yaml(plain))
    assert source.data == plain
    assert scenario_from_source(source, Path()) == scenario


@given(scenarios())
@settings(max_examples=30, deadline=None)
def test_plan_survives_alone(data: dict[str, Any]) -> None:
    s = scenario_from_mapping(data)
    assert s.plan is not None
    again = plan_from_mapping(plan_to_mapping(s.plan), s.model, s.workload, s.cluster, s.stack)
    assert again == s.plan
