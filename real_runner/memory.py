"""Live tensor bytes of a process: the allocator's count where there is none (CPU).

:class:`MemoryMeter` sees every tensor that an operator returns and counts its storage until the
storage is freed. Workspaces that a kernel allocates and frees inside itself stay unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Counts live storage bytes on ``device``; with ``limit_bytes``, runs out like a GPU would.

    A storage is counted from the first operator that returns a tensor on it, so build everything
    inside. Threads other than the one that entered it aren't seen.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Imported here: it takes longer than the rest of a rank's start.
        from torch.distributed.tensor import DTensor

        self._outer = DTensor
        self.device, self.limit_bytes = device, limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._exempt = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, self._outer) for t in types):
            return NotImplemented  # it comes back with the plain tensors inside
        result = func(*args, **(kwargs or {}))
        if not self._exempt:
            for leaf in tree_leaves(result):
                # A fake tensor (of a sharding rule, say) claims a device, its storage is meta.
                if isinstance(leaf, Tensor) and leaf.untyped_storage().device == self.device:
                    self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._watches:
            return
        self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = 0
        self._resize(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        self._watches.pop(key, None)
        self.live_bytes -= self._sizes.pop(key, 0)

    def _resize(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            error = torch.OutOfMemoryError(
                f"out of memory: {size / 2**20:.1f} MiB more need {self.live_bytes / 2**20:.1f} "
                f"MiB, the emulated device has {self.limit_bytes / 2**20:.1f} MiB"
            )
            error.add_note(self.summary())
            raise error
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _watch_resizing(self) -> None:
        """Counts what ``UntypedStorage.resize_`` changes: it goes past the dispatcher.

        FSDP2 and the runner's own units free and refill their buffers with it.
        """
        original = self._original_resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if id(storage) in self._watches:
                self._resize(id(storage), storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]

    def summary(self) -> str:
        """Live and peak bytes, and the largest live tensors."""
        largest = sorted(self._sizes.values(), reverse=True)[:5]
        sizes = ", ".join(f"{size / 2**20:.1f}" for size in largest)
        return (
            f"live {self.live_bytes / 2**20:.1f} MiB in {len(self._sizes)} tensors, peak "
            f"{self.peak_bytes / 2**20:.1f} MiB, largest {sizes} MiB"
        )

    def reset_peak(self) -> None:
        """The peak starts anew from what is live now."""
        self.peak_bytes = self.live_bytes

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Tensors made inside aren't counted: host memory of an emulated device."""
        self._exempt += 1
        try:
            yield
        finally:
            self._exempt -= 1

    def __enter__(self) -> MemoryMeter:
        _active.append(self)
        self._watch_resizing()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        _active.remove(self)


#: Meters that are entered.
_active: list[MemoryMeter] = []


def resize_storage(tensor: Tensor, elements: int) -> None:
    """Gives a tensor's storage room for ``elements`` elements; 0 frees it.

    The tensor and its views stay valid as objects; their values are lost.
    """
    tensor.untyped_storage().resize_(elements * tensor.element_size())


@contextmanager
def host_memory() -> Iterator[None]:
    """Tensors made inside are host memory: no meter counts them."""
    for meter in _active:
        meter._exempt += 1
    try:
        yield
    finally:
        for meter in _active:
            meter._exempt -= 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on CUDA, on the host or in a meter."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "NCCL_OUT" in text
    )


def memory_summary(error: BaseException, device: torch.device) -> str:
    """What the process held when memory ran out."""
    if device.type == "cuda":
        return str(torch.cuda.memory_summary(device, abbreviated=True))
    return "\n".join(getattr(error, "__notes__", []))
