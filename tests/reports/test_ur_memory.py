"""Reports on training state, communication buffers and what an estimate leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.spec.parameters import total_parameters
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.presets import preset
from simulator.units import GIB
from tests.reports.cases import (
    MIB,
    allocated_gib,
    cluster,
    device_gib,
    gpt,
    memory,
    risk,
    run,
    state_bytes,
)


def test_ur_002_what_sharding_does_not_shrink() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/4093: GPT-J-6B, ZeRO-3 fp16, 2 and 4 GPUs, 13 GB."""
    found = [
        memory(run("gpt-j-6b", cluster("A100-SXM-40GB", n), "megatron-deepspeed", 2048,
                   sharding=Sharding.ZERO3, precision="fp16"))
        for n in (2, 4)
    ]  # fmt: skip
    state = [float((f.parameters + f.gradients + f.optimizer)[0]) for f in found]
    floor = [float((f.activations + f.unsharded_units + f.framework)[0]) for f in found]
    assert state[1] == pytest.approx(state[0] / 2, rel=0.01)
    assert floor[1] == pytest.approx(floor[0], rel=0.01)
    assert floor[0] > 0.77 * GIB


def test_ur_008_stages_of_zero_on_a_small_model() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/1302: BERT-Large, 4 GPUs: all stages alike."""
    use = [
        device_gib(run("bert-large", cluster("V100-SXM-32GB", 4), "megatron-deepspeed", 128,
                       sharding=stage, precision="fp16", micro_batch=8))
        for stage in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    ]  # fmt: skip
    assert max(use) / min(use) < 1.2


def test_ur_011_zero_divides_by_data_parallelism_only() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/237: 30-40B, model parallel 8 on 8 x 32 GB: dp 1."""
    model = gpt(60, 7168, 56)

    def laid(n_gpus: int, sharding: Sharding) -> float:
        return risk(run(model, cluster("V100-SXM-32GB", n_gpus), "megatron-deepspeed", 1024, tp=8,
                        precision="fp16", sharding=sharding, recompute=Recompute.FULL))  # fmt: skip

    whole, sharded = (
        state_bytes(run(model, cluster("V100-SXM-32GB", 8), "megatron-deepspeed", 1024, tp=8,
                        precision="fp16", sharding=s))
        for s in (Sharding.NONE, Sharding.ZERO2)
    )  # fmt: skip
    assert sharded == pytest.approx(whole)
    assert laid(32, Sharding.ZERO2) > 0.5  # the reporter needs about 48 for 40B
    assert laid(48, Sharding.ZERO2) < 0.05


def test_ur_013_both_stages_of_llama_2_7b() -> None:
    """github.com/NVIDIA/Megatron-LM/pull/482: 8 x H800, pp 2: 69.1 and 49.8 GB by stage."""
    found = memory(
        run("llama-2-7b", cluster("H100-SXM-80GB", 8), "megatron-core", 4096, pp=2, dp=4,
            micro_batch=2, micro_batches=16, sharding=Sharding.ZERO1)
    ).peak_allocated_bytes  # fmt: skip
    assert found / 1e9 == pytest.approx([69.1, 49.8], rel=0.05)


def test_ur_014_routed_experts_divide_by_expert_parallelism() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/2439: the estimate has to know expert parallelism."""
    model = preset("mixtral-8x7b")
    size = [
        float(memory(run(model, cluster("H100-SXM-80GB", 8), "megatron-core", 4096, ep=ep))
              .parameters[0])
        for ep in (1, 2, 4, 8)
    ]  # fmt: skip
    # What is left when experts go to no share at all: attention, router, norms, embeddings.
    rest = 2 * size[1] - size[0]
    experts = size[0] - rest
    assert size[2:] == pytest.approx([rest + experts / 4, rest + experts / 8], rel=1e-6)
    assert experts / size[0] > 0.9


@pytest.mark.parametrize(("sharding", "per_parameter"), [("NONE", 18.0), ("ZERO1", 6 + 12 / 8)])
def test_ur_019_bytes_per_parameter(sharding: str, per_parameter: float) -> None:
    """github.com/NVIDIA/Megatron-LM/issues/654: 18 with fp32 gradients, 6 + 12/dp distributed."""
    layout = run("llama-2-7b", cluster("H100-SXM-80GB", 8), "megatron-core", 512,
                 sharding=Sharding[sharding])  # fmt: skip
    count = total_parameters(preset("llama-2-7b"))
    assert state_bytes(layout)[0] == pytest.approx(per_parameter * count, rel=0.002)


def test_ur_020_more_than_the_states() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/188: 2.35B in fp16: 35.0 GiB of states, 37.9 seen."""
    model = gpt(31, 2432, 32)
    layout = run(model, cluster("A100-SXM-80GB", 2), "megatron-deepspeed", 1024, precision="fp16")
    per_parameter = state_bytes(layout)[0] / total_parameters(model)
    assert per_parameter * 2.35e9 / GIB == pytest.approx(35.0, rel=0.005)
    assert device_gib(layout) > 37.9


