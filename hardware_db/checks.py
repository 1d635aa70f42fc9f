"""Is a description believable? Ranges and orders that every real part keeps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hardware_db.schema import ARCHITECTURES, FabricSpec, GpuSpec, LinkSpec, NodeSpec, Spec
from simulator.units import GB

# Dense fp16 FLOP per clock and SM with fp32 accumulation, by compute capability: the most that the
# generation's full-rate parts do (NVIDIA architecture white papers, "SM" tables). CUDA cores only
# for Pascal.
_FP16_PER_CLOCK = {
    "6.0": 256,
    "6.1": 256,
    "7.0": 1024,
    "7.5": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 1024,
}

# The export and consumer variants are cut to no less than this part of the full rate.
_LEAST_SHARE = 0.2

_GPU_RANGES: dict[str, tuple[float, float]] = {
    "sm_count": (1, 320),
    "boost_clock_hz": (0.8e9, 6e9),
    "l2_bytes": (1e6, 512e6),
    "memory_label_bytes": (1 * GB, 1000 * GB),
    "memory_bandwidth_bytes_per_s": (20 * GB, 20_000 * GB),
    "power_limit_w": (15, 2000),
    "idle_power_w": (1, 300),
    "nvlink_bytes_per_s": (0, 2000 * GB),
    "pcie_bytes_per_s": (1 * GB, 1000 * GB),
    "release_year": (2015, 2035),
}
_LINK_RANGES: dict[str, tuple[float, float]] = {
    "bytes_per_s": (0.5 * GB, 2000 * GB),
    "pair_bytes_per_s": (0.5 * GB, 2000 * GB),
    "crossing_bytes_per_s": (0.5 * GB, 2000 * GB),
    "latency_s": (1e-7, 1e-4),
}
_NODE_RANGES: dict[str, tuple[float, float]] = {
    "nic_bytes_per_s": (0, 200 * GB),
    "nics": (0, 128),
    "host_power_w": (20, 150_000),
    "host_memory_bytes": (8 * GB, 100_000 * GB),
    "dispatch_scale": (0.2, 3),
    "year": (2015, 2035),
}
_FABRIC_RANGES: dict[str, tuple[float, float]] = {
    "nic_bytes_per_s": (0, 200 * GB),
    "latency_s": (0, 1e-2),
    "oversubscription": (1, 100),
    "nodes_per_leaf": (1, 1e9),
}

#: Kinds of links, see :class:`hardware_db.schema.LinkSpec`.
LINK_KINDS = ("nvswitch", "nvlink", "nvlink-mesh", "nvlink-pairs", "xgmi", "pcie", "host")
#: Kinds of fabrics, see :class:`hardware_db.schema.FabricSpec`.
FABRIC_KINDS = ("infiniband", "roce", "efa", "ethernet", "slingshot", "none")


def plausibility(spec: Spec) -> list[str]:
    """What is not believable about ``spec``, a sentence each; empty when all is well."""
    if isinstance(spec, GpuSpec):
        found = [*_ranges(spec, _GPU_RANGES), *_gpu_memory(spec), *_gpu_rates(spec)]
    elif isinstance(spec, LinkSpec):
        found = [*_ranges(spec, _LINK_RANGES), *_link(spec)]
    elif isinstance(spec, NodeSpec):
        found = [*_ranges(spec, _NODE_RANGES), *_node(spec)]
    else:
        found = [*_ranges(spec, _FABRIC_RANGES), *_fabric(spec)]
    return [f"{spec.name}: {fault}" for fault in found]


def _ranges(spec: Spec, ranges: dict[str, tuple[float, float]]) -> Iterator[str]:
    for name, (low, high) in ranges.items():
        value = getattr(spec, name)
        if not low <= value <= high:
            yield f"{name} {value:g} is outside {low:g} to {high:g}"


def _gpu_memory(spec: GpuSpec) -> Iterator[str]:
    # ECC in GDDR takes up to 9 % away; nothing adds memory.
    share = spec.usable_memory_bytes / spec.memory_label_bytes
    if not 0.9 <= share <= 1.02:
        yield f"usable memory is {share:.2f} of the label"
    if spec.idle_power_w >= spec.power_limit_w:
        yield "idle power is not below the power limit"


def _gpu_rates(spec: GpuSpec) -> Iterator[str]:
    if spec.architecture not in ARCHITECTURES:
        yield f"architecture {spec.architecture!r} is not known"
    peaks = spec.peak_flops
    rising = [peaks[key] for key in ("fp32", "tf32", "bf16", "fp8", "fp4") if key in peaks]
    if any(low > high * 1.001 for low, high in pairwise(rising)):
        yield "narrower dtypes are slower than wider ones"
    if "bf16" in peaks and peaks.get("fp16") != peaks["bf16"]:
        yield "fp16 and bf16 differ"
    if not 1e10 <= peaks["fp32"] <= 1e15:
        yield f"fp32 peak {peaks['fp32']:g} FLOP/s is out of range"
    per_clock = _FP16_PER_CLOCK.get(spec.compute_capability)
    if per_clock is not None and "fp16" in peaks:
        full = per_clock * spec.sm_count * spec.boost_clock_hz
        share = peaks["fp16"] / full
        if not _LEAST_SHARE <= share <= 1.02:
            yield f"fp16 peak is {share:.2f} of what its SMs and clock allow (sparsity counted?)"


def _link(spec: LinkSpec) -> Iterator[str]:
    if spec.kind not in LINK_KINDS:
        yield f"kind {spec.kind!r} is none of {', '.join(LINK_KINDS)}"
    if not spec.pair_bytes_per_s <= spec.bytes_per_s:
        yield "one pair is faster than all links of a GPU together"
    if spec.switch and not spec.bytes_per_s == spec.pair_bytes_per_s == spec.crossing_bytes_per_s:
        yield "a full-rate switch must give every pair the full rate"
    if spec.nvls and not spec.switch:
        yield "in-network reduction needs a switch"


def _node(spec: NodeSpec) -> Iterator[str]:
    if not spec.gpus:
        yield "has no GPU"
    if (spec.nics > 0) != (spec.nic_bytes_per_s > 0):
        yield "nics and nic_bytes_per_s disagree about a network"
    if spec.fabric is not None and spec.nics == 0:
        yield "names a fabric but has no NIC"


def _fabric(spec: FabricSpec) -> Iterator[str]:
    if spec.kind not in FABRIC_KINDS:
        yield f"kind {spec.kind!r} is none of {', '.join(FABRIC_KINDS)}"
    if (spec.kind == "none") != (spec.nic_bytes_per_s == 0):
        yield "only the fabric 'none' has no bandwidth"
    if spec.nics_per_node is not None and not 0 <= spec.nics_per_node <= 128:
        yield f"nics_per_node {spec.nics_per_node} is out of range"
    if spec.kind in ("infiniband", "roce", "efa") and not spec.rdma:
        yield f"{spec.kind} without RDMA"
