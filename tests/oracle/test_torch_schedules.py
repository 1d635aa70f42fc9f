"""Our schedules against PyTorch's own (torch.distributed.pipelining), without any process group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from simulator.graph.action import Schedule, dump_schedule, load_schedule
from simulator.graph.passes import add_reduce_grad, add_send_recv
from simulator.graph.schedules import gpipe, interleaved, one_f_one_b, zb_h1

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

SINGLE = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 8, 16) if m >= pp - 1]
CHUNKED = [
    (pp, chunks, m)
    for pp in (2, 3, 4, 8)
    for chunks in (2, 3, 4)
    for m in (1, 2, 4, 6, 8, 10, 16, 24)
    if m % max(1, m // pp) == 0
]


def texts(ranks: object) -> list[list[str]]:
    """Actions as text, torch's idle slots left out."""
    return [[str(a) for a in rank if a is not None] for rank in ranks]  # type: ignore[attr-defined]


def shift_last_rank(schedule: Schedule) -> list[list[str]]:
    """Our 1F1B with the last rank's forward passes numbered from 1, as torch's table has them.

    torch starts that rank's counter at the warm-up's last micro-batch, of which it has none. Only
    its table is affected: its execution does not read it.
    """
    *rest, last = schedule
    shifted = [
        a._replace(micro_batch=a.micro_batch + 1)
        if a.kind == "F" and a.micro_batch is not None
        else a
        for a in last
    ]
    return texts([*rest, shifted])


@pytest.mark.parametrize(("pp", "micro_batches"), SINGLE)
def test_gpipe_is_torchs(pp: int, micro_batches: int) -> None:
    theirs = visualizer.get_schedule_ops("GPipe", pp, micro_batches)
    assert texts(add_reduce_grad(gpipe(pp, micro_batches))) == texts(theirs)


@pytest.mark.parametrize(("pp", "micro_batches"), [(p, m) for p, m in SINGLE if m >= p])
def test_1f1b_is_torchs(pp: int, micro_batches: int) -> None:
    theirs = visualizer.get_schedule_ops("1F1B", pp, micro_batches)
    assert shift_last_rank(add_reduce_grad(one_f_one_b(pp, micro_batches))) == texts(theirs)


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), CHUNKED)
def test_interleaved_is_torchs(pp: int, chunks: int, micro_batches: int) -> None:
    theirs = visualizer.get_schedule_ops("Interleaved1F1B", pp, micro_batches, chunks)
    assert texts(interleaved(pp, chunks, micro_batches)) == texts(theirs)


@pytest.mark.parametrize(("pp", "micro_batches"), SINGLE)
def test_zb_h1_is_torchs_zero_bubble_order_with_one_chunk(pp: int, micro_batches: int) -> None:
    """torch's InterleavedZeroBubble asks for two chunks or more; its order with one is ZB-H1."""
    rounds = max(1, micro_batches // pp)
    shape = SimpleNamespace(
        n_local_stages=1,
        pp_group_size=pp,
        microbatches_per_round=micro_batches // rounds,
        _n_microbatches=micro_batches,
    )
    order = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    assert texts(zb_h1(pp, micro_batches)) == texts(order(shape, rank) for rank in range(pp))


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4)])
def test_transfers_are_torchs_up_to_their_place(pp: int, chunks: int, micro_batches: int) -> None:
    theirs = visualizer.get_schedule_ops(
        "Interleaved1F1B", pp, micro_batches, chunks, with_comms=True
    )
    moves = ("SEND", "RECV")
    ours = add_send_recv(interleaved(pp, chunks, micro_batches))
    for mine, other in zip(texts(ours), texts(theirs), strict=True):
        assert sorted(a for a in mine if any(m in a for m in moves)) == sorted(
            a for a in other if any(m in a for m in moves)
        )


def test_torch_reads_our_csv_and_we_read_torchs() -> None:
    ours = interleaved(4, 2, 8)
    parse = torch_schedules._Action.from_str
    rows = [line.split(",") for line in dump_schedule(ours).splitlines()]
    assert [[str(parse(cell)) for cell in row] for row in rows] == texts(ours)
    theirs = visualizer.get_schedule_ops("Interleaved1F1B", 4, 8, 2)
    text = "\n".join(",".join("" if a is None else str(a) for a in rank) for rank in theirs)
    assert load_schedule(text) == ours
