"""Goodput by Monte-Carlo: many runs at once through their interruptions.

Event-driven, vectorised over runs: each turn of the loop takes every unfinished run through its
next interruption. The closed form of :mod:`simulator.analysis.goodput` describes the same process;
they agree in the mean for long runs, and this one also gives the distribution of short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.goodput import Reliability

Numbers = NDArray[np.float64]

#: A run that has met so many interruptions is going nowhere; what it has done then counts.
MAX_INTERRUPTIONS = 20_000


@dataclass(frozen=True)
class FailureRuns:
    """Outcome of each simulated run; all arrays have one entry per run.

    ``goodput`` is the productive computing time over the wall-clock time ``wall_s``;
    ``interruptions`` counts what stopped the job; ``wait_s`` is the time without enough nodes.
    """

    goodput: Numbers
    wall_s: Numbers
    interruptions: Numbers
    wait_s: Numbers

    def percentiles(self) -> tuple[float, float, float]:
        """p10, p50 and p90 of the goodput."""
        p10, p50, p90 = np.percentile(self.goodput, [10, 50, 90])
        return float(p10), float(p50), float(p90)


@dataclass
class _State:
    """The runs on their way."""

    done: Numbers
    wall: Numbers
    wait: Numbers
    count: Numbers
    in_repair: NDArray[np.int64]


def simulate_failures(
    r: Reliability, interval_s: float, work_s: float, *, n_runs: int = 400, seed: int = 0
) -> FailureRuns:
    """Simulate ``n_runs`` runs of ``work_s`` seconds of computing.

    A checkpoint follows every ``interval_s`` of computing and takes ``checkpoint_s``. An
    interruption throws back to the last finished checkpoint and costs a restart, which can itself
    be interrupted. A share of interruptions sends a node to repair (exponential); without a spare
    the job stands until one is back. Deterministic for a seed.
    """
    rng = np.random.default_rng(seed)
    zeros = np.zeros(n_runs)
    state = _State(zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy(),
                   np.zeros(n_runs, np.int64))  # fmt: skip
    rate, delta = float(np.asarray(r.interruptions_per_s)), float(np.asarray(r.checkpoint_s))
    active = np.arange(n_runs)
    for _ in range(MAX_INTERRUPTIONS):
        left = work_s - state.done[active]
        # The last stretch ends with the work, without a checkpoint.
        needed = left + delta * np.maximum(np.ceil(left / interval_s) - 1.0, 0.0)
        gap = rng.exponential(1.0, active.size) / rate if rate > 0 else np.full(active.size, np.inf)
        finished = gap >= needed
        state.wall[active] += np.where(finished, needed, gap)
        kept = np.floor(np.where(finished, 0.0, gap) / (interval_s + delta)) * interval_s
        state.done[active] += np.where(finished, left, np.minimum(kept, left))
        _repair(state, active, np.where(finished, needed, gap), r, rng)
        active, gap = active[~finished], gap[~finished]
        if not active.size:
            break
        state.count[active] += 1
        _restart(state, active, r, rng)
    goodput = np.divide(state.done, state.wall, out=np.ones(n_runs), where=state.wall > 0)
    return FailureRuns(goodput, state.wall, state.count, state.wait)


def _restart(
    state: _State, active: NDArray[np.int64], r: Reliability, rng: np.random.Generator
) -> None:
    """Take the interrupted runs to where they compute again."""
    rate, restart = float(np.asarray(r.interruptions_per_s)), float(np.asarray(r.restart_s))
    pending = active
    while pending.size:
        _exchange(state, pending, r, rng)
        gap = rng.exponential(1.0, pending.size) / rate
        again = gap < restart
        spent = np.where(again, gap, restart)
        state.wall[pending] += spent
        _repair(state, pending, spent, r, rng)
        pending = pending[again]
        state.count[pending] += 1
        if state.count.max() > MAX_INTERRUPTIONS:
            return


def _exchange(
    state: _State, runs: NDArray[np.int64], r: Reliability, rng: np.random.Generator
) -> None:
    """Send failed nodes to repair; runs without a spare wait for the first repair to end."""
    failed = runs[rng.random(runs.size) < float(np.asarray(r.swap_share))]
    state.in_repair[failed] += 1
    stuck = failed[state.in_repair[failed] > r.spares]
    if stuck.size and float(np.asarray(r.repair_s)) > 0:
        mean = float(np.asarray(r.repair_s)) / state.in_repair[stuck]
        wait = rng.exponential(1.0, stuck.size) * mean
        state.wall[stuck] += wait
        state.wait[stuck] += wait
    state.in_repair[stuck] -= 1


def _repair(
    state: _State, runs: NDArray[np.int64], spent: Numbers, r: Reliability, rng: np.random.Generator
) -> None:
    """Repairs that end while ``spent`` passes; exponential, so what went before doesn't matter."""
    repair = float(np.asarray(r.repair_s))
    if repair <= 0:
        state.in_repair[runs] = 0
        return
    back = rng.binomial(state.in_repair[runs], -np.expm1(-spent / repair))
    state.in_repair[runs] -= back


def best_interval_by_simulation(
    r: Reliability, guess_s: float, work_s: float, *, n_runs: int = 200, seed: int = 0
) -> tuple[float, float]:
    """Interval around ``guess_s`` (a quarter to four times it) with the highest mean goodput.

    All intervals meet the same random numbers. Returns the interval and its mean goodput.
    """
    factors = 2.0 ** np.linspace(-2.0, 2.0, 17)
    means = [
        float(simulate_failures(r, guess_s * f, work_s, n_runs=n_runs, seed=seed).goodput.mean())
        for f in factors
    ]
    best = int(np.argmax(means))
    return float(guess_s * factors[best]), means[best]
