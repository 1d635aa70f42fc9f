"""One transformer layer of the layer-latency table as kernels: the fit of GPUs known only by it.

The table's profiler sums CUDA kernels of one eager Hugging Face style layer (torch 2.1, autocast
with fp32 parameters, or plain fp32): unfused norms, rotary and gates, attention by flash (fp16 on
Ampere and later), torch's memory-efficient kernel (others), or unfused (Pascal). Weights are cast
once per autocast region, so the forward pass has no cast; the backward pass casts each fp16 weight
gradient to fp32 and adds it. Bytes below count reads and writes of that eager code.
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
from hardware_db.schema import GpuSpec
from simulator.cost.kernel_rates import AttentionParams, GemmParams, KernelRates, MemoryParams
from simulator.cost.kernels import attention_time_s, gemm_time_s, memory_time_s

#: Bytes moved per token and element of the hidden size (h) and of the FFN size (f) by the eager
#: pointwise kernels: (family, dtype) -> (forward h, forward f, backward h, backward f).
#: Llama fp16: 2 norms x 24, 5 casts x 6, rotary 32, copy 4, 2 residuals x 10; gate 10.
POINTWISE_BYTES = {
    ("llama", "float16"): (134.0, 10.0, 284.0, 18.0),
    ("llama", "float32"): (144.0, 20.0, 300.0, 36.0),
    ("gpt", "float16"): (58.0, 4.0, 120.0, 8.0),
    ("gpt", "float32"): (56.0, 8.0, 112.0, 16.0),
}
#: Bytes per parameter in the backward pass: cast (2 + 4) and fp32 accumulate (4 + 4 + 4).
GRADIENT_BYTES = {"float16": 18.0, "float32": 12.0}
DTYPES = {"float16": "fp16", "float32": "fp32"}

LAYER_BOUNDS = {
    "efficiency": (0.05, 1.0),
    "throttle": (0.0, 0.3),
    "backward_factor": (0.5, 1.4),
    "memory_scale": (0.5, 1.2),
}
#: Heads that the profiled GPT code uses, where the table has none or the model's usual number.
GPT_HEADS = {"gpt_1.3b": 128.0, "gpt_2.7b": 80.0, "gpt_6.7b": 128.0}


@dataclass(frozen=True)
class LayerTable:
    """Columns of the rows of one GPU and dtype."""

    hidden: Array
    ffn: Array
    heads: Array
    kv_heads: Array
    seq: Array
    batch: Array
    gated: NDArray[np.bool_]
    group: NDArray[np.int64]
    forward_s: Array
    backward_s: Array
    dtype: str


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


def attention_kernel(spec: GpuSpec, dtype: str) -> str:
    """Kernel that the profiled code chose."""
    if spec.architecture == "pascal":
        return "unfused"
    recent = float(spec.compute_capability) >= 8.0
    return "flash2" if recent and dtype == "float16" else "flash1"


def layer_time(rates: KernelRates, table: LayerTable, kernel: str, *, backward: bool) -> Array:
    """Kernel time of one layer, seconds, one pass."""
    dtype = DTYPES[table.dtype]
    size = 2.0 if dtype == "fp16" else 4.0
    tokens = table.seq * table.batch
    head_dim = table.hidden / table.heads
    kv_width = np.where(table.gated, table.kv_heads, table.heads) * head_dim
    up = np.where(table.gated, 2.0, 1.0)
    linears = (
        (table.hidden, table.hidden, 2.0),  # query and output
        (kv_width, table.hidden, 2.0),
        (table.ffn, table.hidden, up),
        (table.hidden, table.ffn, 1.0),
    )
    total = np.zeros(tokens.shape)
    shape = (len(linears), tokens.size)
    n, k, count = (
        np.array([np.broadcast_to(row[i], tokens.shape) for row in linears]) for i in (0, 1, 2)
    )
    for pass_ in ("dgrad", "wgrad") if backward else ("fwd",):
        each = gemm_time_s(
            rates, np.broadcast_to(tokens, shape), n, k,
            dtype=dtype, in_bytes=size, out_bytes=size, pass_=pass_,
        )  # fmt: skip
        total = total + (count * each).sum(axis=0)
    shared = np.where(table.gated, table.kv_heads, table.heads)
    core = [
        attention_time_s(
            rates,
            batch=table.batch,
            heads=table.heads,
            kv_heads=shared,
            q_len=table.seq,
            kv_len=table.seq,
            head_dim=head_dim,
            v_head_dim=head_dim,
            causal=True,
            kernel=name,
            dtype=dtype,
            backward=backward,
        )
        for name in ((kernel, "unfused") if not table.gated.all() else (kernel,))
    ]
    total = total + np.where(table.gated, core[0], core[-1])
    offset = 2 if backward else 0
    per_hidden, per_ffn = (
        np.where(
            table.gated,
            POINTWISE_BYTES["llama", table.dtype][offset + i],
            POINTWISE_BYTES["gpt", table.dtype][offset + i],
        )
        for i in (0, 1)
    )
    total = total + memory_time_s(rates, tokens * table.hidden * per_hidden)
    total = total + memory_time_s(rates, tokens * table.ffn * per_ffn)
    if backward:
        parameters = (n * k * count).sum(axis=0)
        total = total + memory_time_s(rates, GRADIENT_BYTES[table.dtype] * parameters)
    return np.asarray(total)


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
