"""One step of a schedule as data: what a rank does, on which stage, for which micro-batch.

The text form is that of ``torch.distributed.pipelining``: ``0F3`` is the forward pass of
micro-batch 3 on stage 0, ``5UNSHARD`` gathers stage 5's parameters. Stages count over the whole
model: ``stage = chunk * pp + rank`` in pipelines, the unit's index in fully sharded models. A
schedule is one tuple of actions per pipeline rank, and its CSV form (one row per rank) is read and
written by torch too.
"""

from __future__ import annotations

import csv
import io
import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does; the first four are computation.

    ``READY`` takes no time: it marks where a pass starts or what it waits for. ``NORM`` joins all
    ranks for the gradient norm, ``OPT`` is the optimiser, ``STEP`` the once-per-step overhead.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's letter for the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    READY = "READY"
    NORM = "NORM"
    OPT = "OPT"
    STEP = "STEP"


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
BACKWARD_KINDS = (Kind.B, Kind.I, Kind.W)
SEND_KINDS = (Kind.SEND_F, Kind.SEND_B)
RECV_KINDS = (Kind.RECV_F, Kind.RECV_B)

_TEXT = re.compile(r"(\d+)(" + "|".join(sorted(Kind, key=len, reverse=True)) + r")(\d*)")


class Action(NamedTuple):
    """``kind`` on global stage ``stage`` for ``micro_batch`` (``None``: for the whole step)."""

    stage: int
    kind: Kind
    micro_batch: int | None = None

    def __str__(self) -> str:
        number = "" if self.micro_batch is None else self.micro_batch
        return f"{self.stage}{self.kind.value}{number}"

    def rank(self, pp: int) -> int:
        """Pipeline rank that holds the stage among ``pp`` ranks."""
        return self.stage % pp

    def chunk(self, pp: int) -> int:
        """Model chunk of that rank which the stage is."""
        return self.stage // pp


Schedule = tuple[tuple[Action, ...], ...]


def parse_action(text: str) -> Action:
    """The action that ``text`` names, the inverse of ``str``. Raises ValueError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no action; write stage, kind, micro-batch, for example 2F0 "
            f"(kinds: {', '.join(Kind)})"
        )
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), Kind(kind), int(micro_batch) if micro_batch else None)


def dump_schedule(schedule: Schedule) -> str:
    """CSV text of a schedule, one row per rank."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([str(action) for action in rank] for rank in schedule)
    return out.getvalue()


def load_schedule(text: str) -> Schedule:
    """Schedule from CSV text; empty cells (torch's idle slots) are left out. Raises ValueError."""
    rows = csv.reader(io.StringIO(text))
    return tuple(tuple(parse_action(cell) for cell in row if cell.strip()) for row in rows)
