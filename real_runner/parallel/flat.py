"""One unit's parameters as a flat vector of which every rank holds an arbitrary share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from real_runner.initial import initial_values
from real_runner.memory import resize_storage
from real_runner.parallel.ranks import Ranks

#: Each parameter starts at a multiple of this many elements, so that kernels read aligned rows.
ALIGN = 8


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its unit's flat vector (elements)."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()


@dataclass(frozen=True)
class Dtypes:
    """``compute`` is what layers are gathered and run in, ``master`` what shards, reductions and
    optimiser use."""

    compute: torch.dtype
    master: torch.dtype


DTYPES = {
    "bf16": Dtypes(torch.bfloat16, torch.float32),
    "fp16": Dtypes(torch.float16, torch.float32),
    "fp32": Dtypes(torch.float32, torch.float32),
    "fp64": Dtypes(torch.float64, torch.float64),
}


def place(module: nn.Module, prefix: str) -> tuple[tuple[Slot, ...], int]:
    """Slots of a module's parameters in order, and the length of the flat vector."""
    slots, offset = [], 0
    for name, parameter in module.named_parameters():
        slots.append(Slot(f"{prefix}.{name}", parameter.shape, offset))
        offset += -(-parameter.numel() // ALIGN) * ALIGN
    return tuple(slots), offset


class FlatUnit:
    """A unit (embedding, layer or head) whose state is sharded by the ranks' shares.

    The module's parameters are views of one buffer that has memory only between
    :meth:`start_gather` and the matching :meth:`release`; its values are the shards' of all ranks
    in the compute dtype. Gradients of all micro-batches add up in a whole buffer of the master
    dtype between :meth:`start_gradients` and :meth:`finish_reduce`, which adds this rank's part to
    ``shard.grad``.
    """

    def __init__(self, name: str, module: nn.Module, ranks: Ranks, dtypes: Dtypes) -> None:
        self.name, self.module, self.ranks, self.dtypes = name, module, ranks, dtypes
        self.slots, length = place(module, name)
        self.bounds = ranks.bounds(length)
        self.start, self.stop = self.bounds[ranks.rank], self.bounds[ranks.rank + 1]
        self._padded = self.bounds[-1]
        device = ranks.device
        self.shard = torch.zeros(self.stop - self.start, dtype=dtypes.master, device=device)
        self.shard.grad = torch.zeros_like(self.shard)
        self._gathered = torch.empty(self._padded, dtype=dtypes.compute, device=device)
        self._gradient: Tensor | None = None
        self._parameters = self._attach()
        resize_storage(self._gathered, 0)
        self._holds = 0
        self._gathers: list[Any] = []
        self._reductions: list[Any] = []

    def _attach(self) -> list[nn.Parameter]:
        """Puts views of the gathered buffer in the parameters' places.

        ``.data`` parts the views from the buffer's version counter: refilling the buffer with the
        same values between forward and backward is no change that autograd should refuse.
        """
        views = self._gathered.data
        attached = []
        for slot in self.slots:
            path, _, leaf = slot.name.removeprefix(f"{self.name}.").rpartition(".")
            owner = self.module.get_submodule(path)
            view = views[slot.offset : slot.offset + slot.numel].view(slot.shape)
            parameter = nn.Parameter(view)
            setattr(owner, leaf, parameter)
            if self.dtypes.compute != self.dtypes.master:
                parameter.register_post_accumulate_grad_hook(self._accumulator(slot))
            attached.append(parameter)
        return attached

    def _accumulator(self, slot: Slot) -> Any:
        """Hook that adds a micro-batch's gradient to the wide buffer and frees it."""

        def add(parameter: Tensor) -> None:
            assert self._gradient is not None and parameter.grad is not None
            self._gradient_view(slot).add_(parameter.grad)
            parameter.grad = None

        return add

    def _gradient_view(self, slot: Slot) -> Tensor:
        assert self._gradient is not None
        return self._gradient[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def initialise(self, *, seed: int, std: float, layers: int) -> None:
        """Fills this rank's shard; the values don't depend on the shares."""
        for slot, (start, stop), here in self.local_slices():
            values = initial_values(
                slot.name,
                slot.shape,
                (start, stop),
                seed=seed,
                std=std,
                layers=layers,
                device=self.ranks.device,
            )
            self.shard[here : here + stop - start].copy_(values)

    def local_slices(self) -> list[tuple[Slot, tuple[int, int], int]]:
        """What of each parameter is in this rank's shard.

        (slot, (start, stop) of the flattened parameter, where it starts in the shard); parameters
        without a part here are left out.
        """
        found = []
        for slot in self.slots:
            start = max(self.start, slot.offset)
            stop = min(self.stop, slot.offset + slot.numel)
            if stop > start:
                span = (start - slot.offset, stop - slot.offset)
                found.append((slot, span, start - self.start))
        return found

    def start_gather(self) -> None:
        """Starts to gather the parameters, unless they are (being) gathered."""
        self._holds += 1
        if self._holds > 1:
            return
        resize_storage(self._gathered, self._padded)
        with torch.no_grad():
            self._gathered[self.start : self.stop].copy_(self.shard)
        self._gathers = self.ranks.start_gather(self._gathered, self.bounds)

    def finish_gather(self) -> None:
        """Waits until the gathered parameters may be read."""
        self.ranks.clock.wait(self._gathers)
        self._gathers = []

    def release(self) -> None:
        """Frees the gathered parameters when everyone who gathered them has released them."""
        self._holds -= 1
        if self._holds == 0:
            resize_storage(self._gathered, 0)

    def start_gradients(self) -> None:
        """Makes room for the unit's whole gradient."""
        device, dtype = self.ranks.device, self.dtypes.master
        self._gradient = torch.zeros(self._padded, dtype=dtype, device=device)
        if self.dtypes.compute == self.dtypes.master:
            for parameter, slot in zip(self._parameters, self.slots, strict=True):
                parameter.grad = self._gradient_view(slot)

    def start_reduce(self) -> None:
        """Starts to sum the gradient over ranks."""
        assert self._gradient is not None
        for parameter in self._parameters:
            parameter.grad = None
        self._reductions = self.ranks.start_reduce(self._gradient, self.bounds)

    def finish_reduce(self) -> None:
        """Waits for the sum, adds this rank's part to the shard's gradient, frees the buffer."""
        assert self._gradient is not None and self.shard.grad is not None
        self.ranks.clock.wait(self._reductions)
        self._reductions = []
        self.shard.grad.add_(self._gradient[self.start : self.stop])
        self._gradient = None
