"""``gpumix validate``: measured runs in, predicted against measured out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.commands.console import JsonOption, print_json, print_table, stderr_console

if TYPE_CHECKING:
    from simulator.interop.validation import RunPrediction


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS.csv", help="Tables of measured runs or layers, or folders."),
    ],
    stack: Annotated[
        str | None, typer.Option("--stack", help="Predict every row as this stack would run it.")
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write report.html, result.json, rows.csv."),
    ] = None,
    worst: Annotated[
        int, typer.Option("--worst", min=0, max=10_000, help="How many of the worst rows to show.")
    ] = 10,
) -> None:
    """Predict measured runs: errors of time and memory, and how good the OOM risks were."""
    from simulator.interop.run_rows import read_tables
    from simulator.interop.validate import document, predict_tables

    if stack is not None:
        from simulator.spec.stack import load_stack

        load_stack(stack)  # an unknown name is refused before anything is predicted
    if out is not None:
        from simulator.report.write import prepare_directory

        prepare_directory(out)
    tables = read_tables(runs)
    if json:
        result = predict_tables(tables, stack=stack)
    else:
        with stderr_console().status(f"predicting {sum(len(t.rows) for t in tables):,} rows"):
            result = predict_tables(tables, stack=stack)
    found = document(result)
    if json:
        print_json(found)
    else:
        _print(result.runs, found, worst)
    if out is not None:
        from simulator.report.validation_page import write_validation

        report = write_validation(out, result, found)
        stderr_console().print(f"report: {report}")


def _print(runs: tuple[RunPrediction, ...], found: dict[str, Any], worst: int) -> None:
    """Tables for a person: errors by source, stack and GPU, what can't be told, the worst rows."""
    from simulator.interop.summaries import groups, summary, worst_rows
    from simulator.report.words import percent, time_label

    for by in ("source", "stack", "gpu") if runs else ():
        parts = [(name, summary(rows)) for name, rows in groups(runs, by).items()]
        if len(parts) == 1 and by != "source":
            continue
        rows = [_summary_cells(name, part) for name, part in parts]
        if by == "source" and len(rows) > 1:
            rows.append(_summary_cells("all rows", found["summary"]))
        print_table(_headings(by), rows, right=range(1, 11))
    if "layers" in found["summary"]:
        layers = found["summary"]["layers"]
        rows = [_layer_cells(name, part) for name, part in layers["by_gpu"].items()]
        print_table(_LAYER_HEADINGS, [*rows, _layer_cells("all", layers)], right=range(1, 6))
    if worst and (chosen := worst_rows(runs, worst)):
        print_table(
            ["worst rows", "model", "gpu", "measured s", "predicted s", "error", "largest part"],
            [_worst_cells(r, percent, time_label) for r in chosen],
            right=(3, 4, 5),
        )
    for text in _left_out(found):
        stderr_console().print(text, soft_wrap=True)


_LAYER_HEADINGS = ["layers by GPU", "rows", "median", "mean", "90 %", "bias"]


def _headings(by: str) -> list[str]:
    return [
        f"by {by}", "rows", "told", "time MAPE", "median", "90 %", "bias", "in p10-p90",
        "allocated", "reserved", "false fit/OOM",
    ]  # fmt: skip


def _summary_cells(name: str, part: dict[str, Any]) -> list[str]:
    time, oom = part["time"], part["oom"]
    return [
        name, str(part["rows"]), str(part["expressed"]), _cell(time["mape"]),
        _cell(time["median_ape"]), _cell(time["p90_ape"]), _cell(time["bias"], signed=True),
        _cell(time["coverage"]), _cell(part["memory"]["mape"]),
        _cell(part["memory_reserved"]["mape"]),
        f"{oom['false_fits']}/{oom['false_ooms']} of {oom['n']}" if oom["n"] else "",
    ]  # fmt: skip


def _layer_cells(name: str, part: dict[str, Any]) -> list[str]:
    return [name, str(part["n"]), _cell(part["median_ape"]), _cell(part["mape"]),
            _cell(part["p90_ape"]), _cell(part["bias"], signed=True)]  # fmt: skip


def _worst_cells(r: RunPrediction, percent: Any, time_label: Any) -> list[str]:
    row = r.case.row
    assert r.step_time_s is not None and r.seconds is not None
    share = r.seconds[r.largest] / max(sum(r.seconds.values()), 1e-12)
    return [
        f"{Path(row.source).name}:{row.line}", row.text("model") or row.text("arch"),
        f"{row.text('n_gpus')} {row.text('gpu')}", f"{r.measured_step_time_s:.4g}",
        f"{r.step_time_s.p50:.4g}", _cell(r.time_error, signed=True),
        f"{time_label(r.largest)} {percent(share)}",
    ]  # fmt: skip


def _cell(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _left_out(found: dict[str, Any]) -> list[str]:
    """Rows that could not be predicted, by reason; then what was assumed, by assumption."""
    lines = []
    for item in found["inexpressible"][:20]:
        lines.append(f"{item['file']}:{item['line']}: not predicted: {item['reason']}")
    more = len(found["inexpressible"]) - 20
    if more > 0:
        lines.append(f"and {more} more rows not predicted (--json lists them)")
    lines += [
        f"assumed for {n:,} row{'s' * (n > 1)}: {text}" for text, n in found["assumptions"].items()
    ]
    return lines
