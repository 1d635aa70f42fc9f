"""Facts about GPUs, links, nodes and fabrics, each with its source.

``gpu("h100")`` returns a frozen description, ``provenance("h100")`` says where its numbers come
from. Data lives in ``gpus/``, ``links/``, ``nodes/`` and ``fabrics/``, one YAML file per entry.
"""

from __future__ import annotations

from hardware_db.checks import plausibility
from hardware_db.fabric_text import parse_fabric
from hardware_db.loader import (
    fabric,
    fabrics,
    forget_directories,
    gpu,
    gpus,
    link,
    links,
    load_file,
    node,
    nodes,
    provenance,
    register_directory,
)
from hardware_db.schema import FabricSpec, Fact, GpuSpec, LinkSpec, NodeSpec

__all__ = [
    "FabricSpec",
    "Fact",
    "GpuSpec",
    "LinkSpec",
    "NodeSpec",
    "fabric",
    "fabrics",
    "forget_directories",
    "gpu",
    "gpus",
    "link",
    "links",
    "load_file",
    "node",
    "nodes",
    "parse_fabric",
    "plausibility",
    "provenance",
    "register_directory",
]
