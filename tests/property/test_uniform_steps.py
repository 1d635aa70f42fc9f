"""Whole uniform steps by formula, batches of sharded plans: against the closed form of one plan."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.evaluate.closed_form import closed_form
from simulator.evaluate.sharded_form import ShardedUnit, sharded_pass_s
from simulator.evaluate.uniform import Kinds, UniformPipeline, UniformSync, uniform_step_s
from simulator.spec.stack import Overlap
from tests.synthetic import chunk, class_times, layout, unit


def kinds(rng: np.random.Generator, scale: float) -> Kinds:
    """First and last stage up to 20 % off the middle."""
    first, last = scale * rng.uniform(0.8, 1.2, 2)
    return Kinds(first, scale, last)


def at(k: Kinds, stage: int, stages: int) -> float:
    return float(k.first if stage == 0 else k.last if stage == stages - 1 else k.middle)


def both(rng: np.random.Generator, schedule: str) -> tuple[float, float]:
    """Formula and closed form of one random uniform plan with gradient sync."""
    pp, vpp = int(rng.integers(1, 9)), 2 if schedule == "interleaved" else 1
    m, stages = pp * int(rng.integers(2, 8)), pp * vpp
    send, reduce = rng.choice([0, 0.05, 0.2]), rng.choice([0.5, 2.0])
    passes = [kinds(rng, x) for x in rng.uniform(0.8, 1.2, 3)]
    reduces, gathers = kinds(rng, reduce), kinds(rng, reduce / 2)
    dp, gather = (float(x) for x in rng.choice([0, 0.8, 1], 2))
    times = [
        class_times(
            [
                chunk(
                    *(at(k, c * pp + rank, stages) for k in passes),
                    reduce=at(reduces, c * pp + rank, stages),
                    gather=at(gathers, c * pp + rank, stages),
                )
                for c in range(vpp)
            ],
            send=send,
            optimizer=0.3,
            overhead=0.1,
        )
        for rank in range(pp)
    ]
    overlap = Overlap(dp=dp, param_gather=gather)
    plan = layout(m, pp=pp, vpp=vpp, schedule=schedule, overlap=overlap)
    sync = UniformSync(reduces, gathers, dp, gather, 0.3, 0.1)
    stage = UniformPipeline(*passes, send, send)
    formula = float(uniform_step_s(schedule, stage, sync, pp, vpp, m))
    return formula, closed_form(plan, times).step_time_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_a_whole_uniform_step(schedule: str) -> None:
    rng = np.random.default_rng(23)
    errors = np.array([abs(a / b - 1) for a, b in (both(rng, schedule) for _ in range(60))])
    assert errors.mean() < 0.01
    assert np.percentile(errors, 90) < 0.02
    assert errors.max() < 0.05


@pytest.mark.parametrize("schedule", ["1f1b", "layered"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_batch_of_sharded_plans(schedule: str, prefetch: int) -> None:
    rng = np.random.default_rng(7)
    n = 12
    f, b, gather, reduce = rng.uniform(0.1, 2.0, (4, n))
    counts = rng.integers(1, 9, n)
    units = [
        ShardedUnit(1, [0.5 * f], [0.5 * b], 3 * gather, 3 * gather, 2 * reduce),
        ShardedUnit(30, [f], [b], gather, gather, reduce),
    ]
    batch = sharded_pass_s(units, counts, prefetch, layered=schedule == "layered")
    for k in range(n):
        parts = [
            unit("root", 1, 0.5 * f[k], 0.5 * b[k], 3 * gather[k], 2 * reduce[k]),
            unit("layer", 30, f[k], b[k], gather[k], reduce[k]),
        ]
        plan = layout(int(counts[k]), schedule=schedule, overlap=Overlap(fsdp_prefetch=prefetch))
        alone = closed_form(plan, [class_times([chunk(1, 1)], units=parts)])
        assert batch[k] == pytest.approx(alone.step_time_s, rel=1e-9)
