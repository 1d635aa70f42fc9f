"""One transformer layer of the layer-latency table: the fit of GPUs known only by it.

What the table holds and how a layer is priced: :mod:`simulator.interop.layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernel_fits import (
    Array,
    Errors,
    Rows,
    bare_rates,
    column,
    errors,
    minimise,
    robust_loss,
)
from hardware_db import gpu
from simulator.cost.kernel_rates import AttentionParams, GemmParams, KernelRates, MemoryParams
from simulator.interop.layers import DTYPES, LayerShapes, attention_kernel, layer_time

LAYER_BOUNDS = {
    "efficiency": (0.05, 1.0),
    "throttle": (0.0, 0.3),
    "backward_factor": (0.5, 1.4),
    "memory_scale": (0.5, 1.2),
}
#: Heads that the profiled GPT code uses, where the table has none or the model's usual number.
GPT_HEADS = {"gpt_1.3b": 128.0, "gpt_2.7b": 80.0, "gpt_6.7b": 128.0}


@dataclass(frozen=True)
class LayerTable(LayerShapes):
    """Columns of the rows of one GPU and dtype, with what was measured and the group held out."""

    group: NDArray[np.int64]
    forward_s: Array
    backward_s: Array


def layer_table(rows: Rows, dtype: str) -> LayerTable:
    """Rows with known shapes, without the hand-filled ones (H100 NVL, sequence 4096, batch 2)."""
    rows = [
        row
        for row in rows
        if row["dtype"] == dtype
        and not (
            row["gpu"] == "h100-nvl" and row["seq_len"] == "4096" and row["micro_batch"] == "2"
        )
    ]
    keys = sorted({(row["model"], int(row["seq_len"])) for row in rows})
    gated = np.array([row["arch"] == "llama" for row in rows], bool)
    heads = np.array([GPT_HEADS.get(row["model"]) or float(row["heads"]) for row in rows])
    return LayerTable(
        hidden=column(rows, "hidden"),
        ffn=column(rows, "ffn_hidden"),
        heads=heads,
        kv_heads=np.array([float(row["kv_heads"] or 0) for row in rows]),
        seq=column(rows, "seq_len"),
        batch=column(rows, "micro_batch"),
        gated=gated,
        group=np.array([keys.index((row["model"], int(row["seq_len"]))) for row in rows]),
        forward_s=column(rows, "fwd_ms") * 1e-3,
        backward_s=column(rows, "bwd_ms") * 1e-3,
        dtype=dtype,
    )


def picked(table: LayerTable, rows: NDArray[np.bool_]) -> LayerTable:
    """The chosen rows of ``table``."""
    columns = {
        field.name: getattr(table, field.name)[rows]
        for field in fields(table)
        if field.name != "dtype"
    }
    return replace(table, **columns)


def attention_scale(gemm: GemmParams, shape: GemmParams) -> float:
    """Attention efficiency of a GPU over its group's: as its large products over their donor's."""

    def sustained(params: GemmParams) -> float:
        return params.efficiency / (1.0 + params.throttle * np.log1p(100.0))

    return float(sustained(gemm) / sustained(shape))


def scaled(params: AttentionParams, factor: float) -> AttentionParams:
    """``params`` with both efficiencies times ``factor``."""
    return replace(
        params,
        forward_efficiency=params.forward_efficiency * factor,
        backward_efficiency=params.backward_efficiency * factor,
    )


@dataclass(frozen=True)
class LayerFit:
    """What a layer table gives for one GPU and dtype."""

    gemm: GemmParams
    memory: MemoryParams
    attention_scale: float
    report: tuple[Errors, ...]


def layer_fit(
    rows: Rows,
    name: str,
    dtype: str,
    shape: GemmParams,
    memory: MemoryParams,
    attention: Mapping[str, AttentionParams],
    *,
    free: tuple[str, ...],
) -> LayerFit | None:
    """Fit ``free`` of :data:`LAYER_BOUNDS` on the gated (llama) rows of every second model and
    sequence length; tile shapes and the rest come from ``shape`` and ``memory``.

    Attention efficiencies follow the products' (:func:`attention_scale`).
    ``None`` where the table has no llama rows. With one group only, nothing is held out.
    """
    spec = gpu(name)
    table = layer_table(rows, dtype)
    llama = table.gated
    if not llama.any():
        return None
    ranks = np.unique(table.group[llama])
    held = np.isin(table.group, ranks[1::2])
    train = llama & ~held
    seen = picked(table, train)
    kernel = attention_kernel(spec, dtype)

    def predict(v: Mapping[str, float], table: LayerTable) -> tuple[KernelRates, Array, Array]:
        gemm = replace(shape, **{f: v[f] for f in free if not f.endswith("_scale")})
        scale = v.get("memory_scale", 1.0)
        fraction = {kind: min(0.95, f * scale) for kind, f in memory.fraction.items()}
        follow = attention_scale(gemm, shape)
        trial = bare_rates(
            spec,
            {DTYPES[dtype]: gemm},
            replace(memory, fraction=fraction),
            {kernel: scaled(params, follow) for kernel, params in attention.items()},
        )
        return (
            trial,
            layer_time(trial, table, kernel, backward=False),
            layer_time(trial, table, kernel, backward=True),
        )

    def loss(v: Mapping[str, float]) -> float:
        _, forward, backward = predict(v, seen)
        return robust_loss(forward, seen.forward_s) + robust_loss(backward, seen.backward_s)

    bounds = {f: LAYER_BOUNDS[f] for f in free}
    starts = [
        {"efficiency": e, "throttle": t, "backward_factor": 0.95, "memory_scale": 0.9}
        for e, t in ((shape.efficiency, 0.02), (0.7, 0.2), (0.4, 0.02))
    ]
    found = min((minimise(loss, s, bounds, steps=120) for s in starts), key=loss)
    trial, forward, backward = predict(found, table)
    report = []
    for label, pick in (("llama, held out", llama & held), ("other models", ~llama)):
        for way, guess, truth in (
            ("forward", forward, table.forward_s),
            ("backward", backward, table.backward_s),
        ):
            if pick.any():
                note = f"{DTYPES[dtype]}, {label}"
                report.append(errors(spec.name, f"layer {way}", guess[pick], truth[pick], note))
    gemm = trial.gemm[DTYPES[dtype]]
    # Above the peak the time function caps the rate; store what it uses.
    gemm = replace(gemm, backward_factor=min(gemm.backward_factor, 1.0 / gemm.efficiency))
    follow = attention_scale(gemm, shape)
    return LayerFit(gemm, trial.memory, follow, tuple(report))
