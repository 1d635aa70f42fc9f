"""Kernel time of one transformer layer in eager PyTorch, forward and backward, without launch gaps.

What the layer tables hold: a profiler's sum of the CUDA kernels of one eager Hugging Face style
layer (torch 2.1; autocast with fp32 parameters, or plain fp32 without TF32): unfused norms, rotary
and gates, attention by flash (fp16 on Ampere and later), torch's memory-efficient kernel (others)
or unfused (Pascal, and models that are not gated). Weights are cast once per autocast region, so
the forward pass has no cast; the backward pass casts each fp16 weight gradient to fp32 and adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hardware_db
from hardware_db.schema import GpuSpec
from simulator.cost.kernel_rates import KernelRates, rates
from simulator.cost.kernels import attention_time_s, gemm_time_s, memory_time_s
from simulator.errors import UserError
from simulator.interop.run_rows import RunRow
from simulator.interop.summaries import ErrorSummary, summarise

Array = NDArray[np.float64]

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
_DTYPE_NAMES = {"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
#: Head size where a row names no heads: most models of every family have it or twice it.
_ASSUMED_HEAD = 64


@dataclass(frozen=True)
class LayerShapes:
    """Layers of one dtype as arrays over rows; ``gated`` where the MLP has a gate (llama)."""

    hidden: Array
    ffn: Array
    heads: Array
    kv_heads: Array
    seq: Array
    batch: Array
    gated: NDArray[np.bool_]
    dtype: str


def attention_kernel(spec: GpuSpec, dtype: str) -> str:
    """Kernel that torch 2.1's scaled_dot_product_attention takes on a GPU."""
    if spec.architecture == "pascal":
        return "unfused"
    recent = float(spec.compute_capability) >= 8.0
    return "flash2" if recent and dtype == "float16" else "flash1"


def layer_time(rates: KernelRates, table: LayerShapes, kernel: str, *, backward: bool) -> Array:
    """Kernel time of one layer, seconds, one pass."""
    tokens = table.seq * table.batch
    linear, parameters = _linear_time(rates, table, tokens, backward=backward)
    total = linear + _attention_time(rates, table, kernel, backward=backward)
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
        total = total + memory_time_s(rates, GRADIENT_BYTES[table.dtype] * parameters)
    return np.asarray(total)


def _linear_time(
    rates: KernelRates, table: LayerShapes, tokens: Array, *, backward: bool
) -> tuple[Array, Array]:
    """Time of the layer's linear products, and their parameters."""
    size = 2.0 if DTYPES[table.dtype] == "fp16" else 4.0
    kv_width = np.where(table.gated, table.kv_heads, table.heads) * table.hidden / table.heads
    linears = (
        (table.hidden, table.hidden, 2.0),  # query and output
        (kv_width, table.hidden, 2.0),
        (table.ffn, table.hidden, np.where(table.gated, 2.0, 1.0)),
        (table.hidden, table.ffn, 1.0),
    )
    n, k, count = (
        np.array([np.broadcast_to(row[i], tokens.shape) for row in linears]) for i in (0, 1, 2)
    )
    total = np.zeros(tokens.shape)
    for pass_ in ("dgrad", "wgrad") if backward else ("fwd",):
        each = gemm_time_s(
            rates, np.broadcast_to(tokens, n.shape), n, k,
            dtype=DTYPES[table.dtype], in_bytes=size, out_bytes=size, pass_=pass_,
        )  # fmt: skip
        total = total + (count * each).sum(axis=0)
    return total, np.asarray((n * k * count).sum(axis=0))


def _attention_time(
    rates: KernelRates, table: LayerShapes, kernel: str, *, backward: bool
) -> Array:
    head_dim = table.hidden / table.heads
    core = [
        attention_time_s(
            rates, batch=table.batch, heads=table.heads,
            kv_heads=np.where(table.gated, table.kv_heads, table.heads),
            q_len=table.seq, kv_len=table.seq, head_dim=head_dim, v_head_dim=head_dim,
            causal=True, kernel=name, dtype=DTYPES[table.dtype], backward=backward,
        )
        for name in ((kernel, "unfused") if not table.gated.all() else (kernel,))
    ]  # fmt: skip
    return np.where(table.gated, core[0], core[-1])


