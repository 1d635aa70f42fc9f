"""Where layer inputs (boundary activations) stay between their uses: on the device or the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from real_runner.memory import host_memory


class Boundaries(Protocol):
    """Keeps tensors by key. A key is put once, read any number of times, then dropped."""

    def put(self, key: Hashable, value: Tensor) -> None:
        """Keeps a tensor."""

    def prefetch(self, key: Hashable) -> None:
        """Says that the key is read next (a key that isn't kept is ignored)."""

    def get(self, key: Hashable) -> Tensor:
        """The tensor on the device."""

    def drop(self, key: Hashable) -> None:
        """Forgets the key."""


class OnDevice:
    """Tensors stay where they are."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def put(self, key: Hashable, value: Tensor) -> None:
        self._kept[key] = value

    def prefetch(self, key: Hashable) -> None:
        """Nothing to do."""

    def get(self, key: Hashable) -> Tensor:
        return self._kept[key]

    def drop(self, key: Hashable) -> None:
        del self._kept[key]


class OnHost:
    """Tensors go to host memory (pinned beside CUDA) and come back when they are read.

    Copies run on their own CUDA stream, beside computation; the tensor put last stays on the device
    until the next one is put, since the following layer often reads it at once. On a CPU run the
    copy is a plain one into memory that no meter counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[Hashable, Tensor] = {}
        self._here: dict[Hashable, Tensor] = {}
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._latest: Hashable | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, key: Hashable, value: Tensor) -> None:
        if self._latest is not None:
            self._here.pop(self._latest, None)
        value = value.detach()
        with host_memory():
            host = self._buffer(value)
            if self._stream is None:
                host.copy_(value)
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    host.copy_(value, non_blocking=True)
                value.record_stream(self._stream)
        self._host[key], self._here[key], self._latest = host, value, key

    def _buffer(self, value: Tensor) -> Tensor:
        free = self._free.setdefault((value.shape, value.dtype), [])
        if free:
            return free.pop()
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=self._stream is not None)

    def prefetch(self, key: Hashable) -> None:
        if key in self._here or key not in self._host:
            return
        host = self._host[key]
        if self._stream is None:
            self._here[key] = host.clone()
            return
        with torch.cuda.stream(self._stream):
            self._here[key] = host.to(self._device, non_blocking=True)

    def get(self, key: Hashable) -> Tensor:
        self.prefetch(key)
        value = self._here[key] if key == self._latest else self._here.pop(key)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            value.record_stream(current)
        return value

    def drop(self, key: Hashable) -> None:
        self._here.pop(key, None)
        host = self._host.pop(key)
        self._free.setdefault((host.shape, host.dtype), []).append(host)
