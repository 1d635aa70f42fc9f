"""Plans as a structure of arrays, and their pipelines' shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.spec.plan import SCHEDULES, Plan, Recompute, Sharding

Ints = npt.NDArray[np.int64]

#: Kinds of sharding by code; HSDP is ZeRO-3 inside groups of ``shard_degree`` ranks.
SHARDINGS = ("none", "zero1", "zero2", "zero3", "hsdp")
HSDP = SHARDINGS.index("hsdp")
INTERLEAVED = SCHEDULES.index("interleaved")
LAYERED = SCHEDULES.index("layered")


@dataclass(frozen=True)
class PlanGrid:
    """Plans as rows of equal length. ``sharding`` indexes SHARDINGS, ``schedule`` SCHEDULES.

    ``shard_degree`` is 0 where state is sharded over all data-parallel ranks.
    """

    tp: Ints
    pp: Ints
    cp: Ints
    dp: Ints
    vpp: Ints
    schedule: Ints
    ep: Ints
    micro_batch: Ints
    sequence_parallel: Ints
    recompute: Ints
    sharding: Ints
    shard_degree: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: npt.NDArray[Any]) -> PlanGrid:
        """The rows of an index or mask."""
        return PlanGrid(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def plan(self, row: int, like: Plan) -> Plan:
        """One row as a plan; what a grid does not hold is taken from ``like``."""
        kind = int(self.sharding[row])
        return replace(
            like,
            tp=int(self.tp[row]),
            pp=int(self.pp[row]),
            cp=int(self.cp[row]),
            dp=int(self.dp[row]),
            vpp=int(self.vpp[row]),
            ep=int(self.ep[row]),
            schedule=SCHEDULES[int(self.schedule[row])],
            micro_batch=int(self.micro_batch[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            recompute=Recompute(int(self.recompute[row])),
            recompute_layers=None,
            sharding=Sharding(min(kind, 3)),
            shard_degree=int(self.shard_degree[row]) or None,
            stage_layers=None,
            assignment=(),
        )


@dataclass(frozen=True)
class Group:
    """Rows that share the shape of their pipeline; ``rows`` None: all of them."""

    rows: npt.NDArray[np.intp] | None
    pp: int
    vpp: int
    schedule: int

    def of(self, grid: PlanGrid) -> PlanGrid:
        """The group's rows of a grid."""
        return grid if self.rows is None else grid.take(self.rows)


def groups(grid: PlanGrid) -> Iterator[Group]:
    """Rows by number of stages, chunks and schedule."""
    if not len(grid):
        return
    columns = (grid.pp, grid.vpp, grid.schedule)
    if all((column == column[0]).all() for column in columns):
        yield Group(None, *(int(column[0]) for column in columns))
        return
    code = (grid.pp * (int(grid.vpp.max()) + 1) + grid.vpp) * len(SCHEDULES) + grid.schedule
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        yield Group(rows, *(int(column[rows[0]]) for column in columns))


def joined(parts: Sequence[PlanGrid]) -> PlanGrid:
    """Rows of several grids after each other."""
    names = [f.name for f in fields(PlanGrid)]
    return PlanGrid(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def grid_of(plans: Sequence[Plan]) -> PlanGrid:
    """Uniform plans as a grid (``recompute_layers`` and assignments are not held)."""

    def column(codes: Iterator[int]) -> Ints:
        return np.fromiter(codes, np.int64, len(plans))

    return PlanGrid(
        tp=column(p.tp for p in plans),
        pp=column(p.pp for p in plans),
        cp=column(p.cp for p in plans),
        dp=column(p.dp for p in plans),
        vpp=column(p.vpp for p in plans),
        schedule=column(SCHEDULES.index(p.schedule) for p in plans),
        ep=column(p.ep for p in plans),
        micro_batch=column(p.micro_batch for p in plans),
        sequence_parallel=column(int(p.sequence_parallel) for p in plans),
        recompute=column(int(p.recompute) for p in plans),
        sharding=column(_sharding_code(p) for p in plans),
        shard_degree=column(p.shard_degree or 0 for p in plans),
    )


def _sharding_code(plan: Plan) -> int:
    is_hsdp = plan.sharding == Sharding.ZERO3 and plan.shard_degree is not None
    return HSDP if is_hsdp else int(plan.sharding)
