"""What the ranks of test runs do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from real_runner.launch import RankContext, launch
from real_runner.memory import MemoryMeter


def add_ranks(context: RankContext, offset: int) -> int:
    total = torch.tensor([context.rank])
    dist.all_reduce(total)
    return int(total) + offset


def crash_on_one(context: RankContext) -> None:
    if context.rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def exceed_budget(context: RankContext) -> None:
    if context.rank == 1:
        with MemoryMeter(context.device, limit_bytes=2**20):
            torch.zeros(2**20)
    dist.barrier()


def die_by_signal(context: RankContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def hang_with_child(context: RankContext, folder: str) -> None:
    if context.rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "child").write_text(str(child.pid))
    context.progress("the barrier" if context.rank == 0 else "a nap")
    Path(folder, f"rank{context.rank}").write_text(str(os.getpid()))
    if context.rank == 1:
        time.sleep(600)
    dist.barrier()


if __name__ == "__main__":
    import launch_cases

    launch(launch_cases.hang_with_child, (sys.argv[1],), world=2, timeout_s=300)
