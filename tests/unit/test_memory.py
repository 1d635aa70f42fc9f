"""The memory estimator, part by part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.cost.batch import RankBatch
from simulator.cost.memory import (
    MOMENTS,
    MemoryBreakdown,
    MemoryOptions,
    layout_memory,
    rank_memory,
)
from simulator.cost.shards import shard_parameters
from simulator.cost.state import moment_share
from simulator.errors import UserError
from simulator.spec.layout import build_layout
from simulator.spec.model import ModelSpec, MoeSpec
from simulator.spec.plan import Recompute
from simulator.spec.scenario import load_scenario
from simulator.spec.stack import load_stack

LLAMA = ModelSpec(
    "llama", layers=16, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)
MIXTRAL = replace(LLAMA, name="moe", moe=MoeSpec(experts=8, top_k=2, ffn=14336))


def rows(model: ModelSpec, **over: float) -> RankBatch:
    """One rank that holds the whole model unless told otherwise."""
    row = dict.fromkeys(RankBatch.__dataclass_fields__, 1.0)
    row |= dict.fromkeys(
        ("stage", "sequence_parallel", "sharding", "recompute", "recompute_layers"), 0.0
    )
    row |= {
        "sequence_length": 4096.0,
        "dense_layers": float(model.layers - model.moe_layers),
        "moe_layers": float(model.moe_layers),
    }
    return RankBatch(**{k: np.array([float(v)]) for k, v in (row | over).items()})


def memory(
    model: ModelSpec,
    stack: str = "megatron-core",
    options: MemoryOptions | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    **over: float,
) -> MemoryBreakdown:
    found = load_stack(stack)
    recipe = found.recipe(precision or next(iter(found.recipes)))
    batch = rows(model, **over)
    return rank_memory(model, found, recipe, optimizer, batch, options or MemoryOptions())


def test_components_sum_to_the_three_peaks() -> None:
    found = memory(LLAMA, "torchtitan", sharding=3.0, dp=8.0, state_share=1 / 8)
    parts = {name: column[0] for name, column in found.components().items()}
    framework, fragmentation = parts.pop("framework"), parts.pop("fragmentation")
    assert sum(parts.values()) == pytest.approx(found.peak_allocated_bytes[0])
    assert found.peak_reserved_bytes[0] == pytest.approx(sum(parts.values()) + fragmentation)
    assert found.device_bytes[0] == pytest.approx(found.peak_reserved_bytes[0] + framework)


def test_big_vocabulary_peaks_at_the_loss() -> None:
    found = memory(LLAMA, "torchtitan", micro_batch=4.0, sharding=3.0, dp=8.0, state_share=1 / 8)
    assert MOMENTS[found.peak_moment[0]] == "loss"
    # 12 bytes per logit: fp32 log-softmax and two fp32 gradients.
    assert found.logits[0] == pytest.approx(12 * 4 * 4096 * 128256)


def test_full_recompute_without_a_head_peaks_in_backward() -> None:
    full = {"recompute": float(Recompute.FULL), "recompute_layers": 16.0}
    found = memory(LLAMA, has_head=0.0, pp=2.0, micro_batches=4.0, **full)
    assert MOMENTS[found.peak_moment[0]] == "backward"
    assert found.recompute_working_set[0] > 0


def test_untied_head_makes_the_last_stage_heavier_by_its_state() -> None:
    """18 bytes for each of the head's parameters and its final norm's."""
    with_head, without = (memory(LLAMA, has_head=h, has_embedding=0.0) for h in (1.0, 0.0))
    grown = sum(
        getattr(with_head, part)[0] - getattr(without, part)[0]
        for part in ("parameters", "gradients", "optimizer")
    )
    assert grown == pytest.approx(18 * (128256 * 4096 + 4096))


def test_tied_embedding_is_copied_to_the_last_stage_of_a_pipeline() -> None:
    tied = replace(LLAMA, tied_embeddings=True)
    last = {"has_embedding": 0.0, "pp": 4.0, "stage": 3.0}
    assert memory(tied, **last).parameters[0] == memory(LLAMA, **last).parameters[0]
    assert memory(tied).parameters[0] < memory(LLAMA).parameters[0]


def test_early_stages_keep_more_micro_batches() -> None:
    batch = replace(rows(LLAMA, pp=4.0, micro_batches=8.0, has_head=0.0), stage=np.arange(4.0))
    stack = load_stack("megatron-core")
    found = rank_memory(LLAMA, stack, stack.recipe("bf16"), "adam", batch)
    assert found.in_flight.tolist() == [4, 3, 2, 1]
    assert np.all(np.diff(found.activations) < 0)


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("adamw", 8), ("lion", 4), ("sgd", 0), ("adamw_8bit", 2)]
)
def test_optimizer_state_by_optimizer(optimizer: str, moments: int) -> None:
    """fp32 master weights and the optimiser's moments, per parameter."""
    found = memory(LLAMA, optimizer=optimizer)
    plain, _ = shard_parameters(LLAMA, rows(LLAMA)).held(rows(LLAMA))
    assert found.optimizer[0] == pytest.approx((4 + moments) * plain[0])


