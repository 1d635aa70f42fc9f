"""Validated ``plan`` -> Plan: degrees derived, defaults filled in and stated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from simulator.spec.cluster import Cluster
from simulator.spec.inputs import AssignmentInput, PlanInput
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Assignment, Plan, Recompute, Sharding
from simulator.spec.problems import Collector
from simulator.spec.stack import Stack
from simulator.spec.workload import Workload
from simulator.spec.yaml_source import FieldPath

#: Stacks whose recipes turn sequence parallelism on together with tensor parallelism.
SEQUENCE_PARALLEL_STACKS = ("megatron-core", "torchtitan")
_HSDP = -1


@dataclass(frozen=True)
class Case:
    """What a plan is checked against."""

    model: ModelSpec
    workload: Workload
    cluster: Cluster
    stack: Stack


def default_stack(cluster: Cluster | None, plan: Any) -> str:
    """Stack where none is named: gpumix for mixed clusters, else by the sharding."""
    if cluster is not None and cluster.is_mixed:
        return "gpumix"
    sharding = getattr(plan, "sharding", 0)
    return "torchtitan" if sharding in (int(Sharding.ZERO3), _HSDP) else "megatron-core"


def resolve_plan(entry: PlanInput, case: Case, report: Collector) -> Plan | None:
    """The plan that an input describes; None (with the reason recorded) where dp is impossible."""
    before = len(report.problems)
    stages = [a.stage for a in entry.assignment if a.stage is not None]
    pp = entry.pp if entry.pp is not None else (max(stages) + 1 if stages else 1)
    plan = Plan(
        tp=entry.tp,
        pp=pp,
        vpp=entry.vpp,
        cp=entry.cp,
        ep=entry.ep,
        micro_batch=entry.micro_batch,
        recompute=entry.recompute[0],
        recompute_layers=entry.recompute[1],
        precision=entry.precision.strip().lower(),
        optimizer=entry.optimizer.strip().lower(),
        attention=entry.attention,  # type: ignore[arg-type]
        compile=entry.compile,
        offload=entry.offload,  # type: ignore[arg-type]
        stage_layers=None if entry.stage_layers is None else tuple(entry.stage_layers),
        sharding=Sharding.ZERO3 if entry.sharding == _HSDP else Sharding(entry.sharding),
        shard_degree=entry.shard_degree,
    )
    _state_plain_defaults(entry, report)
    if entry.assignment:
        plan = _with_assignment(entry, plan, case, report)
    else:
        plan = _with_derived_dp(entry, plan, case, report)
    if len(report.problems) > before:
        return None
    plan = _with_schedule(entry, plan, case, report)
    plan = _with_sequence_parallel(entry, plan, case, report)
    return _with_hsdp(entry, plan, case, report)


def _state_plain_defaults(entry: PlanInput, report: Collector) -> None:
    """State the defaults that do not depend on anything else and that change the answer."""
    stated: dict[str, Any] = {
        "tp": 1, "micro_batch": 1, "sharding": "none", "recompute": "none", "precision": "bf16",
        "optimizer": "adamw", "compile": False,
    }  # fmt: skip
    if entry.assignment and all(a.micro_batch is not None for a in entry.assignment):
        del stated["micro_batch"]
    for key, value in stated.items():
        if key not in entry.model_fields_set:
            report.default(("plan", key), value)


def _with_derived_dp(entry: PlanInput, plan: Plan, case: Case, report: Collector) -> Plan:
    gpus = case.cluster.n_gpus
    width = plan.tp * plan.pp * plan.cp
    product = f"tp {plan.tp} x pp {plan.pp} x cp {plan.cp}"
    if entry.dp is not None:
        used = width * entry.dp
        if used != gpus:
            hint = (
                f"dp: {gpus // width}, or leave dp out"
                if gpus % width == 0
                else f"choose degrees whose product divides {gpus}"
            )
            report.error(
                ("plan", "dp"),
                f"{product} x dp {entry.dp} = {used:,} GPUs, but the cluster has {gpus:,}",
                hint,
            )
        return replace(plan, dp=entry.dp)
    if gpus % width:
        widest = max((k for k in ("tp", "pp", "cp")), key=lambda k: int(getattr(plan, k)))
        report.error(
            ("plan", widest),
            f"{product} = {width:,} does not divide the cluster's {gpus:,} GPUs",
            f"choose degrees whose product divides {gpus}",
        )
        return plan
    report.default(("plan", "dp"), gpus // width, f"{gpus:,} GPUs / ({product})")
    return replace(plan, dp=gpus // width)


def _with_schedule(entry: PlanInput, plan: Plan, case: Case, report: Collector) -> Plan:
    if entry.schedule is not None:
        return replace(plan, schedule=entry.schedule)  # type: ignore[arg-type]
    known = case.stack.schedules
    if plan.vpp > 1:
        wanted = "interleaved"
    elif plan.pp == 1 and "layered" in known:
        wanted = "layered"
    else:
        wanted = "1f1b" if "1f1b" in known or not known else known[0]
    if plan.pp > 1 or wanted == "layered":
        report.default(("plan", "schedule"), wanted)
    return replace(plan, schedule=wanted)  # type: ignore[arg-type]


def _with_sequence_parallel(entry: PlanInput, plan: Plan, case: Case, report: Collector) -> Plan:
    if entry.sequence_parallel is not None:
        if entry.sequence_parallel and plan.tp == 1:
            report.warn(("plan", "sequence_parallel"), "has no effect with tp 1")
        return replace(plan, sequence_parallel=entry.sequence_parallel)
    on = plan.tp > 1 and case.stack.name in SEQUENCE_PARALLEL_STACKS
    if plan.tp > 1:
        report.default(("plan", "sequence_parallel"), on, f"as stack {case.stack.name} does")
    return replace(plan, sequence_parallel=on)


def _with_hsdp(entry: PlanInput, plan: Plan, case: Case, report: Collector) -> Plan:
    if entry.sharding != _HSDP or entry.shard_degree is not None:
        return plan
    per_node = min(len(group.gpus) for group in case.cluster.groups)
    degree = gcd(max(1, per_node // plan.tp), plan.dp * plan.cp)
    report.default(("plan", "shard_degree"), degree, "the data-parallel ranks of one node")
    return replace(plan, shard_degree=degree)


def _with_assignment(entry: PlanInput, plan: Plan, case: Case, report: Collector) -> Plan:
    """Fill in replicas, micro-batch and count of each entry, and the data-parallel degree."""
    entries = _expanded(entry.assignment, plan, case, report)
    if entries is None:
        return plan
    staged = any(a.stage is not None for a in entries)
    per_stage: dict[int, list[Assignment]] = {}
    for a in entries:
        per_stage.setdefault(a.stage or 0, []).append(a)
    dp = max(sum(a.replicas or 0 for a in row) for row in per_stage.values())
    entries = _with_counts(entry, entries, per_stage, case, report)
    if entry.dp is not None and entry.dp != dp:
        report.error(
            ("plan", "dp"),
            f"{entry.dp}, but the assignment forms {dp} data-parallel replicas",
            "leave dp out",
        )
    if staged and entry.pp is not None and entry.pp != len(per_stage):
        report.error(
            ("plan", "pp"),
            f"{entry.pp}, but the assignment names {len(per_stage)} stages",
            "leave pp out, or give every stage an entry",
        )
    if staged and sorted(per_stage) != list(range(len(per_stage))):
        report.error(
            ("plan", "assignment"),
            f"stages {sorted(per_stage)[:8]} have gaps",
            "number the stages 0, 1, 2, ...",
        )
    if entry.dp is None:
        report.default(("plan", "dp"), dp, "replicas of the assignment")
    return replace(plan, dp=dp, assignment=tuple(entries))


def _expanded(
    rows: list[AssignmentInput], plan: Plan, case: Case, report: Collector
) -> list[Assignment] | None:
    """Entries with their replicas; an entry with a list of shares becomes one entry per share."""
    before = len(report.problems)
    pools = [_pool(row, case, ("plan", "assignment", i), report) for i, row in enumerate(rows)]
    entries_of = Counter((r.group, p[0]) for r, p in zip(rows, pools, strict=True) if p)
    entries: list[Assignment] = []
    for i, (row, pool) in enumerate(zip(rows, pools, strict=True)):
        if pool is None:
            continue
        path: FieldPath = ("plan", "assignment", i)
        gpu, available = pool
        width = (row.tp or plan.tp) * plan.cp
        sharing = entries_of[row.group, gpu]
        replicas = row.replicas
        if replicas is None:
            replicas, rest = divmod(available, width * sharing)
            if rest or replicas == 0:
                report.error(
                    path,
                    f"{available} GPUs {gpu} do not divide into {sharing} x replicas of "
                    f"tp x cp = {width}",
                    "say how many replicas each entry forms",
                )
                continue
        entries.extend(_by_share(row, gpu, replicas, path, report))
    return entries if len(report.problems) == before else None


def _by_share(
    row: AssignmentInput, gpu: str, replicas: int, path: FieldPath, report: Collector
) -> list[Assignment]:
    made = Assignment(
        group=row.group,
        gpu=gpu,
        micro_batch=row.micro_batch,
        count=row.count,
        stage=row.stage,
        layers=row.layers,
        tp=row.tp,
        replicas=replicas,
    )
    shares = row.state_share
    if not isinstance(shares, list):
        return [replace(made, state_share=shares)]
    if len(shares) != replicas:
        report.error(
            (*path, "state_share"),
            f"{len(shares)} shares for {replicas} replicas",
            f"list {replicas} fractions, or one for all",
        )
        return []
    entries: list[Assignment] = []
    for share in shares:
        if entries and entries[-1].state_share == share:
            entries[-1] = replace(entries[-1], replicas=(entries[-1].replicas or 0) + 1)
        else:
            entries.append(replace(made, state_share=share, replicas=1))
    return entries


def _pool(
    row: AssignmentInput, case: Case, path: FieldPath, report: Collector
) -> tuple[str, int] | None:
    """GPU type that an entry draws from, and how many of it its group has."""
    groups = case.cluster.groups
    if row.group >= len(groups):
        last = len(groups) - 1
        report.error((*path, "group"), f"there is no group {row.group}", f"groups are 0 to {last}")
        return None
    group = groups[row.group]
    kinds = dict.fromkeys(gpu.name for gpu in group.gpus)
    if row.gpu is None:
        if len(kinds) > 1:
            names = ", ".join(kinds)
            report.error(path, f"group {row.group} mixes {names}", "add gpu: with one of them")
            return None
        name = next(iter(kinds))
    else:
        named = row.gpu
        found = report.attempt((*path, "gpu"), lambda: _gpu_name(named))
        if found is None:
            return None
        if found not in kinds:
            report.error(
                (*path, "gpu"),
                f"group {row.group} has no {found}",
                f"it has {', '.join(kinds)}",
            )
            return None
        name = found
    return name, sum(gpu.name == name for gpu in group.gpus) * group.count


def _gpu_name(name: str) -> str:
    import hardware_db

    return hardware_db.gpu(name).name


def _with_counts(
    entry: PlanInput,
    entries: list[Assignment],
    per_stage: dict[int, list[Assignment]],
    case: Case,
    report: Collector,
) -> list[Assignment]:
    """Micro-batch and count of each entry; counts left out are equal and use up the batch."""
    batch = case.workload.global_batch
    counts: dict[int, int | None] = {}
    for stage, row in per_stage.items():
        fixed = sum((a.replicas or 0) * (a.micro_batch or entry.micro_batch) * a.count
                    for a in row if a.count is not None)  # fmt: skip
        per_count = sum((a.replicas or 0) * (a.micro_batch or entry.micro_batch)
                        for a in row if a.count is None)  # fmt: skip
        counts[stage] = None
        if per_count:
            count, rest = divmod(batch - fixed, per_count)
            if rest or count < 1:
                report.error(
                    ("plan", "assignment"),
                    f"global_batch {batch} leaves {batch - fixed} sequences for the entries "
                    f"without a count, which take {per_count} at a time",
                    "give every entry micro_batch and count",
                )
                count = 1
            counts[stage] = count
    return [
        replace(
            a,
            micro_batch=a.micro_batch or entry.micro_batch,
            count=a.count if a.count is not None else counts[a.stage or 0],
        )
        for a in entries
    ]


def recompute_text(plan: Plan) -> Any:
    """The plan's recompute as an input would write it."""
    if plan.recompute == Recompute.FULL and plan.recompute_layers is not None:
        return {"full": plan.recompute_layers}
    return plan.recompute.name.lower()
