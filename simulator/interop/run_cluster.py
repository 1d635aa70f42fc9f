"""The cluster of a measured row: node groups, links and the GPUs of each pipeline stage."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import hardware_db
from hardware_db.schema import FabricSpec, GpuSpec, NodeSpec
from simulator.errors import UserError
from simulator.interop.run_rows import RunRow
from simulator.spec.cluster import Cluster, NodeGroup
from simulator.spec.plan import Assignment

Note = Callable[[str], None]

#: GPUs of a server where a row doesn't say.
_USUAL_NODE = 8
_REPLICA = re.compile(r"(.+?)(?:x(\d+))?", re.DOTALL)


def row_cluster(row: RunRow, note: Note) -> Cluster:
    """The GPUs of a row: one node group for each GPU type named, or one mixed server.

    Raises:
        UserError: unknown GPU, link or fabric, or counts that don't divide.
    """
    names = [n.strip() for n in row.text("gpu").split(";") if n.strip()]
    if not names:
        raise UserError(row.problem("gpu", "missing", "a name that `gpumix gpus` lists"))
    listed = [hardware_db.gpu(name) for name in names]
    n_gpus = row.integer("n_gpus")
    given = row.number("gpus_per_node")
    per_node = min(row.integer("gpus_per_node", min(n_gpus, _USUAL_NODE)), n_gpus)
    if given is None and n_gpus > 1:
        note(f"gpus_per_node not given: {per_node}")
    counts = _counts(row, listed, n_gpus, note)
    if len(counts) > 1 and n_gpus <= per_node:
        everything = tuple(gpu for gpu, count in counts for _ in range(count))
        node = replace(_row_node(row, counts[0][0], n_gpus, note),
                       gpus=tuple(g.name for g in everything))  # fmt: skip
        return Cluster((NodeGroup("node", node, everything, 1),), None)
    groups = tuple(_group(row, gpu, count, per_node, len(counts) > 1, note)
                   for gpu, count in counts)  # fmt: skip
    is_spread = sum(group.count for group in groups) > 1
    return Cluster(groups, _fabric(row, counts[0][0], note) if is_spread else None)


def _counts(
    row: RunRow, listed: list[GpuSpec], n_gpus: int, note: Note
) -> list[tuple[GpuSpec, int]]:
    """How many GPUs there are of each type, types in the row's order."""
    types = list({gpu.name: gpu for gpu in listed}.values())
    if len(types) == 1:
        return [(types[0], n_gpus)]
    stages = _stages(row)
    if stages:
        used: Counter[str] = Counter()
        for replicas in stages:
            for gpu, width in replicas:
                used[gpu.name] += width
        foreign = sorted(used.keys() - {gpu.name for gpu in types})
        if foreign:
            raise UserError(row.problem("stage_gpus", f"{foreign[0]} isn't among the row's GPUs"))
        if sum(used.values()) != n_gpus:
            text = f"names {sum(used.values())} GPUs, n_gpus is {n_gpus}"
            raise UserError(row.problem("stage_gpus", text))
        return [(hardware_db.gpu(name), count) for name, count in used.items()]
    if len(listed) == n_gpus:
        each = Counter(gpu.name for gpu in listed)
        return [(gpu, each[gpu.name]) for gpu in types]
    if n_gpus % len(types):
        text = f"{len(types)} types for {n_gpus} GPUs can't be placed"
        raise UserError(row.problem("gpu", text, "name each GPU, or give stage_gpus"))
    note(f"GPUs of each type not given: {n_gpus // len(types)}")
    return [(gpu, n_gpus // len(types)) for gpu in types]


def _group(
    row: RunRow, gpu: GpuSpec, count: int, per_node: int, is_mixed: bool, note: Note
) -> NodeGroup:
    """Servers of one GPU type; in a mixed cluster a smaller one where the counts need it."""
    if is_mixed:
        per_node = math.gcd(count, per_node)
    if count % per_node:
        raise UserError(row.problem("n_gpus", f"{count} isn't a multiple of {per_node} per node"))
    node = _row_node(row, gpu, per_node, note)
    name = gpu.name if is_mixed else "nodes"
    return NodeGroup(name, node, (gpu,) * per_node, count // per_node)


def _fabric(row: RunRow, gpu: GpuSpec, note: Note) -> FabricSpec:
    words = row.text("inter_node")
    if words:
        return hardware_db.parse_fabric(words)
    recent = gpu.architecture in ("hopper", "blackwell")
    fabric = hardware_db.fabric("ndr-infiniband" if recent else "hdr-infiniband")
    note(f"fabric not given: {fabric.title}")
    return fabric


def _row_node(row: RunRow, gpu: GpuSpec, per_node: int, note: Note) -> NodeSpec:
    """A server with the row's link, otherwise like the database's node with that GPU."""
    same = [
        hardware_db.node(n) for n in hardware_db.nodes()
        if set(hardware_db.node(n).gpus) == {gpu.name}
    ]  # fmt: skip
    words = row.text("intra_node")
    if words:
        link = hardware_db.link(words).name
    elif same:
        link = same[0].intra_node
        note(f"link inside the node not given: {link} as in {same[0].name}")
    else:
        hint = f"no node with {gpu.name} is known"
        raise UserError(row.problem("intra_node", "missing", hint))
    base = next((n for n in same if n.intra_node == link), same[0] if same else None)
    base = base or hardware_db.node("dgx-a100-80gb")
    return replace(base, name=f"{gpu.name}-x{per_node}", gpus=(gpu.name,) * per_node,
                   intra_node=link)  # fmt: skip


def _stages(row: RunRow) -> list[list[tuple[GpuSpec, int]]]:
    """``stage_gpus``: for every stage its replicas as (GPU, tensor-parallel width)."""
    text = row.text("stage_gpus")
    if not text:
        return []
    found = []
    for part in text.split("|"):
        replicas = []
        for replica in part.split(";"):
            match = _REPLICA.fullmatch(replica.strip())
            if match is None:
                hint = "stages split by |, replicas by ;, each GPUxTP"
                raise UserError(row.problem("stage_gpus", f"{replica!r} names no GPU", hint))
            replicas.append((hardware_db.gpu(match[1]), int(match[2] or 1)))
        found.append(replicas)
    return found


def stage_assignment(row: RunRow, cluster: Cluster, pp: int) -> tuple[Assignment, ...]:
    """Entries of a mixed pipeline from ``stage_gpus``; equal replicas of a stage are one entry.

    Raises:
        UserError: a GPU that isn't among the row's, or another number of stages than ``pp``.
    """
    stages = _stages(row)
    if stages and len(stages) != pp:
        raise UserError(row.problem("stage_gpus", f"names {len(stages)} stages, pp is {pp}"))
    entries = []
    for stage, replicas in enumerate(stages):
        for (gpu, width), count in Counter(replicas).items():
            group = next((i for i, g in enumerate(cluster.groups) if gpu in g.gpus), None)
            if group is None:
                raise UserError(row.problem("stage_gpus", f"{gpu.name} isn't among the GPUs"))
            entries.append(Assignment(group=group, gpu=gpu.name, stage=stage, replicas=count,
                                      tp=width))  # fmt: skip
    return tuple(entries)
