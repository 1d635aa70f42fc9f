"""Fits of single kernels: matrix products, memory passes, attention; errors on held-out shapes.

numpy only. Every fit minimises a robust loss of log errors with Nelder-Mead over bounded
parameters and calls the product's own time functions, so no formula is written twice.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hardware_db import gpu
from hardware_db.schema import GpuSpec
from simulator.cost.kernel_rates import AttentionParams, GemmParams, KernelRates, MemoryParams
from simulator.cost.kernels import attention_time_s, gemm_time_s, memory_time_s

Array = NDArray[np.float64]
Rows = list[dict[str, str]]

#: Log errors well below this count quadratically, well above it linearly.
ROBUST_SCALE = 0.02

#: Bounds of what is fitted for the products of one GPU; physical limits, not priors.
GEMM_BOUNDS: dict[str, tuple[float, float]] = {
    "efficiency": (0.2, 1.0),
    "feed_bytes_per_clock": (5.0, 130.0),
    "prologue_k": (0.0, 600.0),
    "latency_s": (5e-7, 1.2e-5),
    "memory_fraction": (0.3, 1.0),
    "wave_softness": (0.0, 1.0),
    "split_cost": (0.1, 8.0),
    "throttle": (0.0, 0.3),
    "spare_gain": (0.0, 1.0),
}
GEMM_START = GemmParams(0.85, 40.0, 80.0, 4e-6, 0.8, 0.5, 0.5, 0.03, 0.4)


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of one operator on rows that its fit did not see."""

    gpu: str
    operator: str
    rows: int
    median: float
    p90: float
    note: str = ""


def read_rows(path: Path) -> Rows:
    """Rows of a measured table as text."""
    with path.open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def column(rows: Rows, name: str) -> Array:
    """One numeric column."""
    return np.array([float(row[name]) for row in rows])


def errors(name: str, operator: str, predicted: Array, measured: Array, note: str = "") -> Errors:
    """Median and 90th percentile of ``|predicted/measured - 1|``."""
    off = np.abs(predicted / measured - 1.0)
    if off.size == 0:
        return Errors(name, operator, 0, float("nan"), float("nan"), note)
    return Errors(
        name, operator, off.size, float(np.median(off)), float(np.quantile(off, 0.9)), note
    )


def every_second(*columns: Array) -> NDArray[np.bool_]:
    """Rows whose distinct tuple of ``columns``, sorted, has an even rank: the training half."""
    keys = np.stack(columns, axis=1)
    _, rank = np.unique(keys, axis=0, return_inverse=True)
    return np.asarray(rank.reshape(-1) % 2 == 0)


def robust_loss(predicted: Array, measured: Array) -> float:
    """Mean of a smooth absolute log error."""
    off = np.log(predicted / measured)
    return float(np.mean(np.sqrt(off * off + ROBUST_SCALE**2)))


def minimise(
    loss: Callable[[Mapping[str, float]], float],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    *,
    steps: int = 400,
    restarts: int = 2,
) -> dict[str, float]:
    """Nelder-Mead over ``bounds`` (mapped to the real line by a logistic), restarted in place."""
    names = list(bounds)
    low = np.array([bounds[n][0] for n in names])
    span = np.array([bounds[n][1] for n in names]) - low

    def values(point: Array) -> dict[str, float]:
        return dict(zip(names, (low + span / (1.0 + np.exp(-point))).tolist(), strict=True))

    share = np.clip((np.array([start[n] for n in names]) - low) / span, 0.01, 0.99)
    best = np.log(share / (1.0 - share))
    for _ in range(restarts):
        best = _nelder_mead(lambda point: loss(values(point)), best, steps)
    return values(best)


