from __future__ import annotations

import numpy as np
import pytest

from simulator.cost.times import PassTimes
from simulator.errors import UserError
from simulator.evaluate.engine import simulate_step
from simulator.graph.action import Kind
from simulator.graph.build import build_step
from simulator.graph.sharded import exposed_fsdp_s, split_units
from simulator.graph.step import KINDS, StepGraph, category_seconds, to_ns
from simulator.graph.validate import validate_graph
from simulator.spec.plan import Sharding
from simulator.spec.stack import Overlap
from tests.synthetic import chunk, class_times, layout, unit

SYNC = {"reduce": 2.0, "gather": 1.0}


def tasks_of(graph: StepGraph, kind: Kind) -> list[int]:
    return [t for t in range(graph.n_tasks) if KINDS[graph.kind[t]] is kind]


def step_s(graph: StepGraph) -> float:
    validate_graph(graph)
    return simulate_step(graph).step_time_s


def test_every_pass_is_one_task_with_the_time_of_its_class() -> None:
    graph = build_step(
        layout(3, pp=2), [class_times([chunk(1, 2, 3)]), class_times([chunk(2, 4, 6)])]
    )
    passes = tasks_of(graph, Kind.F) + tasks_of(graph, Kind.B)
    assert len(passes) == 2 * 2 * 3
    assert graph.duration_ns[passes].sum() == 3 * 18 * 10**9


def test_dp_sync_without_overlap_follows_the_backward_pass() -> None:
    times = [class_times([chunk(1, 2, **SYNC)], optimizer=0.5, overhead=0.25)]
    none = Overlap(dp=0.0, param_gather=0.0)
    assert step_s(build_step(layout(4, overlap=none), times)) == 12 + 2 + 0.5 + 1 + 0.25


def test_dp_sync_hides_behind_the_last_backward_and_the_first_forward_pass() -> None:
    full = Overlap(dp=1.0, param_gather=1.0)
    times = [class_times([chunk(1, 2, **SYNC)], optimizer=0.5)]
    assert step_s(build_step(layout(4, overlap=full), times)) == 12.5
    slow = [class_times([chunk(1, 2, reduce=5.0, gather=3.0)], optimizer=0.5)]
    assert step_s(build_step(layout(4, overlap=full), slow)) == 12.5 + (5 - 2) + (3 - 1)


def test_zero2_reduces_with_every_micro_batch() -> None:
    """Four reductions of 1.5 s: a third of each shows, or all that is longer than its pass."""
    times = [class_times([chunk(1, 2, reduce=6.0)])]
    for overlap, expected in ((1.0, 12.0), (0.0, 18.0), (2 / 3, 14.0)):
        plan = layout(4, overlap=Overlap(dp=overlap), sharding=Sharding.ZERO2)
        assert step_s(build_step(plan, times)) == pytest.approx(expected)
    slow = [class_times([chunk(1, 2, reduce=12.0)])]
    plan = layout(4, overlap=Overlap(dp=1.0), sharding=Sharding.ZERO2)
    result = simulate_step(build_step(plan, slow))
    assert result.step_time_s == 12 + 4 * (3 - 2)
    assert result.by_category(0)["dp"] == 4


def test_sync_joins_the_pipelines_and_takes_the_slowest_members_time() -> None:
    times = [class_times([chunk(1, 1, reduce=1.0)]), class_times([chunk(2, 2, reduce=3.0)])]
    graph = build_step(layout([2, 2], overlap=Overlap(dp=0.0)), times)
    (reduction,) = tasks_of(graph, Kind.REDUCE_GRAD)
    assert len(graph.task_streams[reduction]) == 2
    result = simulate_step(graph)
    assert result.step_time_s == 8 + 3
    assert result.timeline is not None
    assert result.timeline.start_ns[reduction] == 8e9


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_one_micro_batch_pays_every_hop_once(overlap: float) -> None:
    """Two stages, one micro-batch: a transfer each way lies on the only path, however it runs."""
    times = [class_times([chunk(1, 2)], send=0.25)] * 2
    assert step_s(build_step(layout(1, pp=2, overlap=Overlap(pp=overlap)), times)) == 6.5


def test_blocking_sends_cost_more_than_overlapped_ones() -> None:
    times = [class_times([chunk(1, 2)], send=0.25)] * 4
    spans = [
        step_s(build_step(layout(16, pp=4, overlap=Overlap(pp=share)), times))
        for share in (1.0, 0.5, 0.0)
    ]
    assert spans == sorted(spans)
    assert spans[0] < spans[2]


