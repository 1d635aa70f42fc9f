"""Memory formulas as published: activations per layer, training state per parameter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.cost.activations import activation_table, in_flight, layer_bytes
from simulator.cost.batch import RankBatch
from simulator.cost.operators import LayerContext
from simulator.cost.shards import shard_parameters
from simulator.cost.state import training_state
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.stack import load_stack

S, B = 2048.0, 4.0

#: GPT-22B of arXiv 2205.05198 table 3.
GPT = ModelSpec(
    "gpt-22b", layers=48, hidden=6144, ffn=24576, heads=64, kv_heads=64, head_dim=96, vocab=51200,
    norm="layernorm", activation="gelu", position="learned", max_positions=2048, dropout=0.1,
)  # fmt: skip
LLAMA = ModelSpec(
    "llama", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)


def batch(model: ModelSpec, **over: float) -> RankBatch:
    row = dict.fromkeys(RankBatch.__dataclass_fields__, 1.0)
    row |= dict.fromkeys(
        ("stage", "moe_layers", "sequence_parallel", "sharding", "recompute", "recompute_layers"),
        0.0,
    )
    row |= {"micro_batch": B, "sequence_length": S, "dense_layers": float(model.layers)}
    return RankBatch(**{k: np.array([v]) for k, v in (row | over).items()})


def per_layer(model: ModelSpec, stack: str, attention: str, **over: float) -> float:
    """Kept bytes of one layer over s*b*h, flash attention's log-sum-exp aside."""
    found, rows = load_stack(stack), batch(model, **over)
    recipe = found.recipe("fp16" if stack == "gpumix" else "bf16")
    ctx = LayerContext(model, found.kept, recipe, rows, attention)
    extra = activation_table(ctx).get("log-sum-exp", np.zeros(1))
    if rows.recompute[0] == Recompute.FULL:
        extra = np.zeros(1)
    kept = layer_bytes(ctx).kept(rows)
    return float(np.max(kept - extra)) / (S * B * model.hidden)


def test_gpt_layer_keeps_34_plus_5as_over_h() -> None:
    """arXiv 2205.05198 equation 1."""
    assert per_layer(GPT, "megatron-core", "unfused") == pytest.approx(34 + 5 * 64 * S / 6144)


@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallel_gpt_layer(t: int) -> None:
    """arXiv 2205.05198 equation 2: 10 + 24/t + 5as/(ht)."""
    expected = 10 + 24 / t + 5 * 64 * S / (6144 * t)
    assert per_layer(GPT, "megatron-core", "unfused", tp=t) == pytest.approx(expected)


@pytest.mark.parametrize("t", [2, 8])
def test_sequence_parallel_gpt_layer(t: int) -> None:
    """arXiv 2205.05198 equation 4: (34 + 5as/h)/t."""
    expected = (34 + 5 * 64 * S / 6144) / t
    kept = per_layer(GPT, "megatron-core", "unfused", tp=t, sequence_parallel=1.0)
    assert kept == pytest.approx(expected)


def test_selective_recompute_keeps_34() -> None:
    """arXiv 2205.05198 equation 6, per layer: 34/t."""
    over = {"tp": 8.0, "sequence_parallel": 1.0, "recompute": float(Recompute.SELECTIVE)}
    assert per_layer(GPT, "megatron-core", "unfused", **over) == pytest.approx(34 / 8)


def test_full_recompute_keeps_the_input_of_each_layer() -> None:
    """arXiv 2205.05198 section 5: 2sbh per layer."""
    over = {"recompute": float(Recompute.FULL), "recompute_layers": float(GPT.layers)}
    assert per_layer(GPT, "megatron-core", "unfused", **over) == pytest.approx(2)


def test_llama_layer_unfused_gate_keeps_8f_over_h() -> None:
    """arXiv 2411.06465 equation 12: 12 + 4k/a + 8f/h."""
    expected = 12 + 4 * 8 / 32 + 8 * 14336 / 4096
    assert per_layer(LLAMA, "gpumix", "flash2") == pytest.approx(expected)