@dataclass(frozen=True)
class LayerPrediction:
    """One row of a layer table; times in seconds, None where the row can't be expressed."""

    row: RunRow
    gpu: str = ""
    forward_s: float | None = None
    backward_s: float | None = None
    reason: str = ""
    assumptions: tuple[str, ...] = ()

    def errors(self) -> dict[str, float]:
        """Relative errors of the passes that were measured."""
        found = {}
        for column, predicted in (("fwd_ms", self.forward_s), ("bwd_ms", self.backward_s)):
            measured = self.row.number(column)
            if measured is not None and predicted is not None:
                found[column] = predicted / (1e-3 * measured) - 1.0
        return found

    def to_json(self) -> dict[str, Any]:
        """The row's cells, then what is predicted, as plain data."""
        errors = self.errors()
        return {
            **{name: cell or None for name, cell in self.row.cells.items()},
            "file": self.row.source, "line": self.row.line,
            "expressible": self.forward_s is not None, "reason": self.reason,
            "assumptions": list(self.assumptions),
            "predicted_fwd_ms": None if self.forward_s is None else 1e3 * self.forward_s,
            "predicted_bwd_ms": None if self.backward_s is None else 1e3 * self.backward_s,
            "fwd_error": errors.get("fwd_ms"), "bwd_error": errors.get("bwd_ms"),
        }  # fmt: skip


def predict_layers(
    rows: Sequence[RunRow], rates_of: Callable[[GpuSpec], KernelRates] = rates
) -> list[LayerPrediction]:
    """Every row's prediction, in order; rows of one GPU and dtype are priced together."""
    found: dict[int, LayerPrediction] = {}
    batches: dict[tuple[str, str], list[tuple[int, tuple[float, ...]]]] = {}
    notes: dict[int, tuple[str, ...]] = {}
    for index, row in enumerate(rows):
        try:
            spec, dtype, shape, notes[index] = _shape(row)
        except UserError as error:
            text = "; ".join(f"{p.path}: {p.message}" if p.path else p.message
                             for p in error.problems)  # fmt: skip
            found[index] = LayerPrediction(row, reason=text)
            continue
        batches.setdefault((spec.name, dtype), []).append((index, shape))
    for (name, dtype), members in batches.items():
        spec = hardware_db.gpu(name)
        hidden, ffn, heads, kv, seq, batch, gated = np.array([s for _, s in members], float).T
        table = LayerShapes(hidden, ffn, heads, kv, seq, batch, gated > 0, dtype)
        kernel = attention_kernel(spec, dtype)
        forward = layer_time(rates_of(spec), table, kernel, backward=False)
        backward = layer_time(rates_of(spec), table, kernel, backward=True)
        for i, (index, _) in enumerate(members):
            found[index] = LayerPrediction(
                rows[index], spec.name, float(forward[i]), float(backward[i]),
                assumptions=notes[index],
            )  # fmt: skip
    return [found[i] for i in range(len(rows))]


def _shape(row: RunRow) -> tuple[GpuSpec, str, tuple[float, ...], tuple[str, ...]]:
    """GPU, dtype, (hidden, ffn, heads, kv_heads, seq, batch, gated) and what was assumed."""
    notes = []
    if not row.text("gpu"):
        raise UserError(row.problem("gpu", "missing", "a name that `gpumix gpus` lists"))
    spec = hardware_db.gpu(row.text("gpu"))
    dtype = row.choice("dtype", {**{k: k for k in DTYPES}, **_DTYPE_NAMES})
    hidden = row.integer("hidden")
    heads = row.integer("heads", 0 if row.text("heads") else max(hidden // _ASSUMED_HEAD, 1))
    if not row.text("heads"):
        notes.append(f"heads not given: {_ASSUMED_HEAD} elements each")
    gated = row.text("arch").lower() in ("llama", "mistral", "mixtral", "qwen")
    shape = (
        hidden, row.integer("ffn_hidden"), heads, row.integer("kv_heads", heads),
        row.integer("seq_len"), row.integer("micro_batch"), float(gated),
    )  # fmt: skip
    return spec, dtype, shape, tuple(notes)


def layer_summary(rows: Iterable[LayerPrediction]) -> dict[str, Any]:
    """Errors over both passes, each pass alone, and by GPU."""
    chosen = [r for r in rows if r.errors()]
    by_gpu: dict[str, list[LayerPrediction]] = {}
    for r in chosen:
        by_gpu.setdefault(r.gpu, []).append(r)
    return {
        **_errors(chosen, ("fwd_ms", "bwd_ms")).to_json(),
        "rows": len(chosen),
        "forward": _errors(chosen, ("fwd_ms",)).to_json(),
        "backward": _errors(chosen, ("bwd_ms",)).to_json(),
        "by_gpu": {
            gpu: _errors(part, ("fwd_ms", "bwd_ms")).to_json()
            for gpu, part in sorted(by_gpu.items())
        },
    }


def _errors(rows: Iterable[LayerPrediction], columns: Sequence[str]) -> ErrorSummary:
    return summarise([e for r in rows for name, e in r.errors().items() if name in columns])
