from __future__ import annotations

import pytest

from simulator.errors import UserError
from simulator.graph.action import BACKWARD_KINDS, Action, Kind
from simulator.graph.passes import add_reduce_grad, add_send_recv, compute_only
from simulator.graph.schedules import (
    fsdp,
    gpipe,
    interleaved,
    layered,
    one_f_one_b,
    pipeline_schedule,
    zb_h1,
)
from simulator.graph.validate import validate_schedule

CASES = [
    (name, pp, chunks, m)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 3))
    for pp in (1, 2, 5)
    for m in (1, 3, 5, 10)
    if chunks == 1 or m % max(1, m // pp) == 0
]


@pytest.mark.parametrize(("name", "pp", "chunks", "m"), CASES)
def test_every_schedule_is_valid_with_and_without_transfers(
    name: str, pp: int, chunks: int, m: int
) -> None:
    schedule = pipeline_schedule(name, pp, chunks, m)
    validate_schedule(schedule, chunks, m)
    validate_schedule(add_send_recv(schedule), chunks, m)


def peak_in_flight(actions: tuple[Action, ...], freed_by: Kind) -> int:
    level = peak = 0
    for action in actions:
        level += (action.kind is Kind.F) - (action.kind is freed_by)
        peak = max(peak, level)
    return peak


def test_1f1b_keeps_pp_minus_rank_micro_batches() -> None:
    """arXiv 2104.04473 section 2.2.1; GPipe keeps them all."""
    schedule = one_f_one_b(4, 10)
    assert [peak_in_flight(rank, Kind.B) for rank in schedule] == [4, 3, 2, 1]
    assert {peak_in_flight(rank, Kind.B) for rank in gpipe(4, 10)} == {10}


def test_zb_h1_keeps_as_many_as_1f1bs_first_stage() -> None:
    """arXiv 2401.10241 section 2.1: ZB-H1's memory is that of 1F1B's worst stage."""
    assert {peak_in_flight(rank, Kind.W) for rank in zb_h1(4, 10)} == {4}


def test_interleaved_refuses_unequal_rounds() -> None:
    with pytest.raises(UserError, match="a multiple of 4"):
        interleaved(4, 2, 9)


def test_unknown_schedule_and_chunks_that_it_cannot_run() -> None:
    with pytest.raises(UserError, match="known: 1f1b"):
        pipeline_schedule("fifo", 2, 1, 4)
    with pytest.raises(UserError, match=r"plan\.vpp is 2"):
        pipeline_schedule("gpipe", 2, 2, 4)


def test_reductions_follow_each_stages_last_backward_pass() -> None:
    for rank in add_reduce_grad(interleaved(2, 2, 4)):
        for n, action in enumerate(rank):
            if action.kind is Kind.REDUCE_GRAD:
                later = [a for a in rank[n:] if a.stage == action.stage]
                assert not any(a.kind in BACKWARD_KINDS for a in later)
                assert rank[n - 1].stage == action.stage


def test_dropping_the_transfers_gives_the_schedule_back() -> None:
    schedule = zb_h1(4, 6)
    assert compute_only(add_send_recv(schedule)) == schedule


def test_fsdp_gathers_every_unit_for_every_micro_batch_and_direction() -> None:
    actions = fsdp(3, 4, prefetch=1)
    kinds = [a.kind for a in actions]
    assert kinds.count(Kind.UNSHARD) == kinds.count(Kind.RESHARD) == 3 * 4 * 2
    assert kinds.count(Kind.REDUCE_GRAD) == 3 * 4


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_is_the_number_of_units_gathered_ahead(prefetch: int) -> None:
    held = peak = 0
    for action in fsdp(6, 2, prefetch=prefetch):
        held += (action.kind is Kind.UNSHARD) - (action.kind is Kind.RESHARD)
        peak = max(peak, held)
    assert peak == prefetch + 1


def test_a_rank_with_fewer_micro_batches_joins_all_collectives() -> None:
    def collectives(actions: tuple[Action, ...]) -> list[tuple[int, Kind]]:
        moves = (Kind.UNSHARD, Kind.REDUCE_GRAD)
        return [(a.stage, a.kind) for a in actions if a.kind in moves]

    assert collectives(fsdp(3, 2, rounds=4)) == collectives(fsdp(3, 4))


def test_layered_gathers_once_per_direction_and_reverses_the_micro_batches() -> None:
    actions = layered(3, 4)
    kinds = [a.kind for a in actions]
    assert kinds.count(Kind.UNSHARD) == 6
    assert kinds.count(Kind.REDUCE_GRAD) == 3
    backward = [a for a in actions if a.kind is Kind.B]
    assert [a.micro_batch for a in backward[:4]] == [3, 2, 1, 0]
    assert [a.stage for a in backward[::4]] == [2, 1, 0]
