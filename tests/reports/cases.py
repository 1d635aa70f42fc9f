"""Layouts as the reports describe them, in few words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import hardware_db
from simulator.analysis.predict import evaluate, layout_risk
from simulator.cost.memory import MemoryBreakdown, layout_breakdown
from simulator.cost.pricing import price_layout
from simulator.spec.cluster import Cluster, NodeGroup
from simulator.spec.layout import Layout, build_layout
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Plan
from simulator.spec.presets import preset
from simulator.spec.stack import load_stack
from simulator.spec.workload import Workload
from simulator.units import GIB

MIB = 2**20


def cluster(
    gpu: str, n_gpus: int, *, per_node: int = 8, link: str | None = None, fabric: str | None = None
) -> Cluster:
    """Equal nodes of one GPU type; links as usual for it."""
    spec = hardware_db.gpu(gpu)
    per_node = min(per_node, n_gpus)
    base = hardware_db.node("dgx-a100-80gb")
    words = link or ("pcie3" if spec.nvlink_bytes_per_s == 0 else base.intra_node)
    node = replace(base, name=f"{gpu}-x{per_node}", gpus=(spec.name,) * per_node,
                   intra_node=hardware_db.link(words).name)  # fmt: skip
    nodes = n_gpus // per_node
    network = hardware_db.fabric(fabric or "hdr-infiniband") if nodes > 1 else None
    return Cluster((NodeGroup("nodes", node, (spec,) * per_node, nodes),), network)


def run(
    model: ModelSpec | str,
    gpus: Cluster,
    stack: str,
    seq: int,
    *,
    micro_batches: int = 1,
    **plan: Any,
) -> Layout:
    """A layout; what the plan leaves open is one micro-batch of one sequence and plain dp."""
    spec = preset(model) if isinstance(model, str) else model
    degrees = plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)
    asked = Plan(**{"dp": gpus.n_gpus // degrees, **plan})
    batch = asked.dp * asked.micro_batch * micro_batches
    return build_layout(spec, Workload(seq, batch), gpus, asked, load_stack(stack))


def gpt(layers: int, hidden: int, heads: int, *, vocab: int = 51200, **changes: Any) -> ModelSpec:
    """A GPT-2 style model."""
    base = ModelSpec(
        name="gpt", layers=layers, hidden=hidden, ffn=4 * hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=vocab, tied_embeddings=True, norm="layernorm",
        activation="gelu", position="learned", max_positions=2048, qkv_bias=True,
        attention_out_bias=True, mlp_bias=True, norm_bias=True,
    )  # fmt: skip
    return replace(base, **changes)


def memory(layout: Layout) -> MemoryBreakdown:
    """Memory of every rank class."""
    return layout_breakdown(layout)


def allocated_gib(layout: Layout) -> float:
    """torch's peak of the fullest rank."""
    return float(memory(layout).peak_allocated_bytes.max()) / GIB


def device_gib(layout: Layout) -> float:
    """Device memory in use on the fullest rank."""
    return float(memory(layout).device_bytes.max()) / GIB


def risk(layout: Layout) -> float:
    """Probability that the fullest rank runs out of memory."""
    return float(layout_risk(layout).oom_risk.max())


def step_s(layout: Layout) -> float:
    """Step time in closed form."""
    return evaluate(layout, price_layout(layout), "closed form").step_time_s


def tokens_per_s_per_gpu(layout: Layout) -> float:
    """Tokens per second on each GPU."""
    return layout.workload.tokens_per_step / step_s(layout) / layout.n_gpus


def state_bytes(layout: Layout) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Parameters, gradients and optimiser state of every rank class."""
    found = memory(layout)
    return found.parameters + found.gradients + found.optimizer
