"""Sweeps: axes, points, ranking, results that go on, workers that die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import UserError
from simulator.planner import sweep_grid
from simulator.planner.axes import Axis, applied, base_data, make_axis, parse_axis, points
from simulator.planner.executors import Here, LocalProcesses
from simulator.planner.results import ResultLog
from simulator.planner.sweep import (
    Row,
    best_row,
    differences,
    evaluate_point,
    make_sweep,
    ranked,
    reasons,
    run_sweep,
)
from simulator.spec.scenario import Scenario, scenario_from_mapping


def scenario(**changes: Any) -> Scenario:
    data: dict[str, Any] = {
        "model": "gpt2-medium",
        "workload": {"sequence_length": 1024, "global_batch": 32},
        "cluster": {"groups": [{"node": "dgx-a100-80gb", "count": 1}]},
        "stack": "megatron-core",
        "plan": {"tp": 4, "dp": 2, "micro_batch": 1},
    }
    return scenario_from_mapping(data | changes)


def row(index: int, rate: float, risk: float = 0.0) -> Row:
    values = {"plan.tp": index}
    return {"index": index, "values": values, "status": "fits", "reason": "",
            "tokens_per_s": rate, "oom_risk": risk}  # fmt: skip


def impossible(index: int, reason: str) -> Row:
    return {"index": index, "values": {}, "status": "infeasible", "reason": reason}


def test_an_axis_as_text() -> None:
    assert parse_axis("plan.tp=1,2,4") == Axis("plan.tp", (1, 2, 4))
    assert parse_axis("plan.recompute=none,{full: 2}").values == ("none", {"full": 2})
    assert parse_axis("cluster.groups[0].count=1").parts == ("cluster", "groups", 0, "count")


@pytest.mark.parametrize("text", ["plan.tp", "plan.tp=", "plan.tpp=1", "model.colour=1"])
def test_an_axis_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=r"for example|did you mean"):
        parse_axis(text)


def test_equal_values_count_once() -> None:
    assert make_axis("plan.tp", [1, 2, 1]).values == (1, 2)


def test_points_in_order() -> None:
    axes = [make_axis("plan.tp", [1, 2]), make_axis("plan.micro_batch", [4, 8])]
    assert [tuple(p.values()) for _, p in points(axes)] == [(1, 4), (1, 8), (2, 4), (2, 8)]


def test_fields_are_set_on_a_copy_and_names_become_bases() -> None:
    data = {"model": "gpt2-medium", "cluster": {"groups": [{"count": 1}]}}
    changed = applied(data, {"model.layers": 12, "cluster.groups.0.count": 3, "plan.tp": 2})
    assert changed["model"] == {"base": "gpt2-medium", "layers": 12}
    assert changed["cluster"]["groups"][0]["count"] == 3
    assert changed["plan"] == {"tp": 2}
    assert data["cluster"] == {"groups": [{"count": 1}]}
    with pytest.raises(UserError, match="1 entries"):
        applied(data, {"cluster.groups.1.count": 3})


def test_dp_is_dropped_where_an_axis_sets_it() -> None:
    data, notes = base_data({"plan": {"dp": 8, "tp": 1}}, [make_axis("plan.tp", [1, 2])])
    assert "dp" not in data["plan"]
    assert notes
    kept, _ = base_data({"plan": {"dp": 8}}, [make_axis("plan.micro_batch", [1])])
    assert kept["plan"]["dp"] == 8


def test_impossible_points_stay_with_the_reason() -> None:
    sweep = make_sweep(scenario(), [parse_axis("plan.tp=1,2,3"), parse_axis("plan.micro_batch=1")])
    rows = list(run_sweep(sweep, Here(), {}))
    assert [r["status"] for r in rows] == ["fits", "fits", "infeasible"]
    assert list(reasons(rows).values()) == [1]
    assert "3" in rows[2]["reason"]
    json.dumps(rows)


def test_axes_of_model_workload_and_cluster() -> None:
    names = ("model.layers=12,24", "workload.sequence_length=512,1024",
             "cluster.groups.0.count=1,2")  # fmt: skip
    sweep = make_sweep(scenario(), [parse_axis(name) for name in names])
    rows = {tuple(r["values"].values()): r for r in run_sweep(sweep, Here(), {})}
    assert len(rows) == 8
    assert rows[12, 1024, 1]["step_time_s"] < rows[24, 1024, 1]["step_time_s"]
    assert rows[24, 512, 1]["step_time_s"] < rows[24, 1024, 1]["step_time_s"]
    assert rows[24, 1024, 2]["n_gpus"] == 16


def test_closed_form_and_engine_agree() -> None:
    axes = [parse_axis("plan.pp=1,2")]
    closed, engine = (
        [r["step_time_s"] for r in run_sweep(make_sweep(scenario(), axes, kind), Here(), {})]
        for kind in ("closed form", "engine")
    )
    assert closed == pytest.approx(engine, rel=0.02)


def test_large_sweeps_are_priced_as_grids_with_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("workload.global_batch=32,48", "plan.tp=1,2,3", "plan.pp=1,2", "plan.micro_batch=1,2",
             "plan.recompute=none,full", "plan.sharding=none,fsdp", "plan.vpp=1,2")  # fmt: skip
    sweep = make_sweep(scenario(), [parse_axis(name) for name in names])
    alone = list(run_sweep(sweep, Here(), {}))
    monkeypatch.setattr(sweep_grid, "LARGE", 10)
    assert sweep_grid.is_large_grid(sweep)
    together = sorted(run_sweep(sweep, Here(), {}), key=lambda r: int(r["index"]))
    assert [r["values"] for r in together] == [r["values"] for r in alone]
    assert [r["status"] for r in together] == [r["status"] for r in alone]
    for one, other in zip(together, alone, strict=True):
        if one["status"] != "infeasible":
            assert one["step_time_s"] == pytest.approx(other["step_time_s"], rel=0.02)
            assert one["oom_risk"] == pytest.approx(other["oom_risk"], abs=1e-9)
            assert one["device_bytes"] == pytest.approx(other["device_bytes"], rel=1e-9)
    some = run_sweep(sweep, Here(), {key: {} for key in range(sweep.n_points - 3)})
    assert len(list(some)) == 3


def test_ranking_puts_what_fits_first_then_the_least_risky() -> None:
    rows = [impossible(0, "no"), row(1, 50.0, 0.9), row(2, 10.0), row(3, 20.0), row(4, 90.0, 0.3)]
    assert [r["index"] for r in ranked(rows, 0.05)] == [3, 2, 4, 1, 0]
    assert best_row(rows, 0.05) == rows[3]
    assert best_row([rows[0], rows[1]], 0.05) is None


def test_what_the_best_point_changes() -> None:
    sweep = make_sweep(scenario(), [parse_axis("plan.tp=2,4"), parse_axis("plan.vpp=1")])
    best = row(0, 1.0) | {"values": {"plan.tp": 2, "plan.vpp": 1}}
    assert differences(sweep, best) == {"plan.tp": (4, 2), "plan.vpp": (None, 1)}


def test_results_resume_after_a_torn_line(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "points.jsonl", "asked")
    log.open(resume=False)
    assert log.add(row(0, 1.0))
    assert log.add(row(1, 2.0))
    assert not log.add(row(1, 3.0))
    log.close()
    with log.path.open("a") as file:
        file.write('{"index": 2, "val')
    again = ResultLog(log.path, "asked")
    again.open(resume=True)
    assert sorted(again.rows) == [0, 1]
    assert again.rows[1]["tokens_per_s"] == 2.0
    again.add(row(2, 4.0))
    again.close()
    assert len(log.path.read_text().splitlines()) == 4
    with pytest.raises(UserError, match="another sweep"):
        ResultLog(log.path, "something else").open(resume=True)


def test_a_sweep_skips_what_is_done() -> None:
    sweep = make_sweep(scenario(), [parse_axis("plan.tp=1,2,4")])
    assert [index for index, _ in sweep.tasks({1: {}})] == [0, 2]


def square_or_die(task: tuple[int, str]) -> int:
    """A worker that kills itself the first time it meets the marked task."""
    number, marker = task
    if number == 3 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return number * number


def die(_: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_killed_process_loses_nothing_and_nothing_comes_twice(tmp_path: Path) -> None:
    marker = str(tmp_path / "died")
    tasks = ((n, (n, marker)) for n in range(12))
    found = list(LocalProcesses(2).run(square_or_die, tasks))
    assert Path(marker).exists()
    assert sorted(found) == [(n, n * n) for n in range(12)]


def test_a_task_that_always_kills_its_worker_is_given_up() -> None:
    with pytest.raises(RuntimeError, match="died 3 times"):
        list(LocalProcesses(1).run(die, [(7, 0)]))


@pytest.fixture
def dask_cluster() -> Iterator[tuple[str, Any]]:
    """A scheduler with two worker processes and their nannies."""
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        yield cluster.scheduler_address, cluster


@pytest.mark.slow
def test_dask_worker_killed_mid_sweep(dask_cluster: tuple[str, Any], tmp_path: Path) -> None:
    from simulator.planner.executors import DaskCluster

    address, _ = dask_cluster
    marker = str(tmp_path / "died")
    tasks = ((n, (n, marker)) for n in range(20))
    found = list(DaskCluster(address).run(square_or_die, tasks))
    assert Path(marker).exists()
    assert sorted(found) == [(n, n * n) for n in range(20)]
    sweep = make_sweep(
        scenario(), [parse_axis("plan.tp=1,2,4"), parse_axis("plan.micro_batch=1,2")]
    )
    rows = list(run_sweep(sweep, DaskCluster(address), {}))
    alone = [evaluate_point(task) for _, task in sweep.tasks({})]
    assert sorted(rows, key=lambda r: int(r["index"])) == alone


def test_no_scheduler_is_a_users_mistake() -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    from simulator.planner.executors import DaskCluster

    with pytest.raises(UserError, match="no scheduler"):
        list(DaskCluster("tcp://127.0.0.1:9", timeout_s=0.5).run(die, [(0, 0)]))
