from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.graph.action import Action, Kind, Schedule
from simulator.graph.build import build_step
from simulator.graph.passes import add_send_recv
from simulator.graph.schedules import one_f_one_b, zb_h1
from simulator.graph.validate import ScheduleError, validate_graph, validate_schedule
from tests.synthetic import chunk, class_times, layout


def changed(schedule: Schedule, rank: int, step: int, *new: Action) -> Schedule:
    """The schedule with one cell replaced by any number of cells."""
    rows = list(schedule)
    rows[rank] = (*rows[rank][:step], *new, *rows[rank][step + 1 :])
    return tuple(rows)


def test_a_micro_batch_twice() -> None:
    bad = changed(one_f_one_b(2, 4), 0, 1, Action(0, Kind.F, 0))
    with pytest.raises(ScheduleError, match=r"rank 0, step 1: 0F0 a second time: stage 0") as e:
        validate_schedule(bad, 1, 4)
    assert "[0F0]" in str(e.value) and "rank 1" in str(e.value)
    assert (e.value.rank, e.value.step) == (0, 1)


def test_backward_before_forward() -> None:
    bad = changed(one_f_one_b(2, 4), 1, 0, Action(1, Kind.B, 0), Action(1, Kind.F, 0))
    with pytest.raises(ScheduleError, match="1B0 before the forward pass of micro-batch 0"):
        validate_schedule(bad, 1, 4)


def test_weight_gradient_before_input_gradient() -> None:
    good = zb_h1(1, 2)
    bad = (tuple(reversed(good[0][1:3])),)
    with pytest.raises(ScheduleError, match="0W0 before the input gradient"):
        validate_schedule((good[0][:1] + bad[0] + good[0][3:],), 1, 2)


def test_a_split_and_a_full_backward_pass() -> None:
    bad = changed(one_f_one_b(1, 1), 0, 1, Action(0, Kind.B, 0), Action(0, Kind.I, 0))
    with pytest.raises(ScheduleError, match="0I0 beside a full backward pass"):
        validate_schedule(bad, 1, 1)


def test_a_missing_micro_batch() -> None:
    bad = changed(one_f_one_b(2, 3), 1, 5)
    with pytest.raises(ScheduleError, match=r"stage 1, micro-batch 2 needs F and B .* has F"):
        validate_schedule(bad, 1, 3)


def test_a_stage_on_the_wrong_rank_and_an_unknown_micro_batch() -> None:
    with pytest.raises(ScheduleError, match="runs stage 1, which rank 1 holds"):
        validate_schedule(changed(one_f_one_b(2, 3), 0, 0, Action(1, Kind.F, 0)), 1, 3)
    with pytest.raises(ScheduleError, match="micro-batch 7 of 3"):
        validate_schedule(changed(one_f_one_b(2, 3), 0, 0, Action(0, Kind.F, 7)), 1, 3)


def test_a_send_without_receive_and_the_reverse() -> None:
    good = add_send_recv(one_f_one_b(2, 2))
    send = good[0].index(Action(0, Kind.SEND_F, 0))
    with pytest.raises(ScheduleError, match="1RECV_F0 has no 0SEND_F0 on rank 0"):
        validate_schedule(changed(good, 0, send), 1, 2)
    receive = good[1].index(Action(1, Kind.RECV_F, 0))
    with pytest.raises(ScheduleError, match="0SEND_F0 is never received"):
        validate_schedule(changed(good, 1, receive), 1, 2)


def test_a_deadlock_names_what_it_waits_for() -> None:
    rank0 = tuple(Action(0, k, j) for j in (0, 1) for k in (Kind.F, Kind.B))
    rank1 = (*(Action(1, Kind.F, j) for j in (0, 1)), *(Action(1, Kind.B, j) for j in (0, 1)))
    with pytest.raises(ScheduleError, match=r"deadlock: 0B0 .* waits for 1B0"):
        validate_schedule((rank0, rank1), 1, 2)


def test_a_cycle_in_a_graph() -> None:
    graph = build_step(layout(2, pp=2), [class_times([chunk(1, 1)])] * 2)
    validate_graph(graph)
    first, second = graph.streams[0].tasks[:2]
    deps = [*graph.deps]
    deps[first] = (*deps[first], second)
    with pytest.raises(ScheduleError, match="0F0 on pipeline 0 stage 0 compute can never start"):
        validate_graph(replace(graph, deps=tuple(deps)))
