"""Runs a plan for some steps on synthetic data and measures it, rank by rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from real_runner.batches import micro_batches
from real_runner.launch import RankContext, context_from_env, launch
from real_runner.memory import MemoryMeter
from real_runner.model import Transformer
from real_runner.parallel.flat import DTYPES
from real_runner.parallel.ranks import CommClock, make_ranks
from real_runner.parallel.torch_native import Degrees, NativeTrainer, check_native
from real_runner.parallel.uneven import Options, StepResult, UnevenTrainer
from simulator.errors import Problem, UserError
from simulator.spec.layout import Layout
from simulator.spec.plan import Recompute, Sharding

#: Stacks that the runtimes here are: GPUMix's own, and torch's parts as torchtitan puts them.
STACKS = ("gpumix", "torchtitan")


@dataclass(frozen=True)
class RunSettings:
    """How a plan is run.

    ``device`` is ``cpu``, ``cuda`` or ``auto``. ``slowdown`` and ``memory_bytes`` have one entry
    per rank (emulation of a mixed cluster: see ``emulate.py`` and ``memory.py``), None for none.
    ``timeout_s`` ends a run that hangs.
    """

    steps: int = 10
    warmup: int = 2
    device: str = "auto"
    timeout_s: float = 600.0
    seed: int = 0
    threads: int | None = None
    slowdown: tuple[float, ...] | None = None
    memory_bytes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RankWork:
    """One rank's part of a step: ``micro_batches`` of ``micro_batch`` sequences, from sequence
    ``first`` of the global batch on, and its share of the training state."""

    micro_batch: int
    micro_batches: int
    first: int
    state_share: float


class Trainer(Protocol):
    """What a way of training offers to be measured."""

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> StepResult:
        """One optimiser step on this rank's micro-batches."""

    @property
    def clock(self) -> CommClock | None:
        """Times exposed communication, where the runtime can tell."""


def rank_work(layout: Layout) -> tuple[RankWork, ...]:
    """Work of every rank in rank order: tensor parallel fastest, then data, then pipeline."""
    work: list[RankWork] = []
    stage, first = 0, 0
    for c in layout.classes:
        if c.stage != stage:  # every stage sees the whole batch
            stage, first = c.stage, 0
        for _ in range(c.replicas):
            own = RankWork(c.micro_batch, c.micro_batches, first, c.state_share)
            work += [own] * c.tp
            first += c.micro_batch * c.micro_batches
    return tuple(work)


def is_uneven(layout: Layout) -> bool:
    """Whether GPUMix's runtime runs the plan, and not torch's own."""
    plan = layout.plan
    alone = plan.tp == plan.pp == plan.cp == plan.ep == 1 and plan.sharding == Sharding.ZERO3
    return alone and (layout.stack.name == "gpumix" or bool(plan.assignment))


def check_runnable(layout: Layout) -> None:
    """Raises UserError naming everything in the plan that this runner can't do."""
    plan, uneven = layout.plan, is_uneven(layout)
    faults = []
    if layout.stack.name not in STACKS:
        faults.append(f"stack {layout.stack.name} (the runner has {' and '.join(STACKS)})")
    for name, degree in (("cp", plan.cp), ("ep", plan.ep)):
        if degree != 1:
            faults.append(f"{name} {degree}")
    if plan.assignment and not uneven:
        faults.append("an assignment with tp, pp or sharding other than zero3")
    if uneven and plan.shard_degree is not None and plan.shard_degree != layout.dp:
        faults.append(f"shard_degree {plan.shard_degree} of {layout.dp} ranks")
    if uneven and plan.schedule != "layered" and any(c.micro_batches > 1 for c in layout.classes):
        faults.append(f"schedule {plan.schedule} with several micro-batches (stack gpumix)")
    if plan.precision not in DTYPES or (plan.precision == "fp16" and not uneven):
        faults.append(f"precision {plan.precision}")
    if plan.optimizer != "adamw":
        faults.append(f"optimizer {plan.optimizer}")
    if plan.offload not in (("none", "activations") if uneven else ("none",)):
        faults.append(f"offload {plan.offload}")
    if faults:
        raise UserError(Problem("plan", f"can't be run here: {', '.join(faults)}"))
    if not uneven:
        check_native(layout.model, _degrees(layout), compiled=plan.compile)


