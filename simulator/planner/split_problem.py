"""Who takes how much of the batch: the combinatorial core of GPUMix's optimiser.

Equal GPUs are one *kind*. Every GPU of a kind takes one of the kind's options (a micro-batch and a
count, so a number of sequences), and beside that work it can hold at most the option's share of
the training state. All options together make up the global batch, all shares together the whole
state, and the slowest option used sets the time (arXiv 2411.01075 section 4, with the times of our
cost model in place of its profiles). A kind is split over two options at most.

Uneven state shares make collectives slower, the more the larger the largest share is; so options
are priced under a few *ceilings* on the share, and the best ceiling wins.

:func:`solve_split` first relaxes the problem: shares of a kind may then be mixed freely, which is
a linear programme that the upper hulls of (sequences, state) solve exactly. Its smallest time is a
lower bound on every split's. A split found by rounding at that time is optimal; otherwise a
dynamic programme over kinds closes the gap where the problem is small enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

#: Shares sum to one within this.
SHARE_TOLERANCE = 1e-9

#: Most table cells that the exact dynamic programme may fill for one time.
EXACT_CELLS = 30_000_000


@dataclass(frozen=True)
class Kind:
    """``count`` equal GPUs and their options (arrays over options, ``time_s`` over ceilings too).

    ``batch`` is in sequences per step (at least 1), ``cap`` the largest fraction of the state.
    """

    count: int
    batch: IntArray
    cap: FloatArray
    time_s: FloatArray


@dataclass(frozen=True)
class SplitProblem:
    """Kinds, the batch that they share, and the ceilings on one GPU's share of the state."""

    kinds: tuple[Kind, ...]
    batch: int
    ceilings: FloatArray

    @cached_property
    def preference(self) -> tuple[tuple[IntArray, ...], ...]:
        """By ceiling and kind: options from worst to best (more state, then less time)."""
        return tuple(
            tuple(
                np.lexsort((-kind.time_s[c], np.minimum(kind.cap, ceiling))) for kind in self.kinds
            )
            for c, ceiling in enumerate(self.ceilings)
        )


#: Options used by one kind: (option, how many GPUs), one or two of them.
Choice = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """A solution: each kind's choice, the ceiling it was priced under, its time and a lower bound.

    No split of the problem takes less than ``bound_s``; ``is_optimal`` where it is reached.
    """

    choices: tuple[Choice, ...]
    ceiling: int
    time_s: float
    bound_s: float

    @property
    def is_optimal(self) -> bool:
        """Whether the bound proves that nothing is faster."""
        return self.time_s <= self.bound_s * (1.0 + 1e-12)


@dataclass(frozen=True)
class Menu:
    """What one kind can do within a time: for each number of sequences its best option.

    ``batch`` ascends; ``state`` is the share held beside it, ``option`` the option's index.
    """

    count: int
    batch: IntArray
    state: FloatArray
    option: IntArray
    time_s: FloatArray

    def hull(self) -> IntArray:
        """Rows on the upper hull of (batch, state), left to right."""
        rows: list[int] = []
        x, y = self.batch, self.state
        if np.ptp(y) == 0.0:
            ends = [0, len(x) - 1] if len(x) > 1 else [0]
            return np.array(ends, np.intp)
        xs, ys = x.tolist(), y.tolist()
        for i in range(len(xs)):
            while len(rows) > 1:
                a, b = rows[-2], rows[-1]
                if (ys[b] - ys[a]) * (xs[i] - xs[a]) > (ys[i] - ys[a]) * (xs[b] - xs[a]):
                    break
                rows.pop()
            rows.append(i)
        return np.array(rows, np.intp)


def menus(problem: SplitProblem, ceiling: int, time_s: float) -> tuple[Menu, ...] | None:
    """What each kind can do within ``time_s``; None where a kind can do nothing."""
    found = []
    limit = float(problem.ceilings[ceiling])
    for kind, order in zip(problem.kinds, problem.preference[ceiling], strict=True):
        times = kind.time_s[ceiling]
        usable = order[(times[order] <= time_s) & (kind.cap[order] >= 0.0)]
        usable = usable[kind.batch[usable] <= problem.batch]
        if len(usable) == 0:
            return None
        best = np.full(problem.batch + 1, -1, np.intp)
        best[kind.batch[usable]] = usable  # the last (best) of equal batches stays
        batch = np.flatnonzero(best >= 0)
        option = best[batch]
        found.append(
            Menu(kind.count, batch, np.minimum(kind.cap[option], limit), option, times[option])
        )
    return tuple(found)


