"""How long one GPU kernel runs: matrix products, memory passes, attention.

All functions are pure, broadcast over numpy arrays and return seconds of GPU execution. Host
dispatch gaps are not in them (``compute`` adds those). The parameters are fractions of what the
datasheet promises, so that a GPU without measurements can take those of its architecture; they
live in ``hardware_db/calibration/kernels.yaml``, written by ``benchmarks/fit_kernels.py``, and
``docs/kernels.md`` states the errors on held-out shapes.

The matrix product follows the usual tiled-kernel picture (wave quantisation: NVIDIA, "Matrix
Multiplication Background User's Guide"; split-k: CUTLASS, "Efficient GEMM in CUDA"): the library
is taken to pick the best of a few tile shapes and k-splits, each costed by whole waves over the
SMs, the tensor-core rate, the rate at which operands reach the SMs, and the DRAM floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.cost.kernel_rates import (
    AttentionParams,
    GemmParams,
    KernelRates,
    MemoryParams,
    rates,
)
from simulator.errors import Problem, UserError

__all__ = [
    "AttentionParams",
    "GemmParams",
    "KernelRates",
    "MemoryParams",
    "attention_flops",
    "attention_time_s",
    "gemm_time_s",
    "memory_time_s",
    "rates",
]

Array = NDArray[np.float64]

#: Thread-block tiles (rows, columns of the output) that the matrix library may choose from.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: Into how many parts the contraction may be cut when the output has too few tiles.
SPLITS = (1, 2, 4)
#: Work at peak rate above which the clock starts to sag under power, seconds.
_THROTTLE_ONSET_S = 2e-4
#: The sag is taken to be complete after this many onsets (20 ms), hence bounded.
_THROTTLE_SPAN = 100.0
#: Time to start the second pass of a split-k product, seconds.
_SPLIT_LAUNCH_S = 1e-6
#: Sharpness of the soft maximum between compute and memory limits: 4 makes a tie cost 19 %.
_SOFTNESS = 4.0
# Elements evaluated at once: keeps the temporaries of one pass in the cache.
_CHUNK = 16_384

_PASSES = ("fwd", "dgrad", "wgrad")


def gemm_time_s(
    rates: KernelRates,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    dtype: str,
    batch: ArrayLike = 1,
    out_bytes: ArrayLike = 2,
    in_bytes: ArrayLike = 2,
    pass_: str = "fwd",
) -> Array:
    """Time of ``batch`` products (m x k)(k x n), seconds; all sizes broadcast.

    ``m`` is tokens, ``n`` output features, ``k`` input features of the *forward* product.
    ``pass_`` says which of the three products of a linear layer is meant and permutes them:
    ``fwd`` gives m x n over k; ``dgrad`` (gradient of the input) m x k over n; ``wgrad``
    (gradient of the weight) n x k over m. ``in_bytes`` and ``out_bytes`` are the sizes of one
    operand and one result element in memory (4 for an fp32 weight gradient).

    A product with any size 0 takes no time.

    Raises:
        UserError: ``dtype`` is not one that this GPU can multiply, or ``pass_`` is unknown.
    """
    if pass_ not in _PASSES:
        raise UserError(Problem("pass_", f"unknown pass {pass_!r}", "fwd, dgrad or wgrad"))
    params = _gemm_params(rates, dtype)
    if pass_ == "dgrad":
        n, k = k, n
    elif pass_ == "wgrad":
        m, n, k = n, k, m
    if pass_ != "fwd":
        efficiency = min(1.0, params.efficiency * params.backward_factor)
        params = replace(params, efficiency=efficiency)
    arrays = np.broadcast_arrays(
        *(np.asarray(a, float) for a in (m, n, k, batch, in_bytes, out_bytes))
    )
    flat = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    result = np.empty(flat[0].shape)
    for part in _chunks(result.size):
        result[part] = _gemm_chunk(rates, params, dtype, *(a[part] for a in flat))
    return result.reshape(arrays[0].shape)


def _gemm_params(rates: KernelRates, dtype: str) -> GemmParams:
    if dtype not in rates.gemm:
        known = ", ".join(sorted(rates.gemm))
        raise UserError(
            Problem("precision", f"{rates.gpu} multiplies no {dtype}", f"choose from {known}")
        )
    return rates.gemm[dtype]


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, _CHUNK):
        yield slice(start, start + _CHUNK)


def _gemm_chunk(
    rates: KernelRates,
    params: GemmParams,
    dtype: str,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    in_bytes: Array,
    out_bytes: Array,
) -> Array:
    flops = 2.0 * batch * m * n * k
    peak = rates.peak_flops[dtype]
    sag = 1.0 + params.throttle * np.log1p(
        np.minimum(flops / (peak * _THROTTLE_ONSET_S), _THROTTLE_SPAN)
    )
    flop_time = rates.sm_count * sag / (peak * params.efficiency * rates.sustained)
    feed_time = in_bytes / (params.feed_bytes_per_clock * rates.clock_hz)
    peak_time = np.full(m.shape, rates.sm_count / peak)
    work = _best_tiling(rates, params, m, n, k, batch, flop_time, peak_time, feed_time)
    moved = batch * (in_bytes * (m * k + n * k) + out_bytes * m * n)
    floor = moved / (rates.memory_bandwidth_bytes_per_s * params.memory_fraction)
    return np.where(flops > 0, params.latency_s + soft_maximum(work, floor), 0.0)


def _best_tiling(
    rates: KernelRates,
    params: GemmParams,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    flop_time: Array,
    peak_time: Array,
    feed_time: Array,
) -> Array:
    """Time of the fastest tile shape and split, seconds, without DRAM floor and latency.

    ``flop_time`` and ``peak_time`` are seconds per FLOP of one SM as achieved and at the datasheet
    peak; ``feed_time`` seconds per operand element of one SM. With SMs idle the busy ones run
    faster (power and cache bandwidth are shared), but never above the peak.
    """
    best = np.full(m.shape, np.inf)
    reduction = params.split_cost * 8.0 * batch * m * n / rates.memory_bandwidth_bytes_per_s
    firm = 1.0 - params.wave_softness
    for rows, columns in TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        volume = 2.0 * rows * columns
        for split in SPLITS:
            load = tiles * (split / rates.sm_count)
            waves = np.where(load < 1.0, 1.0, params.wave_softness * load + firm * np.ceil(load))
            spare = 1.0 / (1.0 + params.spare_gain * np.maximum(0.0, 1.0 - load))
            step = soft_maximum(
                volume * np.maximum(flop_time * spare, peak_time),
                (rows + columns) * feed_time * spare,
            )
            time = waves * step * (k / split + params.prologue_k)
            if split > 1:
                time = time + split * reduction + _SPLIT_LAUNCH_S
            best = np.minimum(best, time)
    return best


def soft_maximum(a: Array, b: Array) -> Array:
    """Both limits at work: ``(a**4 + b**4)**(1/4)``, never below the larger one."""
    square_a, square_b = a * a, b * b
    return np.asarray(np.sqrt(np.sqrt(square_a * square_a + square_b * square_b)))


def memory_time_s(
    rates: KernelRates, bytes_moved: ArrayLike, *, kind: str = "elementwise"
) -> Array:
    """Time of one kernel that only moves ``bytes_moved`` (reads plus writes), seconds.

    Latency plus bytes over the achieved bandwidth; what fits the second-level cache moves faster
    (just-written inputs are read from there). ``kind`` is ``elementwise`` (residual add, cast,
    copy, rotary, optimiser), ``norm`` (RMS), ``layer_norm``, ``activation`` (one input) or
    ``gated_activation``.
    Zero bytes take no time.

    Raises:
        UserError: unknown ``kind``.
    """
    params = rates.memory
    if kind not in params.fraction:
        known = ", ".join(sorted(params.fraction))
        raise UserError(Problem("kind", f"unknown kind of memory pass {kind!r}", known))
    moved = np.asarray(bytes_moved, float)
    cached = np.minimum(1.0, rates.l2_bytes / np.maximum(moved, 1.0))
    bandwidth = rates.memory_bandwidth_bytes_per_s * params.fraction[kind]
    time = params.latency_s + moved / (bandwidth * (1.0 + params.l2_gain * cached))
    return np.where(moved > 0, time, 0.0)


def attention_flops(
    *,
    batch: ArrayLike,
    heads: ArrayLike,
    q_len: ArrayLike,
    kv_len: ArrayLike,
    head_dim: ArrayLike,
    v_head_dim: ArrayLike,
    visible: ArrayLike = 1.0,
) -> Array:
    """FLOPs of the two products of attention, forward: QK^T and PV (no softmax).

    ``visible`` is the share of the score matrix computed (:func:`causal_share`). With equal head
    sizes this is 4 b h s_q s_k d (FlashAttention-2, arXiv 2307.08691, section 4.1).
    """
    scores = np.asarray(batch, float) * heads * np.asarray(q_len, float) * kv_len
    return np.asarray(2.0 * scores * (np.asarray(head_dim, float) + v_head_dim) * visible)


def causal_share(q_len: ArrayLike, kv_len: ArrayLike, *, block: int = 128) -> Array:
    """Share of score blocks that a causal flash kernel computes; queries are the last ones.

    Half for long equal sequences; whole blocks of ``block`` on the diagonal are computed.
    """
    q, kv = np.asarray(q_len, float), np.maximum(np.asarray(kv_len, float), 1.0)
    exact = 1.0 - (np.minimum(q, kv) - 1.0) / (2.0 * kv)
    return np.asarray(np.minimum(1.0, exact + 0.5 * np.minimum(block, kv) / kv))


def attention_time_s(
    rates: KernelRates,
    *,
    batch: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    q_len: ArrayLike,
    kv_len: ArrayLike,
    head_dim: ArrayLike,
    v_head_dim: ArrayLike,
    causal: bool,
    kernel: str,
    dtype: str,
    backward: bool,
    dropout: bool = False,
    fused_softmax: bool = False,
) -> Array:
    """Time of the attention core (scores, softmax, values) of one layer, seconds.

    ``kernel`` is ``unfused``, ``flash1``, ``flash2``, ``flash3``, or ``flash``: the newest of them
    that this GPU runs. ``flash1`` also stands for torch's memory-efficient kernel, ``flash3`` for
    the vendor's own on Hopper and Blackwell. A flash kernel skips masked
    blocks when ``causal`` and its backward pass does 2.5 times the forward FLOPs (five products
    for two: FlashAttention-2, section 4.1). The unfused one multiplies the whole matrix and
    passes over it in memory for scale, mask, softmax and dropout; ``fused_softmax`` does scale,
    mask and softmax in one kernel (Megatron-LM's), so that only its own passes remain.

    Raises:
        UserError: unknown ``kernel``, or a dtype that this GPU cannot multiply.
    """
    if kernel == "flash":
        kernel = max((name for name in rates.attention if name != "unfused"), default="unfused")
    if kernel not in rates.attention:
        known = ", ".join(sorted(rates.attention))
        raise UserError(
            Problem("attention", f"{rates.gpu} has no attention kernel {kernel!r}", known)
        )
    names = (batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim)
    b, h, kvh, q, kv, d, dv = np.broadcast_arrays(*(np.asarray(a, float) for a in names))
    if kernel == "unfused":
        return _unfused_attention(
            rates,
            b,
            h,
            q,
            kv,
            d,
            dv,
            dtype=dtype,
            backward=backward,
            dropout=dropout,
            fused_softmax=fused_softmax,
        )
    return _flash_attention(
        rates, b, h, kvh, q, kv, d, dv,
        causal=causal, kernel=kernel, dtype=dtype, backward=backward, dropout=dropout,
    )  # fmt: skip


#: Passes of a fused scale-mask-softmax over the score matrix: forward reads and writes it once,
#: backward reads probabilities and gradient and writes the gradient (by flag ``backward``).
FUSED_SOFTMAX_PASSES = {False: 2.0, True: 3.0}

#: FLOPs of a flash backward pass over its forward pass: five products instead of two.
FLASH_BACKWARD_FLOPS = 2.5
# Rows of queries that one thread block of a flash kernel owns.
_FLASH_ROWS = 128


def _flash_attention(
    rates: KernelRates,
    b: Array,
    h: Array,
    kvh: Array,
    q: Array,
    kv: Array,
    d: Array,
    dv: Array,
    *,
    causal: bool,
    kernel: str,
    dtype: str,
    backward: bool,
    dropout: bool,
) -> Array:
    params = rates.attention[kernel]
    _gemm_params(rates, dtype)
    share = causal_share(q, kv) if causal else np.ones(q.shape)
    flops = attention_flops(
        batch=b, heads=h, q_len=q, kv_len=kv, head_dim=d, v_head_dim=dv, visible=share
    )
    width = 0.5 * (d + dv)
    shape = width / (width + params.head_dim_half) * (1.0 + params.head_dim_half / 128.0)
    efficiency = params.backward_efficiency if backward else params.forward_efficiency
    rate = rates.peak_flops[dtype] * rates.sustained * efficiency * np.minimum(shape, 1.25)
    rate = np.minimum(rate, rates.peak_flops[dtype])
    # One thread block owns 128 queries of one head (keys in the backward pass).
    blocks = b * h * np.ceil((kv if backward else q) / _FLASH_ROWS)
    fill = np.minimum(1.0, np.maximum(blocks, 1.0) / rates.sm_count)
    inner = (q if backward else kv) * share
    work = flops * (FLASH_BACKWARD_FLOPS if backward else 1.0) / (rate * fill)
    work = work * (1.0 + params.ramp_tokens / np.maximum(inner, 1.0))
    if dropout:
        work = work * params.dropout_factor
    size = _element_bytes(dtype)
    tensors = b * q * h * (d + dv) + b * kv * kvh * (d + dv)
    moved = size * tensors * (2.5 if backward else 1.0)
    floor = moved / (rates.memory_bandwidth_bytes_per_s * rates.memory.fraction["elementwise"])
    return np.where(flops > 0, params.latency_s + soft_maximum(work, floor), 0.0)


def _element_bytes(dtype: str) -> float:
    return 4.0 if dtype in ("fp32", "tf32") else 2.0


def _unfused_attention(
    rates: KernelRates,
    b: Array,
    h: Array,
    q: Array,
    kv: Array,
    d: Array,
    dv: Array,
    *,
    dtype: str,
    backward: bool,
    dropout: bool,
    fused_softmax: bool,
) -> Array:
    params = rates.attention["unfused"]
    size = _element_bytes(dtype)
    scores = b * h * q * kv
    passes = params.backward_passes if backward else params.forward_passes
    if fused_softmax:
        passes = min(passes, FUSED_SOFTMAX_PASSES[backward])
    per_pass = memory_time_s(rates, size * scores)
    # Dropout reads and writes the matrix once more and keeps or reads a one-byte mask.
    extra = memory_time_s(rates, (2.0 * size + 1.0) * scores) if dropout else 0.0
    time = passes * per_pass + extra
    for inner, outer in ((d, kv), (kv, dv)):
        for pass_ in ("dgrad", "wgrad") if backward else ("fwd",):
            time = time + gemm_time_s(
                rates, q, outer, inner,
                dtype=dtype, batch=b * h, in_bytes=size, out_bytes=size, pass_=pass_,
            )  # fmt: skip
    return np.asarray(time)
