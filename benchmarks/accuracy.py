"""How far predictions are off on the public measured tables, by source, with held-out folds.

    python -m benchmarks.accuracy --data DIR [--folds] [--json] [--doc docs/accuracy.md]

``DIR`` holds ``runs/*.csv`` and ``layers.csv`` in the format of ``gpumix validate``. Without
``--folds`` the shipped calibration predicts every row; with them each row is also predicted by
fits that have not seen its source, or its GPU (minutes).
"""

from __future__ import annotations

import argparse
import json as json_module
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import hardware_db
from simulator.cost.calibration import step_calibration
from simulator.cost.kernel_rates import calibration, rates
from simulator.errors import UserError
from simulator.interop.calibrating import held_out, timed_runs
from simulator.interop.layers import LayerPrediction, layer_summary, predict_layers
from simulator.interop.run_rows import read_table
from simulator.interop.runs import run_case
from simulator.interop.summaries import oom_summary, summarise, summary, worst_rows
from simulator.interop.validation import RunPrediction, predict_run

Progress = Callable[[str], None]

#: Plans of one model on one cluster that make a ranking.
SMALLEST_RANKING = 10
#: A plan with more risk than this is not chosen.
ACCEPTED_RISK = 0.5


def _silent(_: str) -> None:
    return None


def run(json: bool = False, *, data: Path | None = None, folds: bool = False) -> dict[str, Any]:
    """Errors by source, rankings, memory, risks, layers and, with ``folds``, held-out errors.

    ``data`` defaults to the folder that ``GPUMIX_DATA`` names; ``json`` leaves progress out.

    Raises:
        UserError: no folder is named, or it has no ``runs`` with tables.
    """
    folder = data or (Path(os.environ["GPUMIX_DATA"]) if "GPUMIX_DATA" in os.environ else None)
    if folder is None:
        raise UserError("name the folder of measured tables: --data DIR, or GPUMIX_DATA")
    tables = sorted((folder / "runs").glob("*.csv"))
    if not tables:
        raise UserError(f"{folder}/runs has no CSV tables")
    say: Progress = _silent if json else lambda text: print(text, file=sys.stderr, flush=True)
    start = time.perf_counter()
    rows: dict[str, list[RunPrediction]] = {}
    for path in tables:
        say(path.stem)
        rows[path.stem] = [predict_run(run_case(row)) for row in read_table(path).rows]
    elapsed = time.perf_counter() - start
    everything = [r for part in rows.values() for r in part]
    figures: dict[str, Any] = {
        "sources": {name: summary(part) for name, part in rows.items()},
        "all": summary(everything),
        "rankings": {name: found for name, part in rows.items() if (found := rankings(part))},
        "worst": [_worst(r) for r in worst_rows(everything, 10)],
        "oom": oom_summary(everything),
        "rows_per_s": len(everything) / elapsed,
        "rows_per_reference_loop": len(everything) / elapsed * _reference_loop_s(),
    }
    layers = folder / "layers.csv"
    if layers.is_file():
        figures["layers"] = layer_errors(layers)
    if folds:
        figures["folds"] = fold_errors(rows, say)
    return figures


def _reference_loop_s() -> float:
    """A fixed pure Python loop: how fast this machine is just now."""
    start = time.perf_counter()
    total = 0
    for n in range(1_000_000):
        total += n & 7
    return (time.perf_counter() - start) if total else math.nan


def _worst(r: RunPrediction) -> dict[str, Any]:
    row = r.case.row
    assert r.seconds is not None and r.step_time_s is not None
    total = max(sum(r.seconds.values()), 1e-12)
    return {
        "table": Path(row.source).stem, "line": row.line,
        "model": row.text("model") or f"{row.text('layers')}x{row.text('hidden')}",
        "gpus": f"{row.text('n_gpus')} {row.text('gpu')}",
        "plan": " ".join(f"{d}{row.text(d)}" for d in ("tp", "pp", "dp") if row.text(d)),
        "measured_s": r.measured_step_time_s, "predicted_s": r.step_time_s.p50,
        "error": r.time_error, "largest": r.largest, "share": r.seconds[r.largest] / total,
        "assumptions": list(r.case.assumptions),
    }  # fmt: skip


