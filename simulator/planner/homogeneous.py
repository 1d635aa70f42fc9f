"""The best plans on the GPUs of one type, found alone and laid on the whole cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from simulator.analysis.predict import layout_risk
from simulator.errors import UserError
from simulator.planner.candidate import Candidate, on_whole_cluster, part_of, price, price_laid
from simulator.planner.gpumix import FREE, STYLES, Limits, plan_gpumix
from simulator.planner.rank_tables import Job
from simulator.spec.layout import build_layout
from simulator.spec.plan import Plan, Recompute, Sharding

_MICRO_BATCHES = (1, 2, 4, 8)

#: Uniform plans that are priced for one GPU type.
_MAX_PRICED = 24


def homogeneous_kind(count: int, gpu: str) -> str:
    """Name of the plans of one GPU type alone."""
    return f"{count:,} {gpu} alone"


def plan_alone(
    job: Job, base: Plan, gpu: str, limits: Limits = FREE, *, top: int = 1
) -> list[Candidate]:
    """The fastest plans on the GPUs of one type of the job's cluster, best first.

    Uniform plans, and where the stack runs them GPUMix's splits. The plans draw their GPUs from
    the whole cluster, priced on the networks that these GPUs use.
    """
    part, origin = part_of(job.cluster, gpu)
    alone = replace(job, cluster=part)
    kind = homogeneous_kind(part.n_gpus, gpu)
    found: list[Candidate] = []
    if job.stack.uneven_batches:
        for style in STYLES:
            found += plan_gpumix(alone, base, limits, style=style, top=top, kind=kind)
    found += _uniform(alone, base, kind, top)
    found.sort(key=lambda c: c.step_time_s)
    whole = [
        price(kind, job, on_whole_cluster(c.layout, origin), c.bound_s) for c in found[:top]
    ]
    return sorted(whole, key=lambda c: c.step_time_s)


def _uniform(job: Job, base: Plan, kind: str, top: int) -> list[Candidate]:
    """Uniform plans that fit, cheapest communication first."""
    found: list[Candidate] = []
    for plan in _uniform_plans(job, base):
        if len(found) == _MAX_PRICED:
            break
        try:
            layout = build_layout(job.model, job.workload, job.cluster, plan, job.stack)
        except UserError:
            continue
        if float(layout_risk(layout).oom_risk.max()) <= job.risk:
            found.append(price_laid(kind, layout))
    return sorted(found, key=lambda c: c.step_time_s)[:top]


def _uniform_plans(job: Job, base: Plan) -> Iterator[Plan]:
    gpus, model = job.cluster.n_gpus, job.model
    per_node = min(len(g.gpus) for g in job.cluster.groups)
    shapes = [
        (tp, pp, m, recompute)
        for tp, pp, m, recompute in product((1, 2, 4, 8), range(1, 33), _MICRO_BATCHES, Recompute)
        if per_node % tp == 0 and model.heads % tp == 0 and gpus % (tp * pp * base.cp) == 0
        and model.kv_heads % tp == 0 and model.layers >= pp
    ]  # fmt: skip
    for tp, pp, m, recompute in sorted(shapes, key=lambda s: (s[0] * s[1], s[3], -s[2])):
        sharding = Sharding.ZERO3 if pp == 1 else Sharding.ZERO1
        yield replace(
            base, tp=tp, pp=pp, dp=gpus // (tp * pp * base.cp), micro_batch=m, recompute=recompute,
            recompute_layers=None, sharding=sharding, shard_degree=None, schedule="1f1b", vpp=1,
            offload="none", assignment=(), stage_layers=None,
        )  # fmt: skip
