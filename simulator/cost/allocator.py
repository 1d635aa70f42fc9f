"""Torch's caching allocator, replayed: how much memory is reserved for a sequence of allocations.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` with default settings: sizes
rounded to 512 bytes; requests up to 1 MiB from 2 MiB segments (small pool), below 10 MiB from
20 MiB segments and larger ones from segments of their own, rounded to 2 MiB (large pool); the
smallest free block that fits is taken and split where the rest is worth keeping; freed neighbours
coalesce; blocks never leave the stream that they were allocated on; if the device is full, wholly
free segments are returned and the request is tried again. Streams never wait here: a freed block is
free at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from simulator.units import MIB

#: kMinBlockSize: every size is a multiple of it.
ROUND_BYTES = 512
#: kSmallSize: the largest request of the small pool, and what a split of a large block must leave.
SMALL_BYTES = MIB
#: kSmallBuffer, kLargeBuffer: segment sizes for small requests and for those below kMinLargeAlloc.
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
#: kRoundLarge: larger segments are multiples of it.
ROUND_LARGE_BYTES = 2 * MIB


@dataclass(frozen=True)
class Allocate:
    """A request for ``size_bytes`` on ``stream``; ``key`` names it for its release."""

    key: Hashable
    size_bytes: int
    stream: str = "compute"


@dataclass(frozen=True)
class Release:
    """The end of the allocation that ``key`` names."""

    key: Hashable


Event = Allocate | Release


@dataclass(frozen=True)
class AllocatorTrace:
    """What torch.cuda.memory_stats would report after the sequence.

    ``reserved_at_peak_bytes`` is what was reserved when allocated bytes peaked;
    ``failed_key`` the request that did not fit ``capacity_bytes`` (``None``: all did), after which
    the replay stops; ``retries`` counts how often cached segments had to be returned.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_at_peak_bytes: int
    final_reserved_bytes: int
    segments: int
    retries: int
    failed_key: Hashable | None = None

    @property
    def fragmentation(self) -> float:
        """Peak reserved over peak allocated, minus one."""
        if self.peak_allocated_bytes == 0:
            return 0.0
        return self.peak_reserved_bytes / self.peak_allocated_bytes - 1.0


@dataclass(eq=False)
class _Block:
    size: int
    address: int
    pool: _Pool
    free: bool = False
    previous: _Block | None = None
    next: _Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.size, self.address

    @property
    def whole_segment(self) -> bool:
        return self.previous is None and self.next is None


@dataclass(eq=False)
class _Pool:
    """Free blocks of one stream and size class, by size and address."""

    small: bool
    blocks: list[tuple[int, int, _Block]] = field(default_factory=list)
    tail: _Block | None = None  # last block of an expandable segment

    def add(self, block: _Block) -> None:
        block.free = True
        insort(self.blocks, (block.size, block.address, block), key=lambda entry: entry[:2])

    def remove(self, block: _Block) -> None:
        block.free = False
        index = bisect_left(self.blocks, block.order, key=lambda entry: entry[:2])
        del self.blocks[index]

    def best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self.blocks, (size, -1), key=lambda entry: entry[:2])
        return self.blocks[index][2] if index < len(self.blocks) else None


