"""Risk of running out of memory: the probability that a step needs more than the GPU has.

Until a calibration replaces it, the error of the estimate is a stated prior: lognormal, with its
own relative spread for what torch allocates, for fragmentation and for what lies outside the
allocator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.cost.memory import MemoryBreakdown

FloatArray = npt.NDArray[np.float64]

#: Share of the GPU's memory under which none of 454 runs failed (arXiv 2411.06465 section 4.1).
SAFE_SHARE = 0.8

#: Standard normal quantile of 90 %.
_Z90 = 1.2815515655446004


@dataclass(frozen=True)
class MemorySpread:
    """Relative standard deviations of an estimate's parts, and where they come from.

    ``allocated`` of what torch allocates, ``fragmentation`` of reserved minus allocated,
    ``framework`` of the CUDA context and NCCL buffers. ``assumptions`` are sentences for a person.
    """

    allocated: float
    fragmentation: float
    framework: float
    assumptions: tuple[str, ...]


def _prior(allocated: float, why: str, *stack_assumptions: str) -> MemorySpread:
    return MemorySpread(
        allocated,
        fragmentation=0.5,
        framework=0.3,
        assumptions=(
            f"allocated memory is off by {allocated:.0%} (one standard deviation): {why}",
            "fragmentation is off by half of itself: measured reserved/allocated ratios differ "
            "that much between similar runs",
            "CUDA context and NCCL buffers are off by 30 %: they depend on driver, NCCL version "
            "and topology",
            "errors are independent between the three parts and lognormal in sum",
            "nothing else uses the GPU",
            *stack_assumptions,
        ),
    )


#: Prior by stack.
PRIOR_SPREADS: dict[str, MemorySpread] = {
    "megatron-core": _prior(
        0.02,
        "within 1 % on published peaks of one software version",
        "cross-entropy is fused (--cross-entropy-loss-fusion); unfused it takes about 8 bytes "
        "more per logit",
    ),
    "torchtitan": _prior(
        0.03,
        "within 3 % on published reserved peaks",
        "cross-entropy is torch's own in fp32; compiled or chunked losses take less",
    ),
    "megatron-deepspeed": _prior(0.05, "few published peaks, precision and version often unsaid"),
    "composer-fsdp": _prior(
        0.05,
        "no published peaks, only runs that fitted",
        "cross-entropy is flash-attention's fused one (LLM Foundry's default)",
    ),
    "gpumix": _prior(0.04, "not yet compared with measured runs"),
}
_UNKNOWN = _prior(0.08, "no measurements of this stack")


def prior_spread(stack: str) -> MemorySpread:
    """The prior of a stack by name; a wide one for stacks without measurements."""
    return PRIOR_SPREADS.get(stack, _UNKNOWN)


@dataclass(frozen=True)
class MemoryRisk:
    """OOM probability and quantiles of device memory; arrays over rows.

    ``sigma`` is the lognormal's, of the memory needed. ``safe_by_80_percent_rule`` is the rule of
    arXiv 2411.06465 on the same estimate, as the comparison.
    """

    oom_risk: FloatArray
    p10_bytes: FloatArray
    p50_bytes: FloatArray
    p90_bytes: FloatArray
    sigma: FloatArray
    safe_by_80_percent_rule: npt.NDArray[np.bool_]
    assumptions: tuple[str, ...]


def oom_risk(
    p50_bytes: npt.ArrayLike, usable_bytes: npt.ArrayLike, sigma: npt.ArrayLike
) -> FloatArray:
    """P(needed > usable) for a lognormal with median ``p50_bytes`` and log-spread ``sigma``.

    Broadcasts. With no spread it is 0 or 1 (1 only where the median is above usable).

    Raises:
        ValueError: a negative size or spread.
    """
    median, usable, spread = (np.asarray(v, float) for v in (p50_bytes, usable_bytes, sigma))
    if np.any(median < 0) or np.any(usable < 0) or np.any(spread < 0):
        raise ValueError("sizes and spreads can't be negative")
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = (np.log(median) - np.log(usable)) / spread
    certain = np.where(median > usable, 1.0, 0.0)
    settled = (spread == 0) | (median == 0) | (usable == 0)
    risk = normal_cdf(np.where(settled, 0.0, distance))
    return np.asarray(np.where(settled, certain, risk), float)


def normal_cdf(z: npt.ArrayLike) -> FloatArray:
    """Standard normal distribution function, within 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    x = np.abs(np.asarray(z, float)) / math.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    poly = np.zeros_like(t)
    for coefficient in reversed(series):
        poly = (poly + coefficient) * t
    upper = 1.0 - 0.5 * poly * np.exp(-(x**2))
    return np.asarray(np.where(np.asarray(z, float) >= 0, upper, 1.0 - upper), float)


def memory_risk(
    memory: MemoryBreakdown, usable_bytes: npt.ArrayLike, spread: MemorySpread
) -> MemoryRisk:
    """Risk of every row of an estimate, from the spread of its parts.

    A step fails when it needs more than ``usable_bytes`` after torch has returned wholly free
    segments (``MemoryBreakdown.needed_bytes``); the quantiles are of that need.
    """
    needed = memory.needed_bytes
    splinters = np.maximum(memory.fragmentation - memory.reclaimable, 0.0)
    variance = (
        (spread.allocated * memory.peak_allocated_bytes) ** 2
        + (spread.fragmentation * splinters) ** 2
        + (spread.framework * memory.framework) ** 2
    )
    # A lognormal's log-spread from its relative one.
    sigma = np.sqrt(np.log1p(variance / np.maximum(needed, 1.0) ** 2))
    return MemoryRisk(
        oom_risk=oom_risk(needed, usable_bytes, sigma),
        p10_bytes=needed * np.exp(-_Z90 * sigma),
        p50_bytes=needed,
        p90_bytes=needed * np.exp(_Z90 * sigma),
        sigma=sigma,
        safe_by_80_percent_rule=eighty_percent_rule(memory.peak_allocated_bytes, usable_bytes),
        assumptions=spread.assumptions,
    )


def eighty_percent_rule(
    estimate_bytes: npt.ArrayLike, capacity_bytes: npt.ArrayLike
) -> npt.NDArray[np.bool_]:
    """Whether an estimate is at most 80 % of the GPU's memory (arXiv 2411.06465 section 4.1).

    The rule's estimate is of allocated memory, without context and NCCL buffers.
    """
    estimate = np.asarray(estimate_bytes, float)
    return np.asarray(estimate <= SAFE_SHARE * np.asarray(capacity_bytes, float))
