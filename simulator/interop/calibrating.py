"""From measured runs to a calibration table: groups by stack and GPU, folds, spreads.

A group is a stack on a GPU type. Its fit starts from the stack's pooled fit over all GPUs, which
in turn starts from the neutral prior, so that a group with few rows stays near what its stack does
elsewhere, and a GPU without rows takes its stack's pooled values (leave-one-GPU-out measures how
good that is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from simulator.cost.calibration import BOUNDS, Tuning, tuning
from simulator.errors import Problem, UserError
from simulator.interop.fitting import (
    PRIOR_SIGMA,
    FitResult,
    TimedRun,
    fit,
    log_residuals,
    parameters_of,
    with_stack_times,
)
from simulator.interop.runs import RunCase
from simulator.interop.validation import measured_step_time_s

PARAMETERS = tuple(BOUNDS)

#: Rows of one source that a fit looks at; more of the same cluster add little but time.
ROWS_PER_SOURCE = 48

#: The same for the fits of held-out folds, which are many.
FOLD_ROWS = 12

#: A group with fewer rows than this takes its stack's pooled calibration.
SMALLEST_GROUP = 4

#: Priors of a group around its stack's pooled values, relative to those of the stack's own.
_GROUP_PRIOR = 0.7

#: Smallest believable log-spread of step times between runs of different people.
_SMALLEST_SIGMA = 0.03

Progress = Callable[[str], None]

_HEADER = """\
# Written by `gpumix calibrate`; read by simulator/cost/calibration.py, which says what each
# parameter means. low and high are the tenth and ninetieth percentile of the fit, rows counts
# the measured runs by the source that published them, sigma is the spread of the fit's errors.
"""


@dataclass(frozen=True)
class HeldOut:
    """Log errors of rows that the fit behind them has not seen, by left-out group."""

    by: Mapping[str, tuple[float, ...]]

    @property
    def all(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Every held-out log error."""
        return np.array([e for errors in self.by.values() for e in errors])


def timed_runs(cases: Iterable[RunCase]) -> list[TimedRun]:
    """Rows that trained, have a measured time and name their micro-batch."""
    found = []
    for case in cases:
        layout = case.layout
        if layout is None or case.candidates or case.row.text("outcome") not in ("", "ok"):
            continue
        lost = (1.0 - case.last_fraction) / layout.classes[0].micro_batches
        tokens = layout.workload.tokens_per_step * (1.0 - lost)
        measured = measured_step_time_s(case, layout, tokens)
        if measured is None or len({c.gpu.name for c in layout.classes}) > 1:
            continue
        if case.last_fraction < 1.0:
            # The rows' time is of fewer tokens than the layout's whole micro-batches.
            measured *= layout.workload.tokens_per_step / tokens
        source = case.row.text("source_id") or "unnamed"
        found.append(TimedRun(layout, measured, source, layout.classes[0].gpu.name))
    return found


def build_table(
    runs: Sequence[TimedRun],
    progress: Progress = lambda _: None,
    rows_per_source: int = ROWS_PER_SOURCE,
) -> dict[str, Any]:
    """The calibration of every stack and of every (stack, GPU) with rows enough.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("no run has what a fit needs: a layout and a measured time")
    groups: dict[str, Any] = {}
    for stack in sorted({r.layout.stack.name for r in runs}):
        rows = _sample([r for r in runs if r.layout.stack.name == stack], rows_per_source)
        progress(f"{stack}: {len(rows)} rows")
        pooled = fit(rows, with_stack_times(Tuning(), rows[0].layout), PARAMETERS)
        groups[stack] = _entry(pooled, rows, [r for r in runs if r.layout.stack.name == stack])
        for gpu in sorted({r.gpu for r in rows}):
            own_all = [r for r in runs if r.layout.stack.name == stack and r.gpu == gpu]
            if len(own_all) < SMALLEST_GROUP:
                continue
            own = _sample(own_all, rows_per_source)
            progress(f"{stack}/{gpu}: {len(own)} rows")
            prior = {k: v * _GROUP_PRIOR for k, v in PRIOR_SIGMA.items()}
            result = fit(own, replace(pooled.tuning), PARAMETERS, prior_sigma=prior)
            groups[f"{stack}/{gpu}"] = _entry(result, own, own_all)
    groups["any"] = _for_other_stacks([g for name, g in groups.items() if "/" not in name])
    return {"groups": groups}


def _for_other_stacks(stacks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a stack without rows takes: the middle of the others' GPU and network factors.

    Host times are a stack's own and stay as its file has them.
    """
    names = ("gemm", "attention", "memory", "network", "fabric")
    columns = {n: [g["parameters"][n]["value"] for g in stacks] for n in names}
    cells = {
        n: {
            "value": _rounded(float(np.median(v))),
            "low": _rounded(min(v)),
            "high": _rounded(max(v)),
        }
        for n, v in columns.items()
    }
    return {"parameters": cells, "rows": {}, "fitted_rows": 0, "sigma": _rounded(
        max(float(g["sigma"]) for g in stacks)
    )}  # fmt: skip