def rounded_bytes(size_bytes: int) -> int:
    """A request as the allocator counts it: a positive multiple of 512."""
    return max(ROUND_BYTES, -(-size_bytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(size: int) -> int:
    """The segment that is reserved for a rounded request that no free block fits."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def replay(
    events: Iterable[Event],
    *,
    expandable_segments: bool = False,
    capacity_bytes: int | None = None,
) -> AllocatorTrace:
    """Run a sequence of allocations and releases; see the module for the rules.

    ``expandable_segments`` models PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: one segment per
    pool that grows at its end by 2 MiB (small) or 20 MiB (large) pages.

    Raises:
        KeyError: a release names nothing that is allocated.
        ValueError: a key is allocated twice.
    """
    allocator = _Allocator(expandable_segments, capacity_bytes)
    for event in events:
        if isinstance(event, Release):
            allocator.release(event.key)
        elif not allocator.allocate(event):
            return allocator.trace(event.key)
    return allocator.trace(None)


class _Allocator:
    """State of the replay."""

    def __init__(self, expandable: bool, capacity: int | None) -> None:
        self._expandable = expandable
        self._capacity = capacity
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._live: dict[Hashable, _Block] = {}
        self._next_address = 0
        self._allocated = self._reserved = 0
        self._peak_allocated = self._peak_reserved = self._reserved_at_peak = 0
        self._segments = self._retries = 0

    def trace(self, failed: Hashable | None) -> AllocatorTrace:
        """Counters so far."""
        return AllocatorTrace(
            self._peak_allocated,
            self._peak_reserved,
            self._reserved_at_peak,
            self._reserved,
            self._segments,
            self._retries,
            failed,
        )

    def allocate(self, event: Allocate) -> bool:
        """Serve a request; False where it does not fit the capacity."""
        if event.key in self._live:
            raise ValueError(f"{event.key!r} is allocated twice")
        size = rounded_bytes(event.size_bytes)
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((event.stream, small), _Pool(small))
        block = pool.best_fit(size) or self._reserve(pool, size)
        if block is None:
            return False
        if block.free:
            pool.remove(block)
        self._split(block, size)
        self._live[event.key] = block
        self._allocated += block.size
        if self._allocated > self._peak_allocated:
            self._peak_allocated, self._reserved_at_peak = self._allocated, self._reserved
        return True

    def release(self, key: Hashable) -> None:
        """Free a block and join it with free neighbours."""
        block = self._live.pop(key)
        self._allocated -= block.size
        pool = block.pool
        for other in (block.previous, block.next):
            if other is not None and other.free:
                pool.remove(other)
                self._join(block, other)
        pool.add(block)

    def _split(self, block: _Block, size: int) -> None:
        """Cut a block to size where the allocator keeps the rest as a free block."""
        rest = block.size - size
        generous = block.pool.small or self._expandable
        if rest < ROUND_BYTES if generous else rest <= SMALL_BYTES:
            return
        tail = _Block(rest, block.address + size, block.pool, previous=block, next=block.next)
        if block.next is not None:
            block.next.previous = tail
        elif block.pool.tail is block:
            block.pool.tail = tail
        block.size, block.next = size, tail
        block.pool.add(tail)

    @staticmethod
    def _join(block: _Block, other: _Block) -> None:
        """Merge a free neighbour into a block."""
        if other is block.previous:
            block.address, block.previous = other.address, other.previous
            if other.previous is not None:
                other.previous.next = block
        else:
            block.next = other.next
            if other.next is not None:
                other.next.previous = block
            elif block.pool.tail is other:
                block.pool.tail = block
        block.size += other.size

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        """A new segment (or a longer expandable one) that holds ``size``."""
        if self._expandable:
            return self._extend(pool, size)
        need = segment_bytes(size)
        if not self._fits(need):
            return None
        block = _Block(need, self._address(need), pool)
        self._grow(need)
        self._segments += 1
        return block

    def _extend(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages behind the last block of the pool's segment."""
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        last = pool.tail
        free = last.size if last is not None and last.free else 0
        need = -(-(size - free) // page) * page
        if not self._fits(need):
            return None
        self._grow(need)
        if last is not None and last.free:
            pool.remove(last)
            last.size += need
            return last
        self._segments += last is None
        # One address range per pool: far apart, so that ranges never meet.
        base = self._address(1 << 50) if last is None else last.address + last.size
        block = _Block(need, base, pool, previous=last)
        if last is not None:
            last.next = block
        pool.tail = block
        return block

    def _fits(self, need: int) -> bool:
        """Whether the device has room, after returning free segments if it must."""
        if self._capacity is None or self._reserved + need <= self._capacity:
            return True
        self._retries += 1
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self._expandable:
                    self._unmap(pool, block)
                elif block.whole_segment:
                    pool.remove(block)
                    self._reserved -= block.size
                    self._segments -= 1
        return self._reserved + need <= self._capacity

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Return the free end of an expandable segment."""
        if block is not pool.tail:
            return
        pool.remove(block)
        self._reserved -= block.size
        pool.tail = block.previous
        if block.previous is not None:
            block.previous.next = None
        else:
            self._segments -= 1

    def _grow(self, need: int) -> None:
        self._reserved += need
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def _address(self, need: int) -> int:
        address = self._next_address
        # A gap keeps neighbouring segments from being joined.
        self._next_address += need + ROUND_LARGE_BYTES
        return address
