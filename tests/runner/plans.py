"""Small layouts for runs on a CPU."""

from __future__ import annotations

from typing import Any

from simulator.spec.layout import Layout, build_layout
from simulator.spec.scenario import scenario_from_mapping

MODEL = {
    "name": "tiny-llama", "layers": 3, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "vocab": 256,
}  # fmt: skip


def layout_of(
    assignment: list[dict[str, Any]],
    *,
    global_batch: int,
    model: dict[str, Any] | None = None,
    sequence_length: int = 32,
    **plan: Any,
) -> Layout:
    """A GPUMix plan with one one-GPU node group per assignment entry."""
    entries = [{"group": i, **entry} for i, entry in enumerate(assignment)]
    node = {"gpu": "l40s", "gpus_per_node": 1, "count": 1, "intra_node": "pcie4"}
    scenario = scenario_from_mapping(
        {
            "model": model or MODEL,
            "workload": {"sequence_length": sequence_length, "global_batch": global_batch},
            "cluster": {"groups": [node] * len(entries), "fabric": "ndr-infiniband"},
            "stack": "gpumix",
            "plan": {
                "sharding": "zero3",
                "schedule": "layered",
                "recompute": "full",
                "precision": "fp32",
                "assignment": entries,
                **plan,
            },
        }
    )
    assert scenario.plan is not None
    return build_layout(
        scenario.model, scenario.workload, scenario.cluster, scenario.plan, scenario.stack
    )


def uniform_layout(
    gpus: int, *, global_batch: int, stack: str = "torchtitan", **plan: Any
) -> Layout:
    """A plan of a standard stack on one node of ``gpus`` GPUs."""
    node = {"gpu": "l40s", "gpus_per_node": gpus, "count": 1, "intra_node": "pcie4"}
    scenario = scenario_from_mapping(
        {
            "model": MODEL,
            "workload": {"sequence_length": 32, "global_batch": global_batch},
            "cluster": {"groups": [node], "fabric": "ndr-infiniband"},
            "stack": stack,
            "plan": {"recompute": "none", "precision": "fp32", **plan},
        }
    )
    assert scenario.plan is not None
    return build_layout(
        scenario.model, scenario.workload, scenario.cluster, scenario.plan, scenario.stack
    )
