"""Re-creates ``hardware_db/calibration/kernels.yaml`` from the measured tables.

    python -m benchmarks.fit_kernels --data DIR --out hardware_db/calibration/kernels.yaml \
        --doc docs/kernels.md

Deterministic; about a minute on one core. Every parameter is fitted on half of the shapes; the
errors written to the docs page are on the other half.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kernel_fits import (
    Errors,
    Rows,
    flash_fit,
    gemm_fit,
    memory_fit,
    read_rows,
)
from benchmarks.kernel_layers import layer_fit
from hardware_db import gpu
from hardware_db.schema import GpuSpec
from simulator.cost.kernel_rates import (
    AttentionParams,
    GemmParams,
    MemoryParams,
    dynamic_watts_per_flops,
)

#: GPUs with kernel tables: name in the tables -> attention group.
KERNEL_GPUS = {"A100-SXM-80GB": "ampere", "A40": "ampere", "H100-SXM-80GB": "hopper"}


@dataclass(frozen=True)
class LayerGpu:
    """A GPU known by its layer table: name there, database name, tile shapes of, attention.

    ``free`` is fitted; the memory of a GPU whose kin has a kernel table is not.
    """

    table: str
    name: str
    donor: str
    attention: str
    free: tuple[str, ...] = ("efficiency", "throttle", "backward_factor", "memory_scale")


PRODUCTS_ONLY = ("efficiency", "throttle", "backward_factor")

LAYER_GPUS = (
    LayerGpu("a100x40", "a100-sxm-40gb", "a100-sxm-80gb", "ampere", free=PRODUCTS_ONLY),
    LayerGpu("a10g", "a10g", "a40", "ampere"),
    LayerGpu("a6000", "rtx-a6000", "a40", "ampere"),
    LayerGpu("h100-nvl", "h100-nvl-94gb", "h100-sxm-80gb", "hopper"),
    LayerGpu("l4", "l4", "a40", "ada"),
    LayerGpu("t4", "t4", "a40", "turing"),
    LayerGpu("v100x16", "v100-sxm-16gb", "a100-sxm-80gb", "volta"),
    LayerGpu("v100-pciex16", "v100-pcie-16gb", "a100-sxm-80gb", "volta"),
    LayerGpu("p100", "p100-pcie-16gb", "a100-sxm-80gb", "pascal"),
    LayerGpu("p40", "p40", "a40", "pascal"),
)

#: GPUs of which only the best product is known: table name -> (database name, donor, attention).
#: Their efficiency is the donor's times the ratio of best rates over peak.
BEST_GPUS = {
    "A100-PCIe-80GB": ("a100-pcie-80gb", "a100-sxm-80gb", "ampere"),
    "GH200-144GB": ("gh200-144gb", "h100-sxm-80gb", "hopper"),
    "B200-SXM-180GB": ("b200-sxm-180gb", "h100-sxm-80gb", "blackwell"),
    "B300-SXM": ("b300-sxm-270gb", "h100-sxm-80gb", "blackwell"),
    "GB200": ("gb200", "h100-sxm-80gb", "blackwell"),
    "MI300X": ("mi300x", "h100-sxm-80gb", "cdna3"),
}
#: Best FP8 rate over peak relative to BF16's, of a donor's row, for GPUs without their own.
FP8_DEFAULT = "H100-SXM-80GB"

#: Which measured GPU stands in for others, by compute capability, then by architecture.
REFERENCES = {
    "6.0": "p100-pcie-16gb",
    "6.1": "p40",
    "7.0": "v100-sxm-16gb",
    "7.5": "t4",
    "8.0": "a100-sxm-80gb",
    "8.6": "a40",
    "8.9": "a40",
    "9.0": "h100-sxm-80gb",
    "10.0": "b200-sxm-180gb",
    "10.3": "b300-sxm-270gb",
    "12.0": "a40",
    "pascal": "p40",
    "volta": "v100-sxm-16gb",
    "turing": "t4",
    "ampere": "a100-sxm-80gb",
    "ada": "a40",
    "hopper": "h100-sxm-80gb",
    "blackwell": "b200-sxm-180gb",
    "cdna3": "mi300x",
    "cpu": "cpu",
}

#: Plain FMA products: start of the fits; what no fit touches keeps these values (assumed).
FMA = GemmParams(0.85, 64.0, 60.0, 3e-6, 0.75, 0.5, 0.4, 0.0, 0.2, 0.95)
#: A host processor: assumed, for planning runs on CPUs only.
CPU_GEMM = GemmParams(0.7, 64.0, 64.0, 5e-6, 0.7, 0.9, 0.5, 0.0, 0.2, 0.9)
CPU_MEMORY = 0.7

#: Traversals of the score matrix by eager attention. Forward: scale, mask and softmax read and
#: write each. Backward: what the "standard attention" bars of arXiv 2407.08608 figure 6 leave after
#: the four products at the fitted rate (174 TFLOP/s at 4k, head 128: about 8 traversals).
UNFUSED = AttentionParams(forward_passes=6.0, backward_passes=8.0)


def flash_groups(flash2: AttentionParams, flash3: AttentionParams) -> dict[str, Any]:
    """Attention parameters by group; shape parameters of a generation come from the H100 fit.

    Sources of the efficiencies: ``hopper`` flash2 and flash3 fitted on FlashAttention-3 (arXiv
    2407.08608) figures 5 and 6. ``ampere`` flash2: FlashAttention-2 (arXiv 2307.08691) abstract
    and section 4: up to 73 % forward, 63 % backward on A100, taken at 70 and 60 %; flash1: its
    introduction: 30-50 % and 25-35 %. ``ada``: 169 and 124 TFLOP/s printed for an RTX 4090 (165
    peak at datasheet boost) in apache/tvm tl_doc/flash_perf.md, less what its clock exceeds the
    datasheet's. ``blackwell``: about 1.6 PFLOP/s forward reported for vendor kernels, derated;
    ``volta``, ``turing``: torch's memory-efficient kernel, level of a trial fit to the V100 rows
    of layers.csv; others assumed.
    """

    def like(shape: AttentionParams, forward: float, backward: float) -> AttentionParams:
        return replace(shape, forward_efficiency=forward, backward_efficiency=backward)

    groups = {
        "ampere": {"flash1": like(flash2, 0.42, 0.33), "flash2": like(flash2, 0.70, 0.60)},
        "ada": {"flash1": like(flash2, 0.45, 0.35), "flash2": like(flash2, 0.85, 0.65)},
        "hopper": {"flash1": like(flash2, 0.19, 0.16), "flash2": flash2, "flash3": flash3},
        "blackwell": {
            "flash1": like(flash2, 0.10, 0.08),
            "flash2": like(flash2, 0.18, 0.15),
            "flash3": like(flash3, 0.62, 0.50),
        },
        "turing": {"flash1": like(flash2, 0.24, 0.19)},
        "volta": {"flash1": like(flash2, 0.24, 0.19)},
        "pascal": {},
        "cdna3": {"flash1": like(flash2, 0.20, 0.15), "flash2": like(flash2, 0.40, 0.30)},
        "cpu": {"flash1": like(flash2, 0.40, 0.35), "flash2": like(flash2, 0.40, 0.35)},
    }
    return {name: {"unfused": UNFUSED} | kernels for name, kernels in groups.items()}


@dataclass(frozen=True)
class GpuEntry:
    """What the YAML holds of one GPU."""

    gemm: dict[str, GemmParams]
    memory: MemoryParams
    attention: str
    basis: str
    source: str
    attention_scale: float = 1.0
    fp8_factor: float = 1.0


def best_share(rows: Rows, name: str, dtype: str) -> float | None:
    """Best measured rate over dense peak, or ``None`` where the table has no such row."""
    for row in rows:
        if row["gpu"] == name and row["dtype"] == dtype:
            return float(row["achieved_tflops"]) / float(row["peak_dense_tflops"])
    return None


def fp8_factor(rows: Rows, name: str) -> float:
    """FP8 efficiency over BF16 efficiency, both as shares of their peaks."""
    eight, sixteen = best_share(rows, name, "fp8"), best_share(rows, name, "bf16")
    if eight is None or sixteen is None:
        return fp8_factor(rows, FP8_DEFAULT)
    return eight / sixteen


def fit_all(data: Path) -> tuple[dict[str, GpuEntry], dict[str, Any], list[Errors]]:
    """Entries by GPU, attention groups, and errors on held-out rows."""
    tables = {
        name: read_rows(data / f"{name}.csv") for name in ("gemm", "elementwise", "layers", "mamf")
    }
    report: list[Errors] = []
    flash2, errors2 = flash_fit("flash2")
    flash3, errors3 = flash_fit("flash3")
    groups = flash_groups(flash2, flash3)
    entries: dict[str, GpuEntry] = {}
    for name, group in KERNEL_GPUS.items():
        gemm, found = gemm_fit([r for r in tables["gemm"] if r["gpu"] == name], name)
        report += found
        memory, found = memory_fit([r for r in tables["elementwise"] if r["gpu"] == name], name)
        report += found
        entries[gpu(name).name] = GpuEntry(
            gemm={"fp16": gemm, "fp32": FMA},
            memory=memory,
            attention=group,
            basis="measured",
            source="gemm.csv, elementwise.csv",
            fp8_factor=fp8_factor(tables["mamf"], name),
        )
    report += errors2 + errors3
    for card in LAYER_GPUS:
        entries[card.name] = _layer_entry(
            card, tables["layers"], entries[card.donor], groups, report
        )
    _complete(entries, tables["layers"], groups, report)
    for name, (target, donor, group) in BEST_GPUS.items():
        entries[target] = _best_entry(tables["mamf"], name, donor, entries[donor], group)
    entries["cpu"] = GpuEntry(
        {"fp16": CPU_GEMM, "fp32": CPU_GEMM},
        MemoryParams({kind: CPU_MEMORY for kind in entries["a40"].memory.fraction}, 5e-6, 0.5),
        "cpu",
        "assumed",
        "no measurement",
    )
    return entries, groups, report


def _layer_entry(
    card: LayerGpu,
    rows: Rows,
    donor: GpuEntry,
    groups: Mapping[str, Mapping[str, AttentionParams]],
    report: list[Errors],
) -> GpuEntry:
    rows = [row for row in rows if row["gpu"] == card.table]
    shape, attention = donor.gemm["fp16"], groups[card.attention]
    half = layer_fit(rows, card.name, "float16", shape, donor.memory, attention, free=card.free)
    if half is None:
        raise ValueError(f"the layer table has no fp16 rows of {card.table}")
    report += half.report
    full = layer_fit(
        rows, card.name, "float32", FMA, half.memory, attention,
        free=PRODUCTS_ONLY,
    )  # fmt: skip
    if full is not None:
        report += full.report
    return GpuEntry(
        gemm={"fp16": half.gemm, "fp32": full.gemm if full is not None else FMA},
        memory=half.memory,
        attention=card.attention,
        basis="measured",
        source=f"layers.csv; tile shapes of {gpu(card.donor).name}",
        attention_scale=half.attention_scale,
        fp8_factor=donor.fp8_factor,
    )


def _complete(
    entries: dict[str, GpuEntry],
    rows: Rows,
    groups: Mapping[str, Mapping[str, AttentionParams]],
    report: list[Errors],
) -> None:
    """Gradient and fp32 products of the GPUs with kernel tables, from layer tables."""
    a100 = entries["a100-sxm-80gb"]
    fit = layer_fit(
        [row for row in rows if row["gpu"] == "a100x80"],
        "a100-sxm-80gb",
        "float16",
        a100.gemm["fp16"],
        a100.memory,
        groups["ampere"],
        free=("backward_factor",),
    )
    if fit is None:
        raise ValueError("the layer table has no fp16 rows of a100x80")
    report += fit.report
    for name, gradient, plain in (
        ("a100-sxm-80gb", fit.gemm, entries["a100-sxm-40gb"].gemm["fp32"]),
        ("a40", entries["rtx-a6000"].gemm["fp16"], entries["rtx-a6000"].gemm["fp32"]),
        ("h100-sxm-80gb", fit.gemm, entries["h100-nvl-94gb"].gemm["fp32"]),
    ):
        entry = entries[name]
        half = replace(entry.gemm["fp16"], backward_factor=gradient.backward_factor)
        entries[name] = replace(
            entry,
            gemm={"fp16": half, "fp32": plain},
            source=f"{entry.source}; gradients and fp32 by layers.csv of its kin",
        )


def _best_entry(rows: Rows, name: str, donor: str, entry: GpuEntry, group: str) -> GpuEntry:
    own = best_share(rows, name, "bf16")
    reference = best_share(rows, next(n for n in KERNEL_GPUS if gpu(n).name == donor), "bf16")
    if own is None or reference is None:
        raise ValueError(f"no best product of {name} or {donor}")
    half = entry.gemm["fp16"]
    # Newer tensor cores share operands between SMs: the feed keeps pace with the peak per SM.
    pace = _peak_per_clock(gpu(name)) / _peak_per_clock(gpu(donor))
    half = replace(
        half,
        efficiency=min(0.98, half.efficiency * own / reference),
        feed_bytes_per_clock=half.feed_bytes_per_clock * pace,
    )
    return replace(
        entry,
        gemm={**entry.gemm, "fp16": half},
        attention=group,
        basis=f"transferred from {donor}, best product measured",
        source="mamf.csv",
        fp8_factor=fp8_factor(rows, name),
    )


def _peak_per_clock(spec: GpuSpec) -> float:
    return spec.peak("fp16") / (spec.sm_count * spec.boost_clock_hz)


def document(entries: Mapping[str, GpuEntry], groups: Mapping[str, Any]) -> dict[str, Any]:
    """The YAML document as plain data, numbers to four digits."""
    gpus = {}
    for name, entry in entries.items():
        plain = asdict(entry)
        plain["dynamic_watts_per_flops"] = dynamic_watts_per_flops(gpu(name))
        gpus[name] = _rounded(plain)
    attention = {
        group: {
            kernel: {key: value for key, value in asdict(params).items() if value}
            for kernel, params in kernels.items()
        }
        for group, kernels in groups.items()
    }
    return {
        "version": 1,
        "gpus": gpus,
        "attention": _rounded(attention),
        "references": REFERENCES,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


HEADER = """\
# What kernels reach on each GPU: fractions of the datasheet, fitted by
# `python -m benchmarks.fit_kernels`; do not edit by hand. Fields: simulator/cost/kernel_rates.py.
# Sources are names of measured tables; docs/kernels.md has the errors on held-out shapes.
"""


def table_text(report: list[Errors]) -> str:
    """The docs table of errors on held-out rows."""
    lines = [
        "| GPU | operator | held out by | rows | median | p90 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for e in sorted(report, key=lambda e: (e.operator.startswith("layer"), e.gpu)):
        lines.append(
            f"| {e.gpu} | {e.operator} | {e.note} | {e.rows} "
            f"| {100 * e.median:.1f} % | {100 * e.p90:.0f} % |"
        )
    return "\n".join(lines)


BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def write_figures(path: Path, text: str) -> None:
    """Replace what stands between the two markers of a docs page."""
    page = path.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
    parser.add_argument("--out", type=Path, required=True, help="YAML file to write")
    parser.add_argument("--doc", type=Path, help="docs page whose figures to renew")
    options = parser.parse_args()
    entries, groups, report = fit_all(options.data)
    body = yaml.safe_dump(document(entries, groups), sort_keys=False, width=100)
    options.out.write_text(HEADER + body, encoding="utf-8")
    text = table_text(report)
    print(text)
    if options.doc is not None:
        write_figures(options.doc, text)


if __name__ == "__main__":
    main()
