"""Validated ``cluster`` -> node groups and fabric, from the hardware database or described."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import hardware_db
from hardware_db.schema import FabricSpec, GpuSpec, LinkSpec, NodeSpec
from simulator.errors import UserError
from simulator.spec.cluster import Cluster, NodeGroup
from simulator.spec.fields import MAX_NAME
from simulator.spec.inputs import ClusterInput, FabricInput, GroupInput
from simulator.spec.problems import Collector
from simulator.spec.yaml_source import FieldPath
from simulator.units import gbps_to_bytes_per_s

#: Fields of a described node that also override a named one.
NODE_OVERRIDES = (
    "intra_node",
    "nics",
    "nic_bytes_per_s",
    "host_power_w",
    "host_memory_bytes",
    "dispatch_scale",
    "year",
)


def resolve_cluster(data: Any, report: Collector) -> Cluster | None:
    """``cluster``: node groups from the hardware database or described, and the fabric."""
    entry = report.validate(ClusterInput, data, ("cluster",))
    if entry is None:
        _check_names(data, report)
        return None
    before = len(report.problems)
    fabric = None
    if entry.fabric is not None:
        fabric = _fabric(entry.fabric, report)
    groups = []
    names: dict[str, int] = {}
    for index, group in enumerate(entry.groups):
        made = _group(group, fabric, ("cluster", "groups", index), names, report)
        if made is not None:
            groups.append(made)
    if len(report.problems) > before:
        return None
    cluster = Cluster(tuple(groups), fabric)
    if fabric is None and cluster.n_nodes > 1:
        fabric = _default_fabric(cluster, report)
        if fabric is None:
            return None
        cluster = Cluster(tuple(groups), fabric)
    _check_nics(cluster, report)
    return cluster if len(report.problems) == before else None


def _check_names(data: Any, report: Collector) -> None:
    """Look names up even where other fields are wrong, so that one pass reports everything."""
    finders = {"node": hardware_db.node, "gpu": hardware_db.gpu, "intra_node": hardware_db.link}
    groups = data.get("groups") if isinstance(data, dict) else None
    for index, group in enumerate(groups[:1000] if isinstance(groups, list) else ()):
        for key, find in finders.items():
            name = group.get(key) if isinstance(group, dict) else None
            if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
                report.attempt(("cluster", "groups", index, key), partial(find, name))
    fabric = data.get("fabric") if isinstance(data, dict) else None
    if isinstance(fabric, str) and 0 < len(fabric) <= MAX_NAME:
        _fabric(fabric, report)


def _fabric(entry: Any, report: Collector) -> FabricSpec | None:
    path: FieldPath = ("cluster", "fabric")
    if isinstance(entry, str):
        return report.attempt(path, lambda: hardware_db.parse_fabric(entry))
    assert isinstance(entry, FabricInput)
    given = {
        key: getattr(entry, key)
        for key in entry.model_fields_set
        if key not in ("base", "nic_gbps") and (getattr(entry, key) is not None)
    }
    nic_gbps = getattr(entry, "nic_gbps", None)
    if nic_gbps is not None:
        if "nic_bytes_per_s" in given:
            report.error(path, "nic_gbps and nic_bytes_per_s are both given", "keep one of them")
            return None
        given["nic_bytes_per_s"] = gbps_to_bytes_per_s(nic_gbps)
    if given.get("oversubscription", 1.0) < 1.0:
        report.error(
            (*path, "oversubscription"),
            f"{given['oversubscription']:g} is below 1",
            "1 is non-blocking; 2 has half the uplinks",
        )
        return None
    base_name = getattr(entry, "base", None)
    if base_name is not None:
        base = report.attempt((*path, "base"), lambda: hardware_db.parse_fabric(base_name))
        return None if base is None else replace(base, **{"aliases": (), **given})
    if "nic_bytes_per_s" not in given:
        report.error(path, "the NIC rate is missing", "add nic_gbps: 400, or base: a known fabric")
        return None
    return _described_fabric(given, path, report)


def _described_fabric(given: dict[str, Any], path: FieldPath, report: Collector) -> FabricSpec:
    filled: dict[str, Any] = {
        "name": f"{given['nic_bytes_per_s'] * 8 / 1e9:g}-gbps",
        "kind": "ethernet",
        "nics_per_node": None,
        "latency_s": 20e-6,
        "rails": False,
        "oversubscription": 1.0,
        "nodes_per_leaf": 1_000_000,
        "rdma": False,
        "aliases": (),
    }
    for key, value in filled.items():
        if key not in given and key not in ("name", "aliases", "nics_per_node"):
            report.default((*path, key), value)
    filled.update(given)
    filled.setdefault("title", filled["name"])
    return FabricSpec(**filled)


def _default_fabric(cluster: Cluster, report: Collector) -> FabricSpec | None:
    """The slowest of the nodes' own fabrics, where every node has one."""
    path: FieldPath = ("cluster", "fabric")
    names = [group.node.fabric for group in cluster.groups]
    if any(name is None for name in names):
        report.error(
            path,
            f"is missing: {cluster.n_nodes} nodes need a network between them",
            "add fabric: ndr-infiniband, or another name from `gpumix gpus --fabrics`",
        )
        return None
    fabrics = [hardware_db.fabric(name) for name in dict.fromkeys(names) if name is not None]
    slowest = min(fabrics, key=lambda f: f.nic_bytes_per_s)
    why = "the nodes' own" if len(fabrics) == 1 else "the slowest of the nodes' own"
    report.default(path, slowest.name, why)
    return slowest


