"""Starts one process per rank on this machine and sees every run to an end.

A rank that fails, runs out of memory or hangs ends the run; nothing is left behind: each rank is
its own process group, which is killed at the end, and the kernel kills ranks whose launcher dies.
Under torchrun (or srun with its variables) the ranks exist already: see :func:`context_from_env`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from real_runner.memory import memory_summary
from simulator.errors import UserError

#: Seconds for other ranks to write what they saw after one has failed.
_GRACE_S = 1.0
_POLL_S = 0.02
_LOG_TAIL = 2000


@dataclass(frozen=True)
class RankContext:
    """What a rank's function is told: who it is, its device, and where to report progress."""

    rank: int
    world: int
    device: torch.device
    progress_file: Path | None = None

    def progress(self, text: str) -> None:
        """Says what the rank is doing; named if the run ends badly."""
        if self.progress_file is not None:
            self.progress_file.write_text(text, encoding="utf-8")


class RunFailure(RuntimeError):
    """A run that ended badly: the rank that began it, the cause, its memory.

    ``cause`` is ``oom``, ``crash`` (an exception), ``killed`` (a signal) or ``hang``.
    """

    def __init__(
        self, rank: int, cause: str, message: str, *, memory: str = "", log: str = ""
    ) -> None:
        self.rank, self.cause, self.memory, self.log = rank, cause, memory, log
        super().__init__(f"rank {rank}: {cause}: {message}")

    @property
    def exit_code(self) -> int:
        """3 where memory ran out, else 1."""
        return 3 if self.cause == "oom" else 1


def context_from_env() -> RankContext | None:
    """This process's rank where a launcher such as torchrun has set it, else None.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    return RankContext(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)


def out_of_memory(error: BaseException) -> RunFailure:
    """The failure of this process, a rank of another launcher, for want of memory."""
    context = context_from_env()
    assert context is not None
    message = f"{type(error).__name__}: {error}"
    return RunFailure(context.rank, "oom", message, memory=memory_summary(error, context.device))


def launch(
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    world: int,
    device: str = "cpu",
    timeout_s: float = 600.0,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs ``function(context, *arguments)`` in ``world`` processes; their results by rank.

    The function must be importable by its module's name, arguments and results picklable.
    ``threads`` per rank defaults to an equal part of the cores.

    Raises:
        RunFailure: a rank failed, or the run took longer than ``timeout_s``.
        UserError: more CUDA ranks than devices.
    """
    if device == "cuda" and world > torch.cuda.device_count():
        raise UserError(
            f"{world} ranks need {world} CUDA devices, {torch.cuda.device_count()} here"
        )
    with tempfile.TemporaryDirectory(prefix="gpumix-run-") as name:
        folder = Path(name)
        job = {
            "function": f"{function.__module__}:{function.__qualname__}",
            "arguments": tuple(arguments),
            "world": world,
            "device": device,
            "threads": threads or max(1, (os.cpu_count() or 1) // world),
            "timeout_s": timeout_s,
            "launcher": os.getpid(),
        }
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                processes.append(_start(folder, rank, environment or {}))
            _wait(folder, processes, timeout_s)
        finally:
            for process in processes:
                _kill(process)
        return [
            pickle.loads((folder / f"result-{rank}.pickle").read_bytes()) for rank in range(world)
        ]


def _start(folder: Path, rank: int, extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, **extra}
    # On one machine ranks meet over the loopback device, whatever the host's name resolves to.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with open(folder / f"log-{rank}.txt", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "real_runner.worker", str(folder), str(rank)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a rank and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(folder: Path, processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Returns when all ranks have finished; raises RunFailure as soon as one hasn't."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [p.poll() for p in processes]
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            time.sleep(_GRACE_S)
            raise _failure(folder, [p.poll() for p in processes])
        if time.monotonic() > deadline:
            raise _hang(folder, processes, timeout_s)
        time.sleep(_POLL_S)


def _failure(folder: Path, codes: Sequence[int | None]) -> RunFailure:
    """The failure that came first; ranks that only lost their peers are not the cause."""
    records = []
    for rank in range(len(codes)):
        path = folder / f"failure-{rank}.pickle"
        if path.exists():
            records.append(pickle.loads(path.read_bytes()))
    signals = [(rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0]
    own = sorted(
        (r for r in records if not r["lost_peer"]), key=lambda r: (r["cause"] != "oom", r["time"])
    )
    if own:
        first = own[0]
        return RunFailure(
            first["rank"],
            first["cause"],
            first["message"],
            memory=first["memory"],
            log=first["traceback"],
        )
    if signals:
        rank, number = signals[0]
        name = signal.Signals(number).name
        hint = " (the kernel's out-of-memory killer?)" if number == signal.SIGKILL else ""
        return RunFailure(rank, "killed", f"{name}{hint}", log=_tail(folder, rank))
    if records:
        first = min(records, key=lambda r: float(r["time"]))
        return RunFailure(first["rank"], "crash", first["message"], log=first["traceback"])
    rank = next(i for i, code in enumerate(codes) if code not in (None, 0))
    return RunFailure(rank, "crash", f"exit code {codes[rank]}", log=_tail(folder, rank))


def _hang(
    folder: Path, processes: Sequence[subprocess.Popen[bytes]], timeout_s: float
) -> RunFailure:
    """Asks the ranks that still run for their stacks and names the one that is furthest behind."""
    stuck = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in stuck:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_GRACE_S / 2)
    doing = {rank: _progress(folder, rank) for rank in stuck}
    where = "; ".join(f"rank {rank} in {text}" for rank, (_, text) in doing.items())
    first = min(stuck, key=lambda rank: doing[rank][0])
    message = f"not finished after {timeout_s:g} s: {where}"
    return RunFailure(first, "hang", message, log=_tail(folder, first))


def _progress(folder: Path, rank: int) -> tuple[float, str]:
    """When and what a rank last reported."""
    path = folder / f"progress-{rank}.txt"
    if not path.exists():
        return 0.0, "start"
    return path.stat().st_mtime, path.read_text(encoding="utf-8")


def _tail(folder: Path, rank: int) -> str:
    text = (folder / f"log-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    return text[-_LOG_TAIL:]
