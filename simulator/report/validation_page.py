"""The report of a validation: predicted against measured, errors by group, the worst rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.report import html, palette
from simulator.report.figures import Drawing
from simulator.report.prediction_page import versions_line
from simulator.report.words import percent, signed_percent, time_label
from simulator.report.write import REPORT, RESULT, write_files

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from simulator.interop.validate import Validation
    from simulator.interop.validation import RunPrediction

#: Rows in the table of the worst.
WORST_ROWS = 20
#: Sources that get a scatter of their own; the tables hold all.
MAX_SCATTERS = 24
#: Half-width of the band in the scatters.
BAND = 0.1

_GROUP_WORDS = {
    "source": "source", "stack": "stack", "gpu": "GPU", "gpus": "number of GPUs",
    "parallelism": "parallelism",
}  # fmt: skip


def write_validation(out: Path, result: Validation, found: dict[str, Any]) -> Path:
    """Write report.html, result.json and rows.csv; returns the path of report.html.

    Raises:
        UserError: ``out`` can't be written.
    """
    document = json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)
    texts = {
        RESULT: document + "\n",
        "rows.csv": _rows_csv(found["rows"]),
        REPORT: validation_page(result, found),
    }
    write_files(out, texts)
    return out / REPORT


def validation_page(result: Validation, found: dict[str, Any]) -> str:
    """The whole page as text."""
    sections = []
    if result.runs:
        sections += [
            html.Section("scatter", "Predicted against measured", _scatters(result.runs)),
            html.Section("groups", "Errors by group", _group_tables(found["by"])),
            html.Section("oom", "Running out of memory", _oom(found["summary"]["oom"])),
            html.Section("worst", f"The {WORST_ROWS} worst rows", [_worst(result.runs)]),
        ]
    if result.layers:
        sections.append(html.Section("layers", "Layers", [_layers(found["summary"]["layers"])]))
    sections.append(html.Section("basis", "What this rests on", _basis(found)))
    title = "Predicted against measured"
    subtitle = f"{len(result.runs):,} runs and {len(result.layers):,} layers"
    return html.page(
        title, sections, subtitle=subtitle, lead=_figures(found["summary"]), footer=versions_line()
    )


def _figures(total: dict[str, Any]) -> str:
    """Key figures of time, memory and risk, as far as there are rows for them."""
    items = []
    for key, name in (
        ("time", "step time"), ("memory", "peak allocated"), ("memory_reserved", "peak reserved"),
        ("layers", "layer time"),
    ):  # fmt: skip
        part = total.get(key)
        if part and part["n"]:
            remark = (
                f"mean absolute error of {part['n']:,}; median {percent(part['median_ape'])}, "
                f"90 % within {percent(part['p90_ape'])}, bias {signed_percent(part['bias'])}"
            )
            items.append((name, percent(part["mape"]), remark))
    oom = total["oom"]
    if oom["n"]:
        remark = f"failed but predicted to fit, of {oom['failed']} that failed"
        items.append(("false fits", str(oom["false_fits"]), remark))
        remark = f"trained but predicted to fail, of {oom['n'] - oom['failed']:,} that trained"
        items.append(("false alarms", str(oom["false_ooms"]), remark))
    return html.cards(items)


def _scatters(runs: Sequence[RunPrediction]) -> list[str]:
    from simulator.interop.summaries import groups

    pieces = []
    parts = [
        (name, [r for r in rows if r.time_error is not None])
        for name, rows in groups(runs, "source").items()
    ]
    for index, (name, rows) in enumerate(p for p in parts if p[1]):
        if index == MAX_SCATTERS:
            pieces.append(html.paragraph(f"Only the first {MAX_SCATTERS} sources are drawn."))
            break
        pieces.append(html.figure(scatter(name, rows), f"scatter-{index}"))
    return pieces or [html.paragraph("No row has a measured time.")]


def scatter(source: str, rows: Sequence[RunPrediction]) -> Drawing:
    """Predicted over measured step time of one source, with the band, by GPU type."""
    import plotly.graph_objects as go

    from simulator.interop.summaries import groups, time_summary

    figure = go.Figure()
    measured = [r.measured_step_time_s or 0.0 for r in rows]
    span = [0.8 * min(measured), 1.25 * max(measured)]
    for factor, dash in ((1.0 - BAND, "dot"), (1.0, "solid"), (1.0 + BAND, "dot")):
        figure.add_scatter(
            x=span, y=[factor * s for s in span], mode="lines", showlegend=False,
            hoverinfo="skip", line={"color": palette.OTHER, "width": 1.5, "dash": dash},
        )  # fmt: skip
    for index, (gpu, part) in enumerate(groups(rows, "gpu").items()):
        colour = palette.LINE_COLOURS[index % len(palette.LINE_COLOURS)]
        _points(figure, gpu, part, colour)
    axis = {"type": "log", "gridcolor": palette.GRID, "zeroline": False}
    figure.update_layout(
        height=420, margin={"l": 70, "r": 20, "t": 10, "b": 55},
        paper_bgcolor=palette.SURFACE, plot_bgcolor=palette.SURFACE,
        font={"family": palette.FONT, "size": 13, "color": palette.INK},
        xaxis=axis | {"title": {"text": "measured step time, s"}},
        yaxis=axis | {"title": {"text": "predicted step time, s"}},
    )  # fmt: skip
    total = time_summary(rows)
    assert total.mape is not None and total.bias is not None
    inside = sum(abs(r.time_error or 0.0) <= BAND for r in rows) / len(rows)
    title = f"{source}: {percent(inside)} of {len(rows):,} rows within {percent(BAND)}"
    caption = (
        f"Mean absolute error {percent(total.mape)}, bias {signed_percent(total.bias)}. The solid "
        f"line is a perfect prediction, the dotted ones are {percent(BAND)} off it. Both axes are "
        "logarithmic."
    )
    return Drawing(title, caption, figure, zoomable=True)


def _points(figure: go.Figure, name: str, rows: Sequence[RunPrediction], colour: str) -> None:
    figure.add_scatter(
        name=name, mode="markers",
        x=[r.measured_step_time_s for r in rows],
        y=[r.step_time_s.p50 if r.step_time_s else None for r in rows],
        text=[_where(r) for r in rows],
        line={"color": colour, "dash": "solid"}, marker={"color": colour, "size": 6},
        hovertemplate="%{text}<br>measured %{x:.4g} s, predicted %{y:.4g} s<extra></extra>",
    )  # fmt: skip


def _where(r: RunPrediction) -> str:
    from html import escape

    row = r.case.row
    return escape(f"line {row.line}: {row.text('model') or row.text('arch')}")


def _group_tables(by: dict[str, Any]) -> list[str]:
    columns = ["", "rows", "predicted", "mean", "median", "90 %", "bias", "in p10–p90",
               "allocated, mean", "reserved, mean"]  # fmt: skip
    pieces = []
    for name, parts in by.items():
        rows = [
            [
                group, f"{s['rows']:,}", f"{s['expressed']:,}", _share(s["time"]["mape"]),
                _share(s["time"]["median_ape"]), _share(s["time"]["p90_ape"]),
                "" if s["time"]["bias"] is None else signed_percent(s["time"]["bias"]),
                _share(s["time"]["coverage"]), _share(s["memory"]["mape"]),
                _share(s["memory_reserved"]["mape"]),
            ]
            for group, s in parts.items()
        ]  # fmt: skip
        caption = f"By {_GROUP_WORDS[name]}"
        pieces.append(html.table(columns, rows, numbers=range(1, 10), caption=caption))
    return pieces


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


def _oom(oom: dict[str, Any]) -> list[str]:
    if not oom["n"]:
        return [html.paragraph("No row says whether the run had enough memory.")]
    names = {"at_50_percent": "risk over 50 %", "at_10_percent": "risk over 10 %",
             "eighty_percent_rule": "80 % rule (arXiv 2411.06465)"}  # fmt: skip
    keys = ("true_ooms", "false_fits", "true_fits", "false_ooms")
    rows = [[name, *(f"{oom[key][k]:,}" for k in keys)] for key, name in names.items()]
    columns = ["said to run out where", "failed, foreseen", "failed, missed", "trained, foreseen",
               "trained, false alarm"]  # fmt: skip
    bins = [
        [f"{percent(b['from'])} to {percent(b['to'])}", f"{b['n']:,}", percent(b["predicted"]),
         percent(b["failed"])]
        for b in oom["calibration"]
    ]  # fmt: skip
    return [
        html.table(columns, rows, numbers=range(1, 5)),
        html.paragraph(f"Brier score {oom['brier']:.4f} (0 is perfect)."),
        html.table(["predicted risk", "rows", "mean prediction", "share that failed"], bins,
                   numbers=(1, 2, 3), caption="Reliability"),
    ]  # fmt: skip


def _worst(runs: Sequence[RunPrediction]) -> str:
    from simulator.interop.summaries import worst_rows

    rows = []
    for r in worst_rows(runs, WORST_ROWS):
        row, step = r.case.row, r.step_time_s
        assert step is not None and r.seconds is not None and r.time_error is not None
        share = r.seconds[r.largest] / max(sum(r.seconds.values()), 1e-12)
        rows.append([
            f"{Path(row.source).name}:{row.line}", row.text("source_id"),
            row.text("model") or row.text("arch"), f"{row.text('n_gpus')} {row.text('gpu')}",
            f"{r.measured_step_time_s:.4g}", f"{step.p50:.4g}", signed_percent(r.time_error),
            f"{time_label(r.largest)} ({percent(share)})",
        ])  # fmt: skip
    columns = ["row", "source", "model", "GPUs", "measured, s", "predicted, s", "error",
               "largest part of the predicted step"]  # fmt: skip
    return html.table(columns, rows, numbers=(4, 5, 6))


def _layers(total: dict[str, Any]) -> str:
    rows = [
        [gpu, f"{s['n']:,}", *(_share(s[k]) for k in ("median_ape", "mape", "p90_ape")),
         signed_percent(s["bias"])]
        for gpu, s in total["by_gpu"].items()
    ]  # fmt: skip
    columns = ["GPU", "times", "median", "mean", "90 %", "bias"]
    return html.table(columns, rows, numbers=range(1, 6))


def _basis(found: dict[str, Any]) -> list[str]:
    missing = [f"{r['file']}:{r['line']}: {r['reason']}" for r in found["inexpressible"]]
    assumed = [f"{n:,} rows: {text}" for text, n in found["assumptions"].items()]
    return [
        html.listing("Rows that could not be predicted", missing[:200]),
        html.listing("Assumed where a row doesn't say", assumed),
        html.paragraph(
            "Errors are (predicted − measured) / measured. Ranges are from the tenth to the "
            "ninetieth percentile of the prediction."
        ),
    ]


def _rows_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Every row with all its columns; nested values are left to result.json."""
    names = list(dict.fromkeys(n for row in rows for n, v in row.items() if not _is_nested(v)))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | dict)
