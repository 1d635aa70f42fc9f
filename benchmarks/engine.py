"""Speed and memory of the SimPy engine and of the closed form on large plans.

Plans are made of synthetic times: what is measured is the number of tasks, not the cost model.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from simulator.cost.times import ChunkTimes, ClassTimes, PassTimes, UnitTimes
from simulator.evaluate.closed_form import closed_form
from simulator.evaluate.engine import EngineOptions, simulate_step
from simulator.evaluate.uniform import Kinds, UniformPipeline, uniform_pipeline_s
from simulator.graph.build import build_step
from simulator.spec.layout import Layout, Pipeline, RankClass
from simulator.spec.plan import Plan
from simulator.spec.stack import Overlap

#: Plans per call of the batch formula: arrays that stay in the processor's cache.
BATCH = 8192


def _layout(
    micro_batches: Sequence[int], pp: int, vpp: int, schedule: str, replicas: Sequence[int], tp: int
) -> Layout:
    """One pipeline class per entry; the fields that the graph does not read stay empty."""
    classes = tuple(
        RankClass(
            index=q * pp + stage,
            gpu=cast(Any, None),
            group=q,
            stage=stage,
            pp=pp,
            tp=tp,
            cp=1,
            chunks=(1,) * vpp,
            moe_chunks=(0,) * vpp,
            micro_batch=1,
            micro_batches=m,
            state_share=1.0 / replicas[q],
            replicas=replicas[q],
        )
        for q, m in enumerate(micro_batches)
        for stage in range(pp)
    )
    pipelines = tuple(
        Pipeline(tuple(range(q * pp, (q + 1) * pp)), count) for q, count in enumerate(replicas)
    )
    none = cast(Any, None)
    return Layout(
        model=none,
        workload=none,
        cluster=none,
        plan=Plan(pp=pp, vpp=vpp, tp=tp, schedule=cast(Any, schedule)),
        stack=cast(Any, SimpleNamespace(overlap=Overlap(dp=0.8))),
        classes=classes,
        pipelines=pipelines,
    )


def _times(layout: Layout, speed: Sequence[float]) -> list[ClassTimes]:
    """Passes of about 10 ms, faster or slower by pipeline."""
    times = []
    for c in layout.classes:
        one = PassTimes(compute=10e-3 / speed[c.group] / len(c.chunks), tp=1e-3)
        chunk = ChunkTimes(one, one, one, grad_reduce=30e-3, param_gather=15e-3)
        times.append(ClassTimes((chunk,) * len(c.chunks), (), 0.3e-3, 0.3e-3, 5e-3, 5e-3))
    return times


def _peak_bytes() -> int:
    """Largest resident memory of this process so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure(layout: Layout, times: Sequence[ClassTimes]) -> dict[str, float]:
    """Build and run one step with its timeline; then the closed form of the same."""
    start = time.perf_counter()
    graph = build_step(layout, times)
    built = time.perf_counter()
    result = simulate_step(graph, EngineOptions())
    ran = time.perf_counter()
    form = closed_form(layout, times)
    solved = time.perf_counter()
    return {
        "gpus": layout.n_gpus,
        "rank_classes": len(layout.classes),
        "micro_batches": max(c.micro_batches for c in layout.classes),
        "tasks": graph.n_tasks,
        "events": result.n_events,
        "build_s": built - start,
        "engine_s": ran - built,
        "total_s": ran - start,
        "tasks_per_s": graph.n_tasks / (ran - start),
        "closed_form_s": solved - ran,
        "closed_form_error": form.step_time_s / result.step_time_s - 1.0,
        "step_time_s": result.step_time_s,
        "peak_bytes": _peak_bytes(),
    }


def _large_uniform(micro_batches: int) -> dict[str, float]:
    """16,384 GPUs: tp 8, pp 16, vpp 8, dp 128."""
    layout = _layout([micro_batches], 16, 8, "interleaved", [128], 8)
    return _measure(layout, _times(layout, [1.0]))


