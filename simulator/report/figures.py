"""Figures of a prediction: memory against capacity, shares of time, the step, memory over time.

Each builder returns a :class:`Drawing`: a Plotly figure with a title that states what is found and
a caption that says how to read it and what was left out. Plotly is imported when one is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from simulator.report import palette
from simulator.report.words import (
    MEMORY_LABELS,
    TIME_LABELS,
    class_names,
    gib,
    memory_label,
    percent,
    probability,
    time_label,
)
from simulator.units import GIB, format_seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from simulator.analysis.prediction import ClassPrediction, Prediction
    from simulator.report.curves import MemoryCurve

#: More rows than this are hard to read; the tables hold all of them.
MAX_ROWS = 20
MAX_CURVES = 5
_ROW_PX = 46


@dataclass(frozen=True)
class Drawing:
    """A figure, the finding it shows, and how to read it. ``zoomable`` figures take drags."""

    title: str
    caption: str
    figure: go.Figure
    zoomable: bool = False


def memory_figure(p: Prediction) -> Drawing:
    """Memory by component of the fullest rank of each GPU type and stage, against capacity."""
    import plotly.graph_objects as go

    names = class_names(p)
    found = _fullest(p)
    rows, left_out = _fewer([c.index for c in found], [c.fill for c in found])
    classes = [p.classes[i] for i in rows]
    figure = go.Figure()
    for component in _components(classes):
        values = [c.memory_bytes.get(component, 0.0) / GIB for c in classes]
        figure.add_bar(
            name=memory_label(component),
            orientation="h",
            y=list(range(len(classes))),
            x=values,
            text=[f"{v:.1f}" for v in values],
            marker=_bar_style(palette.MEMORY_COLOURS.get(component, palette.OTHER)),
            hovertemplate=f"{escape(memory_label(component))}: %{{x:.2f}} GiB<extra></extra>",
        )
    _mark_capacity(figure, classes)
    labels = [
        f"{escape(names[c.index])}<br>{gib(c.device_bytes)} of {gib(c.usable_bytes)} GiB"
        for c in classes
    ]
    top = 1.06 * max(max(c.usable_bytes, c.device_p90_bytes) for c in classes) / GIB
    _rows_frame(figure, labels, "GiB on one GPU", [0, top])
    full = p.classes[p.fullest]
    title = (
        f"The fullest is {names[full.index]}: {gib(full.device_bytes)} of "
        f"{gib(full.usable_bytes)} GiB, {probability(full.oom_risk)} risk of running out"
    )
    caption = (
        "Memory at the fullest moment of the step, for the fullest rank of each GPU type"
        f"{' and stage' if any(c.stage for c in p.classes) else ''}. The heavy line is the usable "
        "memory as CUDA reports it; the whisker spans the tenth to ninetieth percentile."
    )
    return Drawing(title, caption + _left_out(left_out, "rows"), figure)


def _mark_capacity(figure: go.Figure, classes: Sequence[ClassPrediction]) -> None:
    """A heavy line at each row's usable memory, a whisker from p10 to p90."""
    for y, c in enumerate(classes):
        figure.add_shape(
            type="line", x0=c.usable_bytes / GIB, x1=c.usable_bytes / GIB, y0=y - 0.48, y1=y + 0.48,
            line={"color": palette.VERDICT_COLOURS["does not fit"], "width": 3},
        )  # fmt: skip
    figure.add_scatter(
        mode="markers", showlegend=False, hoverinfo="skip",
        y=[y + 0.44 for y in range(len(classes))],  # below the bar: its text stays readable
        x=[c.device_bytes / GIB for c in classes],
        marker={"color": palette.INK, "size": 5},
        error_x={
            "type": "data", "symmetric": False, "color": palette.INK, "thickness": 1.5, "width": 5,
            "array": [max(c.device_p90_bytes - c.device_bytes, 0.0) / GIB for c in classes],
            "arrayminus": [max(c.device_bytes - c.device_p10_bytes, 0.0) / GIB for c in classes],
        },
    )  # fmt: skip


