"""ZB-H1: 1F1B with the weight gradients moved into the bubble (arXiv 2401.10241 section 2.1).

Rank ``i`` puts its first ``i`` weight gradients off, so that every rank keeps at most ``pp``
micro-batches (1F1B's first stage) while the drain fills with weight gradients.
"""

from __future__ import annotations

from simulator.graph.action import Action, Kind, Schedule


def zb_h1(pp: int, micro_batches: int) -> Schedule:
    """Actions of each of ``pp`` ranks with input (I) and weight (W) gradients apart."""
    return tuple(_rank_actions(rank, pp, micro_batches) for rank in range(pp))


def _rank_actions(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    warmup = min(pp - 1 - rank, micro_batches)
    actions = [Action(rank, Kind.F, j) for j in range(warmup)]
    for j in range(micro_batches):
        if warmup + j < micro_batches:
            actions.append(Action(rank, Kind.F, warmup + j))
        actions.append(Action(rank, Kind.I, j))
        if j >= rank:
            actions.append(Action(rank, Kind.W, j - rank))
    done = max(0, micro_batches - rank)
    actions += [Action(rank, Kind.W, j) for j in range(done, micro_batches)]
    return tuple(actions)
