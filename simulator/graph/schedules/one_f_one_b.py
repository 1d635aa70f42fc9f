"""1F1B: one forward, one backward, so that few micro-batches are in flight.

PipeDream-Flush of arXiv 2006.09503, as arXiv 2104.04473 section 2.2.1 describes it.
"""

from __future__ import annotations

from simulator.graph.action import Action, Kind, Schedule


def one_f_one_b(pp: int, micro_batches: int) -> Schedule:
    """Actions of each of ``pp`` ranks; rank ``i`` keeps at most ``pp - i`` micro-batches."""
    return tuple(_rank_actions(rank, pp, micro_batches) for rank in range(pp))


def _rank_actions(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    warmup = min(pp - 1 - rank, micro_batches)
    actions = [Action(rank, Kind.F, j) for j in range(warmup)]
    for j in range(micro_batches - warmup):
        actions.append(Action(rank, Kind.F, warmup + j))
        actions.append(Action(rank, Kind.B, j))
    actions += [Action(rank, Kind.B, j) for j in range(micro_batches - warmup, micro_batches)]
    return tuple(actions)