@dataclass(frozen=True)
class Relaxed:
    """Optimum of the relaxation at one time: the most state that can be held, and hull rows.

    ``rows[i]`` is kind i's row of its menu; kind ``mixed`` alone lies between two rows.
    """

    state: float
    rows: tuple[int, ...]
    mixed: int


def relax(kinds: tuple[Menu, ...], batch: int) -> Relaxed | None:
    """Most state held by any mixture with ``batch`` sequences; None where there is none.

    Starting from the most sequences, batches are given back where that frees the most state per
    sequence (a fractional knapsack over the hulls' segments, which is optimal as hulls are
    concave); ties give back from the slowest.
    """
    rows = [len(m.batch) - 1 for m in kinds]
    surplus = sum(m.count * int(m.batch[-1]) for m in kinds) - batch
    if surplus < 0 or sum(m.count * int(m.batch[0]) for m in kinds) > batch:
        return None
    state = sum(m.count * float(m.state[-1]) for m in kinds)
    segments = []
    for i, menu in enumerate(kinds):
        hull = menu.hull()
        for left, right in pairwise(hull.tolist()):
            width = int(menu.batch[right] - menu.batch[left])
            gain = float(menu.state[left] - menu.state[right])
            segments.append((gain / width, float(menu.time_s[right]), right, i, left, width, gain))
    segments.sort(reverse=True)
    mixed = 0
    for _, _, _, i, left, width, gain in segments:
        if surplus == 0:
            break
        whole = kinds[i].count * width
        mixed = i
        if whole > surplus:
            state += kinds[i].count * gain * surplus / whole
            break
        surplus -= whole
        state += kinds[i].count * gain
        rows[i] = left
    return Relaxed(state, tuple(rows), mixed)


def split_kind(menu: Menu, sequences: int) -> tuple[float, tuple[tuple[int, int], ...]] | None:
    """Most state that a kind can hold beside ``sequences`` in all, on one or two rows.

    Returns the state and (row, GPUs) pairs; None where the sequences can't be made up.
    """
    n = menu.count
    row_of = np.full(int(menu.batch[-1]) + 1, -1, np.intp)
    row_of[menu.batch] = np.arange(len(menu.batch))
    k = np.arange(n)[:, None]  # GPUs at the first row; the others share the rest evenly
    rest = sequences - k * menu.batch[None, :]
    each, odd = np.divmod(rest, n - k)
    fits = (odd == 0) & (each >= 0) & (each < len(row_of))
    second = np.where(fits, row_of[np.where(fits, each, 0)], -1)
    valid = second >= 0
    if not valid.any():
        return None
    state = k * menu.state[None, :] + (n - k) * menu.state[second]
    distance = np.abs(menu.batch[second] - menu.batch[None, :])
    score = np.where(valid, state - 1e-12 * distance, -np.inf)
    at = np.unravel_index(int(np.argmax(score)), score.shape)
    first, taken = int(at[1]), int(at[0])
    other = int(second[at])
    pairs = [(first, taken), (other, n - taken)] if first != other else [(other, n)]
    return float(state[at]), tuple((r, c) for r, c in pairs if c)


def round_up(
    kinds: tuple[Menu, ...], relaxed: Relaxed, batch: int
) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """A split near a relaxed optimum that makes up the batch exactly and holds the whole state."""
    order = [relaxed.mixed, *(i for i in range(len(kinds)) if i != relaxed.mixed)]
    for c in order:
        for rows in _nearby(kinds, relaxed.rows, c):
            held = [kinds[i].count * int(kinds[i].batch[r]) for i, r in enumerate(rows)]
            left = batch - sum(h for i, h in enumerate(held) if i != c)
            if left < kinds[c].count * int(kinds[c].batch[0]):
                continue
            found = split_kind(kinds[c], left)
            if found is None:
                continue
            state = found[0] + sum(
                kinds[i].count * float(kinds[i].state[r]) for i, r in enumerate(rows) if i != c
            )
            if state >= 1.0 - SHARE_TOLERANCE:
                return tuple(
                    found[1] if i == c else ((r, kinds[i].count),) for i, r in enumerate(rows)
                )
    return None


