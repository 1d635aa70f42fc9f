"""Rankings, held-out layers and the page of the accuracy benchmark, on rows made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import layer_errors, rankings, run, spearman
from benchmarks.accuracy_page import page
from simulator.analysis.prediction import Range
from simulator.errors import UserError
from simulator.interop.run_rows import RunRow
from simulator.interop.runs import RunCase
from simulator.interop.validation import RunPrediction
from tests.unit.test_runs import ROW, write


def plan(
    predicted_s: float, measured_s: float, *, risk: float = 0.0, outcome: str = "ok"
) -> object:
    """One plan of a group with the same tokens per step."""
    per_gpu = 1000.0
    return RunPrediction(
        RunCase(RunRow(2, {"model": "m", "gpu": "t4", "n_gpus": "4", "outcome": outcome}), None),
        step_time_s=Range(predicted_s, predicted_s, predicted_s),
        tokens_per_s_per_gpu=Range(0.0, per_gpu / predicted_s, 0.0),
        measured_step_time_s=measured_s or None,
        oom_risk=risk,
    )


def test_rank_correlation_of_known_orders() -> None:
    values = np.arange(10.0)
    assert spearman(values, values**3) == pytest.approx(1.0)
    assert spearman(values, -values) == pytest.approx(-1.0)
    # Ties share their mean rank: scipy.stats.spearmanr([1, 2, 2, 3], [1, 3, 2, 4]) = 0.9487.
    assert spearman(np.array([1, 2, 2, 3.0]), np.array([1, 3, 2, 4.0])) == pytest.approx(
        0.9487, abs=1e-4
    )


def test_regret_is_what_the_first_choice_loses() -> None:
    rows = [plan(1.0, 1.25), *[plan(1.0 + 0.1 * i, 1.0 + 0.1 * (i - 1)) for i in range(1, 12)]]
    found = rankings(rows)  # type: ignore[arg-type]
    assert found is not None
    assert found["regret"] == pytest.approx(1.0 - 1.0 / 1.25)
    assert found["groups"] == 1 and found["plans"] == 12


def test_a_first_choice_that_failed_loses_everything() -> None:
    good = [plan(1.0 + 0.1 * i, 1.0 + 0.1 * i) for i in range(1, 12)]
    missed, foreseen = (
        rankings([plan(0.5, 0.0, risk=r, outcome="oom"), *good])  # type: ignore[list-item]
        for r in (0.1, 0.9)
    )
    assert missed is not None and missed["regret"] == 1.0
    assert foreseen is not None and foreseen["regret"] == pytest.approx(0.0)


def test_few_plans_make_no_ranking() -> None:
    assert rankings([plan(1.0, 1.0)] * 5) is None  # type: ignore[list-item]


def test_the_page_has_every_table(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    cells = ROW | {"peak_allocated_gib": "10", "peak_reserved_gib": "11"}
    write(tmp_path / "runs", f"{','.join(cells)}\n{','.join(cells.values())}\n", "own.csv")
    header = "model,arch,hidden,ffn_hidden,heads,kv_heads,gpu,seq_len,dtype,micro_batch,fwd_ms"
    layer = "a,llama,4096,11008,32,32,L4,512,float16,8,30,60"
    write(tmp_path, f"{header},bwd_ms\n{layer}\n", "layers.csv")
    figures = run(json=True, data=tmp_path)
    assert figures["sources"]["own"]["time"]["n"] == 1
    assert figures["layers"]["stand_in"] == {"l4": "transferred from a40"}
    text = page(figures)
    assert "| own | 1 | 0 | 1 |" in text and "| own | reserved | 1 |" in text
    assert "| l4 | 2 |" in text


def test_a_layer_table_with_reference_gpus_only(tmp_path: Path) -> None:
    header = "arch,hidden,ffn_hidden,heads,kv_heads,gpu,seq_len,dtype,micro_batch,fwd_ms,bwd_ms"
    path = write(tmp_path, f"{header}\nllama,4096,11008,32,32,A100-SXM-80GB,512,fp16,8,8,16\n")
    found = layer_errors(path)
    assert found["seen"]["n"] == 2 and found["unseen"]["n"] == 0


def test_a_folder_without_tables_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no CSV tables"):
        run(data=tmp_path)


def test_peaks_widen_from_allocated_to_device() -> None:
    from simulator.analysis.peaks import layout_peaks
    from simulator.interop.runs import run_case

    case = run_case(RunRow(2, ROW))
    assert case.layout is not None
    found = layout_peaks(case.layout)
    assert found.allocated.p50 < found.reserved.p50 < found.device.p50
    for part in (found.allocated, found.reserved, found.device):
        assert part.p10 < part.p50 < part.p90
        assert part.p50 / part.p10 == pytest.approx(part.p90 / part.p50)
