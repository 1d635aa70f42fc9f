"""Fully sharded plans: gathers and reductions of units beside their computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.cost.times import ClassTimes, UnitTimes
from simulator.errors import UserError
from simulator.graph.action import COMPUTE_KINDS, Action, Kind
from simulator.graph.lanes import Lane
from simulator.graph.schedules import fsdp, layered
from simulator.graph.step import CATEGORY, GraphBuilder, category_seconds, to_ns
from simulator.spec.layout import Layout

#: Unit names that aren't transformer layers; the rest count as one layer each.
NON_LAYERS = ("root", "embedding", "head")


def expand_units(times: ClassTimes) -> list[UnitTimes]:
    """One entry per unit in forward order (equal units are the same object)."""
    return [unit for unit in times.units for _ in range(unit.repeat)]


def split_units(units: Sequence[UnitTimes], layers: Sequence[int]) -> list[list[UnitTimes]]:
    """Units of each model chunk; a unit that isn't a layer stays with the layers before it.

    Leading ones go to the first chunk. Raises ValueError where the layers don't add up.
    """
    chunks: list[list[UnitTimes]] = [[] for _ in layers]
    chunk, left = 0, layers[0]
    for unit in units:
        if unit.name not in NON_LAYERS:
            while left == 0 and chunk + 1 < len(layers):
                chunk += 1
                left = layers[chunk]
            left -= 1
        chunks[chunk].append(unit)
    if left != 0 or chunk != len(layers) - 1:
        raise ValueError(
            f"units name {sum(u.name not in NON_LAYERS for u in units)} layers, "
            f"the chunks hold {sum(layers)}"
        )
    return chunks


def exposed_fsdp_s(
    units: Sequence[UnitTimes], prefetch: int, *, backward: bool
) -> tuple[float, float]:
    """Seconds that one pass over ``units`` waits for communication, and the reduction's tail.

    The pass starts with an idle network; gathers run ``prefetch`` units ahead, each reduction is
    issued after its unit. The tail is what still runs after the last unit.
    """
    order = list(reversed(units)) if backward else list(units)
    network = compute = busy = 0.0
    ends = [0.0] * (prefetch + 1)
    arrived: list[float] = []
    for index, unit in enumerate(order):
        ahead = min(index + prefetch + 1, len(order))
        for other in order[len(arrived) : ahead]:
            gather = other.gather_backward if backward else other.gather_forward
            if gather:
                network = max(network, ends[-1]) + float(gather)
            arrived.append(network if gather else 0.0)
        work = float((unit.backward if backward else unit.forward).total)
        compute = max(compute, arrived[index]) + work
        busy += work
        ends.append(compute)
        if backward and unit.reduce:
            network = max(network, compute) + float(unit.reduce)
    return compute - busy, max(network - compute, 0.0)


class _ShardedRank:
    """Adds one lane's computation in list order and keeps what its collectives wait for."""

    def __init__(self, builder: GraphBuilder, lane: Lane, times: ClassTimes) -> None:
        self.builder = builder
        self.lane = lane
        self.units = expand_units(times)
        self.last: int | None = None
        rows = {
            (n, kind): category_seconds(unit.forward if kind is Kind.F else unit.backward)
            for n, unit in enumerate(times.units)
            for kind in (Kind.F, Kind.B)
        }
        shared = {
            key: (to_ns(float(row.sum())), builder.add_profile(row)) for key, row in rows.items()
        }
        index = [n for n, unit in enumerate(times.units) for _ in range(unit.repeat)]
        self.work = [{k: shared[n, k] for k in (Kind.F, Kind.B)} for n in index]

    def compute(self, action: Action, gathered: int | None) -> None:
        duration, profile = self.work[action.stage][action.kind]
        deps = () if gathered is None else (gathered,)
        self.last = self.builder.add(action, [self.lane.compute], duration, profile, deps)


def add_sharded(
    builder: GraphBuilder, layout: Layout, times: Sequence[ClassTimes], lanes: list[list[Lane]]
) -> dict[int, list[int]]:
    """Tasks of a plan without pipeline stages whose parameters are fully sharded.

    All classes join each collective, which takes the slowest member's time. Returns the reduction
    that ends last by stage. Raises UserError where the classes have different units.
    """
    ranks = [_ShardedRank(builder, row[0], times[row[0].rank_class]) for row in lanes]
    counts = [layout.classes[row[0].rank_class].micro_batches for row in lanes]
    n_units = len(ranks[0].units)
    if any(len(rank.units) != n_units for rank in ranks):
        raise UserError("all ranks of a fully sharded plan need the same units")
    lists = [_issue_order(layout, n_units, n, max(counts)) for n in counts]
    last_reduce: list[int] = []
    gathered: dict[tuple[int, int], int | None] = {}
    is_layered = layout.plan.schedule == "layered"
    visits = [0] * n_units
    for segments in zip(*(_segments(actions) for actions in lists), strict=True):
        for rank, (passes, _) in zip(ranks, segments, strict=True):
            for action in passes:
                rank.compute(action, gathered[action.stage, _visit_of(action, is_layered)])
        collective = segments[0][1]
        if collective is None:
            continue
        unit = collective.stage
        seconds = max(_collective_s(rank.units[unit], collective, visits[unit]) for rank in ranks)
        task = _add_collective(builder, ranks, collective, to_ns(seconds))
        if collective.kind is Kind.UNSHARD:
            gathered[unit, visits[unit]] = task
            visits[unit] += 1
        elif task is not None:
            last_reduce = [task]
    return {0: last_reduce}


def _visit_of(action: Action, is_layered: bool) -> int:
    """Which visit of its unit a pass belongs to: forward and backward by turns."""
    rounds = 0 if is_layered or action.micro_batch is None else action.micro_batch
    return 2 * rounds + (action.kind is Kind.B)


def _issue_order(layout: Layout, units: int, micro_batches: int, rounds: int) -> tuple[Action, ...]:
    prefetch = layout.stack.overlap.fsdp_prefetch
    if layout.plan.schedule == "layered":
        return layered(units, micro_batches, prefetch=prefetch)
    return fsdp(units, micro_batches, rounds=rounds, prefetch=prefetch)


def _segments(
    actions: Sequence[Action],
) -> Iterator[tuple[list[Action], Action | None]]:
    """Passes and the collective after them, in issue order; the last has no collective."""
    passes: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE_KINDS:
            passes.append(action)
        elif action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD):
            yield passes, action
            passes = []
    yield passes, None


def _collective_s(unit: UnitTimes, action: Action, visit: int) -> float:
    """Network seconds of a unit's collective; its visits are forward and backward by turns."""
    if action.kind is Kind.REDUCE_GRAD:
        return float(unit.reduce)
    return float(unit.gather_backward if visit % 2 else unit.gather_forward)


def _add_collective(
    builder: GraphBuilder, ranks: Sequence[_ShardedRank], action: Action, duration_ns: int
) -> int | None:
    """One task on every rank's network stream, after each rank's last pass so far."""
    if duration_ns == 0:
        return None
    deps = [rank.last for rank in ranks if rank.last is not None]
    streams = [rank.lane.dp for rank in ranks]
    task = builder.add(action, streams, duration_ns, CATEGORY["fsdp"], deps)
    builder.load_links(task, "fsdp")
    return task