def _check_nics(cluster: Cluster, report: Collector) -> None:
    if cluster.fabric is None or cluster.fabric.nics_per_node is not None:
        return
    for index, group in enumerate(cluster.groups):
        if group.node.nics < 1:
            report.error(
                ("cluster", "groups", index, "nics"),
                f"node {group.node.name} has no NIC for fabric {cluster.fabric.name}",
                "add nics: 1",
            )


def _group(
    entry: GroupInput,
    fabric: FabricSpec | None,
    path: FieldPath,
    names: dict[str, int],
    report: Collector,
) -> NodeGroup | None:
    stated = [key for key in ("node", "gpu", "gpus") if getattr(entry, key) is not None]
    if len(stated) != 1:
        got = " and ".join(stated) if stated else "none of them"
        report.error(path, f"one of node, gpu and gpus is needed, got {got}")
        return None
    if entry.nic_gbps is not None:
        if entry.nic_bytes_per_s is not None:
            report.error(path, "nic_gbps and nic_bytes_per_s are both given", "keep one of them")
            return None
        entry = entry.model_copy(
            update={"nic_bytes_per_s": gbps_to_bytes_per_s(entry.nic_gbps), "nic_gbps": None}
        )
    link = entry.intra_node
    if link is not None:
        found = report.attempt((*path, "intra_node"), lambda: hardware_db.link(link))
        if found is None:
            return None
        entry = entry.model_copy(update={"intra_node": found.name})
    node = (
        _named_node(entry, path, report)
        if entry.node is not None
        else _described_node(entry, fabric, path, report)
    )
    if node is None:
        return None
    if "count" not in entry.model_fields_set:
        report.default((*path, "count"), 1)
    name = _unique(entry.name or node.name, names)
    kinds = {kind: hardware_db.gpu(kind) for kind in set(node.gpus)}
    gpus = tuple(kinds[slot] for slot in node.gpus)
    return NodeGroup(name, node, gpus, entry.count, entry.zone or "")


def _unique(name: str, taken: dict[str, int]) -> str:
    """``name``, numbered where it is taken; ``taken`` maps each name to its uses."""
    candidate = name
    while candidate in taken:
        taken[name] += 1
        candidate = f"{name}#{taken[name]}"
    taken[candidate] = 1
    return candidate


