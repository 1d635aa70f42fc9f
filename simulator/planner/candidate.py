"""A plan that was priced: what the planners rank, compare and hand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.analysis.predict import Evaluation, Evaluator, evaluate, layout_risk
from simulator.cost.pricing import price_layout
from simulator.cost.times import CATEGORIES
from simulator.planner.rank_tables import Job
from simulator.spec.cluster import Cluster
from simulator.spec.layout import Layout, build_layout
from simulator.spec.plan import Assignment, Plan, Sharding


@dataclass(frozen=True)
class Candidate:
    """One plan with its price.

    ``kind`` says which planner made it. ``bound_s`` is a proven lower bound on the step time of
    every plan of that kind's family, None where there is none. ``headroom`` is the free share of
    the fullest GPU's memory at the median.
    """

    kind: str
    layout: Layout
    evaluation: Evaluation
    oom_risk: float
    headroom: float
    bound_s: float | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return self.evaluation.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs that the plan uses."""
        return self.layout.workload.tokens_per_step / self.step_time_s

    @property
    def gap(self) -> float | None:
        """How much slower than the bound, as a fraction."""
        return None if self.bound_s is None else max(self.step_time_s / self.bound_s - 1.0, 0.0)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs that the plan uses, by type."""
        used: dict[str, int] = {}
        for c in self.layout.classes:
            used[c.gpu.name] = used.get(c.gpu.name, 0) + c.ranks
        return used

    def shares(self) -> dict[str, float]:
        """Mean over ranks of each category's seconds in the step."""
        ranks = np.array([c.ranks for c in self.layout.classes], float)
        return {
            name: float(np.dot(ranks, [row[name] for row in self.evaluation.seconds]) / ranks.sum())
            for name in CATEGORIES
        }


def price(
    kind: str,
    job: Job,
    plan: Plan,
    bound_s: float | None = None,
    evaluator: Evaluator = "closed form",
) -> Candidate:
    """Price a plan on the job's cluster. Raises UserError where it can't be laid there."""
    layout = build_layout(job.model, job.workload, job.cluster, plan, job.stack)
    return price_laid(kind, layout, bound_s, evaluator)


def price_laid(
    kind: str, layout: Layout, bound_s: float | None = None, evaluator: Evaluator = "closed form"
) -> Candidate:
    """Price a layout."""
    evaluation = evaluate(layout, price_layout(layout), evaluator)
    risk = layout_risk(layout)
    usable = np.array([c.gpu.usable_memory_bytes for c in layout.classes], float)
    return Candidate(
        kind,
        layout,
        evaluation,
        float(risk.oom_risk.max()),
        1.0 - float((risk.p50_bytes / usable).max()),
        bound_s,
    )


def part_of(cluster: Cluster, gpu: str) -> tuple[Cluster, tuple[int, ...]]:
    """The GPUs of one type as a cluster, and which group of the whole each of its groups is."""
    groups, origin = [], []
    for index, group in enumerate(cluster.groups):
        same = tuple(g for g in group.gpus if g.name == gpu)
        if same:
            groups.append(replace(group, gpus=same))
            origin.append(index)
    return Cluster(tuple(groups), cluster.fabric), tuple(origin)


def on_whole_cluster(layout: Layout, origin: Sequence[int]) -> Plan:
    """The plan of a layout on a part of a cluster, as a plan on the whole of it.

    Every rank class becomes an entry that draws its GPUs from its group of the whole cluster.
    """
    plan = layout.plan
    sharded = plan.sharding != Sharding.NONE
    even = len({c.state_share for c in layout.classes}) == 1
    entries = tuple(
        Assignment(
            group=origin[c.group],
            gpu=c.gpu.name,
            micro_batch=c.micro_batch,
            count=c.micro_batches,
            state_share=None if even or not sharded else c.state_share,
            stage=c.stage if c.pp > 1 else None,
            layers=c.layers if c.pp > 1 else None,
            tp=c.tp if c.tp != plan.tp else None,
            replicas=c.replicas,
        )
        for c in layout.classes
    )
    return replace(plan, assignment=entries, stage_layers=None)
