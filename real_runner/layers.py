"""Pieces of a transformer layer: norms, positions, attention, MLP.

Everything is built on the device and dtype that torch is told to use (the runtimes build on the
meta device). Constants that a piece needs (rotary tables, masks) are made on first use and kept
per device, outside the module's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simulator.spec.model import ModelSpec


@dataclass(frozen=True)
class Details:
    """What changes a model's values but not its cost, so that ModelSpec leaves it out.

    ``gelu_tanh`` chooses GELU's tanh form; ``rope_fraction`` is the part of a head that is rotated
    (GPT-NeoX: 0.25); ``normalise_top_k`` makes the weights of a token's experts sum to 1
    (Mixtral, Qwen3) and ``routed_scale`` multiplies them; ``initial_std`` is the standard deviation
    of fresh matrices.
    """

    norm_eps: float = 1e-5
    gelu_tanh: bool = True
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0
    normalise_top_k: bool = True
    routed_scale: float = 1.0
    initial_std: float = 0.02


class _RmsNormFunction(torch.autograd.Function):
    """RMSNorm that keeps its input and one scale per row, as torch's fused CUDA kernel does.

    torch's CPU path is a chain of operators that keeps fp32 copies, so that a CPU run would need
    memory that no GPU needs. Formula: arXiv 1910.07467 equation 4.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normal = x.to(scale.dtype) * scale
        weight_grad = (grad.to(scale.dtype) * normal).sum(tuple(range(x.dim() - 1)))
        inner = (grad * weight).to(scale.dtype)
        inner = inner - normal * (inner * normal).mean(-1, keepdim=True)
        return (inner * scale).to(x.dtype), weight_grad.to(weight.dtype), None


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        out: Tensor = _RmsNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


def build_norm(spec: ModelSpec, details: Details, width: int | None = None) -> nn.Module:
    """The model's norm over the last axis; norms of another width never have a bias."""
    if spec.norm == "rmsnorm":
        return RmsNorm(width or spec.hidden, details.norm_eps)
    bias = spec.norm_bias and width is None
    return nn.LayerNorm(width or spec.hidden, eps=details.norm_eps, bias=bias)