def shares_figure(p: Prediction) -> Drawing:
    """Where the step goes: the mean over ranks and every rank class."""
    import plotly.graph_objects as go

    names = class_names(p)
    busy = [-c.time_s.get("bubble", 0.0) for c in p.classes]
    rows, left_out = _fewer([c.index for c in p.classes], busy)
    chosen = [p.classes[i] for i in rows]
    split = [_shares_of(c) for c in chosen]
    labels = [escape(names[i]) for i in rows]
    if len(p.classes) > 1:
        split.insert(0, dict(p.shares))
        labels.insert(0, "<b>mean of all GPUs</b>")
    figure = go.Figure()
    for category in TIME_LABELS:
        values = [row.get(category, 0.0) for row in split]
        if max(values) < 5e-4:
            continue
        figure.add_bar(
            name=time_label(category),
            orientation="h",
            y=list(range(len(split))),
            x=values,
            text=[percent(v) for v in values],
            customdata=[format_seconds(v * p.step_time_s.p50) for v in values],
            marker=_bar_style(palette.TIME_COLOURS.get(category, palette.OTHER)),
            hovertemplate=(
                f"{escape(time_label(category))}: %{{x:.1%}}, %{{customdata}}<extra></extra>"
            ),
        )
    _rows_frame(figure, labels, "share of the step", [0, 1], tickformat=".0%")
    caption = (
        "Communication counts only as far as the computation waits for it; what runs behind "
        "computation costs nothing here."
    )
    return Drawing(_shares_title(p), caption + _left_out(left_out, "rank classes"), figure)


def _shares_title(p: Prediction) -> str:
    losses = {k: v for k, v in p.shares.items() if k != "compute"}
    worst = max(losses, key=lambda k: losses[k], default="")
    head = f"{percent(p.shares.get('compute', 0.0))} of the step is computation"
    if not worst or losses[worst] < 5e-4:
        return head
    return f"{head}; the largest loss is {time_label(worst)}: {percent(losses[worst])}"


def memory_time_figure(p: Prediction, curves: Sequence[MemoryCurve]) -> Drawing:
    """Device memory over the step, one line per rank class; evenly spaced ones where many."""
    import plotly.graph_objects as go

    names = class_names(p)
    kept = spread([c.rank_class for c in curves], MAX_CURVES, p.fullest)
    left_out = len(curves) - len(kept)
    curves = [c for c in curves if c.rank_class in kept]
    figure = go.Figure()
    scale, unit = time_unit(p.step_time_s.p50)
    for n, curve in enumerate(curves):
        name = names[curve.rank_class]
        figure.add_scatter(
            name=escape(name),
            x=curve.times_s * scale,
            y=curve.bytes_ / GIB,
            mode="lines",
            line={
                "shape": "hv",
                "width": 1.8,
                "color": palette.LINE_COLOURS[n % len(palette.LINE_COLOURS)],
                "dash": palette.LINE_DASHES[n % len(palette.LINE_DASHES)],
            },
            hovertemplate=f"{escape(name)}: %{{y:.1f}} GiB at %{{x:.4~g}} {unit}<extra></extra>",
        )
    usable = _usable_lines([p.classes[c.rank_class] for c in curves])
    for value, text in usable.items():
        figure.add_hline(
            y=value, line={"color": palette.VERDICT_COLOURS["does not fit"], "width": 2.5},
            annotation={"text": escape(text), "font": {"size": 11}},
            annotation_position="top right",
        )  # fmt: skip
    highest = max([*usable, *(float(c.bytes_.max()) / GIB for c in curves)])
    frame(figure, 380)
    figure.update_xaxes(title=f"{unit} into the step", rangemode="tozero", tickformat=",")
    figure.update_yaxes(title="GiB on one GPU", range=[0, 1.08 * highest])
    caption = (
        "Activations in flight, on top of what stays all step, up to the estimated peak of forward "
        "and backward; the optimiser's step has its own estimate. Drag to zoom, double-click to "
        "go back."
    )
    title = _curves_title(p, curves)
    return Drawing(title, caption + _left_out(left_out, "rank classes"), figure, zoomable=True)


def _curves_title(p: Prediction, curves: Sequence[MemoryCurve]) -> str:
    top = max(curves, key=lambda c: float(c.bytes_.max()) / p.classes[c.rank_class].usable_bytes)
    cls = p.classes[top.rank_class]
    at = float(top.times_s[int(top.bytes_.argmax())])
    peak, name = gib(float(top.bytes_.max())), class_names(p)[cls.index]
    words = "Furthest over" if cls.fill > 1 else "Closest to"
    return (
        f"{words} its limit is {name}: {peak} of {gib(cls.usable_bytes)} GiB, "
        f"first {format_seconds(at)} into the step"
    )


