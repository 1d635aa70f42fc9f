"""Measured times of collectives: the table's rows, and published points with their sources."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = "collectives.csv (microsoft/vidur profiling, MIT)"
NDM_V4 = "microsoft/mscclpp, NDmv4 performance page, NCCL 2.17.1"
OCI_A100 = "oracle-quickstart/oci-hpc-oke README, nccl-tests on 2 x BM.GPU4.8, 1,600 Gb/s RoCE"
HGX_H100 = "NVIDIA/nccl-tests issue 309, HGX H100 with 8 x 400 Gb/s InfiniBand, NCCL 2.26"
NVLS_RATES = "NVIDIA/nccl issue 1455, 8 H100"
A3_MEGA = (
    "nccl-tests on 2 x a3-megagpu-8g, 8 x 200 Gb/s: all-reduce from "
    "lessizzmore/create-a3mega-ztan-fork, all-gather from a public note of 2025-02"
)
P4D = "NVIDIA/nccl issue 527, p4d.24xlarge"


@dataclass(frozen=True)
class Row:
    """One measured time: op on ``n`` ranks, ``per_node`` of them in a node."""

    series: str
    op: str
    n: int
    per_node: int
    bytes_: float
    time_s: float
    held_out: bool


def read_rows(path: Path) -> list[Row]:
    """Rows of the table; odd positions of every series by size are held out."""
    with path.open(newline="", encoding="utf-8") as file:
        raw = list(csv.DictReader(file))
    raw.sort(key=lambda r: (r["system"], r["op"], r["n_gpus"], r["gpus_per_node"], int(r["bytes"])))
    rows: list[Row] = []
    count: dict[str, int] = {}
    for r in raw:
        series = f"{r['system']} {r['op']} {r['n_gpus']}/{r['gpus_per_node']}"
        seen = count.get(series, 0)
        count[series] = seen + 1
        rows.append(
            Row(
                series,
                r["op"],
                int(r["n_gpus"]),
                int(r["gpus_per_node"]),
                float(r["bytes"]),
                float(r["time_us"]) * 1e-6,
                seen % 2 == 1,
            )
        )
    return rows


def published(
    source: str, op: str, n: int, per_node: int, points: Sequence[tuple[float, float]]
) -> list[Row]:
    """Rows of a published series of (bytes, microseconds); every second one is held out."""
    return [
        Row(f"{source} {op} {n}/{per_node}", op, n, per_node, size, us * 1e-6, i % 2 == 1)
        for i, (size, us) in enumerate(points)
    ]


def bus_rate(
    source: str, op: str, n: int, per_node: int, size: float, gb_per_s: float
) -> list[Row]:
    """One published bus bandwidth as a row that is fitted (nccl-tests' definition of busbw)."""
    factor = (2 if op == "all_reduce" else 1) * (n - 1) / n
    seconds = factor * size / (gb_per_s * 1e9)
    return [Row(f"{source} {op} {n}/{per_node}", op, n, per_node, size, seconds, False)]


MIB, GIB = 2.0**20, 2.0**30


def h100_pair_rows() -> list[Row]:
    """All-reduce of 2 and 4 HGX H100 nodes, out of place."""
    two = [
        (2**13, 32.12), (2**16, 33.84), (2**18, 48.67), (MIB, 71.93), (2 * MIB, 76.24),
        (4 * MIB, 94.38), (8 * MIB, 132.6), (16 * MIB, 185.4),
        (32 * MIB, 267.9), (64 * MIB, 466.1), (128 * MIB, 748.3), (256 * MIB, 1282.8),
        (512 * MIB, 2357.6), (GIB, 4484.9), (2 * GIB, 8729.8), (8 * GIB, 34381.0),
    ]  # fmt: skip
    four = [
        (2**13, 46.84), (2**16, 50.83), (2**18, 67.82), (MIB, 82.17), (4 * MIB, 151.1),
        (8 * MIB, 217.3), (16 * MIB, 259.6), (32 * MIB, 376.0),
        (64 * MIB, 579.1), (128 * MIB, 990.7), (256 * MIB, 1768.0), (512 * MIB, 3109.0),
        (GIB, 5808.8), (2 * GIB, 11508.0), (8 * GIB, 45606.0),
    ]  # fmt: skip
    return published("HGX H100", "all_reduce", 16, 8, two) + published(
        "HGX H100", "all_reduce", 32, 8, four
    )


def oci_a100_rows() -> tuple[list[Row], list[Row]]:
    """All-reduce of 2 A100 nodes on RoCE, out of place: the ring's sizes, then the tree's.

    Up to 256 MiB the bus rate stays under the 200 GB/s of the NICs, from 1 GiB it exceeds them.
    """
    ring = [
        (2**13, 48.16), (2**16, 51.69), (2**18, 67.95), (MIB, 85.58), (2 * MIB, 99.19),
        (4 * MIB, 127.0), (8 * MIB, 174.3), (16 * MIB, 282.7), (32 * MIB, 452.3),
        (64 * MIB, 821.7), (128 * MIB, 1542.0), (256 * MIB, 3042.7),
    ]  # fmt: skip
    tree = [(GIB, 9187.8), (2 * GIB, 18289.0), (4 * GIB, 34176.0), (8 * GIB, 67689.0)]
    return (
        published("OCI A100 (ring sizes)", "all_reduce", 16, 8, ring),
        published("OCI A100 (tree sizes)", "all_reduce", 16, 8, tree),
    )


def a3_mega_rows() -> list[Row]:
    """All-reduce (a tree, its bus rate exceeds the NICs') and all-gather of two nodes."""
    reduce = [
        (2**13, 131.6), (2**16, 159.4), (2**18, 167.1), (MIB, 203.2), (4 * MIB, 364.6),
        (16 * MIB, 977.6), (64 * MIB, 1261.6), (128 * MIB, 1652.2), (256 * MIB, 2360.9),
        (512 * MIB, 3817.5), (GIB, 6759.0), (2 * GIB, 12646.0), (4 * GIB, 24361.0),
        (8 * GIB, 47535.0),
    ]  # fmt: skip
    gather = [
        (8 * MIB, 309.5), (16 * MIB, 412.6), (32 * MIB, 457.4), (64 * MIB, 667.7),
        (128 * MIB, 1061.1), (256 * MIB, 1670.9), (512 * MIB, 2858.2), (GIB, 5516.7),
        (2 * GIB, 10822.0), (8 * GIB, 42637.0),
    ]  # fmt: skip
    return published("a3-mega", "all_reduce", 16, 8, reduce) + published(
        "a3-mega", "all_gather", 16, 8, gather
    )
