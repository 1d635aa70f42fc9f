"""Fit a stack's calibration on a GPU to measured step times: few bounded factors with priors.

The fit minimises, over parameters in log space, a robust sum of log errors (Huber, so that a few
contradicting rows don't bend it) plus a Gaussian prior around the starting values. Gauss-Newton
with numerical derivatives; no dependency beyond numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hardware_db.schema import GpuSpec
from simulator.cost.calibration import BOUNDS, Tuning
from simulator.cost.pieces import Memo
from simulator.cost.pricing import price_layout
from simulator.evaluate.closed_form import closed_form
from simulator.spec.layout import Layout

Array = npt.NDArray[np.float64]

#: Log-spread of the prior of each parameter: factors stay near 1, host times are little known.
PRIOR_SIGMA: Mapping[str, float] = {
    "gemm": 0.15,
    "attention": 0.3,
    "memory": 0.3,
    "network": 0.3,
    "fabric": 0.3,
    "dispatch_s": 1.0,
    "sync_spread": 1.0,
    "step_overhead_s": 0.7,
    "micro_batch_overhead_s": 0.7,
}

#: Weight of one standard deviation of the prior against one row that is off by ROW_SCALE.
ROW_SCALE = 0.04
_HUBER = 1.5
_STEP = 0.02
_MAX_STEP = 0.5


@dataclass(frozen=True)
class TimedRun:
    """A layout with its measured step time; ``source`` and ``gpu`` group the folds."""

    layout: Layout
    measured_s: float
    source: str
    gpu: str
    last_fraction: float = 1.0
    memo: dict[tuple[str, int], Memo] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class FitResult:
    """Fitted parameters with standard errors in log space, and the residuals of the fit's rows."""

    tuning: Tuning
    log_error: Mapping[str, float]
    residuals: Array
    n: int


def predicted_s(run: TimedRun, tuned: Tuning) -> float:
    """Closed-form step time of a run under a calibration."""

    def same(_: GpuSpec) -> Tuning:
        return tuned

    return float(closed_form(run.layout, price_layout(run.layout, same, run.memo)).step_time_s)


def log_residuals(runs: Sequence[TimedRun], tuned: Tuning) -> Array:
    """log(predicted / measured) of every run."""
    return np.array([math.log(predicted_s(r, tuned) / r.measured_s) for r in runs])


def fit(
    runs: Sequence[TimedRun],
    start: Tuning,
    names: Sequence[str],
    *,
    iterations: int = 8,
    prior_sigma: Mapping[str, float] = PRIOR_SIGMA,
    weights: Array | None = None,
) -> FitResult:
    """Fit ``names`` of a calibration to measured runs, starting from and drawn to ``start``.

    Raises:
        ValueError: no runs, or a name that isn't a parameter.
    """
    if not runs:
        raise ValueError("a fit needs at least one run")
    unknown = set(names) - set(BOUNDS)
    if unknown:
        raise ValueError(f"unknown parameters {sorted(unknown)}")
    prior = np.array([math.log(max(_get(start, n), 1e-9)) for n in names])
    sigma = np.array([prior_sigma[n] for n in names])
    row_weight = np.ones(len(runs)) if weights is None else weights
    x = prior.copy()
    found = log_residuals(runs, _put(start, names, x))
    for _ in range(iterations):
        jacobian = _jacobian(runs, start, names, x, found)
        step = _newton_step(jacobian, found, x - prior, sigma, row_weight)
        x_new = _bounded(names, x + np.clip(step, -_MAX_STEP, _MAX_STEP))
        new = log_residuals(runs, _put(start, names, x_new))
        if _loss(new, x_new - prior, sigma, row_weight) >= _loss(
            found, x - prior, sigma, row_weight
        ):
            x_new = _bounded(names, x + 0.3 * np.clip(step, -_MAX_STEP, _MAX_STEP))
            new = log_residuals(runs, _put(start, names, x_new))
            if _loss(new, x_new - prior, sigma, row_weight) >= _loss(
                found, x - prior, sigma, row_weight
            ):
                break
        moved = float(np.abs(x_new - x).max())
        x, found = x_new, new
        if moved < 2e-3:
            break
    error = _standard_errors(_jacobian(runs, start, names, x, found), found, sigma, row_weight)
    tuned = replace(_put(start, names, x), basis="fitted")
    return FitResult(tuned, dict(zip(names, error.tolist(), strict=True)), found, len(runs))


def _get(tuned: Tuning, name: str) -> float:
    value = getattr(tuned, name)
    if value is None:
        raise ValueError(f"{name} needs a starting value")
    return float(value)


