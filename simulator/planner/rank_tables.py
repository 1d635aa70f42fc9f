"""Prices of everything that one rank could do: tables from which the optimiser chooses.

Nothing is modelled here: times are :func:`simulator.cost.pricing.price_layout` of made-up layouts
whose rank classes are the options, memory is :func:`simulator.cost.memory.rank_memory` and risk
:func:`simulator.analysis.risk.memory_risk` of the same rows that a finished plan is judged by.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np

from hardware_db.schema import GpuSpec
from simulator.analysis.risk import MemoryRisk, memory_risk, prior_spread
from simulator.cost.batch import RankBatch, batch_of
from simulator.cost.collectives import slowest
from simulator.cost.communication import uneven_factor
from simulator.cost.memory import layout_options, rank_memory
from simulator.cost.network import network
from simulator.cost.pricing import price_layout
from simulator.cost.times import ClassTimes, UnitTimes
from simulator.planner.split_problem import FloatArray, IntArray
from simulator.spec.cluster import Cluster
from simulator.spec.layout import Layout, Pipeline, build_layout
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Assignment, Plan
from simulator.spec.stack import Stack
from simulator.spec.workload import Workload

#: Steps of the root search for a rank's largest share.
_SHARE_STEPS = 9


@dataclass(frozen=True)
class Job:
    """What is to be planned: a scenario without its plan, and the accepted OOM risk."""

    model: ModelSpec
    workload: Workload
    cluster: Cluster
    stack: Stack
    risk: float


@dataclass(frozen=True)
class Pool:
    """Equal GPUs of one node group, ``replicas`` data-parallel ranks of ``tp * cp`` GPUs each."""

    group: int
    gpu: GpuSpec
    replicas: int


def pools_of(cluster: Cluster, width: int) -> tuple[Pool, ...]:
    """Pools of a cluster in its order; GPUs that don't fill a replica are left out."""
    found = []
    for index, group in enumerate(cluster.groups):
        for name in dict.fromkeys(gpu.name for gpu in group.gpus):
            same = [gpu for gpu in group.gpus if gpu.name == name]
            replicas = len(same) // width * group.count
            if replicas:
                found.append(Pool(index, same[0], replicas))
    return tuple(found)


@dataclass(frozen=True)
class UnitTable:
    """Compute seconds of one micro-batch by unit and micro-batch size (arrays (units, sizes)).

    ``repeat`` counts the equal units; where parameters aren't sharded the whole model is one unit.
    ``optimizer_s`` is of a rank with an even share.
    """

    sizes: IntArray
    repeat: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    optimizer_s: float
    step_overhead_s: float


@dataclass(frozen=True)
class Collectives:
    """Seconds of each unit's collectives with even shares: arrays over units."""

    gather_forward_s: FloatArray
    gather_backward_s: FloatArray
    reduce_s: FloatArray

    def total_s(self, repeat: FloatArray) -> float:
        """All of one step's collectives."""
        return float(repeat @ (self.gather_forward_s + self.gather_backward_s + self.reduce_s))


def option_layout(job: Job, plan: Plan, options: list[tuple[Pool, int, int]], dp: int) -> Layout:
    """A made-up layout with one rank class per (pool, micro-batch, count), even shares of dp."""
    sample = [
        build_layout(
            job.model,
            replace(job.workload, global_batch=pool.replicas),
            job.cluster,
            replace(
                plan,
                dp=pool.replicas,
                assignment=(Assignment(pool.group, pool.gpu.name, 1, 1, replicas=pool.replicas),),
            ),
            job.stack,
        ).classes[0]
        for pool in dict.fromkeys(pool for pool, _, _ in options)
    ]
    by_pool = {(c.group, c.gpu.name): c for c in sample}
    classes = tuple(
        replace(
            by_pool[pool.group, pool.gpu.name],
            index=i,
            micro_batch=size,
            micro_batches=count,
            state_share=1.0 / (dp * plan.cp),
        )
        for i, (pool, size, count) in enumerate(options)
    )
    whole = replace(plan, dp=dp, assignment=())
    return Layout(
        job.model, job.workload, job.cluster, whole, job.stack, classes, (Pipeline((0,), dp),)
    )


def unit_tables(
    job: Job, plan: Plan, pools: tuple[Pool, ...], sizes: dict[Pool, IntArray], dp: int
) -> dict[Pool, UnitTable]:
    """Compute times of every pool at the given micro-batch sizes."""
    options = [(pool, int(size), 1) for pool in pools for size in sizes[pool]]
    times = price_layout(option_layout(job, plan, options, dp))
    found = {}
    start = 0
    for pool in pools:
        rows = times[start : start + len(sizes[pool])]
        start += len(rows)
        found[pool] = _table(sizes[pool], rows)
    return found


def _table(sizes: IntArray, rows: tuple[ClassTimes, ...]) -> UnitTable:
    units = [_units(row) for row in rows]
    return UnitTable(
        sizes=sizes,
        repeat=np.array([u.repeat for u in units[0]], float),
        forward_s=np.array([[float(u.forward.total) for u in row] for row in units]).T,
        backward_s=np.array([[float(u.backward.total) for u in row] for row in units]).T,
        optimizer_s=float(rows[0].optimizer),
        step_overhead_s=float(rows[0].step_overhead),
    )


