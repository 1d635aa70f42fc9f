"""Link entries without a table of their own: a published rate, or judgement that says so."""

from __future__ import annotations

from typing import Any

from benchmarks.collective_points import P4D

Entry = dict[str, Any]

_NAMES = ("efficiency", "p2p_efficiency", "latency_s", "base_s", "p2p_base_s", "half_size_s")

#: What the hardware database states as latency for fabrics of the kind. Only what a fabric states
#: beyond it (a link between sites) adds to the fitted steps.
STATED_LATENCY_S = {
    "infiniband": 14e-6,
    "roce": 14e-6,
    "slingshot": 20e-6,
    "efa": 30e-6,
    "efa-p4d": 30e-6,
    "gpudirect-tcpx": 40e-6,
    "gpudirect-tcpxo": 40e-6,
    "ethernet": 50e-6,
    "staged": 50e-6,
}


def entry_of(values: Entry, basis: str, source: str) -> Entry:
    """Parameters with where they come from; ``basis`` as in :class:`hardware_db.schema.Fact`."""
    return {**values, "basis": basis, "source": source}


def _parameters(done: dict[str, Entry], key: str) -> Entry:
    return {name: done[key][name] for name in _NAMES}


def assumed_links(done: dict[str, Entry]) -> dict[str, Entry]:
    """Links inside a node, derived from the fitted entries ``done`` (by ``section/key``)."""
    a100 = _parameters(done, "links/nvswitch3")
    h100 = _parameters(done, "links/nvswitch4")
    pcie = {
        "efficiency": 0.25,
        "p2p_efficiency": 0.7,
        "latency_s": 5e-6,
        "base_s": 25e-6,
        "p2p_base_s": 10e-6,
        "half_size_s": 5e-6,
    }
    mixed_box = {**pcie, "efficiency": 0.354, "p2p_efficiency": 1.0}
    host = {**pcie, "p2p_efficiency": 0.3, "base_s": 60e-6, "p2p_base_s": 30e-6}
    return {
        "links/nvswitch": entry_of(a100, "assumed", "as the third NVSwitch generation"),
        "links/nvswitch5": entry_of(
            {**h100, "nvls_efficiency": 0.54},
            "assumed",
            "as the fourth NVSwitch generation; in-switch rate above the 0.48 of a whole GB200 "
            "NVL72 (8 GiB all-reduce: 835 GB/s bus rate, coreweave/nccl-tests pull request 43)",
        ),
        "links/nvlink": entry_of(a100, "assumed", "direct NVLink between all GPUs, as a switch"),
        "links/nvlink-mesh": entry_of(
            {**a100, "efficiency": 0.91},
            "measured",
            "1 GiB all-reduce of 8 V100: 135.5 of 150 GB/s (oracle-quickstart/oci-hpc-oke); "
            "latencies as NVSwitch",
        ),
        "links/xgmi": entry_of(
            {**a100, "efficiency": 0.8},
            "measured",
            "16 GiB all-reduce of 8 MI325X with RCCL: 357 of 448 GB/s (ROCm 6.4 notes on GitHub); "
            "latencies as NVSwitch",
        ),
        "links/pcie": entry_of(
            pcie,
            "paper",
            "Zorse's 4-GPU PCIe box (benson-guo/zorse): 472.7 MB gathered in 90.1 ms, 11.1 GB/s "
            "between two, so a ring gets a third of a pair",
        ),
        "links/pcie4": entry_of(
            {**pcie, "efficiency": 0.35}, "assumed", "between the third and the fifth generation"
        ),
        "links/pcie5": entry_of(
            {**pcie, "efficiency": 0.44},
            "measured",
            "8 RTX 5090: 28 of 63 GB/s bus rate (NVIDIA/nccl issue 1639); the rest as pcie",
        ),
        "links/pcie-mixed-box": entry_of(
            mixed_box, "paper", "Zorse's box; its link rate is already the measured 11.1 GB/s"
        ),
        "links/pcie-mixed-box-two": entry_of(
            {**mixed_box, "efficiency": 0.7}, "assumed", "as pcie-two, of the measured rate"
        ),
        "links/pcie-two": entry_of(
            {**pcie, "efficiency": 0.5}, "assumed", "both directions share the root of two GPUs"
        ),
        "links/host": entry_of(host, "assumed", "gloo through host memory"),
        "links/host-two": entry_of(host, "assumed", "gloo through host memory"),
    }


def assumed_fabrics(done: dict[str, Entry]) -> dict[str, Entry]:
    """Networks between nodes, derived from the fitted entries ``done`` (by ``section/key``)."""
    infiniband = _parameters(done, "fabrics/infiniband")
    efa = _parameters(done, "fabrics/staged")
    tcpxo = _parameters(done, "fabrics/gpudirect-tcpxo")
    tcp = {"latency_s": 25e-6, "base_s": 45e-6, "p2p_base_s": 25e-6, "half_size_s": 50e-6}
    return {
        "fabrics/efa-p4d": entry_of(
            {**efa, "efficiency": 0.6, "p2p_efficiency": 0.6},
            "paper",
            f"{P4D}: 1 GiB all-reduce of 3 and 4 nodes at 31.8 and 29.6 of 50 GB/s; latencies as "
            "the table's A100 fabric",
        ),
        "fabrics/efa": entry_of(
            {**efa, "efficiency": 0.8, "p2p_efficiency": 0.75},
            "assumed",
            "later EFA generations: rate between p4d's and InfiniBand's, latencies as p4d's",
        ),
        "fabrics/gpudirect-tcpx": entry_of(
            {**tcpxo, "efficiency": 0.8},
            "assumed",
            "the generation before GPUDirect-TCPXO: less of the rate, the same latencies",
        ),
        "fabrics/slingshot": entry_of(
            {**infiniband, "efficiency": 0.9, "p2p_efficiency": 0.9},
            "paper",
            "Sailor (eth-easl/sailor, model_networking.py): 92.6 GB/s of four 25 GB/s NICs on "
            "GH200; latencies as InfiniBand",
        ),
        "fabrics/ethernet": entry_of(
            {**tcp, "efficiency": 0.8, "p2p_efficiency": 0.75},
            "paper",
            "Sailor (eth-easl/sailor, model_networking.py): 2.42 of 3 GB/s on one-GPU A100 "
            "machines; latencies near the table's A40 boxes (21-37 us small)",
        ),
    }
