"""GPUMix: what a training plan does on a (mixed) GPU cluster.

``from simulator import ModelSpec, Cluster, Plan, Workload, estimate, simulate, search``. Names are
imported when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.api import estimate, load_scenario, search, simulate
    from simulator.spec.cluster import Cluster, NodeGroup
    from simulator.spec.model import ModelSpec
    from simulator.spec.plan import Assignment, Plan, Recompute, Sharding
    from simulator.spec.scenario import Scenario
    from simulator.spec.workload import Workload

_WHERE = {
    "Assignment": "simulator.spec.plan",
    "Cluster": "simulator.spec.cluster",
    "ModelSpec": "simulator.spec.model",
    "NodeGroup": "simulator.spec.cluster",
    "Plan": "simulator.spec.plan",
    "Recompute": "simulator.spec.plan",
    "Scenario": "simulator.spec.scenario",
    "Sharding": "simulator.spec.plan",
    "Workload": "simulator.spec.workload",
    "estimate": "simulator.api",
    "load_scenario": "simulator.api",
    "search": "simulator.api",
    "simulate": "simulator.api",
}

__all__ = [
    "Assignment",
    "Cluster",
    "ModelSpec",
    "NodeGroup",
    "Plan",
    "Recompute",
    "Scenario",
    "Sharding",
    "Workload",
    "estimate",
    "load_scenario",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'simulator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
