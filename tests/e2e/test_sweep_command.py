"""``gpumix sweep`` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd

SCENARIO = "llama-3.1-8b-dgx-h100"


def gpumix(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_json_holds_all_points_best_first() -> None:
    done = gpumix("sweep", SCENARIO, "--axis", "plan.tp=1,2,3", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["n_points"] == len(document["points"]) == 3
    assert document["points"][0] == document["best"]
    assert document["points"][-1]["status"] == "infeasible"
    assert sum(document["infeasible"].values()) == 1


def test_files_and_resume(tmp_path: Path) -> None:
    arguments = ("sweep", SCENARIO, "--axis", "plan.tp=1,2", "--out", str(tmp_path))
    done = gpumix(*arguments)
    assert done.returncode == 0
    assert "BEST" in done.stdout
    table = pd.read_csv(tmp_path / "points.csv")
    assert list(table["plan.tp"]) == [p for p in table["plan.tp"]]
    assert table["tokens_per_s"].is_monotonic_decreasing
    page = (tmp_path / "report.html").read_text()
    assert "Throughput" in page
    assert "heatmap" in page
    log = tmp_path / "points.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:2]) + "\n")
    again = gpumix(*arguments, "--resume")
    assert again.returncode == 0
    assert sorted(log.read_text().splitlines()) == sorted(lines)
    other = gpumix(*arguments[:3], "plan.tp=1", *arguments[4:], "--resume")
    assert other.returncode == 2
    assert "another sweep" in other.stderr


def test_interrupted_sweeps_keep_what_is_done(tmp_path: Path) -> None:
    batches = ",".join(str(8 * n) for n in range(1, 2000))
    arguments = ["sweep", SCENARIO, "--axis", f"workload.global_batch={batches}",
                 "--jobs", "1", "--out", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "simulator", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = tmp_path / "points.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 3):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "BEST" in out
    kept = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert len({r["index"] for r in kept}) == len(kept) > 2


def test_nothing_fits_exits_with_3_and_mistakes_with_2() -> None:
    assert gpumix("sweep", "gpt3-175b-64-a100", "--axis", "plan.tp=1", "--json").returncode == 3
    assert gpumix("sweep", SCENARIO).returncode == 2
    assert gpumix("sweep", SCENARIO, "--axis", "plan.tpp=1").returncode == 2
    assert gpumix("sweep", SCENARIO, "--axis", "plan.tp=1", "--resume").returncode == 2
