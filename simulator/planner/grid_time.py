"""Step time of grids of plans: prices of pieces put together into stages, stages into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hardware_db.schema import GpuSpec
from simulator.cost.batch import RankBatch
from simulator.cost.communication import send_s
from simulator.cost.pricing import PieceTimes, RankTimes, price_ranks
from simulator.evaluate.sharded_form import ShardedUnit, sharded_pass_s, sharded_waits_s
from simulator.evaluate.uniform import Kinds, UniformPipeline, UniformSync, uniform_step_s
from simulator.graph.pipelined import exposed_reduction_s
from simulator.planner.plan_grid import LAYERED, SHARDINGS, Group, PlanGrid, groups
from simulator.planner.site import group_batch, joined_batches, make_context, make_site
from simulator.planner.space import Axes, with_shard_degrees
from simulator.planner.stages import Held, StageKinds, stage_kinds
from simulator.planner.tables import Tables, stacked
from simulator.spec.plan import SCHEDULES, Plan, Sharding
from simulator.spec.resolve_plan import Case
from simulator.spec.stack import PrecisionRecipe

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PIECES = ("dense", "moe", "embedding", "head")
#: A rank's first chunk with the embedding, an inner chunk, the last chunk with the head.
_CHUNKS = ("first", "middle", "last")
#: Combinations beyond which kernels are priced only as plans ask for them.
MAX_PRIMED = 20_000
_PASSES = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Piece:
    """One micro-batch through a piece (layer, embedding, head) of each plan, seconds."""

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    reduce: Floats
    gather: Floats


@dataclass(frozen=True)
class Weights:
    """How much of each piece a model chunk holds."""

    dense: float
    moe: float
    embedding: float
    head: float

    def total(self, pieces: dict[str, Piece], name: str) -> Floats:
        """Sum of one time over what the chunk holds."""
        held = [(getattr(self, key), getattr(piece, name)) for key, piece in pieces.items()]
        parts = [count * seconds for count, seconds in held if count]
        return np.asarray(sum(parts[1:], parts[0]) if parts else np.zeros_like(held[0][1]))


class StepTimes:
    """Prices kernels, collectives and steps of one case; keeps its tables between calls."""

    def __init__(
        self, case: Case, like: Plan, gpu: GpuSpec, recipe: PrecisionRecipe, tables: Tables
    ) -> None:
        self.case, self.like, self.gpu, self.recipe = case, like, gpu, recipe
        self.site = make_site(case, gpu)
        framework, tuned = case.stack.framework, self.site.tuning
        per_batch, per_step = tuned.micro_batch_overhead_s, tuned.step_overhead_s
        self.overhead_s = framework.micro_batch_overhead_s if per_batch is None else per_batch
        self.step_overhead_s = framework.step_overhead_s if per_step is None else per_step
        kernels = (like.precision, like.attention, like.compile, like.offload == "activations")
        update = (like.precision, like.optimizer, like.offload in ("optimizer", "state"))
        self._tables, self._waits_key = tables, ("waits", *kernels)
        self._kernels = tables.get(("kernels", *kernels), self._price_kernels)
        self._sync = tables.get(("sync", like.precision), self._price_sync)
        self._update = tables.get(("update", *update), self._price_update)
        self._send = tables.get(("send", like.precision), self._price_send)
        self.pieces = [p for p in _PIECES if self._has(p)]

    def _has(self, piece: str) -> bool:
        model = self.case.model
        held = {"dense": model.moe_layers < model.layers, "moe": model.moe_layers > 0}
        return held.get(piece, True)

    def step_time_s(self, grid: PlanGrid) -> Floats:
        """Seconds of a step of each plan."""
        result = np.empty(len(grid))
        for group in groups(grid):
            at: Any = slice(None) if group.rows is None else group.rows
            result[at] = self._group_s(group.of(grid), group)
        return result

    def prime(self, axes: Axes) -> None:
        """Price kernels and collectives of all combinations of some axes at once.

        Faster than pricing them as they come, chunk by chunk.
        """
        tp = [d for d in axes.tp if self.case.model.heads % d == 0]
        values = (tp, axes.cp, axes.ep, axes.micro_batch, axes.sequence_parallel, axes.recompute)
        columns = _combinations(*values, (0, 1))
        if columns is not None:
            self._kernels.rows(*columns)
        gpus = self.case.cluster.n_gpus
        kinds = [SHARDINGS.index(name) for name in axes.sharding]
        columns = _combinations(axes.pp, tp, axes.cp, axes.ep, kinds)
        if columns is None:
            return
        pp, tps, cp, ep, sharding = (c[gpus % (columns[0] * columns[1] * columns[2]) == 0]
                                     for c in columns)  # fmt: skip
        one, no = np.ones_like(pp), np.zeros_like(pp)
        dp = gpus // np.maximum(pp * tps * cp, 1)
        grid = PlanGrid(tps, pp, cp, dp, one, one, ep, one, no, no, sharding, no)
        key = _sync_key(with_shard_degrees(self.case, grid))
        self._sync.rows(*key)
        self._update.rows(*key)

    def _group_s(self, grid: PlanGrid, group: Group) -> Floats:
        """Plans of one pipeline shape; without stages fully sharded ones go unit by unit."""
        sharded = grid.sharding >= Sharding.ZERO3
        if group.pp > 1 or not sharded.any():
            return self._pipelined_s(grid, group)
        if sharded.all():
            return self._sharded_s(grid, is_layered=group.schedule == LAYERED)
        result = np.empty(len(grid))
        rows, rest = np.flatnonzero(sharded), np.flatnonzero(~sharded)
        result[rows] = self._sharded_s(grid.take(rows), is_layered=group.schedule == LAYERED)
        result[rest] = self._pipelined_s(grid.take(rest), group)
        return result

    def _sharded_s(self, grid: PlanGrid, *, is_layered: bool) -> Floats:
        """Fully sharded plans without stages: units in forward order, as for a single plan."""
        pieces = self._pieces_at(self._kernel_rows(grid), self._sync_rows(grid))
        optimizer = self._update_s(grid)
        model = self.case.model
        counts = {"embedding": 1, "dense": model.layers - model.moe_layers,
                  "moe": model.moe_layers, "head": 1}  # fmt: skip
        step = sharded_pass_s(
            _units(pieces, counts, self.overhead_s),
            _micro_batches(self.case, grid),
            self.case.stack.overlap.fsdp_prefetch,
            layered=is_layered,
        )
        return np.asarray(step + optimizer + self.step_overhead_s)

    def _pipelined_s(self, grid: PlanGrid, group: Group) -> Floats:
        priced = (self._kernel_rows(grid), self._sync_rows(grid))
        pieces, optimizer = self._pieces_at(*priced), self._update_s(grid)
        kinds = stage_kinds(self.case.model, group.pp, group.vpp)
        alone = float(group.pp == 1)
        weights = {
            "first": Weights(kinds.first.dense, kinds.first.moe, 1.0, alone),
            "middle": Weights(kinds.middle.dense, kinds.middle.moe, 0.0, 0.0),
            "last": Weights(kinds.last.dense, kinds.last.moe, 0.0, 1.0),
        }
        passes = {p: {k: w.total(pieces, p) for k, w in weights.items()} for p in _PASSES}
        for kind in weights:
            passes["forward"][kind] = passes["forward"][kind] + self.overhead_s
        count = _micro_batches(self.case, grid)
        reduce, gather = self._synchronised(grid, group, pieces, weights, passes, count)
        self._wait_for_units(grid, priced, kinds, passes, reduce)
        at_send = self._send.rows(
            grid.tp, grid.cp, grid.dp, grid.pp, np.minimum(grid.vpp, 2), grid.micro_batch,
            grid.sequence_parallel,
        )  # fmt: skip
        send = self._send.values[0][at_send]
        overlap = self.case.stack.overlap
        forward, backward_input, backward_weight = (Kinds(*passes[p].values()) for p in _PASSES)
        stage = UniformPipeline(
            forward,
            backward_input,
            backward_weight,
            send_forward=send,
            send_backward=send,
            overlap_pp=overlap.pp,
        )
        sync = UniformSync(
            Kinds(*reduce.values()),
            Kinds(*gather.values()),
            overlap.dp,
            overlap.param_gather,
            optimizer,
            self.step_overhead_s,
        )
        # Without stages all orders are the same.
        schedule = "1f1b" if group.schedule == LAYERED else SCHEDULES[group.schedule]
        step = uniform_step_s(schedule, stage, sync, group.pp, group.vpp, count)
        return step - _uneven_s(pieces, kinds)

    def _synchronised(
        self,
        grid: PlanGrid,
        group: Group,
        pieces: dict[str, Piece],
        weights: dict[str, Weights],
        passes: dict[str, dict[str, Floats]],
        count: Ints,
    ) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Reductions and gathers by kind of chunk; ZeRO-2's reductions go into the passes."""
        zero2 = np.flatnonzero(grid.sharding == Sharding.ZERO2)
        replicated = (grid.sharding < Sharding.ZERO2).astype(float)
        gathers = ((grid.sharding == Sharding.ZERO1) | (grid.sharding == Sharding.ZERO2)) * 1.0
        reduce, gather = {}, {}
        for kind, weight in weights.items():
            whole = weight.total(pieces, "reduce")
            reduce[kind] = replicated * whole
            gather[kind] = gathers * weight.total(pieces, "gather")
            if len(zero2):
                # Interleaved chunks reduce after the pp micro-batches that they run in a row.
                some = count[zero2].astype(np.float64)
                rounds = np.ceil(some / group.pp) if group.vpp > 1 else some
                inputs = passes["backward_input"][kind]
                inputs[zero2] += exposed_reduction_s(
                    whole[zero2] * rounds,
                    some,
                    inputs[zero2] + passes["backward_weight"][kind][zero2],
                    self.case.stack.overlap.dp,
                )
        return reduce, gather

    def _wait_for_units(
        self,
        grid: PlanGrid,
        priced: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
        kinds: StageKinds,
        passes: dict[str, dict[str, Floats]],
        reduce: dict[str, Floats],
    ) -> None:
        """Pipelines of fully sharded chunks: what their passes wait for gathers and reductions."""
        rows = np.flatnonzero(grid.sharding >= Sharding.ZERO3)
        if not len(rows):
            return
        table = self._tables.get(
            (*self._waits_key, kinds.pp, kinds.vpp), partial(self._price_waits, kinds)
        )
        at = table.rows(*(found[rows].astype(np.int64) for found in priced))
        for n, kind in enumerate(_CHUNKS):
            passes["forward"][kind][rows] += table.values[3 * n][at]
            passes["backward_input"][kind][rows] += table.values[3 * n + 1][at]
            reduce[kind][rows] = table.values[3 * n + 2][at]

    def _price_waits(self, kinds: StageKinds, kernel: Ints, sync: Ints) -> Floats:
        """Waiting of forward and backward passes and the tail, for each kind of chunk."""
        pieces = self._pieces_at(kernel, sync)
        columns: list[Any] = []
        for n, kind in enumerate(_CHUNKS):
            layer = "moe" if "moe" in pieces and getattr(kinds, kind).moe > 0 else "dense"
            counts = {
                "embedding": int(kind == "first"),
                layer: kinds.chunk_sizes[n],
                "head": int(kind == "last"),
            }
            units = _units(pieces, counts, self.overhead_s)
            columns += sharded_waits_s(units, self.case.stack.overlap.fsdp_prefetch)
        return stacked(columns, len(kernel))

    def _kernel_rows(self, grid: PlanGrid) -> npt.NDArray[np.int32]:
        sharded = (grid.sharding >= Sharding.ZERO3).astype(np.int64)
        return self._kernels.rows(
            grid.tp, grid.cp, grid.ep, grid.micro_batch, grid.sequence_parallel, grid.recompute,
            sharded,
        )  # fmt: skip

    def _sync_rows(self, grid: PlanGrid) -> npt.NDArray[np.int32]:
        return self._sync.rows(*_sync_key(grid))

    def _update_s(self, grid: PlanGrid) -> Floats:
        rows = self._update.rows(*_sync_key(grid))
        return np.asarray(self._update.values[0][rows])

    def _pieces_at(self, kernel: npt.NDArray[Any], sync: npt.NDArray[Any]) -> dict[str, Piece]:
        """Prices of pieces by row of the tables of kernels and of collectives."""
        found = {}
        for n, name in enumerate(self.pieces):
            times = [self._kernels.values[3 * n + i][kernel] for i in range(3)]
            found[name] = Piece(*times, *(self._sync.values[2 * n + i][sync] for i in range(2)))
        return found

    def _rank_times(self, batch: RankBatch) -> RankTimes:
        ctx = make_context(self.case, self.like, self.gpu, self.recipe, batch)
        return price_ranks(self.case.stack, ctx, self.site, self.like.optimizer)

    def _price_kernels(self, *key: Ints) -> Floats:
        tp, cp, ep, micro_batch, split, recompute, sharded = key
        one = np.ones_like(tp)
        grid = PlanGrid(
            tp, one, cp, one, one, one, ep, micro_batch, split, recompute, 3 * sharded, 0 * one
        )
        priced = self._rank_times(self._whole(grid))
        columns: list[Any] = []
        for name in self.pieces:
            piece: PieceTimes = getattr(priced, name)
            columns += [getattr(piece, p).total for p in _PASSES]
        return stacked(columns, len(tp))

    def _price_sync(self, *key: Ints) -> Floats:
        """Reductions and gathers of each piece."""
        tp, cp, dp, ep, pp, sharding, shard_degree = key
        one, no = np.ones_like(tp), np.zeros_like(tp)
        grid = PlanGrid(tp, pp, cp, dp, one, one, ep, one, no, no, sharding, shard_degree)
        batch = replace(self._whole(grid), pp=pp.astype(float))
        priced = self._rank_times(batch)
        columns = [
            getattr(priced, f"{what}_{name}")
            for name in self.pieces
            for what in ("reduce", "gather")
        ]
        return stacked(columns, len(tp))

    def _price_update(self, *key: Ints) -> Floats:
        """Optimiser step of the rank that holds the most."""
        tp, cp, dp, ep, pp, sharding, shard_degree = key
        one, no = np.ones_like(tp), np.zeros_like(tp)
        grid = PlanGrid(tp, pp, cp, dp, one, one, ep, one, no, no, sharding, shard_degree)
        held = [(g.of(grid), g, stage_kinds(self.case.model, g.pp, 1)) for g in groups(grid)]
        pairs = [(part, stage) for part, _, kinds in held for stage in kinds.fullest]
        sizes = [len(part) for part, _ in pairs]
        batch = joined_batches([group_batch(self.case, p, *stage) for p, stage in pairs], sizes)
        update = np.broadcast_to(self._rank_times(batch).optimizer, (sum(sizes),))
        result = np.zeros((1, len(tp)))
        start = 0
        for part, group, kinds in held:
            at: Any = slice(None) if group.rows is None else group.rows
            for _ in kinds.fullest:
                result[0, at] = np.maximum(result[0, at], update[start : start + len(part)])
                start += len(part)
        return result

    def _price_send(self, *key: Ints) -> Floats:
        """Sends of the pipeline's slowest link: between nodes as soon as one pair of stages is."""
        tp, cp, dp, pp, vpp, micro_batch, split = key
        one, no = np.ones_like(tp), np.zeros_like(tp)
        grid = PlanGrid(tp, pp, cp, dp, vpp, one, one, micro_batch, split, no, no, no)
        crossing = np.maximum(-(-self.site.network.gpus_per_node // (tp * cp * dp)) - 1, 0)
        batch = replace(
            group_batch(self.case, grid, 0, Held(1.0, 0.0)),
            stage=np.minimum(crossing, np.maximum(pp - 2, 0)).astype(float),
            pp=pp.astype(float),
            vpp=vpp.astype(float),
        )
        ctx = make_context(self.case, self.like, self.gpu, self.recipe, batch)
        return stacked([send_s(ctx, self.site.network)], len(tp))

    def _whole(self, grid: PlanGrid) -> RankBatch:
        """Ranks that hold the whole model, so that FULL recompute covers all layers."""
        model = self.case.model
        held = Held(float(model.layers - model.moe_layers), float(model.moe_layers))
        return group_batch(self.case, grid, 0, held)


def _uneven_s(pieces: dict[str, Piece], kinds: StageKinds) -> Floats | float:
    """Less time in filling and draining where only some inner stages are the longest."""
    inner = kinds.pp - 2
    dense = inner * (kinds.middle.dense - kinds.inner_mean.dense)
    moe = inner * (kinds.middle.moe - kinds.inner_mean.moe)
    if inner < 1 or (dense == 0 and moe == 0):
        return 0.0
    less = Weights(dense, moe, 0.0, 0.0)
    return np.asarray(sum(less.total(pieces, p) for p in _PASSES))


def _combinations(*values: Sequence[int]) -> list[Ints] | None:
    """All combinations as columns; None where there are none or too many to price beforehand."""
    if not 0 < int(np.prod([len(v) for v in values])) <= MAX_PRIMED:
        return None
    return [c.reshape(-1).astype(np.int64) for c in np.meshgrid(*values, indexing="ij")]


def _sync_key(grid: PlanGrid) -> tuple[Ints, ...]:
    """What collectives and the optimiser's step depend on."""
    return grid.tp, grid.cp, grid.dp, grid.ep, grid.pp, grid.sharding, grid.shard_degree


def _micro_batches(case: Case, grid: PlanGrid) -> Ints:
    return np.asarray(case.workload.global_batch // (grid.dp * grid.micro_batch))


def _units(
    pieces: dict[str, Piece], counts: dict[str, int], overhead_s: float
) -> list[ShardedUnit]:
    """Sharded units in forward order; the first carries the micro-batch's overhead.

    The head is gathered last in forward and first in backward: it stays.
    """
    units: list[ShardedUnit] = []
    for name in ("embedding", "dense", "moe", "head"):
        repeat = counts.get(name, 0)
        if not repeat or name not in pieces:
            continue
        piece = pieces[name]
        forward = piece.forward if units else piece.forward + overhead_s / repeat
        again = 0.0 * piece.gather if name == "head" else piece.gather
        back = piece.backward_input + piece.backward_weight
        units.append(ShardedUnit(repeat, [forward], [back], piece.gather, again, piece.reduce))
    return units