def rankings(rows: Sequence[RunPrediction]) -> dict[str, Any] | None:
    """Rank correlation and regret over groups of plans of one model on one cluster.

    Plans are ranked by tokens per second. ``regret`` is how much slower the plan ranked first
    among those given at most half a risk is than the best measured one; 1 where it failed.
    """
    found: dict[tuple[str, ...], list[RunPrediction]] = {}
    for r in rows:
        if r.is_expressed and (r.measured_step_time_s or r.failed):
            key = tuple(
                r.case.row.text(c)
                for c in ("model", "layers", "hidden", "seq_len", "gpu", "n_gpus", "precision")
            )
            found.setdefault(key, []).append(r)
    groups = [part for part in found.values() if len(part) >= SMALLEST_RANKING]
    scored = [score for part in groups if (score := _rank(part)) is not None]
    if not scored:
        return None
    rho = np.array([s[0] for s in scored])
    regret = np.array([s[1] for s in scored])
    return {
        "groups": len(scored), "plans": int(sum(len(p) for p in groups)),
        "spearman": float(np.median(rho)), "spearman_worst": float(rho.min()),
        "regret": float(np.median(regret)), "regret_worst": float(regret.max()),
    }  # fmt: skip


def _rank(rows: Sequence[RunPrediction]) -> tuple[float, float] | None:
    timed = [r for r in rows if r.measured_step_time_s and not r.failed]
    pairs = np.array([(_rate(r, predicted=True), _rate(r, predicted=False)) for r in timed])
    if len(pairs) < SMALLEST_RANKING or np.ptp(pairs[:, 1]) == 0:
        return None
    allowed = [r for r in rows if (r.oom_risk or 0.0) <= ACCEPTED_RISK]
    first = max(allowed or rows, key=lambda r: _rate(r, predicted=True))
    got = 0.0 if first.failed else _rate(first, predicted=False)
    return spearman(pairs[:, 0], pairs[:, 1]), float(1.0 - got / pairs[:, 1].max())


def _rate(r: RunPrediction, *, predicted: bool) -> float:
    """Tokens per second and GPU, predicted or measured."""
    assert r.tokens_per_s_per_gpu is not None and r.step_time_s is not None
    rate = r.tokens_per_s_per_gpu.p50
    if predicted:
        return rate
    assert r.measured_step_time_s is not None
    return rate * r.step_time_s.p50 / r.measured_step_time_s


def spearman(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Rank correlation; equal values share their mean rank."""
    first, second = _ranks(a), _ranks(b)
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts + ends - 1) / 2.0)[inverse])


def layer_errors(path: Path) -> dict[str, Any]:
    """Layer table errors: with each GPU's own kernel rates, and with another GPU's in their place.

    A GPU whose rates stand in for its whole compute capability has no other to take and is left
    out of the second.
    """
    rows = list(read_table(path).rows)
    seen = predict_layers(rows)
    references = set(calibration()["references"].values())
    names = {r.gpu for r in seen if r.gpu and r.gpu not in references}
    unseen = _transferred([r for r in seen if r.gpu in names])
    return {
        "seen": layer_summary(seen),
        "unseen": layer_summary(unseen),
        "stand_in": {n: rates(_stranger(n)).basis for n in sorted(names)},
    }


def _stranger(name: str) -> Any:
    """The GPU as if nobody had measured it."""
    return replace(hardware_db.gpu(name), name=f"{name} (not measured)")


def _transferred(rows: Sequence[LayerPrediction]) -> list[LayerPrediction]:
    return predict_layers([r.row for r in rows], lambda spec: rates(_stranger(spec.name)))


def fold_errors(rows: dict[str, list[RunPrediction]], say: Progress) -> dict[str, Any]:
    """Errors of rows that the fit behind them has not seen, by left-out table and by GPU."""
    runs = []
    for name, part in rows.items():
        runs += [replace(t, source=name) for t in timed_runs([r.case for r in part])]
    found: dict[str, Any] = {}
    for label, key in (("source", lambda r: r.source), ("gpu", lambda r: r.gpu)):
        errors = held_out(runs, step_calibration(), key, say).by
        found[label] = {
            name: summarise([math.expm1(e) for e in logs]).to_json()
            for name, logs in errors.items()
            if logs
        }
        every = [math.expm1(e) for logs in errors.values() for e in logs]
        found[label]["all"] = summarise(every).to_json()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the measured tables")
    parser.add_argument("--folds", action="store_true", help="leave-one-out fits too (minutes)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--doc", type=Path, help="write the page")
    given = parser.parse_args(arguments)
    try:
        figures = run(given.json, data=given.data, folds=given.folds)
    except UserError as error:
        parser.error(str(error))
    if given.doc:
        from benchmarks.accuracy_page import page

        given.doc.write_text(page(figures), encoding="utf-8")
    if given.json:
        print(json_module.dumps(figures, indent=2, allow_nan=False))
    elif not given.doc:
        from benchmarks.accuracy_page import page

        print(page(figures))


if __name__ == "__main__":
    main()
