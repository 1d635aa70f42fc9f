"""Prices of a layout's pieces: what binds a layer, what sharding reduces, what offload costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulator.cost.calibration import Tuning, tuned_network, tuning
from simulator.cost.collectives import network
from simulator.cost.pricing import price_layout
from simulator.cost.times import ClassTimes
from simulator.spec.layout import build_layout
from simulator.spec.plan import Sharding
from simulator.spec.scenario import load_scenario, scenario_from_mapping, scenario_with


def priced(name: str, tuned: Tuning | None = None, **changes: Any) -> tuple[ClassTimes, ...]:
    s = load_scenario(name)
    assert s.plan is not None
    layout = build_layout(s.model, s.workload, s.cluster, replace(s.plan, **changes), s.stack)
    return price_layout(layout, None if tuned is None else lambda _: tuned)


def test_small_layers_are_bound_by_the_host() -> None:
    s = scenario_from_mapping({
        "model": "gpt2-small",
        "workload": {"sequence_length": 128, "global_batch": 8},
        "cluster": {"groups": [{"node": "dgx-h100", "count": 1}]},
        "stack": "megatron-deepspeed",
        "plan": {"micro_batch": 1},
    })  # fmt: skip
    assert s.plan is not None
    layout = build_layout(s.model, s.workload, s.cluster, s.plan, s.stack)
    forward = price_layout(layout)[0].chunks[0].forward
    assert forward.dispatch > forward.compute
    assert priced("gpt3-175b-64-a100")[3].chunks[0].forward.dispatch == 0.0


def test_zero2_reduces_once_per_run_of_micro_batches() -> None:
    """Interleaved chunks run pp micro-batches in a row: 16 of them are one reduction at pp 16."""
    once = priced("llama-3.1-405b-16k-h100", sharding=Sharding.ZERO1)[3].chunks[0].grad_reduce
    runs = priced("llama-3.1-405b-16k-h100", sharding=Sharding.ZERO2)[3].chunks[0].grad_reduce
    assert runs == pytest.approx(once)


def test_factors_scale_what_they_name() -> None:
    plain = priced("gpt3-175b-64-a100", Tuning())[3].chunks[0]
    slower = priced("gpt3-175b-64-a100", Tuning(gemm=1.1, attention=1.1, memory=1.1))[3].chunks[0]
    assert slower.forward.compute == pytest.approx(1.1 * float(plain.forward.compute))
    assert slower.forward.tp == pytest.approx(float(plain.forward.tp))
    linked = priced("gpt3-175b-64-a100", Tuning(network=2.0))[3].chunks[0]
    assert linked.forward.tp == pytest.approx(2.0 * float(plain.forward.tp), rel=1e-6)


def test_offload_costs_only_what_the_link_cannot_hide() -> None:
    s = load_scenario("llama-3.1-70b-mixed-even")
    assert s.plan is not None
    slow = scenario_with(s, {"plan.offload": "activations"})
    gpus = {
        c.gpu.name: c.gpu
        for c in build_layout(s.model, s.workload, s.cluster, s.plan, s.stack).classes
    }
    assert slow.plan is not None and len(gpus) == 2
    hidden = priced("llama-3.1-70b-mixed-even", offload="activations")[0].units
    plain = priced("llama-3.1-70b-mixed-even", offload="none")[0].units
    layer = [u.name for u in plain].index("dense layer")
    assert hidden[layer].forward.total == pytest.approx(float(plain[layer].forward.total))


def test_uneven_shares_make_collectives_dearer() -> None:
    s = load_scenario("llama-3.1-70b-mixed-gpumix")
    assert s.plan is not None
    first, second = s.plan.assignment
    uneven = (replace(first, state_share=0.005), replace(second, state_share=1 / 32 - 0.005))
    even = priced("llama-3.1-70b-mixed-gpumix")[0].units[1]
    dear = priced("llama-3.1-70b-mixed-gpumix", assignment=uneven)[0].units[1]
    assert dear.gather_forward > even.gather_forward


def test_tuned_network_slows_links_apart() -> None:
    s = load_scenario("llama-3.1-405b-16k-h100")
    group = s.cluster.groups[0]
    net = network(group.node, s.cluster.fabric, group.gpus[0])
    slower = tuned_network(net, Tuning(network=2.0, fabric=4.0))
    assert slower.intra.collective_bytes_per_s == pytest.approx(
        net.intra.collective_bytes_per_s / 2
    )
    assert net.inter is not None and slower.inter is not None
    assert slower.inter.efficiency == pytest.approx(net.inter.efficiency / 4)


def test_calibration_falls_back_from_gpu_to_stack_to_the_others() -> None:
    s = load_scenario("llama-3.1-405b-16k-h100")
    gpu = s.cluster.groups[0].gpus[0]
    cells = {"parameters": {"gemm": {"value": 1.5}}}
    own = {"groups": {f"megatron-core/{gpu.name}": cells, "megatron-core": {"parameters": {}}}}
    assert tuning("megatron-core", gpu, own).gemm == 1.5
    pooled = {"groups": {"megatron-core": cells}}
    assert tuning("megatron-core", gpu, pooled).basis == "calibrated (megatron-core)"
    other = {"groups": {"any": cells}}
    assert tuning("gpumix", gpu, other).gemm == 1.5
    assert tuning("gpumix", gpu, {}).basis == "prior"