def _nelder_mead(function: Callable[[Array], float], start: Array, steps: int) -> Array:
    points = [start] + [start + 0.5 * unit for unit in np.eye(start.size)]
    scores = [function(point) for point in points]
    for _ in range(steps):
        order = np.argsort(scores, kind="stable")
        points, scores = [points[i] for i in order], [scores[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        away = centre - points[-1]
        trial = centre + away
        score = function(trial)
        if score < scores[0]:
            far = centre + 2.0 * away
            far_score = function(far)
            if far_score < score:
                trial, score = far, far_score
        elif score >= scores[-2]:
            near = centre + (0.5 if score < scores[-1] else -0.5) * away
            near_score = function(near)
            if near_score >= min(score, scores[-1]):
                points = [points[0]] + [points[0] + 0.5 * (p - points[0]) for p in points[1:]]
                scores = [scores[0]] + [function(point) for point in points[1:]]
                continue
            trial, score = near, near_score
        points[-1], scores[-1] = trial, score
    return points[int(np.argmin(scores))]


def bare_rates(
    spec: GpuSpec,
    gemm: Mapping[str, GemmParams],
    memory: MemoryParams,
    attention: Mapping[str, AttentionParams] | None = None,
) -> KernelRates:
    """Rates with trial parameters, for the product's time functions."""
    return KernelRates(
        gpu=spec.name,
        sm_count=spec.sm_count,
        clock_hz=spec.boost_clock_hz,
        peak_flops={dtype: spec.peak(dtype) for dtype in gemm},
        memory_bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s,
        l2_bytes=float(spec.l2_bytes),
        gemm=gemm,
        memory=memory,
        attention=attention or {},
        sustained=1.0,
        basis="trial",
        source="",
    )


ANY_MEMORY = MemoryParams({"elementwise": 0.85}, 2e-6, 0.3)


def gemm_fit(rows: Rows, name: str) -> tuple[GemmParams, list[Errors]]:
    """Parameters of one GPU's fp16 products, fitted on every second (n, k) pair.

    Errors: on the other (n, k) pairs; and, from a second fit, on every second value of m.
    """
    spec = gpu(name)
    m, n, k = (column(rows, c) for c in "mnk")
    measured = column(rows, "time_us") * 1e-6

    def predict(params: GemmParams, pick: NDArray[np.bool_]) -> Array:
        trial = bare_rates(spec, {"fp16": params}, ANY_MEMORY)
        return gemm_time_s(trial, m[pick], n[pick], k[pick], dtype="fp16")

    def fit(pick: NDArray[np.bool_]) -> GemmParams:
        found = minimise(
            lambda v: robust_loss(predict(GemmParams(**v), pick), measured[pick]),
            asdict(GEMM_START),
            GEMM_BOUNDS,
        )
        return GemmParams(**found)

    by_shape, by_tokens = every_second(n, k), every_second(m)
    params = fit(by_shape)
    other = fit(by_tokens)
    return params, [
        errors(spec.name, "product", predict(params, ~by_shape), measured[~by_shape], "(n, k)"),
        errors(spec.name, "product", predict(other, ~by_tokens), measured[~by_tokens], "m"),
    ]


#: Kinds of memory pass in the table of memory-bound kernels, by their name there.
KINDS = {
    "add": "elementwise",
    "norm": "norm",
    "layer_norm": "layer_norm",
    "act": "activation",
    "act_mul": "gated_activation",
}
#: Largest fraction of DRAM bandwidth that a plain copy reaches; adds above it re-read the cache.
COPY_CEILING = 0.92


def pass_kind(row: Mapping[str, str]) -> str | None:
    """Our kind of a row of the table, or ``None`` where its bytes don't match its kernels.

    The model with parallel blocks has a layer norm where all others have an RMS norm, and its
    residual "add" is two kernels timed as one.
    """
    parallel = row["source"].endswith("phi-2")
    if row["op"] == "add" and parallel:
        return None
    return KINDS["layer_norm" if row["op"] == "norm" and parallel else row["op"]]


def memory_fit(rows: Rows, name: str) -> tuple[MemoryParams, list[Errors]]:
    """Parameters of one GPU's memory passes, fitted on every second (operator, tokens, width).

    Every kind weighs the same in the loss, however many rows it has.
    """
    spec = gpu(name)
    kinds = list(KINDS.values())
    rows = [row for row in rows if pass_kind(row)]
    moved, tokens, width = (column(rows, c) for c in ("bytes", "tokens", "width"))
    measured = column(rows, "time_us") * 1e-6
    kind = np.array([kinds.index(str(pass_kind(row))) for row in rows])
    train = every_second(kind.astype(float), tokens, width)
    bounds = {f: (0.2, COPY_CEILING) for f in kinds}
    bounds |= {"latency_s": (2e-7, 8e-6), "l2_gain": (0.0, 1.5)}

    def params(v: Mapping[str, float]) -> MemoryParams:
        return MemoryParams({f: v[f] for f in kinds}, v["latency_s"], v["l2_gain"])

    def predict(p: MemoryParams) -> Array:
        trial = bare_rates(spec, {}, p)
        return np.choose(kind, [memory_time_s(trial, moved, kind=f) for f in kinds])

    def loss(v: Mapping[str, float]) -> float:
        guess = predict(params(v))
        parts = [train & (kind == index) for index in range(len(kinds))]
        return float(np.mean([robust_loss(guess[part], measured[part]) for part in parts]))

    start = {f: 0.6 for f in kinds} | {"latency_s": 2e-6, "l2_gain": 0.3}
    found = params(minimise(loss, start, bounds))
    guess = predict(found)
    report = [
        errors(spec.name, f, guess[test], measured[test], "tokens and width")
        for index, f in enumerate(kinds)
        if (test := ~train & (kind == index)).any()
    ]
    return found, report


#: TFLOP/s printed over the bars of FlashAttention-3, arXiv 2407.08608, figures 5 and 6 (H100 80GB
#: SXM5, FP16, 16k tokens, hidden size 2048; FlashAttention-2 is version 2.5.8), sequence 512 to
#: 16k: (kernel, backward, causal, head size) -> rates.
FLASH_FIGURES: dict[tuple[str, bool, bool, int], Sequence[float]] = {
    ("flash2", False, False, 64): (282, 306, 318, 321, 322, 324),
    ("flash2", False, False, 128): (309, 350, 362, 368, 370, 370),
    ("flash2", False, True, 64): (180, 229, 262, 284, 295, 299),
    ("flash2", False, True, 128): (191, 260, 298, 319, 333, 335),
    ("flash2", True, False, 64): (198, 238, 264, 279, 287, 291),
    ("flash2", True, False, 128): (214, 260, 291, 310, 318, 322),
    ("flash3", False, False, 64): (333, 392, 460, 476, 496, 497),
    ("flash3", False, False, 128): (467, 565, 625, 638, 646, 648),
    ("flash3", False, True, 64): (197, 265, 371, 420, 460, 473),
    ("flash3", False, True, 128): (292, 423, 521, 579, 602, 616),
    ("flash3", True, False, 64): (272, 363, 422, 453, 472, 474),
    ("flash3", True, False, 128): (316, 424, 501, 542, 559, 561),
}
FLASH_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def flash_fit(kernel: str) -> tuple[AttentionParams, list[Errors]]:
    """Parameters of a flash kernel on H100, fitted on the lengths 512, 2k, 8k, tested on others."""
    spec = gpu("h100-sxm-80gb")
    cases = {key: rates for key, rates in FLASH_FIGURES.items() if key[0] == kernel}
    bounds = {
        "forward_efficiency": (0.1, 0.9),
        "backward_efficiency": (0.1, 0.9),
        "head_dim_half": (1.0, 200.0),
        "ramp_tokens": (1.0, 600.0),
    }

    def predict(v: Mapping[str, float]) -> Array:
        params = AttentionParams(**v, latency_s=4e-6)
        trial = bare_rates(spec, {"fp16": GEMM_START}, ANY_MEMORY, {kernel: params})
        return np.concatenate([_figure_rates(trial, *key) for key in cases])

    measured = np.concatenate([np.array(rates, float) * 1e12 for rates in cases.values()])
    train = np.tile(np.arange(len(FLASH_LENGTHS)) % 2 == 0, len(cases))
    start = dict(zip(bounds, (0.5, 0.4, 40.0, 100.0), strict=True))
    found = minimise(
        lambda v: robust_loss(predict(v)[train], measured[train]), start, bounds, steps=250
    )
    report = errors(spec.name, kernel, predict(found)[~train], measured[~train], "sequence length")
    return AttentionParams(**found, latency_s=4e-6, dropout_factor=1.15), [report]


def _figure_rates(
    trial: KernelRates, kernel: str, backward: bool, causal: bool, head_dim: int
) -> Array:
    """Rates by the figure's convention: causal halves the FLOPs, backward is 2.5 forwards."""
    length = np.array(FLASH_LENGTHS, float)
    tokens, hidden = 16384.0, 2048.0
    time = attention_time_s(
        trial,
        batch=tokens / length,
        heads=hidden / head_dim,
        kv_heads=hidden / head_dim,
        q_len=length,
        kv_len=length,
        head_dim=head_dim,
        v_head_dim=head_dim,
        causal=causal,
        kernel=kernel,
        dtype="fp16",
        backward=backward,
    )
    flops = 4.0 * tokens * length * hidden * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return np.asarray(flops / time)
