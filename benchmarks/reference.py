"""A fixed loop of numpy operations: how fast one core is just now.

Rates of benchmarks stand beside their ratio to it, which makes runs on different machines, or on a
busy one, comparable. Processor time is counted, so that other processes don't matter much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

#: Elements of the loop's arrays: they stay in the processor's second-level cache.
ELEMENTS = 16_384
ROUNDS = 2_000


def element_operations_per_s() -> float:
    """Additions, products and square roots of doubles that one core does per second."""
    a = np.linspace(1.0, 2.0, ELEMENTS)
    b = np.linspace(2.0, 3.0, ELEMENTS)
    out = np.empty_like(a)
    start = time.process_time()
    for _ in range(ROUNDS):
        np.multiply(a, b, out=out)
        np.add(out, a, out=out)
        np.sqrt(out, out=out)
    return 3 * ROUNDS * ELEMENTS / (time.process_time() - start)


Result = TypeVar("Result")


@dataclass(frozen=True)
class Timed(Generic[Result]):
    """A result with the processor and wall-clock seconds that it took."""

    result: Result
    cpu_s: float
    wall_s: float


def timed(function: Callable[[], Result]) -> Timed[Result]:
    """Run a function once."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return Timed(result, time.process_time() - cpu, time.perf_counter() - wall)
