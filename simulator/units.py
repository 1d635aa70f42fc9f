"""Units: SI inside the code, converted here and only here.

Everything in the package is in bytes, seconds, FLOP, FLOP/s, bytes/s and watts; names carry the
unit. GB is 10**9 bytes (links, datasheets), GiB is 2**30 bytes (memory as CUDA reports it).
"""

from __future__ import annotations

KB = 1_000
MB = 1_000_000
GB = 1_000_000_000
TB = 1_000_000_000_000

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

TFLOPS = 1e12
MICROSECOND = 1e-6
NANOSECONDS_PER_SECOND = 1_000_000_000

SECONDS_PER_HOUR = 3_600
SECONDS_PER_DAY = 86_400


def gbps_to_bytes_per_s(gbps: float) -> float:
    """Link rate in Gb/s (10**9 bits per second) as bytes per second."""
    return gbps * 1e9 / 8.0


def to_gib(value_bytes: float) -> float:
    """Bytes as GiB (2**30 bytes)."""
    return value_bytes / GIB


def format_bytes(value_bytes: float) -> str:
    """Bytes for a person, binary units: ``format_bytes(2**31) == '2.00 GiB'``."""
    size = float(value_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def format_seconds(value_s: float) -> str:
    """Seconds for a person, with a unit that keeps three or four digits."""
    magnitude = abs(value_s)
    if magnitude == 0:
        return "0 s"
    if magnitude < 1e-3:
        return f"{value_s * 1e6:.1f} µs"
    if magnitude < 1:
        return f"{value_s * 1e3:.1f} ms"
    if magnitude < 2 * 60:
        return f"{value_s:.2f} s"
    if magnitude < 2 * SECONDS_PER_HOUR:
        return f"{value_s / 60:.1f} min"
    if magnitude < 2 * SECONDS_PER_DAY:
        return f"{value_s / SECONDS_PER_HOUR:.1f} h"
    return f"{value_s / SECONDS_PER_DAY:,.1f} days"


def format_rate(value_bytes_per_s: float) -> str:
    """Bytes per second for a person, decimal units as link datasheets use."""
    return f"{value_bytes_per_s / GB:,.1f} GB/s"


def nanoseconds(value_s: float) -> int:
    """Seconds as the integer nanoseconds that the engine's clock counts."""
    return round(value_s * NANOSECONDS_PER_SECOND)
