"""The optimiser equals an independent enumeration of all splits on hundreds of small instances."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.planner.shares import fill_shares
from simulator.planner.split_problem import Kind, Split, SplitProblem, relaxed_bound_s, solve_split


@st.composite
def problems(draw: st.DrawFn) -> SplitProblem:
    """One to three kinds of one to three GPUs with a few options, ceilings dearer the higher.

    The batch is what some choice of options makes up, and caps are near what the state needs, so
    that most instances have a solution and many of those hold uneven shares.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = np.cumsum([1.0, *rng.uniform(0.0, 0.5, rng.integers(0, 3))])
    counts = rng.integers(1, 4, rng.integers(1, 4))
    gpus = int(counts.sum())
    kinds = []
    batch = 0
    for count in counts.tolist():
        n = int(rng.integers(1, 7))
        sequences = rng.integers(1, 7, n)
        cap = np.where(rng.random(n) < 0.1, -1.0, rng.uniform(0.3, 2.5, n) / gpus)
        per_sequence = rng.integers(1, 10, n)
        floor = rng.uniform(0.0, 8.0)  # collectives that computation can't hide
        time = np.maximum((per_sequence * sequences)[None, :], floor * factors[:, None])
        kinds.append(Kind(count, sequences, np.minimum(cap, 1.0), time))
        batch += int(rng.choice(sequences, count).sum())
    ceilings = np.minimum(np.array([1.0, 1.4, 100.0])[: len(factors)] / gpus, 1.0)
    return SplitProblem(tuple(kinds), batch, ceilings)


def choices(kind: Kind) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to put a kind's GPUs on one or two options."""
    options = [o for o in range(len(kind.batch)) if kind.cap[o] >= 0]
    for option in options:
        yield ((option, kind.count),)
    for a, b in combinations(options, 2):
        for k in range(1, kind.count):
            yield ((a, k), (b, kind.count - k))


def cheapest(problem: SplitProblem) -> float:
    """Smallest time over all splits and ceilings, by trying every one."""
    best = np.inf
    for picked in product(*(list(choices(k)) for k in problem.kinds)):
        rows = [(kind, o, n) for kind, c in zip(problem.kinds, picked, strict=True) for o, n in c]
        if sum(n * kind.batch[o] for kind, o, n in rows) != problem.batch:
            continue
        for c, ceiling in enumerate(problem.ceilings):
            if sum(n * min(kind.cap[o], ceiling) for kind, o, n in rows) >= 1.0 - 1e-9:
                best = min(best, max(kind.time_s[c][o] for kind, o, _ in rows))
    return best


@settings(max_examples=400, deadline=None)
@given(problems())
def test_equals_brute_force(problem: SplitProblem) -> None:
    expected = cheapest(problem)
    found = solve_split(problem)
    assert (found is None) == np.isinf(expected)
    if found is not None:
        assert found.time_s == expected
        assert found.is_optimal
        assert relaxed_bound_s(problem) <= expected


@settings(max_examples=200, deadline=None)
@given(problems())
def test_a_split_keeps_every_constraint(problem: SplitProblem) -> None:
    found = solve_split(problem)
    if found is None:
        return
    rows = [
        (kind, o, n)
        for kind, choice in zip(problem.kinds, found.choices, strict=True)
        for o, n in choice
    ]
    assert [sum(n for _, n in c) for c in found.choices] == [k.count for k in problem.kinds]
    assert sum(n * kind.batch[o] for kind, o, n in rows) == problem.batch
    shares = fill_shares([kind.cap[o] for kind, o, _ in rows], [n for _, _, n in rows])
    assert shares is not None
    assert np.isclose(sum(s * n for s, (_, _, n) in zip(shares, rows, strict=True)), 1.0)
    assert all(s <= kind.cap[o] + 1e-6 for s, (kind, o, _) in zip(shares, rows, strict=True))
    assert max(shares) <= problem.ceilings[found.ceiling] + 1e-6


@settings(max_examples=100, deadline=None)
@given(problems(), st.floats(0.5, 1.5))
def test_a_limit_only_hides_what_is_not_better(problem: SplitProblem, part: float) -> None:
    free: Split | None = solve_split(problem)
    if free is None:
        return
    limited = solve_split(problem, better_than_s=free.time_s * part)
    assert (limited is not None) == (part > 1.0)
    if limited is not None:
        assert limited.time_s == free.time_s


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 8)), min_size=1, max_size=6))
def test_shares_fill_up_as_evenly_as_caps_allow(rows: list[tuple[float, int]]) -> None:
    caps, counts = [c for c, _ in rows], [n for _, n in rows]
    shares = fill_shares(caps, counts)
    room = sum(c * n for c, n in rows)
    assert (shares is None) == (room < 1.0 - 1e-9)
    if shares is not None:
        level = max(shares)
        assert np.isclose(sum(s * n for s, n in zip(shares, counts, strict=True)), 1.0)
        for share, cap in zip(shares, caps, strict=True):
            assert share <= cap + 1e-8
            assert np.isclose(share, level) or np.isclose(share, cap)
