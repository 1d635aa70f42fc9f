"""FLOPs of a model: what MFU and HFU are taken against.

One multiply-add is 2 FLOPs. ``full`` counts the whole score matrix of attention, the convention of
arXiv 2104.04473 (appendix) and of most published MFU figures; ``causal`` counts the half that a
causal model needs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from simulator.cost.batch import Array
from simulator.spec.model import ModelSpec
from simulator.spec.parameters import matmul_parameters

Convention = Literal["full", "causal"]


def attention_flops_per_token(
    model: ModelSpec, sequence_length: Array | float, convention: Convention = "full"
) -> Array:
    """Forward FLOPs per token of QK^T and PV over all layers: 2 s (d_qk + d_v) heads layers.

    Windowed layers see at most ``window`` tokens.
    """
    seq = np.asarray(sequence_length, float)
    width = 2.0 * model.heads * (model.q_width / model.heads + model.v_head_dim)
    half = 0.5 if convention == "causal" and model.causal else 1.0
    full_layers = model.layers - model.window_layers
    spans = full_layers * seq
    if model.window:
        spans = spans + model.window_layers * np.minimum(seq, float(model.window))
    return np.asarray(width * half * spans)


def forward_flops_per_token(
    model: ModelSpec, sequence_length: Array | float, convention: Convention = "full"
) -> Array:
    """Forward FLOPs per token: 2 per active matrix parameter, plus attention.

    The input embedding is a look-up and costs none; the output head counts.
    """
    return np.asarray(
        2.0 * matmul_parameters(model)
        + attention_flops_per_token(model, sequence_length, convention)
    )


def model_flops_per_token(
    model: ModelSpec, sequence_length: Array | float, convention: Convention = "full"
) -> Array:
    """Training FLOPs per token without recomputation: forward plus twice that backward."""
    return 3.0 * forward_flops_per_token(model, sequence_length, convention)
