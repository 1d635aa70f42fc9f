"""Percentiles of the peaks that a run's log shows: torch's two, and the device's memory in use.

They take the same spread of the estimate's parts as the risk of running out of memory, which is
about another quantity: what a step needs after torch has returned what it can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.analysis.prediction import Range
from simulator.analysis.risk import MemorySpread, prior_spread
from simulator.cost.memory import MemoryBreakdown, layout_breakdown
from simulator.spec.layout import Layout

#: Standard normal quantile of 90 %.
_Z90 = 1.2815515655446004


@dataclass(frozen=True)
class Peaks:
    """The three peaks of the rank that is fullest by each, in bytes."""

    allocated: Range
    reserved: Range
    device: Range


def peaks(memory: MemoryBreakdown, spread: MemorySpread) -> Peaks:
    """Percentiles of every peak over the ranks of an estimate."""
    parts = (
        spread.allocated * memory.peak_allocated_bytes,
        spread.fragmentation * memory.fragmentation,
        spread.framework * memory.framework,
    )
    totals = (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.device_bytes)
    variance: npt.NDArray[np.float64] = np.zeros(len(totals[0]))
    ranges = []
    for total, part in zip(totals, parts, strict=True):
        variance = variance + np.asarray(part) ** 2
        fullest = int(np.argmax(total))
        median = float(total[fullest])
        sigma = float(np.sqrt(np.log1p(variance[fullest] / max(median, 1.0) ** 2)))
        factor = float(np.exp(_Z90 * sigma))
        ranges.append(Range(median / factor, median, median * factor))
    return Peaks(*ranges)


def layout_peaks(layout: Layout) -> Peaks:
    """Peaks of a layout's fullest ranks."""
    return peaks(layout_breakdown(layout), prior_spread(layout.stack.name))