def _degrees(layout: Layout) -> Degrees:
    """The plan's degrees for torch's runtimes; every stage's first class stands for it."""
    plan = layout.plan
    stages = [next(c for c in layout.classes if c.stage == s) for s in range(plan.pp)]
    sharded = plan.sharding >= Sharding.ZERO2
    return Degrees(
        dp=layout.dp,
        tp=plan.tp,
        pp=plan.pp,
        chunk_layers=tuple(c.chunks for c in stages),
        micro_batch=stages[0].micro_batch,
        micro_batches=stages[0].micro_batches,
        sequence_length=layout.workload.sequence_length,
        sharding=plan.sharding,
        shard=(plan.shard_degree or layout.dp) if sharded else 1,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        schedule="interleaved" if plan.vpp > 1 else plan.schedule,
    )


def _options(layout: Layout, settings: RunSettings, rank: int) -> Options:
    plan = layout.plan
    limit = layout.model.layers if plan.recompute_layers is None else plan.recompute_layers
    return Options(
        precision=plan.precision,
        # SELECTIVE drops what the attention core keeps; the fused core keeps nothing to drop.
        recompute_layers=limit if plan.recompute == Recompute.FULL else 0,
        offload=plan.offload == "activations",
        prefetch=layout.stack.overlap.fsdp_prefetch,
        seed=settings.seed,
        slowdown=settings.slowdown[rank] if settings.slowdown else 1.0,
        compile="inductor" if plan.compile else None,
    )


def build_trainer(context: RankContext, layout: Layout, settings: RunSettings) -> Trainer:
    """The runtime that the plan asks for, on this rank."""
    model, options = Transformer(layout.model), _options(layout, settings, context.rank)
    if not is_uneven(layout):
        return NativeTrainer(model, _degrees(layout), options, context.device)
    shares = [w.state_share for w in rank_work(layout)]
    return UnevenTrainer(model, make_ranks(shares, context.device), options)


def run_plan(layout: Layout, settings: RunSettings) -> dict[str, Any] | None:
    """Runs a plan on this machine (or, under torchrun, as one of its ranks) and measures it.

    Returns what ``replay`` calls ``measured``: ``step_time_s`` (median over steps of the slowest
    rank), ``peak_allocated_bytes`` (fullest rank), ``tokens_per_s``, ``ranks`` and more; None on
    ranks other than 0 of a torchrun job.

    Raises:
        UserError: the plan can't be run here.
        RunFailure: a rank failed, hung or ran out of memory.
    """
    check_runnable(layout)
    work = rank_work(layout)
    if settings.slowdown is not None and not is_uneven(layout):
        raise UserError("only GPUMix's uneven data parallelism can run with slowed ranks")
    for name in ("slowdown", "memory_bytes"):
        values = getattr(settings, name)
        if values is not None and len(values) != len(work):
            raise UserError(f"{name} has {len(values)} entries for {len(work)} ranks")
    context = context_from_env()
    if context is not None:
        return _run_as_rank(context, layout, settings)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = launch(
        train_rank,
        (layout, settings),
        world=len(work),
        device=device,
        timeout_s=settings.timeout_s,
        threads=settings.threads,
    )
    return summarise(layout, ranks)


def _run_as_rank(
    context: RankContext, layout: Layout, settings: RunSettings
) -> dict[str, Any] | None:
    """This rank's part of a run that another launcher has started."""
    if context.world != layout.n_gpus:
        raise UserError(
            f"the plan needs {layout.n_gpus} ranks, the launcher started {context.world}"
        )
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    dist.init_process_group("nccl" if context.device.type == "cuda" else "gloo")
    try:
        own = train_rank(context, layout, settings)
        everyone: list[Any] | None = [None] * context.world if context.rank == 0 else None
        dist.gather_object(own, everyone)
    finally:
        dist.destroy_process_group()
    return None if everyone is None else summarise(layout, everyone)


