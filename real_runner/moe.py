"""Mixture-of-experts MLP: top-k routing, no token dropped (arXiv 2101.03961, 2401.06066)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real_runner.layers import Details, Mlp, activate
from simulator.spec.model import ModelSpec


class Experts(nn.Module):
    """All routed experts of a layer as stacked matrices, (experts, out, in) each."""

    def __init__(self, spec: ModelSpec, details: Details, experts: int, width: int) -> None:
        super().__init__()
        self.spec, self.details, self.experts = spec, details, experts
        hidden = spec.hidden
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        if spec.gated:
            self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        if spec.mlp_bias:
            self.up_bias = nn.Parameter(torch.empty(experts, width))
            self.down_bias = nn.Parameter(torch.empty(experts, hidden))
            if spec.gated:
                self.gate_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """``parts[i]`` (n_i, hidden) through expert ``i``; (sum of n_i, hidden) in that order."""
        weights = {name: p.unbind(0) for name, p in self.named_parameters()}
        outputs = [self._expert(x, i, weights) for i, x in enumerate(parts) if x.shape[0]]
        return torch.cat(outputs)

    def _expert(self, x: Tensor, index: int, weights: dict[str, tuple[Tensor, ...]]) -> Tensor:
        def product(name: str, operand: Tensor) -> Tensor:
            bias = weights[f"{name}_bias"][index] if self.spec.mlp_bias else None
            return F.linear(operand, weights[name][index], bias)

        if self.spec.gated:
            inner = activate(product("gate", x), self.spec, self.details) * product("up", x)
        else:
            inner = activate(product("up", x), self.spec, self.details)
        return product("down", inner)


class MoeMlp(nn.Module):
    """Router, experts of each token, always-on experts.

    Tokens are sorted by expert, so that each expert runs once on all its tokens. A router bias
    steers only the choice of experts and gets no gradient (arXiv 2412.19437 section 2.1.2).
    """

    def __init__(self, spec: ModelSpec, details: Details) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.moe, self.details = moe, details
        self.router = nn.Linear(spec.hidden, moe.experts, bias=False)
        if moe.router_bias:
            self.choice_bias = nn.Parameter(torch.empty(moe.experts))
        self.experts = Experts(spec, details, moe.experts, moe.ffn)
        if moe.shared_width:
            self.shared = Mlp(spec, details, moe.shared_width, bias=False)
        if moe.shared_gate:
            self.shared_gate = nn.Linear(spec.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self._route(flat)
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.moe.top_k
        sizes = torch.bincount(chosen.flatten(), minlength=self.moe.experts).tolist()
        outputs = self.experts(torch.split(flat[rows], sizes))
        weighted = outputs * weights.flatten()[order, None].to(x.dtype)
        mixed = torch.zeros_like(flat).index_add(0, rows, weighted)
        if self.moe.shared_width:
            shared = self.shared(flat)
            if self.moe.shared_gate:
                shared = torch.sigmoid(self.shared_gate(flat)) * shared
            mixed = mixed + shared
        return mixed.view_as(x)

    def _route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and expert indices, (tokens, top_k) each."""
        logits = self.router(flat)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if self.moe.router_bias:
            scores = wide.sigmoid()
            chosen = (scores + self.choice_bias.detach()).topk(self.moe.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        else:
            weights, chosen = wide.softmax(-1).topk(self.moe.top_k, dim=-1)
        if self.details.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.details.routed_scale, chosen
