"""How far off predictions are: errors of time and memory, and how good the risks were.

Errors are relative, (predicted - measured) / measured, and stay fractions (0.05 is 5 %): ``mape``
is their mean absolute value, ``bias`` their median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from simulator.interop.validation import PEAK_COLUMNS, RunPrediction

#: Edges of the bins of predicted risk in the reliability table.
_RISK_EDGES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of one quantity over some rows, as fractions; None where no row counts.

    ``coverage`` is the share of measurements between p10 and p90.
    """

    n: int
    mape: float | None = None
    median_ape: float | None = None
    p90_ape: float | None = None
    bias: float | None = None
    coverage: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def summarise(errors: Sequence[float], inside: Sequence[bool] = ()) -> ErrorSummary:
    """Summary of relative errors; ``inside`` says which measurements lie in p10 to p90."""
    if not errors:
        return ErrorSummary(0)
    absolute = np.abs(errors)
    return ErrorSummary(
        n=len(errors),
        mape=float(absolute.mean()),
        median_ape=float(np.median(absolute)),
        p90_ape=float(np.percentile(absolute, 90)),
        bias=float(np.median(errors)),
        coverage=float(np.mean(inside)) if inside else None,
    )


def time_summary(rows: Iterable[RunPrediction]) -> ErrorSummary:
    """Step-time errors of the rows that have a measured time."""
    pairs = [(r.time_error, r.is_time_inside) for r in rows]
    return summarise(
        [error for error, _ in pairs if error is not None],
        [inside for _, inside in pairs if inside is not None],
    )


def memory_summary(rows: Iterable[RunPrediction], column: str) -> ErrorSummary:
    """Errors of one of the two peaks."""
    errors, inside = [], []
    for r in rows:
        error, predicted = r.memory_error(column), getattr(r, column)
        measured = r.case.row.number(column)
        if error is None or measured is None:
            continue
        errors.append(error)
        inside.append(predicted.p10 <= measured <= predicted.p90)
    return summarise(errors, inside)


def oom_summary(rows: Iterable[RunPrediction]) -> dict[str, Any]:
    """Confusion at 50 % and at 10 % risk, Brier score, and the 80 % rule on the same rows.

    ``false_fits`` failed but were given at most 50 % risk, ``false_ooms`` trained but were given
    more. ``calibration`` is the reliability table.
    """
    known = [
        (r.oom_risk, bool(r.failed), bool(r.eighty_percent_rule))
        for r in rows
        if r.failed is not None and r.oom_risk is not None
    ]
    result: dict[str, Any] = {"n": len(known), "failed": sum(f for _, f, _ in known)}
    result |= _confusion([(p > 0.5, f) for p, f, _ in known])
    result["brier"] = math.fsum((p - f) ** 2 for p, f, _ in known) / len(known) if known else None
    result["at_50_percent"] = _confusion([(p > 0.5, f) for p, f, _ in known])
    result["at_10_percent"] = _confusion([(p > 0.1, f) for p, f, _ in known])
    result["eighty_percent_rule"] = _confusion([(not ok, f) for _, f, ok in known])
    result["calibration"] = _reliability([(p, f) for p, f, _ in known])
    return result


def _confusion(rows: Sequence[tuple[bool, bool]]) -> dict[str, int]:
    """Counts from (said to run out, did run out)."""
    return {
        "false_fits": sum(f and not said for said, f in rows),
        "false_ooms": sum(said and not f for said, f in rows),
        "true_fits": sum(not said and not f for said, f in rows),
        "true_ooms": sum(said and f for said, f in rows),
    }


def _reliability(rows: Sequence[tuple[float, bool]]) -> list[dict[str, float]]:
    """Mean predicted risk and the share that failed, by bin of risk."""
    table = []
    for low, high in pairwise(_RISK_EDGES):
        inside = [(p, f) for p, f in rows if low <= p < high or (high == 1.0 and p == 1.0)]
        if inside:
            table.append({
                "from": low, "to": high, "n": len(inside),
                "predicted": float(np.mean([p for p, _ in inside])),
                "failed": float(np.mean([f for _, f in inside])),
            })  # fmt: skip
    return table


#: Ways of grouping rows, by name.
GROUPINGS: dict[str, Callable[[RunPrediction], str]] = {
    "source": lambda r: r.case.row.text("source_id") or "(no source)",
    "stack": lambda r: _layout_word(r, lambda la: la.stack.name),
    "gpu": lambda r: _layout_word(r, lambda la: " + ".join(la.cluster.counts())),
    "gpus": lambda r: _layout_word(r, lambda la: _size(la.n_gpus)),
    "parallelism": lambda r: _layout_word(r, lambda la: _degrees(la.plan)),
}


def groups(rows: Iterable[RunPrediction], by: str) -> dict[str, list[RunPrediction]]:
    """Rows by one of :data:`GROUPINGS`, groups in order of first appearance."""
    found: dict[str, list[RunPrediction]] = {}
    for row in rows:
        found.setdefault(GROUPINGS[by](row), []).append(row)
    return found


def _layout_word(row: RunPrediction, word: Callable[[Any], str]) -> str:
    return word(row.case.layout) if row.case.layout else "(not expressed)"


def _size(n_gpus: int) -> str:
    edges = ((1, "1 GPU"), (8, "2-8 GPUs"), (64, "9-64 GPUs"), (512, "65-512 GPUs"))
    return next((name for top, name in edges if n_gpus <= top), "over 512 GPUs")


def _degrees(plan: Any) -> str:
    used = [d for d in ("tp", "pp", "cp", "ep", "dp") if getattr(plan, d) > 1]
    kind = plan.sharding.name.lower()
    return "+".join(used or ["one GPU"]) + (f" {kind}" if kind != "none" else "")


def summary(rows: Sequence[RunPrediction]) -> dict[str, Any]:
    """The summary of some rows: time, the two peaks, running out of memory."""
    return {
        "rows": len(rows),
        "expressed": sum(r.is_expressed for r in rows),
        "time": time_summary(rows).to_json(),
        "memory": memory_summary(rows, PEAK_COLUMNS[0]).to_json(),
        "memory_reserved": memory_summary(rows, PEAK_COLUMNS[1]).to_json(),
        "oom": oom_summary(rows),
    }


def worst_rows(rows: Iterable[RunPrediction], count: int) -> list[RunPrediction]:
    """Rows with the greatest relative error of step time, greatest first."""
    timed = [r for r in rows if r.time_error is not None]
    return sorted(timed, key=lambda r: -abs(r.time_error or 0.0))[:count]
