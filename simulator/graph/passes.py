"""Rewrites of schedules: schedule in, schedule out."""

from __future__ import annotations

from simulator.graph.action import BACKWARD_KINDS, Action, Kind, Schedule


def last_stage(schedule: Schedule) -> int:
    """Highest global stage that the schedule names."""
    return max(action.stage for rank in schedule for action in rank)


def add_send_recv(schedule: Schedule) -> Schedule:
    """Insert sends right after and receives right before the passes that need them.

    Stages on the same rank hand over without communication.
    """
    pp = len(schedule)
    end = last_stage(schedule)
    return tuple(
        tuple(step for action in rank for step in _with_transfers(action, pp, end))
        for rank in schedule
    )


def _with_transfers(action: Action, pp: int, end: int) -> list[Action]:
    stage, kind, number = action
    apart = pp > 1
    if kind is Kind.F:
        before = [Action(stage, Kind.RECV_F, number)] if apart and stage > 0 else []
        after = [Action(stage, Kind.SEND_F, number)] if apart and stage < end else []
        return [*before, action, *after]
    if kind in (Kind.B, Kind.I):
        before = [Action(stage, Kind.RECV_B, number)] if apart and stage < end else []
        after = [Action(stage, Kind.SEND_B, number)] if apart and stage > 0 else []
        return [*before, action, *after]
    return [action]


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Insert each stage's gradient reduction right after its last backward pass."""
    result = []
    for rank in schedule:
        last = {a.stage: n for n, a in enumerate(rank) if a.kind in BACKWARD_KINDS}
        actions: list[Action] = []
        for n, action in enumerate(rank):
            actions.append(action)
            if last.get(action.stage) == n:
                actions.append(Action(action.stage, Kind.REDUCE_GRAD))
        result.append(tuple(actions))
    return tuple(result)


def compute_only(schedule: Schedule) -> Schedule:
    """The passes alone, without communication."""
    keep = (Kind.F, *BACKWARD_KINDS)
    return tuple(tuple(a for a in rank if a.kind in keep) for rank in schedule)
