"""Fit the link parameters of ``hardware_db/calibration/collectives.yaml`` to measured times.

    python -m benchmarks.fit_collectives --data DIR --out hardware_db/calibration/collectives.yaml

``DIR/collectives.csv`` holds ``system, op, n_gpus, gpus_per_node, bytes, time_us``. Every second
size of each series is held out: the fit never sees it and the errors are reported on it. Published
long-message rates and series (``collective_points.py``) pin what the table's 64 MB cannot show.
Few, bounded parameters per link kind; the loss is the mean absolute log ratio, which shrugs off
the bimodal small messages.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks.collective_assumptions import (
    STATED_LATENCY_S,
    assumed_fabrics,
    assumed_links,
    entry_of,
)
from benchmarks.collective_points import (
    A3_MEGA,
    GIB,
    HGX_H100,
    NDM_V4,
    NVLS_RATES,
    OCI_A100,
    TABLE,
    Row,
    a3_mega_rows,
    bus_rate,
    h100_pair_rows,
    oci_a100_rows,
    read_rows,
)
from simulator.cost.collectives import (
    ALL_REDUCE_ALGORITHMS,
    LinkParams,
    Network,
    Placement,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    send_recv_s,
)

FloatArray = npt.NDArray[np.float64]
Entry = dict[str, Any]

#: Bounds of every fitted parameter, (inside a node, between nodes): physical, and wide enough not
#: to bind in a good fit. A step inside a node takes at least NCCL's LL latency over NVLink, 0.6 us;
#: one between nodes lies between its LL and simple latency over the network, 2.7 and 14 us
#: (``src/graph/tuning.cc``).
BOUNDS = {
    "efficiency": ((0.1, 0.95), (0.1, 0.97)),
    "p2p_efficiency": ((0.1, 0.9), (0.1, 0.97)),
    "nvls_efficiency": ((0.3, 0.95), (0.3, 0.95)),
    "latency_s": ((0.6e-6, 10e-6), (2.7e-6, 14e-6)),
    "base_s": ((2e-6, 60e-6), (2e-6, 60e-6)),
    "p2p_base_s": ((2e-6, 60e-6), (2e-6, 60e-6)),
    "half_size_s": ((1e-8, 300e-6), (1e-8, 1e-3)),
}

#: Weight of rows below 1 MB: they measure launch and skew, scatter by a factor of two, and are a
#: small part of training traffic.
SMALL_ROW_WEIGHT = 0.3

OPS = {"all_gather": all_gather_s, "all_to_all": all_to_all_s}


@dataclass(frozen=True)
class System:
    """A measured machine.

    ``build`` returns its network from (entry under fit, finished entries by ``section/key``);
    ``algorithms`` is what its all-reduce used, as far as its rates show.
    """

    rows: tuple[Row, ...]
    build: Callable[[Entry, dict[str, Entry]], Network]
    algorithms: tuple[str, ...] = ALL_REDUCE_ALGORITHMS


def link(
    entry: Entry, kind: str, bytes_per_s: float, *, switch: bool = False, nvls: bool = False
) -> LinkParams:
    """Link of a given peak with the fitted entry."""
    return LinkParams(
        kind=kind,
        bytes_per_s=bytes_per_s,
        efficiency=entry["efficiency"],
        p2p_efficiency=entry["p2p_efficiency"],
        latency_s=entry["latency_s"],
        base_s=entry["base_s"],
        p2p_base_s=entry["p2p_base_s"],
        half_size_bytes=entry["half_size_s"] * bytes_per_s,
        switch=switch,
        nvls=nvls,
        nvls_efficiency=entry.get("nvls_efficiency", 0.0),
    )


def switched(kind: str, peak: float, *, nvls: bool = False) -> Callable[..., Network]:
    """Builder of a one-node network behind a switch whose link is under fit."""

    def build(entry: Entry, done: dict[str, Entry]) -> Network:
        whole = link(entry, kind, peak, switch=True, nvls=nvls)
        return Network(whole, whole, None, 8)

    return build


def on_fabric(
    kind: str, inside: str, peak: float, nvls: bool, nic: float, nics: int = 8
) -> Callable[..., Network]:
    """Builder of 8-GPU nodes with a finished switch entry and the fabric under fit."""

    def build(entry: Entry, done: dict[str, Entry]) -> Network:
        whole = link(done[inside], inside, peak, switch=True, nvls=nvls)
        return Network(whole, whole, link(entry, kind, nic), 8, nic * nics)

    return build


def predict(net: Network, rows: Sequence[Row], algorithms: tuple[str, ...]) -> FloatArray:
    """Model times of the rows, seconds."""
    times = np.empty(len(rows))
    for op in {r.op for r in rows}:
        at = np.array([i for i, r in enumerate(rows) if r.op == op])
        size = np.array([rows[i].n for i in at])
        members = np.array([rows[i].per_node for i in at])
        sent = np.array([rows[i].bytes_ for i in at])
        # nccl-tests and the table run one group at a time.
        group = Placement(size, members, np.ones_like(size))
        if op == "send_recv":
            times[at] = send_recv_s(net, sent, members == 1, senders_per_node=1)
        elif op == "all_reduce":
            times[at] = all_reduce_s(net, group, sent, algorithms=algorithms)
        else:
            times[at] = OPS[op](net, group, sent)
    return times


def minimise(
    loss: Callable[[FloatArray], float], start: FloatArray, steps: int = 500
) -> tuple[FloatArray, float]:
    """Nelder-Mead with standard coefficients; enough for the six smooth parameters here."""
    n = len(start)
    points = [start] + [start + 0.7 * np.eye(n)[i] for i in range(n)]
    values = [loss(p) for p in points]
    for _ in range(steps):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        mirrored = 2 * centre - points[-1]
        value = loss(mirrored)
        if value < values[0]:
            further = 3 * centre - 2 * points[-1]
            beyond = loss(further)
            points[-1], values[-1] = (further, beyond) if beyond < value else (mirrored, value)
        elif value < values[-2]:
            points[-1], values[-1] = mirrored, value
        else:
            nearer = (centre + points[-1]) / 2
            value = loss(nearer)
            if value < values[-1]:
                points[-1], values[-1] = nearer, value
            else:
                points = [points[0]] + [(points[0] + p) / 2 for p in points[1:]]
                values = [values[0]] + [loss(p) for p in points[1:]]
    best = int(np.argmin(values))
    return points[best], values[best]


def _bounded(names: Sequence[str], x: FloatArray, level: int) -> Entry:
    """Unconstrained numbers as parameters inside their bounds (logistic in log space)."""
    out: Entry = {}
    for name, value in zip(names, x, strict=True):
        low, high = (math.log(b) for b in BOUNDS[name][level])
        out[name] = math.exp(low + (high - low) / (1 + math.exp(-min(max(value, -30), 30))))
    return out


def fit(
    names: Sequence[str],
    fixed: Entry,
    systems: Sequence[System],
    done: dict[str, Entry],
    level: int,
) -> Entry:
    """Parameters ``names`` that bring the fitted rows of ``systems`` closest; best of 6 starts.

    ``level`` picks the bounds: 0 inside a node, 1 between nodes.
    """
    parts = [(s, [r for r in s.rows if not r.held_out]) for s in systems]
    measured = [np.array([r.time_s for r in rows]) for _, rows in parts]
    weights = [np.where([r.bytes_ < 1e6 for r in rows], SMALL_ROW_WEIGHT, 1.0) for _, rows in parts]

    def loss(x: FloatArray) -> float:
        entry = {**fixed, **_bounded(names, x, level)}
        # Every series weighs the same, however many sizes it has.
        total, series = 0.0, 0
        for (system, rows), times, weight in zip(parts, measured, weights, strict=True):
            ratio = np.abs(
                np.log(predict(system.build(entry, done), rows, system.algorithms) / times)
            )
            for label in {r.series for r in rows}:
                at = np.array([r.series == label for r in rows])
                total += float(np.average(ratio[at], weights=weight[at]))
                series += 1
        return total / series + 1e-4 * float(np.sum(x**2))

    rng = np.random.default_rng(7)
    starts = [np.zeros(len(names))] + [rng.normal(0, 1, len(names)) for _ in range(5)]
    best = min((minimise(loss, s) for s in starts), key=lambda result: result[1])
    return {k: float(f"{v:.3g}") for k, v in _bounded(names, best[0], level).items()}


def errors(systems: Sequence[System], entry: Entry, done: dict[str, Entry]) -> dict[str, Entry]:
    """Median and p90 of the absolute relative error on held-out rows, by series."""
    out: dict[str, Entry] = {}
    for system in systems:
        rows = [r for r in system.rows if r.held_out]
        if not rows:
            continue
        times = np.array([r.time_s for r in rows])
        error = np.abs(predict(system.build(entry, done), rows, system.algorithms) / times - 1)
        large = np.array([r.bytes_ >= 1e6 for r in rows])
        for label in sorted({r.series for r in rows}):
            at = np.array([r.series == label for r in rows])
            out[label] = {
                "rows": int(at.sum()),
                "median": round(float(np.median(error[at])), 3),
                "p90": round(float(np.percentile(error[at], 90)), 3),
            }
            if (at & large).any():
                out[label]["median_from_1MB"] = round(float(np.median(error[at & large])), 3)
    return out


def _family_nvswitch3(table: list[Row]) -> list[System]:
    rows = [r for r in table if r.series.startswith("a100_dgx") and r.per_node == r.n]
    rows += bus_rate(NDM_V4, "all_reduce", 8, 8, GIB, 231.45)
    rows += bus_rate(NDM_V4, "all_gather", 8, 8, GIB, 253.59)
    return [System(tuple(rows), switched("nvswitch3", 300e9))]


def _family_nvswitch4(table: list[Row]) -> list[System]:
    """The table's rates are a ring's (365 GB/s at 64 MB on 8 GPUs); in-switch rates are newer."""
    rows = [r for r in table if r.series.startswith("h100_dgx") and r.per_node == r.n]
    rows += bus_rate(NVLS_RATES, "all_gather", 8, 8, 4 * GIB, 368.0)
    in_switch = [
        row
        for n, rate in ((4, 370.0), (6, 440.0), (8, 480.0))
        for row in bus_rate(NVLS_RATES, "all_reduce", n, n, 4 * GIB, rate)
    ]
    build = switched("nvswitch4", 450e9, nvls=True)
    return [System(tuple(rows), build, ("ring",)), System(tuple(in_switch), build)]


def _family_pairs(table: list[Row]) -> list[System]:
    """Bridged pairs; the send/receive rows of the two boxes are one measurement, used once."""
    rows = [
        r
        for r in table
        if r.series
        in ("a100_pairwise_nvlink all_reduce 2/2", "h100_pairwise_nvlink all_reduce 2/2")
        or r.series == "h100_pairwise_nvlink send_recv 2/2"
    ]
    return [System(tuple(rows), switched("nvlink-pairs", 300e9))]


def _family_between_pairs(table: list[Row]) -> list[System]:
    return [
        System(
            tuple(r for r in table if r.series == f"{box}_pairwise_nvlink all_reduce 4/4"),
            switched("pcie-between-pairs", peak),
        )
        for box, peak in (("a100", 31.5e9), ("h100", 63e9))
    ]


def _family_infiniband(table: list[Row]) -> list[System]:
    """NDmv4's all-reduce stays below the NIC rate, so it was a ring."""
    h100 = [r for r in table if r.series == "h100_dgx send_recv 2/1"] + h100_pair_rows()
    a100 = bus_rate(NDM_V4, "all_gather", 16, 8, 4 * GIB, 186.01)
    a100 += bus_rate(NDM_V4, "all_reduce", 16, 8, 4 * GIB, 188.18)
    a100 += bus_rate(NDM_V4, "all_to_all", 16, 8, 4 * GIB, 37.81)
    ndr = on_fabric("infiniband", "links/nvswitch4", 450e9, True, 50e9)
    hdr = on_fabric("infiniband", "links/nvswitch3", 300e9, False, 25e9)
    return [System(tuple(h100), ndr), System(tuple(a100), hdr, ("ring",))]


