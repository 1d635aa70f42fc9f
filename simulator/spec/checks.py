"""Rules that a plan keeps with its model, workload, cluster and stack: one named function each.

Each check adds what it finds to the collector, with the field that a person would change.
``CHECKS`` runs in order; all run, so that one pass reports everything.
"""

from __future__ import annotations

from collections.abc import Callable

from hardware_db.schema import GpuSpec
from simulator.errors import UserError
from simulator.spec.checks_assignment import (
    check_assignment_batches,
    check_assignment_gpus,
    check_assignment_layers,
    check_state_shares,
    check_uneven,
)
from simulator.spec.layout import build_layout, stage_layer_counts
from simulator.spec.plan import Plan, Recompute, Sharding
from simulator.spec.problems import Collector
from simulator.spec.resolve_plan import Case
from simulator.spec.yaml_source import FieldPath

Check = Callable[[Case, Plan, Collector], None]


def _at(key: str) -> FieldPath:
    return ("plan", key)


def _divisors(number: int, limit: int = 8) -> str:
    found = [d for d in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32, 64) if number % d == 0]
    return ", ".join(map(str, found[:limit]))


def used_gpus(case: Case, plan: Plan) -> list[GpuSpec]:
    """GPU types that the plan uses."""
    if not plan.assignment:
        return list(case.cluster.gpu_types)
    used = {a.gpu for a in plan.assignment}
    return [gpu for gpu in case.cluster.gpu_types if gpu.name in used]


def check_heads(case: Case, plan: Plan, report: Collector) -> None:
    """Attention heads split evenly over tensor-parallel ranks; key-value heads may be copied."""
    for tp, path in _tp_degrees(plan):
        heads, kv_heads = case.model.heads, case.model.kv_heads
        if heads % tp:
            report.error(
                path,
                f"{case.model.name} has {heads} heads, not divisible by tp {tp}",
                f"tp that divides: {_divisors(heads)}",
            )
        elif case.model.mla is None and kv_heads % tp:
            if tp % kv_heads:
                report.error(
                    path,
                    f"{kv_heads} key-value heads and tp {tp}: neither divides the other",
                    f"tp that divides {kv_heads}, or a multiple of it",
                )
            else:
                report.warn(path, f"{kv_heads} key-value heads are copied to {tp} ranks")
        if case.model.moe is None and case.model.ffn % tp:
            report.error(
                path,
                f"{case.model.name}'s ffn {case.model.ffn} is not divisible by tp {tp}",
                f"tp that divides: {_divisors(case.model.ffn)}",
            )


def _tp_degrees(plan: Plan) -> list[tuple[int, FieldPath]]:
    """Every tensor-parallel degree of the plan once, with the first field that sets it."""
    degrees: dict[int, FieldPath] = {}
    if not plan.assignment or any(a.tp is None for a in plan.assignment):
        degrees[plan.tp] = _at("tp")
    for i, a in enumerate(plan.assignment):
        if a.tp is not None:
            degrees.setdefault(a.tp, ("plan", "assignment", i, "tp"))
    return list(degrees.items())


def check_layers(case: Case, plan: Plan, report: Collector) -> None:
    """Every model chunk has a layer; given stage layers sum to the model's."""
    layers, chunks = case.model.layers, plan.pp * plan.vpp
    name = case.model.name
    if layers < chunks:
        key = "pp" if plan.pp > 1 else "vpp"
        report.error(
            _at(key),
            f"{name} has {layers} layers, fewer than pp {plan.pp} x vpp {plan.vpp} = {chunks}",
            f"pp x vpp at most {layers}",
        )
        return
    given = plan.stage_layers
    by_entry = [a.layers for a in plan.assignment]
    if given is not None:
        if len(given) != plan.pp:
            report.error(
                _at("stage_layers"),
                f"lists {len(given)} stages, pp is {plan.pp}",
                "one number for each stage",
            )
        elif sum(given) != layers:
            report.error(
                _at("stage_layers"),
                f"sums to {sum(given)}, {name} has {layers} layers",
                f"numbers that sum to {layers}",
            )
    elif layers % chunks and not any(by_entry):
        counts = stage_layer_counts(case.model, plan)
        short = f"{min(counts)} to {max(counts)}"
        report.warn(
            _at("pp"),
            f"{layers} layers do not divide by pp x vpp = {chunks}: stages hold {short} layers, "
            "the first and the last the fewest",
        )


