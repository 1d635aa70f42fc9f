"""The one kind of place that a homogeneous cluster has, and the ranks of a grid's plans on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from hardware_db.schema import GpuSpec
from simulator.cost.batch import RankBatch
from simulator.cost.calibration import tuned_network, tuning
from simulator.cost.collectives import network
from simulator.cost.compute import attention_kernel
from simulator.cost.kernel_rates import rates
from simulator.cost.operators import LayerContext
from simulator.cost.pricing import Site
from simulator.errors import UserError
from simulator.planner.plan_grid import PlanGrid
from simulator.planner.stages import Held
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan, Recompute
from simulator.spec.resolve_plan import Case
from simulator.spec.stack import PrecisionRecipe

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def single_gpu(cluster: Cluster) -> GpuSpec:
    """The GPU of a cluster that has one type only. Raises UserError otherwise."""
    if len(cluster.gpu_types) != 1:
        names = ", ".join(gpu.name for gpu in cluster.gpu_types)
        raise UserError(f"grids of plans need equal GPUs, the cluster has {names}")
    return cluster.gpu_types[0]


def make_site(case: Case, gpu: GpuSpec) -> Site:
    """Where every rank of a homogeneous cluster runs."""
    group = case.cluster.groups[0]
    tuned = tuning(case.stack.name, gpu)
    net = tuned_network(network(group.node, case.cluster.fabric, gpu), tuned)
    return Site(gpu, rates(gpu), net, net, group.node.dispatch_scale, tuned)


def make_context(
    case: Case, like: Plan, gpu: GpuSpec, recipe: PrecisionRecipe, batch: RankBatch
) -> LayerContext:
    """What layers are priced from, as for a single plan."""
    return LayerContext(
        case.model,
        case.stack.kept,
        recipe,
        batch,
        attention_kernel(gpu, like.attention, case.stack.kept.attention),
        like.compile,
        like.offload == "activations",
        like.offload in ("optimizer", "state"),
    )


def group_batch(case: Case, grid: PlanGrid, stage: int, held: Held) -> RankBatch:
    """Ranks of one stage of each plan of a group (equal pp, vpp), for the cost functions."""

    def real(column: Ints) -> Floats:
        return column.astype(np.float64)

    def same(value: float) -> Floats:
        return np.asarray(float(value))

    pp, vpp = int(grid.pp[0]), int(grid.vpp[0])
    tp, cp, dp = real(grid.tp), real(grid.cp), real(grid.dp)
    degree = np.where(grid.shard_degree > 0, grid.shard_degree, dp * cp)
    full = grid.recompute == Recompute.FULL
    count = case.workload.global_batch // np.maximum(grid.dp * grid.micro_batch, 1)
    return RankBatch(
        micro_batch=real(grid.micro_batch),
        micro_batches=real(np.maximum(count, 1)),
        sequence_length=same(case.workload.sequence_length),
        dense_layers=same(held.dense),
        moe_layers=same(held.moe),
        vpp=same(vpp),
        has_embedding=same(stage == 0),
        has_head=same(stage == pp - 1),
        stage=same(stage),
        pp=same(pp),
        tp=tp,
        cp=cp,
        dp=dp,
        ep=real(grid.ep),
        sequence_parallel=((grid.sequence_parallel > 0) & (grid.tp > 1)).astype(np.float64),
        sharding=np.minimum(grid.sharding, 3).astype(np.float64),
        shard_degree=degree,
        state_share=1.0 / degree,
        recompute=real(grid.recompute),
        recompute_layers=np.where(full, held.dense + held.moe, 0.0),
    )


def joined_batches(batches: Sequence[RankBatch], sizes: Sequence[int]) -> RankBatch:
    """Rows of several batches after each other; ``sizes`` are their lengths."""

    def column(name: str) -> Floats:
        parts = [
            np.broadcast_to(getattr(batch, name), (size,))
            for batch, size in zip(batches, sizes, strict=True)
        ]
        return np.concatenate(parts)

    return RankBatch(**{f.name: column(f.name) for f in fields(RankBatch)})
