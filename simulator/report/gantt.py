"""The step as a Gantt chart: one lane per rank class and stream, coloured by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from simulator.graph.action import Kind, parse_action
from simulator.report import palette
from simulator.report.curves import representative_streams
from simulator.report.figures import Drawing, frame, spread, time_unit
from simulator.report.words import TIME_LABELS, class_names, is_pipeline, percent, time_label
from simulator.units import format_seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from simulator.analysis.prediction import Prediction
    from simulator.evaluate.timeline import Record, Timeline

#: A browser draws this many bars without stalling.
MAX_BARS = 20_000
MAX_CLASSES = 16

#: Words for what a task does.
KIND_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward (input gradient)",
    Kind.W: "backward (weight gradient)",
    Kind.SEND_F: "send activations",
    Kind.RECV_F: "receive activations",
    Kind.SEND_B: "send gradients",
    Kind.RECV_B: "receive gradients",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "free gathered parameters",
    Kind.REDUCE_GRAD: "reduce gradients",
    Kind.READY: "wait",
    Kind.NORM: "gradient norm",
    Kind.OPT: "optimiser step",
    Kind.STEP: "framework overhead",
}

_STREAM_WORDS = {"compute": "", "pp": "sends", "dp": "collectives"}
_COMPUTE_PX, _OTHER_PX, _GAP_PX = 24, 15, 7


@dataclass(frozen=True)
class Lane:
    """One row of the chart: centre and thickness in pixels from the top."""

    label: str
    centre: float
    thickness: float


def timeline_figure(p: Prediction, timeline: Timeline, max_bars: int = MAX_BARS) -> Drawing:
    """The step's tasks. Of a larger graph, representative classes and the longest tasks."""
    import plotly.graph_objects as go

    streams = timeline.graph.streams
    chosen = _chosen_classes(p, timeline, max_bars)
    first = representative_streams(timeline)
    places = {(streams[first[c]].pipeline, streams[first[c]].stage): c for c in chosen}
    records = [r for r in timeline.records() if (r.pipeline, r.stage) in places]
    dropped = max(len(records) - max_bars, 0)
    if dropped:
        records = sorted(records, key=lambda r: r.start_ns - r.end_ns)[:max_bars]
    lanes, height = _lanes(p, chosen, records)
    figure = go.Figure()
    scale, unit = time_unit(p.step_time_s.p50)
    # Computation last: a browser draws the thinnest task a pixel wide, over its neighbours.
    for rank, (name, colour, own) in reversed(list(enumerate(_layers(records)))):
        _add_bars(figure, name, colour, own, lanes, scale)
        figure.data[-1].legendrank = rank
    frame(figure, round(height) + 60)
    end = float(timeline.end_ns.max()) / 1e9 * scale
    figure.update_layout(barmode="overlay", dragmode="zoom", hovermode="closest")
    figure.update_xaxes(title=f"{unit} into the step", range=[0, end], tickformat=",")
    figure.update_yaxes(
        tickmode="array", tickvals=[x.centre for x in lanes.values()],
        ticktext=[x.label for x in lanes.values()], range=[height, 0], fixedrange=True,
        showgrid=False, ticks="",
    )  # fmt: skip
    caption = _caption(len(p.classes), chosen, dropped)
    return Drawing(_title(p, end / scale), caption, figure, zoomable=True)


def _chosen_classes(p: Prediction, timeline: Timeline, max_bars: int) -> list[int]:
    """All classes where they fit, else evenly spaced ones with the fullest among them."""
    counts: dict[int, int] = {}
    first = representative_streams(timeline)
    for stream in timeline.graph.streams:
        lead = timeline.graph.streams[first[stream.rank_class]]
        if (stream.pipeline, stream.stage) == (lead.pipeline, lead.stage):
            counts[stream.rank_class] = counts.get(stream.rank_class, 0) + len(stream.tasks)
    everything = sorted(counts)
    for limit in range(min(MAX_CLASSES, len(everything)), 1, -1):
        chosen = spread(everything, limit, p.fullest)
        if sum(counts[c] for c in chosen) <= max_bars:
            return chosen
    return [p.fullest] if p.fullest in counts else everything[:1]


