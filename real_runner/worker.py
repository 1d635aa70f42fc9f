"""The process of one rank: ``python -m real_runner.worker FOLDER RANK`` (see ``launch.py``)."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
#: What the messages of a collective look like when the other side has gone.
_LOST_PEER = ("Connection closed", "Connection reset", "connection closed", "Broken pipe", "NCCL")


def die_with_launcher(launcher: int) -> None:
    """Asks the kernel (Linux) to kill this process when its parent ends; checks that it lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _write(path: Path, value: Any) -> None:
    """Writes a pickle that is either whole or absent."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.replace(path)


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _run(folder: Path, rank: int, job: dict[str, Any]) -> Any:
    """Joins the process group and calls the job's function."""
    import torch
    import torch.distributed as dist

    from real_runner.launch import RankContext

    torch.set_num_threads(job["threads"])
    world, kind = job["world"], job["device"]
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=job["timeout_s"]),
        device_id=device if kind == "cuda" else None,
    )
    context = RankContext(rank, world, device, folder / f"progress-{rank}.txt")
    result = _resolve(job["function"])(context, *job["arguments"])
    dist.destroy_process_group()
    return result


def _record(rank: int, job: dict[str, Any], error: BaseException) -> dict[str, Any]:
    """What the launcher reads about a failure."""
    import torch

    from real_runner.memory import is_out_of_memory, memory_summary

    oom = is_out_of_memory(error)
    text = str(error)
    return {
        "rank": rank,
        "time": time.time(),
        "cause": "oom" if oom else "crash",
        "message": f"{type(error).__name__}: {text}",
        "lost_peer": not oom and any(word in text for word in _LOST_PEER),
        "memory": memory_summary(error, torch.device(job["device"])) if oom else "",
        "traceback": traceback.format_exc(),
    }


def main(folder: Path, rank: int) -> int:
    """Runs the rank; 0, 3 where memory ran out, else 1."""
    job = pickle.loads((folder / "job.pickle").read_bytes())
    die_with_launcher(job["launcher"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        _write(folder / f"result-{rank}.pickle", _run(folder, rank, job))
    except BaseException as error:
        record = _record(rank, job, error)
        _write(folder / f"failure-{rank}.pickle", record)
        return 3 if record["cause"] == "oom" else 1
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    # Past the interpreter's shutdown: a collective of a failed run may never return.
    os._exit(code)
