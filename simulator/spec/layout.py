"""A plan laid on a cluster: which kinds of rank there are and what each of them holds.

Ranks that do the same work on the same kind of GPU are one *rank class* with a multiplicity, so a
layout's size follows from the plan's symmetry and not from the number of GPUs. Pure structure: no
cost is computed here.

Rank order is Megatron-LM's: tensor parallel fastest, then context, data, pipeline; each pipeline
stage is a contiguous block of ranks, placed on the cluster's GPUs in the order in which the
scenario lists its groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware_db.schema import GpuSpec
from simulator.errors import UserError
from simulator.spec.cluster import Cluster
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Assignment, Plan, Recompute, Sharding
from simulator.spec.stack import Stack
from simulator.spec.workload import Workload


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same work.

    ``chunks`` are the layers of each model chunk (one entry without interleaving) and
    ``moe_chunks`` how many of them are MoE layers. ``micro_batches`` of ``micro_batch`` sequences
    run per step. ``state_share`` is the fraction of the stage's sharded state on one rank.
    ``replicas`` data-parallel replicas of ``tp * cp`` ranks each belong to the class.
    """

    index: int
    gpu: GpuSpec
    group: int
    stage: int
    pp: int
    tp: int
    cp: int
    chunks: tuple[int, ...]
    moe_chunks: tuple[int, ...]
    micro_batch: int
    micro_batches: int
    state_share: float
    replicas: int

    @property
    def ranks(self) -> int:
        """GPUs of the class."""
        return self.replicas * self.tp * self.cp

    @property
    def layers(self) -> int:
        """Layers that one rank of the class holds."""
        return sum(self.chunks)

    @property
    def moe_layers(self) -> int:
        """MoE layers that one rank of the class holds."""
        return sum(self.moe_chunks)

    @property
    def is_first(self) -> bool:
        """Whether the rank holds the input embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank holds the output head."""
        return self.stage == self.pp - 1


@dataclass(frozen=True)
class Pipeline:
    """``count`` equal pipelines (data-parallel replicas); ``classes[i]`` runs stage ``i``."""

    classes: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Layout:
    """What runs where: the input of the cost model, the memory estimator and the task graph."""

    model: ModelSpec
    workload: Workload
    cluster: Cluster
    plan: Plan
    stack: Stack
    classes: tuple[RankClass, ...]
    pipelines: tuple[Pipeline, ...]

    @property
    def n_gpus(self) -> int:
        """GPUs that the plan uses."""
        return sum(c.ranks for c in self.classes)

    @property
    def dp(self) -> int:
        """Data-parallel replicas over all pipelines."""
        return sum(p.count for p in self.pipelines)


