"""GPUMix's optimiser: micro-batch, count and state share of every GPU of a mixed cluster.

Under fully sharded data parallelism with layered accumulation each GPU runs ``count`` micro-batches
of ``micro_batch`` sequences through one unit (layer) before the next. A unit's forward pass takes
the longer of its all-gather and of the computation, its backward pass the longer of all-gather plus
reduce-scatter and of recomputation plus computation (arXiv 2411.01075 section 4; here with our
compute, network and memory models in place of profiles and constants). The optimiser minimises the
slowest GPU's sum of these under every GPU's memory at the accepted risk
(:mod:`simulator.planner.split_problem`), for each way of keeping activations and each choice of
GPUs that could be fastest, and prices the winners like any other plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np

from simulator.errors import UserError
from simulator.planner.candidate import Candidate, price
from simulator.planner.rank_tables import (
    Collectives,
    Job,
    MemoryTable,
    Pool,
    UnitTable,
    collectives,
    pools_of,
    uneven_factors,
    unit_tables,
)
from simulator.planner.shares import fill_shares
from simulator.planner.split_problem import (
    FloatArray,
    IntArray,
    Kind,
    Split,
    SplitProblem,
    relaxed_bound_s,
    solve_split,
)
from simulator.spec.plan import Assignment, Offload, Plan, Recompute, Schedule, Sharding

#: How ranks without pipeline stages run their micro-batches: GPUMix's layered accumulation, fully
#: sharded one micro-batch after the other, and whole parameters on every rank.
Style = tuple[Sharding, Schedule]
LAYERED: Style = (Sharding.ZERO3, "layered")
STYLES: tuple[Style, ...] = (LAYERED, (Sharding.ZERO3, "1f1b"), (Sharding.ZERO1, "1f1b"))

#: Ceilings on one rank's share of the state, over the even share.
CEILINGS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, np.inf)

#: Ways of keeping activations: Cephalo's host offload goes with full recomputation only.
KEEPING: tuple[tuple[Recompute, Offload], ...] = (
    (Recompute.NONE, "none"),
    (Recompute.SELECTIVE, "none"),
    (Recompute.FULL, "none"),
    (Recompute.FULL, "activations"),
)

#: Choices of GPUs that are tried at most (all of them where there are fewer).
MAX_CHOICES = 64

#: Micro-batches of the same sequences are tried up to this factor of the objective, so many.
_NEARLY = 1.04
_MOST_OTHERS = 4

_SIZES = np.concatenate([np.arange(1, 33), np.arange(34, 65, 2), np.arange(72, 513, 8)])

#: Memory is planned to this part of the accepted risk, so that rounding never exceeds it.
_RISK_MARGIN = 0.999


@dataclass(frozen=True)
class Limits:
    """What a search may choose from; None leaves it free.

    ``sizes`` are micro-batches, ``one_batch_per_rank`` leaves accumulation out, ``max_gpus`` and
    ``whole_cluster`` limit the choices of GPUs.
    """

    keeping: tuple[tuple[Recompute, Offload], ...] = KEEPING
    sizes: tuple[int, ...] | None = None
    one_batch_per_rank: bool = False
    max_gpus: int | None = None
    whole_cluster: bool = False


#: No limits beside the job's.
FREE = Limits()


@dataclass
class _Prices:
    """Tables of one job, each made when it is first needed."""

    job: Job
    base: Plan
    limits: Limits
    units: dict[tuple[Plan, Pool], UnitTable] = field(default_factory=dict)
    memory: dict[tuple[Plan, int, str, int], MemoryTable] = field(default_factory=dict)
    caps: dict[tuple[Plan, int, str, int], dict[int, FloatArray]] = field(default_factory=dict)

    def plan(self, keeping: tuple[Recompute, Offload]) -> Plan:
        """The base plan with one way of keeping activations."""
        return replace(self.base, recompute=keeping[0], offload=keeping[1], recompute_layers=None)

    def unit_table(self, plan: Plan, pool: Pool, ranks: int) -> UnitTable | None:
        """Compute times of all micro-batches that fit a rank alone; None where none does."""
        key = (plan, replace(pool, replicas=1))
        if key not in self.units:
            sizes = self._fitting(plan, pool, ranks)
            if len(sizes) == 0:
                return None
            one = replace(pool, replicas=1)
            self.units[key] = unit_tables(self.job, plan, (one,), {one: sizes}, max(ranks, 2))[one]
        return self.units[key]

    def _fitting(self, plan: Plan, pool: Pool, ranks: int) -> IntArray:
        batch = self.job.workload.global_batch
        asked = self.limits.sizes
        sizes = _SIZES if asked is None else np.array(asked)
        sizes = np.unique(sizes[sizes <= batch]).astype(np.intp)
        table = self.memory_table(plan, pool, ranks)
        ones = np.ones(len(sizes), np.intp)
        return sizes[table.risk(sizes, ones, np.zeros(len(sizes))) <= self.job.risk]

    def memory_table(self, plan: Plan, pool: Pool, ranks: int) -> MemoryTable:
        """Memory of a pool's ranks; experts' state depends on how many ranks there are."""
        key = self._memory_key(plan, pool, ranks)
        if key not in self.memory:
            self.memory[key] = MemoryTable(self.job, plan, pool, max(ranks, 1))
        return self.memory[key]

    def _memory_key(self, plan: Plan, pool: Pool, ranks: int) -> tuple[Plan, int, str, int]:
        matters = self.job.model.moe is not None or ranks == 1
        return plan, pool.group, pool.gpu.name, ranks if matters else 0

    def cap(self, plan: Plan, pool: Pool, ranks: int, sizes: IntArray, counts: IntArray
            ) -> FloatArray:  # fmt: skip
        """Largest share beside each (size, count), remembered."""
        known = self.caps.setdefault(self._memory_key(plan, pool, ranks), {})
        keys = sizes.astype(np.int64) * (1 << 32) + counts
        new = np.array([i for i, k in enumerate(keys.tolist()) if k not in known], np.intp)
        if len(new):
            found = self.memory_table(plan, pool, ranks).caps(sizes[new], counts[new])
            known.update(zip(keys[new].tolist(), found, strict=True))
        return np.array([known[k] for k in keys.tolist()], float)


@dataclass(frozen=True)
class _Case:
    """One way of keeping activations on one choice of GPUs, with its lower bound."""

    plan: Plan
    pools: tuple[Pool, ...]
    tables: tuple[UnitTable, ...]
    network: Collectives
    bound_s: float

    @property
    def ranks(self) -> int:
        return sum(p.replicas for p in self.pools)


def styled(plan: Plan, style: Style = LAYERED) -> Plan:
    """A plan's precision, optimiser and degrees under data parallelism of one style."""
    return replace(
        plan, pp=1, vpp=1, sharding=style[0], shard_degree=None, schedule=style[1],
        stage_layers=None, assignment=(), micro_batch=1,
    )  # fmt: skip


