"""Published strategies for mixed clusters, priced like the optimiser's plans.

Even split: every rank the same batch. Proportional to speed: batches by each GPU type's best rate,
as Whale (ATC 2022) and most frameworks do. Linear programme without accumulation: one micro-batch
for each rank, its size by speed and memory (Cephalo's own comparison, arXiv 2411.01075).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.analysis.predict import layout_risk
from simulator.planner.candidate import Candidate, price, price_laid
from simulator.planner.gpumix import KEEPING, STYLES, Limits, plan_gpumix, styled, with_split
from simulator.planner.rank_tables import Job, Pool, pools_of, unit_tables
from simulator.planner.split_problem import FloatArray
from simulator.spec.layout import build_layout
from simulator.spec.plan import Plan

#: Micro-batches that the even and the proportional split may use.
_SIZES = np.array([1, 2, 4, 8, 16, 32], np.intp)


@dataclass(frozen=True)
class Baseline:
    """A strategy's best plan; ``fits`` at the accepted risk. ``reason`` where there is no plan."""

    plan: Candidate | None
    fits: bool
    reason: str = ""


def even_split(job: Job, base: Plan) -> Baseline:
    """Every rank runs the same batch (one sequence more for some where it doesn't divide)."""
    pools = pools_of(job.cluster, base.tp * base.cp)
    return _fixed_batches("even split", job, base, pools, np.ones(len(pools)))


def proportional_to_speed(job: Job, base: Plan) -> Baseline:
    """Batches proportional to what each GPU type computes per second at its best micro-batch."""
    pools = pools_of(job.cluster, base.tp * base.cp)
    plan = styled(base)
    sizes = {pool: _SIZES for pool in pools}
    tables = unit_tables(job, plan, pools, sizes, max(sum(p.replicas for p in pools), 2))
    speeds = [
        1.0 / float((t.repeat @ (t.forward_s + t.backward_s) / t.sizes).min())
        for t in (tables[pool] for pool in pools)
    ]
    return _fixed_batches("batches by speed", job, base, pools, np.array(speeds))


def lp_without_accumulation(job: Job, base: Plan) -> Baseline:
    """One micro-batch for every rank, sizes by speed under each rank's memory."""
    limits = Limits(one_batch_per_rank=True, whole_cluster=True)
    found = plan_gpumix(job, base, limits, kind="one micro-batch for each rank")
    if found:
        return Baseline(found[0], True)
    return Baseline(None, False, "no micro-batches fit that make up the global batch at once")


def _fixed_batches(
    kind: str, job: Job, base: Plan, pools: tuple[Pool, ...], weights: FloatArray
) -> Baseline:
    """The fastest way to run given shares of the batch with even state; else the smallest one."""
    rows = share_batch(job.workload.global_batch, [p.replicas for p in pools], weights)
    if rows is None:
        return Baseline(None, False, "the global batch has fewer sequences than there are ranks")
    best: Candidate | None = None
    emptiest: tuple[float, Plan] | None = None
    for plan in _ways(job, base, pools, rows):
        layout = build_layout(job.model, job.workload, job.cluster, plan, job.stack)
        risk = layout_risk(layout)
        if float(risk.oom_risk.max()) <= job.risk:
            laid = price_laid(kind, layout)
            if best is None or laid.step_time_s < best.step_time_s:
                best = laid
        need = max(
            p50 / c.gpu.usable_memory_bytes
            for p50, c in zip(risk.p50_bytes, layout.classes, strict=True)
        )
        if emptiest is None or need < emptiest[0]:
            emptiest = (float(need), plan)
    if best is not None:
        return Baseline(best, True)
    closest = None if emptiest is None else price(kind, job, emptiest[1])
    return Baseline(closest, False, "it does not fit, however activations are kept")


def _ways(
    job: Job, base: Plan, pools: tuple[Pool, ...], rows: list[tuple[int, int, int]]
) -> list[Plan]:
    """Plans that run each rank's sequences in equal micro-batches, state even, each plan once."""
    ranks = sum(n for _, _, n in rows)
    found: dict[Plan, None] = {}
    for style in STYLES:
        for recompute, offload in KEEPING:
            plan = replace(styled(base, style), recompute=recompute, offload=offload)
            for largest in _SIZES.tolist():
                entries = []
                for pool, sequences, n in rows:
                    size = max(s for s in range(1, largest + 1) if sequences % s == 0)
                    entries.append((pools[pool], size, sequences // size, n, 1.0))
                shares = np.full(len(entries), 1.0 / (ranks * plan.cp))
                found[with_split(plan, entries, shares)] = None
    return list(found)


def share_batch(
    batch: int, replicas: list[int], weights: FloatArray
) -> list[tuple[int, int, int]] | None:
    """(pool, sequences of one rank, ranks) rows that make up the batch, by weight of a rank.

    Whole sequences by earliest finish from the rounded-down shares; None where some rank would
    have none.
    """
    n = np.array(replicas)
    if batch < n.sum():
        return None
    each = np.maximum(np.floor(batch * weights / float(weights @ n)), 1).astype(int)
    while int(each @ n) > batch:
        each[int(np.argmax(np.where(each > 1, each / weights, -np.inf)))] -= 1
    left = batch - int(each @ n)
    extra = np.zeros(len(n), int)
    while left:
        ready = np.where(extra < n, (each + 1) / weights, np.inf)
        k = int(np.argmin(ready))
        if not np.isfinite(ready[k]):
            each, extra = each + 1, np.zeros(len(n), int)
            continue
        taken = min(left, int(n[k] - extra[k]))
        extra[k] += taken
        left -= taken
    rows = []
    for k in range(len(n)):
        rows += [(k, int(each[k]) + 1, int(extra[k]))] if extra[k] else []
        rows += [(k, int(each[k]), int(n[k] - extra[k]))] if extra[k] < n[k] else []
    return rows
