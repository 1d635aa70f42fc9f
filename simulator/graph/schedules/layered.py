"""GPUMix layered gradient accumulation (Cephalo, arXiv 2411.01075).

Each unit is gathered once per direction and step, however many micro-batches a rank runs: all
micro-batches go through a unit before the next one; the backward pass takes units and micro-batches
in reverse.
"""

from __future__ import annotations

from simulator.graph.action import Action, Kind
from simulator.graph.schedules.fsdp import Visit, issue


def layered(units: int, micro_batches: int, *, prefetch: int = 1) -> tuple[Action, ...]:
    """Actions of one rank in issue order; see :mod:`simulator.graph.schedules.fsdp`."""
    order = tuple(range(micro_batches))
    visits = [Visit(u, Kind.F, order) for u in range(units)]
    visits += [Visit(u, Kind.B, order[::-1]) for u in reversed(range(units))]
    return issue(visits, prefetch)
