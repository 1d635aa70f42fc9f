"""Parts of the planner: layers over stages, batches by weight, menus, baselines, reasons."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest

from simulator.planner.baselines import even_split, proportional_to_speed, share_batch
from simulator.planner.candidate import on_whole_cluster, part_of, price
from simulator.planner.gpumix import LAYERED, Limits, option_times, plan_gpumix, styled
from simulator.planner.layer_split import balance_layers
from simulator.planner.mixed_pipeline import plan_mixed_pipelines
from simulator.planner.rank_tables import (
    Job,
    MemoryTable,
    collectives,
    pools_of,
    unit_tables,
)
from simulator.planner.recommend import base_plan
from simulator.planner.split_problem import Kind, SplitProblem, solve_split, split_kind
from simulator.planner.split_problem import menus as menus_of
from simulator.spec.plan import Plan, Recompute
from simulator.spec.scenario import load_scenario


@lru_cache
def asked() -> tuple[Job, Plan]:
    """GPT-2.7B on two L4, an A6000 and a P40."""
    s = load_scenario("cephalo-small-gpt-2.7b")
    return Job(s.model, s.workload, s.cluster, s.stack, s.risk), base_plan(s, {})


@pytest.mark.parametrize("layers", [3, 5, 8])
def test_layers_are_balanced_like_trying_all(layers: int) -> None:
    rng = np.random.default_rng(layers)
    seconds = np.cumsum(rng.uniform(0.5, 2.0, (3, layers + 1)), axis=1)
    seconds[:, 0] = np.inf
    seconds[1, 4:] = np.inf  # the second stage holds three layers at most
    tried = [
        max(seconds[s, k] for s, k in enumerate(counts))
        for counts in product(range(1, layers + 1), repeat=3)
        if sum(counts) == layers
    ]
    found = balance_layers(seconds, layers)
    assert found is not None and sum(found) == layers
    assert max(seconds[s, k] for s, k in enumerate(found)) == min(tried)


def test_layers_that_fit_nowhere() -> None:
    assert balance_layers(np.full((2, 5), np.inf), 4) is None


@pytest.mark.parametrize("batch", [6, 7, 20, 101])
def test_batches_by_weight_make_up_the_batch(batch: int) -> None:
    rows = share_batch(batch, [4, 2], np.array([1.0, 3.0]))
    assert rows is not None
    assert sum(sequences * n for _, sequences, n in rows) == batch
    assert sum(n for pool, _, n in rows if pool == 0) == 4
    assert min(sequences for _, sequences, _ in rows) >= 1


def test_weights_decide_who_gets_how_much() -> None:
    rows = share_batch(100, [4, 2], np.array([1.0, 3.0]))
    assert rows == [(0, 10, 4), (1, 30, 2)]
    assert share_batch(5, [4, 2], np.ones(2)) is None


def test_equal_gpus_split_over_two_options_only_where_they_must() -> None:
    sizes = np.arange(1, 9)
    kind = Kind(4, sizes, np.ones(8), np.array([sizes], float))
    for batch, used in ((12, 1), (13, 2)):
        found = solve_split(SplitProblem((kind,), batch, np.ones(1)))
        assert found is not None and len(found.choices[0]) == used
        assert found.time_s == -(-batch // 4)


def test_state_moves_where_the_even_share_does_not_fit() -> None:
    small = Kind(2, np.array([1]), np.array([0.1]), np.array([[1.0], [1.5]]))
    big = Kind(2, np.array([1]), np.array([0.9]), np.array([[1.0], [1.5]]))
    found = solve_split(SplitProblem((small, big), 4, np.array([0.25, 0.5])))
    assert found is not None
    assert (found.ceiling, found.time_s) == (1, 1.5)


def test_a_kind_makes_up_sequences_from_its_menu() -> None:
    kind = Kind(3, np.array([2, 5]), np.ones(2), np.array([[1.0, 2.0]]))
    problem = SplitProblem((kind,), 30, np.ones(1))
    menu = menus_of(problem, 0, 2.0)
    assert menu is not None
    assert split_kind(menu[0], 12) is not None  # 2 + 5 + 5
    assert split_kind(menu[0], 13) is None


def test_largest_share_is_at_the_accepted_risk() -> None:
    job, base = asked()
    pool = pools_of(job.cluster, 1)[0]
    table = MemoryTable(job, replace(styled(base), recompute=Recompute.FULL), pool, 4)
    sizes, counts = np.array([1, 4, 8, 400]), np.ones(4, np.intp)
    caps = table.caps(sizes, counts)
    assert list(caps[:3]) == sorted(caps[:3], reverse=True)
    assert caps[3] == -1.0
    risk = table.risk(sizes[:3], counts[:3], caps[:3])
    assert np.all(risk <= job.risk) and np.all(risk > 0.9 * job.risk)


def test_options_are_priced_like_the_published_objective() -> None:
    """arXiv 2411.01075: max(AG, l t_f) + max(AG + RS, l (t_f + t_b)) of every unit."""
    job, base = asked()
    plan = replace(styled(base), recompute=Recompute.FULL)
    pools = pools_of(job.cluster, 1)
    sizes = {pools[0]: np.array([1, 2])}
    table = unit_tables(job, plan, pools[:1], sizes, 4)[pools[0]]
    network = collectives(job, plan, pools, 4)
    counts = np.array([3, 7])
    found = option_times(plan, table, network, np.array([1, 2]), counts, np.array([1.0, 2.0]))
    for row, factor in enumerate((1.0, 2.0)):
        for i, count in enumerate(counts):
            expected = table.optimizer_s + table.step_overhead_s
            for u, repeat in enumerate(table.repeat):
                ahead = factor * network.gather_forward_s[u]
                behind = factor * (network.gather_backward_s[u] + network.reduce_s[u])
                expected += repeat * max(ahead, count * table.forward_s[u, i])
                expected += repeat * max(behind, count * table.backward_s[u, i])
            assert found[row, i] == pytest.approx(expected)


def test_the_optimiser_beats_the_published_plan_and_baselines() -> None:
    job, base = asked()
    scenario = load_scenario("cephalo-small-gpt-2.7b")
    assert scenario.plan is not None
    published = price("", job, scenario.plan)
    found = plan_gpumix(job, base)[0]
    assert found.step_time_s <= published.step_time_s
    for baseline in (even_split(job, base), proportional_to_speed(job, base)):
        assert baseline.plan is not None
        if baseline.plan.layout.plan.schedule == LAYERED[1] and baseline.fits:
            assert found.step_time_s <= baseline.plan.step_time_s * 1.02


def test_limits_are_kept() -> None:
    job, base = asked()
    sizes = Limits(sizes=(2,), whole_cluster=True)
    found = plan_gpumix(job, base, sizes)[0]
    assert {c.micro_batch for c in found.layout.classes} == {2}
    assert found.layout.n_gpus == 4
    assert plan_gpumix(job, base, Limits(max_gpus=2))[0].layout.n_gpus <= 2


def test_a_plan_of_a_part_is_the_same_on_the_whole() -> None:
    s = load_scenario("opt-350m-v100-a100")
    job = Job(s.model, s.workload, s.cluster, s.stack, s.risk)
    part, origin = part_of(job.cluster, "a100-sxm-40gb")
    alone = plan_gpumix(replace(job, cluster=part), base_plan(s, {}), Limits(whole_cluster=True))
    whole = price("", job, on_whole_cluster(alone[0].layout, origin))
    assert whole.gpus == {"a100-sxm-40gb": 16}
    assert whole.step_time_s == pytest.approx(alone[0].step_time_s)


def test_mixed_pipelines_fit_and_use_every_type() -> None:
    s = load_scenario("opt-350m-v100-a100")
    few = replace(s.workload, global_batch=128)
    job = Job(s.model, few, s.cluster, s.stack, s.risk)
    found = plan_mixed_pipelines(job, base_plan(s, {}))[0]
    assert found.oom_risk <= job.risk
    assert set(found.gpus) == {"v100-sxm-16gb", "a100-sxm-40gb"}
    stages = {c.stage: c.layers for c in found.layout.classes}
    assert sum(stages.values()) == s.model.layers