def test_fsdp_gathers_hide_behind_the_unit_before() -> None:
    """Four equal units, one micro-batch; only the first gather and the last reduction show."""
    times = [class_times([chunk(4, 8)], units=[unit("layer", 4, 1.0, 2.0, 0.5, 0.5, 0.0)])]
    assert step_s(build_step(layout(1), times)) == 0.5 + 4 + 8 + 0.5


def test_without_prefetch_every_gather_shows() -> None:
    times = [class_times([chunk(4, 8)], units=[unit("layer", 4, 1.0, 2.0, 0.5, 0.0)])]
    overlap = Overlap(fsdp_prefetch=0)
    assert step_s(build_step(layout(1, overlap=overlap), times)) == 12 + 8 * 0.5


def test_fsdp_is_bound_by_slow_gathers() -> None:
    times = [class_times([chunk(4, 8)], units=[unit("layer", 4, 1.0, 2.0, 5.0, 0.0)])]
    assert step_s(build_step(layout(1), times)) == 8 * 5.0 + 2.0


def test_layered_gathers_once_where_fsdp_gathers_for_every_micro_batch() -> None:
    times = [class_times([chunk(4, 8)], units=[unit("layer", 4, 1.0, 2.0, 5.0, 1.0)])]
    fsdp = build_step(layout(8), times)
    layered = build_step(layout(8, schedule="layered"), times)
    assert len(tasks_of(fsdp, Kind.UNSHARD)) == 8 * len(tasks_of(layered, Kind.UNSHARD))
    assert step_s(layered) == 5.0 + 8 * 12 + 1.0
    assert step_s(fsdp) > 1.8 * step_s(layered)


def test_layered_ranks_may_run_different_numbers_of_micro_batches() -> None:
    units = [unit("layer", 4, 1.0, 2.0, 0.5, 0.5)]
    slow = [unit("layer", 4, 3.0, 6.0, 0.5, 0.5)]
    times = [class_times([chunk(4, 8)], units=units), class_times([chunk(12, 24)], units=slow)]
    balanced = step_s(build_step(layout([6, 2], schedule="layered"), times))
    even = step_s(build_step(layout([4, 4], schedule="layered"), times))
    assert balanced == 0.5 + 6 * 12 + 0.5
    assert even == 0.5 + 4 * 36 + 0.5


def test_prefetching_past_a_units_own_next_gather() -> None:
    """With deep prefetch the backward gather is issued before the forward pass has run."""
    times = [class_times([chunk(1, 2)], units=[unit("layer", 1, 1.0, 2.0, 1.0, 0.0)])]
    graph = build_step(layout(1, overlap=Overlap(fsdp_prefetch=3)), times)
    assert step_s(graph) == 1.0 + 1.0 + 2.0


def test_zero3_inside_a_pipeline_counts_what_its_gathers_expose() -> None:
    units = [unit("layer", 4, 1.0, 2.0, 5.0, 0.0)]
    times = [class_times([chunk(4, 8)], units=units)] * 2
    plan = layout(3, pp=2, layers=(4,))
    result = simulate_step(build_step(plan, times))
    forward, _ = exposed_fsdp_s(units * 4, 1, backward=False)
    assert forward == 4 * 5 + 1 - 4
    assert result.by_category(0)["fsdp"] == pytest.approx(3 * (17 + 4 * 5 + 2 - 8))


def test_units_are_split_by_layers() -> None:
    root, layer, head = (unit(n, 1, 1, 1, 1, 1) for n in ("root", "layer", "head"))
    parts = split_units([root, layer, layer, layer, head], (1, 2))
    assert [[u.name for u in part] for part in parts] == [
        ["root", "layer"],
        ["layer", "layer", "head"],
    ]
    with pytest.raises(ValueError, match="units name 3 layers, the chunks hold 4"):
        split_units([root, layer, layer, layer, head], (2, 2))


def test_layered_needs_sharded_units() -> None:
    with pytest.raises(UserError, match="layered needs sharding zero3"):
        build_step(layout(2, schedule="layered"), [class_times([chunk(1, 1)])])


def test_times_must_be_finite_and_not_negative() -> None:
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            to_ns(bad)


def test_categories_keep_their_seconds() -> None:
    row = category_seconds(PassTimes(compute=1, recompute=2, tp=3, overhead=4))
    assert row.sum() == 10
    assert np.count_nonzero(row) == 4
