"""Changes to a plan that would help most: neighbours of the plan, each priced like the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from simulator.analysis.prediction import Suggestion
from simulator.errors import UserError
from simulator.spec.layout import Layout, build_layout
from simulator.spec.plan import Assignment, Plan, Recompute, Sharding

#: What prices a layout: (tokens per second, OOM risk, fill of the fullest rank).
Pricer = Callable[[Layout], tuple[float, float, float]]

#: A change that gains less than this is noise beside the model's own error.
_SMALLEST_GAIN = 0.005


def suggest(
    layout: Layout,
    price: Pricer,
    risk: float,
    seconds_per_sequence: tuple[float, ...],
    limit: int = 3,
) -> tuple[Suggestion, ...]:
    """The changes with the highest predicted rate among those that fit at the accepted risk.

    Where the plan itself doesn't fit, every change that fits helps and the fastest come first.
    ``seconds_per_sequence`` is each rank class's compute per sequence (for uneven splits).
    """
    rate, own_risk, _ = price(layout)
    found = []
    for change, plan in _neighbours(layout, seconds_per_sequence):
        try:
            changed = build_layout(
                layout.model, layout.workload, layout.cluster, plan, layout.stack
            )
            tokens, oom, fill = price(changed)
        except UserError:
            continue
        if oom <= risk:
            found.append(Suggestion(change, tokens / rate - 1.0, tokens, oom, fill))
    found.sort(key=lambda s: -s.tokens_per_s)
    helps = found if own_risk > risk else [s for s in found if s.gain > _SMALLEST_GAIN]
    return tuple(helps[:limit])


def _neighbours(
    layout: Layout, seconds_per_sequence: tuple[float, ...]
) -> Iterator[tuple[str, Plan]]:
    """Legal-looking single changes, each with its words; build_layout rejects the rest."""
    plan = layout.plan
    if layout.stack.uneven_batches and len(layout.classes) > 1 and layout.classes[0].pp == 1:
        uneven = _proportional(layout, seconds_per_sequence)
        if uneven is not None and uneven != plan:
            counts = ", ".join(f"{a.gpu} {a.micro_batch}x{a.count}" for a in uneven.assignment)
            yield f"split the batch by speed ({counts})", uneven
    yield from _recompute_changes(plan)
    yield from _batch_changes(plan)
    if not plan.assignment:
        yield from _degree_changes(plan, layout)
    if plan.sharding != Sharding.ZERO3:
        more = Sharding(plan.sharding + 1)
        yield f"shard more of the state ({more.name.lower()})", replace(plan, sharding=more)
    if plan.sharding != Sharding.NONE and not plan.assignment:
        less = Sharding(plan.sharding - 1)
        yield (
            f"shard less of the state ({less.name.lower()})",
            replace(plan, sharding=less, shard_degree=None),
        )
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "turn sequence parallelism on", replace(plan, sequence_parallel=True)
    if layout.stack.name == "torchtitan" and not plan.compile:
        yield "compile the layers (torch.compile)", replace(plan, compile=True)


def _recompute_changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for mode in Recompute:
        if mode != plan.recompute:
            changed = replace(plan, recompute=mode, recompute_layers=None)
            yield f"recompute {mode.name.lower()} instead of {plan.recompute.name.lower()}", changed


def _batch_changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Twice or half the micro-batch, with the batch per rank unchanged."""
    for factor in (2.0, 0.5):
        word = "double" if factor > 1 else "halve"
        entries = tuple(_scaled(a, factor) for a in plan.assignment)
        size = plan.micro_batch * factor
        if any(e is None for e in entries) or size < 1:
            continue
        kept = tuple(e for e in entries if e is not None)
        yield f"{word} the micro-batch", replace(plan, micro_batch=int(size), assignment=kept)


def _scaled(entry: Assignment, factor: float) -> Assignment | None:
    """An entry with a scaled micro-batch and as many sequences as before, or None."""
    if entry.micro_batch is None:
        return entry
    size, count = entry.micro_batch * factor, (entry.count or 1) / factor
    if size < 1 or size % 1 or count < 1 or count % 1:
        return None
    return replace(entry, micro_batch=int(size), count=int(count))


def _degree_changes(plan: Plan, layout: Layout) -> Iterator[tuple[str, Plan]]:
    """One degree doubled or halved against data parallelism."""
    for name in ("tp", "pp", "cp"):
        value = getattr(plan, name)
        for new, dp in ((value * 2, plan.dp / 2), (value / 2, plan.dp * 2)):
            if new < 1 or new % 1 or dp < 1 or dp % 1 or not _legal(layout, name, int(new)):
                continue
            degree: dict[str, Any] = {name: int(new), "dp": int(dp), "stage_layers": None}
            changed = replace(plan, **degree)
            if name == "tp":
                split = int(new) > 1 and (plan.sequence_parallel or plan.tp == 1)
                changed = replace(changed, sequence_parallel=split)
            if name == "pp" and int(new) == 1:
                changed = replace(changed, vpp=1, schedule="1f1b")
            yield f"{name} {int(new)} instead of {value} (dp {int(dp)})", changed
    can_interleave = "interleaved" in layout.stack.schedules
    if plan.pp > 1 and can_interleave and plan.vpp == 1:
        yield "interleave two model chunks per stage", replace(plan, vpp=2, schedule="interleaved")
    elif plan.vpp > 1:
        yield "twice as many model chunks per stage", replace(plan, vpp=plan.vpp * 2)


def _legal(layout: Layout, name: str, value: int) -> bool:
    """Rules that a layout alone doesn't check: heads, nodes, sequence slices."""
    model = layout.model
    if name == "tp":
        smallest = min(len(g.gpus) for g in layout.cluster.groups)
        divides = model.heads % value == 0 and (
            model.kv_heads % value == 0 or value % model.kv_heads == 0
        )
        return divides and value <= smallest
    if name == "cp":
        return layout.workload.sequence_length % (2 * value) == 0
    return True


def _proportional(layout: Layout, seconds_per_sequence: tuple[float, ...]) -> Plan | None:
    """Micro-batch counts by speed: each next micro-batch goes to the class that ends first."""
    plan = layout.plan
    classes = layout.classes
    counts = [0] * len(classes)
    left = layout.workload.global_batch
    while left > 0:
        open_ = [c for c in classes if c.replicas * c.micro_batch <= left]
        if not open_:
            return None
        best = min(
            open_,
            key=lambda c: (counts[c.index] + 1) * c.micro_batch * seconds_per_sequence[c.index],
        )
        counts[best.index] += 1
        left -= best.replicas * best.micro_batch
    if min(counts) == 0:
        return None
    entries = tuple(
        Assignment(
            group=c.group,
            gpu=c.gpu.name,
            micro_batch=c.micro_batch,
            count=n,
            state_share=c.state_share,
        )
        for c, n in zip(classes, counts, strict=True)
    )
    return replace(plan, assignment=entries, schedule="layered")
