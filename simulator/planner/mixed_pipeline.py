"""Pipelines over unequal GPUs: stages on different GPU types, or replicas on different types.

Tensor parallelism stays inside a node and a GPU type. Two families are searched. *Stages by type*:
every pipeline runs through all GPU types, with layers divided among unequal stages by dynamic
programming under each stage's memory; the orders of the types are tried, big-memory ones first
among them (early stages hold more activations), and the head counts on the last stage. *Replicas
by type*: every pipeline stays inside one GPU type and types take batches by their speed, or equal
ones where the stack runs no other.

Plans are ranked by a lower bound (micro-batches times the slowest stage) from the same prices as
everything else, and priced in full while the bound can still win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import numpy as np

from simulator.analysis.predict import layout_risk
from simulator.analysis.risk import memory_risk, prior_spread
from simulator.cost.batch import batch_of
from simulator.cost.memory import layout_options, rank_memory
from simulator.cost.pricing import price_layout
from simulator.errors import UserError
from simulator.planner.candidate import Candidate, price_laid
from simulator.planner.layer_split import balance_layers
from simulator.planner.rank_tables import Job, Pool, pools_of
from simulator.planner.split_problem import FloatArray, Kind, SplitProblem, solve_split
from simulator.spec.layout import Layout, Pipeline, RankClass, build_layout
from simulator.spec.plan import Assignment, Plan, Recompute, Sharding

TP_DEGREES = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4)

#: Most plans that are priced in full.
MAX_PRICED = 24
#: Most stages; more make the bubble and the search grow without gain.
MAX_STAGES = 64
#: Orders of GPU types along the pipeline are all tried up to so many types.
_ALL_ORDERS = 3


@dataclass(frozen=True)
class _Stage:
    """Where one stage runs: a pool of GPUs and the tensor-parallel degree on it."""

    pool: Pool
    tp: int


@dataclass(frozen=True)
class _Shape:
    """A pipeline before layers are divided: its stages in order, replicas, micro-batch."""

    stages: tuple[_Stage, ...]
    dp: int
    micro_batch: int
    recompute: Recompute


@dataclass(frozen=True)
class _PassTable:
    """Seconds of one micro-batch's forward and backward pass: per layer, at the ends, fixed."""

    layer_s: dict[tuple[int, str, int, int], float]
    first_s: dict[tuple[int, str, int, int], float]
    last_s: dict[tuple[int, str, int, int], float]
    fixed_s: dict[tuple[int, str, int, int], float]

    def stage_s(self, stage: _Stage, micro_batch: int, *, first: bool, last: bool, layers: int
                ) -> FloatArray:  # fmt: skip
        """Seconds with 0, 1, ... ``layers`` layers; none is not a stage."""
        key = (stage.pool.group, stage.pool.gpu.name, stage.tp, micro_batch)
        ends = self.fixed_s[key] + first * self.first_s[key] + last * self.last_s[key]
        seconds = ends + np.arange(layers + 1) * self.layer_s[key]
        seconds[0] = np.inf
        return np.asarray(seconds)


def plan_mixed_pipelines(job: Job, base: Plan, *, top: int = 1) -> list[Candidate]:
    """The fastest pipelines over all GPU types of a mixed cluster, best first; empty for none.

    ``base`` gives precision, optimiser and context parallelism.
    """
    pools = _whole_types(job, pools_of(job.cluster, 1))
    if len({p.gpu.name for p in pools}) < 2 or job.model.layers < 2:
        return []
    bounded = sorted(_bounded_plans(job, base, pools), key=lambda pair: pair[0])
    found: list[Candidate] = []
    priced = 0
    for bound, kind, plan in bounded:
        done = len(found) >= top and bound >= found[top - 1].step_time_s
        if done or priced == MAX_PRICED:
            break
        try:
            layout = build_layout(job.model, job.workload, job.cluster, plan, job.stack)
        except UserError:
            continue
        if float(layout_risk(layout).oom_risk.max()) <= job.risk:
            priced += 1
            found.append(price_laid(kind, layout))
            found.sort(key=lambda c: c.step_time_s)
    return found[:top]


