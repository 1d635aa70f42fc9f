"""Rules that an explicit assignment keeps: GPUs at hand, layers, batches and state shares."""

from __future__ import annotations

from math import prod

from simulator.spec.plan import Assignment, Plan, Sharding
from simulator.spec.problems import Collector
from simulator.spec.resolve_plan import Case
from simulator.spec.yaml_source import FieldPath

_SHARE_TOLERANCE = 1e-6
_HERE: FieldPath = ("plan", "assignment")


def check_assignment_layers(case: Case, plan: Plan, report: Collector) -> None:
    """Layers of the stages sum to the model's; replicas of one stage hold the same."""
    per_stage: dict[int, set[int]] = {}
    for a in plan.assignment:
        if a.layers is not None:
            per_stage.setdefault(a.stage or 0, set()).add(a.layers)
    if not per_stage:
        return
    for stage, counts in per_stage.items():
        if len(counts) > 1:
            report.error(
                _HERE,
                f"entries of stage {stage} hold {sorted(counts)} layers",
                "the same number in each replica of a stage",
            )
    total = sum(max(counts) for counts in per_stage.values())
    if len(per_stage) == plan.pp and total != case.model.layers:
        report.error(
            _HERE,
            f"layers of the stages sum to {total}, {case.model.name} has {case.model.layers}",
            f"numbers that sum to {case.model.layers}",
        )


def check_assignment_gpus(case: Case, plan: Plan, report: Collector) -> None:
    """Entries draw no more GPUs than their group has; GPUs left over are named."""
    drawn: dict[tuple[int, str], int] = {}
    for a in plan.assignment:
        key = (a.group, a.gpu or "")
        drawn[key] = drawn.get(key, 0) + (a.replicas or 0) * (a.tp or plan.tp) * plan.cp
    if not drawn:
        return
    for index, group in enumerate(case.cluster.groups):
        for name in dict.fromkeys(gpu.name for gpu in group.gpus):
            have = sum(gpu.name == name for gpu in group.gpus) * group.count
            used = drawn.get((index, name), 0)
            if used > have:
                report.error(
                    _HERE,
                    f"uses {used} {name} of group {index}, which has {have}",
                    "fewer replicas",
                )
            elif used < have:
                report.warn(_HERE, f"{have - used} {name} of group {index} stay idle")


def check_assignment_batches(case: Case, plan: Plan, report: Collector) -> None:
    """The ranks' batches sum to the global batch, in every stage."""
    totals: dict[int, int] = {}
    for a in plan.assignment:
        size = prod(part or 0 for part in (a.replicas, a.micro_batch, a.count))
        totals[a.stage or 0] = totals.get(a.stage or 0, 0) + size
    for stage, total in totals.items():
        if total != case.workload.global_batch:
            where = f" in stage {stage}" if len(totals) > 1 else ""
            report.error(
                _HERE,
                f"replicas x micro_batch x count sum to {total} sequences{where}, "
                f"workload.global_batch is {case.workload.global_batch}",
                f"batches that sum to {case.workload.global_batch}",
            )


def check_state_shares(case: Case, plan: Plan, report: Collector) -> None:
    """Shares of the training state sum to one for each sharded copy."""
    del case
    stages: dict[int, list[Assignment]] = {}
    for a in plan.assignment:
        stages.setdefault(a.stage or 0, []).append(a)
    for entries in stages.values():
        given = [a for a in entries if a.state_share is not None]
        if not given:
            continue
        if plan.sharding == Sharding.NONE:
            report.error(
                ("plan", "sharding"), "state shares are given, but nothing is sharded", "zero3"
            )
            return
        ranks = sum(a.replicas or 0 for a in entries) * plan.cp
        copies = ranks / (plan.shard_degree or ranks)
        total = sum((a.state_share or 0.0) * (a.replicas or 0) * plan.cp for a in given)
        is_all = len(given) == len(entries)
        if (is_all and abs(total - copies) > _SHARE_TOLERANCE) or total > copies + _SHARE_TOLERANCE:
            report.error(
                _HERE,
                f"state shares sum to {total:.6g} over the ranks",
                f"shares that sum to {copies:g}, or state_share: even",
            )


def check_uneven(case: Case, plan: Plan, report: Collector) -> None:
    """Only some stacks run different batches on different ranks."""
    kinds = {(a.micro_batch, a.count, a.state_share) for a in plan.assignment if not a.stage}
    if len(kinds) > 1 and not case.stack.uneven_batches:
        report.error(
            ("stack",),
            f"{case.stack.name} gives every rank the same batch and share",
            "stack: gpumix, or equal entries",
        )
