"""The engine and the closed form agree within 2 % on random plans (no jitter, no contention)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simulator.cost.times import ClassTimes
from simulator.evaluate.closed_form import closed_form
from simulator.evaluate.engine import simulate_step
from simulator.evaluate.recurrence import StageTimes, exact_ends
from simulator.evaluate.uniform import Kinds, UniformPipeline, uniform_pipeline_s
from simulator.graph.build import build_step
from simulator.spec.layout import Layout
from simulator.spec.stack import Overlap
from tests.synthetic import chunk, class_times, layout, unit

#: DESIGN's bound on the disagreement of the two evaluators.
TOLERANCE = 0.02
PLANS = 500


@dataclass(frozen=True)
class Case:
    """One random plan."""

    plan: Layout
    times: list[ClassTimes]


def random_pipeline(rng: np.random.Generator) -> Case:
    """Mixed pipelines of uneven stages; one rank in ten is 2.5 times slower."""
    schedule = str(rng.choice(["gpipe", "1f1b", "interleaved", "zb-h1"]))
    vpp = int(rng.integers(2, 5)) if schedule == "interleaved" else 1
    pp, n = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    counts = [int(rng.integers(1, 80)) for _ in range(n)]
    if vpp > 1:
        counts = [pp * int(rng.integers(1, 12)) for _ in range(n)]
    overlap = Overlap(
        pp=float(rng.choice([0, 0.5, 1])),
        dp=float(rng.choice([0, 0.7, 1])),
        param_gather=float(rng.choice([0, 0.5, 1])),
    )
    send, spread = rng.choice([0, 0.05, 0.5]), rng.choice([0, 0.2, 1])
    times = []
    for _ in range(n * pp):
        slow = (1 + spread * rng.uniform()) * (2.5 if rng.random() < 0.1 else 1.0)
        chunks = [
            chunk(
                *(slow * rng.uniform(0.8, 1.1, 3)),
                reduce=rng.uniform(0, 3),
                gather=rng.uniform(0, 2),
            )
            for _ in range(vpp)
        ]
        once = dict(zip(("optimizer", "overhead"), rng.uniform(0, 0.5, 2), strict=True))
        there, back = send * rng.uniform(0.3, 1, 2)
        times.append(class_times(chunks, send=there, send_back=back, **once))
    replicas = [int(rng.integers(1, 5)) for _ in range(n)]
    plan = layout(counts, pp=pp, vpp=vpp, schedule=schedule, overlap=overlap, counts=replicas)
    return Case(plan, times)


def random_sharded(rng: np.random.Generator) -> Case:
    """FSDP and layered plans of ranks of different speed, bound by computation or by gathers."""
    n = int(rng.integers(1, 4))
    counts = [int(rng.integers(1, 12)) for _ in range(n)]
    schedule = str(rng.choice(["1f1b", "layered"]))
    gather, reduce = rng.choice([0.1, 0.5, 1, 1.5, 4], 2)
    repeat, again = int(rng.integers(1, 60)), float(rng.choice([0, 1]))
    times = []
    for _ in range(n):
        speed, network = rng.uniform(0.5, 2), rng.uniform(0.9, 1.1)
        units = [
            unit("root", 1, 0.3 * speed, 0.6 * speed, 3 * gather * network, 3 * reduce * network),
            unit("layer", repeat, speed, 2 * speed, gather, reduce * network, gather * again),
        ]
        once = dict(zip(("optimizer", "overhead"), rng.uniform(0, 0.5, 2), strict=True))
        times.append(class_times([chunk(1, 1)], units=units, **once))
    overlap = Overlap(fsdp_prefetch=int(rng.integers(0, 4)))
    return Case(layout(counts, schedule=schedule, overlap=overlap), times)


@pytest.mark.parametrize("part", range(10))
def test_within_two_percent_on_500_random_plans(part: int) -> None:
    for n in range(part * PLANS // 10, (part + 1) * PLANS // 10):
        rng = np.random.default_rng(n)
        case = random_sharded(rng) if n % 3 == 0 else random_pipeline(rng)
        engine = simulate_step(build_step(case.plan, case.times))
        form = closed_form(case.plan, case.times)
        assert form.step_time_s == pytest.approx(engine.step_time_s, rel=TOLERANCE), (n, case.plan)
        assert form.seconds.sum(axis=1) == pytest.approx(form.step_time_s)
        # Busy seconds are the same in both, not only the total.
        busy = [c for c in range(form.seconds.shape[1]) if c not in (6, 7, 8, 11)]
        assert form.seconds[:, busy] == pytest.approx(engine.seconds[:, busy], abs=1e-6), n


def uniform_case(rng: np.random.Generator, schedule: str) -> tuple[float, float]:
    """Formula and exact recurrence of one uniform pipeline whose ends differ from its middle."""
    pp, vpp = int(rng.integers(1, 17)), 1
    m = pp * int(rng.integers(2, 7))
    if schedule == "interleaved":
        vpp = int(rng.integers(2, 7))
    send, spread = rng.choice([0, 0.05, 0.2]), rng.choice([0, 0.1, 0.3])
    middle = rng.uniform(0.8, 1.2, 3)
    kinds = [
        Kinds(x * (1 + spread * rng.uniform(-1, 1)), x, x * (1 + spread * rng.uniform(-1, 2)))
        for x in middle
    ]
    stages = pp * vpp

    def spread_out(k: Kinds) -> list[float]:
        whole = [k.first, *[k.middle] * (stages - 2), k.last][:stages]
        return [float(x) for x in whole]

    exact = exact_ends(
        StageTimes(*map(spread_out, kinds), [send] * pp, [send] * pp, [0.0] * stages),
        schedule,
        vpp,
        m,
    )
    stage = UniformPipeline(*kinds, send, send)
    return float(uniform_pipeline_s(schedule, stage, pp, vpp, m)), float(max(exact.finish))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_the_formula_for_uniform_plans(schedule: str) -> None:
    rng = np.random.default_rng(11)
    errors = [
        abs(formula / exact - 1)
        for formula, exact in (uniform_case(rng, schedule) for _ in range(60))
    ]
    assert max(errors) < TOLERANCE
    assert np.mean(errors) < 0.005


def test_the_formula_takes_a_batch_of_different_plans() -> None:
    pp, m = np.array([1, 4, 8, 16]), np.array([4, 8, 8, 64])
    kinds = [Kinds(np.ones(4), 1.0, np.full(4, 1.2)) for _ in range(3)]
    batch = uniform_pipeline_s("1f1b", UniformPipeline(*kinds, 0.1, 0.1), pp, 1, m)
    for n in range(4):
        one = [Kinds(1.0, 1.0, 1.2) for _ in range(3)]
        alone = uniform_pipeline_s("1f1b", UniformPipeline(*one, 0.1, 0.1), pp[n], 1, m[n])
        assert batch[n] == pytest.approx(float(alone))


def test_the_recurrence_takes_a_batch_of_plans() -> None:
    rng = np.random.default_rng(5)
    columns = [[rng.uniform(1, 2, 7) for _ in range(4)] for _ in range(5)]
    batch = exact_ends(StageTimes(*columns, [0.0] * 4), "1f1b", 1, 6)
    for n in range(7):
        single = [[float(x[n]) for x in column] for column in columns]
        alone = exact_ends(StageTimes(*single, [0.0] * 4), "1f1b", 1, 6)
        assert [x[n] for x in batch.finish] == pytest.approx(alone.finish)
