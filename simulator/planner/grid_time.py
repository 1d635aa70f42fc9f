"""Step time of grids of plans: prices of pieces put together into stages, stages into steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hardware_db.schema import GpuSpec
from simulator.cost.batch import RankBatch
from simulator.cost.pricing import PieceTimes, RankTimes, price_ranks
from simulator.evaluate.sharded_form import ShardedUnit, sharded_pass_s, sharded_waits_s
from simulator.evaluate.uniform import Kinds, UniformPipeline, UniformSync, uniform_step_s
from simulator.graph.pipelined import exposed_reduction_s
from simulator.planner.site import make_context, make_site, rank_batch
from simulator.planner.space import LAYERED, PlanGrid
from simulator.planner.stages import Held, StageKinds, stage_kinds
from simulator.planner.tables import Table
from simulator.spec.plan import SCHEDULES, Plan, Sharding
from simulator.spec.resolve_plan import Case
from simulator.spec.stack import PrecisionRecipe

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PIECES = ("dense", "moe", "embedding", "head")
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
    """How much of each piece a model chunk holds: arrays over plans."""

    dense: Floats
    moe: Floats
    embedding: Floats | float
    head: Floats | float

    def total(self, pieces: dict[str, Piece], name: str) -> Floats:
        """Sum of one time over what the chunk holds."""
        result: Any = 0.0
        for key, piece in pieces.items():
            result = result + getattr(self, key) * getattr(piece, name)
        return np.asarray(result)


class StepTimes:
    """Prices kernels, collectives and steps of one case; keeps its tables between calls."""

    def __init__(self, case: Case, like: Plan, gpu: GpuSpec, recipe: PrecisionRecipe) -> None:
        self.case, self.like, self.gpu, self.recipe = case, like, gpu, recipe
        self.site = make_site(case, gpu)
        framework, tuned = case.stack.framework, self.site.tuning
        per_batch, per_step = tuned.micro_batch_overhead_s, tuned.step_overhead_s
        self.overhead_s = framework.micro_batch_overhead_s if per_batch is None else per_batch
        self.step_overhead_s = framework.step_overhead_s if per_step is None else per_step
        self._kernels = Table(self._price_kernels)
        self._sync = Table(self._price_sync)
        self._send = Table(self._price_send)
        self._kind_list: list[StageKinds] = []
        self._kind_of: dict[tuple[int, int], int] = {}
        self.pieces = [p for p in _PIECES if self._has(p)]

    def _has(self, piece: str) -> bool:
        model = self.case.model
        held = {"dense": model.moe_layers < model.layers, "moe": model.moe_layers > 0}
        return held.get(piece, True)

    def step_time_s(self, grid: PlanGrid) -> Floats:
        """Seconds of a step of each plan."""
        sharded = (grid.sharding >= Sharding.ZERO3) & (grid.pp == 1)
        result = np.empty(len(grid))
        for layered in (False, True):
            rows = np.flatnonzero(sharded & ((grid.schedule == LAYERED) == layered))
            if len(rows):
                part = grid if len(rows) == len(grid) else grid.take(rows)
                result[rows] = self._sharded_s(part, layered=layered)
        piped = np.flatnonzero(~sharded)
        if len(piped):
            part = grid if len(piped) == len(grid) else grid.take(piped)
            result[piped] = self._pipelined_s(part)
        return result

    def _sharded_s(self, grid: PlanGrid, *, layered: bool) -> Floats:
        """Fully sharded plans without stages: units in forward order, as for a single plan."""
        pieces, rest = self._priced(grid)
        model = self.case.model
        counts = {"embedding": 1, "dense": model.layers - model.moe_layers,
                  "moe": model.moe_layers, "head": 1}  # fmt: skip
        units = _units(pieces, counts, self.overhead_s)
        step = sharded_pass_s(
            units,
            _micro_batches(self.case, grid),
            self.case.stack.overlap.fsdp_prefetch,
            layered=layered,
        )
        return np.asarray(step + rest["optimizer"] + self.step_overhead_s)

    def _pipelined_s(self, grid: PlanGrid) -> Floats:
        pieces, rest = self._priced(grid)
        kinds, number = self._stage_kinds(grid)
        count = _micro_batches(self.case, grid)
        alone = (grid.pp == 1).astype(float)
        weights = {
            "first": _weights([k.first for k in kinds], number, 1.0, alone),
            "middle": _weights([k.middle for k in kinds], number, 0.0, 0.0),
            "last": _weights([k.last for k in kinds], number, 0.0, 1.0),
        }
        passes = {p: {k: w.total(pieces, p) for k, w in weights.items()} for p in _PASSES}
        for kind in weights:
            passes["forward"][kind] = passes["forward"][kind] + self.overhead_s
        reduce, gather = self._synchronised(grid, pieces, weights, passes, count)
        self._wait_for_units(grid, pieces, kinds, number, passes, reduce)
        at_send = self._send.rows(
            grid.tp, grid.cp, grid.dp, grid.pp, np.minimum(grid.vpp, 2), grid.micro_batch,
            grid.sequence_parallel,
        )  # fmt: skip
        send = self._send.values[0][at_send]
        step = np.empty(len(grid))
        for code in np.unique(grid.schedule):
            rows = grid.schedule == code
            at: Any = slice(None) if rows.all() else rows
            stage = UniformPipeline(
                *(Kinds(*(passes[p][k][at] for k in weights)) for p in _PASSES),
                send_forward=send[at],
                send_backward=send[at],
                overlap_pp=self.case.stack.overlap.pp,
            )
            sync = UniformSync(
                Kinds(*(reduce[k][at] for k in weights)),
                Kinds(*(gather[k][at] for k in weights)),
                self.case.stack.overlap.dp,
                self.case.stack.overlap.param_gather,
                rest["optimizer"][at],
                self.step_overhead_s,
            )
            # Without stages, and so without overlap between them, all orders are the same.
            name = "1f1b" if SCHEDULES[code] == "layered" else SCHEDULES[code]
            step[at] = uniform_step_s(name, stage, sync, grid.pp[at], grid.vpp[at], count[at])
        return step - self._uneven_s(pieces, kinds, number, grid)

    def _uneven_s(
        self, pieces: dict[str, Piece], kinds: list[StageKinds], number: Ints, grid: PlanGrid
    ) -> Floats:
        """Less time in filling and draining where only some inner stages are the longest."""
        gap = [
            (k.pp - 2) * (k.middle.dense - k.inner_mean.dense) if k.pp > 2 else 0.0 for k in kinds
        ]
        gap_moe = [
            (k.pp - 2) * (k.middle.moe - k.inner_mean.moe) if k.pp > 2 else 0.0 for k in kinds
        ]
        if not any(gap) and not any(gap_moe):
            return np.zeros(())
        zero = np.zeros(len(grid))
        less = Weights(np.array(gap)[number], np.array(gap_moe)[number], zero, zero)
        return sum((less.total(pieces, p) for p in _PASSES), zero)

    def _synchronised(
        self,
        grid: PlanGrid,
        pieces: dict[str, Piece],
        weights: dict[str, Weights],
        passes: dict[str, dict[str, Floats]],
        count: Ints,
    ) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Reductions and gathers by kind of chunk; ZeRO-2's reductions go into the passes."""
        zero2 = grid.sharding == Sharding.ZERO2
        replicated = grid.sharding < Sharding.ZERO2
        gathers = (grid.sharding == Sharding.ZERO1) | zero2
        # Interleaved chunks reduce after the pp micro-batches that they run in a row.
        rounds = -(-count // np.where(grid.vpp > 1, grid.pp, 1))
        reduce, gather = {}, {}
        for kind, weight in weights.items():
            whole = weight.total(pieces, "reduce")
            reduce[kind] = np.where(replicated, whole, 0.0)
            gather[kind] = np.where(gathers, weight.total(pieces, "gather"), 0.0)
            if zero2.any():
                backward = passes["backward_input"][kind] + passes["backward_weight"][kind]
                overlap = self.case.stack.overlap.dp
                wait = exposed_reduction_s(whole * rounds, count, backward, overlap)
                passes["backward_input"][kind] = passes["backward_input"][kind] + np.where(
                    zero2, wait, 0.0
                )
        return reduce, gather

    def _wait_for_units(
        self,
        grid: PlanGrid,
        pieces: dict[str, Piece],
        kinds: list[StageKinds],
        number: Ints,
        passes: dict[str, dict[str, Floats]],
        reduce: dict[str, Floats],
    ) -> None:
        """Pipelines of fully sharded chunks: what their passes wait for gathers and reductions."""
        zero3 = grid.sharding >= Sharding.ZERO3
        for index in np.unique(number[zero3]):
            rows = np.flatnonzero(zero3 & (number == index))
            some = {key: _rows(piece, rows) for key, piece in pieces.items()}
            for n, kind in enumerate(("first", "middle", "last")):
                layers = kinds[index].chunk_sizes[n]
                key = "moe" if "moe" in pieces and getattr(kinds[index], kind).moe > 0 else "dense"
                counts = {
                    "embedding": int(kind == "first"),
                    key: layers,
                    "head": int(kind == "last"),
                }
                units = _units(some, counts, self.overhead_s)
                forward, backward, tail = sharded_waits_s(
                    units, self.case.stack.overlap.fsdp_prefetch
                )
                passes["forward"][kind][rows] += forward
                passes["backward_input"][kind][rows] += backward
                reduce[kind][rows] = tail

    def _stage_kinds(self, grid: PlanGrid) -> tuple[list[StageKinds], Ints]:
        """Kinds of stages seen so far, and each plan's index among them."""
        code = grid.pp * (int(grid.vpp.max(initial=1)) + 1) + grid.vpp
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        numbers = np.empty(len(first), np.int64)
        for i, row in enumerate(first):
            key = (int(grid.pp[row]), int(grid.vpp[row]))
            if key not in self._kind_of:
                self._kind_of[key] = len(self._kind_list)
                self._kind_list.append(stage_kinds(self.case.model, *key))
            numbers[i] = self._kind_of[key]
        return self._kind_list, numbers[inverse]

    def _priced(self, grid: PlanGrid) -> tuple[dict[str, Piece], dict[str, Floats]]:
        """Prices of every plan's pieces, and what a step takes once."""
        sharded = (grid.sharding >= Sharding.ZERO3).astype(np.int64)
        kernel = self._kernels.rows(
            grid.tp, grid.cp, grid.ep, grid.micro_batch, grid.sequence_parallel, grid.recompute,
            sharded,
        )  # fmt: skip
        sync = self._sync.rows(
            grid.tp, grid.cp, grid.dp, grid.ep, grid.pp, grid.sharding, grid.shard_degree
        )
        found = {}
        for n, name in enumerate(self.pieces):
            times = [self._kernels.values[3 * n + i][kernel] for i in range(3)]
            found[name] = Piece(*times, *(self._sync.values[2 * n + i][sync] for i in range(2)))
        return found, {"optimizer": self._sync.values[-1][sync]}

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
        return _stacked(columns, len(tp))

    def _price_sync(self, *key: Ints) -> Floats:
        tp, cp, dp, ep, pp, sharding, shard_degree = key
        one = np.ones_like(tp)
        grid = PlanGrid(tp, pp, cp, dp, one, one, ep, one, 0 * one, 0 * one, sharding, shard_degree)
        priced = self._rank_times(self._whole(grid))
        columns = []
        for name in self.pieces:
            columns += [getattr(priced, f"reduce_{name}"), getattr(priced, f"gather_{name}")]
        return _stacked([*columns, self._slowest_update(grid)], len(tp))

    def _slowest_update(self, grid: PlanGrid) -> Floats:
        """Optimiser step of the rank that holds the most."""
        slowest = np.zeros(len(grid))
        for pp in np.unique(grid.pp):
            rows = np.flatnonzero(grid.pp == pp)
            for stage, held in stage_kinds(self.case.model, int(pp), 1).fullest:
                some = grid.take(rows)
                one = np.ones(len(rows))
                batch = _batch(self.case, some, stage * one, held)
                slowest[rows] = np.maximum(slowest[rows], self._rank_times(batch).optimizer)
        return slowest

    def _price_send(self, *key: Ints) -> Floats:
        """Sends of the pipeline's slowest link: between nodes as soon as one pair of stages is."""
        tp, cp, dp, pp, vpp, micro_batch, split = key
        one = np.ones_like(tp)
        no = 0 * one
        grid = PlanGrid(tp, pp, cp, dp, vpp, one, one, micro_batch, split, no, no, no)
        width = tp * cp * dp
        crossing = np.maximum(-(-self.site.network.gpus_per_node // width) - 1, 0)
        stage = np.minimum(crossing, np.maximum(pp - 2, 0)).astype(float)
        batch = _batch(self.case, grid, stage, Held(1.0, 0.0))
        return _stacked([self._rank_times(batch).send], len(tp))

    def _whole(self, grid: PlanGrid) -> RankBatch:
        """Ranks that hold the whole model, so that FULL recompute covers all layers."""
        model = self.case.model
        held = Held(model.layers - model.moe_layers, model.moe_layers)
        return _batch(self.case, grid, np.zeros(len(grid)), held)


def _batch(case: Case, grid: PlanGrid, stage: Floats, held: Held) -> RankBatch:
    one = np.ones(len(grid))
    return rank_batch(case, grid, stage, held.dense * one, held.moe * one)


def _micro_batches(case: Case, grid: PlanGrid) -> Ints:
    return np.asarray(case.workload.global_batch // (grid.dp * grid.micro_batch))


def _weights(
    held: list[Held], number: Ints, embedding: Floats | float, head: Floats | float
) -> Weights:
    return Weights(
        np.array([h.dense for h in held])[number],
        np.array([h.moe for h in held])[number],
        embedding,
        head,
    )


def _rows(piece: Piece, rows: npt.NDArray[np.intp]) -> Piece:
    return Piece(*(getattr(piece, name)[rows] for name in Piece.__dataclass_fields__))


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


def _stacked(columns: list[Any], rows: int) -> Floats:
    return np.stack([np.broadcast_to(np.asarray(c, float), (rows,)) for c in columns])
