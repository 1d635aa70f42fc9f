"""GPipe: all forward passes, then all backward passes (arXiv 1811.06965 section 2.3)."""

from __future__ import annotations

from simulator.graph.action import Action, Kind, Schedule


def gpipe(pp: int, micro_batches: int) -> Schedule:
    """Actions of each of ``pp`` ranks; backward runs in the order of the forward passes."""
    return tuple(
        tuple(Action(rank, kind, j) for kind in (Kind.F, Kind.B) for j in range(micro_batches))
        for rank in range(pp)
    )
