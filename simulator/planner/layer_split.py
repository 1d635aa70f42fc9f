"""Layers over unequal pipeline stages, by dynamic programming."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def balance_layers(seconds: npt.NDArray[np.float64], layers: int) -> tuple[int, ...] | None:
    """Layers of each stage: the slowest stage as fast as possible, then the least time in all.

    ``seconds[s, k]`` is what stage ``s`` takes with ``k`` layers, shape (stages, layers + 1);
    infinite where it can't hold them. Exact: the slowest stage sets the pace of a pipeline, the sum
    over stages its filling and draining. None where no division fits.
    """
    fastest = _best(seconds, layers, np.maximum)
    if fastest is None:
        return None
    pace = max(float(seconds[s, k]) for s, k in enumerate(fastest))
    within = np.where(seconds <= pace * (1.0 + 1e-9), seconds, np.inf)
    return _best(within, layers, np.add)


def _best(seconds: npt.NDArray[np.float64], layers: int, join: np.ufunc) -> tuple[int, ...] | None:
    """Dynamic programme best[s][l] = min over k of join(best[s-1][l-k], seconds[s][k])."""
    stages = len(seconds)
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    taken = np.zeros((stages, layers + 1), np.intp)
    rest = np.arange(layers + 1)[:, None] - np.arange(layers + 1)[None, :]
    for s in range(stages):
        before = np.where(rest >= 0, best[np.maximum(rest, 0)], np.inf)
        joined = join(before, seconds[s][None, : layers + 1])
        taken[s] = joined.argmin(axis=1)
        best = joined[np.arange(layers + 1), taken[s]]
    if not np.isfinite(best[layers]):
        return None
    counts, left = [], layers
    for s in reversed(range(stages)):
        counts.append(int(taken[s, left]))
        left -= counts[-1]
    return tuple(reversed(counts))
