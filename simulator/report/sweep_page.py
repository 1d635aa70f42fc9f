"""The report of a sweep: what is best, heat maps, parallel coordinates, all points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simulator.planner.sweep import best_row, differences, is_priced, ranked, reasons
from simulator.report import html
from simulator.report.prediction_page import versions_line
from simulator.report.sweep_figures import MEASURES, heat_map, heat_table, parallel_figure
from simulator.report.sweep_words import best_sentence, values_words
from simulator.report.words import gib, percent, probability
from simulator.spec.dump import dump_yaml
from simulator.units import format_seconds

if TYPE_CHECKING:
    from simulator.planner.sweep import Row, Sweep

#: Rows of the table; points.csv has all.
MAX_ROWS = 200


def sweep_page(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The whole page as text."""
    ordered = ranked(rows, sweep.risk)
    best = best_row(rows, sweep.risk)
    sections = [
        html.Section("maps", "Over the axes", _maps(sweep, rows)),
        html.Section("best", "What the best point changes", _best(sweep, best)),
        html.Section("points", "All points", _points(sweep, ordered)),
        html.Section("inputs", "Inputs", _inputs(sweep)),
    ]
    axes = " × ".join(f"{a.name} ({len(a.values)})" for a in sweep.axes)
    subtitle = f"{axes}; {len(rows):,} of {sweep.n_points:,} points; {sweep.evaluator}"
    lead = "\n".join([_verdict(sweep, ordered, best), html.notice("Notes", sweep.notes)])
    return html.page(sweep.title, sections, subtitle=subtitle, lead=lead, footer=versions_line())


def _verdict(sweep: Sweep, ordered: Sequence[Row], best: Row | None) -> str:
    text = best_sentence(sweep, ordered)
    head, _, rest = text.partition(": ")
    if best is None:
        return html.banner("does not fit", "Nothing fits", rest or text)
    return html.banner(
        "fits", f"{head.capitalize()}: {values_words(best)}", rest.partition(": ")[2]
    )


def _maps(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    table = heat_table(sweep, rows)
    maps = [
        html.figure(heat_map(sweep, table, measure), f"map-{n}")
        for n, measure in enumerate(MEASURES)
    ]
    pieces = [html.columns(*maps[:2]), html.columns(*maps[2:])]
    lines = parallel_figure(sweep, rows)
    if lines is not None and len(sweep.axes) > 1:
        pieces.append(html.figure(lines, "parallel"))
    return pieces


def _best(sweep: Sweep, best: Row | None) -> list[str]:
    if best is None:
        return [html.paragraph("No point fits at the accepted risk.")]
    changes = differences(sweep, best)
    if not changes:
        return [html.paragraph("The best point is what the scenario's file says.")]
    rows = [[name, _text(a), _text(b)] for name, (a, b) in changes.items()]
    return [html.table(["field", "in the file", "best"], rows)]


def _points(sweep: Sweep, ordered: Sequence[Row]) -> list[str]:
    names = [a.name for a in sweep.axes]
    head = [*names, "tokens/s", "per GPU", "step", "MFU", "GiB of GPU", "risk", "verdict or reason"]
    lines = [_line(row, names) for row in ordered[:MAX_ROWS]]
    pieces = [html.table(head, lines, numbers=range(len(names), len(head) - 1))]
    if len(ordered) > MAX_ROWS:
        pieces.append(html.paragraph(f"{len(ordered) - MAX_ROWS:,} more points in points.csv."))
    why = [f"{count:,} × {reason}" for reason, count in reasons(ordered).items()]
    pieces.append(html.listing("Impossible points by reason", why[:20]))
    return pieces


def _line(row: Row, names: Sequence[str]) -> list[str]:
    values = [_text(row["values"][name]) for name in names]
    if not is_priced(row):
        return [*values, *[""] * 6, row["reason"]]
    return [
        *values,
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        format_seconds(row["step_time_s"]),
        percent(row["mfu"]),
        f"{gib(row['device_bytes'])} of {gib(row['usable_bytes'])}",
        probability(row["oom_risk"]),
        row["status"],
    ]


def _inputs(sweep: Sweep) -> list[str]:
    data = dict(sweep.data) | {"sweep": {a.name: list(a.values) for a in sweep.axes}}
    return [html.code("The sweep as a scenario file", dump_yaml(data), is_open=True)]


def _text(value: Any) -> str:
    return "not said" if value is None else str(value)