def _family_roce(table: list[Row]) -> list[System]:
    build = on_fabric("roce", "links/nvswitch3", 300e9, False, 25e9)
    ring, tree = oci_a100_rows()
    older = bus_rate("oracle-quickstart, NCCL 2.14", "all_reduce", 16, 8, 10 * GIB, 180.06)
    return [System((*ring, *older), build, ("ring",)), System(tuple(tree), build)]


def _family_tcpxo(table: list[Row]) -> list[System]:
    build = on_fabric("gpudirect-tcpxo", "links/nvswitch4", 450e9, False, 25e9)
    return [System(tuple(a3_mega_rows()), build)]


def _family_staged(table: list[Row]) -> list[System]:
    """The table's A100 fabric. Its rate stops growing at four GPUs per node: four NICs.

    The machines and NICs aren't named; 100 Gb/s each is assumed, so the fractions are relative.
    """
    build = on_fabric("staged", "links/nvswitch3", 300e9, False, 12.5e9, nics=4)
    rows = [
        r
        for r in table
        if r.series.startswith("a100_dgx")
        and ((r.per_node < r.n and r.op == "all_reduce") or r.series.endswith("send_recv 2/1"))
    ]
    return [System(tuple(rows), build, ("ring",))]


#: section/key, fitted parameters, fixed parameters, rows, source.
FITTED: tuple[tuple[str, tuple[str, ...], Entry, Callable[[list[Row]], list[System]], str], ...] = (
    (
        "links/nvswitch3",
        ("efficiency", "p2p_efficiency", "latency_s", "base_s", "p2p_base_s", "half_size_s"),
        {},
        _family_nvswitch3,
        f"{TABLE}: a100_dgx inside a node; 1 GiB bus rates: {NDM_V4}",
    ),
    (
        "links/nvswitch4",
        (
            "efficiency",
            "p2p_efficiency",
            "latency_s",
            "base_s",
            "p2p_base_s",
            "half_size_s",
            "nvls_efficiency",
        ),
        {},
        _family_nvswitch4,
        f"{TABLE}: h100_dgx inside a node; 4 GiB bus rates of ring and NVLS: {NVLS_RATES}",
    ),
    (
        "links/nvlink-pairs",
        ("efficiency", "p2p_efficiency", "latency_s", "base_s", "p2p_base_s", "half_size_s"),
        {},
        _family_pairs,
        f"{TABLE}: two bridged GPUs of the pairwise boxes",
    ),
    (
        "links/pcie-between-pairs",
        ("efficiency", "base_s", "half_size_s"),
        {"p2p_efficiency": 0.75, "latency_s": 3e-6, "p2p_base_s": 5e-6},
        _family_between_pairs,
        f"{TABLE}: four GPUs of the pairwise boxes; point-to-point and step latency assumed",
    ),
    (
        "fabrics/infiniband",
        ("efficiency", "p2p_efficiency", "latency_s", "base_s", "p2p_base_s", "half_size_s"),
        {},
        _family_infiniband,
        f"{TABLE}: h100_dgx send/receive; {HGX_H100}; {NDM_V4}",
    ),
    (
        "fabrics/roce",
        ("efficiency", "latency_s", "base_s", "half_size_s"),
        {"p2p_efficiency": 0.72, "p2p_base_s": 18e-6},
        _family_roce,
        f"{OCI_A100}; point-to-point as InfiniBand",
    ),
    (
        "fabrics/gpudirect-tcpxo",
        ("efficiency", "latency_s", "base_s", "half_size_s"),
        {"p2p_efficiency": 0.75, "p2p_base_s": 40e-6},
        _family_tcpxo,
        f"{A3_MEGA}; point-to-point assumed",
    ),
    (
        "fabrics/staged",
        ("efficiency", "p2p_efficiency", "latency_s", "base_s", "p2p_base_s", "half_size_s"),
        {},
        _family_staged,
        f"{TABLE}: a100_dgx between nodes, taken as four 100 Gb/s NICs through host memory",
    ),
)