def _units(times: ClassTimes) -> tuple[UnitTimes, ...]:
    """Units of a fully sharded rank; of any other its only chunk as one unit."""
    if times.units:
        return times.units
    (chunk,) = times.chunks
    backward = chunk.backward_input + chunk.backward_weight
    gather, reduce = chunk.param_gather, chunk.grad_reduce
    return (UnitTimes("model", 1, chunk.forward, backward, gather, 0.0, reduce),)


def collectives(job: Job, plan: Plan, pools: tuple[Pool, ...], dp: int) -> Collectives:
    """Collectives over all ranks of the pools, as the slowest member sees them."""
    priced = price_layout(option_layout(job, plan, [(pool, 1, 1) for pool in pools], dp))
    rows = [_units(row) for row in priced]

    def slowest_of(name: str) -> FloatArray:
        return np.array(
            [max(float(getattr(u, name)) for u in same) for same in zip(*rows, strict=True)]
        )

    return Collectives(
        slowest_of("gather_forward"), slowest_of("gather_backward"), slowest_of("reduce")
    )


def uneven_factors(
    job: Job, plan: Plan, pools: tuple[Pool, ...], dp: int, ceilings: FloatArray
) -> FloatArray:
    """Time of uneven collectives over even ones with one rank at each ceiling, the others equal.

    What the optimiser reckons with; the shares that it ends with are priced with the whole plan.
    """
    ranks = dp * plan.cp
    if ranks < 2:
        return np.ones(len(ceilings))
    everywhere = slowest(
        [network(job.cluster.groups[p.group].node, job.cluster.fabric, p.gpu) for p in pools]
    )
    base = option_layout(job, plan, [(pools[0], 1, 1), (pools[0], 1, 1)], dp)
    factors = []
    for ceiling in np.clip(ceilings, 1.0 / ranks, 1.0):
        shares = (float(ceiling), (1.0 - float(ceiling)) / (ranks - 1))
        counts = (1, ranks - 1)
        classes = tuple(
            replace(c, state_share=share, replicas=n, cp=1)
            for c, share, n in zip(base.classes, shares, counts, strict=True)
        )
        factors.append(max(uneven_factor(replace(base, classes=classes), everywhere), 1.0))
    return np.array(factors)


class MemoryTable:
    """Largest share of the state that a pool's rank can hold beside its work, at the risk."""

    def __init__(self, job: Job, plan: Plan, pool: Pool, dp: int) -> None:
        layout = option_layout(job, plan, [(pool, 1, 1)], dp)
        self._options = layout_options(layout)
        columns = batch_of(layout)
        self._batch = replace(
            columns,
            **{f.name: np.asarray(getattr(columns, f.name))[0] for f in fields(RankBatch)},
        )
        self._job, self._plan = job, plan
        self._usable = float(pool.gpu.usable_memory_bytes)
        self._spread = prior_spread(job.stack.name)
        self._z = NormalDist().inv_cdf(1.0 - min(max(job.risk, 1e-9), 1.0 - 1e-9))

    def _memory(self, sizes: IntArray, counts: IntArray, shares: FloatArray) -> MemoryRisk:
        batch = replace(
            self._batch,
            micro_batch=np.asarray(sizes, float),
            micro_batches=np.asarray(counts, float),
            state_share=np.asarray(shares, float),
        )
        job, plan = self._job, self._plan
        memory = rank_memory(
            job.model, job.stack, job.stack.recipe(plan.precision), plan.optimizer, batch,
            self._options,
        )  # fmt: skip
        return memory_risk(memory, self._usable, self._spread)

    def risk(self, sizes: IntArray, counts: IntArray, shares: FloatArray) -> FloatArray:
        """OOM risk of ranks with these micro-batches, counts and shares (equal lengths)."""
        return self._memory(sizes, counts, shares).oom_risk

    def caps(self, sizes: IntArray, counts: IntArray) -> FloatArray:
        """Largest share for each option, -1 where not even an empty share fits.

        Regula falsi (Illinois) on the memory needed at the accepted risk, which is almost linear in
        the share; what it ends with fits.
        """
        n = len(sizes)
        if n == 0:
            return np.zeros(0)
        low, high = np.zeros(n), np.ones(n)
        below, above = (self._excess(sizes, counts, s) for s in (low, high))
        fits, all_of_it = below <= 0.0, above <= 0.0
        for _ in range(_SHARE_STEPS):
            with np.errstate(divide="ignore", invalid="ignore"):
                guess = low - below * (high - low) / (above - below)
            middle = np.where((guess > low) & (guess < high), guess, 0.5 * (low + high))
            found = self._excess(sizes, counts, middle)
            ok = found <= 0.0
            # The end that stays loses weight, so that the other one moves too.
            above = np.where(ok, 0.5 * above, found)
            below = np.where(ok, found, 0.5 * below)
            low, high = np.where(ok, middle, low), np.where(ok, high, middle)
        return np.where(fits, np.where(all_of_it, 1.0, low), -1.0)

    def _excess(self, sizes: IntArray, counts: IntArray, shares: FloatArray) -> FloatArray:
        """Memory needed at the accepted risk over what is usable, less one."""
        risk = self._memory(sizes, counts, shares)
        return np.asarray(risk.p50_bytes * np.exp(self._z * risk.sigma) / self._usable - 1.0)
