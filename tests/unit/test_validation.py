"""Errors and risks summed up: rows made by hand with known errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analysis.prediction import Range
from simulator.interop.layers import layer_summary, predict_layers
from simulator.interop.run_rows import RunRow
from simulator.interop.runs import RunCase, run_case
from simulator.interop.summaries import (
    memory_summary,
    oom_summary,
    summarise,
    time_summary,
    worst_rows,
)
from simulator.interop.validation import RunPrediction, predict_run
from tests.unit.test_runs import ROW


def predicted(error: float, **cells: str) -> RunPrediction:
    """A run of 2 s whose prediction is off by ``error``, with a range of 10 % around it."""
    step = 2.0 * (1.0 + error)
    case = RunCase(RunRow(2, cells), None)
    return RunPrediction(
        case, step_time_s=Range(0.9 * step, step, 1.1 * step), measured_step_time_s=2.0
    )


def risky(risk: float, outcome: str) -> RunPrediction:
    return replace(predicted(0.0, outcome=outcome), oom_risk=risk, eighty_percent_rule=risk < 0.3)


def test_summary_of_known_errors() -> None:
    found = summarise([-0.2, 0.0, 0.1, 0.1, 0.1], [True, True, False, False, True])
    assert found.n == 5
    assert found.mape == pytest.approx(0.1)
    assert found.median_ape == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.1)
    assert found.p90_ape == pytest.approx(0.16)
    assert found.coverage == pytest.approx(0.6)


def test_no_rows_give_no_figures() -> None:
    assert summarise([]).to_json() == {
        "n": 0, "mape": None, "median_ape": None, "p90_ape": None, "bias": None, "coverage": None
    }  # fmt: skip


def test_time_counts_rows_with_a_measurement() -> None:
    unmeasured = replace(predicted(0.5), measured_step_time_s=None)
    found = time_summary([predicted(0.05), predicted(-0.3), unmeasured])
    assert found.n == 2
    assert found.mape == pytest.approx(0.175)
    assert found.coverage == pytest.approx(0.5)


def test_memory_compares_the_named_peak() -> None:
    row = replace(predicted(0.0, peak_reserved_gib="10"), peak_reserved_gib=Range(10.0, 11.0, 12.0))
    assert memory_summary([row], "peak_reserved_gib").mape == pytest.approx(0.1)
    assert memory_summary([row], "peak_reserved_gib").coverage == 1.0
    assert memory_summary([row], "peak_allocated_gib").n == 0


def test_oom_counts_both_mistakes_at_both_risks() -> None:
    rows = [risky(0.9, "oom"), risky(0.2, "oom_or_failed"), risky(0.6, "ok"), risky(0.01, "ok"),
            risky(0.5, "")]  # fmt: skip
    found = oom_summary(rows)
    assert (found["n"], found["failed"]) == (4, 2)
    assert (found["false_fits"], found["false_ooms"]) == (1, 1)
    assert found["at_10_percent"]["false_fits"] == 0
    assert found["at_10_percent"]["true_ooms"] == 2
    assert found["eighty_percent_rule"]["false_fits"] == 1
    assert found["brier"] == pytest.approx((0.01 + 0.64 + 0.36 + 0.0001) / 4)
    assert sum(b["n"] for b in found["calibration"]) == 4


def test_worst_rows_come_first() -> None:
    rows = [predicted(e) for e in (0.1, -0.4, 0.2)]
    assert [r.time_error for r in worst_rows(rows, 2)] == pytest.approx([-0.4, 0.2])


def measured(**cells: str) -> float:
    """Measured step time of the shared row with its time given otherwise."""
    found = predict_run(run_case(RunRow(2, ROW | {"step_time_s": ""} | cells)))
    assert found.measured_step_time_s is not None
    return found.measured_step_time_s


def test_a_rate_stands_for_the_step_time() -> None:
    tokens_per_gpu = 16 * 2048 / 8
    assert measured(tokens_per_s_per_gpu="8192") == pytest.approx(tokens_per_gpu / 8192)


def test_mfu_and_tflops_stand_for_the_step_time() -> None:
    """989.4 TFLOP/s is the H100 SXM's dense bf16 peak (NVIDIA datasheet)."""
    by_flops = measured(tflops_per_gpu="400")
    assert measured(mfu=str(400 / 989.4)) == pytest.approx(by_flops, rel=2e-3)
    counted = measured(tflops_per_gpu="400", notes="FLOPs counted with full recomputation")
    # A third more for the layers, nothing for the head of 2048 x 32000 (arXiv 2104.04473).
    head = 6 * 2048 * 32000 * 16 * 2048 / (8 * 400e12)
    assert counted == pytest.approx(4 / 3 * by_flops - head / 3)


def test_a_fractional_micro_batch_lies_between_two_counts() -> None:
    times = []
    for count, batch in (("4", "8"), ("4.5", "9"), ("5", "10")):
        found = predict_run(run_case(RunRow(2, ROW | {"grad_accum": count, "global_batch": batch})))
        assert found.step_time_s is not None
        times.append(found.step_time_s.p50)
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)


def test_a_row_that_cannot_be_priced_has_a_reason() -> None:
    found = predict_run(run_case(RunRow(2, ROW | {"gpu": "A100-SXM-80GB", "precision": "fp8"})))
    assert not found.is_expressed and "fp8" in found.reason
    document = found.to_json()
    assert document["expressible"] is False and document["predicted_step_time_s"] is None


def test_the_document_of_a_row_keeps_its_cells() -> None:
    found = predict_run(run_case(RunRow(2, ROW | {"own_column": "kept"}))).to_json()
    assert found["own_column"] == "kept" and found["layers"] == 16
    assert found["predicted_step_time_s_p10"] < found["predicted_step_time_s"]
    assert found["predicted_peak_allocated_gib"] < found["predicted_peak_reserved_gib"]
    assert found["measured_step_time_s"] == 1.0


def test_logged_peaks_are_compared_with_device_memory() -> None:
    found = predict_run(run_case(RunRow(2, ROW | {"notes": "peak as logged"})))
    assert found.peak_allocated_gib == found.peak_device_gib


LAYER = {
    "arch": "llama", "hidden": "4096", "ffn_hidden": "11008", "heads": "32", "kv_heads": "32",
    "gpu": "A100-SXM-80GB", "seq_len": "512", "dtype": "float16", "micro_batch": "8",
    "fwd_ms": "8", "bwd_ms": "16",
}  # fmt: skip


def test_layers_are_predicted_by_gpu_and_pass() -> None:
    rows = [RunRow(i, LAYER | {"micro_batch": str(i)}) for i in (1, 8)]
    found = predict_layers([*rows, RunRow(9, LAYER | {"dtype": "int3"})])
    assert found[0].forward_s and found[1].forward_s
    assert 4.0 < found[1].forward_s / found[0].forward_s < 8.5
    assert found[2].forward_s is None and found[2].reason.startswith("dtype")
    total = layer_summary(found)
    assert total["n"] == 4 and total["forward"]["n"] == 2
    assert list(total["by_gpu"]) == ["a100-sxm-80gb"]


def test_a_faster_gpu_runs_a_layer_faster() -> None:
    rows = [RunRow(2, LAYER | {"gpu": name}) for name in ("T4", "A100-SXM-80GB", "H100-SXM-80GB")]
    times = [p.forward_s for p in predict_layers(rows)]
    assert times == sorted(times, reverse=True)  # type: ignore[type-var]
