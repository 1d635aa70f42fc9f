"""What a scenario file turns into: names resolved, degrees derived, defaults stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import hardware_db
from simulator.errors import UserError
from simulator.spec.dump import dump_yaml, scenario_to_mapping
from simulator.spec.library import find_scenario, list_scenarios
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.presets import preset
from simulator.spec.scenario import (
    Scenario,
    load_scenario,
    plan_from_mapping,
    scenario_from_mapping,
    scenario_json_schema,
    scenario_with,
    schema_text,
)
from simulator.spec.yaml_source import parse_source

SHIPPED = [entry.name for entry in list_scenarios()]


def made(plan: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    data: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "workload": {"sequence_length": 8192, "global_batch": 64},
        "cluster": {"groups": [{"node": "dgx-h100", "count": 2}], "fabric": "ndr-infiniband"},
        "stack": "megatron-core",
        **changes,
    }
    if plan is not None:
        data["plan"] = plan
    return scenario_from_mapping(data)


def test_dp_follows_from_the_gpus_and_is_stated() -> None:
    scenario = made({"tp": 4, "pp": 2})
    assert scenario.plan is not None
    assert scenario.plan.dp == 2
    assert "plan.dp = 2 (16 GPUs / (tp 4 x pp 2 x cp 1))" in scenario.defaults


def test_plan_may_be_left_out() -> None:
    assert made().plan is None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("ZeRO-3", Sharding.ZERO3),
        ("fsdp", Sharding.ZERO3),
        ("zero_1", Sharding.ZERO1),
        ("none", Sharding.NONE),
        ("ddp", Sharding.NONE),
        ("distributed optimizer", Sharding.ZERO1),
    ],
)
def test_sharding_names_forgive(given: str, meant: Sharding) -> None:
    plan = made({"sharding": given}).plan
    assert plan is not None
    assert plan.sharding == meant


@pytest.mark.parametrize(
    ("given", "kind", "layers"),
    [
        ("full", Recompute.FULL, None),
        ({"full": 4}, Recompute.FULL, 4),
        ("Selective", Recompute.SELECTIVE, None),
        ("no", Recompute.NONE, None),
        (False, Recompute.NONE, None),
    ],
)
def test_recompute(given: object, kind: Recompute, layers: int | None) -> None:
    plan = made({"recompute": given}).plan
    assert plan is not None
    assert (plan.recompute, plan.recompute_layers) == (kind, layers)


@pytest.mark.parametrize(
    ("plan", "stack", "schedule"),
    [
        ({"tp": 8, "pp": 2}, "megatron-core", "1f1b"),
        ({"tp": 8, "pp": 2, "vpp": 4}, "megatron-core", "interleaved"),
        ({"tp": 8, "pp": 2, "schedule": "zero-bubble"}, "megatron-core", "zb-h1"),
        ({"sharding": "fsdp"}, "gpumix", "layered"),
    ],
)
def test_schedule_defaults_and_spellings(plan: dict[str, Any], stack: str, schedule: str) -> None:
    scenario = made(plan, stack=stack)
    assert scenario.plan is not None
    assert scenario.plan.schedule == schedule


def test_hsdp_shards_inside_a_node() -> None:
    plan = made({"sharding": "hsdp", "tp": 2}, stack="torchtitan").plan
    assert plan is not None
    assert (plan.dp, plan.sharding, plan.shard_degree) == (8, Sharding.ZERO3, 4)


def test_sequence_parallel_follows_the_stack() -> None:
    core = made({"tp": 8}).plan
    speed = made({"tp": 8, "precision": "fp16"}, stack="megatron-deepspeed").plan
    assert core is not None and speed is not None
    assert core.sequence_parallel
    assert not speed.sequence_parallel


def test_mixed_node_from_its_gpus() -> None:
    group = {"gpus": ["L4", "l4", "A6000", "p40"], "intra_node": "pcie3"}
    scenario = made(cluster={"groups": [group]}, stack=None)
    (node,) = scenario.cluster.groups
    assert [gpu.name for gpu in node.gpus] == ["l4", "l4", "rtx-a6000", "p40"]
    assert scenario.cluster.fabric is None
    assert scenario.stack.name == "gpumix"
    assert any(line.startswith("cluster.groups[0].host_power_w =") for line in scenario.defaults)


def test_node_given_in_part_and_overridden() -> None:
    group = {"node": "dgx-h100", "gpus_per_node": 4, "nic_gbps": 200, "zone": "east"}
    (node,) = made(cluster={"groups": [group]}).cluster.groups
    assert node.n_gpus == 4
    assert node.node.nic_bytes_per_s == 25e9
    assert node.zone == "east"


def test_fabric_in_words_and_written_out() -> None:
    groups = [{"node": "dgx-h100", "count": 2}]
    words = made(cluster={"groups": groups, "fabric": "8x400Gb NDR InfiniBand"}).cluster.fabric
    fields = made(cluster={"groups": groups, "fabric": {"nic_gbps": 400, "rdma": True}})
    assert words is not None and fields.cluster.fabric is not None
    assert words.nic_bytes_per_s == fields.cluster.fabric.nic_bytes_per_s == 50e9


def test_fabric_defaults_to_the_slowest_of_the_nodes_own() -> None:
    groups = [{"node": "dgx-h100"}, {"node": "dgx-a100-80gb"}]
    scenario = made(cluster={"groups": groups})
    assert scenario.cluster.fabric is not None
    slow = hardware_db.node("dgx-a100-80gb").fabric
    assert scenario.cluster.fabric.name == slow
    assert any("cluster.fabric" in line for line in scenario.defaults)


def test_model_from_a_preset_with_changes() -> None:
    model = made(model={"base": "mixtral-8x7b", "layers": 8, "moe": {"top_k": 1}}).model
    original = preset("mixtral-8x7b")
    assert model.layers == 8
    assert model.moe is not None and original.moe is not None
    assert (model.moe.top_k, model.moe.experts) == (1, original.moe.experts)
    assert model.hidden == original.hidden


def test_model_from_its_dimensions_states_what_it_fills_in() -> None:
    scenario = made(model={"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000})
    assert (scenario.model.head_dim, scenario.model.ffn) == (64, 2048)
    assert any("model.ffn = 2048" in line for line in scenario.defaults)


def test_model_from_a_config_file_beside_the_scenario(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = dump_yaml({**scenario_to_mapping(made()), "model": "config.json"})
    (tmp_path / "s.yaml").write_text(text)
    assert load_scenario(tmp_path / "s.yaml").model.hidden == 512


def _uneven(entries: list[dict[str, Any]], **plan: Any) -> Scenario:
    groups = [{"node": "dgx-a100-80gb"}, {"node": "dgx-h100"}]
    data = {"sharding": "zero3", "assignment": entries, **plan}
    return made(data, cluster={"groups": groups, "fabric": "hdr-infiniband"}, stack="gpumix")


def test_assignment_counts_are_per_rank_and_use_up_the_batch() -> None:
    scenario = _uneven([{"group": 0, "micro_batch": 1, "count": 2}, {"group": 1, "micro_batch": 2}])
    assert scenario.plan is not None
    first, second = scenario.plan.assignment
    assert (scenario.plan.dp, first.replicas, second.replicas) == (16, 8, 8)
    assert (second.micro_batch, second.count) == (2, 3)  # 8 x 1 x 2 + 8 x 2 x 3 = 64


def test_list_of_shares_becomes_one_entry_for_each_share() -> None:
    shares = [0.05] * 6 + [0.1] * 2
    entries = [{"group": 0, "state_share": shares}, {"group": 1, "state_share": "even"}]
    scenario = _uneven(entries)
    assert scenario.plan is not None
    got = [(a.group, a.replicas, a.state_share) for a in scenario.plan.assignment]
    assert got == [(0, 6, 0.05), (0, 2, 0.1), (1, 8, None)]


def test_uneven_pipeline_from_stages() -> None:
    entries = [
        {"group": 0, "stage": 0, "layers": 10, "tp": 8},
        {"group": 1, "stage": 1, "layers": 22, "tp": 8},
    ]
    scenario = _uneven(entries, sharding="none", schedule="1f1b")
    assert scenario.plan is not None
    assert (scenario.plan.pp, scenario.plan.dp) == (2, 1)
    assert [a.count for a in scenario.plan.assignment] == [64, 64]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": {"tp": 16, "sharding": "zero1"}}, "spans nodes"),
        ({"plan": {"tp": 16}, "model": "llama-3.1-70b"}, "key-value heads are copied"),
        ({"plan": {"tp": 8, "pp": 2}, "model": {"base": "llama-3.1-8b", "layers": 31}}, "do not"),
        ({"plan": {"sequence_parallel": True}}, "has no effect with tp 1"),
        ({"plan": {}, "model": "gpt3-2.7b"}, "learned positions"),
    ],
)
def test_warnings(changes: dict[str, Any], words: str) -> None:
    assert any(words in warning for warning in made(**changes).warnings)


def test_change_derives_anew_what_was_left_out() -> None:
    changed = scenario_with(made({"tp": 4}), {"plan.tp": 8, "cluster.groups[0].count": 4})
    assert changed.plan is not None
    assert (changed.plan.tp, changed.plan.dp) == (8, 4)


def test_plan_from_mapping_checks_like_a_scenario() -> None:
    s = made()
    plan = plan_from_mapping({"tp": 2}, s.model, s.workload, s.cluster, s.stack)
    assert plan.dp == 8
    with pytest.raises(UserError, match=r"plan.tp: .*does not divide"):
        plan_from_mapping({"tp": 3}, s.model, s.workload, s.cluster, s.stack)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scenario_loads_with_a_summary_and_a_round_trip(name: str) -> None:
    scenario = load_scenario(name)
    # What has no plan asks for one to be found, or for candidates to be compared.
    assert (
        scenario.plan is not None or scenario.purchase is not None or "plan" not in scenario.given
    )
    data = scenario_to_mapping(scenario)
    assert scenario_from_mapping(data) == scenario
    assert parse_source(dump_yaml(data)).data == data
    assert all(entry.summary and entry.title for entry in list_scenarios())


def test_mixed_70b_scenarios_do_the_same_work() -> None:
    even, uneven = (load_scenario(f"llama-3.1-70b-mixed-{kind}") for kind in ("even", "gpumix"))
    assert even.workload == uneven.workload
    assert even.cluster == uneven.cluster


def test_scenario_names_forgive() -> None:
    assert find_scenario("GPT3 175B").name == "gpt3-175b-64-a100.yaml"
    with pytest.raises(UserError, match="names several scenarios"):
        find_scenario("llama")
    with pytest.raises(UserError, match="choose from"):
        find_scenario("no such thing")


def test_published_schema_is_current() -> None:
    published = Path(__file__).parents[2] / "simulator/spec/scenario.schema.json"
    assert published.read_text("utf-8") == schema_text(), (
        "run: python -m simulator.spec.scenario --schema > simulator/spec/scenario.schema.json"
    )


def _accepted_by_schema(data: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(scenario_json_schema()).is_valid(data)


@pytest.mark.parametrize("name", SHIPPED)
def test_schema_accepts_what_ships(name: str) -> None:
    scenario = load_scenario(name)
    assert _accepted_by_schema(dict(scenario.given))
    assert _accepted_by_schema(scenario_to_mapping(scenario))


@pytest.mark.parametrize(
    "changes",
    [
        {"nonsense": 1},
        {"model": 5},
        {"model": {"layers": 0}},
        {"model": {"layres": 2}},
        {"workload": {"sequence_length": 8192}},
        {"workload": {"sequence_length": "8192", "global_batch": 1}},
        {"workload": {"sequence_length": 8192.5, "global_batch": 1}},
        {"cluster": {"groups": []}},
        {"cluster": {"groups": [{"node": "dgx-h100", "count": 0}]}},
        {"cluster": {"groups": [{"node": "dgx-h100"}], "fabric": {"nic_gps": 1}}},
        {"plan": {"tp": True}},
        {"plan": {"sharding": "zero9"}},
        {"plan": {"recompute": {"full": 0}}},
        {"plan": {"compile": "maybe"}},
        {"plan": {"assignment": [{"micro_batch": 1}]}},
        {"plan": {"assignment": [{"group": 0, "state_share": 2}]}},
        {"sweep": {"plan.tp": 2}},
        {"risk": 1.5},
        {"economics": 3},
        {"economics": {"pue": [1.5, 1.2, 1.1, 1.0]}},
        {"economics": {"prices": {"dgx-h100": -1}}},
        {"purchase": {"horizon_years": 0, "candidates": []}},
        {"title": ""},
    ],
)
def test_schema_and_loader_reject_the_same(changes: dict[str, Any]) -> None:
    data = {**scenario_to_mapping(made()), **changes}
    assert not _accepted_by_schema(data)
    with pytest.raises(UserError):
        scenario_from_mapping(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"base": "llama-3.1-8b", "layers": 16}},
        {"workload": {"sequence_length": 8192.0, "global_batch": 64, "tokens": 1e12}},
        {"plan": {"sharding": "fsdp", "recompute": {"full": 2}, "compile": "no"}},
        {"sweep": {"plan.tp": [1, 2], "cluster.groups[0].count": [2, 4]}},
        {
            "purchase": {"horizon_years": 3, "candidates": [{"name": "a", "buy": [{"gpu": "l4"}]}]},
            "economics": {"currency": "USD", "pue": [1.1, 1.2, 1.5], "prices": {"l4": 2500}},
            "workload": {"sequence_length": 8192, "global_batch": 64, "tokens": 1e12},
        },
        {"outputs": {}, "risk": 0},
    ],
)
def test_schema_and_loader_accept_the_same(changes: dict[str, Any]) -> None:
    data = {**scenario_to_mapping(made()), **changes}
    assert _accepted_by_schema(data)
    assert scenario_from_mapping(data).workload.global_batch == 64
