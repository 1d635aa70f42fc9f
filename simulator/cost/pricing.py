"""Times of a layout: its rank classes' pieces put together into chunks and sharded units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from hardware_db.schema import GpuSpec
from simulator.cost.batch import Array, batch_of
from simulator.cost.calibration import Tuning, tuned_network, tuning
from simulator.cost.collectives import Network, network, slowest
from simulator.cost.communication import uneven_factor
from simulator.cost.compute import attention_kernel
from simulator.cost.kernel_rates import rates
from simulator.cost.operators import LayerContext
from simulator.cost.pieces import Memo, PieceTimes, RankTimes, Site, price_ranks
from simulator.cost.times import ChunkTimes, ClassTimes, PassTimes, UnitTimes
from simulator.errors import Problem, UserError
from simulator.spec.layout import Layout, RankClass
from simulator.spec.plan import Sharding

__all__ = ["PieceTimes", "RankTimes", "Site", "price_layout", "price_ranks"]


def _site_networks(layout: Layout) -> dict[int, Network]:
    """Network by node group."""
    found = {}
    for index, group in enumerate(layout.cluster.groups):
        fabric = layout.cluster.fabric
        found[index] = slowest([network(group.node, fabric, g) for g in dict.fromkeys(group.gpus)])
    return found


def price_layout(
    layout: Layout,
    tuned: Callable[[GpuSpec], Tuning] | None = None,
    memo: dict[tuple[str, int], Memo] | None = None,
) -> tuple[ClassTimes, ...]:
    """Times of every rank class of a layout, in class order.

    ``tuned`` replaces the shipped calibration (fits and what-if questions use it); ``memo``, kept
    by the caller for one layout, holds what doesn't depend on it.

    Raises:
        UserError: several nodes without a fabric, or a type that a GPU can't multiply.
    """
    if layout.cluster.n_nodes > 1 and layout.cluster.fabric is None:
        problem = "several nodes, but no network between them"
        raise UserError(Problem("cluster.fabric", problem, "name a fabric"))
    networks = _site_networks(layout)
    everywhere = slowest(list({c.group: networks[c.group] for c in layout.classes}.values()))
    recipe = layout.stack.recipe(layout.plan.precision)
    found: dict[int, ClassTimes] = {}
    sites = {(c.gpu.name, c.group) for c in layout.classes}
    for key in sorted(sites):
        members = tuple(c for c in layout.classes if (c.gpu.name, c.group) == key)
        gpu, group = members[0].gpu, layout.cluster.groups[members[0].group]
        tuned_here = tuned(gpu) if tuned else tuning(layout.stack.name, gpu)
        site = Site(
            gpu,
            rates(gpu),
            tuned_network(networks[members[0].group], tuned_here),
            tuned_network(everywhere, tuned_here),
            group.node.dispatch_scale,
            tuned_here,
        )
        ctx = LayerContext(
            layout.model,
            layout.stack.kept,
            recipe,
            batch_of(layout, members),
            attention_kernel(gpu, layout.plan.attention, layout.stack.kept.attention),
            layout.plan.compile,
            layout.plan.offload == "activations",
            layout.plan.offload in ("optimizer", "state"),
        )
        kept = None if memo is None else memo.setdefault(key, {})
        priced = price_ranks(layout.stack, ctx, site, layout.plan.optimizer, kept)
        for row, rank_class in enumerate(members):
            found[rank_class.index] = _class_times(layout, rank_class, priced, row, site)
    return tuple(found[c.index] for c in layout.classes)


def _at(times: PassTimes, row: int) -> PassTimes:
    """One row of a batch of pass times as floats."""
    values = {f.name: np.asarray(getattr(times, f.name)) for f in fields(times)}
    return PassTimes(**{k: float(v[row] if v.ndim else v) for k, v in values.items()})


def _scalar(values: Array, row: int) -> float:
    array = np.asarray(values)
    return float(array[row] if array.ndim else array)


def _piece(piece: PieceTimes, row: int) -> PieceTimes:
    return PieceTimes(
        _at(piece.forward, row), _at(piece.backward_input, row), _at(piece.backward_weight, row)
    )


def _class_times(
    layout: Layout, c: RankClass, priced: RankTimes, row: int, site: Site
) -> ClassTimes:
    framework, tuned = layout.stack.framework, site.tuning
    per_batch, per_step = tuned.micro_batch_overhead_s, tuned.step_overhead_s
    dense = _piece(priced.dense, row)
    moe = _piece(priced.moe, row) if priced.moe else dense
    ends = (_piece(priced.embedding, row), _piece(priced.head, row))
    extra = framework.micro_batch_overhead_s if per_batch is None else per_batch
    chunks = tuple(
        _chunk(layout, c, i, dense, moe, ends, priced, row, extra) for i in range(len(c.chunks))
    )
    units: tuple[UnitTimes, ...] = ()
    if layout.plan.sharding == Sharding.ZERO3:
        units = _units(layout, c, dense, moe, ends, priced, row, site.data_network, extra)
    send = _scalar(priced.send, row)
    return ClassTimes(
        chunks=chunks,
        units=units,
        send_forward=send,
        send_backward=send,
        optimizer=_scalar(priced.optimizer, row),
        step_overhead=framework.step_overhead_s if per_step is None else per_step,
    )


def _chunk(
    layout: Layout,
    c: RankClass,
    index: int,
    dense: PieceTimes,
    moe: PieceTimes,
    ends: tuple[PieceTimes, PieceTimes],
    priced: RankTimes,
    row: int,
    overhead: float,
) -> ChunkTimes:
    n_moe = c.moe_chunks[index]
    n_dense = c.chunks[index] - n_moe
    first = float(c.is_first and index == 0)
    last = float(c.is_last and index == len(c.chunks) - 1)
    weights = ((dense, n_dense), (moe, n_moe), (ends[0], first), (ends[1], last))

    def total(name: str) -> PassTimes:
        result = PassTimes()
        for piece, count in weights:
            result = result + getattr(piece, name).scaled(count)
        return result

    def collective(kind: str) -> float:
        names = ("dense", "moe", "embedding", "head")
        return sum(
            count * _scalar(getattr(priced, f"{kind}_{name}"), row)
            for name, (_, count) in zip(names, weights, strict=True)
            if count
        )

    sharding = layout.plan.sharding
    zero3 = sharding == Sharding.ZERO3
    reduce = 0.0 if zero3 else collective("reduce")
    # ZeRO-2 never keeps whole gradients: it reduces after every micro-batch, or, where chunks
    # interleave, after the pp micro-batches that a chunk runs in a row.
    if sharding == Sharding.ZERO2:
        run = c.pp if len(c.chunks) > 1 else 1
        reduce *= -(-c.micro_batches // run)
    gather = collective("gather") if sharding in (Sharding.ZERO1, Sharding.ZERO2) else 0.0
    return ChunkTimes(
        forward=total("forward") + PassTimes(overhead=overhead),
        backward_input=total("backward_input"),
        backward_weight=total("backward_weight"),
        grad_reduce=reduce,
        param_gather=gather,
    )


def _units(
    layout: Layout,
    c: RankClass,
    dense: PieceTimes,
    moe: PieceTimes,
    ends: tuple[PieceTimes, PieceTimes],
    priced: RankTimes,
    row: int,
    everywhere: Network,
    overhead: float,
) -> tuple[UnitTimes, ...]:
    """FSDP units in forward order: embedding, layers, head."""
    n_moe, n_dense = c.moe_layers, c.layers - c.moe_layers
    scale = uneven_factor(layout, everywhere)
    pieces = (
        ("embedding", int(c.is_first), ends[0], "embedding"),
        ("dense layer", n_dense, dense, "dense"),
        ("moe layer", n_moe, moe, "moe"),
        ("head", int(c.is_last), ends[1], "head"),
    )
    units: list[UnitTimes] = []
    for name, repeat, piece, key in pieces:
        if not repeat:
            continue
        gather = scale * _scalar(getattr(priced, f"gather_{key}"), row)
        reduce = scale * _scalar(getattr(priced, f"reduce_{key}"), row)
        backward = piece.backward_input + piece.backward_weight
        # The head is gathered last in forward and first in backward: it stays.
        again = 0.0 if key == "head" else gather
        # Every micro-batch starts once, with the first unit (a layer counts once per repeat).
        forward = piece.forward
        if not units:
            forward = forward + PassTimes(overhead=overhead / repeat)
        units.append(UnitTimes(name, repeat, forward, backward, gather, again, reduce))
    return tuple(units)
