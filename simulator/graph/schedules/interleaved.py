"""Interleaved 1F1B: every rank holds several model chunks (arXiv 2104.04473 section 2.2.2).

Micro-batches go through the chunks in rounds. torch and Megatron-LM take rounds of ``pp``
micro-batches; like torch this order also takes micro-batch counts that aren't a multiple of
``pp``, in ``max(1, micro_batches // pp)`` rounds of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.errors import UserError
from simulator.graph.action import Action, Kind, Schedule


def interleaved(pp: int, chunks: int, micro_batches: int) -> Schedule:
    """Actions of each of ``pp`` ranks with ``chunks`` model chunks.

    Raises UserError where the micro-batches can't be split into equal rounds.
    """
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds:
        raise UserError(
            f"the interleaved schedule needs a micro-batch count that splits into {rounds} equal "
            f"rounds over {pp} pipeline stages, not {micro_batches}; "
            f"a multiple of {pp} always does"
        )
    width = micro_batches // rounds
    return tuple(_rank_actions(rank, pp, chunks, micro_batches, width) for rank in range(pp))


def _passes(
    kind: Kind, rank: int, pp: int, chunks: int, micro_batches: int, width: int
) -> Iterator[Action]:
    """The rank's passes of one kind in order: round by round, chunk by chunk."""
    order = range(chunks) if kind is Kind.F else range(chunks - 1, -1, -1)
    for first in range(0, micro_batches, width):
        for chunk in order:
            for j in range(first, first + width):
                yield Action(chunk * pp + rank, kind, j)


def _rank_actions(
    rank: int, pp: int, chunks: int, micro_batches: int, width: int
) -> tuple[Action, ...]:
    total = chunks * micro_batches
    warmup = min((chunks - 1) * width + 2 * (pp - 1 - rank), total)
    forward = _passes(Kind.F, rank, pp, chunks, micro_batches, width)
    backward = _passes(Kind.B, rank, pp, chunks, micro_batches, width)
    actions = [next(forward) for _ in range(warmup)]
    for action in forward:
        actions += [action, next(backward)]
    return (*actions, *backward)