def plan_gpumix(
    job: Job,
    base: Plan,
    limits: Limits = FREE,
    *,
    style: Style = LAYERED,
    top: int = 1,
    kind: str = "GPUMix split",
    not_above_s: float = np.inf,
) -> list[Candidate]:
    """The fastest splits of a job over its cluster, best first; empty where nothing fits.

    ``base`` gives tp, cp, precision and optimiser. Every candidate carries a proven lower bound on
    the step time of all splits in its style over all choices of GPUs that were looked at. What
    can't be faster than ``not_above_s`` isn't looked at.

    Raises:
        UserError: the base plan can't be laid on the cluster at all.
    """
    job = replace(job, risk=job.risk * _RISK_MARGIN)
    prices = _Prices(job, styled(base, style), limits)
    queue = [(case.bound_s, n, case) for n, case in enumerate(_cases(prices))]
    heapify(queue)
    found: list[Candidate] = []
    bound = np.inf
    while queue:
        low, n, case = heappop(queue)
        limit = min(found[top - 1].step_time_s if len(found) >= top else np.inf, not_above_s)
        if low >= limit:
            bound = min(bound, low)
            break
        options, tight = _tight_bound(prices, case)
        if tight > low:
            if np.isfinite(tight):
                heappush(queue, (tight, n, replace(case, bound_s=tight)))
            continue
        bound = min(bound, tight)
        problem = split_problem(prices, case, options)
        split = solve_split(problem)
        if split is not None:
            found.append(_candidate(prices, case, problem, split, options, kind))
            found.sort(key=lambda c: c.step_time_s)
    return [replace(c, bound_s=min(bound, c.step_time_s)) for c in found[:top]]


