"""Tables of measurements to one result: predictions of every row and the document about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.interop.layers import LayerPrediction, layer_summary, predict_layers
from simulator.interop.run_rows import Table
from simulator.interop.runs import run_case
from simulator.interop.summaries import GROUPINGS, groups, summary
from simulator.interop.validation import RunPrediction, predict_run


@dataclass(frozen=True)
class Validation:
    """Predictions of all rows of all tables, in the order given."""

    runs: tuple[RunPrediction, ...]
    layers: tuple[LayerPrediction, ...]


def predict_tables(tables: Sequence[Table], *, stack: str | None = None) -> Validation:
    """Predict every row; ``stack`` replaces the rows' own."""
    runs: list[RunPrediction] = []
    layers: list[LayerPrediction] = []
    for table in tables:
        if table.kind == "layers":
            layers += predict_layers(table.rows)
        else:
            runs += [predict_run(run_case(row, stack=stack)) for row in table.rows]
    return Validation(tuple(runs), tuple(layers))


def document(result: Validation) -> dict[str, Any]:
    """The JSON document: summary, the same by group, rows, and what could not be expressed."""
    total = summary(result.runs)
    if result.layers:
        total["layers"] = layer_summary(result.layers)
    rows = [r.to_json() for r in result.runs] + [r.to_json() for r in result.layers]
    assumed = Counter(text for r in result.runs for text in r.case.assumptions)
    assumed.update(text for r in result.layers for text in r.assumptions)
    return {
        "summary": total,
        "by": {
            name: {group: summary(rows) for group, rows in groups(result.runs, name).items()}
            for name in GROUPINGS
        }
        if result.runs
        else {},
        "inexpressible": [
            {"file": r["file"], "line": r["line"], "reason": r["reason"]}
            for r in rows
            if not r["expressible"]
        ],
        "assumptions": dict(assumed.most_common()),
        "rows": rows,
    }
