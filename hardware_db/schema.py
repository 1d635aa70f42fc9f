"""What a GPU, a link, a node and a fabric are: the frozen descriptions that the loader returns.

Units are SI: bytes, seconds, FLOP/s, bytes/s, watts, hertz. Every link rate is per direction and,
where a device owns the link, per device; a rate per node is never stored. Numbers live in the
YAML files beside this module, each with a source and a basis (:class:`Fact`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.errors import Problem, UserError

#: NVIDIA generations in order of age, then AMD's; ``cpu`` is a host that computes by itself.
ARCHITECTURES = (
    "cpu",
    "pascal",
    "volta",
    "turing",
    "ampere",
    "ada",
    "hopper",
    "blackwell",
    "cdna3",
)

#: Keys of :attr:`GpuSpec.peak_flops`.
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")

#: How far a number can be trusted, best first; see :class:`Fact`.
BASES = ("datasheet", "measured", "paper", "assumed")

_DTYPE_SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "tfloat32": "tf32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}

# Where a GPU lacks a type that software emulates, the type whose rate the emulation reaches.
_EMULATED_AS = {"tf32": "fp32", "bf16": "fp32", "fp16": "fp32"}


class Fact(NamedTuple):
    """One number of the database with where it comes from.

    ``basis`` is ``datasheet`` (the vendor's own figure), ``measured`` (somebody's run or log),
    ``paper`` (a publication's or reference work's figure) or ``assumed`` (our judgement, with the
    reasoning in ``source``).
    """

    value: float | int | str | None
    source: str
    basis: str


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU product in one memory size and form.

    Attributes:
        name: canonical name, for example ``h100-sxm-80gb``.
        title: the name for people.
        aliases: other spellings that find this entry.
        vendor: ``nvidia``, ``amd``, or ``generic``.
        architecture: one of :data:`ARCHITECTURES`.
        compute_capability: CUDA compute capability, ``"9.0"``; ``"0.0"`` where there is none.
        sm_count: streaming multiprocessors enabled (cores for ``cpu``).
        boost_clock_hz: maximum SM clock of the product. Datasheet tensor peaks may assume a lower
            one: an H100 SXM reaches 1.98 GHz, its 989 TFLOP/s are stated at 1.83 GHz.
        l2_bytes: second-level cache (last-level cache for ``cpu``).
        memory_label_bytes: memory as sold; the label's "GB" is 2**30 bytes.
        usable_memory_bytes: total memory as CUDA reports it to torch
            (``torch.cuda.get_device_properties(0).total_memory``), ECC and firmware excluded.
        memory_bandwidth_bytes_per_s: peak DRAM bandwidth.
        peak_flops: dense peak FLOP/s (operations/s for int8) by dtype, keys out of
            :data:`DTYPES`, only types that the hardware has. Tensor-core rates with fp32
            accumulation where tensor cores exist, except ``fp32``, which is the plain FMA rate.
            Treat as read-only.
        power_limit_w: default power limit of one GPU (board or module).
        idle_power_w: power with a context open and nothing running.
        form: ``sxm``, ``pcie``, ``board`` (workstation or consumer card), ``superchip``,
            ``oam`` (AMD module) or ``host`` (a CPU).
        nvlink_bytes_per_s: NVLink (Infinity Fabric on AMD) bandwidth per direction, all links
            together; 0 when none. It caps what a node's :class:`LinkSpec` offers.
        pcie_bytes_per_s: host link per direction (PCIe; NVLink-C2C on superchips).
        release_year: year of general availability.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    compute_capability: str
    sm_count: int
    boost_clock_hz: float
    l2_bytes: int
    memory_label_bytes: int
    usable_memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float] = field(hash=False)
    power_limit_w: float
    idle_power_w: float
    form: str
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    release_year: int

    def peak(self, dtype: str) -> float:
        """Dense peak rate of matrix work in ``dtype``, FLOP/s.

        ``dtype`` is a key of :data:`DTYPES` or torch's spelling of it. Where the hardware lacks
        the type: ``bf16`` on Pascal, Volta and Turing and ``fp16`` on cards without a useful
        native rate are emulated by cuBLAS with fp32 arithmetic on 16-bit storage, hence the fp32
        rate; ``tf32`` falls back to plain fp32, as torch does. ``fp8``, ``fp4`` and ``int8`` have
        no emulation worth planning with.

        Raises:
            UserError: the type is unknown, or this GPU has neither it nor an emulation.
        """
        key = self.resolve_dtype(dtype)
        return self.peak_flops[key]

    def resolve_dtype(self, dtype: str) -> str:
        """Key of :attr:`peak_flops` whose rate :meth:`peak` uses for ``dtype``.

        Raises:
            UserError: as :meth:`peak`.
        """
        key = _DTYPE_SPELLINGS.get(dtype.lower(), dtype.lower())
        if key in self.peak_flops:
            return key
        if key in _EMULATED_AS:
            return _EMULATED_AS[key]
        message = f"{self.title} has no {key}" if key in DTYPES else f"unknown dtype {dtype!r}"
        hint = f"choose from {', '.join(sorted(self.peak_flops))}"
        raise UserError(Problem(path="precision", message=message, hint=hint))

    def supports(self, dtype: str) -> bool:
        """Whether the hardware itself has ``dtype`` (no emulation)."""
        return _DTYPE_SPELLINGS.get(dtype.lower(), dtype.lower()) in self.peak_flops

    @property
    def has_tensor_cores(self) -> bool:
        """Whether matrix products run on tensor cores (Volta and later)."""
        return self.architecture not in ("cpu", "pascal")


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """How the GPUs of one node reach each other.

    Attributes:
        name: ``nvswitch4``, ``nvlink2``, ``nvlink-pairs3``, ``pcie4``, ...
        title: the name for people.
        aliases: other spellings that find this entry.
        kind: ``nvswitch``, ``nvlink`` (direct, all pairs), ``nvlink-mesh`` (direct, not all
            pairs), ``nvlink-pairs`` (bridges; between pairs traffic uses PCIe), ``xgmi`` (AMD),
            ``pcie``, ``host``.
        bytes_per_s: raw rate per direction of one GPU, all of its links together (achieved where
            the entry's basis is ``measured``). A GPU with a slower port has its own port's rate.
        pair_bytes_per_s: raw rate per direction between one pair of GPUs.
        crossing_bytes_per_s: raw rate per direction and GPU where two GPUs have no direct link
            (other pair, other socket); equals ``bytes_per_s`` behind a switch.
        latency_s: time of one small message between two GPUs.
        switch: whether every GPU reaches every other at the full ``bytes_per_s``.
        nvls: whether the switch reduces in the network (NVLink SHARP).
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    kind: str
    bytes_per_s: float
    pair_bytes_per_s: float
    crossing_bytes_per_s: float
    latency_s: float
    switch: bool
    nvls: bool


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One server.

    Attributes:
        name: canonical name, for example ``dgx-h100``.
        title: the name for people.
        aliases: other spellings that find this entry.
        gpus: canonical GPU name of every slot, in slot order; types may be mixed.
        intra_node: name of the :class:`LinkSpec` between the GPUs.
        nic_bytes_per_s: rate of one NIC for GPU traffic, per direction; 0 without a fabric.
        nics: number of such NICs.
        fabric: default :class:`FabricSpec` name, or ``None`` (single node).
        host_power_w: power of the node beyond its GPUs (CPUs, DRAM, NICs, fans) under load.
        host_memory_bytes: host DRAM.
        dispatch_scale: speed at which the host CPU launches kernels, relative to the reference
            host (1.0: the DGX H100's Xeon 8480C); below 1 is slower.
        year: year of availability.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    gpus: tuple[str, ...]
    intra_node: str
    nic_bytes_per_s: float
    nics: int
    fabric: str | None
    host_power_w: float
    host_memory_bytes: int
    dispatch_scale: float
    year: int

    @property
    def n_gpus(self) -> int:
        """GPUs of one node."""
        return len(self.gpus)

    @property
    def is_mixed(self) -> bool:
        """Whether the node holds more than one GPU type."""
        return len(set(self.gpus)) > 1

    @property
    def network_bytes_per_s(self) -> float:
        """Rate of all NICs together, per direction."""
        return self.nic_bytes_per_s * self.nics


@dataclass(frozen=True, slots=True)
class FabricSpec:
    """The network between nodes.

    Attributes:
        name: canonical name, for example ``ndr-infiniband``.
        title: the name for people.
        aliases: other spellings that find this entry.
        kind: ``infiniband``, ``roce``, ``efa``, ``ethernet``, ``slingshot``, ``none``.
        nic_bytes_per_s: rate of one NIC port, per direction; 0 for ``none``.
        nics_per_node: NICs of a node on this fabric; ``None`` takes the node's.
        latency_s: one small message between nodes, GPU memory to GPU memory.
        rails: whether NIC *i* of every node meets on its own leaf switch (rail-optimised).
        oversubscription: leaf downlinks over uplinks, at least 1; 1 is non-blocking.
        nodes_per_leaf: nodes that reach each other without crossing an oversubscribed uplink.
        rdma: whether NICs read GPU memory directly.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    kind: str
    nic_bytes_per_s: float
    nics_per_node: int | None
    latency_s: float
    rails: bool
    oversubscription: float
    nodes_per_leaf: int
    rdma: bool


Spec = GpuSpec | LinkSpec | NodeSpec | FabricSpec
