"""Torch's caching allocator, on sequences worked out by hand."""

from __future__ import annotations

import pytest

from simulator.cost.allocator import Allocate, Release, replay, rounded_bytes, segment_bytes
from simulator.cost.memory import layout_memory
from simulator.cost.step_events import replay_class
from simulator.spec.layout import build_layout
from simulator.spec.scenario import load_scenario
from simulator.units import MIB


@pytest.mark.parametrize(("asked", "given"), [(0, 512), (1, 512), (512, 512), (513, 1024)])
def test_sizes_round_to_512_bytes(asked: int, given: int) -> None:
    assert rounded_bytes(asked) == given


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segment_sizes(size: int, segment: int) -> None:
    """kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge of torch's allocator."""
    assert segment_bytes(size) == segment


def test_small_requests_share_a_segment() -> None:
    trace = replay([Allocate("a", 1000), Allocate("b", 1000)])
    assert trace.peak_allocated_bytes == 2048
    assert trace.peak_reserved_bytes == 2 * MIB
    assert trace.segments == 1


def test_medium_requests_share_a_20_mib_segment() -> None:
    trace = replay([Allocate("a", 9 * MIB), Allocate("b", 9 * MIB), Allocate("c", 3 * MIB)])
    assert trace.segments == 2
    assert trace.peak_reserved_bytes == 40 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_1_mib() -> None:
    """The rest of 1 MiB isn't split off, so it counts as allocated."""
    trace = replay([Allocate("a", 11 * MIB)])
    assert trace.peak_allocated_bytes == trace.peak_reserved_bytes == 12 * MIB
    trace = replay([Allocate("a", 17 * MIB + MIB // 2), Release("a"), Allocate("b", 16 * MIB)])
    assert trace.peak_reserved_bytes == 18 * MIB
    assert trace.segments == 1


def test_best_fit_takes_the_smallest_block() -> None:
    events = [Allocate("a", 40 * MIB), Allocate("b", 30 * MIB), Release("a"), Release("b")]
    trace = replay([*events, Allocate("c", 28 * MIB), Allocate("d", 40 * MIB)])
    assert trace.peak_reserved_bytes == 70 * MIB


def test_freed_neighbours_coalesce() -> None:
    parts = [Allocate(i, 4 * MIB) for i in range(5)]
    trace = replay([*parts, *(Release(i) for i in (0, 2, 1, 4, 3)), Allocate("all", 20 * MIB)])
    assert trace.peak_reserved_bytes == 20 * MIB
    assert trace.final_reserved_bytes == 20 * MIB


def test_holes_between_live_blocks_strand_memory() -> None:
    """Two free 8 MiB holes can't hold 16 MiB: fragmentation."""
    parts = [Allocate(i, 8 * MIB) for i in range(4)]
    trace = replay([*parts, Release(0), Release(2), Allocate("big", 16 * MIB)])
    assert trace.peak_allocated_bytes == 32 * MIB
    assert trace.peak_reserved_bytes == 56 * MIB
    assert trace.fragmentation == pytest.approx(0.75)


def test_streams_do_not_share_blocks() -> None:
    events = [Allocate("a", 20 * MIB), Release("a"), Allocate("b", 20 * MIB, stream="gather")]
    assert replay(events).peak_reserved_bytes == 40 * MIB


def test_full_device_returns_free_segments_and_retries() -> None:
    events = [Allocate("a", 20 * MIB), Release("a"), Allocate("b", 30 * MIB)]
    trace = replay(events, capacity_bytes=40 * MIB)
    assert trace.retries == 1
    assert trace.failed_key is None
    assert trace.peak_reserved_bytes == 30 * MIB


def test_request_beyond_capacity_fails_by_name() -> None:
    trace = replay([Allocate("a", 20 * MIB), Allocate("b", 30 * MIB)], capacity_bytes=40 * MIB)
    assert trace.failed_key == "b"


def test_expandable_segments_fill_holes_at_their_end() -> None:
    """Without them a larger request needs a segment of its own; with them the last one grows."""
    events = [Allocate("a", 40 * MIB), Release("a"), Allocate("b", 60 * MIB)]
    assert replay(events).peak_reserved_bytes == 100 * MIB
    assert replay(events, expandable_segments=True).peak_reserved_bytes == 60 * MIB


def test_faulty_sequences_are_refused() -> None:
    with pytest.raises(KeyError):
        replay([Release("nothing")])
    with pytest.raises(ValueError, match="twice"):
        replay([Allocate("a", 1), Allocate("a", 1)])


@pytest.mark.parametrize("name", ["llama-3.1-8b-dgx-h100", "cephalo-small-gpt-2.7b"])
def test_replayed_steps_fit_and_agree_with_the_estimate(name: str) -> None:
    """Allocated within 3 % of the closed form; reserved within 12 %: ends round and splinter."""
    scenario = load_scenario(name)
    assert scenario.plan is not None
    layout = build_layout(
        scenario.model, scenario.workload, scenario.cluster, scenario.plan, scenario.stack
    )
    trace, found = replay_class(layout, 0), layout_memory(layout)[0]
    assert trace.failed_key is None
    assert trace.peak_allocated_bytes == pytest.approx(found.peak_allocated_bytes, rel=0.03)
    assert trace.peak_reserved_bytes == pytest.approx(found.peak_reserved_bytes, rel=0.12)
