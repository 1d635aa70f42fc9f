"""A pipeline step as a max-plus recurrence over its passes, for one plan or a batch of plans.

Exact for the task graph without contention, up to a limit of micro-batches; beyond it the step
grows by what a further round of micro-batches adds (the recurrence is periodic once the pipeline
is full), and never ends before the paths of :func:`path_bound_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from simulator.cost.times import Seconds
from simulator.graph.action import COMPUTE_KINDS, SEND_KINDS, Action, Kind
from simulator.graph.passes import add_send_recv
from simulator.graph.schedules import pipeline_schedule

#: Rounds of ``pp`` micro-batches that are followed exactly before extrapolating; interleaved
#: pipelines take longer to settle.
EXACT_ROUNDS = 3
EXACT_ROUNDS_INTERLEAVED = 5


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one pipeline: passes by global stage, transfers by rank.

    Entries are floats or arrays over a batch of plans. ``param_gather`` is what hides behind each
    stage's first forward pass (0 where there is none), ``overlap_pp`` the share of a transfer that
    doesn't hold up the computation.
    """

    forward: Sequence[Seconds]
    backward_input: Sequence[Seconds]
    backward_weight: Sequence[Seconds]
    send_forward: Sequence[Seconds]
    send_backward: Sequence[Seconds]
    param_gather: Sequence[Seconds]
    overlap_pp: float = 1.0

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.send_forward)


@dataclass(frozen=True)
class StageEnds:
    """When stages finish, seconds from the start of the step.

    ``finish`` by rank; ``last_start`` and ``last_end`` of the last backward pass by global stage.
    """

    finish: list[Seconds]
    last_start: list[Seconds]
    last_end: list[Seconds]

    def shifted(self, by: Sequence[Seconds]) -> StageEnds:
        """All times of rank ``r`` later by ``by[r]``."""
        pp = len(by)
        return StageEnds(
            [t + by[r] for r, t in enumerate(self.finish)],
            [t + by[s % pp] for s, t in enumerate(self.last_start)],
            [t + by[s % pp] for s, t in enumerate(self.last_end)],
        )


class _Op(NamedTuple):
    """One pass in an order that can run; keys are (stage, kind of output, micro-batch)."""

    rank: int
    stage: int
    kind: Kind
    made: tuple[int, bool, int | None]
    needs: tuple[int, bool, int | None] | None
    out: tuple[int, int]
    into: tuple[int, int]
    last: bool


@lru_cache(maxsize=256)
def _program(
    schedule: str, pp: int, chunks: int, micro_batches: int
) -> tuple[tuple[_Op, ...], tuple[tuple[int, int], ...]]:
    """The passes of all ranks with the transfers just before each, in an order that can run.

    Also the sends (forward, backward) after each rank's last pass.
    """
    lists = add_send_recv(pipeline_schedule(schedule, pp, chunks, micro_batches))
    ranks = [_rank_ops(rank, actions) for rank, actions in enumerate(lists)]
    trailing = tuple(
        (int(rank[-1].kind is Kind.SEND_F), int(rank[-1].kind is Kind.SEND_B)) for rank in lists
    )
    program: list[_Op] = []
    made: set[tuple[int, bool, int | None]] = set()
    cursor = [0] * pp
    while len(program) < sum(map(len, ranks)):
        for rank, ops in enumerate(ranks):
            while cursor[rank] < len(ops):
                op = ops[cursor[rank]]
                if op.needs is not None and op.needs not in made:
                    break
                made.add(op.made)
                program.append(op)
                cursor[rank] += 1
    return tuple(program), trailing


def _rank_ops(rank: int, actions: Sequence[Action]) -> list[_Op]:
    last = {a.stage: a for a in actions if a.kind in (Kind.B, Kind.W)}
    ops: list[_Op] = []
    pending: list[Action] = []
    for action in actions:
        if action.kind not in COMPUTE_KINDS:
            pending.append(action)
            continue
        stage, kind, number = action
        receives = [a for a in pending if a.kind not in SEND_KINDS]
        needs = None
        if receives:
            needs = (stage - 1, True, number) if kind is Kind.F else (stage + 1, False, number)
        counts = [sum(a.kind is k for a in pending) for k in _TRANSFERS]
        made = (stage, kind is Kind.F, number) if kind is not Kind.W else (-1, True, number)
        out, into = (counts[0], counts[1]), (counts[2], counts[3])
        ops.append(_Op(rank, stage, kind, made, needs, out, into, last[stage] == action))
        pending = []
    return ops


_TRANSFERS = (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)


def _larger(times: StageTimes) -> Callable[[Any, Any], Any]:
    """``max`` for scalars (much faster), ``numpy.maximum`` where anything is an array."""
    fields = (times.forward, times.backward_input, times.backward_weight, times.param_gather)
    sends = (times.send_forward, times.send_backward)
    arrays = any(np.ndim(x) for field in (*fields, *sends) for x in field)
    return np.maximum if arrays else max


