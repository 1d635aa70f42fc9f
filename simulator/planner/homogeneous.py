"""The best plans on the GPUs of one type, found alone and laid on the whole cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from simulator.planner.candidate import Candidate, on_whole_cluster, part_of, price
from simulator.planner.gpumix import FREE, STYLES, Limits, plan_gpumix
from simulator.planner.rank_tables import Job
from simulator.planner.search import search, smaller
from simulator.planner.space import Axes
from simulator.spec.plan import Plan
from simulator.spec.scenario import Scenario


def homogeneous_kind(count: int, gpu: str) -> str:
    """Name of the plans of one GPU type alone."""
    return f"{count:,} {gpu} alone"


def plan_alone(
    job: Job,
    base: Plan,
    gpu: str,
    limits: Limits = FREE,
    *,
    fixed: Mapping[str, Any] | None = None,
    top: int = 1,
) -> list[Candidate]:
    """The fastest plans on the GPUs of one type of the job's cluster, best first.

    Uniform plans, and where the stack runs them GPUMix's splits. The plans draw their GPUs from
    the whole cluster, priced on the networks that these GPUs use. ``fixed`` are fields of the plan.
    """
    part, origin = part_of(job.cluster, gpu)
    alone = replace(job, cluster=part)
    kind = homogeneous_kind(part.n_gpus, gpu) if job.cluster.is_mixed else "uniform plan"
    found: list[Candidate] = []
    if job.stack.uneven_batches:
        for style in STYLES:
            found += plan_gpumix(alone, base, limits, style=style, top=top, kind=kind)
    found += _uniform(alone, base, kind, top, fixed or {}, limits.max_gpus)
    found.sort(key=lambda c: c.step_time_s)
    if not job.cluster.is_mixed and part.n_gpus == job.cluster.n_gpus:
        return found[:top]
    whole = [price(kind, job, on_whole_cluster(c.layout, origin), c.bound_s) for c in found[:top]]
    return sorted(whole, key=lambda c: c.step_time_s)


def _uniform(job: Job, base: Plan, kind: str, top: int, fixed: Mapping[str, Any],
             max_gpus: int | None) -> list[Candidate]:  # fmt: skip
    """The fastest of all uniform plans that fit."""
    like = replace(base, assignment=(), stage_layers=None)
    scenario = Scenario(
        "", job.model, job.workload, job.cluster, job.stack, plan=like, risk=job.risk
    )
    axes = {f.name for f in fields(Axes)} - {"tp_in_node"}
    wanted = {k: v for k, v in fixed.items() if k in axes}
    one_group = len(job.cluster.groups) == 1
    if max_gpus is not None and max_gpus < job.cluster.n_gpus:
        if not one_group or max_gpus < len(job.cluster.groups[0].gpus):
            return []
        cluster = smaller(job.cluster, max_gpus)
    else:
        cluster = job.cluster
    found = search(replace(scenario, cluster=cluster), top=top, fixed=wanted)
    return [price(kind, replace(job, cluster=cluster), f.plan) for f in found.plans]
