"""`gpumix replay` as a process: runs, failures, and nothing left behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.cli import main

pytest.importorskip("torch")

from real_runner.launch import out_of_memory

MODEL = {
    "name": "tiny-llama", "layers": 2, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "vocab": 256,
}  # fmt: skip
LOW_BYTES = 300_000


def scenario_file(folder: Path, **replay: Any) -> str:
    """An uneven plan on two CPU processes."""
    data = {
        "model": MODEL,
        "workload": {"sequence_length": 32, "global_batch": 3},
        "cluster": {"groups": [{"node": "cpu-host"}]},
        "stack": "gpumix",
        "plan": {
            "sharding": "zero3", "schedule": "layered", "precision": "fp32", "recompute": "full",
            "assignment": [
                {"group": 0, "replicas": 1, "micro_batch": 2, "count": 1, "state_share": 0.7},
                {"group": 0, "replicas": 1, "micro_batch": 1, "count": 1, "state_share": 0.3},
            ],
        },
        "replay": {"steps": 2, "warmup": 0, "threads": 1, **replay},
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "simulator", "replay", *arguments, "--device", "cpu"]


def environment(folder: Path) -> dict[str, str]:
    """Runs keep their files in ``folder``, which also marks their processes' command lines."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(folder / "tmp")}


def gpumix_replay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(folder), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def ranks_alive(folder: Path) -> list[str]:
    """Command lines of processes that name ``folder``'s temporary files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "real_runner.worker" in line and str(folder / "tmp") in line:
            found.append(line)
    return found


def test_a_run_is_held_against_its_prediction(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = gpumix_replay(
        tmp_path, scenario_file(tmp_path, slowdown=[1, 2]), "--steps", "3", "--json",
        "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads((out / "measured.json").read_text()) == document
    for side in ("predicted", "measured"):
        assert document[side]["step_time_s"] > 0
        assert document[side]["tokens_per_s"] == pytest.approx(96 / document[side]["step_time_s"])
    assert len(document["measured"]["step_times_s"]) == 3
    assert [r["slowdown"] for r in document["ranks"]] == [1, 2]
    # Shares, not amounts, are told apart here: the fuller rank is the one with more state.
    assert document["errors"]["peak_allocated_bytes"] == pytest.approx(0, abs=0.3)
    peaks = [r["peak_allocated_bytes"] for r in document["ranks"]]
    assert peaks[0] == document["measured"]["peak_allocated_bytes"] > peaks[1]
    (row,) = csv.DictReader((out / "runs.csv").open(encoding="utf-8"))
    assert float(row["step_time_s"]) == document["measured"]["step_time_s"]
    assert sorted(p.name for p in out.iterdir()) == ["measured.json", "runs.csv"]


def test_running_out_of_memory_exits_with_3(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = scenario_file(tmp_path, memory_bytes=[10**9, LOW_BYTES])
    done = gpumix_replay(tmp_path, path, "--json", "--out", str(out))
    assert done.returncode == 3, done.stderr
    assert "rank 1: oom" in done.stderr and "largest" in done.stderr
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    assert document["measured"] is None
    assert (document["failure"]["rank"], document["failure"]["cause"]) == (1, "oom")
    assert document["predicted"]["verdict"] == "does not fit"
    (row,) = csv.DictReader((out / "runs.csv").open(encoding="utf-8"))
    assert (row["outcome"], row["step_time_s"]) == ("oom", "")
    assert ranks_alive(tmp_path) == []


def test_a_run_past_its_time_exits_with_1_and_leaves_nothing(tmp_path: Path) -> None:
    path = scenario_file(tmp_path)
    done = gpumix_replay(tmp_path, path, "--steps", "100000", "--timeout", "2")
    assert done.returncode == 1
    assert "hang: not finished after 2 s" in done.stderr
    assert done.stdout == ""
    assert ranks_alive(tmp_path) == []
    assert list((tmp_path / "tmp").glob("gpumix-run-*")) == []


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_replay_takes_its_ranks_with_it(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    path = scenario_file(tmp_path)
    process = subprocess.Popen(
        command(path, "--steps", "100000"), env=environment(tmp_path),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 40
        while len(ranks_alive(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(ranks_alive(tmp_path)) == 2
        process.send_signal(number)
        assert process.wait(timeout=20) == code
    finally:
        process.kill()
        process.wait()
    assert ranks_alive(tmp_path) == []
    assert list((tmp_path / "tmp").glob("gpumix-run-*")) == []


def test_a_rank_of_another_launcher_reports_its_own_want_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    error = MemoryError("no room")
    error.add_note("live 1 MiB")
    failure = out_of_memory(error)
    assert (failure.rank, failure.exit_code) == (3, 3)
    assert str(failure) == "rank 3: oom: MemoryError: no room"


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from simulator.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_without_torch_the_extra_is_named() -> None:
    done = without_torch("replay", "cpu-single")
    assert done.returncode == 2
    assert "pip install 'gpumix[runner]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_torch() -> None:
    assert without_torch("replay", "--help").returncode == 0


@pytest.mark.parametrize(
    ("scenario", "said"),
    [("purchase-a-extend-a100", "plan: missing"), ("gpt3-175b-64-a100", "can't be run here")],
)
def test_what_cannot_be_run_exits_with_2(
    scenario: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", scenario])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert said in printed.err