def exact_ends(times: StageTimes, schedule: str, chunks: int, micro_batches: int) -> StageEnds:
    """Follow every pass. Cost grows with stages x micro-batches, not with the batch of plans."""
    larger, pp, overlap = _larger(times), times.pp, times.overlap_pp
    cost = {
        Kind.F: times.forward,
        Kind.I: times.backward_input,
        Kind.W: times.backward_weight,
        Kind.B: [i + w for i, w in zip(times.backward_input, times.backward_weight, strict=True)],
    }
    free: list[Any] = [0.0] * pp
    network: list[Any] = [0.0] * pp
    done: dict[tuple[int, bool, int | None], Any] = {}
    sent: dict[tuple[int, bool, int | None], Any] = {}
    starts: list[Any] = [0.0] * (pp * chunks)
    ends: list[Any] = [0.0] * (pp * chunks)
    opened: set[int] = set()
    program, trailing = _program(schedule, pp, chunks, micro_batches)
    for rank, stage, kind, made, needs, out, into, last in program:
        begin = free[rank]
        send_f, send_b = times.send_forward[rank], times.send_backward[rank]
        if overlap < 1.0 and (any(out) or any(into)):
            if needs is not None:
                begin = larger(begin, done[needs])
            leaving = out[0] * send_f + out[1] * send_b
            begin = begin + (1.0 - overlap) * larger(leaving, into[0] * send_f + into[1] * send_b)
        if needs is not None and overlap > 0.0:
            begin = larger(begin, sent[needs])
        end = begin + cost[kind][stage]
        if kind is Kind.F and stage not in opened:
            opened.add(stage)
            end = larger(end, times.param_gather[stage])
        free[rank] = end
        if last:
            starts[stage], ends[stage] = begin, end
        done[made] = end
        goes = stage < pp * chunks - 1 if kind is Kind.F else kind is not Kind.W and stage > 0
        if goes and overlap > 0.0:
            network[rank] = larger(network[rank], end) + (send_f if kind is Kind.F else send_b)
            sent[made] = network[rank]
    for rank, (out_f, out_b) in enumerate(trailing):
        held = out_f * times.send_forward[rank] + out_b * times.send_backward[rank]
        free[rank] = free[rank] + (1.0 - overlap) * held
    return StageEnds(free, starts, ends)


def pipeline_ends(times: StageTimes, schedule: str, chunks: int, micro_batches: int) -> StageEnds:
    """Finish of every stage of one pipeline (or of a batch that shares degrees and schedule).

    Raises UserError where the schedule can't run the micro-batches.
    """
    pp = times.pp
    width = pp
    if chunks > 1:
        width = micro_batches // max(1, micro_batches // pp)
    limit = width * (EXACT_ROUNDS if chunks == 1 else EXACT_ROUNDS_INTERLEAVED)
    if micro_batches <= limit + width:
        return exact_ends(times, schedule, chunks, micro_batches)
    base = limit - width + micro_batches % width
    rounds = (micro_batches - base) // width
    near = exact_ends(times, schedule, chunks, base)
    far = exact_ends(times, schedule, chunks, base + width)
    growth = [(b - a) * (rounds - 1) for a, b in zip(near.finish, far.finish, strict=True)]
    ends = far.shifted(growth)
    larger = _larger(times)
    total = ends.finish[0]
    for finish in ends.finish[1:]:
        total = larger(total, finish)
    late = larger(path_bound_s(times, schedule, chunks, micro_batches) - total, 0.0)
    return ends.shifted([late] * pp)


def path_bound_s(times: StageTimes, schedule: str, chunks: int, micro_batches: int) -> Seconds:
    """A lower bound on the end of the pipeline: the longest path that turns at a single rank.

    It fills the pipeline up to the rank, follows all of the rank's work (where the first and the
    last micro-batch's round trip downstream takes longer than the rank's own passes, that) and
    drains. Takes over from the recurrence's growth where a rank that is only slightly slower than
    the pipeline's first rounds suggest needs many micro-batches to show.
    """
    larger, pp = _larger(times), times.pp
    f, i, w = times.forward, times.backward_input, times.backward_weight
    hops = [times.send_forward[r] + times.send_backward[r + 1] for r in range(pp - 1)]
    # Without overlap a transfer costs both ends a slot; the sum of both can't be a lower bound.
    hops = [larger(times.overlap_pp, 0.5) * hop for hop in hops]
    w_early = [0.0] * len(w) if schedule == "zb-h1" else w
    trip = [f[r] + i[r] + w_early[r] for r in range(pp)]
    down: list[Any] = [0.0] * pp
    for r in reversed(range(pp - 1)):
        down[r] = down[r + 1] + trip[r + 1] + hops[r]
    fill: Seconds = 0.0
    best: Seconds = 0.0
    for r in range(pp):
        if chunks > 1 or schedule == "gpipe":
            work = sum(f[s] + i[s] + w[s] for s in range(r, pp * chunks, pp)) * micro_batches
        else:
            deferred = r if schedule == "zb-h1" else 0
            warmup = min(pp - 1 - r, micro_batches - 1)
            steady = micro_batches - 1 - warmup
            back = i[r] + w[r] if steady > deferred else i[r]
            work = (
                trip[r]
                + larger(warmup * f[r], down[r] if steady else 0.0)
                + steady * (f[r] + i[r])
                + max(0, steady - deferred) * w[r]
                + larger(warmup * back, down[r])
            )
        best = larger(best, fill + work)
        if r + 1 < pp:
            fill = fill + trip[r] + hops[r]
    return best
