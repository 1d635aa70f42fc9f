"""What one GPU really does: the calibrated kernel parameters of a GPU, measured or transferred.

Parameters come from ``hardware_db/calibration/kernels.yaml`` (written by
``benchmarks/fit_kernels.py``). A GPU listed there is ``measured``; any other takes the fractions
of the reference GPU of its compute capability, or else of its architecture, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import yaml

from hardware_db.schema import GpuSpec
from simulator.errors import Problem, UserError

#: Dtypes that :func:`rates` looks for on a GPU.
COMPUTE_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class GemmParams:
    """Matrix products of one GPU in one dtype; fractions are of the datasheet peak.

    Attributes:
        efficiency: share of the peak that full tiles reach while the clock is high.
        feed_bytes_per_clock: rate at which operands reach one SM from the L2 cache; small tiles
            need more bytes per FLOP.
        prologue_k: start and end of one tile's pipeline, in elements of the contraction.
        latency_s: launch and drain of one kernel.
        memory_fraction: share of DRAM bandwidth that the product's own traffic reaches.
        wave_softness: 0 for whole waves of tiles, 1 for a perfectly spread tail.
        split_cost: traffic of a split-k reduction over the fp32 partial results, written and
            read once at DRAM rate.
        throttle: loss of clock per e-fold of work above 0.2 ms at peak (power).
        spare_gain: extra rate of a busy SM when all others idle (shared power and cache).
        backward_factor: efficiency of gradient products over forward ones.
    """

    efficiency: float
    feed_bytes_per_clock: float
    prologue_k: float
    latency_s: float
    memory_fraction: float
    wave_softness: float
    split_cost: float
    throttle: float
    spare_gain: float
    backward_factor: float = 1.0


@dataclass(frozen=True)
class MemoryParams:
    """Kernels that only move data.

    Attributes:
        fraction: achieved share of DRAM bandwidth for large tensors by kind of kernel.
        latency_s: launch and drain of one kernel.
        l2_gain: extra bandwidth, over DRAM's, of a tensor that fits the second-level cache.
    """

    fraction: Mapping[str, float]
    latency_s: float
    l2_gain: float


@dataclass(frozen=True)
class AttentionParams:
    """One attention kernel.

    Attributes:
        forward_efficiency, backward_efficiency: share of the peak at head size 128 and long
            sequences (flash kernels).
        head_dim_half: head size at which half of the asymptotic rate is reached.
        ramp_tokens: inner-loop length whose work equals a block's fixed cost.
        latency_s: launch and drain.
        dropout_factor: time with dropout over time without.
        forward_passes, backward_passes: traversals of the score matrix in memory, one read or
            write each (unfused kernel; its products use the matrix parameters).
    """

    forward_efficiency: float = 0.0
    backward_efficiency: float = 0.0
    head_dim_half: float = 0.0
    ramp_tokens: float = 0.0
    latency_s: float = 0.0
    dropout_factor: float = 1.0
    forward_passes: float = 0.0
    backward_passes: float = 0.0


@dataclass(frozen=True)
class KernelRates:
    """What one GPU really does, ready for :mod:`simulator.cost.kernels`.

    Attributes:
        gpu: canonical name.
        sm_count: streaming multiprocessors.
        clock_hz: boost clock.
        peak_flops: dense datasheet peak by dtype, FLOP/s, for every key of ``gemm``.
        memory_bandwidth_bytes_per_s, l2_bytes: datasheet.
        gemm: parameters by dtype (fp16, bf16, tf32, fp32, fp8 as the hardware has them).
        memory: kernels that only move data.
        attention: parameters by kernel (unfused, flash1, flash2, flash3).
        sustained: clock held under the power limit over that of the reference GPU whose
            efficiencies these are; 1 where measured (:func:`sustained_clock`).
        basis: ``measured``; or ``transferred from <gpu>``, with what was measured on top of it.
        source: what the parameters were fitted on.
    """

    gpu: str
    sm_count: int
    clock_hz: float
    peak_flops: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    l2_bytes: float
    gemm: Mapping[str, GemmParams]
    memory: MemoryParams
    attention: Mapping[str, AttentionParams]
    sustained: float
    basis: str
    source: str


#: Exponent of clock against dynamic power: power grows with clock times voltage squared and
#: voltage with clock. Checks (docs/kernels.md): A100 PCIe against SXM, L4 against A40.
POWER_EXPONENT = 1.0 / 3.0


def dynamic_watts_per_flops(gpu: GpuSpec) -> float:
    """Power left for arithmetic over the two-byte peak rate, joules per FLOP."""
    return (gpu.power_limit_w - gpu.idle_power_w) / gpu.peak("fp16")


def sustained_clock(budget: float, reference: float) -> float:
    """Clock held under a power budget over the reference GPU's, both relative to boost.

    ``min(1, (budget / reference) ** (1/3))``, where both are :func:`dynamic_watts_per_flops`. The
    measured GPU already sags under its own limit (that is in its efficiency and throttle), so only
    a tighter budget counts here; a wider one lessens the throttle (:func:`rates`). Modelled, not
    measured.
    """
    return float(min(1.0, (budget / reference) ** POWER_EXPONENT))


@cache
def calibration() -> dict[str, Any]:
    """The parsed ``kernels.yaml``; treat as read-only."""
    text = files("hardware_db").joinpath("calibration/kernels.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document: dict[str, Any] = yaml.load(text, Loader=loader)
    return document


@lru_cache(maxsize=256)
def rates(gpu: GpuSpec) -> KernelRates:
    """Kernel rates of ``gpu``: its own fit where there is one, else its architecture's.

    Raises:
        UserError: no GPU of this architecture has been measured and none is named to stand in.
    """
    table = calibration()
    name = gpu.name if gpu.name in table["gpus"] else _reference(table, gpu)
    entry = table["gpus"][name]
    own = name == gpu.name
    gemm = _gemm_by_dtype(gpu, entry)
    sustained = 1.0
    if not own:
        budget, reference = dynamic_watts_per_flops(gpu), float(entry["dynamic_watts_per_flops"])
        sustained = sustained_clock(budget, reference)
        relief = min(1.0, reference / budget)
        gemm = {d: replace(p, throttle=p.throttle * relief) for d, p in gemm.items()}
    return KernelRates(
        gpu=gpu.name,
        sm_count=gpu.sm_count,
        clock_hz=gpu.boost_clock_hz,
        peak_flops={dtype: gpu.peak(dtype) for dtype in gemm},
        memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        l2_bytes=float(gpu.l2_bytes),
        gemm=gemm,
        memory=MemoryParams(**entry["memory"]),
        attention=_attention_by_kernel(table, entry),
        sustained=sustained,
        basis=str(entry["basis"]) if own else f"transferred from {name}",
        source=str(entry["source"]),
    )


def _attention_by_kernel(
    table: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, AttentionParams]:
    """Published efficiencies of the architecture, scaled as this GPU's products are."""
    result = {}
    scale = float(entry.get("attention_scale", 1.0))
    for kernel, values in table["attention"][entry["attention"]].items():
        params = AttentionParams(**values)
        result[kernel] = replace(
            params,
            forward_efficiency=params.forward_efficiency * scale,
            backward_efficiency=params.backward_efficiency * scale,
        )
    return result


