"""Many rank classes as one structure of arrays: what the cost functions broadcast over."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.spec.layout import Layout, RankClass
from simulator.spec.plan import Recompute

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RankBatch:
    """Rows of equal length (or scalars that broadcast); one row is one rank class of one plan.

    Everything is a float array, flags are 0/1 and enums their integer value, so that one
    expression prices a batch of one and a grid of millions alike. ``dense_layers`` and
    ``moe_layers`` are what a rank holds in all its ``vpp`` chunks. ``state_share`` is the fraction
    of the stage's sharded state on the rank. ``dp`` counts data-parallel replicas of the stage.
    """

    micro_batch: Array
    micro_batches: Array
    sequence_length: Array
    dense_layers: Array
    moe_layers: Array
    vpp: Array
    has_embedding: Array
    has_head: Array
    stage: Array
    pp: Array
    tp: Array
    cp: Array
    dp: Array
    ep: Array
    sequence_parallel: Array
    sharding: Array
    shard_degree: Array
    state_share: Array
    recompute: Array
    recompute_layers: Array

    @property
    def layers(self) -> Array:
        """Layers that a rank holds."""
        return self.dense_layers + self.moe_layers

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on one rank inside the tensor-parallel region."""
        return self.micro_batch * self.sequence_length / self.cp

    @property
    def residual_tokens(self) -> Array:
        """Tokens of one micro-batch on one rank where sequence parallelism splits them."""
        return self.tokens / np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @cached_property
    def _rows(self) -> int:
        return max(np.size(getattr(self, f.name)) for f in fields(self))

    def __len__(self) -> int:
        return self._rows

    def take(self, rows: npt.NDArray[np.intp]) -> RankBatch:
        """The named rows; scalars stay scalars."""
        picked = {}
        for f in fields(self):
            column = getattr(self, f.name)
            picked[f.name] = column[rows] if np.ndim(column) else column
        return replace(self, **picked)


def _row(layout: Layout, c: RankClass) -> dict[str, float]:
    plan = layout.plan
    stage_dp = sum(p.count for p in layout.pipelines)
    limit = c.layers if plan.recompute_layers is None else min(plan.recompute_layers, c.layers)
    return {
        "micro_batch": c.micro_batch,
        "micro_batches": c.micro_batches,
        "sequence_length": layout.workload.sequence_length,
        "dense_layers": c.layers - c.moe_layers,
        "moe_layers": c.moe_layers,
        "vpp": len(c.chunks),
        "has_embedding": float(c.is_first),
        "has_head": float(c.is_last),
        "stage": c.stage,
        "pp": c.pp,
        "tp": c.tp,
        "cp": c.cp,
        "dp": stage_dp,
        "ep": plan.ep,
        "sequence_parallel": float(plan.sequence_parallel and c.tp > 1),
        "sharding": float(plan.sharding),
        "shard_degree": plan.shard_degree or stage_dp * c.cp,
        "state_share": c.state_share,
        "recompute": float(plan.recompute),
        "recompute_layers": float(limit if plan.recompute == Recompute.FULL else 0),
    }


def batch_of(layout: Layout, classes: tuple[RankClass, ...] | None = None) -> RankBatch:
    """The rank classes of one layout (all of them, or those given) as rows, in order."""
    rows = [_row(layout, c) for c in (layout.classes if classes is None else classes)]
    columns = {f.name: np.array([r[f.name] for r in rows], float) for f in fields(RankBatch)}
    return RankBatch(**columns)