def test_llama_layer_fused_gate_keeps_6f_over_h() -> None:
    """A fused SwiGLU recomputes the activated gate: 12 + 4k/a + 6f/h, all divided by t with SP."""
    expected = 12 + 4 * 8 / 32 + 6 * 14336 / 4096
    assert per_layer(LLAMA, "megatron-core", "flash2") == pytest.approx(expected)
    split = per_layer(LLAMA, "megatron-core", "flash2", tp=4, sequence_parallel=1.0)
    assert split == pytest.approx(expected / 4)


def test_llama_layer_without_sequence_parallelism() -> None:
    """Norms are whole on every rank: 8 + (4 + 4k/a + 6f/h)/t."""
    expected = 8 + (4 + 4 * 8 / 32 + 6 * 14336 / 4096) / 4
    assert per_layer(LLAMA, "megatron-core", "flash2", tp=4) == pytest.approx(expected)


def state_bytes_per_parameter(stack: str, precision: str, rows: RankBatch) -> float:
    found = load_stack(stack)
    state = training_state(LLAMA, found, found.recipe(precision), "adam", rows)
    plain, experts = shard_parameters(LLAMA, rows).held(rows)
    total = state.parameters + state.gradients + state.optimizer
    return float(np.max(total / (plain + experts)))


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (8, 1), (8, 4)])
def test_distributed_optimizer_keeps_6_plus_12_over_dp(dp: int, cp: int) -> None:
    """arXiv 2411.06465 and Megatron-LM's theoretical_memory_usage.py: 6 + 12/(d c)."""
    rows = batch(
        LLAMA,
        dp=dp,
        cp=cp,
        sharding=Sharding.ZERO1,
        shard_degree=dp * cp,
        state_share=1 / (dp * cp),
    )
    expected = 6 + 12 / (dp * cp)
    assert state_bytes_per_parameter("megatron-core", "bf16", rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(Sharding.NONE, 120), (Sharding.ZERO1, 31.4), (Sharding.ZERO2, 16.6), (Sharding.ZERO3, 1.88)],
)
def test_zero_table(stage: Sharding, gigabytes: float) -> None:
    """arXiv 1910.02054 figure 1: 7.5 G parameters on 64 GPUs, K = 12."""
    rows = batch(LLAMA, dp=64.0, sharding=float(stage), shard_degree=64.0, state_share=1 / 64)
    found = state_bytes_per_parameter("megatron-deepspeed", "fp16", rows) * 7.5
    assert found == pytest.approx(gigabytes, rel=0.003)


@pytest.mark.parametrize(("p", "u"), [(4, 2), (8, 3), (16, 4)])
def test_interleaving_factor(p: int, u: int) -> None:
    """Megatron-LM's theoretical_memory_usage.py: 1 + (p-1)/(pu) times 1F1B's p on stage 0."""
    rows = batch(LLAMA, pp=p, vpp=u, micro_batches=4.0 * p)
    assert in_flight(rows, "interleaved")[0] == pytest.approx(p * (1 + (p - 1) / (p * u)))


def test_in_flight_micro_batches_by_schedule() -> None:
    """1F1B keeps min(m, p - i), GPipe all m (arXiv 2104.04473 section 2.2)."""
    rows = replace(batch(LLAMA, pp=4.0, micro_batches=8.0), stage=np.arange(4.0))
    assert in_flight(rows, "1f1b").tolist() == [4, 3, 2, 1]
    assert in_flight(rows, "zb-h1").tolist() == [4, 3, 2, 1]
    assert in_flight(rows, "gpipe").tolist() == [8, 8, 8, 8]
    assert in_flight(replace(rows, micro_batches=np.array([2.0])), "1f1b").tolist() == [2, 2, 2, 1]
