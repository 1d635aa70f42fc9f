"""Figures of a purchase: cost against time, cash flow, what costs are made of, what decides."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from simulator.planner.purchase_verdict import amount_text, compact, significant
from simulator.report import palette
from simulator.report.figures import Drawing, frame
from simulator.report.words import percent
from simulator.units import SECONDS_PER_DAY

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from simulator.planner.purchase_result import CandidateResult, PurchaseResult

#: Components of cost in stacking order, with their colours; income is stacked below zero.
COST_COLOURS = {
    "hardware": "#1b5299",
    "network": "#7fb2e5",
    "installation": "#9ad8c6",
    "interest": "#59626d",
    "hosting": "#e69f00",
    "electricity": "#c8501e",
    "maintenance": "#8e4585",
    "staff": "#0b7a75",
    "rent": "#f7dc8b",
    "value lost by what stood": "#d3d8de",
    "resale": "#4dbb9f",
}
_ROW_PX = 30
_MAX_ROWS = 12


def colour_of(index: int) -> str:
    """Colour of the candidate in a place, the same in every figure."""
    return palette.LINE_COLOURS[index % len(palette.LINE_COLOURS)]


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates, from left to right."""
    best = float("inf")
    front = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if points[index][1] < best:
            best = points[index][1]
            front.append(index)
    return front


def cost_time_figure(result: PurchaseResult) -> Drawing:
    """Total cost against the time of a run, with whiskers from p10 to p90 and the front."""
    import plotly.graph_objects as go

    shown = [(i, c) for i, c in enumerate(result.candidates) if c.fits]
    figure = go.Figure()
    points = [
        (c.ranges["time_to_train_s"].p50 / SECONDS_PER_DAY, c.ranges["cost_per_1e9_tokens"].p50)
        for _, c in shown
    ]
    able = [i for i, (_, c) in enumerate(shown) if c.is_feasible] or list(range(len(shown)))
    front = [able[i] for i in pareto([points[i] for i in able])]
    if len(front) > 1:
        figure.add_scatter(
            name="no other is faster and cheaper", mode="lines",
            x=[points[i][0] for i in front], y=[points[i][1] for i in front],
            line={"color": palette.GRID, "width": 6, "dash": "solid"}, hoverinfo="skip",
        )  # fmt: skip
    for (place, c), (x, y) in zip(shown, points, strict=True):
        time, cost = c.ranges["time_to_train_s"], c.ranges["cost_per_1e9_tokens"]
        figure.add_scatter(
            name=escape(c.name), mode="markers", x=[x], y=[y],
            marker={"color": colour_of(place), "size": 13,
                    "symbol": "circle" if c.is_feasible else "x"},
            line={"color": colour_of(place), "dash": "solid"},
            error_x=_whisker(time.p10 / SECONDS_PER_DAY, x, time.p90 / SECONDS_PER_DAY, place),
            error_y=_whisker(cost.p10, y, cost.p90, place),
            hovertemplate=f"{escape(c.name)}<br>%{{x:.3~g}} days<br>"
            f"%{{y:,.3~g}} {result.currency} per 10<sup>9</sup> tokens<extra></extra>",
        )  # fmt: skip
    frame(figure, 430)
    figure.update_xaxes(title="days for one run of every workload")
    figure.update_yaxes(title=f"{result.currency} per 10⁹ tokens", rangemode="tozero",
                        tickformat=",")  # fmt: skip
    names = " and ".join(repr(shown[i][1].name) for i in front[:3])
    title = f"Nothing is both faster and cheaper than {names}" if front else "Nothing fits"
    caption = (
        "Medians with whiskers from the tenth to the ninetieth percentile. A cross breaks a "
        "constraint. Of those that don't, the grey line joins the ones worth choosing from; lower "
        "and further left is better."
    )
    return Drawing(title, caption, figure)


def _whisker(low: float, middle: float, high: float, place: int) -> dict[str, object]:
    return {
        "type": "data", "symmetric": False, "array": [high - middle], "arrayminus": [middle - low],
        "thickness": 1.2, "width": 4, "color": colour_of(place),
    }  # fmt: skip


def cash_figure(result: PurchaseResult) -> Drawing:
    """Money spent so far over the horizon, one line per candidate."""
    import plotly.graph_objects as go

    figure = go.Figure()
    shown = [(i, c) for i, c in enumerate(result.candidates) if c.fits]
    for place, c in shown:
        spent = list(accumulate(-amount for _, amount in c.cash_flow))
        figure.add_scatter(
            name=escape(c.name), mode="lines", x=[month for month, _ in c.cash_flow], y=spent,
            line={"color": colour_of(place), "width": 2, "shape": "hv",
                  "dash": palette.LINE_DASHES[place % len(palette.LINE_DASHES)]},
            hovertemplate=f"{escape(c.name)}: %{{y:,.3~s}} {result.currency} after %{{x:.0f}} "
            "months<extra></extra>",
        )  # fmt: skip
    frame(figure, 380)
    figure.update_xaxes(title="months from today", rangemode="tozero", dtick=6)
    figure.update_yaxes(title=f"spent so far, {result.currency}", tickformat=",.3~s")
    peak = max(shown, key=lambda s: _most_spent(s[1]))[1] if shown else None
    title = (
        f"{peak.name!r} ties up most: {compact(_most_spent(peak))} {result.currency}"
        if peak
        else "Nothing fits"
    )
    caption = (
        "At the medians, before discounting. Purchases and loans are paid as agreed, running costs "
        "every quarter; the fall at the end is the sale of what is left."
    )
    return Drawing(title, caption, figure)


def _most_spent(c: CandidateResult) -> float:
    return max(accumulate(-amount for _, amount in c.cash_flow), default=0.0)