def fit_all(table: list[Row]) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """All entries by ``section/key``, and held-out errors by series."""
    done: dict[str, Entry] = {}
    report: dict[str, Entry] = {}
    for key, names, fixed, family, source in FITTED:
        systems = family(table)
        entry = {**fixed, **fit(names, fixed, systems, done, int(key.startswith("fabrics")))}
        report.update(errors(systems, entry, done))
        done[key] = entry_of(entry, "measured", source)
    done.update(assumed_links(done))
    done.update(assumed_fabrics(done))
    for name, latency_s in STATED_LATENCY_S.items():
        done[f"fabrics/{name}"]["stated_latency_s"] = latency_s
    return done, report


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, write the YAML file, print the held-out errors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with collectives.csv")
    parser.add_argument("--out", type=Path, required=True, help="YAML file to write")
    args = parser.parse_args(argv)
    done, report = fit_all(read_rows(args.data / "collectives.csv"))
    document: Entry = {
        "made_by": "python -m benchmarks.fit_collectives",
        "meaning": "fractions of the datasheet rate; seconds; half_size_s times the rate in bytes",
        "links": {},
        "fabrics": {},
        "held_out_errors": report,
    }
    for key in sorted(done):
        section, name = key.split("/")
        document[section][name] = done[key]
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    args.out.write_text(text, encoding="utf-8")
    for label, row in report.items():
        print(f"{label:80} {row}")


if __name__ == "__main__":
    main()
