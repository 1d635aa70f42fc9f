"""From a layout and its times to the task graph of one training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.cost.times import ClassTimes
from simulator.errors import UserError
from simulator.graph.lanes import add_lanes, add_step_end
from simulator.graph.pipelined import add_pipelines
from simulator.graph.sharded import add_sharded
from simulator.graph.step import GraphBuilder, StepGraph
from simulator.spec.layout import Layout


def is_unit_major(layout: Layout, times: Sequence[ClassTimes]) -> bool:
    """Whether the step is built from fully sharded units rather than from pipeline chunks.

    Raises UserError where the layered schedule is asked for without fully sharded parameters or
    with pipeline stages, and where the times don't belong to the layout.
    """
    if len(times) != len(layout.classes):
        raise ValueError(f"{len(layout.classes)} rank classes need as many times, got {len(times)}")
    unit_major = all(t.units for t in times) and len(layout.pipelines[0].classes) == 1
    if layout.plan.schedule == "layered" and not unit_major:
        raise UserError("plan.schedule layered needs sharding zero3 and pp 1")
    return unit_major


def build_step(
    layout: Layout,
    times: Sequence[ClassTimes],
    *,
    links: Mapping[tuple[int, str], tuple[str, ...]] | None = None,
) -> StepGraph:
    """Task graph of one step; ``times[i]`` belongs to ``layout.classes[i]``, scalars only.

    The step starts with updated parameters being gathered (where that hides behind the forward
    pass) and ends when every rank has its next parameters. ``links`` names the shared links that
    the communication of a rank class loads, by (class, category ``pp``, ``dp`` or ``fsdp``);
    without an entry it loads its own network link.
    """
    unit_major = is_unit_major(layout, times)
    builder = GraphBuilder(
        tuple(p.count for p in layout.pipelines), len(layout.classes), links or {}
    )
    lanes = add_lanes(builder, layout)
    if unit_major:
        reduced = add_sharded(builder, layout, times, lanes)
        exposed = [0.0]
    else:
        reduced, exposed = add_pipelines(builder, layout, times, lanes)
    add_step_end(builder, lanes, times, reduced, exposed)
    return builder.finish()
