"""How the work is laid on the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class Sharding(IntEnum):
    """How much of the training state is sharded over data-parallel ranks (ZeRO's stages).

    Each stage shards all that the stages before it do: optimiser state, gradients, parameters.
    HSDP is ``ZERO3`` with ``Plan.shard_degree`` below the data-parallel degree.
    """

    NONE = 0
    ZERO1 = 1
    ZERO2 = 2
    ZERO3 = 3


class Recompute(IntEnum):
    """Which activations the backward pass computes anew (arXiv 2205.05198).

    SELECTIVE drops what the attention core keeps (in the torchtitan stack: what its selective
    policy drops); FULL keeps only each layer's input.
    """

    NONE = 0
    SELECTIVE = 1
    FULL = 2


Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "layered"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "layered")

AttentionKernel = Literal["auto", "unfused", "flash1", "flash2", "flash3"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = (
    "auto",
    "unfused",
    "flash1",
    "flash2",
    "flash3",
)

Offload = Literal["none", "optimizer", "state", "activations"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "state", "activations")


@dataclass(frozen=True)
class Assignment:
    """Ranks that differ from the rest: one entry is one kind of rank on one node group.

    ``group`` indexes the cluster's node groups and ``gpu`` narrows it to one GPU type of a mixed
    node. ``micro_batch`` sequences times ``count`` micro-batches per step and data-parallel rank.
    ``state_share`` is the fraction of the training state that *one* rank of this entry holds
    (``None``: even). For pipelines, ``stage`` and ``layers`` say what the ranks hold, ``replicas``
    how many data-parallel replicas of the stage they form and ``tp`` their tensor-parallel degree.
    """

    group: int
    gpu: str | None = None
    micro_batch: int | None = None
    count: int | None = None
    state_share: float | None = None
    stage: int | None = None
    layers: int | None = None
    tp: int | None = None
    replicas: int | None = None


@dataclass(frozen=True)
class Plan:
    """Degrees, batch split, schedule, sharding, recompute and precision.

    ``dp * tp * pp * cp`` GPUs are used; ``ep`` divides ``dp * cp`` (experts are spread over
    data-parallel ranks). ``vpp`` is the number of model chunks per pipeline rank.
    ``micro_batch`` is in sequences per data-parallel rank. ``shard_degree`` is the number of ranks
    that one copy of the sharded state is spread over (``None``: all ``dp * cp``).
    ``recompute_layers`` limits FULL recompute to that many layers of each stage (``None``: all).
    ``stage_layers`` gives the layers of each pipeline stage where they are uneven.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    schedule: Schedule = "1f1b"
    sharding: Sharding = Sharding.NONE
    shard_degree: int | None = None
    recompute: Recompute = Recompute.NONE
    recompute_layers: int | None = None
    precision: str = "bf16"
    optimizer: str = "adamw"
    attention: AttentionKernel = "auto"
    compile: bool = False
    offload: Offload = "none"
    stage_layers: tuple[int, ...] | None = None
    assignment: tuple[Assignment, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks that a plan without an assignment uses."""
        return self.dp * self.tp * self.pp * self.cp
