"""A transformer built from a ModelSpec, in units: embedding, layers, head.

The runtimes wrap units: one unit's parameters are gathered, used and released together. A tied
table belongs to the embedding; the head is handed it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real_runner.initial import initial_values
from real_runner.layers import Attention, Details, LatentAttention, Mlp, build_norm, window_of
from real_runner.moe import MoeMlp
from simulator.errors import Problem, UserError
from simulator.spec.model import ModelSpec


def check_expressible(spec: ModelSpec) -> None:
    """Raises UserError naming every feature of the model that the runner doesn't have."""
    missing = {
        "vision": spec.vision is not None,
        "causal: false (encoders)": not spec.causal and spec.vision is None,
        "token_types": spec.token_types > 0,
        "pooler": spec.pooler and spec.vision is None,
        "mlm_head": spec.mlm_head,
        "rmsnorm with a bias": spec.norm == "rmsnorm" and spec.norm_bias,
        "mla with biases": spec.mla is not None and spec.qkv_bias,
    }
    faults = [name for name, present in missing.items() if present]
    if faults:
        text = f"the runner can't build {spec.name}: it doesn't express {', '.join(faults)}"
        raise UserError(Problem("model", text, "run a decoder (GPT, Llama, Mixtral, ..)"))


def is_moe_layer(spec: ModelSpec, index: int) -> bool:
    """Whether layer ``index`` has experts in the MLP's place."""
    moe = spec.moe
    if moe is None or index < moe.dense_layers:
        return False
    return (index - moe.dense_layers) % moe.every == moe.every - 1


class Embedding(nn.Module):
    """Token ids (batch, length) to the residual stream (batch, length, hidden)."""

    def __init__(self, spec: ModelSpec, details: Details) -> None:
        super().__init__()
        self.spec = spec
        width = spec.embedding_width or spec.hidden
        self.token = nn.Embedding(spec.vocab, width)
        if width != spec.hidden:
            self.project = nn.Linear(width, spec.hidden, bias=False)
        if spec.position == "learned":
            self.position = nn.Embedding(spec.max_positions, spec.hidden)
        if spec.embedding_norm:
            self.norm = build_norm(spec, details)

    @property
    def reads_weights_in_backward(self) -> bool:
        """Whether the backward pass needs the parameters' values (look-ups don't)."""
        return self.spec.embedding_norm or self.spec.embedding_width is not None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token(tokens)
        if self.spec.embedding_width is not None:
            x = self.project(x)
        if self.spec.position == "learned":
            x = x + self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        if self.spec.embedding_norm:
            x = self.norm(x)
        return F.dropout(x, self.spec.dropout, self.training) if self.spec.dropout else x


class Layer(nn.Module):
    """One transformer layer on the residual stream (batch, length, hidden)."""

    def __init__(self, spec: ModelSpec, details: Details, index: int) -> None:
        super().__init__()
        self.spec = spec
        norms = spec.norms_per_layer
        self.attention: nn.Module
        if spec.mla is not None:
            self.attention = LatentAttention(spec, details)
        else:
            self.attention = Attention(spec, details, window_of(spec, index))
        self.mlp: nn.Module
        if is_moe_layer(spec, index):
            self.mlp = MoeMlp(spec, details)
        else:
            self.mlp = Mlp(spec, details, spec.ffn, bias=spec.mlp_bias)
        if norms >= 1:
            self.attention_norm = build_norm(spec, details)
        if norms >= 2:
            self.mlp_norm = build_norm(spec, details)
        if norms >= 4:
            self.attention_out_norm = build_norm(spec, details)
            self.mlp_out_norm = build_norm(spec, details)

    def forward(self, x: Tensor) -> Tensor:
        norms = self.spec.norms_per_layer
        normal = self.attention_norm(x) if norms >= 1 else x
        attended = self.attention(normal)
        if self.spec.parallel_block:
            other = self.mlp_norm(x) if norms >= 2 else normal
            return x + self._drop(attended) + self._drop(self.mlp(other))
        x = x + self._drop(self.attention_out_norm(attended) if norms >= 4 else attended)
        mixed = self.mlp(self.mlp_norm(x) if norms >= 2 else x)
        return x + self._drop(self.mlp_out_norm(mixed) if norms >= 4 else mixed)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.spec.dropout, self.training) if self.spec.dropout else x


class Head(nn.Module):
    """Residual stream to logits (batch, length, vocab)."""

    def __init__(self, spec: ModelSpec, details: Details) -> None:
        super().__init__()
        self.spec = spec
        width = spec.embedding_width or spec.hidden
        if spec.final_norm:
            self.norm = build_norm(spec, details)
        if width != spec.hidden:
            self.project = nn.Linear(spec.hidden, width, bias=False)
        if not spec.tied_embeddings:
            self.output = nn.Linear(width, spec.vocab, bias=spec.head_bias)
        elif spec.head_bias:
            self.bias = nn.Parameter(torch.empty(spec.vocab))

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """``table`` is the embedding's where the two are tied."""
        if self.spec.final_norm:
            x = self.norm(x)
        if self.spec.embedding_width is not None:
            x = self.project(x)
        if table is None:
            logits: Tensor = self.output(x)
            return logits
        return F.linear(x, table, self.bias if self.spec.head_bias else None)


class Transformer(nn.Module):
    """Decoder-only transformer; built on the meta device until :func:`materialise` is called."""

    def __init__(self, spec: ModelSpec, details: Details | None = None) -> None:
        """Raises UserError where the spec has a feature that the runner doesn't have."""
        super().__init__()
        check_expressible(spec)
        self.spec, self.details = spec, details or Details()
        with torch.device("meta"):
            self.embedding = Embedding(spec, self.details)
            self.layers = nn.ModuleList(Layer(spec, self.details, i) for i in range(spec.layers))
            self.head = Head(spec, self.details)

    def units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the units in forward order; names prefix the parameters' names."""
        layers = [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]
        return [("embedding", self.embedding), *layers, ("head", self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        table = self.embedding.token.weight if self.spec.tied_embeddings else None
        logits: Tensor = self.head(x, table)
        return logits


def materialise(
    model: Transformer, *, seed: int, device: torch.device | str, dtype: torch.dtype
) -> Transformer:
    """Moves the model to a device with fresh values; returns it. Same seed, same values."""
    model.to_empty(device=device).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = initial_values(
                name,
                parameter.shape,
                (0, parameter.numel()),
                seed=seed,
                std=model.details.initial_std,
                layers=model.spec.layers,
                device=parameter.device,
            )
            parameter.copy_(flat.view_as(parameter))
    return model


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over tokens, at least in fp32; label -100 is not counted."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="sum")
