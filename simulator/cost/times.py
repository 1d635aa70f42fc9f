"""What one rank class's work takes: the numbers that the task graph is built from.

All fields are seconds, floats or numpy arrays over a batch of plans. Communication named here is
what stays on the critical path of the compute stream (exposed) unless the field says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Seconds = float | npt.NDArray[np.float64]

#: Where step time goes; every second of a rank's step belongs to exactly one of them.
CATEGORIES = (
    "compute",
    "recompute",
    "dispatch",
    "tp",
    "cp",
    "ep",
    "pp",
    "dp",
    "fsdp",
    "optimizer",
    "overhead",
    "bubble",
)


@dataclass(frozen=True)
class PassTimes:
    """One pass of one piece by category; the pieces follow each other on the compute stream."""

    compute: Seconds = 0.0
    recompute: Seconds = 0.0
    dispatch: Seconds = 0.0
    tp: Seconds = 0.0
    cp: Seconds = 0.0
    ep: Seconds = 0.0
    overhead: Seconds = 0.0

    @property
    def total(self) -> Seconds:
        """Seconds of the whole pass."""
        return (
            self.compute
            + self.recompute
            + self.dispatch
            + self.tp
            + self.cp
            + self.ep
            + self.overhead
        )

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def scaled(self, factor: Seconds) -> PassTimes:
        """Every category times ``factor`` (repeat counts, slow-down)."""
        return PassTimes(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True)
class ChunkTimes:
    """One micro-batch through one model chunk.

    ``backward_input`` includes recomputation; ``backward_weight`` is the part that zero-bubble
    schedules may run later. ``grad_reduce`` is the chunk's gradient reduction over data-parallel
    ranks once per step, ``param_gather`` the gather of updated parameters (ZeRO-1/2), both as the
    network takes them (not yet overlapped).
    """

    forward: PassTimes
    backward_input: PassTimes
    backward_weight: PassTimes
    grad_reduce: Seconds = 0.0
    param_gather: Seconds = 0.0


@dataclass(frozen=True)
class UnitTimes:
    """One FSDP unit (a layer, or the root with embedding and head), ``repeat`` equal ones.

    ``gather_forward``, ``gather_backward`` (0 where parameters stay gathered) and ``reduce`` are
    the network's times of the unit's collectives, to be overlapped by the graph.
    """

    name: str
    repeat: int
    forward: PassTimes
    backward: PassTimes
    gather_forward: Seconds
    gather_backward: Seconds
    reduce: Seconds


@dataclass(frozen=True)
class ClassTimes:
    """All times of one rank class for one step.

    ``chunks`` in chunk order. ``units`` in forward order, only for fully sharded parameters
    (ZeRO-3, FSDP, GPUMix), and then the same compute as ``chunks`` in finer pieces.
    ``send_forward`` and ``send_backward`` are one micro-batch's activations to the next stage and
    gradients to the previous one. ``optimizer`` includes gradient clipping; ``step_overhead`` is
    paid once per step.
    """

    chunks: tuple[ChunkTimes, ...]
    units: tuple[UnitTimes, ...]
    send_forward: Seconds
    send_backward: Seconds
    optimizer: Seconds
    step_overhead: Seconds
