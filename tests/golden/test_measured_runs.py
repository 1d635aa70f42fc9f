"""Measured runs of public sources stay predicted as well as they are: caps on errors by source.

The caps are the errors of the shipped calibration on every row, rounded up; docs/accuracy.md has
the errors on rows that a fit hasn't seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy import rankings
from simulator.interop.layers import layer_summary, predict_layers
from simulator.interop.run_rows import read_table
from simulator.interop.runs import run_case
from simulator.interop.summaries import memory_summary, oom_summary, time_summary
from simulator.interop.validation import RunPrediction, predict_run

#: Rows of a table that a test predicts, evenly spread.
SAMPLE = 40
#: Where each row stands for many plans.
OPEN_SAMPLE = 5


def predicted(data_dir: Path, table: str, sample: int = SAMPLE) -> list[RunPrediction]:
    """Predictions of a table's rows; all of them are expressed."""
    rows = read_table(data_dir / "runs" / f"{table}.csv").rows
    step = max(len(rows) / sample, 1.0)
    chosen = [rows[int(i * step)] for i in range(min(len(rows), sample))]
    found = [predict_run(run_case(row)) for row in chosen]
    assert [r.reason for r in found if not r.is_expressed] == []
    return found


@pytest.mark.parametrize(
    ("table", "cap"),
    [
        ("amp_t4", 0.14),
        ("b200", 0.05),
        ("dgxc_h100", 0.03),
        ("llm_foundry", 0.05),
        ("megatron_2104_04473", 0.13),
        ("megatron_2205_05198", 0.04),
        ("nemo_h100_fp8", 0.08),
        ("sailor_gh200", 0.12),
        ("torchtitan", 0.055),
        ("vtrain_multi", 0.10),
        ("vtrain_single", 0.10),
    ],
)
def test_step_time_by_source(data_dir: Path, table: str, cap: float) -> None:
    sample = OPEN_SAMPLE if table == "megatron_2104_04473" else SAMPLE
    found = time_summary(predicted(data_dir, table, sample))
    assert found.mape is not None and found.mape <= cap


@pytest.mark.parametrize(
    ("table", "column", "cap"),
    [
        ("b200", "peak_allocated_gib", 0.02),
        ("b200", "peak_reserved_gib", 0.04),
        ("sailor_gh200", "peak_allocated_gib", 0.05),
        ("torchtitan", "peak_reserved_gib", 0.04),
    ],
)
def test_every_peak_by_source(data_dir: Path, table: str, column: str, cap: float) -> None:
    """Caps hold for each row: SimuMax docs/b200, Sailor's logs, torchtitan benchmarks."""
    rows = predicted(data_dir, table)
    errors = [e for r in rows if (e := r.memory_error(column)) is not None]
    assert len(errors) >= 8
    assert max(abs(e) for e in errors) <= cap
    coverage = memory_summary(rows, column).coverage
    assert coverage is not None and coverage >= 0.7


def test_out_of_memory_on_t4(data_dir: Path) -> None:
    """arXiv 2210.07297: five of 52 plans failed; no run that trained is called a failure."""
    found = oom_summary(predicted(data_dir, "amp_t4", 52))
    assert (found["n"], found["failed"]) == (52, 5)
    assert found["false_ooms"] == 0 and found["false_fits"] <= 1
    assert found["at_10_percent"]["false_fits"] == 0
    assert found["brier"] < 0.05


@pytest.mark.parametrize(("table", "correlation"), [("b200", 0.9), ("amp_t4", 0.85)])
def test_the_better_plan_ranks_first(data_dir: Path, table: str, correlation: float) -> None:
    found = rankings(predicted(data_dir, table, 60))
    assert found is not None
    assert found["spearman_worst"] >= correlation
    assert found["regret_worst"] <= 0.1


def test_layers_by_gpu(data_dir: Path) -> None:
    """Thirteen GPU types (benson-guo/zorse, cephalo): half of the times within 6 %."""
    total = layer_summary(predict_layers(read_table(data_dir / "layers.csv").rows))
    assert total["n"] == 4706
    assert total["median_ape"] <= 0.06
    assert max(part["median_ape"] for part in total["by_gpu"].values()) <= 0.14
