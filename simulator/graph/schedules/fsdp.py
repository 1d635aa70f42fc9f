"""Fully sharded data parallelism, micro-batch by micro-batch (arXiv 2304.11277 section 3).

A rank's list is in issue order. Communication runs in that order beside the computation:
``UNSHARD`` may start when the computation before it in the list is finished, ``REDUCE_GRAD``
likewise, and the passes of a unit's n-th visit need its n-th ``UNSHARD``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simulator.graph.action import Action, Kind


class Visit(NamedTuple):
    """One stay of a gathered unit: passes of ``kind`` for ``micro_batches`` on unit ``unit``."""

    unit: int
    kind: Kind
    micro_batches: tuple[int, ...]


def fsdp(
    units: int, micro_batches: int, *, rounds: int | None = None, prefetch: int = 1
) -> tuple[Action, ...]:
    """Actions of one rank: every micro-batch gathers, reduces and releases each unit anew.

    ``rounds`` (at least ``micro_batches``) is how many micro-batches the busiest rank of the group
    runs: this rank joins the collectives of the rest without computing. ``prefetch`` units are
    gathered ahead.
    """
    visits: list[Visit] = []
    for j in range(micro_batches if rounds is None else rounds):
        passes = (j,) if j < micro_batches else ()
        visits += [Visit(u, Kind.F, passes) for u in range(units)]
        visits += [Visit(u, Kind.B, passes) for u in reversed(range(units))]
    return issue(visits, prefetch)


def issue(visits: Sequence[Visit], prefetch: int) -> tuple[Action, ...]:
    """Actions of a sequence of visits: gathers ``prefetch`` visits ahead, then the passes."""
    actions: list[Action] = []
    gathered = 0
    for index, visit in enumerate(visits):
        ahead = min(index + prefetch + 1, len(visits))
        actions += (_unshard(v) for v in visits[gathered:ahead])
        gathered = max(gathered, ahead)
        actions += _passes(visit)
    return tuple(actions)


def _unshard(visit: Visit) -> Action:
    number = visit.micro_batches[0] if len(visit.micro_batches) == 1 else None
    return Action(visit.unit, Kind.UNSHARD, number)


def _passes(visit: Visit) -> Iterable[Action]:
    number = visit.micro_batches[0] if len(visit.micro_batches) == 1 else None
    for j in visit.micro_batches:
        yield Action(visit.unit, visit.kind, j)
    yield Action(visit.unit, Kind.RESHARD, number)
    if visit.kind is Kind.B:
        yield Action(visit.unit, Kind.REDUCE_GRAD, number)
