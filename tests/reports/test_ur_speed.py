"""Reports on throughput, FLOP counts and what a simulator should say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analysis.predict import layout_risk
from simulator.analysis.uncertainty import layout_time_spread, time_range
from simulator.cost.flops import forward_flops_per_token, model_flops_per_token
from simulator.interop.run_rows import RunRow
from simulator.interop.runs import run_case
from simulator.interop.summaries import summarise
from simulator.interop.validation import predict_run
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.presets import preset
from simulator.units import GIB
from tests.reports.cases import cluster, gpt, memory, run, step_s, tokens_per_s_per_gpu


def test_ur_100_reducing_with_every_micro_batch_costs_time() -> None:
    """github.com/meta-pytorch/torchtune/issues/1275: Llama-3 on 8 x 4 A100: twice the time."""
    gpus = cluster("A100-SXM-80GB", 32, per_node=4, fabric="100gbe")
    every, once = (
        step_s(run("llama-3-8b", gpus, "gpumix", 4096, micro_batches=16, sharding=Sharding.ZERO3,
                   schedule=schedule, recompute=Recompute.FULL))
        for schedule in ("1f1b", "layered")
    )  # fmt: skip
    assert every > 2 * once


def test_ur_112_pipeline_against_tensor_parallelism() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/258: pp 8 wins with many micro-batches."""
    gpus = cluster("A100-SXM-80GB", 8)

    def faster(micro_batches: int) -> float:
        tensor, pipeline = (
            step_s(run(gpt(48, 3072, 32), gpus, "megatron-core", 1024, precision="fp16",
                       micro_batch=2, micro_batches=micro_batches, **degrees))
            for degrees in ({"tp": 8}, {"pp": 8})
        )  # fmt: skip
        return tensor / pipeline

    assert faster(2) < 1.0
    assert faster(256) > 1.15


def test_ur_118_sharding_inside_the_node_on_a_slow_network() -> None:
    """github.com/hiyouga/LlamaFactory/issues/6372: 72B over all nodes is slower than inside one."""
    gpus = cluster("A100-SXM-80GB", 16, fabric="25gbe")
    everywhere, inside = (
        tokens_per_s_per_gpu(run("qwen2.5-72b", gpus, "gpumix", 2048, sharding=Sharding.ZERO3,
                                 shard_degree=degree, recompute=Recompute.FULL))
        for degree in (None, 8)
    )  # fmt: skip
    assert inside > everywhere


def test_ur_119_a_network_that_is_off_shows_in_zero3_first() -> None:
    """github.com/modelscope/ms-swift/issues/1825: 8 x A800 nodes: time grows, ZeRO-2 less so."""

    def rate(n_gpus: int, sharding: Sharding) -> float:
        gpus = cluster("A100-SXM-80GB", n_gpus, fabric="25gbe")
        return tokens_per_s_per_gpu(run("llama-2-13b", gpus, "megatron-deepspeed", 2048,
                                        sharding=sharding, recompute=Recompute.FULL))  # fmt: skip

    assert rate(16, Sharding.ZERO3) < 0.2 * rate(8, Sharding.ZERO3)
    assert rate(96, Sharding.ZERO2) > rate(96, Sharding.ZERO3)


def test_ur_121_the_network_rate_matters() -> None:
    """github.com/pytorch/torchtitan/issues/394: results of another network don't carry over."""
    slow, fast = (
        tokens_per_s_per_gpu(run("llama-3-70b", cluster("A100-SXM-80GB", 64, fabric=fabric),
                                 "torchtitan", 2048, sharding=Sharding.ZERO3,
                                 recompute=Recompute.FULL))
        for fabric in ("100gbe", "hdr-infiniband")
    )  # fmt: skip
    assert slow < 0.95 * fast


def test_ur_122_llama_3_8b_on_eight_h100() -> None:
    """github.com/pytorch/torchtitan/issues/929: compiled: 6,500 tokens/s, up to 47.32 GiB."""
    layout = run("llama-3-8b", cluster("H100-SXM-80GB", 8, link="nvlink4"), "torchtitan", 8192,
                 sharding=Sharding.ZERO3, recompute=Recompute.SELECTIVE, compile=True)  # fmt: skip
    reserved = float(memory(layout).peak_reserved_bytes.max()) / GIB
    assert reserved == pytest.approx(47.32, rel=0.1)
    measured = layout.workload.tokens_per_step / (6500 * layout.n_gpus)
    spread = time_range(step_s(layout), layout_time_spread(layout))
    assert 0.95 * spread.p10 <= measured <= 1.05 * spread.p90
    assert layout_risk(layout).oom_risk.max() < 0.5


