"""Checks of schedules and step graphs: they name the bad cell and print the table around it."""

from __future__ import annotations

from collections import deque

from simulator.graph.action import RECV_KINDS, SEND_KINDS, Action, Kind, Schedule
from simulator.graph.step import StepGraph

_SEND_OF = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


class ScheduleError(ValueError):
    """A schedule or graph that can't run; ``rank`` and ``step`` name the bad cell."""

    def __init__(self, message: str, schedule: Schedule, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step
        super().__init__(
            f"rank {rank}, step {step}: {message}\n{format_table(schedule, rank, step)}"
        )


def format_table(schedule: Schedule, bad_rank: int, bad_step: int, around: int = 4) -> str:
    """The columns around one cell, one line per rank; the cell stands in brackets."""
    first = max(0, bad_step - around)
    steps = range(first, bad_step + around + 1)
    rows = [["step", *map(str, steps)]]
    for rank, actions in enumerate(schedule):
        cells = [str(actions[s]) if s < len(actions) else "" for s in steps]
        if rank == bad_rank:
            cells[bad_step - first] = f"[{cells[bad_step - first]}]"
        rows.append([f"rank {rank}", *cells])
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def validate_schedule(schedule: Schedule, chunks: int, micro_batches: int) -> None:
    """Check that every micro-batch goes once through every stage, in an order that can run.

    Takes schedules with and without sends and receives. Raises ScheduleError at the first fault.
    """
    pp = len(schedule)
    for rank, actions in enumerate(schedule):
        seen: dict[tuple[int, int | None], set[Kind]] = {}
        for step, action in enumerate(actions):
            _check_cell(schedule, rank, step, action, seen, micro_batches)
        for stage in range(rank, pp * chunks, pp):
            _check_complete(schedule, rank, stage, seen, micro_batches)
    _check_transfers(schedule)
    _check_order(schedule, chunks)


def _check_cell(
    schedule: Schedule,
    rank: int,
    step: int,
    action: Action,
    seen: dict[tuple[int, int | None], set[Kind]],
    micro_batches: int,
) -> None:
    stage, kind, number = action
    pp = len(schedule)

    def fail(message: str) -> ScheduleError:
        return ScheduleError(message, schedule, rank, step)

    if stage % pp != rank:
        raise fail(f"{action} runs stage {stage}, which rank {stage % pp} holds")
    if number is not None and not 0 <= number < micro_batches:
        raise fail(f"{action} names micro-batch {number} of {micro_batches}")
    done = seen.setdefault((stage, number), set())
    if kind in done:
        raise fail(f"{action} a second time: stage {stage}, micro-batch {number}")
    if kind in (Kind.B, Kind.I) and Kind.F not in done:
        raise fail(f"{action} before the forward pass of micro-batch {number} on stage {stage}")
    if kind is Kind.W and Kind.I not in done:
        raise fail(f"{action} before the input gradient of micro-batch {number} on stage {stage}")
    if (kind is Kind.B and done & {Kind.I, Kind.W}) or (
        kind in (Kind.I, Kind.W) and Kind.B in done
    ):
        raise fail(f"{action} beside a full backward pass of micro-batch {number}")
    done.add(kind)


def _check_complete(
    schedule: Schedule,
    rank: int,
    stage: int,
    seen: dict[tuple[int, int | None], set[Kind]],
    micro_batches: int,
) -> None:
    for number in range(micro_batches):
        done = seen.get((stage, number), set())
        missing = Kind.F not in done or not (Kind.B in done or {Kind.I, Kind.W} <= done)
        if missing:
            names = ", ".join(sorted(done)) or "none"
            raise ScheduleError(
                f"stage {stage}, micro-batch {number} needs F and B (or I and W), has {names}",
                schedule,
                rank,
                len(schedule[rank]),
            )


def _check_transfers(schedule: Schedule) -> None:
    """Every receive has its send, where the schedule has transfers at all."""
    pp = len(schedule)
    sends = {a for rank in schedule for a in rank if a.kind in SEND_KINDS}
    wanted: set[Action] = set()
    for rank, actions in enumerate(schedule):
        for step, action in enumerate(actions):
            if action.kind not in RECV_KINDS:
                continue
            kind, hop = _SEND_OF[action.kind]
            send = Action(action.stage + hop, kind, action.micro_batch)
            wanted.add(send)
            if send not in sends:
                raise ScheduleError(
                    f"{action} has no {send} on rank {send.stage % pp}", schedule, rank, step
                )
    for rank, actions in enumerate(schedule):
        for step, action in enumerate(actions):
            if action.kind in SEND_KINDS and action not in wanted:
                raise ScheduleError(f"{action} is never received", schedule, rank, step)


def _needs(action: Action, end: int) -> Action | None:
    """The pass on a neighbouring stage that must come before this one."""
    stage, kind, number = action
    if kind is Kind.F and stage > 0:
        return Action(stage - 1, Kind.F, number)
    if kind in (Kind.B, Kind.I) and stage < end:
        return Action(stage + 1, Kind.B, number)
    return None


def _check_order(schedule: Schedule, chunks: int) -> None:
    """Run the ranks in lock step; what no rank can start is a deadlock."""
    pp = len(schedule)
    end = pp * chunks - 1
    done: set[Action] = set()
    cursor = [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while cursor[rank] < len(actions):
                action = actions[cursor[rank]]
                need = _needs(action, end)
                if need is not None and need not in done:
                    break
                done.add(action._replace(kind=Kind.B) if action.kind is Kind.I else action)
                cursor[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule):
        if cursor[rank] < len(actions):
            action = actions[cursor[rank]]
            raise ScheduleError(
                f"deadlock: {action} (stage {action.stage}, micro-batch {action.micro_batch}) "
                f"waits for {_needs(action, end)}, which never runs",
                schedule,
                rank,
                cursor[rank],
            )


def validate_graph(graph: StepGraph) -> None:
    """Check that every task of a step graph can run.

    Raises ScheduleError naming the first task of the lowest stream that waits for ever.
    """
    waiting = [len(deps) + len(on) for deps, on in zip(graph.deps, graph.task_streams, strict=True)]
    users: list[list[int]] = [[] for _ in waiting]
    for task, deps in enumerate(graph.deps):
        for dep in deps:
            users[dep].append(task)
    for stream in graph.streams:
        for before, after in zip(stream.tasks, stream.tasks[1:], strict=False):
            users[before].append(after)
        if stream.tasks:
            waiting[stream.tasks[0]] -= 1
    ready = deque(task for task, n in enumerate(waiting) if n == 0)
    done = [False] * len(waiting)
    while ready:
        task = ready.popleft()
        done[task] = True
        for user in users[task]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    table: Schedule = tuple(
        tuple(graph.action(task) for task in stream.tasks) for stream in graph.streams
    )
    for rank, stream in enumerate(graph.streams):
        for step, task in enumerate(stream.tasks):
            if not done[task]:
                blocked = [str(graph.action(d)) for d in graph.deps[task] if not done[d]]
                raise ScheduleError(
                    f"{graph.action(task)} on {stream.name} can never start; it waits for "
                    f"{', '.join(blocked) or 'the other streams of its collective'}",
                    table,
                    rank,
                    step,
                )
