"""``gpumix validate`` as a user runs it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_runs import ROW
from tests.unit.test_validation import LAYER


def gpumix(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulator", "validate", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two rows that can be predicted, one that can't."""
    return table(
        tmp_path / "runs.csv",
        ROW | {"peak_allocated_gib": "10", "peak_reserved_gib": ""},
        ROW | {"peak_allocated_gib": "", "peak_reserved_gib": "11", "stack": "torchtitan"},
        ROW | {"peak_allocated_gib": "", "peak_reserved_gib": "", "stack": "own-stack"},
    )


def test_json_holds_the_stable_keys(runs: Path) -> None:
    done = gpumix(str(runs), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"n", "mape", "median_ape", "p90_ape", "bias"} <= set(found["summary"]["time"])
    assert found["summary"]["time"]["n"] == 2
    assert found["summary"]["memory"]["n"] == 1
    assert found["summary"]["memory_reserved"]["n"] == 1
    assert {"n", "false_fits", "false_ooms", "brier"} <= set(found["summary"]["oom"])
    row = found["rows"][0]
    error = row["predicted_step_time_s"] / row["measured_step_time_s"] - 1
    assert row["time_error"] == pytest.approx(error)
    for name in ("step_time_s", "tokens_per_s_per_gpu", "peak_allocated_gib", "peak_reserved_gib"):
        assert row[f"predicted_{name}_p10"] < row[f"predicted_{name}"]
        assert row[f"predicted_{name}"] < row[f"predicted_{name}_p90"]
    assert 0 <= row["oom_risk"] <= 1


def test_rows_that_cannot_be_expressed_are_listed(runs: Path) -> None:
    done = gpumix(str(runs))
    assert done.returncode == 0
    assert "runs.csv:4: not predicted: stack 'own-stack' is unknown" in done.stderr
    found = json.loads(gpumix(str(runs), "--json").stdout)
    assert [item["line"] for item in found["inexpressible"]] == [4]
    assert len(found["rows"]) == 3


def test_a_stack_can_be_set_for_all_rows(runs: Path) -> None:
    found = json.loads(gpumix(str(runs), "--stack", "megatron-core", "--json").stdout)
    assert found["inexpressible"] == []
    assert list(found["by"]["stack"]) == ["megatron-core"]
    assert gpumix(str(runs), "--stack", "nonesuch").returncode == 2


def test_layer_tables_are_recognised(runs: Path) -> None:
    layers = table(runs.with_name("layers.csv"), LAYER)
    found = json.loads(gpumix(str(runs), str(layers), "--json").stdout)
    assert found["summary"]["layers"]["n"] == 2
    assert found["summary"]["time"]["n"] == 2
    assert found["rows"][3]["predicted_fwd_ms"] > 0


def test_the_report_is_one_page_beside_its_data(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = gpumix(str(runs), "--out", str(out), "--worst", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("runs.csv:") == 1
    page = (out / "report.html").read_text()
    assert "Predicted against measured" in page and "worst rows" in page
    assert 'src="http' not in page
    assert json.loads((out / "result.json").read_text())["summary"]["rows"] == 3
    with (out / "rows.csv").open() as handle:
        assert len(list(csv.DictReader(handle))) == 3


@pytest.mark.parametrize("text", ["", "gpu,seq_len\n1,nan\n", "a,b\n1,2\n", "\0\1"])
def test_bad_files_end_with_code_2(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    done = gpumix(str(path), "--json")
    assert done.returncode == 2
    assert done.stdout == "" and "bad.csv" in done.stderr
    assert "Traceback" not in done.stderr