def test_unknown_optimizer_names_the_known() -> None:
    with pytest.raises(UserError, match="adamw"):
        moment_share("adamww")


def test_uneven_shares_hold_their_part_of_the_state() -> None:
    """GPUMix: 16 bytes per parameter times the rank's share."""
    shares = np.array([0.5, 0.3, 0.2, 0.0])
    batch = replace(rows(LLAMA, sharding=3.0, dp=4.0), state_share=shares)
    stack = load_stack("gpumix")
    found = rank_memory(LLAMA, stack, stack.recipe("bf16"), "adamw", batch)
    state = found.parameters + found.gradients + found.optimizer
    plain, _ = shard_parameters(LLAMA, batch).held(batch)
    assert state == pytest.approx(16 * plain[0] * shares)


def test_layered_accumulation_keeps_boundaries_of_all_micro_batches() -> None:
    full = {"recompute": float(Recompute.FULL), "recompute_layers": 16.0, "sharding": 3.0}
    options = MemoryOptions(schedule="layered")
    one, four = (
        memory(LLAMA, "gpumix", options, micro_batches=m, **full).activations[0] for m in (1.0, 4.0)
    )
    boundary = 2 * 4096 * 4096
    # 16 layer inputs, one boundary's gradient and the token ids, for three more micro-batches.
    assert four - one == pytest.approx(3 * (17 * boundary + 8 * 4096))


def test_offload_takes_state_off_the_device() -> None:
    kept = memory(LLAMA, "gpumix", sharding=3.0)
    no_optimizer = memory(LLAMA, "gpumix", MemoryOptions(offload="optimizer"), sharding=3.0)
    no_state = memory(LLAMA, "gpumix", MemoryOptions(offload="state"), sharding=3.0)
    assert no_optimizer.optimizer[0] == 0 and no_optimizer.parameters[0] == kept.parameters[0]
    assert no_state.parameters[0] == no_state.gradients[0] == no_state.optimizer[0] == 0
    assert no_state.unsharded_units[0] > 0


def test_offloaded_activations_leave_two_layers() -> None:
    options = MemoryOptions(offload="activations", schedule="layered")
    full = {"recompute": 2.0, "recompute_layers": 16.0, "sharding": 3.0, "micro_batches": 8.0}
    shipped = memory(LLAMA, "gpumix", options, **full).activations[0]
    assert (
        shipped < memory(LLAMA, "gpumix", MemoryOptions(schedule="layered"), **full).activations[0]
    )


def test_deeper_prefetch_gathers_more_units() -> None:
    stack = load_stack("composer-fsdp")
    batch = rows(LLAMA, sharding=3.0, dp=8.0, state_share=1 / 8)
    recipe = stack.recipe("amp_bf16")
    units = []
    for ahead in (0, 1, 2):
        deeper = replace(stack, overlap=replace(stack.overlap, fsdp_prefetch=ahead))
        units.append(rank_memory(LLAMA, deeper, recipe, "adamw", batch).unsharded_units[0])
    layer = shard_parameters(LLAMA, batch).dense[0][0]
    assert np.diff(units) == pytest.approx([2 * layer, 2 * layer])


