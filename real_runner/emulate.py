"""A slower device than the one at hand, for mixed clusters on one machine.

Emulation, not measurement: a rank with factor f does f times the work of each unit. On a CPU the
further work is matrix products on small buffers until (f - 1) times the unit's own time has
passed, so that the core stays as busy as the slower device would be. On CUDA the unit's forward
pass is run again on the same input and thrown away, as often as (f - 1) times the unit's passes
ask (a backward pass counts as two forward passes, three with recompute); fractions are carried
over to the next unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from real_runner.memory import host_memory

_SIDE = 32


class Slowdown:
    """Pays each unit's further work; ``factor`` 1 pays none."""

    def __init__(self, factor: float, device: torch.device) -> None:
        """Raises ValueError for a factor below 1."""
        if factor < 1.0:
            raise ValueError(f"a rank can be slowed by a factor of 1 or more, got {factor}")
        self.factor, self.device = factor, device
        self._owed = 0.0
        self._start = 0.0
        side = (_SIDE, _SIDE)
        with host_memory():
            self._left, self._out = torch.ones(side), torch.empty(side)

    def begin(self) -> None:
        """A unit's work starts."""
        self._start = time.perf_counter()

    def end(self, passes: float, again: Callable[[], object] | None) -> None:
        """A unit's work is done: ``passes`` forward passes' worth; ``again`` runs one more."""
        if self.factor == 1.0:
            return
        if self.device.type == "cuda":
            self._owed += (self.factor - 1.0) * passes
            while self._owed >= 1.0 and again is not None:
                with torch.no_grad():
                    again()
                self._owed -= 1.0
            return
        now = time.perf_counter()
        until = now + (now - self._start) * (self.factor - 1.0)
        while time.perf_counter() < until:
            torch.mm(self._left, self._left, out=self._out)