def _mixed() -> dict[str, float]:
    """100,352 GPUs of three types: three pipeline classes of 16 stages, uneven micro-batches."""
    layout = _layout([64, 32, 16], 16, 1, "1f1b", [384, 256, 144], 8)
    return _measure(layout, _times(layout, [2.0, 1.0, 0.5]))


def _sharded(micro_batches: int, classes: int) -> dict[str, float]:
    """Fully sharded, 80 units per rank class, micro-batch by micro-batch."""
    layout = _layout([micro_batches] * classes, 1, 1, "1f1b", [1024] * classes, 1)
    passes = PassTimes(compute=1e-3)
    units = (UnitTimes("layer", 80, passes, passes.scaled(2.0), 1e-3, 1e-3, 2e-3),)
    empty = ChunkTimes(passes, passes, PassTimes())
    return _measure(layout, [ClassTimes((empty,), units, 0.0, 0.0, 5e-3, 5e-3)] * classes)


def _growth(sizes: Sequence[int]) -> list[dict[str, float]]:
    """Cost against rank classes x micro-batches: 1F1B of more stages, classes and batches."""
    rows = []
    for pipelines in (1, 3):
        for pp in sizes:
            for m in sizes:
                layout = _layout([m] * pipelines, pp, 1, "1f1b", [16] * pipelines, 8)
                row = _measure(layout, _times(layout, [1.0] * pipelines))
                row["classes_x_micro_batches"] = len(layout.classes) * m
                rows.append(row)
    return rows


def _plans_per_s(repeats: int) -> dict[str, float]:
    """Uniform pipelines that the batch formula prices per second, one core."""
    rng = np.random.default_rng(0)
    pp = rng.choice([1, 2, 4, 8, 16], BATCH)
    m, vpp = pp * rng.integers(1, 16, BATCH), rng.choice([1, 2, 4], BATCH)

    def kinds() -> Kinds:
        first, middle, last = rng.uniform(0.9, 1.2, (3, BATCH))
        return Kinds(first, middle, last)

    stage = UniformPipeline(kinds(), kinds(), kinds(), *rng.uniform(0, 0.1, (2, BATCH)))
    rates = {}
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        start = time.perf_counter()
        for _ in range(repeats):
            uniform_pipeline_s(schedule, stage, pp, vpp, m)
        rates[schedule] = repeats * BATCH / (time.perf_counter() - start)
    return rates


def _reference_loop_s() -> float:
    """A fixed pure Python loop: how fast this machine is just now."""
    start = time.perf_counter()
    total = 0
    for n in range(1_000_000):
        total += n & 7
    assert total > 0
    return time.perf_counter() - start


def run(json: bool = False, *, quick: bool = False) -> dict[str, Any]:
    """Figures of the engine issue; ``quick`` is the smoke run of the test server.

    ``json`` leaves progress out. Each rate stands beside its ratio to the reference loop.
    """
    cases: dict[str, Callable[[], Any]] = {
        "interleaved_16384_gpus": lambda: _large_uniform(16 if quick else 32),
        "mixed_100352_gpus": _mixed,
        "fsdp_80_units_64_micro_batches": lambda: _sharded(4 if quick else 64, 1),
        "fsdp_3_classes": lambda: _sharded(2 if quick else 16, 3),
        "growth": lambda: _growth((4, 16) if quick else (4, 8, 16, 32, 64)),
        "formula_plans_per_s": lambda: _plans_per_s(1 if quick else 20),
    }
    reference = _reference_loop_s()
    figures: dict[str, Any] = {"reference_loop_s": reference}
    for name, case in cases.items():
        figures[name] = case()
        if not json:
            print(name, figures[name])
    for value in figures.values():
        if isinstance(value, dict) and "tasks_per_s" in value:
            value["tasks_per_reference_loop"] = value["tasks_per_s"] * reference
    rates = figures["formula_plans_per_s"]
    figures["formula_plans_per_reference_loop"] = {k: v * reference for k, v in rates.items()}
    return figures