def _usable_lines(classes: Sequence[ClassPrediction]) -> dict[float, str]:
    """Usable GiB -> label; GPU types that differ by less than 1 GiB share a line."""
    lines: dict[float, list[str]] = {}
    for c in sorted(classes, key=lambda c: c.usable_bytes):
        value = c.usable_bytes / GIB
        near = next((at for at in lines if value - at < 1.0), value)
        lines.setdefault(near, []).append(c.gpu)
    if len(lines) == 1:
        return dict.fromkeys(lines, "usable")
    return {at: f"usable on {', '.join(dict.fromkeys(gpus))}" for at, gpus in lines.items()}


def time_unit(step_time_s: float) -> tuple[float, str]:
    """Factor from seconds and unit of a time axis: milliseconds up to 5 s."""
    return (1e3, "ms") if step_time_s < 5.0 else (1.0, "s")


def _fullest(p: Prediction) -> list[ClassPrediction]:
    """The fullest class of each GPU type and stage, in class order."""
    best: dict[tuple[str, int], ClassPrediction] = {}
    for c in p.classes:
        key = (c.gpu, c.stage)
        if key not in best or c.fill > best[key].fill:
            best[key] = c
    return sorted(best.values(), key=lambda c: c.index)


def _fewer(
    items: Sequence[int], weight: Sequence[float], limit: int = MAX_ROWS
) -> tuple[list[int], int]:
    """At most ``limit`` items, those of most weight, in their order; how many were left out."""
    ranked = sorted(range(len(items)), key=lambda n: (-weight[n], n))[:limit]
    return [items[n] for n in sorted(ranked)], max(len(items) - limit, 0)


def spread(items: Sequence[int], limit: int, must: int) -> list[int]:
    """``limit`` (at least 2) evenly spaced items, first and last among them, and ``must``."""
    if len(items) <= limit:
        return list(items)
    picked = [items[round(n * (len(items) - 1) / (limit - 1))] for n in range(limit)]
    if must in items and must not in picked:
        nearest = min(range(limit), key=lambda n: abs(picked[n] - must))
        picked[nearest] = must
    return sorted(set(picked))


def _left_out(count: int, what: str) -> str:
    return f" {count:,} more {what} are left out here and stand in the tables." if count else ""


def _components(classes: Sequence[ClassPrediction]) -> list[str]:
    """Components of memory that any class has, in stacking order."""
    present = dict.fromkeys(name for c in classes for name, v in c.memory_bytes.items() if v > 0)
    known = [name for name in MEMORY_LABELS if name in present]
    return known + [name for name in present if name not in MEMORY_LABELS]


def _shares_of(c: ClassPrediction) -> dict[str, float]:
    total = sum(c.time_s.values())
    return {name: value / total if total else 0.0 for name, value in c.time_s.items()}


def _bar_style(colour: str) -> dict[str, Any]:
    return {"color": colour, "line": {"color": palette.SURFACE, "width": 1}}


def _rows_frame(
    figure: go.Figure, labels: Sequence[str], x_title: str, x_range: list[float], **x: Any
) -> None:
    """Common look of stacked horizontal bars, first row on top."""
    frame(figure, 90 + _ROW_PX * len(labels))
    figure.update_traces(
        textposition="inside", insidetextanchor="middle", textangle=0, selector={"type": "bar"}
    )
    figure.update_layout(
        barmode="stack", bargap=0.28, uniformtext={"mode": "hide", "minsize": 10}, dragmode=False
    )
    figure.update_xaxes(title=x_title, range=x_range, fixedrange=True, **x)
    figure.update_yaxes(
        tickmode="array", tickvals=list(range(len(labels))), ticktext=list(labels),
        range=[len(labels) - 0.5, -0.5], fixedrange=True, showgrid=False, ticks="",
    )  # fmt: skip


def frame(figure: go.Figure, height: int) -> None:
    """Fonts, margins, grid and legend that all figures share."""
    axis = {
        "gridcolor": palette.GRID, "zeroline": False, "linecolor": palette.GRID,
        "automargin": True, "title": {"font": {"size": 12}, "standoff": 8},
    }  # fmt: skip
    figure.update_layout(
        template="none",
        height=height,
        font={"family": palette.FONT, "size": 12, "color": palette.INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 22, "t": 8, "b": 44},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hoverlabel={"font": {"family": palette.FONT, "size": 12}},
        xaxis=axis,
        yaxis=axis,
    )
