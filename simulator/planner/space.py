"""All uniform plans of a homogeneous cluster, as a structure of arrays.

Degrees, batch split, schedule, sharding and recompute in all combinations of some axes; rules are
checked for all rows at once and impossible combinations are counted by the rule that they break.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.errors import UserError
from simulator.planner.plan_grid import (
    HSDP,
    INTERLEAVED,
    LAYERED,
    SHARDINGS,
    Ints,
    PlanGrid,
    joined,
)
from simulator.spec.plan import SCHEDULES, Plan, Recompute
from simulator.spec.resolve_plan import Case

Bools = npt.NDArray[np.bool_]

#: Plans that are worked on at once; bounds the memory of a search.
CHUNK = 16_384

#: Context-parallel slices shorter than this many tokens are left out of a search.
SHORTEST_SLICE = 512
#: Largest micro-batch that a search tries.
LARGEST_MICRO_BATCH = 64


class Rule(IntEnum):
    """Why a plan is impossible (or, ``TP_LEAVES_NODE``, left out); 0 is a legal plan."""

    LEGAL = 0
    GPUS = 1
    HEADS = 2
    KV_HEADS = 3
    FFN = 4
    TP_LEAVES_NODE = 5
    LAYERS = 6
    SEQUENCE = 7
    SEQUENCE_PARALLEL = 8
    BATCH = 9
    EXPERTS = 10
    EXPERT_RANKS = 11
    SCHEDULE = 12
    CHUNKS = 13
    INTERLEAVED_BATCHES = 14
    LAYERED = 15
    STACK_SHARDING = 16
    NOTHING_TO_SHARD = 17
    OFFLOAD = 18


RULE_TEXTS = {
    Rule.GPUS: "tp x pp x cp does not divide the number of GPUs",
    Rule.HEADS: "attention heads do not divide by tp",
    Rule.KV_HEADS: "neither of key-value heads and tp divides the other",
    Rule.FFN: "the MLP's width does not divide by tp",
    Rule.TP_LEAVES_NODE: "tensor parallelism would leave the node (fix plan.tp to ask for it)",
    Rule.LAYERS: "fewer layers than pp x vpp model chunks, or chunks of different sizes",
    Rule.SEQUENCE: "the sequence does not divide over context-parallel ranks",
    Rule.SEQUENCE_PARALLEL: "sequence parallelism needs tp above 1 that divides the sequence",
    Rule.BATCH: "the global batch does not divide by dp x micro_batch",
    Rule.EXPERTS: "experts do not divide by ep (or there are none)",
    Rule.EXPERT_RANKS: "ep does not divide dp x cp",
    Rule.SCHEDULE: "the stack cannot run the schedule, or it needs pipeline stages",
    Rule.CHUNKS: "interleaving needs several model chunks, and only it can have them",
    Rule.INTERLEAVED_BATCHES: "interleaving needs micro-batches in multiples of pp",
    Rule.LAYERED: "layered gradient accumulation needs zero3 and no pipeline",
    Rule.STACK_SHARDING: "the stack runs pipelines without sharded gradients or parameters",
    Rule.NOTHING_TO_SHARD: "one data-parallel rank: sharding changes nothing",
    Rule.OFFLOAD: "offloading activations needs full recompute, which keeps layers' inputs alone",
}


@dataclass(frozen=True)
class Axes:
    """Values of each axis. ``vpp`` None: every balanced number of chunks of the stage's layers.

    ``dp`` follows from the GPUs; where given, other values are not looked at. ``tp_in_node``
    leaves out tensor-parallel groups that don't fit into a node.
    """

    tp: Sequence[int]
    pp: Sequence[int]
    cp: Sequence[int]
    ep: Sequence[int]
    micro_batch: Sequence[int]
    schedule: Sequence[str]
    sharding: Sequence[str]
    recompute: Sequence[int]
    sequence_parallel: Sequence[int]
    vpp: Sequence[int] | None = None
    dp: Sequence[int] | None = None
    tp_in_node: bool = True


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Divisors in rising order, up to ``limit``."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = sorted({*small, *(number // d for d in small)})
    return [d for d in found if limit is None or d <= limit]


def default_axes(case: Case, fixed: Mapping[str, Any] | None = None) -> Axes:
    """Every value that could be legal; ``fixed`` replaces axes by one value or several.

    Raises:
        UserError: ``fixed`` names an unknown axis.
    """
    model, workload, gpus = case.model, case.workload, case.cluster.n_gpus
    per_node = min(len(group.gpus) for group in case.cluster.groups)
    longest = max(workload.sequence_length // SHORTEST_SLICE, 1)
    batches = divisors(workload.global_batch, LARGEST_MICRO_BATCH)
    axes = Axes(
        tp=[d for d in divisors(gpus, min(8 * per_node, model.heads))],
        pp=divisors(gpus, model.layers),
        cp=divisors(gpus, longest),
        ep=divisors(model.moe.experts) if model.moe else [1],
        micro_batch=batches,
        schedule=[s for s in SCHEDULES if s in case.stack.schedules] or ["1f1b"],
        sharding=SHARDINGS,
        recompute=[int(mode) for mode in Recompute],
        sequence_parallel=(0, 1),
    )
    changes: dict[str, Any] = {}
    for name, value in (fixed or {}).items():
        if name not in {f.name for f in fields(Axes)}:
            raise UserError(f"{name!r} is no axis of a search; fix plan degrees or their kinds")
        changes[name] = list(value) if isinstance(value, (list, tuple)) else [value]
        if name == "tp":
            changes["tp_in_node"] = False
    return replace(axes, **changes)


@dataclass
class Space:
    """Legal plans of a case along some axes, chunk by chunk; counts what is left out and why."""

    case: Case
    axes: Axes
    considered: int = 0
    left_out: Counter[Rule] = field(default_factory=Counter)

    def chunks(self, size: int = CHUNK) -> Iterator[PlanGrid]:
        """Legal plans, at most ``size`` at a time, each chunk of one pipeline shape."""
        self.considered, self.left_out = 0, Counter()
        for pp in self.axes.pp:
            degrees = [d for d in product(self.axes.tp, self.axes.cp) if self._has_dp(pp, *d)]
            legal = [d for d in degrees if not self._left_out_whole(pp, *d)]
            for schedule, vpp in _schedules(self.axes, self.case, pp):
                yield from _even(self._legal_blocks(pp, schedule, vpp, legal), size)

    def _has_dp(self, pp: int, tp: int, cp: int) -> bool:
        wanted = self.axes.dp
        return wanted is None or self.case.cluster.n_gpus / (tp * pp * cp) in wanted

    def _inner_size(self, pp: int) -> int:
        return len(self._inner.ep) * len(_schedules(self.axes, self.case, pp))

    def _left_out_whole(self, pp: int, tp: int, cp: int) -> bool:
        """Count and skip a combination of degrees with which no plan is legal."""
        gpus = self.case.cluster.n_gpus
        if gpus % (tp * pp * cp):
            rule = Rule.GPUS
        else:
            rule = _degree_rule(self.case, self._block(pp, tp, cp, 0, 1, 1), self.axes.tp_in_node)
        if rule:
            self.considered += self._inner_size(pp)
            self.left_out[rule] += self._inner_size(pp)
        return bool(rule)

    def _legal_blocks(
        self, pp: int, schedule: int, vpp: int, degrees: Sequence[tuple[int, int]]
    ) -> Iterator[PlanGrid]:
        for tp, cp in degrees:
            block = self._block(pp, tp, cp, schedule, vpp)
            broken = broken_rules(self.case, block, self.axes.tp_in_node)
            counts = np.bincount(broken, minlength=len(Rule))
            self.considered += len(block)
            for code in np.flatnonzero(counts[1:]) + 1:
                self.left_out[Rule(int(code))] += int(counts[code])
            if counts[0] == len(block):
                yield with_shard_degrees(self.case, block)
            elif counts[0]:
                yield with_shard_degrees(self.case, block.take(np.flatnonzero(broken == 0)))

    def _block(
        self, pp: int, tp: int, cp: int, schedule: int, vpp: int, rows: int | None = None
    ) -> PlanGrid:
        """All combinations of the inner axes for one choice of degrees and schedule."""
        inner = self._inner if rows is None else self._inner.take(np.arange(rows))
        dp = self.case.cluster.n_gpus // (tp * pp * cp)
        fixed = {"pp": pp, "tp": tp, "cp": cp, "dp": dp, "vpp": vpp, "schedule": schedule}
        shape = inner.ep.shape
        return replace(inner, **{k: np.full(shape, v, np.int64) for k, v in fixed.items()})

    @cached_property
    def _inner(self) -> PlanGrid:
        a = self.axes
        kinds = [SHARDINGS.index(name) for name in a.sharding]
        axes = (a.ep, a.micro_batch, a.sequence_parallel, a.recompute, kinds)
        ep, micro_batch, split, recompute, sharding = (
            column.reshape(-1).astype(np.int64) for column in np.meshgrid(*axes, indexing="ij")
        )
        one = np.ones_like(ep)
        return PlanGrid(
            tp=one,
            pp=one,
            cp=one,
            dp=one,
            vpp=one,
            schedule=one,
            ep=ep,
            micro_batch=micro_batch,
            sequence_parallel=split,
            recompute=recompute,
            sharding=sharding,
            shard_degree=0 * one,
        )


def _even(blocks: Iterator[PlanGrid], size: int) -> Iterator[PlanGrid]:
    """Blocks put together or cut to about ``size`` rows."""
    parts: list[PlanGrid] = []
    held = 0
    for block in blocks:
        parts.append(block)
        held += len(block)
        if held >= size:
            yield from _cut(joined(parts), size)
            parts, held = [], 0
    if parts:
        yield from _cut(joined(parts), size)


def _cut(grid: PlanGrid, size: int) -> Iterator[PlanGrid]:
    if len(grid) <= size:
        yield grid
        return
    for rows in _slices(len(grid), size):
        yield grid.take(rows)


def _slices(length: int, size: int) -> Iterator[npt.NDArray[np.intp]]:
    for start in range(0, length, size):
        yield np.arange(start, min(start + size, length))


def _schedules(axes: Axes, case: Case, pp: int) -> list[tuple[int, int]]:
    """(schedule, vpp) pairs worth trying with ``pp`` stages; without stages there is one order."""
    names = [SCHEDULES.index(name) for name in axes.schedule]
    if pp == 1:
        plain = SCHEDULES.index("1f1b")
        orders = [plain] if any(n != LAYERED for n in names) else []
        orders += [LAYERED] * (LAYERED in names)
        return [(order, v) for order in orders for v in (axes.vpp or [1])]
    fullest = -(-case.model.layers // pp)
    pairs = []
    for name in names:
        if axes.vpp is not None:
            pairs += [(name, v) for v in axes.vpp]
        elif name == INTERLEAVED:
            pairs += [(name, v) for v in divisors(fullest) if v > 1]
        else:
            pairs.append((name, 1))
    return pairs


def _degree_rule(case: Case, one: PlanGrid, tp_in_node: bool) -> Rule:
    """The first rule that every plan with these degrees breaks."""
    for rule, broken in _degree_rules(case, one, tp_in_node):
        if bool(np.all(broken)):
            return rule
    return Rule.LEGAL


def _degree_rules(
    case: Case, g: PlanGrid, tp_in_node: bool
) -> Iterator[tuple[Rule, Bools | np.bool_]]:
    """Rules on tp, cp and dp alone, each as what it finds broken."""
    model = case.model
    per_node = min(len(group.gpus) for group in case.cluster.groups)
    yield Rule.GPUS, g.tp * g.pp * g.cp * g.dp != case.cluster.n_gpus
    yield Rule.HEADS, model.heads % g.tp != 0
    if model.mla is None:
        yield Rule.KV_HEADS, (model.kv_heads % g.tp != 0) & (g.tp % model.kv_heads != 0)
    if model.moe is None:
        yield Rule.FFN, model.ffn % g.tp != 0
    if tp_in_node:
        yield Rule.TP_LEAVES_NODE, (g.tp > per_node) | (per_node % g.tp != 0)
    parts = np.where(g.cp > 1, (2 if model.causal else 1) * g.cp, 1)
    yield Rule.SEQUENCE, case.workload.sequence_length % parts != 0


def broken_rules(case: Case, g: PlanGrid, tp_in_node: bool = False) -> Ints:
    """The first rule that each row breaks (``Rule`` codes; 0 where it is legal).

    The same rules as :mod:`simulator.spec.checks`, for all rows at once, and those of a search:
    balanced model chunks, nothing sharded over a single rank, TP inside nodes where asked.
    """
    found = np.zeros(len(g), np.int64)
    for rule, broken in (
        *_degree_rules(case, g, tp_in_node),
        *_batch_rules(case, g),
        *_kind_rules(case, g),
    ):
        found = np.where((found == 0) & broken, int(rule), found)
    return found


def offloadable(g: PlanGrid, like: Plan) -> PlanGrid:
    """The rows that keep what ``like`` offloads."""
    if like.offload != "activations":
        return g
    return g.take(np.flatnonzero(g.recompute == Recompute.FULL))


def _batch_rules(case: Case, g: PlanGrid) -> Iterator[tuple[Rule, Bools]]:
    model, length = case.model, case.workload.sequence_length
    yield Rule.LAYERS, model.layers < g.pp * g.vpp
    split = g.sequence_parallel > 0
    yield Rule.SEQUENCE_PARALLEL, split & ((g.tp == 1) | ((length // g.cp) % g.tp != 0))
    yield Rule.BATCH, case.workload.global_batch % (g.dp * g.micro_batch) != 0
    experts = model.moe.experts if model.moe else 1
    yield Rule.EXPERTS, experts % g.ep != 0
    yield Rule.EXPERT_RANKS, (g.dp * g.cp) % g.ep != 0


def _kind_rules(case: Case, g: PlanGrid) -> Iterator[tuple[Rule, Bools]]:
    known = {SCHEDULES.index(s) for s in case.stack.schedules if s in SCHEDULES}
    can_run = np.array([n in known for n in range(len(SCHEDULES))])
    interleaved = g.schedule == INTERLEAVED
    piped = g.pp > 1
    yield Rule.SCHEDULE, (piped & ~can_run[g.schedule]) | (~piped & (g.vpp > 1))
    yield Rule.CHUNKS, interleaved == (g.vpp == 1)
    count = case.workload.global_batch // (g.dp * g.micro_batch)
    yield Rule.INTERLEAVED_BATCHES, interleaved & (count % g.pp != 0)
    layered = g.schedule == LAYERED
    yield Rule.LAYERED, layered & (piped | (g.sharding < SHARDINGS.index("zero3")))
    if case.stack.name == "megatron-deepspeed":
        yield Rule.STACK_SHARDING, piped & (g.sharding >= SHARDINGS.index("zero2"))
    alone = g.dp * g.cp == 1
    node = _node_ranks(case, g)
    useless = (g.sharding == HSDP) & ((node <= 1) | (node >= g.dp * g.cp))
    yield Rule.NOTHING_TO_SHARD, (alone & (g.sharding > 0)) | useless


def _node_ranks(case: Case, g: PlanGrid) -> Ints:
    """Data-parallel ranks of one node that shard together under HSDP."""
    per_node = min(len(group.gpus) for group in case.cluster.groups)
    return np.asarray(np.gcd(np.maximum(per_node // g.tp, 1), g.dp * g.cp), np.int64)


def with_shard_degrees(case: Case, g: PlanGrid) -> PlanGrid:
    """HSDP rows with the degree that a plan without one gets: the ranks of one node."""
    degree = np.where(
        (g.sharding == HSDP) & (g.shard_degree == 0), _node_ranks(case, g), g.shard_degree
    )
    return replace(g, shard_degree=np.where(g.sharding == HSDP, degree, g.shard_degree))
