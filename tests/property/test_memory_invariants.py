"""What must hold for the memory estimate of any plan."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cost.batch import RankBatch
from simulator.cost.memory import MemoryBreakdown, MemoryOptions, rank_memory
from simulator.cost.shards import shard_parameters
from simulator.spec.model import ModelSpec
from simulator.spec.stack import load_stack

MODEL = ModelSpec(
    "llama", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000
)

STACKS = ("megatron-core", "megatron-deepspeed", "torchtitan", "composer-fsdp", "gpumix")

rows = st.fixed_dictionaries(
    {
        "micro_batch": st.integers(1, 8),
        "micro_batches": st.integers(1, 16),
        "sequence_length": st.sampled_from([512, 2048, 8192]),
        "tp": st.sampled_from([1, 2, 4, 8]),
        "cp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 4, 32]),
        "pp": st.sampled_from([1, 2, 4]),
        "sharding": st.integers(0, 3),
        "recompute": st.integers(0, 2),
        "sequence_parallel": st.integers(0, 1),
    }
)


def row(given: dict[str, Any]) -> dict[str, float]:
    """All fields of the first stage of a plan."""
    ranks = given["dp"] * given["cp"]
    layers = MODEL.layers / given["pp"]
    return {
        **{name: 1.0 for name in RankBatch.__dataclass_fields__},
        "moe_layers": 0.0,
        "stage": 0.0,
        "dense_layers": layers,
        "has_head": float(given["pp"] == 1),
        "shard_degree": float(ranks),
        "state_share": 1.0 / ranks,
        "recompute_layers": layers if given["recompute"] == 2 else 0.0,
        **{name: float(value) for name, value in given.items()},
    }


def estimate(stack: str, *given: dict[str, Any]) -> MemoryBreakdown:
    columns = [row(g) for g in given]
    batch = RankBatch(**{k: np.array([c[k] for c in columns]) for k in columns[0]})
    found = load_stack(stack)
    recipe = found.recipe(next(iter(found.recipes)))
    return rank_memory(MODEL, found, recipe, "adamw", batch, MemoryOptions())


@given(stack=st.sampled_from(STACKS), plan=rows, axis=st.sampled_from(["tp", "cp", "pp"]))
@settings(max_examples=150, deadline=None)
def test_more_model_parallelism_never_allocates_more(
    stack: str, plan: dict[str, Any], axis: str
) -> None:
    """Send and receive buffers aside: they appear with the second rank of a dimension."""
    wider = plan | {axis: plan[axis] * 2}
    if axis == "pp":
        # Twice the stages keep twice the micro-batches of half the layers: equal at best.
        plan, wider = plan | {"micro_batches": 1}, wider | {"micro_batches": 1}
    found = estimate(stack, plan, wider)
    assert found.parameters[1] <= found.parameters[0] * (1 + 1e-9)
    whole = found.peak_allocated_bytes - found.temporaries
    assert whole[1] <= whole[0] * (1 + 1e-9)


@given(stack=st.sampled_from(STACKS), plan=rows)
@settings(max_examples=100, deadline=None)
def test_more_sharding_never_holds_more_state(stack: str, plan: dict[str, Any]) -> None:
    found = estimate(stack, *(plan | {"sharding": s} for s in range(4)))
    state = found.parameters + found.gradients + found.optimizer
    at_step = found.allocated_by_moment[2]
    assert np.all(np.diff(found.parameters + found.optimizer) <= 1e-6 * state[0])
    assert at_step[3] <= at_step[0] * (1 + 1e-9)


@given(
    stack=st.sampled_from(STACKS), plan=rows,
    axis=st.sampled_from(["micro_batch", "sequence_length"]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_more_tokens_need_more(stack: str, plan: dict[str, Any], axis: str) -> None:
    found = estimate(stack, plan, plan | {axis: plan[axis] * 2})
    assert np.all(found.allocated_by_moment[:2, 1] > found.allocated_by_moment[:2, 0])
    assert found.device_bytes[1] >= found.device_bytes[0]


@given(stack=st.sampled_from(STACKS), plan=rows)
@settings(max_examples=100, deadline=None)
def test_recompute_keeps_less(stack: str, plan: dict[str, Any]) -> None:
    found = estimate(stack, *(plan | {"recompute": mode} for mode in (0, 1, 2)))
    kept = found.allocated_by_moment[0]
    assert kept[2] <= kept[1] <= kept[0] * (1 + 1e-9)


@given(stack=st.sampled_from(STACKS), plans=st.lists(rows, min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_batch_equals_its_rows_one_by_one(stack: str, plans: list[dict[str, Any]]) -> None:
    together = estimate(stack, *plans)
    for index, plan in enumerate(plans):
        alone = estimate(stack, plan)
        for f in fields(MemoryBreakdown):
            many, one = getattr(together, f.name), getattr(alone, f.name)
            assert np.allclose(many[..., index], one[..., 0], rtol=1e-12), f.name


@given(parts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), plan=rows)
@settings(max_examples=60, deadline=None)
def test_state_of_all_shares_sums_to_the_whole(parts: list[float], plan: dict[str, Any]) -> None:
    shares = np.array(parts) + 1e-3
    shares = shares / shares.sum()
    fixed = row(plan | {"cp": 1, "dp": len(parts), "sharding": 3})
    batch = RankBatch(**{k: np.array([v]) for k, v in fixed.items()})
    batch = replace(batch, state_share=shares)
    stack = load_stack("gpumix")
    found = rank_memory(MODEL, stack, stack.recipe("bf16"), "adamw", batch)
    state = (found.parameters + found.gradients + found.optimizer).sum()
    held, _ = shard_parameters(MODEL, batch).held(batch)
    assert state == pytest.approx(16 * float(np.max(held)))