def test_ur_145_mfu_over_the_dense_peak() -> None:
    """github.com/foundation-model-stack/fms-fsdp/issues/89: 7B, 9,600 tokens/s: 46 %, not 24 %."""
    flops = float(model_flops_per_token(preset("llama-2-7b"), 4096))
    assert 9600 * flops / 989e12 == pytest.approx(0.46, abs=0.02)


def test_ur_151_mixture_of_experts_counts_active_parameters() -> None:
    """github.com/pytorch/torchtitan/pull/4300: Qwen3-30B-A3B at 8192: 37,578,559,488 per token.

    That count takes 6 FLOPs for norm weights as well; ours counts products only.
    """
    model = preset("qwen3-30b-a3b")
    norms = model.layers * (2 * model.hidden + 2 * model.head_dim) + model.hidden
    assert float(model_flops_per_token(model, 8192)) + 6 * norms == 37_578_559_488


def test_ur_152_gated_mlp_has_three_products() -> None:
    """github.com/bigscience-workshop/Megatron-DeepSpeed/pull/283: 32 b s h^2 a layer, not 24."""

    def per_layer(activation: str) -> float:
        one, two = (
            float(forward_flops_per_token(
                ModelSpec("m", n, 1024, 4096, 16, 16, 64, 1000, activation=activation), 1))
            for n in (1, 2)
        )  # fmt: skip
        return (two - one) / 1024**2

    assert per_layer("swiglu") == pytest.approx(32, rel=0.01)
    assert per_layer("gelu") == pytest.approx(24, rel=0.01)


def test_ur_154_a_window_caps_attention() -> None:
    """github.com/allenai/OLMo-core/issues/475: FLOPs of a sliding window stop growing at it."""
    full = ModelSpec("m", 8, 1024, 4096, 16, 16, 64, 1000)
    windowed = replace(full, window=1024, window_layers=8)

    def growth(model: ModelSpec) -> float:
        long, short = (float(model_flops_per_token(model, s)) for s in (32768, 2048))
        return long - short

    assert growth(windowed) < 0.02 * growth(full)


def test_ur_157_gpu_hours_to_days() -> None:
    """github.com/meta-llama/llama3/issues/91: 1.3 million GPU hours on 24,576 GPUs: 52.9 h."""
    from simulator.analysis.economics import time_to_train_s

    per_gpu = 15e12 / (1.3e6 * 3600)
    assert time_to_train_s(15e12, 24_576 * per_gpu, 1.0) / 3600 == pytest.approx(52.9, abs=0.05)


def test_ur_160_one_gpu_and_a_small_model() -> None:
    """github.com/aliyun/SimAI/issues/166: 12 x 768, s 2048, 8 sequences on a V100S: 680-740 ms."""
    layout = run(gpt(12, 768, 12), cluster("V100-SXM-32GB", 1), "megatron-deepspeed", 2048,
                 micro_batch=8, precision="fp16", recompute=Recompute.FULL,
                 attention="unfused")  # fmt: skip
    assert 0.75 * 680 < 1e3 * step_s(layout) < 1.25 * 740


def test_ur_163_time_comes_from_fits_that_are_named() -> None:
    """github.com/aliyun/SimAI/issues/285: no GPU at hand: rates must not be placeholders."""
    from simulator.analysis.predict import predict
    from simulator.spec.scenario import load_scenario

    found, _, _ = predict(load_scenario("llama-3.1-8b-dgx-h100"), with_suggestions=False)
    assert any("kernel rates" in text for text in found.sources)


ROW = {
    "arch": "llama", "model": "llama-3-8b", "seq_len": "8192", "gpu": "H100-SXM-80GB",
    "n_gpus": "8", "stack": "torchtitan", "sharding": "zero3", "micro_batch": "1",
    "grad_accum": "1", "step_time_s": "1.2",
}  # fmt: skip


def test_ur_169_errors_by_component() -> None:
    """github.com/casys-kaist/LLMServingSim/pull/59: totals may be right while parts cancel."""
    found = predict_run(run_case(RunRow(2, ROW)))
    assert found.seconds is not None and found.step_time_s is not None
    assert sum(found.seconds.values()) == pytest.approx(found.step_time_s.p50, rel=0.05)
    assert found.seconds[found.largest] == max(found.seconds.values())


def test_ur_173_a_distribution_of_errors() -> None:
    """github.com/inference-sim/inference-sim/issues/1271: averages hide errors."""
    found = summarise([0.2, -0.2, 0.05, -0.05])
    assert found.bias == pytest.approx(0.0)
    assert found.mape == pytest.approx(0.125) and found.p90_ape == pytest.approx(0.2)
