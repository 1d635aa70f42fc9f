from __future__ import annotations

import numpy as np
import pytest

from simulator.cost.times import ChunkTimes, PassTimes
from simulator.evaluate.critical_path import critical_tasks, longest_path
from simulator.evaluate.engine import (
    EngineOptions,
    simulate_step,
    simulate_steps,
    task_durations,
)
from simulator.graph.build import build_step
from simulator.graph.step import StepGraph
from simulator.spec.stack import Overlap
from tests.synthetic import chunk, class_times, layout, unit


def small(schedule: str = "1f1b", send: float = 0.1) -> StepGraph:
    times = [class_times([chunk(1, 1, 1, reduce=2.0)], send=send, optimizer=0.3)] * 4
    return build_step(layout(8, pp=4, schedule=schedule), times)


def test_two_runs_are_equal_to_the_nanosecond() -> None:
    first, second = (simulate_step(small()) for _ in range(2))
    assert first.timeline is not None and second.timeline is not None
    assert np.array_equal(first.timeline.end_ns, second.timeline.end_ns)
    assert first.n_events == second.n_events


def test_without_contention_the_engine_is_the_longest_path() -> None:
    graph = small()
    result = simulate_step(graph)
    assert result.timeline is not None
    assert np.array_equal(result.timeline.end_ns, longest_path(graph, graph.duration_ns))


def test_a_seed_gives_the_same_jitter_again_and_another_seed_another() -> None:
    graph = small()
    spans = [
        simulate_step(graph, EngineOptions(seed=seed, jitter=0.1)).step_time_s for seed in (1, 1, 2)
    ]
    assert spans[0] == spans[1] != spans[2]


def test_jitter_has_mean_one() -> None:
    graph = small()
    drawn = np.mean(
        [task_durations(graph, EngineOptions(seed=s, jitter=0.2)).sum() for s in range(200)]
    )
    assert drawn == pytest.approx(graph.duration_ns.sum(), rel=0.01)


def test_the_distribution_under_jitter() -> None:
    graph = small()
    options = EngineOptions(seed=3, jitter=0.1)
    steps = simulate_steps(graph, 100, options)
    assert steps.p10_s < steps.p50_s < steps.p90_s
    # Waiting for the slowest of several makes the mean step longer than the step of the means.
    assert steps.step_times_s.mean() > simulate_step(graph).step_time_s
    assert np.array_equal(steps.step_times_s, simulate_steps(graph, 100, options).step_times_s)


def test_samples_are_engine_runs() -> None:
    graph = small()
    options = EngineOptions(seed=3, jitter=0.1)
    fast = simulate_steps(graph, 3, options)
    seed = int(np.random.SeedSequence(3).spawn(3)[2].generate_state(1)[0])
    slow = simulate_step(graph, EngineOptions(seed=seed, jitter=0.1))
    assert fast.step_times_s[2] == slow.step_time_s


@pytest.mark.parametrize("rank", range(4))
def test_a_straggler_slows_the_step_wherever_it_is(rank: int) -> None:
    graph = small(send=0.0)
    slow = simulate_step(graph, EngineOptions(stragglers={rank: 2.0}))
    # It works 8 x 6 s; the others fill and drain around it.
    assert slow.step_time_s >= 48 + 3
    assert slow.by_category(rank)["compute"] == pytest.approx(48)


def test_stragglers_and_jitter_are_checked() -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        EngineOptions(stragglers={0: 0.0})
    with pytest.raises(ValueError, match="jitter"):
        EngineOptions(jitter=-0.1)
    with pytest.raises(ValueError, match=r"classes \[9\]"):
        simulate_step(small(), EngineOptions(stragglers={9: 2.0}))


def test_seconds_of_each_class_sum_to_the_step() -> None:
    result = simulate_step(small())
    assert result.seconds.sum(axis=1) == pytest.approx(result.step_time_s)
    assert (result.seconds >= 0).all()


def test_passes_keep_their_split_into_categories() -> None:
    piece = PassTimes(compute=1.0, recompute=0.5, tp=0.25, dispatch=0.25)
    times = [class_times([ChunkTimes(piece, piece, PassTimes())])]
    shares = simulate_step(build_step(layout(5), times)).by_category(0)
    assert [shares[k] for k in ("compute", "recompute", "tp", "dispatch")] == pytest.approx(
        [10, 5, 2.5, 2.5]
    )
    assert shares["bubble"] == 0


def test_waiting_counts_for_the_communication_that_runs_meanwhile() -> None:
    """One rank waits for its own reduction (dp); the early rank first waits for the late one."""
    times = [class_times([chunk(1, 1, reduce=3.0)]), class_times([chunk(2, 2, reduce=3.0)])]
    result = simulate_step(build_step(layout([2, 2], overlap=Overlap(dp=0.0)), times))
    assert result.by_category(0)["dp"] == result.by_category(1)["dp"] == 3.0
    assert result.by_category(0)["bubble"] == 4.0
    assert result.by_category(1)["bubble"] == 0.0


def test_a_slow_gather_is_fsdp_time_not_bubble() -> None:
    times = [class_times([chunk(4, 8)], units=[unit("layer", 4, 1.0, 2.0, 5.0, 0.0)])]
    shares = simulate_step(build_step(layout(1), times)).by_category(0)
    assert shares["fsdp"] == 8 * 5.0 + 2.0 - 12.0
    assert shares["bubble"] == 0


def test_a_class_in_two_pipelines_is_the_mean_of_its_ranks() -> None:
    plan = layout([2, 4], counts=[3, 1])
    shares = simulate_step(build_step(plan, [class_times([chunk(1, 1)])] * 2)).seconds
    assert shares.sum(axis=1) == pytest.approx([8.0, 8.0])


def test_contention_stretches_transfers_that_share_a_link() -> None:
    times = [class_times([chunk(1, 1, reduce=4.0)], send=0.9)] * 2
    graph = build_step(layout(6, pp=2), times)
    free = simulate_step(graph).step_time_s
    shared = simulate_step(graph, EngineOptions(contention=True)).step_time_s
    assert free < shared < free + 12 * 0.9


def test_named_links_are_shared_between_classes() -> None:
    times = [class_times([chunk(1, 1)], send=1.0)] * 3
    plan = layout(8, pp=3)
    apart = build_step(plan, times)
    trunk = {(c, "pp"): ("trunk",) for c in range(3)}
    joined = build_step(plan, times, links=trunk)
    option = EngineOptions(contention=True)
    assert simulate_step(joined, option).step_time_s > simulate_step(apart, option).step_time_s


def test_the_critical_tasks_account_for_the_whole_step() -> None:
    graph = small()
    ends = longest_path(graph, graph.duration_ns)
    path = critical_tasks(graph, ends, graph.duration_ns)
    assert graph.duration_ns[path].sum() == ends.max()


def test_no_timeline_unless_asked() -> None:
    assert simulate_step(small(), EngineOptions(record_timeline=False)).timeline is None
