"""Step time, memory and OOM risk of whole grids of plans in vectorised passes.

The cost model is called with arrays: once for each distinct combination of the fields that kernels,
collectives or training state depend on (:mod:`simulator.planner.tables`), then its prices are put
together for every plan. For pipelines the step comes from the formulas of
:mod:`simulator.evaluate.uniform`, which follow the closed form of a single plan within 2 %; without
stages it is exact. Memory is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
from simulator.planner.plan_grid import PlanGrid, groups
from simulator.planner.site import group_batch, single_gpu
from simulator.planner.space import Axes
from simulator.planner.stages import Held, StageKinds, stage_kinds
from simulator.planner.tables import Tables, stacked
from simulator.spec.plan import SCHEDULES, Plan
from simulator.spec.resolve_plan import Case

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STATE_FIELDS = tuple(TrainingState.__dataclass_fields__)
_LAYER_FIELDS = tuple(LayerBytes.__dataclass_fields__)


@dataclass(frozen=True)
class GridMemory:
    """Memory of each plan's fullest rank; arrays over plans.

    ``oom_risk`` is the largest over ranks; ``needed_bytes`` and ``device_bytes`` (with what torch
    could return) are of the rank with it, ``peak_allocated_bytes`` the largest over ranks.
    """

    oom_risk: Floats
    needed_bytes: Floats
    device_bytes: Floats
    peak_allocated_bytes: Floats


class GridPricer:
    """Prices plans of one case; ``like`` holds what a grid doesn't (precision, optimiser, ...).

    Tables of prices grow with what is asked and are kept between calls; pricers of one case that
    differ in ``like`` may share ``tables``.

    Raises:
        UserError: the cluster mixes GPU types or nodes.
    """

    def __init__(self, case: Case, like: Plan, tables: Tables | None = None) -> None:
        if len(case.cluster.groups) != 1:
            raise UserError("grids of plans need one node group of equal GPUs")
        self.case, self.like = case, like
        self.gpu = single_gpu(case.cluster)
        self.recipe = case.stack.recipe(like.precision)
        self._tables = Tables() if tables is None else tables
        one = ("bytes", like.precision, like.attention, like.compile)
        self._bytes = self._tables.get(one, self._price_bytes)
        self._times = StepTimes(case, like, self.gpu, self.recipe, self._tables)

    def step_time_s(self, grid: PlanGrid) -> Floats:
        """Seconds of a step of each plan."""
        return self._times.step_time_s(grid)

    def prime(self, axes: Axes) -> None:
        """Prepare for plans along some axes, which saves time where there are many."""
        self._times.prime(axes)

    def memory(self, grid: PlanGrid, *, stop_at_risk: float | None = None) -> GridMemory:
        """Memory of each plan.

        With ``stop_at_risk`` a plan's later stages are not looked at once an earlier one is above
        that risk (its figures are then of that stage).
        """
        n = len(grid)
        found = GridMemory(*(np.zeros(n) for _ in range(4)))
        for group in groups(grid):
            rows = np.arange(n) if group.rows is None else group.rows
            part = group.of(grid)
            kinds = self._kinds(group.pp, group.vpp)
            for slot in range(len(kinds.fullest)):
                if slot and stop_at_risk is not None:
                    going = np.flatnonzero(found.oom_risk[rows] <= stop_at_risk)
                    if len(going) < len(rows):
                        rows, part = rows[going], part.take(going)
                if not len(rows):
                    break
                self._raise(found, rows, self._slot(part, kinds, slot, group.schedule))
        return found

    def _kinds(self, pp: int, vpp: int) -> StageKinds:
        return stage_kinds(self.case.model, pp, vpp if self.case.model.moe_layers else 1)

    @staticmethod
    def _raise(found: GridMemory, rows: npt.NDArray[np.intp], stage: GridMemory) -> None:
        """Take over a stage's figures where it is at more risk than those before it."""
        risk, needed = found.oom_risk[rows], found.needed_bytes[rows]
        worse = (stage.oom_risk > risk) | ((stage.oom_risk == risk) & (stage.needed_bytes > needed))
        found.oom_risk[rows] = np.where(worse, stage.oom_risk, risk)
        found.needed_bytes[rows] = np.where(worse, stage.needed_bytes, needed)
        found.device_bytes[rows] = np.where(worse, stage.device_bytes, found.device_bytes[rows])
        found.peak_allocated_bytes[rows] = np.maximum(
            found.peak_allocated_bytes[rows], stage.peak_allocated_bytes
        )

    def _slot(self, grid: PlanGrid, kinds: StageKinds, slot: int, schedule: int) -> GridMemory:
        """One stage of each plan of a group."""
        case, like = self.case, self.like
        asked = (like.precision, like.optimizer, like.offload)
        table = self._tables.get(
            ("state", *asked, kinds.pp, kinds.vpp, slot), partial(self._price_state, kinds, slot)
        )
        state_rows = table.rows(
            grid.tp, grid.cp, grid.dp, grid.ep, grid.sharding, grid.shard_degree
        )
        byte_rows = self._bytes.rows(
            grid.tp, grid.cp, grid.ep, grid.micro_batch, grid.sequence_parallel
        )
        stage, held = kinds.fullest[slot]
        memory = rank_memory(
            case.model,
            case.stack,
            self.recipe,
            like.optimizer,
            group_batch(case, grid, stage, held),
            self._options(SCHEDULES[schedule]),
            state=TrainingState(*(column[state_rows] for column in table.values)),
            one=self._unpacked(self._bytes.values, byte_rows),
            with_components=False,
        )
        found = memory_risk(
            memory, float(self.gpu.usable_memory_bytes), prior_spread(case.stack.name)
        )
        return GridMemory(
            found.oom_risk, found.p50_bytes, memory.device_bytes, memory.peak_allocated_bytes
        )

    def _options(self, schedule: str) -> MemoryOptions:
        like, stack = self.like, self.case.stack
        return MemoryOptions(
            schedule=schedule,
            attention=stack.kept.attention if like.attention == "auto" else like.attention,
            compiled=like.compile,
            offload=like.offload,
            communicator_scale=COMMUNICATOR_SCALE.get(self.gpu.architecture, 1.0),
        )

    def _price_state(self, kinds: StageKinds, slot: int, *key: Ints) -> Floats:
        tp, cp, dp, ep, sharding, shard_degree = key
        one = np.ones_like(tp)
        pp, no = kinds.pp * one, 0 * one
        grid = PlanGrid(tp, pp, cp, dp, one, one, ep, one, no, no, sharding, shard_degree)
        case, like = self.case, self.like
        batch = group_batch(case, grid, *kinds.fullest[slot])
        state = training_state(
            case.model, case.stack, self.recipe, like.optimizer, batch, offload=like.offload
        )
        return stacked([getattr(state, name) for name in _STATE_FIELDS], len(tp))

    def _price_bytes(self, *key: Ints) -> Floats:
        tp, cp, ep, micro_batch, split = key
        one, no = np.ones_like(tp), np.zeros_like(tp)
        grid = PlanGrid(tp, one, cp, one, one, one, ep, micro_batch, split, no, no, no)
        layers = float(self.case.model.layers)
        ctx = self._memory_context(group_batch(self.case, grid, 0, Held(layers, layers)))
        found = micro_batch_bytes(ctx)
        columns: list[Any] = []
        for layer in (found.dense, found.moe):
            if layer is not None:
                columns += [getattr(layer, name) for name in _LAYER_FIELDS]
        return stacked([*columns, found.embedding, found.head, found.logits], len(tp))

    def _memory_context(self, batch: RankBatch) -> LayerContext:
        options = self._options("1f1b")
        case = self.case
        return LayerContext(
            case.model, case.stack.kept, self.recipe, batch, options.attention, options.compiled
        )

    def _unpacked(self, values: Floats, rows: npt.NDArray[np.int32]) -> MicroBatchBytes:
        model, n = self.case.model, len(_LAYER_FIELDS)
        columns = [column[rows] for column in values]
        dense, moe = None, None
        if model.moe_layers < model.layers:
            dense, columns = LayerBytes(*columns[:n]), columns[n:]
        if model.moe_layers:
            moe, columns = LayerBytes(*columns[:n]), columns[n:]
        embedding, head, logits = columns
        return MicroBatchBytes(dense, moe, embedding, head, logits)
