"""Legal plan grids: the same rules as for a single plan, all rows at once."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.errors import UserError
from simulator.planner.plan_grid import HSDP, grid_of, groups, joined
from simulator.planner.space import RULE_TEXTS, Rule, Space, broken_rules, default_axes, divisors
from simulator.spec.plan import Plan, Recompute, Sharding
from simulator.spec.resolve_plan import Case
from simulator.spec.scenario import plan_from_mapping, scenario_from_mapping


def case(model: object = "llama-3.1-8b", stack: str = "megatron-core", nodes: int = 2) -> Case:
    scenario = scenario_from_mapping(
        {
            "model": model,
            "workload": {"sequence_length": 4096, "global_batch": 64},
            "cluster": {
                "groups": [{"node": "dgx-a100-80gb", "count": nodes}],
                "fabric": "hdr-infiniband",
            },
            "stack": stack,
        }
    )
    return Case(scenario.model, scenario.workload, scenario.cluster, scenario.stack)


def test_divisors_in_order() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(36, limit=6) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("stack", ["megatron-core", "torchtitan", "megatron-deepspeed", "gpumix"])
def test_every_legal_row_passes_the_checks_of_a_single_plan(stack: str) -> None:
    asked = case(stack=stack)
    found = joined(list(Space(asked, default_axes(asked)).chunks()))
    rows = np.random.default_rng(3).choice(len(found), 25, replace=False)
    for row in rows:
        plan = found.plan(int(row), Plan())
        given = {
            name: getattr(plan, name)
            for name in ("tp", "pp", "cp", "dp", "vpp", "micro_batch", "schedule")
        }
        given["sharding"] = plan.sharding.name.lower()
        given["sequence_parallel"] = plan.sequence_parallel
        parts = (asked.model, asked.workload, asked.cluster, asked.stack)
        assert plan_from_mapping(given, *parts).dp == plan.dp


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tp": 3, "dp": 1}, Rule.GPUS),
        ({"pp": 16, "vpp": 4, "dp": 1, "schedule": "interleaved"}, Rule.LAYERS),
        ({"dp": 16, "micro_batch": 3}, Rule.BATCH),
        ({"dp": 16, "sequence_parallel": True}, Rule.SEQUENCE_PARALLEL),
        ({"dp": 16, "ep": 2}, Rule.EXPERTS),
        ({"pp": 2, "dp": 8, "vpp": 2}, Rule.CHUNKS),
        ({"pp": 16, "dp": 1, "vpp": 2, "schedule": "interleaved", "micro_batch": 8},
         Rule.INTERLEAVED_BATCHES),
        ({"dp": 16, "schedule": "layered"}, Rule.LAYERED),
        ({"dp": 16}, Rule.LEGAL),
    ],
)  # fmt: skip
def test_the_first_broken_rule(changes: dict[str, object], rule: Rule) -> None:
    plan = Plan(**changes)  # type: ignore[arg-type]
    assert broken_rules(case(), grid_of([plan]))[0] == rule


def test_key_value_heads_divide_by_tp_or_divide_it() -> None:
    asked = case({"base": "llama-3.1-8b", "heads": 24, "kv_heads": 6, "head_dim": 128})
    plans = [Plan(tp=4, dp=4), Plan(tp=2, dp=8)]
    assert list(broken_rules(asked, grid_of(plans))) == [Rule.KV_HEADS, Rule.LEGAL]


def test_combinations_are_either_legal_or_counted_with_a_reason() -> None:
    asked = case()
    space = Space(asked, default_axes(asked))
    legal = sum(len(chunk) for chunk in space.chunks(100))
    assert legal + sum(space.left_out.values()) == space.considered
    assert all(rule in RULE_TEXTS for rule in space.left_out)


def test_the_size_of_chunks_changes_nothing_and_bounds_them() -> None:
    asked = case()
    small = list(Space(asked, default_axes(asked)).chunks(64))
    large = list(Space(asked, default_axes(asked)).chunks(10**6))
    assert max(map(len, small)) <= 64
    for name in ("tp", "pp", "micro_batch", "sharding", "schedule"):
        one, other = (getattr(joined(parts), name) for parts in (small, large))
        np.testing.assert_array_equal(one, other)


def test_fixed_axes_take_one_value_or_several() -> None:
    asked = case()
    axes = default_axes(asked, {"tp": 2, "micro_batch": [1, 2], "dp": 4})
    found = joined(list(Space(asked, axes).chunks()))
    assert set(found.tp) == {2}
    assert set(found.micro_batch) == {1, 2}
    assert set(found.dp) == {4}
    with pytest.raises(UserError, match="no axis"):
        default_axes(asked, {"colour": 1})


def test_hsdp_shards_over_the_ranks_of_a_node() -> None:
    asked = case()
    axes = default_axes(asked, {"sharding": "hsdp", "tp": 2, "pp": 1, "cp": 1})
    found = joined(list(Space(asked, axes).chunks()))
    assert set(found.shard_degree) == {4}
    assert set(found.sharding) == {HSDP}
    assert found.plan(0, Plan()).sharding == Sharding.ZERO3


def test_a_row_keeps_what_a_grid_does_not_hold() -> None:
    like = Plan(precision="fp16", recompute=Recompute.FULL, recompute_layers=3, offload="state")
    plan = grid_of([Plan(dp=16)]).plan(0, like)
    assert (plan.precision, plan.offload) == ("fp16", "state")
    assert plan.recompute_layers is None
    assert plan.dp == 16


def test_groups_cover_every_row_once() -> None:
    plans = [Plan(pp=p, dp=16 // p, schedule=s) for p in (1, 2, 4) for s in ("1f1b", "gpipe")]
    grid = grid_of(plans * 3)
    rows = [group.rows for group in groups(grid)]
    assert sorted(np.concatenate([r for r in rows if r is not None])) == list(range(len(grid)))
    assert len(rows) == 6