def check_batch(case: Case, plan: Plan, report: Collector) -> None:
    """The global batch divides into equal micro-batches (without an assignment)."""
    if plan.assignment:
        return
    batch, step = case.workload.global_batch, plan.dp * plan.micro_batch
    if batch % step:
        near = max(step, round(batch / step) * step)
        report.error(
            ("workload", "global_batch"),
            f"{batch} is not divisible by dp {plan.dp} x micro_batch {plan.micro_batch} = {step}",
            f"global_batch: {near}, or other degrees",
        )
    elif plan.pp > 1 and batch // step < plan.pp:
        report.warn(
            _at("micro_batch"),
            f"{batch // step} micro-batches for {plan.pp} stages: the pipeline is mostly idle",
        )


def check_sequence(case: Case, plan: Plan, report: Collector) -> None:
    """The sequence splits over context- and sequence-parallel ranks."""
    length = case.workload.sequence_length
    path: FieldPath = ("workload", "sequence_length")
    parts = 2 * plan.cp if case.model.causal else plan.cp
    if plan.cp > 1 and length % parts:
        why = " (two slices for each rank balance the causal mask)" if case.model.causal else ""
        report.error(
            path,
            f"{length} is not divisible by {parts} for cp {plan.cp}{why}",
            f"a multiple of {parts}",
        )
    elif plan.sequence_parallel and (length // plan.cp) % plan.tp:
        report.error(
            path,
            f"{length} / cp {plan.cp} is not divisible by tp {plan.tp}, as sequence_parallel needs",
            f"a multiple of {plan.cp * plan.tp}, or sequence_parallel: false",
        )
    limit = case.model.max_positions
    if case.model.position == "learned" and 0 < limit < length:
        report.warn(path, f"{case.model.name} has {limit} learned positions, {length} are asked")


def check_experts(case: Case, plan: Plan, report: Collector) -> None:
    """Expert parallelism needs experts, and divides both them and the data-parallel ranks."""
    if plan.ep == 1:
        return
    moe = case.model.moe
    if moe is None:
        report.error(_at("ep"), f"{case.model.name} has no experts to spread", "ep: 1")
        return
    if moe.experts % plan.ep:
        report.error(
            _at("ep"),
            f"{case.model.name} has {moe.experts} experts, not divisible by ep {plan.ep}",
            f"ep that divides: {_divisors(moe.experts)}",
        )
    if (plan.dp * plan.cp) % plan.ep:
        report.error(
            _at("ep"),
            f"{plan.ep} does not divide dp {plan.dp} x cp {plan.cp} = {plan.dp * plan.cp}",
            f"ep that divides: {_divisors(plan.dp * plan.cp)}",
        )


def check_schedule(case: Case, plan: Plan, report: Collector) -> None:
    """The stack can run the schedule, and interleaving has what it needs."""
    known = case.stack.schedules
    if plan.schedule == "layered" and plan.pp > 1:
        report.error(_at("schedule"), "layered runs without pipeline stages", "pp: 1, or 1f1b")
    elif plan.pp > 1 and plan.schedule not in known:
        report.error(
            _at("schedule"),
            f"stack {case.stack.name} cannot run {plan.schedule}",
            f"choose from {', '.join(known)}",
        )
    if plan.vpp > 1 and plan.pp == 1:
        report.error(_at("vpp"), f"{plan.vpp} model chunks need pipeline stages", "vpp: 1, or pp")
        return
    if plan.vpp > 1 and plan.schedule not in ("interleaved", "zb-h1"):
        report.error(
            _at("schedule"),
            f"{plan.schedule} runs one model chunk for each stage, vpp is {plan.vpp}",
            "schedule: interleaved, or vpp: 1",
        )
    if plan.schedule == "interleaved":
        if plan.vpp == 1:
            report.error(_at("vpp"), "interleaved needs two or more model chunks", "vpp: 2")
        _check_interleaved_batches(case, plan, report)


def _check_interleaved_batches(case: Case, plan: Plan, report: Collector) -> None:
    counts = {a.count for a in plan.assignment}
    if not plan.assignment:
        step = plan.dp * plan.micro_batch
        if case.workload.global_batch % step:
            return  # check_batch says it
        counts = {case.workload.global_batch // step}
    for count in sorted(c for c in counts if c is not None):
        if count % plan.pp:
            report.error(
                _at("micro_batch"),
                f"{count} micro-batches are not divisible by pp {plan.pp}, as interleaving needs",
                f"a multiple of {plan.pp} micro-batches, or vpp: 1",
            )


def check_sharding(case: Case, plan: Plan, report: Collector) -> None:
    """Copies of the sharded state fill the data-parallel ranks."""
    ranks = plan.dp * plan.cp
    if plan.shard_degree is not None:
        if plan.sharding == Sharding.NONE:
            report.error(_at("shard_degree"), "sharding is none", "sharding: hsdp, or leave it out")
        elif ranks % plan.shard_degree:
            report.error(
                _at("shard_degree"),
                f"{plan.shard_degree} does not divide dp {plan.dp} x cp {plan.cp} = {ranks}",
                f"one of {_divisors(ranks)}",
            )
    # DeepSpeed's pipeline engine refuses gradient and parameter sharding (it asserts stage < 2).
    if case.stack.name == "megatron-deepspeed" and plan.pp > 1 and plan.sharding >= Sharding.ZERO2:
        report.error(
            _at("sharding"),
            f"{plan.sharding.name.lower()} with pp {plan.pp}: DeepSpeed runs pipelines with zero1",
            "sharding: zero1, or pp: 1",
        )


def check_recompute(case: Case, plan: Plan, report: Collector) -> None:
    """No more layers are recomputed than a stage holds."""
    if plan.recompute == Recompute.FULL and plan.recompute_layers is not None:
        most = -(-case.model.layers // plan.pp)
        if plan.recompute_layers > most:
            report.error(
                _at("recompute"),
                f"{plan.recompute_layers} layers of each stage, but a stage holds {most}",
                f"{{full: n}} with n at most {most}",
            )


def check_tp_inside_nodes(case: Case, plan: Plan, report: Collector) -> None:
    """Tensor-parallel groups that leave the node talk over the network: allowed, and slow."""
    for tp, path in _tp_degrees(plan):
        if tp == 1:
            continue
        for group in case.cluster.groups:
            per_node = len(group.gpus)
            if tp > per_node or per_node % tp:
                report.warn(
                    path,
                    f"tp {tp} does not fit into the {per_node} GPUs of a node of {group.name}: "
                    "it spans nodes",
                )


def check_precision(case: Case, plan: Plan, report: Collector) -> None:
    """The stack has the recipe and every GPU its arithmetic."""
    recipe = report.attempt(_at("precision"), lambda: case.stack.recipe(plan.precision))
    if recipe is None:
        return
    for gpu in used_gpus(case, plan):
        if gpu.supports(recipe.compute_dtype):
            continue
        try:
            emulated = gpu.resolve_dtype(recipe.compute_dtype)
        except UserError:
            able = [k for k, r in case.stack.recipes.items() if gpu.supports(r.compute_dtype)]
            report.error(
                _at("precision"),
                f"{gpu.title} has no {recipe.compute_dtype}",
                f"choose from {', '.join(able)}",
            )
        else:
            report.warn(
                _at("precision"),
                f"{gpu.title} has no {recipe.compute_dtype}: it computes at the {emulated} rate",
            )


def check_layout(case: Case, plan: Plan, report: Collector) -> None:
    """The plan can be laid on the cluster's GPUs (the last check: only where the rest holds)."""
    if not report.problems:
        report.attempt(
            ("plan",),
            lambda: build_layout(case.model, case.workload, case.cluster, plan, case.stack),
        )


CHECKS: tuple[Check, ...] = (
    check_heads,
    check_layers,
    check_assignment_layers,
    check_batch,
    check_sequence,
    check_experts,
    check_schedule,
    check_sharding,
    check_recompute,
    check_tp_inside_nodes,
    check_precision,
    check_assignment_gpus,
    check_assignment_batches,
    check_state_shares,
    check_uneven,
    check_layout,
)