def _sample(runs: Sequence[TimedRun], limit: int) -> list[TimedRun]:
    """At most ``limit`` rows of every source and GPU, evenly spread over the file."""
    kept: list[TimedRun] = []
    for key in sorted({(r.source, r.gpu) for r in runs}):
        rows = [r for r in runs if (r.source, r.gpu) == key]
        step = max(len(rows) / limit, 1.0)
        kept.extend(rows[int(i * step)] for i in range(min(len(rows), limit)))
    return kept


def _entry(result: FitResult, rows: Sequence[TimedRun], everything: Sequence[TimedRun]) -> Any:
    values = parameters_of(result.tuning)
    cells = {
        name: {
            "value": _rounded(value),
            "low": _rounded(value * math.exp(-1.2816 * result.log_error.get(name, 0.0))),
            "high": _rounded(value * math.exp(1.2816 * result.log_error.get(name, 0.0))),
        }
        for name, value in values.items()
    }
    absolute = np.abs(np.expm1(result.residuals))
    counts: dict[str, int] = {}
    for run in everything:
        counts[run.source] = counts.get(run.source, 0) + 1
    return {
        "parameters": cells,
        "rows": counts,
        "fitted_rows": len(rows),
        "fit_error": {
            "mape": _rounded(float(absolute.mean())),
            "median": _rounded(float(np.median(absolute))),
        },
        "sigma": _rounded(spread_of(result.residuals)),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def spread_of(log_errors: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Log-spread whose p10 to p90 covers what the errors cover, at least _SMALLEST_SIGMA."""
    if len(log_errors) < 4:
        return _SMALLEST_SIGMA
    low, high = np.percentile(log_errors, [10, 90])
    return max(float(high - low) / 2.5631, float(np.median(np.abs(log_errors))), _SMALLEST_SIGMA)


def held_out(
    runs: Sequence[TimedRun], key: Callable[[TimedRun], str], progress: Progress = lambda _: None
) -> HeldOut:
    """Log errors of every group of runs under a calibration made without it.

    ``key`` names the group: the source for leave-one-source-out, the GPU for
    leave-one-GPU-out. At most ROWS_PER_SOURCE rows of a source and GPU are scored.
    """
    errors: dict[str, tuple[float, ...]] = {}
    for name in sorted({key(r) for r in runs}):
        out = _sample([r for r in runs if key(r) == name], ROWS_PER_SOURCE)
        stacks = {r.layout.stack.name for r in out}
        rest = [r for r in runs if key(r) != name and r.layout.stack.name in stacks]
        progress(f"without {name}: {len(rest)} rows left")
        table = build_table(rest, progress, FOLD_ROWS) if rest else {"groups": {}}
        errors[name] = tuple(_scored(out, table))
    return HeldOut(errors)


def _scored(runs: Sequence[TimedRun], table: Mapping[str, Any]) -> list[float]:
    found = []
    for run in runs:
        tuned = tuning(run.layout.stack.name, run.layout.classes[0].gpu, table)
        found.append(float(log_residuals([run], tuned)[0]))
    return found


def with_spreads(table: dict[str, Any], sources: HeldOut, gpus: HeldOut) -> dict[str, Any]:
    """The table with what held-out rows say about sureness.

    ``between_sources`` is the log-spread of errors on sources that a fit hasn't seen, and
    ``other_gpu`` on GPUs that it hasn't seen.
    """
    return {
        **table,
        "spread": {
            "between_sources": _rounded(spread_of(sources.all)),
            "other_gpu": _rounded(spread_of(gpus.all)),
        },
    }


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a calibration file, whole or not at all.

    Raises:
        UserError: the folder doesn't exist or can't be written.
    """
    text = _HEADER + yaml.safe_dump(dict(table), sort_keys=False)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(Problem("--out", f"{str(path)!r}: {error.strerror}")) from None
