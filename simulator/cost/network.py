"""What links a group of GPUs can use: link parameters, networks, and where a group lies on them.

Rates are per direction. A :class:`Network` joins the datasheet rates of the hardware database with
the fitted fractions and latencies of ``hardware_db/calibration/collectives.yaml``;
:mod:`simulator.cost.collectives` turns a network, a :class:`Placement` and bytes into seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

import hardware_db
from hardware_db.schema import FabricSpec, GpuSpec, LinkSpec, NodeSpec
from simulator.errors import Problem, UserError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Link kinds on which every GPU shares the host's PCIe root with the others.
_SHARED_KINDS = ("pcie", "host")


@dataclass(frozen=True)
class LinkParams:
    """One level of the network: inside a node, or between nodes as one GPU sees it.

    Attributes:
        kind: link or fabric kind, for messages (``nvswitch``, ``pcie``, ``infiniband``, ...).
        bytes_per_s: datasheet peak per direction that one GPU can use.
        efficiency: fraction of the peak that a collective reaches (every rank sends and receives).
        p2p_efficiency: fraction of the peak that one sender to one receiver reaches.
        latency_s: one more step of a collective (alpha of the alpha-beta model).
        base_s: fixed cost of one collective: kernel start and rendezvous.
        p2p_base_s: fixed cost of one message, first hop included.
        half_size_bytes: bytes that a rank sends at which a collective runs at half its final rate.
        switch: every GPU reaches every other at the full rate.
        nvls: the switch reduces in the network (NVLink SHARP).
        nvls_efficiency: fraction of the peak that an in-switch all-reduce reaches; 0 without.
    """

    kind: str
    bytes_per_s: float
    efficiency: float
    p2p_efficiency: float
    latency_s: float
    base_s: float
    p2p_base_s: float
    half_size_bytes: float
    switch: bool = False
    nvls: bool = False
    nvls_efficiency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "efficiency", "p2p_efficiency"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{self.kind} link: {name} must be positive")
        for name in ("latency_s", "base_s", "p2p_base_s", "half_size_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{self.kind} link: {name} must not be negative")

    @property
    def collective_bytes_per_s(self) -> float:
        """Rate per direction that a long ring collective reaches."""
        return self.bytes_per_s * self.efficiency

    @property
    def p2p_bytes_per_s(self) -> float:
        """Rate that one long message between two GPUs reaches."""
        return self.bytes_per_s * self.p2p_efficiency


@dataclass(frozen=True)
class Network:
    """What one group of equal nodes offers to its GPUs.

    Attributes:
        intra: links of three or more GPUs of a node.
        pair: link of two GPUs of a node: the bridge where GPUs are bridged in pairs, one
            neighbour's links where NVLink is direct, the same as ``intra`` behind a switch.
        inter: link of one GPU to another node when no other GPU of its node sends;
            ``None`` without a fabric.
        gpus_per_node: GPUs that share ``node_bytes_per_s``.
        node_bytes_per_s: all NICs of a node together, per direction; 0 without a fabric.
        oversubscription: leaf downlinks over uplinks, at least 1.
        nodes_per_leaf: nodes that reach each other below the oversubscribed uplinks.
    """

    intra: LinkParams
    pair: LinkParams
    inter: LinkParams | None
    gpus_per_node: int
    node_bytes_per_s: float = 0.0
    oversubscription: float = 1.0
    nodes_per_leaf: int = 1

    @property
    def share_bytes_per_s(self) -> float:
        """Datasheet rate of one GPU between nodes when all GPUs of its node send."""
        if self.inter is None:
            return 0.0
        return min(self.inter.bytes_per_s, self.node_bytes_per_s / self.gpus_per_node)


@dataclass(frozen=True)
class Placement:
    """How the ranks of a group lie on the nodes; the arrays broadcast over plans.

    Attributes:
        size: ranks of the group.
        ranks_per_node: members inside one node (of the node that holds fewest).
        groups_per_node: groups of the same kind that use the NICs of a node at the same time.
    """

    size: IntArray
    ranks_per_node: IntArray
    groups_per_node: IntArray

    @property
    def nodes(self) -> IntArray:
        """Nodes that the group touches."""
        return -(-self.size // self.ranks_per_node)

    @property
    def crosses_nodes(self) -> npt.NDArray[np.bool_]:
        """Whether the group needs the fabric."""
        return self.size > self.ranks_per_node


def placement(
    *,
    degree: npt.ArrayLike,
    stride: npt.ArrayLike,
    gpus_per_node: npt.ArrayLike,
    world_size: npt.ArrayLike | None = None,
) -> Placement:
    """Place groups whose members are ``stride`` ranks apart on nodes filled in rank order.

    Rank order is tp fastest, then cp, dp, pp (Megatron-core ``parallel_state``), so a tensor group
    has stride 1, a data group stride tp x cp, a pipeline group stride tp x cp x dp. All groups of
    the kind are taken to communicate at the same time. The result describes the group that is
    worst off: where groups do not fit nodes evenly, the node with fewest members counts.

    Args:
        degree: ranks per group.
        stride: distance of neighbours in the group, in ranks.
        gpus_per_node: GPUs per node.
        world_size: all ranks; when given, a group that would fit into a node but straddles two
            because nodes are not a multiple of it (degree 6 on nodes of 8) is seen as crossing.
            Without it, such a group counts as inside.

    Raises:
        ValueError: a degree, stride or node size below 1.
    """
    size, step, node = np.broadcast_arrays(
        np.asarray(degree, np.int64),
        np.asarray(stride, np.int64),
        np.asarray(gpus_per_node, np.int64),
    )
    if size.size and min(size.min(), step.min(), node.min()) < 1:
        raise ValueError("degree, stride and gpus_per_node must be at least 1")
    span = size * step
    inside = span <= node
    if world_size is not None:
        inside = inside & ((node % span == 0) | (np.asarray(world_size) <= node))
    members = np.maximum(np.gcd(span, node) // step, 1)
    members = np.minimum(np.where(inside, size, members), size)
    return Placement(size, members, np.maximum(node // members, 1))


def network(
    node: NodeSpec,
    fabric: FabricSpec | None,
    gpu: GpuSpec,
    *,
    link: LinkSpec | None = None,
    calibration: dict[str, Any] | None = None,
) -> Network:
    """Network of a group of ``node`` servers on ``fabric``, datasheet rates times fitted fractions.

    Args:
        node: the server; its ``intra_node`` names the link unless ``link`` is given.
        fabric: the network between nodes; ``None`` for a single node.
        gpu: GPU type whose links count (the rate inside a node is capped by what it owns).
        link: link inside the node, default ``hardware_db.link(node.intra_node)``.
        calibration: parsed ``collectives.yaml``, default the one in the database.

    Raises:
        UserError: the calibration has no entry for the link or fabric kind.
    """
    table = calibration if calibration is not None else link_calibration()
    link = link if link is not None else hardware_db.link(node.intra_node)
    direct = link.kind.startswith(("nv", "xgmi"))
    own = gpu.nvlink_bytes_per_s if direct else gpu.pcie_bytes_per_s
    cap = own if own > 0 else link.bytes_per_s
    intra, pair = _inside(table, link, cap)
    if fabric is None or fabric.nic_bytes_per_s <= 0:
        return Network(intra, pair, None, node.n_gpus)
    nics = fabric.nics_per_node if fabric.nics_per_node is not None else max(node.nics, 1)
    total = fabric.nic_bytes_per_s * nics
    # A GPU alone drives one NIC, or the NICs that belong to it where a node has more than GPUs.
    alone = max(fabric.nic_bytes_per_s, total / node.n_gpus)
    key = fabric.name if fabric.name in table["fabrics"] else fabric_kind(fabric)
    inter = link_params(table["fabrics"], key, alone, stated_latency_s=fabric.latency_s)
    return Network(
        intra=intra,
        pair=pair,
        inter=inter,
        gpus_per_node=node.n_gpus,
        node_bytes_per_s=total,
        oversubscription=max(fabric.oversubscription, 1.0),
        nodes_per_leaf=max(fabric.nodes_per_leaf, 1),
    )


def _inside(
    table: dict[str, Any], link: LinkSpec, cap_bytes_per_s: float
) -> tuple[LinkParams, LinkParams]:
    """Parameters of many GPUs and of two GPUs of a node."""
    links = table["links"]
    key = link.name if link.name in links else link.kind
    rate = min(link.bytes_per_s, cap_bytes_per_s)
    pair_rate = min(link.pair_bytes_per_s, rate)
    whole = link_params(links, key, rate, switch=link.switch, nvls=link.nvls)
    pair = replace(whole, bytes_per_s=pair_rate, nvls=False)
    if link.kind == "nvlink-pairs":
        # Three or more GPUs: each pair owns a bridge, the ring crosses PCIe between pairs.
        return link_params(links, "pcie-between-pairs", link.crossing_bytes_per_s), pair
    if link.kind in _SHARED_KINDS:
        own = f"{link.name}-two"
        pair = link_params(links, own if own in links else f"{link.kind}-two", pair_rate)
    return whole, pair


def link_params(
    entries: dict[str, Any],
    key: str,
    bytes_per_s: float,
    *,
    stated_latency_s: float = 0.0,
    switch: bool = False,
    nvls: bool = False,
) -> LinkParams:
    """Link of rate ``bytes_per_s`` with the fractions and latencies of ``entries[key]``.

    ``stated_latency_s`` is what the hardware database says; only what exceeds the usual value of
    the kind (the entry's ``stated_latency_s``) adds to the fitted latencies, so a fabric between
    sites stays slow and an ordinary one keeps its measured steps.

    Raises:
        UserError: no such entry.
    """
    if key not in entries:
        known = ", ".join(sorted(entries))
        raise UserError(
            Problem("collectives.yaml", f"no entry for link {key!r}", f"known: {known}")
        )
    entry = entries[key]
    extra_s = max(0.0, stated_latency_s - float(entry.get("stated_latency_s", stated_latency_s)))
    return LinkParams(
        kind=key,
        bytes_per_s=float(bytes_per_s),
        efficiency=float(entry["efficiency"]),
        p2p_efficiency=float(entry["p2p_efficiency"]),
        latency_s=float(entry["latency_s"]) + extra_s,
        base_s=float(entry["base_s"]),
        p2p_base_s=float(entry["p2p_base_s"]) + extra_s,
        half_size_bytes=float(entry["half_size_s"]) * float(bytes_per_s),
        switch=switch,
        nvls=nvls and float(entry.get("nvls_efficiency", 0.0)) > 0,
        nvls_efficiency=float(entry.get("nvls_efficiency", 0.0)),
    )


def fabric_kind(fabric: FabricSpec) -> str:
    """Entry of the calibration for the kind of ``fabric``.

    RDMA over Ethernet counts as RoCE; InfiniBand and RoCE NICs that cannot read GPU memory are
    ``staged`` through the host.
    """
    if fabric.kind == "ethernet" and fabric.rdma:
        return "roce"
    if fabric.kind in ("infiniband", "roce") and not fabric.rdma:
        return "staged"
    return fabric.kind


@cache
def link_calibration() -> dict[str, Any]:
    """Contents of ``hardware_db/calibration/collectives.yaml``; treat as read-only."""
    text = (files("hardware_db") / "calibration" / "collectives.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def slowest(networks: Sequence[Network]) -> Network:
    """Network that a group spanning all ``networks`` sees: on every level the slowest member.

    Raises:
        ValueError: no network given.
    """
    if not networks:
        raise ValueError("slowest() needs at least one network")
    inters = [n.inter for n in networks if n.inter is not None]
    return Network(
        intra=_slowest_link([n.intra for n in networks]),
        pair=_slowest_link([n.pair for n in networks]),
        inter=_slowest_link(inters) if len(inters) == len(networks) else None,
        gpus_per_node=min(n.gpus_per_node for n in networks),
        # The rate per GPU counts, not per node: nodes of a mixed cluster differ in size.
        node_bytes_per_s=min(n.node_bytes_per_s / n.gpus_per_node for n in networks)
        * min(n.gpus_per_node for n in networks),
        oversubscription=max(n.oversubscription for n in networks),
        nodes_per_leaf=min(n.nodes_per_leaf for n in networks),
    )


def _slowest_link(links: Sequence[LinkParams]) -> LinkParams:
    """The link with the lowest rate, with the worst latency and no ability that one lacks."""
    ring = min(links, key=lambda link: link.collective_bytes_per_s)
    p2p = min(link.p2p_bytes_per_s for link in links)
    nvls = min(link.bytes_per_s * link.nvls_efficiency for link in links)
    return replace(
        ring,
        p2p_efficiency=p2p / ring.bytes_per_s,
        latency_s=max(link.latency_s for link in links),
        base_s=max(link.base_s for link in links),
        p2p_base_s=max(link.p2p_base_s for link in links),
        half_size_bytes=max(link.half_size_bytes for link in links),
        switch=all(link.switch for link in links),
        nvls=all(link.nvls for link in links),
        nvls_efficiency=nvls / ring.bytes_per_s,
    )


def between_zones(
    inner: Network, bytes_per_s: float, latency_s: float, *, node_bytes_per_s: float | None = None
) -> Network:
    """``inner`` with its fabric replaced by a link between zones or sites (TCP).

    Args:
        inner: network of one zone.
        bytes_per_s: rate of the zone link that one GPU can use alone.
        latency_s: one way, between zones.
        node_bytes_per_s: rate of the zone link for a whole node, default ``bytes_per_s``.
    """
    link = link_params(link_calibration()["fabrics"], "ethernet", bytes_per_s)
    link = replace(
        link,
        latency_s=max(link.latency_s, latency_s),
        p2p_base_s=link.p2p_base_s + latency_s,
    )
    total = bytes_per_s if node_bytes_per_s is None else node_bytes_per_s
    return replace(inner, inter=link, node_bytes_per_s=total, oversubscription=1.0)