def split_chunks(layers: int, chunks: int, *, first_stage: bool) -> tuple[int, ...]:
    """Layers of each model chunk of one stage.

    A remainder leaves layers out of the first stage's first chunks (beside the embedding) and of
    the other stages' last chunks (beside the head): the balancing that arXiv 2407.21783 section
    3.3.2 describes for 126 layers on 16 stages.
    """
    full = -(-layers // chunks)
    missing = full * chunks - layers
    sizes = [full] * chunks
    for step in range(missing):
        sizes[step % chunks if first_stage else chunks - 1 - step % chunks] -= 1
    return tuple(sizes)


def stage_layer_counts(model: ModelSpec, plan: Plan) -> tuple[int, ...]:
    """Layers of each pipeline stage; UserError where they can't be split."""
    if plan.stage_layers is not None:
        if len(plan.stage_layers) != plan.pp or sum(plan.stage_layers) != model.layers:
            raise UserError(
                f"plan.stage_layers {list(plan.stage_layers)} must name {plan.pp} stages "
                f"and sum to the model's {model.layers} layers"
            )
        return plan.stage_layers
    if model.layers < plan.pp * plan.vpp:
        raise UserError(
            f"{model.layers} layers are fewer than pp * vpp = {plan.pp * plan.vpp} model chunks"
        )
    base, extra = divmod(model.layers, plan.pp)
    # Inner stages take the remainder: the first also embeds, the last also runs the head.
    order = sorted(range(plan.pp), key=lambda i: (i in (0, plan.pp - 1), i))
    counts = [base] * plan.pp
    for stage in order[:extra]:
        counts[stage] += 1
    return tuple(counts)


def layers_by_chunk(
    model: ModelSpec, stage_counts: tuple[int, ...], plan: Plan
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Layers and MoE layers by stage and chunk; chunk c of all stages comes before chunk c+1."""
    chunks = [split_chunks(n, plan.vpp, first_stage=(i == 0)) for i, n in enumerate(stage_counts)]
    moe = [[0] * plan.vpp for _ in chunks]
    index = 0
    for chunk in range(plan.vpp):
        for stage, sizes in enumerate(chunks):
            for _ in range(sizes[chunk]):
                moe[stage][chunk] += _is_moe_layer(model, index)
                index += 1
    return tuple(chunks), tuple(tuple(row) for row in moe)


def _is_moe_layer(model: ModelSpec, index: int) -> int:
    moe = model.moe
    if moe is None or index < moe.dense_layers:
        return 0
    return int((index - moe.dense_layers) % moe.every == moe.every - 1)


def build_layout(
    model: ModelSpec, workload: Workload, cluster: Cluster, plan: Plan, stack: Stack
) -> Layout:
    """Lay a plan on a cluster. Raises UserError where it can't be laid."""
    if plan.assignment and any(a.stage is not None for a in plan.assignment):
        classes, pipelines = _assigned_pipeline(model, workload, cluster, plan)
    elif plan.assignment:
        classes, pipelines = _assigned_data_parallel(model, cluster, plan)
    else:
        classes, pipelines = _uniform(model, workload, cluster, plan)
    layout = Layout(model, workload, cluster, plan, stack, tuple(classes), tuple(pipelines))
    _check(layout)
    return layout


def _check(layout: Layout) -> None:
    if layout.plan.offload == "activations" and layout.plan.recompute != Recompute.FULL:
        raise UserError(
            "plan.offload: activations moves the inputs of layers to the host, which is all that "
            "is kept with plan.recompute full; set it, or choose another offload"
        )
    batch = sum(
        p.count
        * layout.classes[p.classes[0]].micro_batch
        * layout.classes[p.classes[0]].micro_batches
        for p in layout.pipelines
    )
    if batch != layout.workload.global_batch:
        raise UserError(
            f"the plan's micro-batches sum to {batch} sequences per step, "
            f"workload.global_batch is {layout.workload.global_batch}"
        )
    for pipeline in layout.pipelines:
        counts = {layout.classes[i].micro_batches for i in pipeline.classes}
        if len(counts) > 1:
            raise UserError(f"stages of one pipeline run different micro-batch counts: {counts}")


def _slots(cluster: Cluster) -> list[tuple[int, GpuSpec, int]]:
    """Runs of equal GPUs in cluster order: (group, GPU, how many).

    Within a mixed node the GPUs of one type are taken together, so that a class is one run.
    """
    runs: list[tuple[int, GpuSpec, int]] = []
    for index, group in enumerate(cluster.groups):
        per_node: dict[str, int] = {}
        specs = {gpu.name: gpu for gpu in group.gpus}
        for gpu in group.gpus:
            per_node[gpu.name] = per_node.get(gpu.name, 0) + 1
        runs.extend((index, specs[name], n * group.count) for name, n in per_node.items())
    return runs


def _uniform(
    model: ModelSpec, workload: Workload, cluster: Cluster, plan: Plan
) -> tuple[list[RankClass], list[Pipeline]]:
    """Every rank runs the same shapes; GPU types may still differ."""
    if plan.world_size != cluster.n_gpus:
        raise UserError(
            f"dp {plan.dp} * tp {plan.tp} * pp {plan.pp} * cp {plan.cp} = {plan.world_size} ranks, "
            f"the cluster has {cluster.n_gpus} GPUs"
        )
    per_replica = plan.dp * plan.micro_batch
    if workload.global_batch % per_replica:
        raise UserError(
            f"global_batch {workload.global_batch} is not divisible by "
            f"dp {plan.dp} * micro_batch {plan.micro_batch}"
        )
    micro_batches = workload.global_batch // per_replica
    chunks, moe = layers_by_chunk(model, stage_layer_counts(model, plan), plan)
    share = 1.0 / (plan.shard_degree or plan.dp * plan.cp)
    width = plan.tp * plan.cp
    by_stage = _stage_runs(_slots(cluster), plan.dp, width, plan.pp)
    classes: list[RankClass] = []
    rows: list[list[tuple[int, int]]] = []  # per stage: (class, replicas)
    for stage, runs in enumerate(by_stage):
        row = []
        for group, gpu, replicas in runs:
            classes.append(
                RankClass(
                    index=len(classes),
                    gpu=gpu,
                    group=group,
                    stage=stage,
                    pp=plan.pp,
                    tp=plan.tp,
                    cp=plan.cp,
                    chunks=chunks[stage],
                    moe_chunks=moe[stage],
                    micro_batch=plan.micro_batch,
                    micro_batches=micro_batches,
                    state_share=share,
                    replicas=replicas,
                )
            )
            row.append((len(classes) - 1, replicas))
        rows.append(row)
    return classes, _zip_pipelines(rows)


def _stage_runs(
    slots: list[tuple[int, GpuSpec, int]], dp: int, width: int, pp: int
) -> list[list[tuple[int, GpuSpec, int]]]:
    """Replicas of each stage by (group, GPU type), filling stages in cluster order."""
    queue = list(slots)
    stages: list[list[tuple[int, GpuSpec, int]]] = []
    for _ in range(pp):
        need, runs = dp, []
        while need:
            group, gpu, free = queue[0]
            take = min(need, free // width)
            if take == 0:
                raise UserError(
                    f"a model-parallel group of tp * cp = {width} ranks would mix "
                    f"{gpu.name} with another GPU type; use an assignment, or degrees that "
                    "divide each GPU type's count"
                )
            runs.append((group, gpu, take))
            need -= take
            queue[0] = (group, gpu, free - take * width)
            if queue[0][2] == 0:
                queue.pop(0)
        stages.append(runs)
    return stages


def _zip_pipelines(rows: list[list[tuple[int, int]]]) -> list[Pipeline]:
    """Pipelines from per-stage lists of (class, replicas), pairing replicas in order."""
    cursors = [list(map(list, row)) for row in rows]
    pipelines = []
    while all(cursors):
        count = min(row[0][1] for row in cursors)
        pipelines.append(Pipeline(classes=tuple(row[0][0] for row in cursors), count=count))
        for row in cursors:
            row[0][1] -= count
            if row[0][1] == 0:
                row.pop(0)
    if any(cursors):
        raise UserError("every pipeline stage needs the same number of data-parallel replicas")
    return pipelines


def _pool(cluster: Cluster, entry: Assignment, where: str) -> tuple[GpuSpec, int]:
    """GPU type and how many GPUs of it an assignment entry may draw from."""
    if not 0 <= entry.group < len(cluster.groups):
        raise UserError(
            f"{where}.group {entry.group}: the cluster has groups 0 to {len(cluster.groups) - 1}"
        )
    group = cluster.groups[entry.group]
    found = [g for g in group.gpus if entry.gpu is None or g.name == entry.gpu]
    names = sorted({g.name for g in group.gpus})
    if not found or (entry.gpu is None and len(names) > 1):
        raise UserError(f"{where}.gpu must be one of {', '.join(names)} (group {entry.group})")
    return found[0], len(found) * group.count


def _assigned_data_parallel(
    model: ModelSpec, cluster: Cluster, plan: Plan
) -> tuple[list[RankClass], list[Pipeline]]:
    """One class per assignment entry, no pipeline: GPUMix's uneven data parallelism."""
    if plan.pp != 1:
        raise UserError("plan.assignment without stages needs pp 1; give each entry a stage")
    chunks, moe = layers_by_chunk(model, stage_layer_counts(model, plan), plan)
    width = plan.tp * plan.cp
    drawn: list[tuple[Assignment, GpuSpec, int]] = []
    for i, entry in enumerate(plan.assignment):
        where = f"plan.assignment[{i}]"
        gpu, available = _pool(cluster, entry, where)
        if available % width:
            raise UserError(f"{where}: {available} GPUs don't divide by tp * cp = {width}")
        replicas = entry.replicas or available // width
        drawn.append((entry, gpu, replicas))
    dp = sum(replicas for _, _, replicas in drawn)
    shares = _state_shares(drawn, plan, width, dp)
    classes = [
        RankClass(
            index=i,
            gpu=gpu,
            group=entry.group,
            stage=0,
            pp=1,
            tp=plan.tp,
            cp=plan.cp,
            chunks=chunks[0],
            moe_chunks=moe[0],
            micro_batch=plan.micro_batch if entry.micro_batch is None else entry.micro_batch,
            micro_batches=1 if entry.count is None else entry.count,
            state_share=shares[i],
            replicas=replicas,
        )
        for i, (entry, gpu, replicas) in enumerate(drawn)
    ]
    return classes, [Pipeline((c.index,), c.replicas) for c in classes]


def _state_shares(
    drawn: list[tuple[Assignment, GpuSpec, int]], plan: Plan, width: int, dp: int
) -> list[float]:
    """State share of one rank of each entry; entries without one split the rest evenly."""
    ranks = [replicas * plan.cp for _, _, replicas in drawn]
    copies = dp * plan.cp / (plan.shard_degree or dp * plan.cp)
    given = sum(
        e.state_share * n
        for (e, _, _), n in zip(drawn, ranks, strict=True)
        if e.state_share is not None
    )
    open_ranks = sum(n for (e, _, _), n in zip(drawn, ranks, strict=True) if e.state_share is None)
    rest = copies - given
    if (open_ranks == 0 and abs(rest) > 1e-6) or rest < -1e-9:
        raise UserError(
            f"plan.assignment state shares sum to {given:.6g} over the ranks; "
            f"they must sum to {copies:.6g}"
        )
    even = rest / open_ranks if open_ranks else 0.0
    return [even if e.state_share is None else e.state_share for e, _, _ in drawn]


def _assigned_pipeline(
    model: ModelSpec, workload: Workload, cluster: Cluster, plan: Plan
) -> tuple[list[RankClass], list[Pipeline]]:
    """Classes from entries that name their stage: mixed pipelines with uneven layers."""
    stages: dict[int, list[tuple[int, Assignment]]] = {}
    for i, entry in enumerate(plan.assignment):
        stage = 0 if entry.stage is None else entry.stage
        stages.setdefault(stage, []).append((i, entry))
    if sorted(stages) != list(range(len(stages))):
        raise UserError(f"plan.assignment stages must run 0 to {len(stages) - 1} without gaps")
    pp = len(stages)
    default = stage_layer_counts(model, _with_pp(plan, pp))
    counts = []
    for s in range(pp):
        layers = {default[s] if e.layers is None else e.layers for _, e in stages[s]}
        if len(layers) > 1:
            raise UserError(f"plan.assignment gives stage {s} different layer counts: {layers}")
        counts.append(layers.pop())
    if sum(counts) != model.layers:
        raise UserError(f"plan.assignment layers sum to {sum(counts)}, not {model.layers}")
    chunks, moe = layers_by_chunk(model, tuple(counts), plan)
    classes: list[RankClass] = []
    rows: list[list[tuple[int, int]]] = []
    for s in range(pp):
        row = []
        dp = sum(_replicas(cluster, e, plan, i) for i, e in stages[s])
        for i, entry in stages[s]:
            gpu, _ = _pool(cluster, entry, f"plan.assignment[{i}]")
            replicas = _replicas(cluster, entry, plan, i)
            micro_batch = entry.micro_batch or plan.micro_batch
            count = entry.count or workload.global_batch // (dp * micro_batch)
            share = 1.0 / (plan.shard_degree or dp * plan.cp)
            classes.append(
                RankClass(
                    index=len(classes),
                    gpu=gpu,
                    group=entry.group,
                    stage=s,
                    pp=pp,
                    tp=entry.tp or plan.tp,
                    cp=plan.cp,
                    chunks=chunks[s],
                    moe_chunks=moe[s],
                    micro_batch=micro_batch,
                    micro_batches=count,
                    state_share=share if entry.state_share is None else entry.state_share,
                    replicas=replicas,
                )
            )
            row.append((len(classes) - 1, replicas))
        rows.append(row)
    return classes, _zip_pipelines(rows)


def _with_pp(plan: Plan, pp: int) -> Plan:
    from dataclasses import replace

    return replace(plan, pp=pp, stage_layers=plan.stage_layers if plan.pp == pp else None)


def _replicas(cluster: Cluster, entry: Assignment, plan: Plan, index: int) -> int:
    """Data-parallel replicas that an entry forms."""
    if entry.replicas is not None:
        return entry.replicas
    where = f"plan.assignment[{index}]"
    gpu, available = _pool(cluster, entry, where)
    sharing = sum(
        1 for e in plan.assignment if e.group == entry.group and e.gpu in (None, gpu.name)
    )
    width = (entry.tp or plan.tp) * plan.cp
    if available % (width * sharing):
        raise UserError(
            f"{where}: {available} GPUs don't divide by {sharing} entries of "
            f"tp * cp = {width}; say how many replicas each forms"
        )
    return available // (width * sharing)


def sharding_ranks(layout: Layout) -> int:
    """Ranks over which one copy of the sharded training state is spread."""
    plan = layout.plan
    if plan.sharding == Sharding.NONE:
        return 1
    return plan.shard_degree or layout.dp * plan.cp
