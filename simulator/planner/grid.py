"""Step time, memory and OOM risk of whole grids of plans in vectorised passes.

The cost model is called with arrays: once for each distinct combination of the fields that kernels,
collectives or training state depend on (:mod:`simulator.planner.tables`), then its prices are put
together for every plan. For pipelines the step comes from the formulas of
:mod:`simulator.evaluate.uniform`, which follow the closed form of a single plan within 2 %; without
stages it is exact. Memory is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.analysis.risk import memory_risk, prior_spread
from simulator.cost.activations import LayerBytes
from simulator.cost.batch import RankBatch
from simulator.cost.memory import (
    COMMUNICATOR_SCALE,
    MemoryOptions,
    MicroBatchBytes,
    micro_batch_bytes,
    rank_memory,
)
from simulator.cost.operators import LayerContext
from simulator.cost.state import TrainingState, training_state
from simulator.errors import UserError
from simulator.planner.grid_time import StepTimes
from simulator.planner.site import rank_batch, single_gpu
from simulator.planner.space import PlanGrid
from simulator.planner.stages import StageKinds, stage_kinds
from simulator.planner.tables import Table
from simulator.spec.plan import SCHEDULES, Plan
from simulator.spec.resolve_plan import Case

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STATE_FIELDS = tuple(TrainingState.__dataclass_fields__)
_LAYER_FIELDS = tuple(LayerBytes.__dataclass_fields__)


@dataclass(frozen=True)
class GridMemory:
    """Memory of each plan's fullest rank; arrays over plans.

    ``oom_risk`` is the largest over ranks, ``needed_bytes`` what the rank with it needs.
    """

    oom_risk: Floats
    needed_bytes: Floats
    peak_allocated_bytes: Floats


class GridPricer:
    """Prices plans of one case; ``like`` holds what a grid doesn't (precision, optimiser, ...).

    Tables of prices grow with what is asked and are kept between calls.

    Raises:
        UserError: the cluster mixes GPU types or nodes.
    """

    def __init__(self, case: Case, like: Plan) -> None:
        if len(case.cluster.groups) != 1:
            raise UserError("grids of plans need one node group of equal GPUs")
        self.case, self.like = case, like
        self.gpu = single_gpu(case.cluster)
        self.recipe = case.stack.recipe(like.precision)
        self._kinds: dict[tuple[int, int], int] = {}
        self._kind_list: list[StageKinds] = []
        self._state = Table(self._price_state)
        self._bytes = Table(self._price_bytes)
        self._times = StepTimes(case, like, self.gpu, self.recipe)

    def step_time_s(self, grid: PlanGrid) -> Floats:
        """Seconds of a step of each plan."""
        return self._times.step_time_s(grid)

    def memory(self, grid: PlanGrid, *, stop_at_risk: float | None = None) -> GridMemory:
        """Memory of each plan.

        With ``stop_at_risk`` a plan's later stages are not looked at once an earlier one is above
        that risk (its figures are then of that stage).
        """
        n = len(grid)
        risk, needed, allocated = np.zeros(n), np.zeros(n), np.zeros(n)
        kind = self._kind_of(grid)
        depth = np.array([len(k.fullest) for k in self._kind_list] or [0])[kind]
        for slot in range(int(depth.max(initial=0))):
            wanted = depth > slot
            if stop_at_risk is not None:
                wanted &= risk <= stop_at_risk
            rows = np.flatnonzero(wanted)
            if not len(rows):
                continue
            everything = len(rows) == n
            part, kinds = (grid, kind) if everything else (grid.take(rows), kind[rows])
            for name in np.unique(part.schedule):
                mask = part.schedule == name
                whole = bool(mask.all())
                some = part if whole else part.take(mask)
                found = self._slot(some, kinds if whole else kinds[mask], slot, SCHEDULES[name])
                at = rows if whole else rows[mask]
                worse = (found[0] > risk[at]) | ((found[0] == risk[at]) & (found[1] > needed[at]))
                risk[at] = np.where(worse, found[0], risk[at])
                needed[at] = np.where(worse, found[1], needed[at])
                allocated[at] = np.maximum(allocated[at], found[2])
        return GridMemory(risk, needed, allocated)

    def _kind_of(self, grid: PlanGrid) -> Ints:
        """Index into the list of stage kinds of each plan."""
        by_chunk = self.case.model.moe_layers > 0
        vpp = grid.vpp if by_chunk else np.ones_like(grid.vpp)
        code = grid.pp * (int(vpp.max(initial=1)) + 1) + vpp
        values, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        numbers = np.empty(len(values), np.int64)
        for i, row in enumerate(first):
            key = (int(grid.pp[row]), int(vpp[row]))
            if key not in self._kinds:
                self._kinds[key] = len(self._kind_list)
                self._kind_list.append(stage_kinds(self.case.model, *key))
            numbers[i] = self._kinds[key]
        return numbers[inverse]

    def _slot(
        self, grid: PlanGrid, kind: Ints, slot: int, schedule: str
    ) -> tuple[Floats, Floats, Floats]:
        """OOM risk, bytes needed and allocated peak of one stage of each plan."""
        case, like = self.case, self.like
        state_rows = self._state.rows(
            grid.tp, grid.cp, grid.dp, grid.ep, kind, grid.sharding, grid.shard_degree,
            np.full_like(kind, slot),
        )  # fmt: skip
        byte_rows = self._bytes.rows(
            grid.tp, grid.cp, grid.ep, grid.micro_batch, grid.sequence_parallel
        )
        state = TrainingState(*(column[state_rows] for column in self._state.values))
        memory = rank_memory(
            case.model,
            case.stack,
            self.recipe,
            like.optimizer,
            self._batch(grid, kind, slot),
            self._options(schedule),
            state=state,
            one=self._unpacked(self._bytes.values, byte_rows),
        )
        found = memory_risk(
            memory, float(self.gpu.usable_memory_bytes), prior_spread(case.stack.name)
        )
        return found.oom_risk, found.p50_bytes, memory.peak_allocated_bytes

    def _options(self, schedule: str) -> MemoryOptions:
        like, stack = self.like, self.case.stack
        return MemoryOptions(
            schedule=schedule,
            attention=stack.kept.attention if like.attention == "auto" else like.attention,
            compiled=like.compile,
            offload=like.offload,
            communicator_scale=COMMUNICATOR_SCALE.get(self.gpu.architecture, 1.0),
        )

    def _batch(self, grid: PlanGrid, kind: Ints, slot: int) -> RankBatch:
        """The ranks of one stage of each plan."""
        held = [k.fullest[min(slot, len(k.fullest) - 1)] for k in self._kind_list]
        stage = np.array([float(s) for s, _ in held])[kind]
        dense = np.array([float(h.dense) for _, h in held])[kind]
        moe = np.array([float(h.moe) for _, h in held])[kind]
        return rank_batch(self.case, grid, stage, dense, moe)

    def _price_state(self, *key: Ints) -> Floats:
        tp, cp, dp, ep, kind, sharding, shard_degree, slot = key
        one = np.ones_like(tp)
        pp = np.array([k.pp for k in self._kind_list])[kind]
        grid = PlanGrid(tp, pp, cp, dp, one, one, ep, one, 0 * one, 0 * one, sharding, shard_degree)
        case, like = self.case, self.like
        batch = self._batch(grid, kind, int(slot[0]))
        state = training_state(
            case.model, case.stack, self.recipe, like.optimizer, batch, offload=like.offload
        )
        return _stacked([getattr(state, name) for name in _STATE_FIELDS], len(tp))

    def _price_bytes(self, *key: Ints) -> Floats:
        tp, cp, ep, micro_batch, split = key
        one = np.ones_like(tp)
        no = 0 * one
        grid = PlanGrid(tp, one, cp, one, one, one, ep, micro_batch, split, no, no, no)
        layers = float(self.case.model.layers)
        batch = rank_batch(self.case, grid, 0.0 * one, layers * one, layers * one)
        ctx = self._memory_context(batch)
        found = micro_batch_bytes(ctx)
        columns: list[Any] = []
        for layer in (found.dense, found.moe):
            columns += [0.0 if layer is None else getattr(layer, f) for f in _LAYER_FIELDS]
        return _stacked([*columns, found.embedding, found.head, found.logits], len(tp))

    def _memory_context(self, batch: RankBatch) -> LayerContext:
        options = self._options("1f1b")
        case = self.case
        return LayerContext(
            case.model, case.stack.kept, self.recipe, batch, options.attention, options.compiled
        )

    def _unpacked(self, values: Floats, rows: npt.NDArray[np.int32]) -> MicroBatchBytes:
        model, n = self.case.model, len(_LAYER_FIELDS)
        columns = [column[rows] for column in values]
        return MicroBatchBytes(
            dense=LayerBytes(*columns[:n]) if model.moe_layers < model.layers else None,
            moe=LayerBytes(*columns[n : 2 * n]) if model.moe_layers else None,
            embedding=columns[2 * n],
            head=columns[2 * n + 1],
            logits=columns[2 * n + 2],
        )


def _stacked(columns: list[Any], rows: int) -> Floats:
    return np.stack([np.broadcast_to(np.asarray(c, float), (rows,)) for c in columns])
