"""How sure a predicted time is, before and after calibration.

The spread is lognormal: ``sigma`` is the standard deviation of the log of measured over predicted.
Until a calibration of the stack exists it is a prior, and the prediction says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from simulator.analysis.prediction import Range
from simulator.cost.calibration import step_calibration
from simulator.cost.kernel_rates import rates
from simulator.spec.layout import Layout

#: Prior sigma of log(measured/predicted) step time: the 8 to 15 % mean errors that analytical
#: predictors report on runs they were not fitted to (vTrain, arXiv 2312.12391 tables; Calculon).
PRIOR_TIME_SIGMA = 0.12

_Z90 = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class TimeSpread:
    """Bias (log of the median ratio) and sigma of step-time errors, and where they are from."""

    sigma: float
    bias: float = 0.0
    basis: str = "prior"


def prior_time_spread(n_gpu_types: int, transferred: bool) -> TimeSpread:
    """Wider for mixed clusters and for GPUs whose kernel rates were transferred."""
    sigma = PRIOR_TIME_SIGMA * (1.25 if n_gpu_types > 1 else 1.0) * (1.5 if transferred else 1.0)
    return TimeSpread(sigma)


def layout_time_spread(layout: Layout, table: Mapping[str, Any] | None = None) -> TimeSpread:
    """Spread of a layout's step time from the calibration, widest over its GPU types.

    A calibrated (stack, GPU) has the spread of errors on sources that a fit hadn't seen; a GPU
    that takes its stack's pooled calibration the spread on unseen GPUs; without either the prior
    stands.
    """
    found = step_calibration() if table is None else table
    groups, spread = found.get("groups", {}), found.get("spread", {})
    gpus = list({c.gpu.name: c.gpu for c in layout.classes}.values())
    stack = layout.stack.name
    if stack not in spread:
        return prior_time_spread(len(gpus), any(rates(g).basis != "measured" for g in gpus))
    widest, basis = 0.0, ""
    for gpu in gpus:
        key = f"{stack}/{gpu.name}"
        own = key in groups
        sigma = max(
            float(spread[stack]["between_sources" if own else "other_gpu"]),
            float(groups[key if own else stack]["sigma"]),
        )
        if sigma > widest:
            widest = sigma
            basis = "errors on unseen sources" if own else "errors on unseen GPUs"
    return TimeSpread(widest, basis=basis)


def time_range(step_time_s: float, spread: TimeSpread) -> Range:
    """p10, p50, p90 of the step time."""
    median = step_time_s * math.exp(spread.bias)
    factor = math.exp(_Z90 * spread.sigma)
    return Range(median / factor, median, median * factor)


def rate_range(amount: float, time: Range) -> Range:
    """Percentiles of amount per second for a time with the given percentiles."""
    return Range(amount / time.p90, amount / time.p50, amount / time.p10)