def _cases(prices: _Prices) -> Iterator[_Case]:
    job = prices.job
    pools = pools_of(job.cluster, prices.base.tp * prices.base.cp)
    width = prices.base.tp * prices.base.cp
    for chosen in gpu_choices(job, pools, prices.limits, width):
        ranks = sum(p.replicas for p in chosen)
        if ranks > job.workload.global_batch:
            continue
        network = collectives(job, prices.plan(KEEPING[0]), chosen, ranks)
        for keeping in prices.limits.keeping:
            plan = prices.plan(keeping)
            tables = [prices.unit_table(plan, pool, ranks) for pool in chosen]
            known = tuple(t for t in tables if t is not None)
            if len(known) == len(tables):
                bound = _quick_bound(job, chosen, known, network)
                yield _Case(plan, chosen, known, network, bound)


def gpu_choices(
    job: Job, pools: tuple[Pool, ...], limits: Limits, width: int
) -> list[tuple[Pool, ...]]:
    """Which GPUs to use: all, and every smaller choice by whole nodes while those are few.

    With more than :data:`MAX_CHOICES` of them, each pool is used whole, by halves or not at all.
    """
    if limits.whole_cluster:
        return [pools]
    steps = []
    for pool in pools:
        group = job.cluster.groups[pool.group]
        steps.append(max(pool.replicas // group.count, 1))
    counts = [tuple(range(0, p.replicas + 1, s)) for p, s in zip(pools, steps, strict=True)]
    if np.prod([len(c) for c in counts]) > MAX_CHOICES:
        counts = [_halved(p.replicas, s) for p, s in zip(pools, steps, strict=True)]
    if np.prod([len(c) for c in counts]) > MAX_CHOICES:
        counts = [(0, p.replicas) for p in pools]
    found = []
    for chosen in product(*counts):
        used = tuple(replace(p, replicas=n) for p, n in zip(pools, chosen, strict=True) if n)
        gpus = sum(p.replicas for p in used) * width
        if used and (limits.max_gpus is None or gpus <= limits.max_gpus):
            found.append(used)
    return found


def _halved(replicas: int, step: int) -> tuple[int, ...]:
    """0, and the pool halved again and again in whole nodes."""
    found = {0, replicas}
    while replicas // 2 >= step and replicas % 2 == 0 and len(found) < 4:
        replicas //= 2
        found.add(replicas)
    return tuple(sorted(found))


def _quick_bound(
    job: Job, pools: Sequence[Pool], tables: Sequence[UnitTable], network: Collectives
) -> float:
    """No split is faster: ideal shares of the batch without memory limits, or all collectives."""
    speeds = sum(
        p.replicas / float((t.repeat @ (t.forward_s + t.backward_s) / t.sizes).min())
        for p, t in zip(pools, tables, strict=True)
    )
    overhead = min(t.step_overhead_s for t in tables)
    compute = job.workload.global_batch / speeds
    return max(compute, network.total_s(tables[0].repeat)) + overhead


Options = list[tuple[IntArray, IntArray]]


def _tight_bound(prices: _Prices, case: _Case) -> tuple[Options, float]:
    """Options that matter for a case, and what no split of it undercuts; inf where none fits.

    Every GPU does its own work, and all collectives take place; memory limits what a GPU can do and
    hold. Which GPUs do what is relaxed to mixtures.
    """
    batch = prices.job.workload.global_batch
    reach = 2.0
    while True:
        options = [_options(prices, case, i, reach) for i in range(len(case.pools))]
        network_s = case.network.total_s(case.tables[0].repeat)
        kinds = []
        for pool, table, (sizes, counts) in zip(case.pools, case.tables, options, strict=True):
            work = table.repeat @ (table.forward_s + table.backward_s)
            busy = counts * work[np.searchsorted(table.sizes, sizes)]
            time = np.maximum(busy, network_s) + table.step_overhead_s
            cap = prices.cap(case.plan, pool, case.ranks, sizes, counts)
            kinds.append(Kind(pool.replicas, sizes * counts, cap, time[None, :]))
        bound = relaxed_bound_s(SplitProblem(tuple(kinds), batch, np.ones(1)))
        everything = prices.limits.one_batch_per_rank or all(
            int((s * c).max(initial=0)) >= batch for s, c in options
        )
        # Twice the bound leaves room for what rounding and uneven collectives add.
        if everything or 2.0 * bound <= reach * case.bound_s:
            return options, bound
        reach *= 3.0


def _options(prices: _Prices, case: _Case, index: int, reach: float) -> tuple[IntArray, IntArray]:
    """(sizes, counts) of all options whose computation takes at most ``reach`` times the bound."""
    table = case.tables[index]
    batch = prices.job.workload.global_batch
    per_batch = table.repeat @ (table.forward_s + table.backward_s)
    most = np.minimum(np.floor(reach * case.bound_s / per_batch), batch // table.sizes)
    most = np.maximum(most, 1).astype(np.intp)
    if prices.limits.one_batch_per_rank:
        most = np.ones_like(most)
    sizes = np.repeat(table.sizes, most)
    counts = np.concatenate([np.arange(1, m + 1) for m in most])
    return sizes.astype(np.intp), counts.astype(np.intp)


def split_problem(prices: _Prices, case: _Case, options: Options) -> SplitProblem:
    """The combinatorial problem of a case: times by ceiling, caps by memory."""
    ranks = case.ranks
    even = 1.0 / ranks
    caps = [
        prices.cap(case.plan, pool, ranks, sizes, counts)
        for pool, (sizes, counts) in zip(case.pools, options, strict=True)
    ]
    needs_uneven = any(bool(np.any(c < even)) for c in caps)
    ceilings = np.minimum(np.array(CEILINGS if needs_uneven else (1.0,)) * even, 1.0)
    ceilings = np.unique(ceilings)
    factors = uneven_factors(prices.job, case.plan, case.pools, ranks, ceilings)
    factors[0] = 1.0
    kinds = tuple(
        Kind(pool.replicas, sizes * counts, cap,
             option_times(case.plan, table, case.network, sizes, counts, factors,
                          prices.job.stack.overlap.dp))
        for pool, table, (sizes, counts), cap in zip(
            case.pools, case.tables, options, caps, strict=True
        )
    )  # fmt: skip
    return SplitProblem(kinds, prices.job.workload.global_batch, ceilings)


def option_times(
    plan: Plan,
    table: UnitTable,
    network: Collectives,
    sizes: IntArray,
    counts: IntArray,
    factors: FloatArray,
    overlap: float = 0.0,
) -> FloatArray:
    """Objective of each option under each ceiling, shape (ceilings, options).

    Layered: sum over units of max(gather, count x forward) and max(gather + reduce, count x
    backward). One micro-batch after the other: count times the same with count 1. Parameters whole:
    computation, and the reduction, of which ``overlap`` can start with the last backward pass.
    """
    column = np.searchsorted(table.sizes, sizes)
    layered = plan.schedule == "layered"
    inner, outer = (counts, 1.0) if layered else (1.0, counts)
    forward = inner * table.forward_s[:, column]
    backward = inner * table.backward_s[:, column]
    rest = table.optimizer_s + table.step_overhead_s
    if plan.sharding != Sharding.ZERO3:
        busy = (forward + backward)[0] * outer
        hidden, shown = overlap * network.reduce_s[0], (1.0 - overlap) * network.reduce_s[0]
        end = np.maximum(busy, busy - backward[0] + hidden) + shown
        return np.repeat((end + rest)[None, :], len(factors), axis=0)
    scale = factors[:, None, None]
    ahead = scale * network.gather_forward_s[None, :, None]
    behind = scale * (network.gather_backward_s + network.reduce_s)[None, :, None]
    per_unit = np.maximum(ahead, forward[None]) + np.maximum(behind, backward[None])
    return np.asarray(np.tensordot(per_unit, table.repeat, axes=([1], [0])) * outer + rest)


#: A GPU's sequences, in (pool, size, count, replicas, cap) of each group of equal ranks.
Rows = list[tuple[Pool, int, int, int, float]]


def _candidate(
    prices: _Prices,
    case: _Case,
    problem: SplitProblem,
    split: Split,
    options: Options,
    kind: str,
) -> Candidate:
    """Lay and price a split, with shares as even as the memory allows.

    The price sees what the objective leaves out (what a reduction hides behind, waiting at each
    unit), so for each group of ranks other micro-batches of the same sequences that are nearly as
    fast are tried.
    """
    rows: Rows = []
    others: list[list[int]] = []
    for i, choice in enumerate(split.choices):
        table, (sizes, counts) = problem.kinds[i], options[i]
        time = table.time_s[split.ceiling]
        for option, n in choice:
            size, count = int(sizes[option]), int(counts[option])
            rows.append((case.pools[i], size, count, n, float(table.cap[option])))
            near = np.flatnonzero(
                (table.batch == table.batch[option])
                & (time <= time[option] * _NEARLY)
                & (table.cap >= min(table.cap[option], problem.ceilings[split.ceiling]))
            )
            others.append([int(o) for o in near if o != option][-_MOST_OTHERS:])
    best = _laid(prices, case, rows, kind)
    for r, alternatives in enumerate(others):
        i = case.pools.index(rows[r][0])
        for option in alternatives:
            pool, _, _, n, _ = rows[r]
            changed = [*rows]
            changed[r] = (pool, int(options[i][0][option]), int(options[i][1][option]), n,
                          float(problem.kinds[i].cap[option]))  # fmt: skip
            found = _laid(prices, case, changed, kind)
            if found.step_time_s < best.step_time_s and found.oom_risk <= prices.job.risk:
                best, rows = found, changed
    return best


def _laid(prices: _Prices, case: _Case, rows: Rows, kind: str) -> Candidate:
    shares = fill_shares([r[4] for r in rows], [r[3] * case.plan.cp for r in rows])
    if shares is None:
        raise UserError("the split's ranks can't hold the training state")
    return price(kind, prices.job, with_split(case.plan, rows, shares))


def with_split(
    plan: Plan, rows: Sequence[tuple[Pool, int, int, int, float]], shares: FloatArray
) -> Plan:
    """The plan whose entries are (pool, size, count, replicas, cap) rows with these shares."""
    even = float(np.ptp(shares)) < 1e-9
    entries = tuple(
        Assignment(
            group=pool.group, gpu=pool.gpu.name, micro_batch=size, count=count, replicas=n,
            state_share=None if even else float(share),
        )
        for (pool, size, count, n, _), share in zip(rows, shares, strict=True)
    )  # fmt: skip
    return replace(plan, dp=sum(r[3] for r in rows), assignment=entries)