def _lanes(
    p: Prediction, chosen: Sequence[int], records: Sequence[Record]
) -> tuple[dict[tuple[int, str], Lane], float]:
    """Rows for the streams that have tasks, and the height of them all."""
    used = {(r.rank_class, r.stream) for r in records}
    names = class_names(p)
    lanes: dict[tuple[int, str], Lane] = {}
    y = 0.0
    for rank_class in chosen:
        for kind in ("compute", "pp", "dp"):
            if (rank_class, kind) not in used:
                continue
            size = _COMPUTE_PX if kind == "compute" else _OTHER_PX
            label = _short(p, rank_class, names) if kind == "compute" else _STREAM_WORDS[kind]
            lanes[(rank_class, kind)] = Lane(escape(label), y + size / 2, size - 2)
            y += size
        y += _GAP_PX
    return lanes, y


def _short(p: Prediction, rank_class: int, names: Sequence[str]) -> str:
    """``stage 3`` where that says which class it is, else the class's name."""
    stage = p.classes[rank_class].stage
    alone = sum(c.stage == stage for c in p.classes) == 1
    return f"stage {stage}" if alone and is_pipeline(p) else names[rank_class]


def _layers(records: Sequence[Record]) -> list[tuple[str, str, list[Record]]]:
    """Name, colour and tasks of each part of the legend; forward passes lighter than backward."""
    found: list[tuple[str, str, list[Record]]] = []
    for category in TIME_LABELS:
        own = [r for r in records if r.category == category]
        colour = palette.TIME_COLOURS.get(category, palette.OTHER)
        forward = [r for r in own if category == "compute" and _kind(r) is Kind.F]
        rest = [r for r in own if category != "compute" or _kind(r) is not Kind.F]
        if forward:
            found.append(("forward", palette.FORWARD, forward))
        if rest:
            label = "backward" if category == "compute" else time_label(category)
            found.append((label, colour, rest))
    return found


def _kind(record: Record) -> Kind:
    return parse_action(record.label).kind


def _add_bars(
    figure: go.Figure,
    name: str,
    colour: str,
    records: Sequence[Record],
    lanes: dict[tuple[int, str], Lane],
    scale: float,
) -> None:
    import numpy as np

    start = np.array([r.start_ns for r in records], float) / 1e9 * scale
    length = np.array([r.end_ns - r.start_ns for r in records], float) / 1e9 * scale
    rows = [lanes[(r.rank_class, r.stream)] for r in records]
    figure.add_bar(
        name=name,
        orientation="h",
        base=start,
        x=length,
        y=np.array([lane.centre for lane in rows]),
        width=np.array([lane.thickness for lane in rows]),
        marker={"color": colour, "line": {"width": 0}},
        hovertext=[task_words(r) for r in records],
        hoverinfo="text",
    )


def task_words(record: Record) -> str:
    """What a task does, for which micro-batch and chunk, how long and when."""
    kind = KIND_WORDS[_kind(record)]
    parts = [f"<b>{kind}</b> ({record.label})"]
    if record.micro_batch >= 0:
        parts.append(f"micro-batch {record.micro_batch}")
    if record.chunk:
        parts.append(f"chunk {record.chunk}")
    took = format_seconds((record.end_ns - record.start_ns) / 1e9)
    return f"{', '.join(parts)}<br>{took} from {format_seconds(record.start_ns / 1e9)}"


def _title(p: Prediction, step_time_s: float) -> str:
    idle = p.shares.get("bubble", 0.0)
    return (
        f"One step takes {format_seconds(step_time_s)}; the mean GPU is idle {percent(idle)} of it"
    )


def _caption(n_classes: int, chosen: Sequence[int], dropped: int) -> str:
    text = (
        "Every task of the simulated step; below each rank class its communication streams. Drag "
        "across to zoom, double-click to go back, hover for a task's name and duration."
    )
    if len(chosen) < n_classes:
        text += f" Shown are {len(chosen)} of {n_classes} rank classes; trace.json has the others."
    if dropped:
        text += f" The {dropped:,} shortest tasks are left out; trace.json has them."
    return text
