"""From measured runs to a calibration table: groups by stack and GPU, folds, spreads.

A group is a stack on a GPU type. Host times (launches, overheads) belong to the stack: a pooled
fit over all its GPUs gives the prior of every group. Factors on kernels and links belong to the
GPU: every group is drawn to 1 anew. A GPU without rows takes the geometric mean of its stack's
groups, drawn to 1 as if by two neutral groups more; GPUs whose kernels were measured and GPUs whose
kernel rates are transferred make a mean each, since transferred rates are best cases
(leave-one-GPU-out measures how good that is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import hardware_db
from simulator.cost.calibration import BOUNDS, Tuning, tuning_from_mapping
from simulator.cost.kernel_rates import rates
from simulator.errors import Problem, UserError
from simulator.interop.fitting import (
    PRIOR_SIGMA,
    FitResult,
    LocalFit,
    TimedRun,
    fit,
    local_fit,
    log_residuals,
    parameters_of,
    with_stack_times,
)
from simulator.interop.runs import RunCase
from simulator.interop.validation import measured_step_time_s

PARAMETERS = tuple(BOUNDS)

#: Rows of one source that a fit looks at; more of the same cluster add little but time.
ROWS_PER_SOURCE = 48

#: A group with fewer rows than this takes its stack's pooled calibration.
SMALLEST_GROUP = 4

#: Parameters that belong to the stack and its host, not to the GPU.
HOST_PARAMETERS = ("dispatch_s", "sync_spread", "step_overhead_s", "micro_batch_overhead_s")
GPU_PARAMETERS = tuple(name for name in PARAMETERS if name not in HOST_PARAMETERS)

#: Priors of a group's host times around its stack's pooled ones, relative to the stack's own.
_HOST_PRIOR = 0.5

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
    """Log errors of rows that the fit behind them has not seen, by left-out group and by stack."""

    by: Mapping[str, tuple[float, ...]]
    by_stack: Mapping[str, tuple[float, ...]]


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
) -> dict[str, Any]:
    """The calibration of every stack and of every (stack, GPU) with rows enough.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("no run has what a fit needs: a layout and a measured time")
    groups: dict[str, Any] = {}
    for stack in sorted({r.layout.stack.name for r in runs}):
        everything = [r for r in runs if r.layout.stack.name == stack]
        rows = _sample(everything, ROWS_PER_SOURCE)
        progress(f"{stack}: {len(rows)} rows")
        neutral = with_stack_times(Tuning(), rows[0].layout)
        pooled = fit(rows, neutral, PARAMETERS, iterations=3, weights=_weights(rows))
        prior = _group_start(neutral, pooled.tuning)
        found: dict[str, Tuning] = {}
        for gpu in sorted({r.gpu for r in rows}):
            own_all = [r for r in everything if r.gpu == gpu]
            if len(own_all) < SMALLEST_GROUP:
                continue
            own = _sample(own_all, ROWS_PER_SOURCE)
            progress(f"{stack}/{gpu}: {len(own)} rows")
            result = fit(
                own,
                prior,
                PARAMETERS,
                iterations=6,
                prior_sigma=_GROUP_SIGMA,
                weights=_weights(own),
            )
            found[gpu] = result.tuning
            groups[f"{stack}/{gpu}"] = _entry(result, own, own_all)
        for measured, name in ((True, stack), (False, f"{stack}/transferred")):
            middle = _for_unseen_gpus(pooled.tuning, _alike(found, measured))
            near = [r for r in rows if is_measured(r.gpu) == measured] or rows
            scored = replace(pooled, tuning=middle, residuals=log_residuals(near, middle))
            groups[name] = _entry(scored, near, [r for r in everything if r in near])
    groups["any"] = _for_other_stacks([g for name, g in groups.items() if "/" not in name])
    return {"groups": groups}


_GROUP_SIGMA = {
    name: sigma * (_HOST_PRIOR if name in HOST_PARAMETERS else 1.0)
    for name, sigma in PRIOR_SIGMA.items()
}


#: Weight of "as alone" beside the groups that a mean is taken over.
_NEUTRAL_GROUPS = 2


def is_measured(gpu: str) -> bool:
    """Whether the kernel rates of a GPU were measured on it."""
    return rates(hardware_db.gpu(gpu)).basis == "measured"


def _alike(groups: Mapping[str, Tuning], measured: bool) -> list[Tuning]:
    """Calibrations of GPUs whose rates are (or aren't) measured; of all where there are none."""
    alike = [t for gpu, t in groups.items() if is_measured(gpu) == measured]
    return alike or list(groups.values())


