"""Exact splits of a batch by dynamic programming over kinds of GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.planner.split_problem import (
    SHARE_TOLERANCE,
    Choice,
    FloatArray,
    IntArray,
    Menu,
    SplitProblem,
    as_choices,
    is_exact_affordable,
    menus,
    split_kind,
)


@dataclass(frozen=True)
class _Stage:
    """Most state held by the first kinds with each number of sequences, and the last one's."""

    state: FloatArray
    taken: IntArray


def close_gap(
    problem: SplitProblem, ceiling: int, times: FloatArray, low: int, upper: int
) -> tuple[int, tuple[Choice, ...]] | None:
    """The smallest feasible time in ``times[low:upper]`` and its split.

    None where there is none, or where the problem is too large for the tables.
    """
    if not is_exact_affordable(problem):
        return None
    found: tuple[int, tuple[Choice, ...]] | None = None
    while low < upper:
        middle = (low + upper) // 2
        choices = exact_split(problem, ceiling, float(times[middle]))
        if choices is None:
            low = middle + 1
        else:
            found, upper = (middle, choices), middle
    return found


def exact_split(problem: SplitProblem, ceiling: int, time_s: float) -> tuple[Choice, ...] | None:
    """A split within ``time_s`` that holds the most state; None where it isn't the whole state."""
    kinds = menus(problem, ceiling, time_s)
    if kinds is None:
        return None
    stages: list[_Stage] = []
    before = np.full(problem.batch + 1, -np.inf)
    before[0] = 0.0
    for menu in kinds:
        stages.append(_add_kind(before, _kind_table(menu, problem.batch)))
        before = stages[-1].state
    if before[problem.batch] < 1.0 - SHARE_TOLERANCE:
        return None
    left = problem.batch
    rows = []
    for menu, stage in zip(reversed(kinds), reversed(stages), strict=True):
        taken = int(stage.taken[left])
        picked = split_kind(menu, taken)
        assert picked is not None
        rows.append(picked[1])
        left -= taken
    return as_choices(kinds, tuple(reversed(rows)))


def _kind_table(menu: Menu, batch: int) -> FloatArray:
    """Most state of one kind by its sequences in all, on one or two rows of its menu."""
    table = np.full(batch + 1, -np.inf)
    n = menu.count
    for k in range(n // 2 + 1):
        total = k * menu.batch[:, None] + (n - k) * menu.batch[None, :]
        state = k * menu.state[:, None] + (n - k) * menu.state[None, :]
        fits = total <= batch
        np.maximum.at(table, total[fits], state[fits])
    return table


def _add_kind(before: FloatArray, table: FloatArray) -> _Stage:
    """Max-plus convolution: the kind takes x sequences, the kinds before it the rest."""
    state = np.full_like(before, -np.inf)
    taken = np.zeros(len(before), np.intp)
    for x in np.flatnonzero(np.isfinite(table)):
        candidate = before[: len(before) - x] + table[x]
        better = candidate > state[x:]
        state[x:][better] = candidate[better]
        taken[x:][better] = x
    return _Stage(state, taken)
