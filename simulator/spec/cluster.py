"""The GPUs at hand: groups of equal nodes joined by a fabric."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hardware_db.schema import FabricSpec, GpuSpec, NodeSpec


@dataclass(frozen=True)
class NodeGroup:
    """``count`` equal nodes. ``gpus`` holds the GPU of every slot of one node, in slot order."""

    name: str
    node: NodeSpec
    gpus: tuple[GpuSpec, ...]
    count: int
    zone: str = ""

    @property
    def n_gpus(self) -> int:
        """GPUs of the whole group."""
        return self.count * len(self.gpus)


@dataclass(frozen=True)
class Cluster:
    """Node groups and the fabric between their nodes (``None`` only for a single node)."""

    groups: tuple[NodeGroup, ...]
    fabric: FabricSpec | None = None

    @cached_property
    def n_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return sum(group.n_gpus for group in self.groups)

    @property
    def n_nodes(self) -> int:
        """Nodes of the whole cluster."""
        return sum(group.count for group in self.groups)

    @cached_property
    def gpu_types(self) -> tuple[GpuSpec, ...]:
        """Distinct GPU types in the order in which they first appear."""
        seen = {gpu.name: gpu for group in self.groups for gpu in group.gpus}
        return tuple(seen.values())

    @property
    def is_mixed(self) -> bool:
        """Whether more than one GPU type is present."""
        return len(self.gpu_types) > 1

    def counts(self) -> dict[str, int]:
        """GPUs by type name."""
        totals: dict[str, int] = {}
        for group in self.groups:
            for gpu in group.gpus:
                totals[gpu.name] = totals.get(gpu.name, 0) + group.count
        return totals
