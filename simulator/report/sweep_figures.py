"""Figures of a sweep: heat maps over two axes and parallel coordinates over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from simulator.planner.sweep import is_priced, ranked
from simulator.report.figures import Drawing, frame
from simulator.report.sweep_words import values_words
from simulator.report.words import percent, probability
from simulator.units import GIB

if TYPE_CHECKING:
    from simulator.planner.axes import Axis
    from simulator.planner.sweep import Row, Sweep

#: Light to dark in lightness too, so that it reads without colour.
_GOOD = [[0.0, "#eef4fb"], [0.5, "#5b9bd5"], [1.0, "#123a70"]]
_BAD = [[0.0, "#fbf3e4"], [0.5, "#e69f00"], [1.0, "#7a1f17"]]
_LEFT_OUT = "#c9ced6"
#: Cells with their value written in them, at most.
_MAX_TEXTS = 150
_MAX_LINES = 2000
#: Values of a third axis that stand side by side.
_MAX_FACETS = 4


@dataclass(frozen=True)
class Measure:
    """What a heat map shows: name, value of a row, text of a value, colours."""

    name: str
    unit: str
    value: Callable[[Row], float]
    text: Callable[[float], str]
    colours: list[list[Any]]


MEASURES = (
    Measure("Throughput", "tokens/s", lambda r: float(r["tokens_per_s"]),
            lambda v: f"{v:,.3g}" if v < 1000 else f"{v:,.0f}", _GOOD),
    Measure("MFU", "share of the dense peak", lambda r: float(r["mfu"]), percent, _GOOD),
    Measure("Memory of the fullest GPU", "share of usable", lambda r: _fill(r), percent, _BAD),
    Measure("Risk of running out of memory", "probability", lambda r: float(r["oom_risk"]),
            probability, _BAD),
)  # fmt: skip


def _fill(row: Row) -> float:
    return float(row["device_bytes"]) / float(row["usable_bytes"])


@dataclass(frozen=True)
class Table:
    """Rows and columns of a heat map, each the values of one axis or, for columns, of two.

    ``cells`` holds the best point of each cell over the axes that are on neither side.
    """

    down: Axis
    across: tuple[Axis, ...]
    columns: tuple[tuple[Any, ...], ...]
    cells: dict[tuple[int, int], Row]

    def values(self, measure: Measure) -> list[list[float | None]]:
        """The measure by row and column; None where nothing is priced."""
        return [
            [
                measure.value(row) if (row := self.cells.get((y, x))) and is_priced(row) else None
                for x in range(len(self.columns))
            ]
            for y in range(len(self.down.values))
        ]

    def names(self, y: int, x: int) -> str:
        """A cell in words."""
        pairs = [(self.down.name, self.down.values[y])]
        pairs += [(a.name, v) for a, v in zip(self.across, self.columns[x], strict=True)]
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in pairs)


def heat_table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """The sweep over its longest axes: one down, one across, a short third across too."""
    order = sorted(range(len(sweep.axes)), key=lambda i: -len(sweep.axes[i].values))
    down, across = sorted(order[:2])[0], sorted(order[:2])[1:]
    if len(order) > 2 and len(sweep.axes[order[2]].values) <= _MAX_FACETS:
        across = [order[2], *across]
    axes = tuple(sweep.axes[i] for i in across)
    columns = tuple(itertools.product(*(axis.values for axis in axes)))
    x_of = {repr(values): x for x, values in enumerate(columns)}
    y_of = {repr(value): y for y, value in enumerate(sweep.axes[down].values)}
    cells: dict[tuple[int, int], Row] = {}
    for row in ranked(rows, sweep.risk):
        x = x_of[repr(tuple(row["values"][axis.name] for axis in axes))]
        cells.setdefault((y_of[repr(row["values"][sweep.axes[down].name])], x), row)
    return Table(sweep.axes[down], axes, columns, cells)


def heat_map(sweep: Sweep, table: Table, measure: Measure) -> Drawing:
    """One measure over the axes of ``table``."""
    import plotly.graph_objects as go

    values = table.values(measure)
    places = [[(y, x) for x in range(len(table.columns))] for y in range(len(values))]
    is_small = len(values) * len(table.columns) <= _MAX_TEXTS
    figure = go.Figure()
    figure.add_heatmap(
        z=values,
        x=list(range(len(table.columns))),
        y=list(range(len(values))),
        text=[[_cell_text(table, measure, *place) for place in line] for line in places],
        texttemplate="%{text}" if is_small else None,
        hovertext=[[_hover(table.cells.get(place)) for place in line] for line in places],
        hovertemplate="%{hovertext}<extra></extra>",
        colorscale=measure.colours,
        showscale=not is_small,
        colorbar={"thickness": 10, "outlinewidth": 0},
        hoverongaps=True,
        xgap=2,
        ygap=2,
        **_limits(values, measure),
    )
    frame(figure, 110 + 46 * max(len(values), 3))
    figure.update_layout(plot_bgcolor=_LEFT_OUT, dragmode=False)
    plain = {"showgrid": False, "fixedrange": True, "tickangle": 0, "tickmode": "array"}
    figure.update_xaxes(
        title=escape(" × ".join(a.name for a in table.across)),
        tickvals=list(range(len(table.columns))),
        ticktext=_column_labels(table),
        **plain,
    )
    figure.update_yaxes(
        title=escape(table.down.name),
        tickvals=list(range(len(values))),
        ticktext=[_label(value) for value in table.down.values],
        autorange="reversed",
        **plain,
    )
    shown = (table.down, *table.across)
    others = ", ".join(a.name for a in sweep.axes if a not in shown)
    over = f" Each cell is the best point over {others}." if others else ""
    marks = " ✗ marks what does not fit, ! what is risky." if measure.colours is _GOOD else ""
    caption = f"{measure.unit}. Grey cells are impossible; hover for the reason.{marks}{over}"
    return Drawing(_finding(table, measure, values), caption, figure)


def _limits(values: list[list[float | None]], measure: Measure) -> dict[str, float]:
    """Ends of the colour scale: shares from 0, rates from the lowest."""
    found = [v for line in values for v in line if v is not None] or [0.0]
    if measure.colours is _BAD:
        return {"zmin": 0.0, "zmax": 1.0}
    return {"zmin": min(found), "zmax": max(found)}


def _cell_text(table: Table, measure: Measure, y: int, x: int) -> str:
    row = table.cells.get((y, x))
    if row is None or not is_priced(row):
        return "–"
    mark = ""
    if measure.colours is _GOOD:
        mark = {"does not fit": " ✗", "risky": " !"}.get(row["status"], "")
    return measure.text(measure.value(row)) + mark


def _hover(row: Row | None) -> str:
    if row is None:
        return "not yet priced"
    words = escape(values_words(row))
    if not is_priced(row):
        return f"{words}<br>impossible: {escape(row['reason'])}"
    return (
        f"{words}<br>{row['tokens_per_s']:,.0f} tokens/s, MFU {percent(row['mfu'])}"
        f"<br>{row['device_bytes'] / GIB:.1f} of {row['usable_bytes'] / GIB:.1f} GiB, "
        f"risk {probability(row['oom_risk'])}"
    )


def _finding(table: Table, measure: Measure, values: list[list[float | None]]) -> str:
    """What the map shows: where a rate is highest among what fits, or how much fits."""
    shown = [row for row in table.cells.values() if is_priced(row)]
    fits = [place for place, row in table.cells.items() if row["status"] == "fits"]
    if measure.colours is _BAD:
        return f"{measure.name}: {len(fits)} of {len(shown)} fit"
    if not fits:
        return f"{measure.name}: nothing fits"
    y, x = max(fits, key=lambda place: values[place[0]][place[1]] or 0.0)
    best = measure.text(values[y][x] or 0.0)
    return f"{measure.name} of what fits is highest at {table.names(y, x)}: {best}"


def _column_labels(table: Table) -> list[str]:
    """Values of the inner axis; the outer one's once in the middle of its block."""
    inner = len(table.across[-1].values) if table.across else 1
    labels = []
    for x, column in enumerate(table.columns):
        outer = column[:-1] if x % inner == (inner - 1) // 2 else ()
        labels.append("<br>".join(_label(value) for value in (*column[-1:], *outer)))
    return labels


