"""Hostile and mistaken scenarios: each fault is reported at its place, all of them at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from simulator import cli
from simulator.errors import Problem, UserError
from simulator.spec.scenario import load_scenario, scenario_from_mapping

GOOD = """\
model: llama-3.1-8b
workload: {sequence_length: 8192, global_batch: 64}
cluster:
  groups:
    - {node: dgx-h100, count: 2}
  fabric: ndr-infiniband
stack: megatron-core
plan:
  tp: 4
  pp: 2
"""

#: name -> (text replaced in GOOD, its replacement, place, field, words of the message or hint)
FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "unknown top-level field": ("stack:", "stak:", "7:1", "stak", "did you mean 'stack'"),
    "unknown plan field": ("tp: 4", "ttp: 4", "9:3", "plan.ttp", "did you mean 'tp'"),
    "unknown group field": (
        "count: 2", "cuont: 2", "5:24", "cluster.groups[0].cuont", "did you mean 'count'?",
    ),
    "missing section": ("workload:", "wrkload:", "2:1", "wrkload", "did you mean 'workload'?"),
    "section of the wrong kind": ("tp: 4\n  pp: 2", "[1]", "9:3", "plan", "got a list"),
    "text for a number": ("tp: 4", 'tp: "4"', "9:7", "plan.tp", "remove the quotes"),
    "fraction for a count": ("tp: 4", "tp: 4.5", "9:7", "plan.tp", "expected a whole number"),
    "flag for a count": ("tp: 4", "tp: true", "9:7", "plan.tp", "true (true or false)"),
    "zero": ("count: 2", "count: 0", "5:31", "cluster.groups[0].count", "at least 1"),
    "negative": ("pp: 2", "pp: -2", "10:7", "plan.pp", "at least 1"),
    "not a number": ("batch: 64", "batch: .nan", "2:49", "workload.global_batch", "nan is not"),
    "infinite": ("batch: 64", "batch: .inf", "2:49", "workload.global_batch", "inf is not"),
    "too large": ("batch: 64", "batch: 1e30", "2:49", "workload.global_batch", "too large"),
    "empty value": ("tp: 4", "tp:", "9:6", "plan.tp", "got nothing"),
    "unknown model": ("llama-3.1-8b", "llama-3.1-9b", "1:8", "model", "llama-3.1-8b"),
    "unknown node": ("dgx-h100", "dgx-h1000", "5:14", "cluster.groups[0].node", "dgx-h100"),
    "unknown GPU": ("node: dgx-h100", "gpu: h1oo", "5:13", "cluster.groups[0].gpu", "h100"),
    "unknown fabric": ("ndr-infiniband", "nrd-infinibnd", "6:11", "cluster.fabric", "ndr-infin"),
    "unknown stack": ("megatron-core", "megatron-cor", "7:8", "stack", "megatron-core"),
    "no config file": ("llama-3.1-8b", "a/config.json", "1:8", "model", "cannot be read"),
    "node said twice": (
        "node: dgx-h100", "node: dgx-h100, gpu: h100", "5:7", "cluster.groups[0]", "node and gpu",
    ),
    "no groups": ("- {node: dgx-h100, count: 2}", "[]", "5:5", "cluster.groups", "at least 1"),
    "degrees over the GPUs": ("tp: 4", "tp: 4\n  dp: 3", "10:7", "plan.dp", "the cluster has 16"),
    "degrees that do not divide": ("tp: 4", "tp: 3", "9:7", "plan.tp", "does not divide"),
    "heads": ("llama-3.1-8b", "{base: llama-3.1-8b, heads: 30}", "9:7", "plan.tp", "30 heads"),
    "layers fewer than stages": (
        "llama-3.1-8b", "{base: llama-3.1-8b, layers: 1}", "10:7", "plan.pp", "fewer than",
    ),
    "stage layers": (
        "pp: 2", "pp: 2\n  stage_layers: [3, 4]", "11:17", "plan.stage_layers", "sum to 32",
    ),
    "global batch": ("batch: 64", "batch: 63", "2:49", "workload.global_batch", "not divisible"),
    "sequence over cp": (
        "length: 8192", "length: 8190\n  , global_batch: 64}\n#", "2:29",
        "workload.sequence_length", "sequence_parallel needs",
    ),
    "experts without MoE": ("pp: 2", "pp: 2\n  ep: 2", "11:7", "plan.ep", "no experts"),
    "fp8 on a GPU without it": (
        "node: dgx-h100", "node: dgx-a100-80gb", "11:14", "plan.precision", "has no fp8",
    ),
    "unknown precision": (
        "pp: 2", "pp: 2\n  precision: bf17", "11:14", "plan.precision", "unknown to stack",
    ),
    "interleaving without stages": ("pp: 2", "vpp: 2", "10:8", "plan.vpp", "need pipeline stages"),
    "interleaved micro-batches": (
        "pp: 2", "pp: 2\n  vpp: 2\n  micro_batch: 32", "12:16", "plan.micro_batch",
        "not divisible by pp 2",
    ),
    "schedule of another stack": (
        "pp: 2", "pp: 2\n  schedule: layered", "11:13", "plan.schedule", "without pipeline",
    ),
    "assignment batches": (
        "tp: 4\n  pp: 2", "assignment: [{group: 0, micro_batch: 1, count: 5}]", "9:15",
        "plan.assignment", "sum to 80 sequences",
    ),
    "assignment group": (
        "tp: 4\n  pp: 2", "assignment: [{group: 7}]", "9:24", "plan.assignment[0].group",
        "groups are 0 to 0",
    ),
    "state shares": (
        "tp: 4\n  pp: 2", "sharding: zero3\n  assignment: [{group: 0, state_share: 0.05}]", "10:15",
        "plan.assignment", "state shares sum to 0.8",
    ),
    "duplicate key": ("pp: 2", "tp: 2", "10:3", "", "given twice (first on line 9)"),
    "tag": ("model: llama", "model: !!python/name:os.system llama", "1:8", "", "not allowed"),
    "broken YAML": ("count: 2}", "count: 2", "6:9", "", "not valid YAML"),
    "sweep axis": ("pp: 2", "pp: 2\nsweep: {plan.tpp: [1]}", "11:9", "sweep.plan.tpp", "plan.tp"),
    "sweep value": (
        "pp: 2", "pp: 2\nsweep: {plan.tp: [1, 0]}", "11:22", "sweep.plan.tp[1]", "at least 1",
    ),
    "risk": ("pp: 2", "pp: 2\nrisk: 7", "11:7", "risk", "at most 1"),
    "layers without end": (
        "llama-3.1-8b", "{base: llama-3.1-8b, layers: 10000000}", "1:8", "model", "at most 10,000",
    ),
    "name without end": ("dgx-h100", "x" * 5000, "5:14", "cluster.groups[0].node", "too long"),
}  # fmt: skip


def _text(name: str) -> str:
    old, new = FAULTS[name][:2]
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    return text + "  precision: fp8\n" if name.startswith("fp8") else text


def _problems(tmp_path: Path, text: str) -> tuple[Problem, ...]:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_scenario(path)
    return caught.value.problems


def test_the_good_one_loads(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    assert load_scenario(path).plan is not None


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_at_its_place(tmp_path: Path, name: str) -> None:
    _, _, place, field, words = FAULTS[name]
    start = time.process_time()
    problems = _problems(tmp_path, _text(name))
    assert time.process_time() - start < 1.0
    found = [p for p in problems if (f"{p.line}:{p.column}", p.path) == (place, field)]
    assert found, [str(p) for p in problems]
    assert any(words in str(p) for p in found), [str(p) for p in found]
    assert all(p.source.endswith("s.yaml") for p in problems)


def test_all_faults_are_reported_at_once_in_the_order_of_the_text(tmp_path: Path) -> None:
    names = ("unknown model", "not a number", "zero", "unknown node", "unknown stack")
    text = GOOD
    for name in (*names, "text for a number", "negative"):
        old, new = FAULTS[name][:2]
        text = text.replace(old, new, 1)
    problems = _problems(tmp_path, text)
    assert [p.line for p in problems] == [1, 2, 5, 5, 7, 9, 10]


def test_many_faults_are_counted_not_listed(tmp_path: Path) -> None:
    start = time.process_time()
    problems = _problems(tmp_path, GOOD + "".join(f"key{i}: 1\n" for i in range(20_000)))
    assert time.process_time() - start < 1.0
    assert len(problems) == 21
    assert "19,980 more" in str(problems[-1])


def test_fault_inside_a_config_file_names_both_places(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    (problem,) = _problems(tmp_path, GOOD.replace("llama-3.1-8b", "./config.json"))
    assert problem.line == 1
    assert "config.json:1:10: a: given twice" in problem.message


@pytest.mark.parametrize("kind", ["directory", "absent", "empty", "binary"])
def test_command_exits_with_2_and_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "s.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(b"" if kind == "empty" else b"\x00\x01")
    monkeypatch.setattr(cli, "build_app", lambda: lambda **_: load_scenario(path))
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gpumix: {path}")


LARGEST = {
    "groups": {
        "cluster": {"groups": [{"gpus": ["l4", "t4", "a10", "a40"] * 12}] * 1000},
        "plan": {"precision": "fp16"},
    },
    "assignment": {
        "cluster": {"groups": [{"node": "dgx-h100", "count": 1250}]},
        "stack": "gpumix",
        "plan": {
            "sharding": "zero1",
            "schedule": "1f1b",
            "assignment": [{"group": 0, "stage": i, "state_share": 1} for i in range(10_000)],
        },
    },
    "layers and GPUs": {
        "cluster": {"groups": [{"node": "dgx-h100", "count": 10_000_000}]},
        "plan": {"pp": 10_000, "tp": 8, "micro_batch": 6},
    },
}


@pytest.mark.parametrize("name", LARGEST)
def test_largest_accepted_sections_stay_fast(name: str) -> None:
    data: dict[str, Any] = {
        "model": {"base": "llama-3.1-8b", "layers": 10_000},
        "workload": {"sequence_length": 8192, "global_batch": 48_000},
        **LARGEST[name],
    }
    data["cluster"] = {**data["cluster"], "fabric": "100gbe"}
    start = time.process_time()
    assert scenario_from_mapping(data).plan is not None
    assert time.process_time() - start < 2.0
