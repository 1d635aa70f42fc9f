"""Reports on what fits where, on pipelines and on mixed batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hardware_db
from simulator.errors import UserError
from simulator.spec.cluster import Cluster, NodeGroup
from simulator.spec.layout import Layout, build_layout, stage_layer_counts
from simulator.spec.plan import Assignment, Plan, Recompute, Sharding
from simulator.spec.stack import load_stack
from simulator.spec.workload import Workload
from tests.reports.cases import cluster, gpt, memory, risk, run, state_bytes, step_s


def test_ur_016_the_heaviest_stage_counts() -> None:
    """github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077: 8 layers as 1/2/2/3: a third above mean."""
    layout = run(gpt(8, 1024, 16), cluster("A100-SXM-80GB", 4), "megatron-core", 512, pp=4,
                 stage_layers=(1, 2, 2, 3), micro_batches=8)  # fmt: skip
    layers = 12 * 1024**2 * 2
    size = memory(layout).parameters
    assert size.argmax() == 3
    assert size[3] - size[2] > 0.99 * layers
    assert size[2] == pytest.approx(size[1])


def test_ur_061_llama_2_13b_needs_four_gpus() -> None:
    """github.com/Alpha-VLLM/LLaMA2-Accessory/issues/26: 2 x 80 GB out of memory, 4 are enough."""
    assert risk(run("llama-2-13b", cluster("A100-SXM-80GB", 2), "megatron-deepspeed", 512, tp=2,
                    recompute=Recompute.FULL)) > 0.95  # fmt: skip
    two, four = (
        risk(run("llama-2-13b", cluster("A100-SXM-80GB", n), "composer-fsdp", 512,
                 sharding=Sharding.ZERO3, precision="amp_bf16", recompute=Recompute.FULL))
        for n in (2, 4)
    )  # fmt: skip
    assert two > 0.95 and four < 0.05


def test_ur_062_llama_2_7b_on_one_gpu() -> None:
    """github.com/young-geng/EasyLM/issues/87: fp32 weights and Adam alone are 84 GB."""
    layout = run("llama-2-7b", cluster("A100-SXM-80GB", 1), "composer-fsdp", 512,
                 precision="fp32", recompute=Recompute.FULL)  # fmt: skip
    found = memory(layout)
    assert (found.parameters + found.optimizer)[0] / 1e9 == pytest.approx(84, rel=0.05)
    assert state_bytes(layout)[0] > 84e9 and risk(layout) > 0.95


def test_ur_064_llama_2_70b_on_one_node() -> None:
    """github.com/epfLLM/Megatron-LLM/issues/52: 8 x A100-80 are too few, 32 are enough."""
    one, two, four = (
        risk(run("llama-2-70b", cluster("A100-SXM-80GB", 8 * pp), "megatron-core", 4096, tp=8,
                 pp=pp, micro_batches=16, sequence_parallel=True, recompute=Recompute.SELECTIVE,
                 sharding=Sharding.ZERO1))
        for pp in (1, 2, 4)
    )  # fmt: skip
    assert one > 0.95 and two > 0.5 and four < 0.05


def test_ur_067_llama_7b_on_40_gb_with_offloading() -> None:
    """github.com/tatsu-lab/stanford_alpaca/issues/280: 8 GPUs work, 4 with batch 2 as well."""
    for n_gpus, size in ((8, 1), (4, 2)):
        layout = run("llama-2-7b", cluster("A100-SXM-40GB", n_gpus), "composer-fsdp", 512,
                     micro_batch=size, sharding=Sharding.ZERO3, precision="amp_bf16",
                     offload="optimizer")  # fmt: skip
        assert risk(layout) < 0.05


def test_ur_103_stages_differ_in_memory() -> None:
    """github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/8: some stages run out first."""
    layout = run("llama-2-13b", cluster("A100-SXM-80GB", 8), "megatron-core", 4096, pp=8,
                 micro_batches=32, schedule="zb-h1")  # fmt: skip
    use = memory(layout).device_bytes
    assert use.argmax() == 0
    assert use.max() / use.min() > 1.3


@pytest.mark.parametrize(("layers", "pp"), [(7, 2), (40, 16)])
def test_ur_104_106_layers_that_do_not_divide(layers: int, pp: int) -> None:
    """github.com/NVIDIA/Megatron-LM/issues/381 and 1303: 7 over 2 is 3 and 4."""
    counts = stage_layer_counts(gpt(layers, 768, 12), Plan(pp=pp))
    assert sum(counts) == layers
    assert set(counts) == {layers // pp, layers // pp + 1}


def test_ur_107_first_and_last_stages_are_heavier() -> None:
    """github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5391: Llama-3-70B, tp 4, pp 8, vpp 5."""
    layout = run("llama-3-70b", cluster("H100-SXM-80GB", 64), "megatron-core", 8192, tp=4, pp=8,
                 vpp=5, schedule="interleaved", micro_batches=16,
                 sequence_parallel=True, sharding=Sharding.ZERO1)  # fmt: skip
    use = memory(layout).device_bytes
    assert use[0] == use.max()
    assert use[-1] > use[-2]


def test_ur_113_degrees_must_multiply_to_the_gpus() -> None:
    """github.com/NVIDIA/Megatron-LM/issues/1000: tp 8 x pp 2 is 16 ranks, not 8."""
    with pytest.raises(UserError, match=r"tp 8 \* pp 2 .* = 16 ranks, the cluster has 8"):
        run("llama-3-70b", cluster("A100-SXM-80GB", 8), "megatron-core", 4096, tp=8, pp=2, dp=1)


def mixed(names: list[str], sizes: list[int], stack: str = "gpumix") -> Layout:
    """One machine with GPUs in order and one micro-batch size for each type."""
    gpus = tuple(hardware_db.gpu(n) for n in names)
    node = replace(hardware_db.node("dgx-a100-80gb"), gpus=tuple(g.name for g in gpus),
                   intra_node=hardware_db.link("pcie4").name)  # fmt: skip
    types = list(dict.fromkeys(g.name for g in gpus))
    entries = tuple(
        Assignment(group=0, gpu=name, micro_batch=size, count=1,
                   replicas=sum(g.name == name for g in gpus))
        for name, size in zip(types, sizes, strict=True)
    )  # fmt: skip
    total = sum(e.micro_batch * e.replicas for e in entries if e.micro_batch and e.replicas)
    plan = Plan(dp=len(gpus), sharding=Sharding.ZERO3, schedule="layered", assignment=entries)
    model, group = gpt(12, 768, 12), (NodeGroup("node", node, gpus, 1),)
    return build_layout(model, Workload(512, total), Cluster(group, None), plan, load_stack(stack))


def test_ur_131_uneven_batches_add_up() -> None:
    """github.com/horovod/horovod/issues/121: 4 x 64 and 4 x 32 sequences are 384."""
    layout = mixed(["rtx-3090"] * 4 + ["t4"] * 4, [64, 32])
    assert layout.workload.global_batch == 384
    assert sum(c.ranks * c.micro_batch * c.micro_batches for c in layout.classes) == 384


def test_ur_133_three_small_gpus_and_a_large_one() -> None:
    """github.com/modelscope/ms-swift/issues/775: batches 2, 2, 2 and 15."""
    layout = mixed(["rtx-3090"] * 3 + ["a100-sxm-80gb"], [2, 15])
    assert [(c.ranks, c.micro_batch) for c in layout.classes] == [(3, 2), (1, 15)]


@pytest.mark.parametrize(
    "names",
    [["rtx-3090", "t4"], ["rtx-3090", "a100-sxm-40gb"], ["a100-sxm-80gb", "v100-sxm-32gb"]],
)
def test_ur_128_134_136_batches_follow_each_gpu(names: list[str]) -> None:
    """github.com/kohya-ss/sd-scripts/issues/1208, tdrussell/diffusion-pipe/issues/466,
    yifding/hetseq/issues/11: each GPU's own batch fills its own memory and takes its own time."""
    even, uneven = mixed(names, [8, 8]), mixed(names, [12, 4])
    full = [memory(layout).device_bytes for layout in (even, uneven)]
    assert full[1][0] > full[0][0] and full[1][1] < full[0][1]
    assert step_s(even) != step_s(uneven)
