"""Time of a layer on a GPU: its operators priced one by one, forward and backward.

A layer takes the longer of what the GPU needs for its kernels and what the host needs to launch
them (DESIGN: dispatch-bound small models).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hardware_db.schema import GpuSpec
from simulator.cost.batch import Array
from simulator.cost.calibration import UNTUNED, Tuning
from simulator.cost.kernel_rates import KernelRates
from simulator.cost.kernels import attention_time_s, gemm_time_s, memory_time_s
from simulator.cost.operators import Kind, LayerContext, Operator

#: Kernels by what the GPU needs for them; flash kernels need Ampere, the third needs Hopper.
_FLASH_ARCHITECTURES = ("ampere", "ada", "hopper", "blackwell")

# FP8 products read operands that a cast kernel wrote: two-byte input read, one-byte copy and its
# transpose written (Transformer Engine keeps both for the two backward products).
_FP8_CAST_BYTES = 4.0


@dataclass(frozen=True)
class OperatorTimes:
    """GPU seconds and kernel launches of a list of operators, as arrays over the batch.

    ``recompute_s`` is the forward time of what SELECTIVE recompute runs again.
    """

    forward_s: Array
    input_s: Array
    weight_s: Array
    recompute_s: Array
    forward_launches: Array
    backward_launches: Array
    recompute_launches: Array

    def slowed(self, factor: float) -> OperatorTimes:
        """The same launches with ``factor`` times the GPU time."""
        return OperatorTimes(
            self.forward_s * factor, self.input_s * factor, self.weight_s * factor,
            self.recompute_s * factor, self.forward_launches, self.backward_launches,
            self.recompute_launches,
        )  # fmt: skip

    def __add__(self, other: OperatorTimes) -> OperatorTimes:
        names = self.__dataclass_fields__
        return OperatorTimes(*(getattr(self, n) + getattr(other, n) for n in names))


def attention_kernel(gpu: GpuSpec, asked: str, default: str) -> str:
    """The kernel that runs on a GPU: what was asked or the stack's own, as the GPU supports it."""
    name = default if asked == "auto" else asked
    if name == "flash3" and gpu.architecture != "hopper":
        name = "flash2"
    if name.startswith("flash") and gpu.architecture not in _FLASH_ARCHITECTURES:
        name = "unfused"
    return name


def kernel_times(
    operators: tuple[Operator, ...], ctx: LayerContext, rates: KernelRates
) -> dict[Kind, OperatorTimes]:
    """Times of kernels alone, summed by kind of operator."""
    zero = np.zeros(())
    empty = OperatorTimes(zero, zero, zero, zero, zero, zero, zero)
    total: dict[Kind, OperatorTimes] = {"gemm": empty, "attention": empty, "memory": empty}
    for op in operators:
        total[op.kind] = total[op.kind] + _one(op, ctx, rates)
    return total


def step_times(alone: Mapping[Kind, OperatorTimes], tuned: Tuning = UNTUNED) -> OperatorTimes:
    """Times of the same kernels inside a step, all kinds together."""
    factors: dict[Kind, float] = {
        "gemm": tuned.gemm, "attention": tuned.attention, "memory": tuned.memory
    }  # fmt: skip
    parts = [times.slowed(factors[kind]) for kind, times in alone.items()]
    return parts[0] + parts[1] + parts[2]


def operator_times(
    operators: tuple[Operator, ...],
    ctx: LayerContext,
    rates: KernelRates,
    tuned: Tuning = UNTUNED,
) -> OperatorTimes:
    """Price operators on a GPU inside a step; zero everywhere for an empty list."""
    return step_times(kernel_times(operators, ctx, rates), tuned)


def _one(op: Operator, ctx: LayerContext, rates: KernelRates) -> OperatorTimes:
    if op.kind == "gemm":
        forward, dgrad, wgrad = _gemm(op, ctx, rates)
    elif op.kind == "attention":
        forward, dgrad = (_attention(op, ctx, rates, backward=b) for b in (False, True))
        wgrad = np.zeros(())
    else:
        forward = _memory(op, rates, op.forward_bytes, op.launches)
        dgrad = _memory(op, rates, op.backward_bytes, op.backward_launches)
        wgrad = np.zeros(())
    again = op.recomputed * op.share
    scale = op.share
    return OperatorTimes(
        forward * scale,
        dgrad * scale,
        wgrad * scale,
        forward * again,
        np.asarray(op.launches * op.share),
        np.asarray(op.backward_launches * op.share),
        np.asarray(op.launches * again),
    )


def _gemm(op: Operator, ctx: LayerContext, rates: KernelRates) -> tuple[Array, Array, Array]:
    """Forward product, data gradient and weight gradient."""
    # Products that stay in the activation type under FP8: logits and the router.
    dtype = ctx.recipe.compute_dtype
    plain = dtype == "fp8" and op.name in ("logits", "router")
    dtype = "bf16" if plain else dtype
    width = 1.0 if dtype == "fp8" else ctx.width
    out = ctx.width

    def time(pass_: str, out_bytes: float) -> Array:
        return gemm_time_s(
            rates, op.m, op.n, op.k, dtype=dtype, batch=op.count, in_bytes=width,
            out_bytes=out_bytes, pass_=pass_,
        )  # fmt: skip

    # A fused weight gradient reads and writes the accumulation buffer itself.
    grad_out = 2 * ctx.recipe.grad_bytes if ctx.recipe.fused_grad_accumulation else out
    forward, dgrad, wgrad = time("fwd", out), time("dgrad", out), time("wgrad", grad_out)
    if dtype == "fp8":
        forward = forward + memory_time_s(rates, _FP8_CAST_BYTES * op.count * op.m * op.k)
        dgrad = dgrad + memory_time_s(rates, _FP8_CAST_BYTES * op.count * op.m * op.n)
    return forward, dgrad, wgrad


def _attention(op: Operator, ctx: LayerContext, rates: KernelRates, *, backward: bool) -> Array:
    dtype = ctx.recipe.compute_dtype
    return attention_time_s(
        rates, batch=op.count, heads=op.heads, kv_heads=op.kv_heads, q_len=op.q_len,
        kv_len=op.kv_len, head_dim=op.head_dim, v_head_dim=op.v_head_dim, causal=op.causal,
        kernel=ctx.attention, dtype="bf16" if dtype == "fp8" else dtype, backward=backward,
        dropout=ctx.model.dropout > 0,
        fused_softmax=ctx.fused.fused_softmax,
    )  # fmt: skip


def _memory(op: Operator, rates: KernelRates, moved: Array | float, kernels: float) -> Array:
    """``kernels`` launches that move ``moved`` bytes together."""
    if kernels <= 0:
        return np.zeros(())
    kind = "norm" if "norm" in op.name else "elementwise"
    return kernels * memory_time_s(rates, np.asarray(moved) / kernels, kind=kind)
