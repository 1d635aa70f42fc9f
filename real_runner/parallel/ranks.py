"""The ranks that share a training state, and the waiting for their collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class CommClock:
    """Time for which computation stood still for communication, since the last :meth:`read_s`.

    On a CPU it is the time blocked in waits; on CUDA the time between two events of the compute
    stream around each wait.
    """

    device: torch.device
    _seconds: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def wait(self, works: Sequence[Any]) -> None:
        """Waits for asynchronous collectives (on CUDA: lets the compute stream wait)."""
        if not works:
            return
        if self.device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            for work in works:
                work.wait()
            after.record()
            self._events.append((before, after))
            return
        start = time.perf_counter()
        for work in works:
            work.wait()
        self._seconds += time.perf_counter() - start

    def read_s(self) -> float:
        """Seconds since the last reading; on CUDA the device must be idle (synchronised)."""
        total: float = self._seconds + sum(a.elapsed_time(b) * 1e-3 for a, b in self._events)
        self._seconds, self._events = 0.0, []
        return total


@dataclass(frozen=True)
class Ranks:
    """This process among the ``world`` that share the state; ``clock`` times its waits.

    ``shares[i]`` is the fraction of the state on rank i (any non-negative fractions that sum to 1).
    """

    rank: int
    world: int
    shares: tuple[float, ...]
    device: torch.device
    clock: CommClock

    @property
    def even(self) -> bool:
        """Whether all ranks hold the same share."""
        return all(abs(s * self.world - 1.0) < 1e-9 for s in self.shares)

    def bounds(self, numel: int) -> tuple[int, ...]:
        """Rank i holds elements bounds[i] to bounds[i + 1] of a flat unit.

        Even shares are equal chunks, the unit padded to a multiple of the world size; others are
        cut at the nearest element.
        """
        if self.even:
            chunk = -(-numel // self.world)
            return tuple(chunk * i for i in range(self.world + 1))
        cuts, total = [0], 0.0
        for share in self.shares:
            total += share
            cuts.append(min(max(round(total * numel), cuts[-1]), numel))
        # Rounding of the sum must neither lose elements nor hand them to a rank with no share.
        last = max(i for i, share in enumerate(self.shares) if share > 0)
        return tuple(numel if i > last else cut for i, cut in enumerate(cuts))

    def start_gather(self, flat: Tensor, bounds: Sequence[int]) -> list[Any]:
        """Starts to fill ``flat`` with every rank's part; this rank's is in place already.

        Bytes are sent, so that any dtype goes over any backend.
        """
        if self.world == 1:
            return []
        data, width = flat.view(torch.uint8), flat.element_size()
        if self._one_call:
            own = data[bounds[self.rank] * width : bounds[self.rank + 1] * width]
            return [dist.all_gather_into_tensor(data, own, async_op=True)]
        return [
            dist.broadcast(data[start * width : stop * width], src=owner, async_op=True)
            for owner, (start, stop) in enumerate(pairwise(bounds))
            if stop > start
        ]

    def start_reduce(self, flat: Tensor, bounds: Sequence[int]) -> list[Any]:
        """Starts to sum ``flat`` over ranks; afterwards only this rank's part of it is valid.

        Uneven parts take one reduction per owner: no padding, no further memory, and a rank
        without a share receives nothing.
        """
        if self.world == 1:
            return []
        if self._one_call:
            own = flat[bounds[self.rank] : bounds[self.rank + 1]]
            return [dist.reduce_scatter_tensor(own, flat, async_op=True)]
        return [
            dist.reduce(flat[start:stop], dst=owner, async_op=True)
            for owner, (start, stop) in enumerate(pairwise(bounds))
            if stop > start
        ]

    def sum_over_ranks(self, values: Tensor) -> None:
        """Sums a small tensor over ranks in place, blocking."""
        if self.world > 1:
            self.clock.wait([dist.all_reduce(values, async_op=True)])

    @property
    def _one_call(self) -> bool:
        """Even parts go through NCCL's own gather and reduce-scatter, in place."""
        return self.even and dist.get_backend() == "nccl"


def make_ranks(shares: Sequence[float], device: torch.device) -> Ranks:
    """Ranks of the default process group (or this process alone where there is none).

    Raises ValueError where the shares don't fit the world size or don't sum to 1.
    """
    active = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if active else (0, 1)
    if len(shares) != world:
        raise ValueError(f"{len(shares)} state shares for {world} ranks")
    if min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-6:
        raise ValueError(f"state shares must be fractions that sum to 1, got {list(shares)}")
    return Ranks(rank, world, tuple(shares), device, CommClock(device))