def _weights(rows: Sequence[TimedRun]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Row weights of mean 1 that let a source count by the square root of its rows."""
    counts = {r.source: 0 for r in rows}
    for r in rows:
        counts[r.source] += 1
    weight = np.array([counts[r.source] ** -0.5 for r in rows])
    return np.asarray(weight * len(rows) / weight.sum())


def _group_start(neutral: Tuning, pooled: Tuning) -> Tuning:
    """Where a group's fit starts: neutral GPU factors, its stack's host times."""
    host: dict[str, Any] = {name: getattr(pooled, name) for name in HOST_PARAMETERS}
    return replace(neutral, **host)


def _for_unseen_gpus(pooled: Tuning, groups: Sequence[Tuning]) -> Tuning:
    """The stack's calibration on a GPU without rows: the groups' mean, drawn to 1."""
    values: dict[str, Any] = {}
    for name in GPU_PARAMETERS:
        logs = [math.log(getattr(g, name)) for g in groups]
        values[name] = math.exp(math.fsum(logs) / (len(logs) + _NEUTRAL_GROUPS))
    return replace(pooled, **values)


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


@dataclass(frozen=True)
class _Linear:
    """Log errors of a stack's rows as linear functions of log parameters around a fit."""

    runs: tuple[TimedRun, ...]
    local: LocalFit

    def rows(self, keep: Callable[[TimedRun], bool]) -> np.ndarray[Any, np.dtype[np.intp]]:
        return np.array([i for i, r in enumerate(self.runs) if keep(r)], np.intp)


def held_out(
    runs: Sequence[TimedRun],
    table: Mapping[str, Any],
    key: Callable[[TimedRun], str],
    progress: Progress = lambda _: None,
) -> HeldOut:
    """Log errors of every group of runs under a calibration made without it.

    ``key`` names the group: the source for leave-one-source-out, the GPU for
    leave-one-GPU-out. Refits without the group are solved on the rows' derivatives around the
    stack's pooled fit (one linear model for all folds); the errors of the held-out rows are then
    computed exactly. At most ROWS_PER_SOURCE rows of a source and GPU take part.
    """
    errors: dict[str, list[float]] = {}
    stacks: dict[str, list[float]] = {}
    for stack in sorted({r.layout.stack.name for r in runs}):
        rows = tuple(_sample([r for r in runs if r.layout.stack.name == stack], ROWS_PER_SOURCE))
        progress(f"derivatives of {len(rows)} {stack} rows")
        start = with_stack_times(tuning_of(table, stack), rows[0].layout)
        linear = _Linear(rows, local_fit(rows, start, PARAMETERS))
        neutral = with_stack_times(Tuning(), rows[0].layout)
        for name in sorted({key(r) for r in rows}):
            scored = _fold(linear, name, key, neutral)
            errors.setdefault(name, []).extend(scored)
            stacks.setdefault(stack, []).extend(scored)
    return HeldOut(
        {k: tuple(v) for k, v in errors.items()}, {k: tuple(v) for k, v in stacks.items()}
    )


def _fold(
    linear: _Linear, name: str, key: Callable[[TimedRun], str], neutral: Tuning
) -> list[float]:
    """Exact log errors of one held-out group under refits without it."""
    rest = linear.rows(lambda r: key(r) != name)
    pooled = linear.local.solve(rest, neutral, PRIOR_SIGMA) if len(rest) else neutral
    prior = _group_start(neutral, pooled)
    groups: dict[str, Tuning] = {}
    for gpu in {r.gpu for r in linear.runs}:
        near = linear.rows(lambda r, g=gpu: key(r) != name and r.gpu == g)  # type: ignore[misc]
        if len(near) >= SMALLEST_GROUP:
            groups[gpu] = linear.local.solve(near, prior, _GROUP_SIGMA)
    unseen = {
        measured: _for_unseen_gpus(prior, _alike(groups, measured)) for measured in (True, False)
    }
    found = []
    for run in linear.runs:
        if key(run) == name:
            tuned = groups.get(run.gpu, unseen[is_measured(run.gpu)])
            found.extend(log_residuals([run], tuned).tolist())
    return found


def tuning_of(table: Mapping[str, Any], stack: str) -> Tuning:
    """The pooled calibration of a stack in a table."""
    return tuning_from_mapping(table["groups"][stack]["parameters"], stack)


def with_spreads(table: dict[str, Any], sources: HeldOut, gpus: HeldOut) -> dict[str, Any]:
    """The table with what held-out rows say about sureness.

    By stack, ``between_sources`` is the log-spread of errors on sources that a fit hasn't seen
    and ``other_gpu`` on GPUs that it hasn't seen.
    """
    return {
        **table,
        "spread": {
            stack: {
                "between_sources": _rounded(spread_of(np.array(sources.by_stack[stack]))),
                "other_gpu": _rounded(spread_of(np.array(gpus.by_stack[stack]))),
            }
            for stack in sorted(sources.by_stack)
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
