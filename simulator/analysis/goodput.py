"""Goodput: the share of the clock that ends up as training progress, in closed form.

A synchronous run stops with every interruption of any of its GPUs or hosts. It loses the work
since the last checkpoint, restarts, and, where the failed node must be exchanged and no spare is
at hand, waits for a repair. Interruptions are Poisson; :mod:`simulator.analysis.failure_runs`
simulates the same process.

References: Young, CACM 17(9) 1974 (first-order interval); Daly, FGCS 22(3) 2006, eqs. 20 and 37
(expected wall time, higher-order interval); Erlang's loss formula for the spares.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

#: Rates below once in thirty million years are none: their reciprocals would overflow.
_NEVER = 1e-15

#: More spares than any cluster has.
MAX_SPARES = 10_000


@dataclass(frozen=True)
class Reliability:
    """What interrupts a run and what an interruption costs. Fields are numbers or arrays.

    ``interruptions_per_s`` counts all of the job's, ``swap_share`` of them need another node.
    ``checkpoint_s`` is how long one checkpoint stops the training, ``restart_s`` from the
    interruption to the first new step, ``repair_s`` the mean repair of a node, ``spares`` nodes
    stand ready.
    """

    interruptions_per_s: ArrayLike
    checkpoint_s: ArrayLike
    restart_s: ArrayLike
    swap_share: ArrayLike = 0.0
    repair_s: ArrayLike = 0.0
    spares: int = 0

    @property
    def mean_time_s(self) -> Numbers:
        """Mean time between interruptions of the job; inf where there are none."""
        rate = np.asarray(self.interruptions_per_s, float)
        with np.errstate(divide="ignore"):
            return np.asarray(1.0 / rate)


def interruptions_per_s(
    n_gpus: ArrayLike, n_hosts: ArrayLike, per_gpu_s: ArrayLike, per_host_s: ArrayLike
) -> Numbers:
    """Rate of a job's interruptions: every GPU and every host counts."""
    return np.asarray(np.multiply(n_gpus, per_gpu_s) + np.multiply(n_hosts, per_host_s))


def young_interval_s(checkpoint_s: ArrayLike, mean_time_s: ArrayLike) -> Numbers:
    """Young's interval between checkpoints: sqrt(2 delta M)."""
    return np.asarray(np.sqrt(2.0 * np.multiply(checkpoint_s, mean_time_s)))


def daly_interval_s(checkpoint_s: ArrayLike, mean_time_s: ArrayLike) -> Numbers:
    """Daly's higher-order interval (2006, eq. 37): computing time between two checkpoints.

    sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta for delta < 2M, else M.
    """
    delta, mean = np.asarray(checkpoint_s, float), np.asarray(mean_time_s, float)
    ratio = delta / (2.0 * mean)
    long = np.sqrt(2.0 * delta * mean) * (1.0 + np.sqrt(ratio) / 3.0 + ratio / 9.0) - delta
    return np.asarray(np.where(delta < 2.0 * mean, long, mean))


def erlang_b(servers: int, offered: ArrayLike) -> Numbers:
    """Probability that all of ``servers`` are taken: Erlang's loss formula, by its recursion."""
    load = np.asarray(offered, float)
    blocked = np.ones_like(load)
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def wait_per_interruption_s(r: Reliability) -> Numbers:
    """Mean wait for a repair that one interruption causes.

    While the job runs, the nodes in repair follow M/M/s/s with ``spares`` servers: a failure that
    finds all spares in repair (Erlang B) stops the job until the first of spares + 1 repairs ends.
    """
    swaps = np.multiply(r.interruptions_per_s, r.swap_share)
    blocked = erlang_b(r.spares, np.multiply(swaps, r.repair_s))
    return np.asarray(np.multiply(r.swap_share, r.repair_s) * blocked / (r.spares + 1))


def expected_goodput(r: Reliability, interval_s: ArrayLike) -> Numbers:
    """Share of the clock that is kept progress, in [0, 1].

    Daly (2006, eq. 20): a stretch of tau computing and delta checkpointing takes, with
    interruptions also while restarting, M e^(R/M) (e^((tau + delta)/M) - 1). The wait for repairs,
    in which nothing can fail, is added to each interruption.
    """
    rate, tau = _rate(r), np.asarray(interval_s, float)
    stretch = tau + np.asarray(r.checkpoint_s, float)
    # Exponents beyond 500 mean that nothing ever finishes; the share is 0 long before.
    work = np.minimum(rate * stretch, 500.0)
    restart = np.minimum(rate * np.asarray(r.restart_s, float), 500.0)
    safe = np.where(rate > 0, rate, 1.0)
    running = np.where(rate > 0, np.exp(restart) * np.expm1(work) / safe, stretch)
    # Interruptions in a stretch: one for every mean time of the time in which they can happen.
    waiting = rate * running * wait_per_interruption_s(r)
    return np.asarray(np.where(tau > 0, tau / (running + waiting), 0.0))


def best_goodput(r: Reliability) -> tuple[Numbers, Numbers]:
    """Daly's interval and the goodput that it gives; a run without interruptions needs none."""
    rate = _rate(r)
    mean = np.where(rate > 0, 1.0 / np.where(rate > 0, rate, 1.0), 1e12)
    # Checkpoints that cost nothing would be taken all the time: at least a second apart.
    interval = np.maximum(daly_interval_s(r.checkpoint_s, mean), 1.0)
    return interval, expected_goodput(r, interval)


def _rate(r: Reliability) -> Numbers:
    rate = np.asarray(r.interruptions_per_s, float)
    return np.asarray(np.where(rate < _NEVER, 0.0, rate))


def spares_that_pay(swaps_per_s: float, repair_s: float, n_nodes: int) -> int:
    """Spare nodes to keep: added while one more saves a larger share of the time than it costs.

    The time is what waiting for repairs takes (Erlang B, :func:`wait_per_interruption_s`), the
    cost one more node beside ``n_nodes``.
    """
    load = swaps_per_s * repair_s
    blocked, spares = 1.0, 0
    lost = load / (1.0 + load)
    while spares < MAX_SPARES:
        spares += 1
        blocked = load * blocked / (spares + load * blocked)
        wait = load * blocked / (spares + 1)
        saved, lost = lost - wait / (1.0 + wait), wait / (1.0 + wait)
        if saved * n_nodes <= 1.0:
            return spares - 1
    return MAX_SPARES


def checkpoint_bytes(parameters: ArrayLike, bytes_per_parameter: float = 14.0) -> Numbers:
    """Size of a checkpoint: bf16 weights, fp32 master weights and Adam's two fp32 moments."""
    return np.asarray(np.multiply(parameters, bytes_per_parameter))


def straggler_slowdown(n_gpus: int, speed_sigma: ArrayLike) -> Numbers:
    """Factor on the step time where all wait for the slowest of ``n_gpus``.

    Speeds are lognormal: exp(sigma z), z the expected largest of n normals (Blom's formula
    Phi^-1((n - 0.375) / (n + 0.25))); 1 for one GPU.
    """
    if n_gpus <= 1:
        return np.ones_like(np.asarray(speed_sigma, float))
    z = NormalDist().inv_cdf((n_gpus - 0.375) / (n_gpus + 0.25))
    return np.asarray(np.exp(np.multiply(speed_sigma, z)))
