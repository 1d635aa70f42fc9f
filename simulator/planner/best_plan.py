"""The best plan for a cluster, as a purchase needs it: quickly, for any mix of GPUs.

Equal GPUs: the search of all uniform plans, and GPUMix's shares where the stack allows uneven
batches or nothing uniform fits. Unequal ones: GPUMix's shares, pipelines with a GPU type for each
stage, and every GPU type alone: a slow type can hold the others up so much that it is better idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from simulator.analysis.predict import evaluate, layout_risk, predict
from simulator.analysis.prediction import Prediction
from simulator.cost.pricing import price_layout
from simulator.errors import UserError
from simulator.planner.candidate import Candidate
from simulator.planner.gpumix import LAYERED, STYLES, Limits, plan_gpumix
from simulator.planner.mixed_pipeline import plan_mixed_pipelines
from simulator.planner.rank_tables import Job
from simulator.planner.recommend import base_plan, half_precision
from simulator.planner.search import search
from simulator.spec.cluster import Cluster
from simulator.spec.layout import Layout, build_layout
from simulator.spec.scenario import Scenario, plan_from_mapping
from simulator.spec.stack import load_stack

#: Fits, then tokens per second; without fitting, the emptiest first.
Score = tuple[bool, float]
#: A scored plan as the scenario that it completes; None where no plan can be laid.
Found = tuple[Score, Scenario] | None


def best_plan(scenario: Scenario, memory: dict[str, Found] | None = None) -> Prediction:
    """The fastest plan that fits, or, where none does, the one that is least too large.

    A scenario with a plan keeps it. ``memory`` keeps what was found for parts of clusters, for
    other calls with the same model, workload and stack to use.

    Raises:
        UserError: no plan at all can be laid on the cluster.
    """
    if scenario.plan is not None:
        return predict(scenario, with_suggestions=False)[0]
    memory = {} if memory is None else memory
    found: list[Found] = [_remembered(replace(scenario, cluster=part), memory)
                          for part in _alone(scenario.cluster)]  # fmt: skip
    fitting = any(f is not None and f[0][0] for f in found)
    if scenario.cluster.is_mixed or scenario.stack.uneven_batches or not fitting:
        found += _uneven(scenario)
    if not any(f is not None for f in found):
        found.append(_plainest(scenario))
    best = max((f for f in found if f is not None), key=lambda f: f[0], default=None)
    if best is None:
        raise UserError(f"no plan for {scenario.model.name} can be laid on this cluster")
    return predict(best[1], with_suggestions=False)[0]


def _remembered(scenario: Scenario, memory: dict[str, Found]) -> Found:
    cluster = scenario.cluster
    groups = [(g.node.name, g.count, [gpu.name for gpu in g.gpus]) for g in cluster.groups]
    fabric = cluster.fabric.name if cluster.fabric else ""
    key = f"{scenario.model} {scenario.workload} {scenario.stack.name} {groups} {fabric}"
    if key not in memory:
        memory[key] = _searched(scenario)
    return memory[key]


def _alone(cluster: Cluster) -> Iterator[Cluster]:
    """The nodes of each GPU type as a cluster of their own."""
    for gpu in cluster.gpu_types:
        groups = tuple(g for g in cluster.groups if all(slot.name == gpu.name for slot in g.gpus))
        if groups:
            yield Cluster(groups, cluster.fabric)


def _plainest(scenario: Scenario) -> Found:
    """Everything sharded and recomputed: what a cluster that is too small is too small for."""
    data = {"sharding": "zero3", "recompute": "full", "precision": half_precision(scenario)}
    try:
        plan = plan_from_mapping(
            data, scenario.model, scenario.workload, scenario.cluster, scenario.stack
        )
        layout = build_layout(
            scenario.model, scenario.workload, scenario.cluster, plan, scenario.stack
        )
    except UserError:
        return None
    return _quick(layout, scenario.risk), replace(scenario, plan=plan)


def _one_group(cluster: Cluster) -> Cluster:
    """Equal GPUs as nodes of one kind, the slowest connected of those that there are."""
    slowest = min(cluster.groups, key=lambda g: (len(g.gpus), g.node.network_bytes_per_s))
    nodes = sum(g.count * len(g.gpus) for g in cluster.groups) // len(slowest.gpus)
    return Cluster((replace(slowest, count=nodes),), cluster.fabric)


def _uneven(scenario: Scenario) -> list[Found]:
    """GPUMix's shares of the batch and pipelines over several GPU types."""
    stack = scenario.stack if scenario.stack.uneven_batches else load_stack("gpumix")
    scenario = replace(scenario, stack=stack)
    job = Job(scenario.model, scenario.workload, scenario.cluster, stack, scenario.risk)
    base = base_plan(scenario, {})
    candidates: list[Candidate] = []
    # Mixed clusters have pipelines beside; for equal GPUs the other styles are quickly tried.
    for style in (LAYERED,) if scenario.cluster.is_mixed else STYLES:
        candidates += plan_gpumix(job, base, Limits(), style=style, top=1)
    if scenario.cluster.is_mixed:
        candidates += plan_mixed_pipelines(job, base, top=1)
    return [
        (_quick(c.layout, scenario.risk), replace(scenario, plan=c.layout.plan))
        for c in candidates
    ]  # fmt: skip


def _quick(layout: Layout, accepted: float) -> Score:
    risk = layout_risk(layout)
    if float(risk.oom_risk.max()) > accepted:
        usable = np.array([c.gpu.usable_memory_bytes for c in layout.classes], float)
        return False, -float((risk.p50_bytes / usable).max())
    step = evaluate(layout, price_layout(layout), "closed form").step_time_s
    return True, layout.workload.tokens_per_step / step


def _searched(scenario: Scenario) -> Found:
    """The best uniform plan on equal GPUs."""
    asked = replace(scenario, cluster=_one_group(scenario.cluster))
    try:
        result = search(asked, top=1, options={"precision": [half_precision(scenario)]})
    except UserError:
        return None
    found = result.plans[0] if result.plans else result.least_risky
    if found is None:
        return None
    planned = replace(scenario, plan=found.plan)
    if len(scenario.cluster.groups) == 1:
        score = (True, found.tokens_per_s) if result.plans else (False, found.headroom - 1.0)
        return score, planned
    try:
        layout = build_layout(
            scenario.model, scenario.workload, scenario.cluster, found.plan, scenario.stack
        )
    except UserError:
        return None
    return _quick(layout, scenario.risk), planned
