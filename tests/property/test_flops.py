"""FLOPs are conserved: what all ranks do is what the model needs, however the plan splits it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cost.batch import RankBatch
from simulator.cost.flops import (
    forward_flops_per_token,
    model_flops_per_token,
    rank_forward_flops,
    rank_recompute_flops,
)
from simulator.cost.operators import LayerContext
from simulator.spec.model import ModelSpec
from simulator.spec.presets import preset
from simulator.spec.stack import load_stack

MODELS = ("gpt3-175b", "llama-3.1-8b", "mixtral-8x7b", "gemma-2-9b")


def batch(model: ModelSpec, **over: float) -> RankBatch:
    """One rank that holds the whole model unless told otherwise."""
    row = {name: 1.0 for name in RankBatch.__dataclass_fields__}
    row |= {
        "sequence_length": 2048.0,
        "dense_layers": float(model.layers - model.moe_layers),
        "moe_layers": float(model.moe_layers),
        "stage": 0.0,
        "sequence_parallel": 0.0,
        "sharding": 0.0,
        "recompute": 0.0,
        "recompute_layers": 0.0,
    }
    return RankBatch(**{k: np.array([v]) for k, v in (row | over).items()})


def context(name: str, stack: str = "megatron-core", **over: float) -> LayerContext:
    model = preset(name)
    found = load_stack(stack)
    return LayerContext(model, found.kept, found.recipe("bf16"), batch(model, **over))


@given(
    name=st.sampled_from(MODELS),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    micro_batch=st.integers(1, 4),
    sequence=st.sampled_from([512, 2048, 8192]),
)
@settings(max_examples=60, deadline=None)
def test_ranks_sum_to_the_model(
    name: str, tp: int, cp: int, micro_batch: int, sequence: int
) -> None:
    ctx = context(
        name,
        tp=tp,
        cp=cp,
        micro_batch=micro_batch,
        sequence_length=sequence,
        sequence_parallel=float(tp > 1),
    )
    ranks = rank_forward_flops(ctx)[0] * tp * cp
    wanted = forward_flops_per_token(ctx.model, sequence) * micro_batch * sequence
    assert ranks == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_expert_parallelism_keeps_the_work(name: str) -> None:
    """ep ranks run experts/ep each on the tokens of all of them: the same per rank."""
    one, four = context(name), context(name, ep=4.0)
    assert rank_forward_flops(four)[0] == pytest.approx(rank_forward_flops(one)[0], rel=1e-12)


def test_full_recompute_adds_one_forward_of_the_layers() -> None:
    ctx = context("gpt3-175b", recompute=2.0, recompute_layers=96.0, has_head=0.0)
    assert rank_recompute_flops(ctx)[0] == pytest.approx(rank_forward_flops(ctx)[0], rel=1e-12)


def test_selective_recompute_adds_the_attention_core() -> None:
    """4 b s^2 h per layer: the two products of the core (arXiv 2205.05198 section 5)."""
    ctx = context("gpt3-175b", recompute=1.0)
    h, s, layers = 12288, 2048, 96
    assert rank_recompute_flops(ctx)[0] == pytest.approx(4 * s * s * h * layers, rel=1e-12)


def test_published_flops_of_gpt() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) with full recompute is 4/3 of ours (arXiv 2104.04473
    equation 3: 72 without)."""
    model = replace(preset("gpt3-175b"), vocab=51200)
    h, layers, s, v = 12288, 96, 2048, 51200
    wanted = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert float(model_flops_per_token(model, s)) == pytest.approx(wanted, rel=1e-9)