def _named_node(entry: GroupInput, path: FieldPath, report: Collector) -> NodeSpec | None:
    name = entry.node or ""
    node = report.attempt((*path, "node"), lambda: hardware_db.node(name))
    if node is None:
        return None
    slots = entry.gpus_per_node
    if slots is not None and slots > node.n_gpus:
        report.error(
            (*path, "gpus_per_node"),
            f"{slots} GPUs, but {node.name} has {node.n_gpus}",
            f"at most {node.n_gpus}, or raise count",
        )
        return None
    changes = {
        key: getattr(entry, key) for key in NODE_OVERRIDES if getattr(entry, key) is not None
    }
    return replace(node, gpus=node.gpus[:slots], **changes)


def _described_node(
    entry: GroupInput, fabric: FabricSpec | None, path: FieldPath, report: Collector
) -> NodeSpec | None:
    gpus = _slots(entry, path, report)
    if gpus is None:
        return None
    has_fabric = fabric is not None and fabric.nic_bytes_per_s > 0
    defaults: dict[str, Any] = {
        "intra_node": _default_link(gpus).name,
        "nics": (fabric.nics_per_node or 1) if fabric is not None and has_fabric else 0,
        "nic_bytes_per_s": fabric.nic_bytes_per_s if fabric is not None and has_fabric else 0.0,
        "host_power_w": 150.0 + 75.0 * len(gpus),
        "host_memory_bytes": 64_000_000_000 * len(gpus),
        "dispatch_scale": 1.0,
        "year": max(gpu.release_year for gpu in gpus),
    }
    filled = {}
    for key, value in defaults.items():
        given = getattr(entry, key)
        filled[key] = value if given is None else given
        if given is None and key != "year":
            report.default((*path, key), value)
    kinds = dict.fromkeys(gpu.name for gpu in gpus)
    counts = [(sum(g.name == kind for g in gpus), kind) for kind in kinds]
    name = "+".join(f"{n}x-{kind}" for n, kind in counts)
    title = " + ".join(f"{n} x {kind}" for n, kind in counts)
    return NodeSpec(
        name=name,
        title=title,
        aliases=(),
        gpus=tuple(gpu.name for gpu in gpus),
        fabric=None,
        **filled,
    )


def _slots(entry: GroupInput, path: FieldPath, report: Collector) -> list[GpuSpec] | None:
    """The GPU of every slot of a described node."""
    if entry.gpus is not None:
        if entry.gpus_per_node not in (None, len(entry.gpus)):
            report.error(
                (*path, "gpus_per_node"),
                f"{entry.gpus_per_node}, but gpus lists {len(entry.gpus)}",
                "leave it out",
            )
            return None
        known: dict[str, GpuSpec | None] = {}
        for i, name in enumerate(entry.gpus):
            if name not in known:
                known[name] = report.attempt((*path, "gpus", i), partial(hardware_db.gpu, name))
        slots = [known[name] for name in entry.gpus]
        return None if None in slots else [gpu for gpu in slots if gpu is not None]
    name = entry.gpu or ""
    gpu = report.attempt((*path, "gpu"), lambda: hardware_db.gpu(name))
    if gpu is None:
        return None
    count = entry.gpus_per_node
    if count is None:
        count = 8
        report.default((*path, "gpus_per_node"), count)
    return [gpu] * count


def _default_link(gpus: list[GpuSpec]) -> LinkSpec:
    """NVSwitch or NVLink at the GPUs' own rate where all are SXM and equal, else PCIe."""
    links = [hardware_db.link(name) for name in hardware_db.links()]
    first = gpus[0]
    if len({gpu.name for gpu in gpus}) == 1 and first.form == "sxm" and first.nvlink_bytes_per_s:
        near = [link for link in links if link.kind in ("nvswitch", "nvlink", "nvlink-mesh")]
        return min(near, key=lambda k: (abs(k.bytes_per_s - first.nvlink_bytes_per_s), k.name))
    rate = min(gpu.pcie_bytes_per_s for gpu in gpus)
    pcie = [link for link in links if link.kind == "pcie"]
    if not pcie:
        raise UserError("the hardware database has no PCIe link")
    return min(pcie, key=lambda link: (abs(link.bytes_per_s - rate), link.name))
