"""Replays without a run: what is predicted for emulated ranks, and what a run's row says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.analysis.emulated import (
    Emulation,
    emulated_layout,
    emulated_times,
    predict_emulated,
    rank_classes,
    replay_layout,
    scenario_emulation,
)
from simulator.analysis.replayed import (
    assumed_gpus,
    relative_error,
    replay_document,
    step_spread,
    warnings,
)
from simulator.cost.pricing import price_layout
from simulator.errors import UserError
from simulator.interop.replay_row import runs_csv
from simulator.interop.runs import RunCase, read_cases
from simulator.spec.scenario import Scenario, load_scenario, scenario_from_mapping, scenario_with

CPU_SCENARIOS = ("cpu-single", "cpu-two-ranks", "cpu-mixed-emulated")


@pytest.fixture(scope="module")
def mixed() -> Scenario:
    return load_scenario("cpu-mixed-emulated")


def measured(ranks: int = 2, step_time_s: float = 0.5) -> dict[str, Any]:
    """What the runner returns, with round figures."""
    rank = {"peak_allocated_bytes": 100_000_000, "step_time_s": step_time_s}
    return {
        "step_time_s": step_time_s,
        "step_times_s": [step_time_s] * 3,
        "tokens_per_s": 1000.0,
        "peak_allocated_bytes": 100_000_000,
        "peak_reserved_bytes": None,
        "exposed_communication_s": 0.0,
        "ranks": [{"rank": i, **rank} for i in range(ranks)],
    }


@pytest.mark.parametrize("name", CPU_SCENARIOS)
def test_shipped_cpu_scenarios_load_without_warnings_and_fit(name: str) -> None:
    scenario = load_scenario(name)
    layout = replay_layout(scenario)
    prediction = predict_emulated(scenario, layout, scenario_emulation(scenario, layout))
    assert scenario.warnings == ()
    assert prediction.verdict == "fits"


def test_slowing_scales_only_the_slow_class(mixed: Scenario) -> None:
    layout = replay_layout(mixed)
    plain, slow = price_layout(layout), emulated_times(layout, (1.0, 3.0))
    assert slow[0] == plain[0]
    ratio = [float(s.forward.total / p.forward.total)
             for s, p in zip(slow[1].units, plain[1].units, strict=True)]  # fmt: skip
    assert ratio == pytest.approx([3.0] * len(ratio))
    assert slow[1].units[0].reduce == plain[1].units[0].reduce
    assert slow[1].optimizer == plain[1].optimizer


def test_the_slower_rank_sets_the_step(mixed: Scenario) -> None:
    layout = replay_layout(mixed)
    steps = [
        predict_emulated(mixed, layout, Emulation(slowdown=(1.0, f))).step_time_s.p50
        for f in (1.0, 2.0, 4.0)
    ]
    # At factor 2 the second rank, with half the work, is just as long busy as the first.
    assert steps[1] == pytest.approx(steps[0], rel=0.05)
    assert steps[2] > 1.5 * steps[0]


def test_a_limit_below_the_peak_does_not_fit(mixed: Scenario) -> None:
    layout = replay_layout(mixed)
    roomy = predict_emulated(mixed, layout, Emulation())
    peaks = [c.peak_allocated_bytes for c in roomy.classes]
    tight = Emulation(memory_bytes=(int(2 * peaks[0]), int(0.7 * peaks[1])))
    prediction = predict_emulated(mixed, layout, tight)
    assert (prediction.verdict, prediction.fullest) == ("does not fit", 1)
    assert roomy.verdict == "fits"


def test_a_cpu_process_holds_nothing_of_cuda(mixed: Scenario) -> None:
    layout = replay_layout(mixed)
    assert layout.stack.framework.context_bytes > 0
    framework = emulated_layout(layout, Emulation()).stack.framework
    assert framework.context_bytes == framework.workspace_bytes == 0


def test_a_gpu_keeps_its_context() -> None:
    layout = replay_layout(load_scenario("llama-3.1-8b-dgx-h100"))
    assert emulated_layout(layout, Emulation()) == layout


def test_every_rank_has_its_class(mixed: Scenario) -> None:
    assert rank_classes(replay_layout(mixed)) == (0, 1)
    layout = replay_layout(load_scenario("llama-3.1-70b-mixed-gpumix"))
    assert rank_classes(layout) == (0,) * 32 + (1,) * 32


def test_emulation_has_an_entry_for_each_rank(mixed: Scenario) -> None:
    wrong = scenario_with(mixed, {"replay.slowdown": [1, 2, 3]})
    with pytest.raises(UserError, match=r"replay\.slowdown: 3 entries for 2 ranks"):
        scenario_emulation(wrong, replay_layout(wrong))


@pytest.mark.parametrize(
    "changes", [{"slowdown": [0.5, 1]}, {"memory_bytes": [0]}, {"steps": 0}, {"speed": [1]}]
)
def test_a_wrong_replay_section_is_refused(mixed: Scenario, changes: dict[str, Any]) -> None:
    key = next(iter(changes))
    with pytest.raises(UserError, match=rf"replay\.{key}"):
        scenario_with(mixed, {f"replay.{k}": v for k, v in changes.items()})


def test_document_has_both_sides_and_their_errors(mixed: Scenario) -> None:
    layout = replay_layout(mixed)
    emulation = scenario_emulation(mixed, layout)
    prediction = predict_emulated(mixed, layout, emulation)
    document = replay_document(layout, prediction, emulation, measured(), None)
    for key in ("step_time_s", "tokens_per_s", "peak_allocated_bytes"):
        ratio = document["predicted"][key] / document["measured"][key]
        assert document["errors"][key] == pytest.approx(ratio - 1)
    # Not measured: no allocator on a CPU, no clock in torch's own runtimes.
    assert not {"peak_reserved_bytes", "exposed_communication_s"} & document["errors"].keys()
    peaks = [r["predicted_peak_allocated_bytes"] for r in document["ranks"]]
    assert max(peaks) == document["predicted"]["peak_allocated_bytes"]


def test_errors_and_spread() -> None:
    assert relative_error(1.05, 1.0) == pytest.approx(0.05)
    assert step_spread([1.0, 1.2, 0.9]) == pytest.approx(0.3)
    assert warnings([1.0, 1.01]) == []
    assert "30%" in warnings([1.0, 1.2, 0.9])[0]


def test_seconds_of_an_unmeasured_device_are_doubted(mixed: Scenario) -> None:
    assert assumed_gpus(replay_layout(mixed)) == ["cpu"]
    assert assumed_gpus(replay_layout(load_scenario("llama-3.1-8b-dgx-h100"))) == []
    assert "assumed kernel rates" in warnings([1.0], ["cpu"])[0]


PLANS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "sharding": "zero1", "micro_batch": 2, "recompute": "full"},
    {"sharding": "zero3", "micro_batch": 4, "recompute": "none"},
]


def written(scenario: Scenario, folder: Path, **options: Any) -> RunCase:
    """The case that a reader makes of the row that a replay would write."""
    layout = replay_layout(scenario)
    path = folder / "runs.csv"
    path.write_text(runs_csv(layout, measured(layout.n_gpus), **options), encoding="utf-8")
    (case,) = read_cases(path)
    return case


def h100s(plan: dict[str, Any], model: str = "llama-3.1-8b") -> Scenario:
    return scenario_from_mapping(
        {
            "model": model,
            "workload": {"sequence_length": 2048, "global_batch": 64},
            "cluster": {"groups": [{"node": "dgx-h100"}]},
            "stack": "torchtitan",
            "plan": plan,
        }
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_row_is_read_back_as_the_plan_that_ran(plan: dict[str, Any], tmp_path: Path) -> None:
    scenario = h100s(plan)
    case = written(scenario, tmp_path)
    ran = replay_layout(scenario)
    assert case.layout is not None
    assert (case.layout.plan, case.layout.model) == (ran.plan, ran.model)
    assert (case.layout.classes, case.layout.workload) == (ran.classes, ran.workload)
    assert case.row.number("step_time_s") == 0.5


def test_a_model_that_is_no_preset_is_told_by_its_shape(tmp_path: Path) -> None:
    scenario = load_scenario("cpu-two-ranks")
    case = written(scenario, tmp_path)
    assert case.layout is not None
    assert case.layout.model == scenario.model


def test_what_the_columns_lack_is_refused_with_its_reason(mixed: Scenario, tmp_path: Path) -> None:
    case = written(mixed, tmp_path, emulated=True)
    assert case.layout is None
    assert "sharding" in case.reason
    notes = case.row.text("notes")
    for missing in ("an assignment", "layered gradient accumulation", "emulated devices"):
        assert missing in notes
