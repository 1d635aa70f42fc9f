"""Schedules: pure functions from degrees to the actions of each rank."""

from __future__ import annotations

from simulator.errors import UserError
from simulator.graph.action import Schedule
from simulator.graph.schedules.fsdp import fsdp
from simulator.graph.schedules.gpipe import gpipe
from simulator.graph.schedules.interleaved import interleaved
from simulator.graph.schedules.layered import layered
from simulator.graph.schedules.one_f_one_b import one_f_one_b
from simulator.graph.schedules.zero_bubble import zb_h1

__all__ = [
    "fsdp",
    "gpipe",
    "interleaved",
    "layered",
    "one_f_one_b",
    "pipeline_schedule",
    "zb_h1",
]


def pipeline_schedule(name: str, pp: int, chunks: int, micro_batches: int) -> Schedule:
    """The pipeline schedule that a plan names.

    With several chunks ``1f1b`` means ``interleaved``, with one chunk ``interleaved`` means
    ``1f1b``. Raises UserError for an unknown name and for chunks that the schedule can't run.
    """
    if name in ("1f1b", "interleaved"):
        if chunks > 1:
            return interleaved(pp, chunks, micro_batches)
        return one_f_one_b(pp, micro_batches)
    single = {"gpipe": gpipe, "zb-h1": zb_h1}
    if name not in single:
        raise UserError(
            f"plan.schedule {name!r} is no pipeline schedule; "
            f"known: 1f1b, interleaved, {', '.join(single)}"
        )
    if chunks > 1:
        raise UserError(
            f"plan.schedule {name} runs one model chunk per rank, plan.vpp is {chunks}; "
            "use interleaved"
        )
    return single[name](pp, micro_batches)
