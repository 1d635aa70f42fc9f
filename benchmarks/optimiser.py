"""Time of GPUMix's optimiser: 64 mixed GPUs, and 1,024 GPUs of four types.

Each time also stands as a ratio to a fixed loop of numpy operations timed in the same run, which
makes runs on different machines comparable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from simulator.planner.gpumix import plan_gpumix
from simulator.planner.rank_tables import Job
from simulator.planner.recommend import base_plan
from simulator.spec.scenario import Scenario, scenario_from_mapping

_TYPES = ("a100-sxm-80gb", "h100-sxm-80gb", "l40s", "a100-sxm-40gb")


def mixed(model: str, nodes: int, batch: int, sequence_length: int = 2048) -> Scenario:
    """``nodes`` nodes of eight GPUs of each of four types."""
    groups = [{"gpu": gpu, "gpus_per_node": 8, "count": nodes} for gpu in _TYPES]
    return scenario_from_mapping(
        {
            "model": model,
            "workload": {"sequence_length": sequence_length, "global_batch": batch},
            "cluster": {"groups": groups, "fabric": "hdr-infiniband"},
            "stack": "gpumix",
        }
    )


def reference_s() -> float:
    """Processor seconds of the reference loop: 200 fused multiply-adds over a million numbers."""
    values = np.linspace(0.0, 1.0, 1_000_000)
    start = time.process_time()
    for _ in range(200):
        values = values * 0.999 + 0.001
    return time.process_time() - start


def _timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - clock, time.process_time() - processor, result


def run(json: bool = False) -> dict[str, Any]:
    """Seconds of clock and processor, ratio to the reference loop, and each case's proven gap."""
    del json  # this benchmark prints nothing while it runs
    reference = reference_s()
    cases = {
        "64_gpus_batch_1024": mixed("llama-2-7b", 2, 1024),
        "1024_gpus_batch_8192": mixed("llama-2-13b", 32, 8192),
    }
    rows = {}
    for name, scenario in cases.items():
        job = Job(scenario.model, scenario.workload, scenario.cluster, scenario.stack,
                  scenario.risk)  # fmt: skip
        base = base_plan(scenario, {})
        seconds, processor, found = _timed(partial(plan_gpumix, job, base))
        best = found[0]
        rows[name] = {
            "seconds": seconds,
            "cpu_seconds": processor,
            "reference_loops": processor / reference,
            "gpus": job.cluster.n_gpus,
            "step_time_s": best.step_time_s,
            "bound_s": best.bound_s,
            "gap": best.gap,
        }
    return {"reference_s": reference, "cases": rows}
