"""A plan laid on a cluster: classes, pipelines, chunks, shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.errors import UserError
from simulator.spec.layout import Layout, build_layout, split_chunks, stage_layer_counts
from simulator.spec.plan import Assignment, Plan, Recompute, Sharding
from simulator.spec.presets import preset
from simulator.spec.scenario import load_scenario, scenario_from_mapping


def laid(name: str, **changes: object) -> Layout:
    s = load_scenario(name)
    assert s.plan is not None
    plan = replace(s.plan, **changes)  # type: ignore[arg-type]
    return build_layout(s.model, s.workload, s.cluster, plan, s.stack)


def test_uniform_plan_has_one_class_per_stage() -> None:
    layout = laid("llama-3.1-405b-16k-h100")
    assert len(layout.classes) == 16
    assert layout.n_gpus == 16384
    assert {c.ranks for c in layout.classes} == {1024}
    assert [(p.classes, p.count) for p in layout.pipelines] == [(tuple(range(16)), 128)]


def test_mixed_cluster_adds_a_class_for_each_gpu_type() -> None:
    layout = laid("llama-3.1-70b-mixed-even")
    assert [(c.gpu.name, c.replicas) for c in layout.classes] == [
        ("a100-sxm-80gb", 32),
        ("h100-sxm-80gb", 32),
    ]


def test_126_layers_on_16_stages_leave_one_out_at_both_ends() -> None:
    """arXiv 2407.21783 section 3.3.2: the first and the last stage hold one layer less."""
    plan = Plan(pp=16)
    counts = stage_layer_counts(preset("llama-3.1-405b"), plan)
    assert counts == (7, *[8] * 14, 7)
    assert split_chunks(7, 4, first_stage=True) == (1, 2, 2, 2)
    assert split_chunks(7, 4, first_stage=False) == (2, 2, 2, 1)


def test_dense_first_layers_of_a_moe_model_lie_on_the_first_stage() -> None:
    s = scenario_from_mapping({
        "model": "deepseek-v2-lite",
        "workload": {"sequence_length": 4096, "global_batch": 64},
        "cluster": {"groups": [{"node": "dgx-h100", "count": 1}]},
        "stack": "megatron-core",
        "plan": {"pp": 2, "ep": 4, "sharding": "zero1"},
    })  # fmt: skip
    assert s.plan is not None
    layout = build_layout(s.model, s.workload, s.cluster, s.plan, s.stack)
    dense = [c.layers - c.moe_layers for c in layout.classes]
    assert dense == [1, 0]


def test_shares_left_open_split_what_is_left() -> None:
    entries = (
        Assignment(group=0, micro_batch=1, count=4, state_share=0.02),
        Assignment(group=1, micro_batch=1, count=12),
    )
    layout = laid("llama-3.1-70b-mixed-even", assignment=entries)
    shares = [c.state_share * c.ranks for c in layout.classes]
    assert shares[0] == pytest.approx(0.64)
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 63}, "the cluster has 64 GPUs"),
        ({"micro_batch": 3}, "not divisible"),
        ({"recompute": Recompute.NONE}, "plan.recompute full"),
        ({"assignment": (Assignment(group=0, micro_batch=1, count=1),)}, "global_batch is 512"),
        (
            {"assignment": (Assignment(group=0, micro_batch=1, count=16, state_share=0.5),)},
            "sum to",
        ),
    ],
)
def test_impossible_plans_are_refused_with_the_reason(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        laid("llama-3.1-70b-mixed-even", **changes)


def test_sharding_order_is_zero_stages() -> None:
    assert Sharding.NONE < Sharding.ZERO1 < Sharding.ZERO2 < Sharding.ZERO3
