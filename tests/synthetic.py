"""Layouts and times made up for tests of the task graph and its evaluators: no model, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from simulator.cost.times import ChunkTimes, ClassTimes, PassTimes, UnitTimes
from simulator.spec.layout import Layout, Pipeline, RankClass
from simulator.spec.plan import Plan, Sharding
from simulator.spec.stack import Overlap


def rank_class(
    index: int, stage: int, pp: int, *, micro_batches: int, chunks: tuple[int, ...] = (1,)
) -> RankClass:
    """A class of one replica; only what the graph reads is meaningful."""
    return RankClass(
        index=index,
        gpu=cast(Any, None),
        group=0,
        stage=stage,
        pp=pp,
        tp=1,
        cp=1,
        chunks=chunks,
        moe_chunks=(0,) * len(chunks),
        micro_batch=1,
        micro_batches=micro_batches,
        state_share=1.0,
        replicas=1,
    )


def layout(
    micro_batches: Sequence[int] | int,
    *,
    pp: int = 1,
    vpp: int = 1,
    schedule: str = "1f1b",
    overlap: Overlap | None = None,
    pipelines: int = 1,
    counts: Sequence[int] | None = None,
    layers: tuple[int, ...] | None = None,
    sharding: Sharding = Sharding.NONE,
) -> Layout:
    """``pipelines`` pipelines of ``pp`` classes each, class ``q * pp + i`` being stage ``i``."""
    per_pipeline = (
        [micro_batches] * pipelines if isinstance(micro_batches, int) else list(micro_batches)
    )
    classes = tuple(
        rank_class(q * pp + i, i, pp, micro_batches=m, chunks=layers or (1,) * vpp)
        for q, m in enumerate(per_pipeline)
        for i in range(pp)
    )
    return Layout(
        model=cast(Any, None),
        workload=cast(Any, None),
        cluster=cast(Any, None),
        plan=Plan(pp=pp, vpp=vpp, schedule=cast(Any, schedule), sharding=sharding),
        stack=cast(Any, SimpleNamespace(overlap=overlap or Overlap())),
        classes=classes,
        pipelines=tuple(
            Pipeline(tuple(range(q * pp, (q + 1) * pp)), 1 if counts is None else counts[q])
            for q in range(len(per_pipeline))
        ),
    )


def chunk(
    f: float, b: float, w: float = 0.0, *, reduce: float = 0.0, gather: float = 0.0
) -> ChunkTimes:
    """A chunk whose passes only compute: forward, input gradient, weight gradient (s)."""
    return ChunkTimes(
        PassTimes(compute=f), PassTimes(compute=b), PassTimes(compute=w), reduce, gather
    )


def class_times(
    chunks: Sequence[ChunkTimes],
    *,
    units: Sequence[UnitTimes] = (),
    send: float = 0.0,
    send_back: float | None = None,
    optimizer: float = 0.0,
    overhead: float = 0.0,
) -> ClassTimes:
    """Times of one class; gradients take as long to send as activations unless said."""
    back = send if send_back is None else send_back
    return ClassTimes(tuple(chunks), tuple(units), send, back, optimizer, overhead)


def unit(
    name: str, repeat: int, f: float, b: float, gather: float, reduce: float, regather: float = -1.0
) -> UnitTimes:
    """A fully sharded unit that gathers as long in the backward pass unless said."""
    again = gather if regather < 0.0 else regather
    return UnitTimes(
        name, repeat, PassTimes(compute=f), PassTimes(compute=b), gather, again, reduce
    )