def _whole_types(job: Job, pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
    """Pools with their GPUs counted one by one; mixed nodes stay out (no node of one type)."""
    return tuple(p for p in pools if len({g.name for g in job.cluster.groups[p.group].gpus}) == 1)


def _bounded_plans(
    job: Job, base: Plan, pools: tuple[Pool, ...]
) -> Iterator[tuple[float, str, Plan]]:
    degrees = {p: _degrees(job, p) for p in pools}
    for recompute in Recompute:
        plan = _pipeline_base(base, recompute)
        table = _pass_table(job, plan, degrees)
        for used in _mixtures(pools):
            for shape in _shapes(job, used, degrees, recompute, base.cp):
                found = _divide(job, plan, shape, table)
                if found is not None:
                    yield found
            yield from _replicated(job, plan, used, degrees, table)


def _mixtures(pools: tuple[Pool, ...]) -> list[tuple[Pool, ...]]:
    """All pools, and smaller choices of more than one GPU type while those are few."""
    sizes = range(len(pools), 1, -1) if len(pools) <= _ALL_ORDERS else (len(pools),)
    chosen = [c for size in sizes for c in combinations(pools, size)]
    return [c for c in chosen if len({p.gpu.name for p in c}) > 1]


def _pipeline_base(base: Plan, recompute: Recompute) -> Plan:
    return replace(
        base, recompute=recompute, recompute_layers=None, schedule="1f1b", vpp=1, ep=1,
        sharding=Sharding.ZERO1, shard_degree=None, assignment=(), stage_layers=None,
        offload="none",
    )  # fmt: skip


def _degrees(job: Job, pool: Pool) -> tuple[int, ...]:
    return legal_degrees(job, len(job.cluster.groups[pool.group].gpus))


def legal_degrees(job: Job, per_node: int) -> tuple[int, ...]:
    """Tensor-parallel degrees inside a node that divide the model's heads and widths."""
    model = job.model
    return tuple(
        tp
        for tp in TP_DEGREES
        if per_node % tp == 0
        and model.heads % tp == 0
        and model.ffn % tp == 0
        and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
    )


def _class(
    pool: Pool, tp: int, cp: int, *, index: int, stage: int, pp: int, layers: int, micro_batch: int,
    micro_batches: int, share: float, replicas: int, moe: bool,
) -> RankClass:  # fmt: skip
    return RankClass(
        index=index, gpu=pool.gpu, group=pool.group, stage=stage, pp=pp, tp=tp, cp=cp,
        chunks=(layers,), moe_chunks=(layers if moe else 0,), micro_batch=micro_batch,
        micro_batches=micro_batches, state_share=share, replicas=replicas,
    )  # fmt: skip


def _pass_table(job: Job, plan: Plan, degrees: dict[Pool, tuple[int, ...]]) -> _PassTable:
    """Prices of an inner stage with one and two layers, and of a first and a last with one."""
    keys: list[tuple[int, str, int, int]] = []
    classes: list[RankClass] = []
    for pool, tps in degrees.items():
        for tp, m in product(tps, MICRO_BATCHES):
            keys.append((pool.group, pool.gpu.name, tp, m))
            for stage, layers in ((1, 1), (1, 2), (0, 1), (2, 1)):
                classes.append(
                    _class(pool, tp, plan.cp, index=len(classes), stage=stage, pp=3, layers=layers,
                           micro_batch=m, micro_batches=3, share=1.0, replicas=1,
                           moe=job.model.moe is not None)
                )  # fmt: skip
    made_up = replace(plan, dp=1, pp=3, tp=max(max(t) for t in degrees.values()))
    layout = Layout(job.model, job.workload, job.cluster, made_up, job.stack, tuple(classes),
                    (Pipeline((2, 0, 3), 1),))  # fmt: skip
    seconds = [
        float(
            t.chunks[0].forward.total
            + t.chunks[0].backward_input.total
            + t.chunks[0].backward_weight.total
        )
        for t in price_layout(layout)
    ]
    table = _PassTable({}, {}, {}, {})
    for i, key in enumerate(keys):
        one, two, first, last = seconds[4 * i : 4 * i + 4]
        table.layer_s[key] = two - one
        table.fixed_s[key] = one - (two - one)
        table.first_s[key], table.last_s[key] = first - one, last - one
    return table


def _shapes(
    job: Job,
    pools: tuple[Pool, ...],
    degrees: dict[Pool, tuple[int, ...]],
    recompute: Recompute,
    cp: int,
) -> Iterator[_Shape]:
    """Pipelines through all pools: orders, tensor parallelism by pool, replicas, micro-batch."""
    batch = job.workload.global_batch
    for tps in product(*(degrees[p] for p in pools)):
        if len(set(tps)) > 1 and not job.stack.uneven_batches:
            continue
        widths = [p.replicas // (tp * cp) for p, tp in zip(pools, tps, strict=True)]
        for dp in (d for d in range(1, min(widths) + 1) if all(w % d == 0 for w in widths)):
            pp = sum(w // dp for w in widths)
            if pp > min(MAX_STAGES, job.model.layers):
                continue
            blocks = [
                (_Stage(p, tp),) * (w // dp) for p, tp, w in zip(pools, tps, widths, strict=True)
            ]
            for m in MICRO_BATCHES:
                if batch % (dp * m) == 0:
                    for order in _orders(pools):
                        stages = tuple(s for i in order for s in blocks[i])
                        yield _Shape(stages, dp, m, recompute)


def _orders(pools: tuple[Pool, ...]) -> list[tuple[int, ...]]:
    """Orders of the pools along the pipeline: all of few, else big memory first and last."""
    if len(pools) <= _ALL_ORDERS:
        return list(permutations(range(len(pools))))
    big = sorted(range(len(pools)), key=lambda i: -pools[i].gpu.usable_memory_bytes)
    return [tuple(big), tuple(reversed(big))]


def _divide(
    job: Job, plan: Plan, shape: _Shape, table: _PassTable
) -> tuple[float, str, Plan] | None:
    """Layers of each stage, the lower bound and the plan; None where nothing fits."""
    pp = len(shape.stages)
    count = job.workload.global_batch // (shape.dp * shape.micro_batch)
    seconds = np.array(
        [
            table.stage_s(s, shape.micro_batch, first=i == 0, last=i == pp - 1,
                          layers=job.model.layers)
            for i, s in enumerate(shape.stages)
        ]
    )  # fmt: skip
    fits = _fitting_layers(job, plan, shape, count)
    layers = balance_layers(np.where(fits, seconds, np.inf), job.model.layers)
    if layers is None:
        return None
    bound = count * max(float(seconds[i, k]) for i, k in enumerate(layers))
    entries = tuple(
        Assignment(
            group=s.pool.group, gpu=s.pool.gpu.name, micro_batch=shape.micro_batch, count=count,
            stage=i, layers=k, tp=s.tp, replicas=shape.dp,
        )
        for i, (s, k) in enumerate(zip(shape.stages, layers, strict=True))
    )  # fmt: skip
    tp = max(s.tp for s in shape.stages)
    made = replace(plan, dp=shape.dp, pp=pp, tp=tp, micro_batch=shape.micro_batch,
                   assignment=entries)  # fmt: skip
    return bound, "mixed pipeline, stages by GPU type", made


def _fitting_layers(job: Job, plan: Plan, shape: _Shape, count: int) -> np.ndarray:
    """Whether stage s fits k layers at the accepted risk: shape (stages, layers + 1)."""
    pp, layers = len(shape.stages), job.model.layers
    classes = tuple(
        _class(s.pool, s.tp, plan.cp, index=i, stage=i, pp=pp, layers=1,
               micro_batch=shape.micro_batch, micro_batches=count,
               share=1.0 / (shape.dp * plan.cp), replicas=shape.dp,
               moe=job.model.moe is not None)
        for i, s in enumerate(shape.stages)
    )  # fmt: skip
    made = replace(plan, dp=shape.dp, pp=pp, tp=max(s.tp for s in shape.stages))
    layout = Layout(job.model, job.workload, job.cluster, made, job.stack, classes,
                    (Pipeline(tuple(range(pp)), shape.dp),))  # fmt: skip
    batch = batch_of(layout)
    rows = np.repeat(np.arange(pp), layers + 1)
    k = np.tile(np.arange(layers + 1, dtype=float), pp)
    batch = batch.take(rows)
    kind = "moe_layers" if job.model.moe is not None else "dense_layers"
    full = np.where(plan.recompute == Recompute.FULL, k, 0.0)
    batch = replace(batch, **{kind: k, "recompute_layers": full})
    options = layout_options(layout)
    options = replace(options, communicator_scale=np.asarray(options.communicator_scale)[rows])
    memory = rank_memory(
        job.model, job.stack, job.stack.recipe(plan.precision), plan.optimizer, batch, options
    )
    usable = np.array([s.pool.gpu.usable_memory_bytes for s in shape.stages], float)[rows]
    risk = memory_risk(memory, usable, prior_spread(job.stack.name)).oom_risk
    return np.asarray((risk <= job.risk).reshape(pp, layers + 1))


def _replicated(
    job: Job,
    plan: Plan,
    pools: tuple[Pool, ...],
    degrees: dict[Pool, tuple[int, ...]],
    table: _PassTable,
) -> Iterator[tuple[float, str, Plan]]:
    """Pipelines inside one GPU type each, equal stages, batches by speed."""
    shared = [tp for tp in TP_DEGREES if all(tp in degrees[p] for p in pools)]
    smallest = min(p.replicas for p in pools)
    for tp, m in product(shared, MICRO_BATCHES):
        for pp in range(2, min(smallest // (tp * plan.cp), job.model.layers, MAX_STAGES) + 1):
            if all(p.replicas % (tp * plan.cp * pp) == 0 for p in pools):
                found = _share_replicas(job, plan, pools, tp, m, pp, table)
                if found is not None:
                    yield found


def _share_replicas(
    job: Job, plan: Plan, pools: tuple[Pool, ...], tp: int, m: int, pp: int, table: _PassTable
) -> tuple[float, str, Plan] | None:
    if job.workload.global_batch % m:
        return None
    total = job.workload.global_batch // m
    replicas = [p.replicas // (tp * plan.cp * pp) for p in pools]
    layers = job.model.layers
    seconds = [
        np.array([table.stage_s(_Stage(p, tp), m, first=i == 0, last=i == pp - 1, layers=layers)
                  for i in range(pp)])
        for p in pools
    ]  # fmt: skip
    relative = [
        np.where(
            _fitting_layers(job, plan, _Shape((_Stage(p, tp),) * pp, n, m, plan.recompute), total),
            s / s[:, 1:2].min(),
            np.inf,
        )
        for p, n, s in zip(pools, replicas, seconds, strict=True)
    ]
    divided = balance_layers(np.max(relative, axis=0), layers)
    if divided is None or total < sum(replicas):
        return None
    slowest = [max(float(s[i, k]) for i, k in enumerate(divided)) for s in seconds]
    counts = np.arange(1, total + 1)
    if not job.stack.uneven_batches:
        counts = counts[counts * sum(replicas) == total]
        if len(counts) == 0:
            return None
    kinds = tuple(
        Kind(n, counts, np.ones(len(counts)), np.array([(counts + pp - 1) * t], float))
        for n, t in zip(replicas, slowest, strict=True)
    )
    split = solve_split(SplitProblem(kinds, total, np.ones(1)))
    if split is None:
        return None
    entries = tuple(
        Assignment(
            group=pool.group, gpu=pool.gpu.name, micro_batch=m, count=int(counts[option]),
            stage=i, layers=k, tp=tp, replicas=n,
        )
        for i, k in enumerate(divided)
        for pool, choice in zip(pools, split.choices, strict=True)
        for option, n in choice
    )  # fmt: skip
    dp = sum(replicas)
    made = replace(plan, dp=dp, pp=pp, tp=tp, micro_batch=m, assignment=entries)
    return split.time_s, "mixed pipeline, replicas by GPU type", made