def _put(start: Tuning, names: Sequence[str], x: Array) -> Tuning:
    values: dict[str, Any] = {n: float(math.exp(v)) for n, v in zip(names, x, strict=True)}
    return replace(start, **values)


def _bounded(names: Sequence[str], x: Array) -> Array:
    low = np.array([math.log(max(BOUNDS[n][0], 1e-6)) for n in names])
    high = np.array([math.log(BOUNDS[n][1]) for n in names])
    return np.clip(x, low, high)


def _jacobian(
    runs: Sequence[TimedRun], start: Tuning, names: Sequence[str], x: Array, at: Array
) -> Array:
    columns = []
    for i in range(len(names)):
        moved = x.copy()
        moved[i] += _STEP
        columns.append((log_residuals(runs, _put(start, names, moved)) - at) / _STEP)
    return np.stack(columns, axis=1)


def _huber_weight(residuals: Array) -> Array:
    scaled = np.abs(residuals) / ROW_SCALE
    return np.where(scaled <= _HUBER, 1.0, _HUBER / np.maximum(scaled, 1e-12))


def _loss(residuals: Array, away: Array, sigma: Array, row_weight: Array) -> float:
    scaled = np.abs(residuals) / ROW_SCALE
    rows = np.where(scaled <= _HUBER, 0.5 * scaled**2, _HUBER * (scaled - 0.5 * _HUBER))
    return float(np.sum(row_weight * rows) + 0.5 * np.sum((away / sigma) ** 2))


def _newton_step(
    jacobian: Array, residuals: Array, away: Array, sigma: Array, row_weight: Array
) -> Array:
    weight = row_weight * _huber_weight(residuals) / ROW_SCALE**2
    normal = (jacobian * weight[:, None]).T @ jacobian + np.diag(1.0 / sigma**2)
    gradient = (jacobian * weight[:, None]).T @ residuals + away / sigma**2
    return np.asarray(-np.linalg.solve(normal, gradient))


def _standard_errors(jacobian: Array, residuals: Array, sigma: Array, row_weight: Array) -> Array:
    weight = row_weight * _huber_weight(residuals) / ROW_SCALE**2
    normal = (jacobian * weight[:, None]).T @ jacobian + np.diag(1.0 / sigma**2)
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(normal))))


def with_stack_times(start: Tuning, layout: Layout) -> Tuning:
    """A calibration whose host times are the stack's own where it has none."""
    framework = layout.stack.framework
    defaults = {
        "dispatch_s": framework.dispatch_s,
        "step_overhead_s": framework.step_overhead_s,
        "micro_batch_overhead_s": max(framework.micro_batch_overhead_s, 1e-5),
    }
    missing: dict[str, Any] = {k: v for k, v in defaults.items() if getattr(start, k) is None}
    if start.sync_spread == 0:
        missing["sync_spread"] = 0.05
    return replace(start, **missing)


def parameters_of(tuned: Tuning) -> dict[str, float]:
    """The numbers of a calibration by name."""
    return {
        f.name: float(getattr(tuned, f.name))
        for f in fields(tuned)
        if f.name != "basis" and getattr(tuned, f.name) is not None
    }


@dataclass(frozen=True)
class LocalFit:
    """Rows' log errors and their derivatives around one point; solves refits on subsets of rows."""

    names: tuple[str, ...]
    point: Array
    errors: Array
    jacobian: Array

    def solve(
        self, rows: npt.NDArray[np.intp], prior: Tuning, sigma: Mapping[str, float]
    ) -> Tuning:
        """Parameters that fit ``rows`` best, drawn to ``prior``, inside the bounds."""
        centre = np.array([math.log(max(_get(prior, n), 1e-9)) for n in self.names])
        spread = np.array([sigma[n] for n in self.names])
        jacobian, weight = self.jacobian[rows], np.ones(len(rows))
        x = centre.copy()
        for _ in range(12):
            errors = self.errors[rows] + jacobian @ (x - self.point)
            step = _newton_step(jacobian, errors, x - centre, spread, weight)
            x = _bounded(self.names, x + np.clip(step, -_MAX_STEP, _MAX_STEP))
        return _put(prior, self.names, x)


def local_fit(runs: Sequence[TimedRun], at: Tuning, names: Sequence[str]) -> LocalFit:
    """Derivatives of every run's log error around a calibration."""
    point = np.array([math.log(max(_get(at, n), 1e-9)) for n in names])
    errors = log_residuals(runs, at)
    return LocalFit(tuple(names), point, errors, _jacobian(runs, at, names, point, errors))
