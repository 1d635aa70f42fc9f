"""Plans per second of the closed form on grids of 10^4 to 10^7 plans, one core.

A dense model (GPT-3 175B on 512 A100) over all uniform plans, and, for larger grids, over kernels,
precision and offloading too. Every plan gets its step time, its memory and its risk of running out
of memory; no plan is skipped. Building the grids is counted apart.
"""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.reference import Timed, element_operations_per_s, timed
from simulator.planner.grid import GridPricer
from simulator.planner.plan_grid import PlanGrid
from simulator.planner.space import Space, default_axes, offloadable
from simulator.planner.tables import Tables
from simulator.spec.plan import Plan
from simulator.spec.resolve_plan import Case
from simulator.spec.scenario import Scenario, scenario_from_mapping

#: Plan fields that multiply the space: what a search over everything would try.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp16", "bf16_grad16"),
    "offload": ("none", "optimizer", "state", "activations"),
    "attention": ("flash2", "unfused"),
    "compile": (False, True),
}
TARGET_PLANS_PER_S = 1e6

_Part = tuple[GridPricer, PlanGrid]


def gpt3(global_batch: int = 3840) -> Scenario:
    """GPT-3 175B on 512 A100."""
    return scenario_from_mapping(
        {
            "model": "gpt3-175b",
            "workload": {"sequence_length": 2048, "global_batch": global_batch},
            "cluster": {
                "groups": [{"node": "dgx-a100-80gb", "count": 64}],
                "fabric": "hdr-infiniband",
            },
            "stack": "megatron-core",
        }
    )


def _variants(space: Space, wanted: int) -> list[Plan]:
    """As many combinations of options, with other optimisers, as ``wanted`` plans need."""
    names = ("optimizer", *OPTIONS)
    chunks = list(space.chunks())
    found: list[Plan] = []
    left = wanted
    for values in itertools.product(("adamw", "lion", "sgd_momentum"), *OPTIONS.values()):
        if left <= 0:
            break
        like = replace(Plan(), **dict(zip(names, values, strict=True)))
        found.append(like)
        left -= sum(len(offloadable(chunk, like)) for chunk in chunks)
    return found


def _parts(space: Space, pricers: list[GridPricer], wanted: int) -> Iterator[_Part]:
    """Grids of ``wanted`` legal plans together, each with the pricer of its variant."""
    left = wanted
    for whole in space.chunks():
        for pricer in pricers:
            chunk = offloadable(whole, pricer.like)
            if not len(chunk):
                continue
            part = chunk if len(chunk) <= left else chunk.take(np.arange(left))
            left -= len(part)
            yield pricer, part
            if not left:
                return


def measure(wanted: int) -> dict[str, float]:
    """Price a grid of so many plans."""
    scenario = gpt3()
    case = Case(scenario.model, scenario.workload, scenario.cluster, scenario.stack)
    space = Space(case, default_axes(case))
    tables = Tables()
    pricers = [GridPricer(case, like, tables) for like in _variants(space, wanted)]

    def prime() -> None:
        for pricer in pricers:
            pricer.prime(space.axes)

    primed = timed(prime)
    seconds = {"enumerate": 0.0, "step_time": primed.cpu_s, "memory": 0.0}
    fastest = np.inf
    source = _parts(space, pricers, wanted)
    while True:
        drawn: Timed[_Part | None] = timed(lambda: next(source, None))
        seconds["enumerate"] += drawn.cpu_s
        if drawn.result is None:
            break
        pricer, grid = drawn.result
        step = timed(partial(pricer.step_time_s, grid))
        memory = timed(partial(pricer.memory, grid))
        seconds["step_time"] += step.cpu_s
        seconds["memory"] += memory.cpu_s
        fits = memory.result.oom_risk <= scenario.risk
        fastest = min(fastest, float(step.result[fits].min(initial=np.inf)))
    both = seconds["step_time"] + seconds["memory"]
    return {
        "plans": wanted,
        "plans_per_s": wanted / seconds["step_time"],
        "plans_per_s_memory": wanted / seconds["memory"],
        "plans_per_s_time_and_memory": wanted / both,
        "plans_per_s_with_enumeration": wanted / (both + seconds["enumerate"]),
        "cpu_s": both + seconds["enumerate"],
        "fastest_step_time_s": fastest,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Figures of grids of rising size; ratios are per reference operation."""
    before = element_operations_per_s()
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
    rows = [measure(size) for size in sizes]
    reference = (before + element_operations_per_s()) / 2
    for row in rows:
        rates = {name: rate for name, rate in row.items() if name.startswith("plans_per_s")}
        row |= {f"{name}_per_reference": rate / reference for name, rate in rates.items()}
    return {
        "reference_operations_per_s": reference,
        "target_plans_per_s": TARGET_PLANS_PER_S,
        "grids": rows,
    }
