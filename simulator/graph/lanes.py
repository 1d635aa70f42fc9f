"""Streams of one pipeline stage and the end of the step, common to all kinds of plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.cost.times import ClassTimes
from simulator.graph.action import Action, Kind
from simulator.graph.step import CATEGORY, GraphBuilder, to_ns
from simulator.spec.layout import Layout


@dataclass(frozen=True)
class Lane:
    """Stream ids of stage ``stage`` of pipeline ``pipeline``, run by class ``rank_class``."""

    pipeline: int
    stage: int
    rank_class: int
    compute: int
    pp: int
    dp: int


def add_lanes(builder: GraphBuilder, layout: Layout) -> list[list[Lane]]:
    """Streams for every stage of every pipeline: ``lanes[pipeline][stage]``."""
    return [
        [
            Lane(
                q,
                stage,
                rank_class,
                *(
                    builder.add_stream(q, stage, rank_class, kind)
                    for kind in ("compute", "pp", "dp")
                ),
            )
            for stage, rank_class in enumerate(pipeline.classes)
        ]
        for q, pipeline in enumerate(layout.pipelines)
    ]


def add_step_end(
    builder: GraphBuilder,
    lanes: list[list[Lane]],
    times: Sequence[ClassTimes],
    reduced: dict[int, list[int]],
    gather_s: Sequence[float],
) -> None:
    """Gradient norm over all ranks, optimiser, exposed parameter gather, step overhead.

    ``reduced[stage]`` are the tasks that reduce the stage's gradients, ``gather_s[stage]`` the
    seconds of parameter gather that nothing hides.
    """
    flat = [lane for pipeline in lanes for lane in pipeline]
    for lane in flat:
        ready = Action(lane.stage, Kind.READY)
        builder.add(ready, [lane.compute], 0, CATEGORY["dp"], reduced.get(lane.stage, ()))
    builder.add(Action(0, Kind.NORM), [lane.compute for lane in flat], 0, CATEGORY["bubble"])
    updates: dict[int, list[int]] = {}
    for lane in flat:
        task = builder.add(
            Action(lane.stage, Kind.OPT),
            [lane.compute],
            to_ns(times[lane.rank_class].optimizer),
            CATEGORY["optimizer"],
        )
        updates.setdefault(lane.stage, []).append(task)
    gathered: dict[int, list[int]] = {}
    for stage, seconds in enumerate(gather_s):
        if to_ns(seconds):
            streams = [pipeline[stage].dp for pipeline in lanes]
            action = Action(stage, Kind.UNSHARD)
            task = builder.add(action, streams, to_ns(seconds), CATEGORY["dp"], updates[stage])
            builder.load_links(task, "dp")
            gathered[stage] = [task]
    for lane in flat:
        builder.add(
            Action(lane.stage, Kind.STEP),
            [lane.compute],
            to_ns(times[lane.rank_class].step_overhead),
            CATEGORY["overhead"],
            gathered.get(lane.stage, ()),
        )
