from __future__ import annotations

import numpy as np
import pytest

from simulator.evaluate.engine import simulate_step
from simulator.evaluate.timeline import Timeline
from simulator.graph.build import build_step
from tests.synthetic import chunk, class_times, layout, unit


def run(schedule: str, pp: int, vpp: int = 1) -> Timeline:
    times = [class_times([chunk(1, 1, 1, reduce=1.0)] * vpp, send=0.1)] * pp
    timeline = simulate_step(build_step(layout(8, pp=pp, vpp=vpp, schedule=schedule), times))
    assert timeline.timeline is not None
    return timeline.timeline


def test_records_name_what_ran_where() -> None:
    records = list(run("interleaved", 2, 2).records())
    first = records[0]
    assert (first.pipeline, first.stage, first.stream, first.label) == (0, 0, "compute", "0F0")
    assert (first.start_ns, first.end_ns, first.category) == (0, 10**9, "compute")
    second_chunk = next(r for r in records if r.label == "3F0")
    assert (second_chunk.stage, second_chunk.chunk, second_chunk.micro_batch) == (1, 1, 0)
    assert {r.category for r in records} == {"compute", "pp", "dp"}


def test_a_stream_runs_one_task_at_a_time() -> None:
    timeline = run("zb-h1", 4)
    for stream in timeline.graph.streams:
        tasks = list(stream.tasks)
        assert (timeline.start_ns[tasks][1:] >= timeline.end_ns[tasks][:-1]).all()


@pytest.mark.parametrize(
    ("schedule", "peaks"),
    [("1f1b", [4, 3, 2, 1]), ("gpipe", [8] * 4), ("zb-h1", [4, 4, 4, 4])],
)
def test_in_flight_activations_follow_the_schedule(schedule: str, peaks: list[int]) -> None:
    timeline = run(schedule, 4)
    for stream, peak in zip(timeline.graph.compute_streams, peaks, strict=True):
        times, stages, deltas = timeline.in_flight(stream)
        assert (np.diff(times) >= 0).all()
        assert set(stages) == {timeline.graph.streams[stream].stage}
        assert deltas.sum() == 0
        assert np.cumsum(deltas).max() == peak


def test_layered_keeps_every_micro_batch_of_every_unit() -> None:
    times = [class_times([chunk(3, 6)], units=[unit("layer", 3, 1.0, 2.0, 0.5, 0.5)])]
    result = simulate_step(build_step(layout(4, schedule="layered"), times))
    assert result.timeline is not None
    _, units, deltas = result.timeline.in_flight(result.timeline.graph.compute_streams[0])
    assert np.cumsum(deltas).max() == 3 * 4
    assert set(units) == {0, 1, 2}