def _nearby(kinds: tuple[Menu, ...], rows: Sequence[int], split: int) -> list[tuple[int, ...]]:
    """Rows of the relaxed optimum, and those with one other kind a few rows lower or higher."""
    found = [tuple(rows)]
    for i, r in enumerate(rows):
        if i != split:
            for step in (-1, 1, -2, 2, -3, 3):
                if 0 <= r + step < len(kinds[i].batch):
                    found.append((*rows[:i], r + step, *rows[i + 1 :]))
    return found


def solve_split(problem: SplitProblem, *, better_than_s: float = np.inf) -> Split | None:
    """The fastest split, or the best found and a bound; None where there is none.

    Ceilings whose relaxation can't beat ``better_than_s`` or the best so far are skipped.
    """
    from simulator.planner.split_exact import close_gap

    best: Split | None = None
    bound = np.inf
    for ceiling in range(len(problem.ceilings)):
        limit = min(better_than_s, best.time_s if best else np.inf)
        times = candidate_times(problem, ceiling)
        times = times[times < limit]
        low = _smallest_relaxed(problem, ceiling, times)
        if low is None:
            continue
        bound = min(bound, float(times[low]))
        found = _rounded(problem, ceiling, times, low)
        upper = len(times) if found is None else found[0]
        if upper > low:
            closed = close_gap(problem, ceiling, times, low, upper)
            found = closed or found
        if found is not None:
            best = Split(found[1], ceiling, float(times[found[0]]), bound)
    if best is None:
        return None
    proven = is_exact_affordable(problem)
    return Split(best.choices, best.ceiling, best.time_s, best.time_s if proven else bound)


def relaxed_bound_s(problem: SplitProblem) -> float:
    """Smallest time, under any ceiling, within which a mixture can do the work; inf without one."""
    found = np.inf
    for ceiling in range(len(problem.ceilings)):
        times = candidate_times(problem, ceiling)
        low = _smallest_relaxed(problem, ceiling, times)
        if low is not None:
            found = min(found, float(times[low]))
    return found


def is_exact_affordable(problem: SplitProblem) -> bool:
    """Whether the dynamic programme can prove the optimum."""
    cells = len(problem.kinds) * problem.batch**2
    for kind in problem.kinds:
        cells += len(np.unique(kind.batch)) ** 2 * kind.count
    return cells <= EXACT_CELLS


def candidate_times(problem: SplitProblem, ceiling: int) -> FloatArray:
    """All times that a split can have under a ceiling, ascending."""
    return np.unique(np.concatenate([k.time_s[ceiling] for k in problem.kinds]))


def _smallest_relaxed(problem: SplitProblem, ceiling: int, times: FloatArray) -> int | None:
    """Index of the smallest time whose relaxation holds the whole state."""

    def holds(index: int) -> bool:
        kinds = menus(problem, ceiling, float(times[index]))
        found = None if kinds is None else relax(kinds, problem.batch)
        return found is not None and found.state >= 1.0 - SHARE_TOLERANCE

    if len(times) == 0 or not holds(len(times) - 1):
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _rounded(
    problem: SplitProblem, ceiling: int, times: FloatArray, low: int
) -> tuple[int, tuple[Choice, ...]] | None:
    """First time from ``low`` on at which rounding works, looked for in growing steps."""

    def attempt(index: int) -> tuple[Choice, ...] | None:
        kinds = menus(problem, ceiling, float(times[index]))
        relaxed = None if kinds is None else relax(kinds, problem.batch)
        if kinds is None or relaxed is None:
            return None
        rows = round_up(kinds, relaxed, problem.batch)
        return None if rows is None else as_choices(kinds, rows)

    step, index, failed = 1, low, low - 1
    while (found := attempt(index)) is None:
        if index == len(times) - 1:
            return None
        failed, index, step = index, min(index + step, len(times) - 1), step * 2
    while index - failed > 1:
        middle = (index + failed) // 2
        earlier = attempt(middle)
        if earlier is None:
            failed = middle
        else:
            index, found = middle, earlier
    # What was found may be faster than the time it was looked for at.
    used = max(
        float(problem.kinds[i].time_s[ceiling][o]) for i, c in enumerate(found) for o, _ in c
    )
    return int(np.searchsorted(times, used)), found


def as_choices(
    kinds: tuple[Menu, ...], rows: tuple[tuple[tuple[int, int], ...], ...]
) -> tuple[Choice, ...]:
    """Rows of menus as options of the kinds."""
    return tuple(
        tuple((int(menu.option[r]), count) for r, count in picked)
        for menu, picked in zip(kinds, rows, strict=True)
    )
