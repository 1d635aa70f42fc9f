"""How long a collective takes: pure functions over arrays, seconds and bytes.

A collective takes ``base + steps x latency + (V + fill(V)) / R``: a fixed start, the steps that
cannot overlap, the bytes ``V`` that the busiest rank sends, and the filling of the pipeline. Cut
into chunks of the best size, ``V`` bytes over some hops pay a fill that grows as the square root of
``V``; once chunks have reached the largest size that buffers allow, the fill stays. Both together:
``fill = k sqrt(V / (V + k))``, with ``k`` from the message at half rate (``half_size_bytes``).
One message between two ranks takes ``base + V / R``. Of the algorithms that NCCL has for an
operation the fastest counts, as its tuner would choose.

Meaning of ``bytes_`` (always per rank of the group, after any sharding over other groups):
all-reduce and broadcast: the buffer. All-gather: the gathered output. Reduce-scatter: the whole
input. All-to-all: all that a rank sends, the part for itself included. Send/receive: the message.
A group of one rank costs nothing. Step and byte counts of the ring: Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005), sections 4.1 and 4.4; double
binary tree: Sanders, Speck, Träff, "Two-tree algorithms" (2009); latency by level: NCCL's
``src/graph/tuning.cc``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.cost.network import (
    FloatArray,
    IntArray,
    LinkParams,
    Network,
    Placement,
    between_zones,
    network,
    placement,
    slowest,
)
from simulator.errors import Problem, UserError

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "LinkParams",
    "Network",
    "Placement",
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "between_zones",
    "broadcast_s",
    "network",
    "placement",
    "reduce_scatter_s",
    "send_recv_s",
    "slowest",
    "uneven_all_gather_s",
    "uneven_reduce_scatter_s",
]

#: What an all-reduce can use: a flat ring; a tree between nodes with chains inside; reduction in
#: the NVLink switch, joined by a tree between nodes (NCCL's NVLS and NVLSTree).
ALL_REDUCE_ALGORITHMS = ("ring", "tree", "nvls")

# Trees reach a little less of the NICs than rings: two a3-mega nodes (200 GB/s each) gather at
# 0.945 of the rate (ring), and all-reduce at 0.90 of it (tree), nccl-tests at 8 GiB.
_TREE_EFFICIENCY = 0.95

# Positive root of x (x + 1) = 1: V = x k is where the fill k sqrt(V / (V + k)) equals V.
_HALF_SIZE_OVER_FILL = (5**0.5 - 1) / 2

# Peers that grouped sends serve at once (NCCL's p2p work batches); more peers go in rounds.
_CONCURRENT_PEERS = 8


class Transfer(NamedTuple):
    """Seconds that bytes need on a link: on the wire, and to fill the pipeline."""

    wire_s: FloatArray
    fill_s: FloatArray


def all_reduce_s(
    net: Network,
    group: Placement,
    bytes_: npt.ArrayLike,
    *,
    algorithms: Collection[str] = ALL_REDUCE_ALGORITHMS,
) -> FloatArray:
    """Best of ring, double binary tree between nodes, and in-switch reduction (NVLS).

    Args:
        net: links that the group uses.
        group: where the ranks are.
        bytes_: bytes of the buffer, broadcasts with the group.
        algorithms: which of :data:`ALL_REDUCE_ALGORITHMS` may be used besides the ring, which
            always can (``NCCL_ALGO`` restricts them in reality).

    Raises:
        UserError: the group crosses nodes but the network has no fabric.
    """
    buffer = _array(bytes_)
    time = _ring_s(net, group, buffer, passes=2)
    if "tree" in algorithms and net.inter is not None:
        time = np.minimum(time, _tree_s(net, group, buffer))
    if "nvls" in algorithms and net.intra.nvls:
        time = np.minimum(time, _nvls_s(net, group, buffer))
    return _zero_for_one(group, time)


def all_gather_s(net: Network, group: Placement, bytes_: npt.ArrayLike) -> FloatArray:
    """Ring, or binomial (NCCL's PAT) where every rank has a node for itself.

    Arguments and errors as :func:`all_reduce_s`; ``bytes_`` is the gathered output.
    """
    buffer = _array(bytes_)
    time = _ring_s(net, group, buffer, passes=1)
    if net.inter is not None:
        time = np.minimum(time, _pat_s(net, group, buffer))
    return _zero_for_one(group, time)


def reduce_scatter_s(net: Network, group: Placement, bytes_: npt.ArrayLike) -> FloatArray:
    """As :func:`all_gather_s` in reverse; ``bytes_`` is the whole input of a rank."""
    return all_gather_s(net, group, bytes_)


def broadcast_s(net: Network, group: Placement, bytes_: npt.ArrayLike) -> FloatArray:
    """Pipelined ring: the whole buffer passes every rank. Arguments as :func:`all_reduce_s`."""
    time = _around_s(net, group, _array(bytes_)) + _ring_latency_s(net, group, 1)
    return _zero_for_one(group, time)


def all_to_all_s(net: Network, group: Placement, bytes_: npt.ArrayLike) -> FloatArray:
    """Pairwise exchange: the parts for the own node and for other nodes move at the same time.

    Args:
        net: links that the group uses.
        group: where the ranks are.
        bytes_: bytes that one rank sends in total, its own part included.

    Raises:
        UserError: the group crosses nodes but the network has no fabric.
    """
    size, members = group.size, group.ranks_per_node
    total = _array(bytes_)
    near = _intra(net, group, total * (members - 1) / size)
    rounds = 1 + (size - 1) // _CONCURRENT_PEERS
    if not np.any(group.crosses_nodes):
        return _zero_for_one(group, net.intra.base_s + rounds * net.intra.latency_s + sum(near))
    inter = _fabric(net)
    far = _inter(net, group, total * (size - members) / size, _uplink_factor(net, group))
    crossing = inter.base_s + rounds * inter.latency_s + _together_s(near, far)
    inside = net.intra.base_s + rounds * net.intra.latency_s + sum(near)
    return _zero_for_one(group, np.where(group.crosses_nodes, crossing, inside))


def send_recv_s(
    net: Network,
    bytes_: npt.ArrayLike,
    crosses_node: npt.ArrayLike,
    *,
    senders_per_node: npt.ArrayLike | None = None,
    crosses_leaf: npt.ArrayLike = False,
) -> FloatArray:
    """One message between two ranks, for example activations between pipeline stages.

    Args:
        net: links between the two.
        bytes_: bytes of the message.
        crosses_node: whether the ranks are on different nodes.
        senders_per_node: GPUs of a node that send at the same time; default all of them (with
            tensor parallelism every rank of a stage sends).
        crosses_leaf: whether the nodes meet above an oversubscribed uplink.

    Raises:
        UserError: a message crosses nodes but the network has no fabric.
    """
    message = _array(bytes_)
    crosses = np.asarray(crosses_node, bool)
    near = net.pair.p2p_base_s + message / net.pair.p2p_bytes_per_s
    if not crosses.any():
        return _array(np.where(crosses, 0.0, near))
    inter = _fabric(net)
    senders = np.asarray(net.gpus_per_node if senders_per_node is None else senders_per_node)
    share = np.minimum(inter.bytes_per_s, net.node_bytes_per_s / np.maximum(senders, 1))
    share = share / np.where(crosses_leaf, net.oversubscription, 1.0)
    far = inter.p2p_base_s + message / (share * inter.p2p_efficiency)
    return _array(np.where(crosses, far, near))


def uneven_all_gather_s(net: Network, group: Placement, shard_bytes: npt.ArrayLike) -> FloatArray:
    """Gather shards of different sizes: padded ring or grouped broadcasts, whichever is faster.

    The padded ring moves ``n x max(shard)`` bytes; n broadcasts in one group move exactly the
    shards but fill a pipeline each (both: HAP, EuroSys 2024, arXiv 2401.05965). Never cheaper than
    equal shards of the same total, and equal to it when the shards are equal.

    Args:
        net: links that the group uses.
        group: where the ranks are; its arrays broadcast against ``shard_bytes.shape[:-1]``.
        shard_bytes: bytes that each rank contributes, shape ``(..., n)``.

    Raises:
        UserError: the group crosses nodes but the network has no fabric.
        ValueError: the last axis is not the group size.
    """
    shards = _array(shard_bytes)
    if shards.ndim == 0 or np.any(group.size != shards.shape[-1]):
        raise ValueError("shard_bytes needs one column per rank of the group")
    total = shards.sum(axis=-1)
    padded = all_gather_s(net, group, shards.shape[-1] * shards.max(axis=-1))
    columns = Placement(
        np.asarray(group.size)[..., None],
        np.asarray(group.ranks_per_node)[..., None],
        np.asarray(group.groups_per_node)[..., None],
    )
    filled = _around_s(net, columns, shards).sum(axis=-1)
    # The pipelines of one NCCL group follow each other: one start, one more step per broadcast.
    grouped = filled + 2 * _ring_latency_s(net, group, 1)
    even = all_gather_s(net, group, total)
    return _array(np.maximum(even, np.minimum(padded, grouped)))


def uneven_reduce_scatter_s(
    net: Network, group: Placement, shard_bytes: npt.ArrayLike
) -> FloatArray:
    """As :func:`uneven_all_gather_s`, with grouped reductions; each rank keeps its shard."""
    return uneven_all_gather_s(net, group, shard_bytes)


def _ring_s(net: Network, group: Placement, buffer: FloatArray, passes: int) -> FloatArray:
    """Ring: 1 pass for gather or scatter, 2 for all-reduce; (n-1)/n of the buffer per pass."""
    sent = passes * buffer * (group.size - 1) / group.size
    return _around_s(net, group, sent) + _ring_latency_s(net, group, passes)


def _around_s(net: Network, group: Placement, sent: FloatArray) -> FloatArray:
    """Time for ``sent`` bytes around a ring: links and NICs work at once, the slower counts.

    NCCL lays one ring per NIC, so the NIC shares of all members carry the ring together.
    """
    near = _intra(net, group, sent)
    if not np.any(group.crosses_nodes):
        return _array(sum(near))
    ring_uplink = max(1.0, net.oversubscription / net.nodes_per_leaf)
    uplink = np.where(group.nodes > net.nodes_per_leaf, ring_uplink, 1.0)
    far = _inter(net, group, sent / group.ranks_per_node, uplink)
    return _array(np.where(group.crosses_nodes, _together_s(near, far), sum(near)))


def _ring_latency_s(net: Network, group: Placement, passes: int) -> FloatArray:
    """Start and steps of a ring: n-1 steps per pass, of which one per node crosses nodes."""
    nodes = group.nodes
    inside = passes * (group.size - nodes) * net.intra.latency_s
    if not np.any(group.crosses_nodes):
        return _array(net.intra.base_s + inside)
    inter = _fabric(net)
    base = np.where(group.crosses_nodes, inter.base_s, net.intra.base_s)
    return _array(base + inside + passes * (nodes - 1) * inter.latency_s)


def _tree_s(net: Network, group: Placement, buffer: FloatArray) -> FloatArray:
    """Double binary tree between nodes, chain inside; infinite for groups inside a node."""
    inter = _fabric(net)
    nodes, members = group.nodes, group.ranks_per_node
    depth = np.ceil(np.log2(nodes))
    latency = 2 * ((members - 1) * net.intra.latency_s + depth * inter.latency_s)
    far = _inter(net, group, _tree_bytes(buffer, nodes) / members)
    near = _intra(net, group, 2 * buffer * (members - 1) / members)
    time = inter.base_s + latency + _together_s(near, far)
    return _array(np.where(group.crosses_nodes, time, np.inf))


def _tree_bytes(buffer: FloatArray, nodes: IntArray) -> FloatArray:
    """Bytes that a node sends in a double binary tree: of two nodes each sends half up, half down.

    What trees lose against rings is in the bytes.
    """
    return _array(np.where(nodes > 2, 2.0, 1.0) * buffer / _TREE_EFFICIENCY)


def _nvls_s(net: Network, group: Placement, buffer: FloatArray) -> FloatArray:
    """In-switch all-reduce, joined by a tree between nodes; NCCL uses it from three ranks up.

    A GPU delivers its buffer once and multicasts 1/r of the result: (1 + 1/r) buffers per
    direction instead of 2 (r-1)/r.
    """
    members = group.ranks_per_node
    link = net.intra
    rate = link.bytes_per_s * link.nvls_efficiency
    near = _transfer(buffer * (1 + 1 / members), link, rate)
    time = link.base_s + 2 * link.latency_s + sum(near)
    if net.inter is not None:
        nodes = group.nodes
        far = _inter(net, group, _tree_bytes(buffer, nodes) / members)
        steps = 2 * link.latency_s + 2 * np.ceil(np.log2(nodes)) * net.inter.latency_s
        crossing = net.inter.base_s + steps + _together_s(near, far)
        time = np.where(group.crosses_nodes, crossing, time)
    return _array(np.where(members > 2, time, np.inf))


def _pat_s(net: Network, group: Placement, buffer: FloatArray) -> FloatArray:
    """Binomial gather with one rank per node (NCCL 2.23's PAT): log2 steps, ring's bytes."""
    inter = _fabric(net)
    nodes = group.nodes
    far = _inter(net, group, buffer * (nodes - 1) / nodes)
    time = inter.base_s + np.ceil(np.log2(nodes)) * inter.latency_s + sum(far)
    return _array(np.where(group.crosses_nodes & (group.ranks_per_node == 1), time, np.inf))


def _intra(net: Network, group: Placement, sent: FloatArray) -> Transfer:
    """Transfer of ``sent`` bytes per rank inside a node; 0 where a node holds one member.

    Two GPUs have the pair link. More have the whole link, but directly wired GPUs reach no more
    than the links to the partners that are in the group.
    """
    members = group.ranks_per_node
    pair_rate = net.pair.collective_bytes_per_s
    two = _transfer(sent, net.pair, pair_rate)
    rate = np.minimum(net.intra.collective_bytes_per_s, pair_rate * np.maximum(members - 1, 1))
    many = _transfer(sent, net.intra, rate)
    return Transfer(
        *(
            _array(np.where(members > 2, m, np.where(members > 1, t, 0.0)))
            for m, t in zip(many, two, strict=True)
        )
    )


def _inter(
    net: Network, group: Placement, sent: FloatArray, slowdown: FloatArray | float = 1.0
) -> Transfer:
    """Transfer of ``sent`` bytes per rank between nodes, NICs shared with the other groups."""
    inter = _fabric(net)
    share = net.node_bytes_per_s / (group.groups_per_node * group.ranks_per_node)
    rate = np.minimum(share, inter.bytes_per_s) * inter.efficiency / slowdown
    return _transfer(sent, inter, rate)


def _uplink_factor(net: Network, group: Placement) -> FloatArray:
    """Slow-down of all-to-all by oversubscribed uplinks, which carry what leaves the leaf."""
    nodes = group.nodes
    leaf = np.minimum(net.nodes_per_leaf, nodes)
    leaving = (nodes - leaf) / np.maximum(nodes - 1, 1)
    return _array(np.maximum(1.0, net.oversubscription * leaving))


def _transfer(sent: FloatArray, link: LinkParams, rate: FloatArray | float) -> Transfer:
    """``V / R`` and ``fill / R``; ``half_size_bytes`` is where both are equal."""
    largest = max(link.half_size_bytes / _HALF_SIZE_OVER_FILL, 1e-3)
    fill = largest * np.sqrt(sent / (sent + largest))
    return Transfer(_array(sent / rate), _array(fill / rate))


def _together_s(near: Transfer, far: Transfer) -> FloatArray:
    """Two levels in one pipeline: the slower wire, and the longer fill."""
    return _array(np.maximum(near.wire_s, far.wire_s) + np.maximum(near.fill_s, far.fill_s))


def _fabric(net: Network) -> LinkParams:
    """The link between nodes, or the error that there is none."""
    if net.inter is None:
        problem = "a group crosses nodes but the cluster has no network between nodes"
        raise UserError(Problem("cluster.fabric", problem, "name a fabric or keep groups inside"))
    return net.inter


def _zero_for_one(group: Placement, time: FloatArray) -> FloatArray:
    return _array(np.where(group.size > 1, time, 0.0))


def _array(value: npt.ArrayLike) -> FloatArray:
    return np.asarray(value, np.float64)
