"""Puts a sweep into a directory: report.html, points.csv and, where pyarrow is there, Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.planner.sweep import FIGURES, ranked
from simulator.report.write import prepare_directory, write_files

if TYPE_CHECKING:
    import pandas as pd

    from simulator.planner.sweep import Row, Sweep

CSV, PARQUET, REPORT = "points.csv", "points.parquet", "report.html"


def write_sweep(out: Path, sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Write all files; returns a line for each, and one for Parquet where it can't be written.

    Raises:
        UserError: the directory can't be written.
    """
    from simulator.report.sweep_page import sweep_page

    prepare_directory(out)
    table = points_table(sweep, rows)
    texts = {
        CSV: table.to_csv(index=False, lineterminator="\n"),
        REPORT: sweep_page(sweep, rows),
    }
    write_files(out, texts)
    lines = [f"report: {out / REPORT}", f"table: {out / CSV}"]
    try:
        table.to_parquet(out / PARQUET, index=False)
    except ImportError:
        return [*lines, "no Parquet: pyarrow isn't installed (pip install pyarrow)"]
    return [*lines, f"table: {out / PARQUET}"]


def points_table(sweep: Sweep, rows: Sequence[Row]) -> pd.DataFrame:
    """One line per point, best first: axes, verdict, reason, figures; empty where not priced."""
    import pandas as pd

    lines = []
    for row in ranked(rows, sweep.risk):
        line: dict[str, Any] = {axis.name: _cell(row["values"][axis.name]) for axis in sweep.axes}
        line |= {"index": row["index"], "status": row["status"], "reason": row["reason"]}
        line |= {name: row.get(name) for name in FIGURES}
        lines.append(line)
    columns = [axis.name for axis in sweep.axes]
    columns += ["index", "status", "reason", *FIGURES]
    return pd.DataFrame(lines, columns=columns)


def _cell(value: Any) -> Any:
    """Numbers and words as they are, everything else as text: a column needs one kind."""
    return value if isinstance(value, (int, float, str)) or value is None else str(value)
