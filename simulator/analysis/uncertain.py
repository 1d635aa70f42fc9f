"""Uncertain inputs: draws, one-at-a-time swings, probabilities and break-even values.

A decision is a function of named inputs. Each input has a median and a tenth and ninetieth
percentile; what one name means is the same for all alternatives, so that a draw of it (the price
of electricity, say) meets all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.prediction import Range

Numbers = NDArray[np.float64]
#: Values of all inputs by name, one number or one array of draws each.
Inputs = Mapping[str, Numbers]

_Z90 = NormalDist().inv_cdf(0.9)
#: Draws are cut at this many standard deviations: no input is believed beyond.
_CUT = 2.5
#: A wider range isn't a factor of uncertainty any more: its logarithm would run away.
_WIDEST = 1e4


@dataclass(frozen=True)
class Uncertain:
    """An amount with its tenth and ninetieth percentile and the bounds that it can't leave.

    ``low <= value <= high``; equal where the amount is certain.
    """

    low: float
    value: float
    high: float
    least: float = 0.0
    most: float = math.inf

    @property
    def is_certain(self) -> bool:
        """Whether there is nothing to draw."""
        return self.low == self.high

    def at(self, z: Numbers) -> Numbers:
        """Quantiles at standard-normal scores: log-normal on each side of the median.

        Where ``low`` is zero, or far below ``high``, normal on each side and cut at ``least``.
        """
        z = np.clip(z, -_CUT, _CUT)
        if self.is_certain:
            return np.full_like(np.asarray(z, float), self.value)
        if self.low > 0 and self.high < _WIDEST * self.low:
            up, down = math.log(self.high / self.value), math.log(self.value / self.low)
            found = self.value * np.exp(z / _Z90 * np.where(z > 0, up, down))
        else:
            found = self.value + z / _Z90 * np.where(
                z > 0, self.high - self.value, self.value - self.low
            )
        return np.asarray(np.clip(found, self.least, self.most))

    def scaled(self, factor: float) -> Uncertain:
        """The amount in another unit."""
        return Uncertain(self.low * factor, self.value * factor, self.high * factor,
                         self.least * factor, self.most * factor)  # fmt: skip


def certain(value: float) -> Uncertain:
    """An amount without a range."""
    return Uncertain(value, value, value)


def draw(inputs: Mapping[str, Uncertain], n: int, seed: int = 0) -> dict[str, Numbers]:
    """``n`` draws of every input, independent of each other.

    The stream of an input depends on the seed and its name only: what other inputs there are
    doesn't change it.
    """
    return {
        name: amount.at(
            np.random.default_rng([seed, crc32(name.encode())]).standard_normal(n)
        )
        for name, amount in inputs.items()
    }  # fmt: skip


def medians(inputs: Mapping[str, Uncertain]) -> dict[str, Numbers]:
    """The median of every input."""
    return {name: np.asarray(amount.value, float) for name, amount in inputs.items()}


def percentiles(values: Numbers) -> Range:
    """p10, p50 and p90 of draws."""
    p10, p50, p90 = np.percentile(np.asarray(values, float), [10, 50, 90])
    return Range(float(p10), float(p50), float(p90))


def probability_less(a: Numbers, b: Numbers) -> float:
    """P(a < b) of paired draws, ties counted half."""
    return float(np.mean(np.where(a == b, 0.5, a < b)))


@dataclass(frozen=True)
class Swing:
    """What one input does to an outcome: its value at the input's p10 and p90, rest at medians."""

    name: str
    low_input: float
    high_input: float
    at_low: float
    at_high: float

    @property
    def width(self) -> float:
        """How far the outcome moves."""
        return abs(self.at_high - self.at_low)


def tornado(
    inputs: Mapping[str, Uncertain], outcome: Callable[[Inputs], Numbers]
) -> tuple[Swing, ...]:
    """Swing of every uncertain input, widest first; those that move nothing are left out."""
    base = medians(inputs)
    swings = []
    for name, amount in inputs.items():
        if amount.is_certain:
            continue
        low, high = (
            float(outcome({**base, name: np.asarray(value)})) for value in (amount.low, amount.high)
        )
        swings.append(Swing(name, amount.low, amount.high, low, high))
    moving = [s for s in swings if s.width > 0]
    return tuple(sorted(moving, key=lambda s: (-s.width, s.name)))


@dataclass(frozen=True)
class BreakEven:
    """Value of an input at which two alternatives are equal, the others at their medians.

    ``inside`` says whether it lies between the input's p10 and p90.
    """

    name: str
    median: float
    value: float
    inside: bool


def break_even(
    name: str,
    inputs: Mapping[str, Uncertain],
    difference: Callable[[Inputs], Numbers],
    reach: float = 10.0,
    points: int = 241,
) -> BreakEven | None:
    """The nearest value of one input at which ``difference`` (a - b) changes its sign.

    Searched from a ``reach``-th to ``reach`` times the median, within the input's bounds; None
    where the sign stays.
    """
    amount = inputs[name]
    if amount.value <= 0:
        return None
    low = max(amount.value / reach, amount.least)
    high = min(amount.value * reach, amount.most)
    grid = amount.value * np.exp(
        np.linspace(math.log(max(low, 1e-300) / amount.value), math.log(high / amount.value),
                    points)
    )  # fmt: skip
    gap = np.broadcast_to(difference({**medians(inputs), name: grid}), grid.shape)
    turns = np.flatnonzero(np.sign(gap[:-1]) * np.sign(gap[1:]) < 0)
    if not turns.size:
        return None
    at = [_crossing(grid, gap, int(i)) for i in turns]
    value = min(at, key=lambda v: abs(math.log(v / amount.value)))
    return BreakEven(name, amount.value, value, amount.low <= value <= amount.high)


def _crossing(grid: Numbers, gap: Numbers, i: int) -> float:
    """Linear interpolation of the zero between two neighbours of the grid."""
    share = gap[i] / (gap[i] - gap[i + 1])
    return float(grid[i] + share * (grid[i + 1] - grid[i]))