def train_rank(context: RankContext, layout: Layout, settings: RunSettings) -> dict[str, Any]:
    """Trains on one rank; times of each measured step, peak memory, losses.

    A CPU run counts live tensor bytes, and holds them under an emulated limit, in its first two
    steps only, which aren't timed; later steps allocate the same.
    """
    cuda = context.device.type == "cuda"
    limit = settings.memory_bytes[context.rank] if settings.memory_bytes else None
    if cuda and limit is not None:
        total = torch.cuda.get_device_properties(context.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), context.device)
    meter = None if cuda else MemoryMeter(context.device, limit)
    context.progress("building the model")
    losses: list[float] = []
    with meter or nullcontext():
        trainer = build_trainer(context, layout, settings)
        state = torch.cuda.memory_allocated(context.device) if cuda else 0
        if meter is not None:
            state = meter.live_bytes
            meter.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(context.device)
        for step in range(2):
            losses.append(_timed_step(context, trainer, layout, settings, step)[0])
    peak = torch.cuda.max_memory_allocated(context.device) if cuda else 0
    if meter is not None:
        peak = meter.peak_bytes
    times, waits = [], []
    for step in range(2, 2 + settings.warmup + settings.steps):
        loss, seconds, wait = _timed_step(context, trainer, layout, settings, step)
        losses.append(loss)
        times.append(seconds)
        waits.append(wait)
    own = rank_work(layout)[context.rank]
    return {
        "rank": context.rank,
        **asdict(own),
        "step_times_s": times[settings.warmup :],
        "step_time_s": median(times[settings.warmup :]),
        "exposed_communication_s": median(waits[settings.warmup :]),
        "state_bytes": state,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(context.device) if cuda else None,
        "memory_limit_bytes": limit,
        "slowdown": settings.slowdown[context.rank] if settings.slowdown else 1.0,
        "device": torch.cuda.get_device_name(context.device) if cuda else "cpu",
        "losses": losses,
    }


def _timed_step(
    context: RankContext, trainer: Trainer, layout: Layout, settings: RunSettings, step: int
) -> tuple[float, float, float]:
    """(loss, seconds, exposed communication in seconds) of one step; data made beforehand."""
    context.progress(f"step {step}")
    work, workload = rank_work(layout)[context.rank], layout.workload
    batches = micro_batches(
        step * workload.global_batch + work.first,
        (work.micro_batch,) * work.micro_batches,
        workload.sequence_length,
        layout.model.vocab,
        context.device,
        seed=settings.seed,
    )
    _synchronise(context.device)
    start = time.perf_counter()
    result = trainer.step(batches)
    _synchronise(context.device)
    seconds = time.perf_counter() - start
    return result.loss, seconds, trainer.clock.read_s() if trainer.clock else 0.0


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(layout: Layout, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document from what the ranks measured; a step takes as long as its slowest rank."""
    steps = [max(times) for times in zip(*(r["step_times_s"] for r in ranks), strict=True)]
    step_time = median(steps)
    tokens = layout.workload.global_batch * layout.workload.sequence_length
    reserved = [r["peak_reserved_bytes"] for r in ranks if r["peak_reserved_bytes"] is not None]
    return {
        "step_time_s": step_time,
        "step_times_s": steps,
        "tokens_per_s": tokens / step_time,
        "peak_allocated_bytes": max(r["peak_allocated_bytes"] for r in ranks),
        "peak_reserved_bytes": max(reserved) if reserved else None,
        "exposed_communication_s": max(r["exposed_communication_s"] for r in ranks),
        "losses": ranks[0]["losses"],
        "device": ranks[0]["device"],
        "world_size": len(ranks),
        "ranks": [{k: v for k, v in r.items() if k != "losses"} for r in ranks],
    }