def test_sharded_root_stays_gathered() -> None:
    """Embedding and head of 128k words in two bytes, beside the current layer."""
    found = memory(LLAMA, "torchtitan", sharding=3.0, dp=8.0, state_share=1 / 8)
    assert found.unsharded_units[0] > 2 * 2 * 128256 * 4096


def test_replicated_parameters_copy_gradients_into_buckets() -> None:
    """DistributedDataParallel without bucket views holds every gradient twice."""
    one, two = (memory(LLAMA, "torchtitan", dp=d, micro_batches=2.0) for d in (1.0, 2.0))
    moment = MOMENTS.index("backward")
    grown = two.allocated_by_moment[moment, 0] - one.allocated_by_moment[moment, 0]
    assert grown == pytest.approx(one.gradients[0])


def test_accumulated_gradients_live_through_later_micro_batches() -> None:
    shards = {"sharding": 3.0, "dp": 8.0, "state_share": 1 / 8}
    assert memory(LLAMA, "torchtitan", micro_batches=1.0, **shards).gradients[0] == 0
    assert memory(LLAMA, "torchtitan", micro_batches=2.0, **shards).gradients[0] > 0


def test_zero3_of_deepspeed_keeps_live_parameters() -> None:
    found = memory(LLAMA, "megatron-deepspeed", sharding=3.0, dp=64.0, state_share=1 / 64)
    assert found.unsharded_units[0] >= 2 * 1e9


def test_expert_parallelism_divides_experts_and_imbalance_adds_tokens() -> None:
    one, eight = (memory(MIXTRAL, ep=e, dp=8.0) for e in (1.0, 8.0))
    assert eight.parameters[0] < 0.25 * one.parameters[0]
    skewed = memory(MIXTRAL, options=MemoryOptions(expert_imbalance=1.5), ep=8.0, dp=8.0)
    assert skewed.activations[0] > eight.activations[0]
    assert skewed.parameters[0] == eight.parameters[0]


def test_compile_drops_what_eager_op_policy_keeps() -> None:
    """One hidden-wide tensor per layer (the MLP's output) that no backward operator reads."""
    policy = {"recompute": float(Recompute.SELECTIVE), "sharding": 3.0, "dp": 64.0}
    policy |= {"state_share": 1 / 64}
    eager = memory(LLAMA, "torchtitan", **policy).activations[0]
    compiled = memory(LLAMA, "torchtitan", MemoryOptions(compiled=True), **policy).activations[0]
    assert eager - compiled == pytest.approx(16 * 2 * 4096 * 4096)


def test_fp8_keeps_one_byte_operands() -> None:
    assert memory(LLAMA, precision="fp8").activations[0] < memory(LLAMA).activations[0]


def test_communicators_are_counted_by_dimension() -> None:
    alone = memory(LLAMA).framework[0]
    spread = memory(LLAMA, tp=2.0, dp=4.0, cp=2.0).framework[0]
    assert spread - alone == pytest.approx(
        3 * load_stack("megatron-core").framework.communicator_bytes
    )


def test_expandable_segments_do_not_splinter() -> None:
    options = MemoryOptions(expandable_segments=True)
    assert memory(LLAMA, options=options).fragmentation[0] < memory(LLAMA).fragmentation[0]


@pytest.mark.parametrize(
    "name", ["gpt3-175b-64-a100", "llama-3.1-8b-dgx-h100", "cephalo-small-gpt-2.7b"]
)
def test_layout_memory_names_each_class(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.plan is not None
    layout = build_layout(
        scenario.model, scenario.workload, scenario.cluster, scenario.plan, scenario.stack
    )
    classes = layout_memory(layout)
    assert [c.rank_class for c in classes] == list(range(len(layout.classes)))
    for found in classes:
        assert found.peak_allocated_bytes == max(found.allocated_by_moment.values())
        assert found.device_bytes < found.usable_bytes