def test_ur_025_one_total_two_splits() -> None:
    """github.com/stanford-cs336/lectures/issues/3: 4+4+8 and 2+2+12 are both 16 bytes."""
    splits = []
    for stack, precision in (("composer-fsdp", "fp32"), ("megatron-deepspeed", "fp16")):
        layout = run("llama-2-7b", cluster("H100-SXM-80GB", 2), stack, 512, precision=precision)
        found, count = memory(layout), total_parameters(preset("llama-2-7b"))
        parts = (found.parameters, found.gradients, found.optimizer)
        splits.append([float(p[0]) / count for p in parts])
    assert splits[0] == pytest.approx([4, 4, 8], rel=0.002)
    assert splits[1] == pytest.approx([2, 2, 12], rel=0.002)


def test_ur_034_in_flight_micro_batches_follow_the_schedule() -> None:
    """github.com/alpa-projects/alpa/issues/684: one copy per micro-batch in flight."""
    for count in (2, 8):
        layout = run("llama-2-7b", cluster("A100-SXM-80GB", 4), "megatron-core", 2048, pp=4,
                     micro_batches=count)  # fmt: skip
        assert memory(layout).in_flight.tolist() == [min(4 - stage, count) for stage in range(4)]


def test_ur_035_norms_are_replicated_over_tensor_parallelism() -> None:
    """github.com/cli99/llm-analysis/issues/27: only matrices and embeddings divide by tp."""
    model = preset("llama-2-7b")
    norms = model.hidden * (2 * model.layers + 1)
    found = memory(run(model, cluster("H100-SXM-80GB", 8), "megatron-core", 512, tp=4))
    count = total_parameters(model)
    assert found.parameters[0] / 2 == pytest.approx((count - norms) / 4 + norms, rel=1e-6)


def test_ur_052_parameters_gradients_and_their_shards() -> None:
    """github.com/facebookresearch/fairscale/issues/627: fp32: P, then 2P; sharded on two: P/2."""
    model = gpt(48, 1600, 25, vocab=50257)
    size = 4.0 * total_parameters(model)
    alone = memory(run(model, cluster("V100-SXM-32GB", 1), "gpumix", 128, precision="fp32"))
    halved = memory(run(model, cluster("V100-SXM-32GB", 2), "gpumix", 128, precision="fp32",
                        sharding=Sharding.ZERO3))  # fmt: skip
    assert alone.parameters[0] == pytest.approx(size, rel=0.001)
    assert (alone.parameters + alone.gradients)[0] == pytest.approx(2 * size, rel=0.001)
    assert halved.parameters[0] == pytest.approx(size / 2, rel=0.001)
    # Reported MiB beside P = 5480: with gradients 10960, sharded 2739.
    scale = 5480 * MIB / size
    reached = [(alone.parameters + alone.gradients)[0], halved.parameters[0]]
    assert [scale * r / MIB for r in reached] == pytest.approx([10960, 2739], rel=0.002)


def test_ur_053_memory_per_layer_under_zero3() -> None:
    """github.com/Lightning-AI/lightning-thunder/issues/474: Llama-2-13B cut: 1.84 GB per layer."""
    depth = np.array([2, 4, 10, 20])
    found = [
        GIB / 1e9 * allocated_gib(
            run(preset("llama-2-13b").with_layers(int(n)), cluster("H100-SXM-80GB", 8),
                "composer-fsdp", 4096, micro_batch=2, sharding=Sharding.ZERO3, precision="bf16")
        )
        for n in depth
    ]  # fmt: skip
    measured = np.polyfit(depth, [6.27, 9.95, 21.0, 39.41], 1)[0]
    assert np.polyfit(depth, found, 1)[0] == pytest.approx(measured, rel=0.05)


def test_ur_098_gradients_of_accumulation_are_sharded_or_whole() -> None:
    """github.com/meta-pytorch/tnt/pull/1057: 26B on 16 GPUs: 3.25 GB sharded, 52 GB whole."""
    model = preset("llama-2-13b").with_layers(81)
    whole, sharded = (
        memory(run(model, cluster("H100-SXM-80GB", 16), "composer-fsdp", 2048, sharding=s,
                   precision="bf16", micro_batches=4, recompute=Recompute.FULL)).gradients[0]
        for s in (Sharding.NONE, Sharding.ZERO3)
    )  # fmt: skip
    assert whole / sharded == pytest.approx(52 / 3.25, rel=0.01)