def parallel_figure(sweep: Sweep, rows: Sequence[Row]) -> Drawing | None:
    """All axes and measures side by side, a line per point; None where nothing was priced."""
    import plotly.graph_objects as go

    priced = [r for r in ranked(rows, sweep.risk) if is_priced(r)]
    lines = priced[:_MAX_LINES]
    if not lines:
        return None
    dimensions = []
    for axis in sweep.axes:
        number = {repr(v): i for i, v in enumerate(axis.values)}
        dimensions.append(
            {
                "label": axis.name,
                "values": [number[repr(r["values"][axis.name])] for r in lines],
                "tickvals": list(range(len(axis.values))),
                "ticktext": [_label(v) for v in axis.values],
            }
        )
    for measure in MEASURES:
        dimensions.append({"label": measure.name, "values": [measure.value(r) for r in lines]})
    rates = [float(r["tokens_per_s"]) for r in lines]
    figure = go.Figure(
        go.Parcoords(
            line={"color": rates, "colorscale": _GOOD, "showscale": False},
            dimensions=dimensions,
            labelfont={"size": 11},
        )
    )
    frame(figure, 420)
    figure.update_layout(margin={"l": 60, "r": 60, "t": 60, "b": 30})
    left = len(priced) - len(lines)
    more = f" The slowest {left:,} points are left out." if left else ""
    caption = f"A line is a point, darker is faster. Drag along an axis to select.{more}"
    return Drawing("Every point that is possible", caption, figure)


def _label(value: Any) -> str:
    return "none" if value is None else escape(str(value))