def costs_figure(result: PurchaseResult) -> Drawing:
    """What the total of each candidate is made of."""
    import plotly.graph_objects as go

    shown = [c for c in result.candidates if c.fits][:_MAX_ROWS]
    figure = go.Figure()
    for component, colour in COST_COLOURS.items():
        values = [c.costs.get(component, 0.0) for c in shown]
        if not any(values):
            continue
        figure.add_bar(
            name=escape(component), orientation="h", y=list(range(len(shown))), x=values,
            marker={"color": colour, "line": {"color": palette.SURFACE, "width": 1}},
            hovertemplate=f"{escape(component)}: %{{x:,.3~s}} {result.currency}<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        mode="markers", showlegend=False, y=list(range(len(shown))),
        x=[c.ranges["total_cost"].p50 for c in shown],
        marker={"color": palette.INK, "symbol": "diamond", "size": 8},
        hovertemplate=f"total: %{{x:,.3~s}} {result.currency}<extra></extra>",
    )  # fmt: skip
    _rows(figure, [escape(c.name) for c in shown], f"{result.currency} over the horizon")
    figure.update_layout(barmode="relative")
    figure.update_xaxes(tickformat=",.3~s")
    largest = max(shown[0].costs.items(), key=lambda item: item[1]) if shown else ("", 0.0)
    title = f"Of {shown[0].name!r}, most goes into {largest[0]}" if shown else "Nothing fits"
    caption = (
        "Medians over the horizon. Left of zero is what selling at the end brings back; the "
        "diamond is the total's median over all draws."
    )
    return Drawing(title, caption, figure)


def tornado_figure(result: PurchaseResult) -> Drawing:
    """How far each uncertain input moves the lead of the first candidate over the second."""
    import plotly.graph_objects as go

    swings = result.tornado[:_MAX_ROWS]
    figure = go.Figure()
    rivals = result.feasible[:2]
    for name, colour, side in (
        ("input at its tenth percentile", "#7fb2e5", "low"),
        ("input at its ninetieth percentile", "#1b5299", "high"),
    ):
        base = [result.lead] * len(swings)
        ends = [s.at_low if side == "low" else s.at_high for s in swings]
        inputs = [s.low_input if side == "low" else s.high_input for s in swings]
        figure.add_bar(
            name=name, orientation="h", y=list(range(len(swings))), base=base,
            x=[end - b for end, b in zip(ends, base, strict=True)],
            customdata=[[significant(v), amount_text(e, result.objective, result.currency)]
                        for v, e in zip(inputs, ends, strict=True)],
            marker={"color": colour, "line": {"color": palette.SURFACE, "width": 1}},
            hovertemplate="at %{customdata[0]}: %{customdata[1]}<extra></extra>",
        )  # fmt: skip
    _rows(figure, [escape(s.name) for s in swings], _lead_words(result))
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(tickformat=",.3~s", zeroline=True, zerolinecolor=palette.INK,
                        zerolinewidth=1.5)  # fmt: skip
    title = f"Most depends on the {swings[0].name}" if swings else "Nothing is uncertain"
    caption = (
        "One input at a time goes from its tenth to its ninetieth percentile, the others stay at "
        "their medians. "
    )
    if len(rivals) == 2:
        caption += (
            f"Right of the line at zero {rivals[0].name!r} stays ahead of {rivals[1].name!r}; a "
            "bar that crosses it can turn the decision."
        )
    return Drawing(title, caption, figure)


def _lead_words(result: PurchaseResult) -> str:
    units = {
        "cost_per_1e9_tokens": f"{result.currency} per 10⁹ tokens",
        "total_cost": result.currency,
        "time_to_train_s": "s",
        "energy_kwh": "kWh",
    }
    lead = "lead of the first over the second, " if len(result.feasible) > 1 else ""
    return lead + units[result.objective]


def headroom_figure(result: PurchaseResult) -> Drawing:
    """Free memory of the fullest GPU by candidate and workload."""
    import plotly.graph_objects as go

    shown = list(result.candidates)[:_MAX_ROWS]
    figure = go.Figure()
    for n, name in enumerate(result.workload_names):
        found = [w for c in shown for w in c.workloads if w.name == name]
        figure.add_bar(
            name=escape(name), orientation="h", y=list(range(len(shown))),
            x=[w.headroom for w in found], text=[percent(w.headroom) for w in found],
            marker={"color": colour_of(n), "line": {"color": palette.SURFACE, "width": 1}},
            hovertemplate=f"{escape(name)}: %{{x:.0%}} free<extra></extra>",
        )  # fmt: skip
    _rows(figure, [escape(c.name) for c in shown], "free share of the fullest GPU's memory",
          len(result.workload_names))  # fmt: skip
    figure.update_layout(barmode="group")
    figure.update_xaxes(tickformat=".0%", zeroline=True, zerolinecolor=palette.INK)
    least = min(shown, key=lambda c: c.headroom)
    title = f"{least.name!r} has least room: {percent(max(least.headroom, 0.0))} free"
    if least.headroom < 0:
        title = f"{least.name!r} doesn't fit: {percent(-least.headroom)} too little memory"
    caption = "At the median of the memory estimate, under each candidate's best plan."
    return Drawing(title, caption, figure)


def _rows(figure: go.Figure, labels: Sequence[str], x_title: str, bars: int = 1) -> None:
    frame(figure, 90 + (_ROW_PX + 14 * (bars - 1)) * max(len(labels), 2))
    figure.update_layout(bargap=0.3, dragmode=False)
    figure.update_xaxes(title=x_title, fixedrange=True)
    figure.update_yaxes(
        tickmode="array", tickvals=list(range(len(labels))), ticktext=list(labels),
        range=[len(labels) - 0.5, -0.5], fixedrange=True, showgrid=False, ticks="",
    )  # fmt: skip