def _reference(table: Mapping[str, Any], gpu: GpuSpec) -> str:
    """Name of the measured GPU whose fractions stand in for ``gpu``."""
    references = table["references"]
    for key in (gpu.name, gpu.compute_capability, gpu.architecture):
        if key in references:
            return str(references[key])
    known = ", ".join(sorted(set(references)))
    raise UserError(
        Problem("gpu", f"no kernel measurements stand in for {gpu.title}", f"known: {known}")
    )


def _gemm_by_dtype(gpu: GpuSpec, entry: Mapping[str, Any]) -> dict[str, GemmParams]:
    known = {field.name for field in fields(GemmParams)}
    fitted = {
        dtype: GemmParams(**{key: value for key, value in values.items() if key in known})
        for dtype, values in entry["gemm"].items()
    }
    base = fitted["fp16"]
    result: dict[str, GemmParams] = {}
    for dtype in COMPUTE_DTYPES:
        if dtype == "fp8" and not gpu.supports(dtype):
            continue
        resolved = gpu.resolve_dtype(dtype)
        params = fitted.get(dtype) or fitted.get(resolved) or base
        if dtype == "fp8" and "fp8" not in fitted:
            params = replace(base, efficiency=base.efficiency * entry.get("fp8_factor", 1.0))
        result[dtype] = params
    return result
