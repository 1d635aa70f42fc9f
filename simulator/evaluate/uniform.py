"""Pipelines of equal stages by formula, for very large batches of plans.

Every argument broadcasts; a batch may mix degrees and micro-batch counts. Each result is the
longest of a few paths that the step has to run, which generalise the bubble formulas of arXiv
2104.04473 section 2.2 and arXiv 2401.10241 section 2 to first and last stages that differ and to
transfers that take time. Against the exact recurrence of :mod:`simulator.evaluate.recurrence` the
mean error is below 0.5 %; several per cent remain possible where there are fewer micro-batches than
stages, or where blocking transfers take as long as passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.cost.times import Seconds

Array = npt.NDArray[np.float64]
Integers = int | npt.NDArray[np.integer]


def _where(condition: Any, yes: Any, no: Any) -> Array:
    """``numpy.where``; a choice that is the same for all rows touches no array."""
    if isinstance(condition, (bool, np.bool_)):
        chosen: Array = yes if condition else no
        return chosen
    rows: Array = np.where(condition, yes, no)
    return rows


def _number(value: Integers) -> Any:
    """A scalar as a float, everything else as an array of floats."""
    return float(value) if np.ndim(value) == 0 else np.asarray(value, float)


@dataclass(frozen=True)
class Kinds:
    """A time of the first, the middle and the last stage of the model (chunks included)."""

    first: Seconds
    middle: Seconds
    last: Seconds

    def at(self, rank: Any, pp: Any) -> Any:
        """Value of one rank without interleaving; a single stage is ``first``."""
        inner = _where(rank == pp - 1, self.last, self.middle)
        return _where(rank == 0, self.first, inner)

    def total(self, stages: Any) -> Any:
        """Sum over ``stages`` stages."""
        ends = _where(stages > 1, self.last, 0.0)
        return self.first + np.maximum(stages - 2, 0) * self.middle + ends

    def plus(self, other: Kinds) -> Kinds:
        """Stage by stage sum."""
        return Kinds(self.first + other.first, self.middle + other.middle, self.last + other.last)

    def largest(self, stages: Any) -> Any:
        """Largest of all stages."""
        inner = _where(stages > 2, self.middle, 0.0)
        return np.maximum(np.maximum(self.first, inner), _where(stages > 1, self.last, 0.0))


@dataclass(frozen=True)
class UniformPipeline:
    """One micro-batch through each kind of stage, seconds.

    With interleaving a stage is one chunk: ``first`` is the first rank's first chunk, ``last`` the
    last rank's last chunk. ``overlap_pp`` is the share of a transfer that doesn't hold up the
    computation.
    """

    forward: Kinds
    backward_input: Kinds
    backward_weight: Kinds
    send_forward: Seconds = 0.0
    send_backward: Seconds = 0.0
    overlap_pp: float = 1.0


@dataclass(frozen=True)
class UniformSync:
    """Once-a-step work of uniform pipelines, seconds; reductions and gathers are per stage.

    ``overlap_dp`` of a reduction hides behind its stage's last backward pass, ``overlap_gather``
    of a parameter gather behind its stage's first forward pass.
    """

    grad_reduce: Kinds
    param_gather: Kinds
    overlap_dp: float
    overlap_gather: float
    optimizer: Seconds = 0.0
    step_overhead: Seconds = 0.0


def uniform_step_s(
    schedule: str,
    stage: UniformPipeline,
    sync: UniformSync,
    pp: Integers,
    vpp: Integers,
    micro_batches: Integers,
) -> Array:
    """Seconds of a whole step: pipeline, gradient sync, optimiser, parameter gather, overhead.

    Later ranks finish earlier by the drain, so each kind of rank has its own sum of finish and
    exposed reduction.
    """
    p = _number(pp)
    pipeline = uniform_pipeline_s(schedule, stage, pp, vpp, micro_batches)
    back = stage.backward_input.plus(stage.backward_weight)
    late = stage.backward_input if schedule == "zb-h1" else back
    hidden_by = stage.backward_weight if schedule == "zb-h1" else back
    hop = _where(p > 1, np.asarray(stage.send_backward), 0.0)
    end = np.zeros_like(pipeline)
    for rank in _distinct(0.0 * p, np.minimum(1.0, p - 1), p - 1):
        reduce = sync.grad_reduce.at(rank, p)
        shown = np.maximum(sync.overlap_dp * reduce - hidden_by.at(rank, p), 0.0)
        shown = shown + (1.0 - sync.overlap_dp) * reduce
        if schedule == "interleaved":
            shown = np.maximum(shown, _backlog_s(back, sync, rank, p, vpp, micro_batches))
        early = _prefix(late, hop, rank)
        if schedule == "zb-h1":  # weight gradients fill the drain
            early = np.maximum(early - rank * stage.backward_weight.at(rank, p), 0.0)
        end = np.maximum(end, pipeline - early + shown)
    gather = sync.param_gather
    wait = np.maximum(sync.overlap_gather * gather.at(0.0 * p, p) - stage.forward.first, 0)
    if schedule == "interleaved":
        wait = np.maximum(wait, _late_gather_s(stage.forward, sync, p, vpp, micro_batches))
    rest = (1.0 - sync.overlap_gather) * gather.largest(p)
    total: Array = end + wait + rest + sync.optimizer + sync.step_overhead
    return total


def _backlog_s(
    back: Kinds, sync: UniformSync, rank: Array, p: Array, vpp: Integers, micro_batches: Integers
) -> Array:
    """Reductions of all chunks of a rank that are still to run when its last pass ends.

    The first of them starts a round of backward passes per further chunk before.
    """
    v, m = _number(vpp), _number(micro_batches)
    total = v * np.asarray(sync.grad_reduce.middle)
    for kind, at in ((sync.grad_reduce.first, 0.0), (sync.grad_reduce.last, p - 1)):
        total = total + _where(rank == at, kind - sync.grad_reduce.middle, 0.0)
    width = m / np.maximum(np.floor(m / p), 1.0)
    started = ((v - 1) * width + sync.overlap_dp) * back.middle
    return _where(v > 1, np.maximum(total - started, 0.0), 0.0)


def _late_gather_s(
    forward: Kinds, sync: UniformSync, p: Array, vpp: Integers, micro_batches: Integers
) -> Array:
    """How late the gathered parameters of a rank's last chunk are for its first forward pass.

    A round of forward passes per chunk before it hides the gathers of all chunks.
    """
    v, m = _number(vpp), _number(micro_batches)
    width = m / np.maximum(np.floor(m / p), 1.0)
    total = sync.param_gather.first + (v - 1) * np.asarray(sync.param_gather.middle)
    before = ((v - 1) * width + 1) * forward.middle
    return _where(v > 1, np.maximum(sync.overlap_gather * total - before, 0.0), 0.0)


@dataclass(frozen=True)
class _Paths:
    """Passes with their transfer slots, and the latency of a hop there and back.

    Without ``split`` the weight gradients are part of the backward passes.
    """

    forward: Kinds
    back: Kinds
    weight: Kinds
    hop_forward: Array
    hop_back: Array
    slot: Array
    split: bool

    def take(self, rows: npt.NDArray[np.intp]) -> _Paths:
        """Some rows of a batch in one dimension; scalars stay."""

        def some(value: Any) -> Any:
            return value[rows] if np.ndim(value) else value

        kinds = (self.forward, self.back, self.weight)
        forward, back, weight = (Kinds(some(k.first), some(k.middle), some(k.last)) for k in kinds)
        hop_forward, hop_back, slot = (
            some(x) for x in (self.hop_forward, self.hop_back, self.slot)
        )
        return _Paths(forward, back, weight, hop_forward, hop_back, slot, self.split)

    @property
    def hop(self) -> Array:
        """Latency of a hop to the next rank and back."""
        return self.hop_forward + self.hop_back


def uniform_pipeline_s(
    schedule: str, stage: UniformPipeline, pp: Integers, vpp: Integers, micro_batches: Integers
) -> Array:
    """Seconds from the first forward pass to the last backward pass.

    Raises ValueError for an unknown schedule; ``vpp`` counts for ``interleaved`` only.
    """
    p, v, m = (_number(x) for x in (pp, vpp, micro_batches))
    if schedule == "gpipe":
        return _gpipe_s(stage, p, m)
    if schedule == "1f1b":
        return _alternating_s(_paths(stage, p, split=False), p, m)
    if schedule == "zb-h1":
        return _alternating_s(_paths(stage, p, split=True), p, m)
    if schedule == "interleaved":
        paths = _paths(stage, p, split=False)
        if np.all(v > 1):
            return _interleaved_s(paths, p, v, m)
        one = _alternating_s(paths, p, m)
        return np.asarray(_where(v > 1, _interleaved_s(paths, p, np.maximum(v, 2), m), one))
    raise ValueError(f"no formula for schedule {schedule!r}")


def _paths(stage: UniformPipeline, p: Array, *, split: bool) -> _Paths:
    """Put what transfers hold up beside the passes: a slot per pass that has one."""
    sends = np.maximum(stage.send_forward, stage.send_backward)
    slot = _where(p > 1, (1.0 - stage.overlap_pp) * sends, 0.0)
    back, weight = stage.backward_input, stage.backward_weight
    if split:
        # Between the input gradient's send and the next receive stands the weight gradient.
        weight = weight.plus(Kinds(0.0, slot, slot))
    else:
        back, weight = back.plus(weight), Kinds(0.0, 0.0, 0.0)
    there, and_back = (
        _where((p > 1) & (stage.overlap_pp > 0.0), np.maximum(send - slot, 0.0), 0.0)
        for send in (stage.send_forward, stage.send_backward)
    )
    return _Paths(
        forward=stage.forward.plus(Kinds(0.0, slot, slot)),
        back=back.plus(Kinds(slot, slot, 0.0)),
        weight=weight,
        hop_forward=there,
        hop_back=and_back,
        slot=slot,
        split=split,
    )


def _gpipe_s(stage: UniformPipeline, p: Array, m: Array) -> Array:
    """Two flow shops, forward and backward: all stages once, the slowest for every other batch."""
    back = stage.backward_input.plus(stage.backward_weight)
    total = np.asarray(0.0)
    for kinds, send in ((stage.forward, stage.send_forward), (back, stage.send_backward)):
        slot = _where(p > 1, (1.0 - stage.overlap_pp) * np.asarray(send), 0.0)
        hop = _where(p > 1, np.asarray(send), 0.0)
        network = hop if stage.overlap_pp > 0.0 else np.asarray(0.0)
        slowest = np.maximum(kinds.largest(p) + slot, network)
        total = total + kinds.total(p) + (p - 1) * hop + (m - 1) * slowest
    return total


def _prefix(kinds: Kinds, hop: Array, rank: Array) -> Array:
    """Sum over the ranks before ``rank``, hops included."""
    inner = np.maximum(rank - 1, 0) * kinds.middle
    return _where(rank > 0, kinds.first + inner + rank * hop, 0.0)


def _distinct(*ranks: Any) -> list[Any]:
    """Ranks once each where they are scalars; arrays as they are."""
    if any(np.ndim(rank) for rank in ranks):
        return list(ranks)
    return list(dict.fromkeys(float(rank) for rank in ranks))


def _alternating_s(x: _Paths, p: Any, m: Any) -> Array:
    """1F1B and ZB-H1: the longest of the paths that turn at the first, second, last ranks.

    Where there are few micro-batches, also of those that turn at the ranks where they run out.
    """
    common = _Common.of(x, p)
    ranks = _distinct(0.0 * p, np.minimum(1.0, p - 1), np.maximum(p - 2, 0.0), p - 1)
    shape = np.broadcast_shapes(np.shape(p), np.shape(m), np.shape(common.whole))
    best = np.zeros(shape)
    for rank in ranks:
        best = np.maximum(best, _turning_s(x, common, p, m, rank))
    for n in (2, 3):
        rank = np.clip(p - (m - 1) // n, 0.0, p - 1)
        rows = np.flatnonzero((rank > 1) & (rank < p - 2))
        if not len(rows):
            continue
        if np.ndim(best) != 1 or np.ndim(p) or np.shape(rank) != np.shape(best):
            best = np.maximum(best, _turning_s(x, common, p, m, rank))
            continue
        few = x.take(rows)
        turned = _turning_s(few, _Common.of(few, p), p, m[rows], rank[rows])
        best[rows] = np.maximum(best[rows], turned)
    return best


@dataclass
class _Common:
    """Sums that all paths of one batch of pipelines share; ``cycles`` by window."""

    trip: Kinds
    work: Kinds
    whole: Any
    cycles: dict[tuple[Any, int], tuple[Any, Any, Any]]

    @classmethod
    def of(cls, x: _Paths, p: Any) -> _Common:
        trip = x.forward.plus(x.back)
        work = trip.plus(x.weight) if x.split else trip
        return cls(trip, work, trip.total(p) + (p - 1) * x.hop, {})


def _turning_s(x: _Paths, common: _Common, p: Any, m: Any, rank: Any) -> Any:
    """The longest path that turns at ``rank``.

    It fills the pipeline to there, warms up (the rank's own forward passes or the first
    micro-batch's round trip downstream), alternates passes or cycles through a window of ranks,
    ends with the last micro-batch's round trip or its own remaining backward passes, and drains. A
    cycle through ``n`` ranks advances ``n`` micro-batches, since 1F1B keeps so many between them.
    """
    f, b = (k.at(rank, p) for k in (x.forward, x.back))
    w = x.weight.at(rank, p) if x.split else 0.0
    fill = _prefix(x.forward, x.hop_forward, rank)
    empty = _prefix(x.back, x.hop_back, rank)
    down = common.whole - fill - empty - (f + b)
    warmup = np.minimum(p - 1 - rank, m - 1)
    steady = m - 1 - warmup
    own, late, back = steady * (f + b), 0.0, b
    if x.split:
        early = np.maximum(steady - rank, 0.0)  # weight gradients that aren't put off
        own = own + early * w
        late = (steady - early) * w
        back = b + _where(early > 0, w, 0.0)
    first = np.maximum(warmup * f, _where(steady > 0, down, 0.0))
    last = np.maximum(warmup * back, down)
    chain = np.maximum(own, _cycles(x, common, p, rank, steady) - late)
    chain = np.maximum(chain, own + _early_cycle(x, common, p, rank, steady))
    ends = np.maximum(first + chain + last, warmup * b + down + chain)
    below = _below(common, p, rank, steady) + 2 * down
    ends = np.maximum(ends, _where(steady > 0, below, 0.0))
    if not x.split:
        return fill + (f + b) + ends + empty
    put_off = (np.minimum(rank, m - 1) + 1) * (w - x.slot)
    drain = np.maximum(empty + x.weight.first, put_off)
    turned = fill + (f + b) + ends + drain
    return np.maximum(turned, fill + f + first + chain + _tail(x, p, rank, m))


def _early_cycle(x: _Paths, common: _Common, p: Any, rank: Any, steady: Any) -> Any:
    """What one cycle through the ranks from the second on adds while weight gradients wait.

    ``rank`` puts off just as many weight gradients as the cycle advances micro-batches.
    """
    if np.ndim(rank) == 0 and rank == 0:
        return 0.0
    trip = common.trip
    around = (rank - 1) * (trip.middle + x.hop) + trip.at(rank, p)
    gain = np.maximum(around - rank * trip.at(rank, p), 0.0)
    return _where((rank > 0) & (steady >= rank), gain, 0.0)


def _tail(x: _Paths, p: Any, rank: Any, m: Any) -> Any:
    """The last micro-batch's way down from a rank, then the last rank's weight gradients."""
    below = np.maximum(p - 1 - rank, 0.0)
    way = np.maximum(below - 1, 0.0) * x.forward.middle + x.forward.last + below * x.hop_forward
    late = np.minimum(p, m) * (x.weight.last - x.slot)
    return _where(below > 0, way + x.back.last + late, 0.0)


def _below(common: _Common, p: Any, rank: Any, steady: Any) -> Any:
    """Advance ``steady`` micro-batches at the slowest rank downstream, one of them here."""
    trip = common.trip
    slow = np.maximum(trip.at(rank, p), trip.at(p - 1, p))
    slow = np.maximum(slow, _where(rank < p - 2, trip.middle, 0.0))
    return trip.at(rank, p) + (steady - 1) * slow


def _cycles(x: _Paths, common: _Common, p: Any, rank: Any, steady: Any) -> Any:
    """Longest way to advance ``steady`` micro-batches in cycles through a window around a rank."""
    second = np.minimum(1.0, rank)
    windows = [(0.0 * rank, 0), (0.0 * rank, 1), (second, 0), (second, 1), (rank, 0)]
    if np.ndim(rank) == 0:
        windows = list(dict.fromkeys((float(low), high) for low, high in windows))
    best: Any = 0.0
    at_rank = common.work.at(rank, p)
    for low, high in windows:
        inside = (rank <= p - 1 - high) & (p - low - high >= 2)
        if not np.any(inside):
            continue
        ranks, cycle, slow = _cycle(x, common, p, low, high)
        full = np.floor(np.maximum(steady - 1, 0) / ranks)
        rest = np.maximum(steady - 1, 0) - full * ranks
        length = at_rank + full * cycle + rest * slow
        best = np.maximum(best, _where(inside & (full > 0), length, 0.0))
    return best


def _cycle(x: _Paths, common: _Common, p: Any, low: Any, high: int) -> tuple[Any, Any, Any]:
    """Ranks of a window, time of one cycle through it, the slowest of its ranks."""
    key = (float(low), high) if np.ndim(low) == 0 else None
    if key in common.cycles:
        return common.cycles[key]
    trip, work = common.trip, common.work
    ranks = np.maximum(p - low - high, 1)
    bottom = trip.last if high == 0 else trip.middle
    cycle = trip.at(low, p) + bottom + np.maximum(ranks - 2, 0) * trip.middle
    cycle = cycle + (ranks - 1) * x.hop
    if x.split:
        cycle = cycle + x.weight.at(low, p)
    slow = np.maximum(work.at(low, p), work.last if high == 0 else work.middle)
    slow = np.maximum(slow, _where(ranks > 2, work.middle, 0.0))
    if key is not None:
        common.cycles[key] = (ranks, cycle, slow)
    return ranks, cycle, slow


def _interleaved_s(x: _Paths, p: Array, v: Array, m: Array) -> Array:
    """Interleaved 1F1B: as :func:`_alternating_s`, with all chunks of a rank in its own passes.

    The first backward pass waits for the first micro-batch's way through all chunks, which the
    rounds of ``width`` micro-batches may hold up; the end mirrors the beginning.
    """
    stages, width = p * v, m / np.maximum(np.floor(m / p), 1.0)
    shape = np.broadcast_shapes(np.shape(stages), np.shape(m), np.shape(x.forward.middle))
    best = np.zeros(shape)
    directions = ((x.forward, x.hop_forward), (x.back, x.hop_back))
    for rank in _distinct(0.0 * p, np.minimum(1.0, p - 1), np.maximum(p - 2, 0.0), p - 1):
        total = []
        for kind, _ in directions:
            special = _where(rank == 0, kind.first - kind.middle, 0.0)
            special = special + _where(rank == p - 1, kind.last - kind.middle, 0.0)
            total.append(v * kind.middle + special)
        f, b = total[0] / v, total[1] / v
        passes = v * m
        warmup = np.minimum((v - 1) * width + 2 * (p - 1 - rank), passes)
        steady = passes - 1 - warmup
        way = [_one_way(k, hop, p, v, width) for k, hop in directions]
        before = [
            _where(rank > 0, k.first + (rank - 1) * k.middle + rank * hop, 0.0)
            for k, hop in directions
        ]
        after = [
            _where(rank < p - 1, (p - 2 - rank) * k.middle + k.last + (p - 1 - rank) * hop, 0.0)
            for k, hop in directions
        ]
        own = np.minimum(warmup + 1, passes)
        start, end = before[0] + own * f, before[1] + own * b
        waited_start, waited_end = way[0] + after[1], way[1] + after[0]
        both = np.maximum(waited_start + end, start + waited_end)
        full = np.maximum(start, waited_start) + steady * (f + b) + np.maximum(end, waited_end)
        both = np.maximum(both, start + end)
        best = np.maximum(best, _where(steady > 0, full, both))
    return best


def _one_way(kind: Kinds, hop: Array, p: Array, v: Array, width: Array) -> Array:
    """First micro-batch through all stages: each chunk but the last may wait for its round."""
    chunk = np.maximum(p * (kind.middle + hop), width * kind.middle)
    ends = (kind.first - kind.middle) + (kind.last - kind.middle)
    return (v - 1) * chunk + p * kind.middle + (p - 1) * hop + ends
