"""A run ends, with its cause named and nothing left behind, whatever a rank does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import launch_cases  # noqa: E402

from real_runner.launch import RunFailure, context_from_env, launch  # noqa: E402


def alive(pid_file: Path) -> bool:
    """Whether the process of a file is running (a zombie isn't)."""
    try:
        stat = Path(f"/proc/{int(pid_file.read_text())}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_results_come_back_by_rank() -> None:
    assert launch(launch_cases.add_ranks, (10,), world=2, timeout_s=60) == [11, 11]


def test_a_crash_names_the_rank_that_began_it() -> None:
    with pytest.raises(RunFailure, match="rank 1: crash: KeyError: 'the cause'") as caught:
        launch(launch_cases.crash_on_one, world=2, timeout_s=60)
    assert caught.value.exit_code == 1 and "crash_on_one" in caught.value.log


def test_running_out_of_memory_has_its_own_exit_code() -> None:
    with pytest.raises(RunFailure, match=r"rank 1: oom: .*emulated device has 1.0 MiB") as caught:
        launch(launch_cases.exceed_budget, world=2, timeout_s=60)
    assert caught.value.exit_code == 3 and "live 4.0 MiB" in caught.value.memory


def test_a_signal_is_named() -> None:
    with pytest.raises(RunFailure, match="rank 1: killed: SIGSEGV"):
        launch(launch_cases.die_by_signal, world=2, timeout_s=60)


def test_a_hang_ends_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailure, match=r"hang: not finished after 12 s.*rank 1 in a nap"
    ) as caught:
        launch(launch_cases.hang_with_child, (str(tmp_path),), world=2, timeout_s=12)
    assert "hang_with_child" in caught.value.log
    assert not any(alive(tmp_path / name) for name in ("rank0", "rank1", "child"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    script = Path(launch_cases.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    launcher = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    deadline = time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(alive(f) for f in files)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    while any(alive(f) for f in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(f) for f in files)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_torchrun_variables_make_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_from_env() is None
    values = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    context = context_from_env()
    assert context is not None and (context.rank, context.world) == (3, 4)