@lru_cache(maxsize=16)
def rotary_tables(
    length: int, width: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (length, width), both halves equal (arXiv 2104.09864 eq. 34)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.arange(0, width, 2, device=device, dtype=wide) / width
    angles = torch.outer(torch.arange(length, device=device, dtype=wide), theta**-steps)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding over the whole last axis of (batch, heads, length, width)."""
    cos, sin = rotary_tables(x.shape[-2], x.shape[-1], theta, x.device, x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@lru_cache(maxsize=16)
def causal_window(length: int, window: int, device: torch.device) -> Tensor:
    """Boolean mask (length, length): each token sees itself and ``window - 1`` before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


@lru_cache(maxsize=16)
def alibi_bias(heads: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive bias (1, heads, length, length) with the causal mask in it (arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    position = torch.arange(length, device=device)
    distance = position[None, :] - position[:, None]
    bias = torch.tensor(slopes, device=device)[:, None, None] * distance
    return bias.masked_fill(distance > 0, float("-inf"))[None].to(dtype)


def window_of(spec: ModelSpec, index: int) -> int | None:
    """Attention window of layer ``index``, None where it sees the whole sequence.

    Full layers close a group of windowed ones (Gemma 2 and 3); ModelSpec counts windowed layers.
    """
    if spec.window is None or spec.window_layers == 0:
        return None
    full = spec.layers - spec.window_layers
    if full == 0:
        return spec.window
    every = spec.layers // full
    is_full = (index + 1) % every == 0 and (index + 1) // every <= full
    return None if is_full else spec.window


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values.

    Input and output are (batch, length, hidden). Head counts follow the projections' widths, so
    that a tensor-parallel rank may hold part of the heads.
    """

    def __init__(self, spec: ModelSpec, details: Details, window: int | None) -> None:
        super().__init__()
        self.spec, self.details, self.window = spec, details, window
        self.head_dim, self.scale = spec.head_dim, spec.head_dim**-0.5
        self.q = nn.Linear(spec.hidden, spec.q_width, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.hidden, spec.kv_width, bias=spec.qkv_bias)
        self.v = nn.Linear(spec.hidden, spec.kv_width, bias=spec.qkv_bias)
        self.out = nn.Linear(spec.q_width, spec.hidden, bias=spec.attention_out_bias)
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = build_norm(spec, details, spec.head_dim if per_head else spec.q_width)
            self.k_norm = build_norm(spec, details, spec.head_dim if per_head else spec.kv_width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.spec.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.position == "rope":
            q, k = self._rotate(q), self._rotate(k)
        y = attend(q, k, v, self.spec, self.window, self.scale)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        width = int(self.head_dim * self.details.rope_fraction)
        if width == self.head_dim:
            return rotate(x, self.details.rope_theta)
        turned = rotate(x[..., :width], self.details.rope_theta)
        return torch.cat((turned, x[..., width:]), dim=-1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads * width) to (batch, heads, length, width)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: ModelSpec, window: int | None, scale: float
) -> Tensor:
    """Scaled dot-product attention over (batch, heads, length, width) tensors."""
    length = q.shape[-2]
    mask: Tensor | None = None
    if spec.position == "alibi":
        mask = alibi_bias(q.shape[1], length, q.device, q.dtype)
    elif spec.causal and window is not None and window < length:
        mask = causal_window(length, window, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=spec.causal and mask is None,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434 equations 9 to 19)."""

    def __init__(self, spec: ModelSpec, details: Details) -> None:
        super().__init__()
        mla = spec.mla
        assert mla is not None
        self.spec, self.mla, self.details = spec, mla, details
        self.scale = mla.qk_head_dim**-0.5
        if mla.q_lora_rank is None:
            self.q = nn.Linear(spec.hidden, spec.q_width, bias=False)
        else:
            self.q_down = nn.Linear(spec.hidden, mla.q_lora_rank, bias=False)
            self.q_norm = build_norm(spec, details, mla.q_lora_rank)
            self.q = nn.Linear(mla.q_lora_rank, spec.q_width, bias=False)
        rope = mla.qk_rope_head_dim
        self.kv_down = nn.Linear(spec.hidden, mla.kv_lora_rank + rope, bias=False)
        self.kv_norm = build_norm(spec, details, mla.kv_lora_rank)
        up = spec.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_up = nn.Linear(mla.kv_lora_rank, up, bias=False)
        self.out = nn.Linear(spec.heads * mla.v_head_dim, spec.hidden, bias=spec.attention_out_bias)

    def forward(self, x: Tensor) -> Tensor:
        mla, heads = self.mla, self.spec.heads
        latent = self.q_norm(self.q_down(x)) if mla.q_lora_rank else x
        q = split_heads(self.q(latent), heads)
        q_plain, q_rope = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        down, k_rope = self.kv_down(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv = split_heads(self.kv_up(self.kv_norm(down)), heads)
        k_plain, v = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        q_rope = rotate(q_rope, self.details.rope_theta)
        k_rope = rotate(k_rope[:, None], self.details.rope_theta).expand_as(q_rope)
        q, k = torch.cat((q_plain, q_rope), -1), torch.cat((k_plain, k_rope), -1)
        y = attend(q, k, v, self.spec, None, self.scale)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def activate(x: Tensor, spec: ModelSpec, details: Details) -> Tensor:
    """The activation of the (gated half of the) MLP."""
    if spec.activation == "swiglu":
        return F.silu(x)
    if spec.activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if details.gelu_tanh else "none")


class Mlp(nn.Module):
    """Two matrices, or three where the activation is gated (arXiv 2002.05202)."""

    def __init__(self, spec: ModelSpec, details: Details, width: int, *, bias: bool) -> None:
        super().__init__()
        self.spec, self.details = spec, details
        if spec.gated:
            self.gate = nn.Linear(spec.hidden, width, bias=bias)
        self.up = nn.Linear(spec.hidden, width, bias=bias)
        self.down = nn.Linear(width, spec.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.gated:
            inner = activate(self.gate(x), self.spec, self.details) * self.up(x)
        else:
            inner = activate(self.up(x), self.spec, self.details)
        out: Tensor = self.down(inner)
        return out
