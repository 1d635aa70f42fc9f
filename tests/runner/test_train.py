"""A plan is run as it says and measured by rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plans import layout_of, uniform_layout  # noqa: E402

from real_runner.batches import micro_batches  # noqa: E402
from real_runner.emulate import Slowdown  # noqa: E402
from real_runner.launch import RankContext, RunFailure, launch  # noqa: E402
from real_runner.train import RunSettings, rank_work, run_plan, train_rank  # noqa: E402
from simulator.errors import UserError  # noqa: E402
from simulator.spec.parameters import total_parameters  # noqa: E402

MIXED = [
    {"micro_batch": 2, "count": 2, "state_share": 0.75},
    {"micro_batch": 1, "count": 1, "state_share": 0.25},
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products run faster on one thread, and other tests use the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(settings: RunSettings | None = None, count: int = 2, **plan: Any) -> dict[str, Any]:
    """A run of one rank in this process."""
    layout = layout_of([{"micro_batch": 2, "count": count}], global_batch=2 * count, **plan)
    return train_rank(RankContext(0, 1, CPU), layout, settings or RunSettings(steps=3, warmup=1))


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """An uneven plan on two ranks, the second slowed four times."""
    layout = layout_of(MIXED, global_batch=5)
    settings = RunSettings(steps=6, device="cpu", threads=1, timeout_s=60, slowdown=(1.0, 4.0))
    result = run_plan(layout, settings)
    assert result is not None
    return result


def test_ranks_do_what_the_plan_says(measured: dict[str, Any]) -> None:
    done = [(r["micro_batch"], r["micro_batches"], r["first"]) for r in measured["ranks"]]
    assert done == [(2, 2, 0), (1, 1, 4)]
    tokens = 5 * 32 / measured["step_time_s"]
    assert measured["tokens_per_s"] == pytest.approx(tokens)


def test_state_is_held_by_share(measured: dict[str, Any]) -> None:
    model = layout_of(MIXED, global_batch=5).model
    held = [r["state_bytes"] for r in measured["ranks"]]
    # fp32 parameter and gradient shards; the moments come with the first step.
    assert sum(held) == pytest.approx(8 * total_parameters(model), rel=0.01)
    assert held[0] / sum(held) == pytest.approx(0.75, abs=0.01)


def test_losses_fall_and_are_those_of_one_process(measured: dict[str, Any]) -> None:
    layout = layout_of([{"micro_batch": 5, "count": 1}], global_batch=5)
    one = train_rank(RankContext(0, 1, CPU), layout, RunSettings(steps=6))
    assert measured["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert measured["losses"][-1] < measured["losses"][0]


def test_offloaded_inputs_stop_memory_growing_with_the_count() -> None:
    kept = [alone(count=n) for n in (7, 11)]
    offloaded = [alone(count=n, offload="activations") for n in (7, 11)]
    boundary = 2 * 32 * 64 * 4
    growth, none = (
        (runs[1]["peak_allocated_bytes"] - runs[0]["peak_allocated_bytes"]) / 4
        for runs in (kept, offloaded)
    )
    # Kept: the inputs of 3 layers and a gradient for each further micro-batch (and its token ids).
    assert growth == pytest.approx(4 * boundary, rel=0.05)
    assert none < 0.1 * boundary
    assert offloaded[1]["losses"] == pytest.approx(kept[1]["losses"], rel=1e-5)


def test_recompute_needs_less_memory() -> None:
    full, none = alone(), alone(recompute="none")
    assert full["peak_allocated_bytes"] < 0.9 * none["peak_allocated_bytes"]
    assert full["losses"] == pytest.approx(none["losses"], rel=1e-5)


def test_a_memory_cap_ends_the_run_as_running_out() -> None:
    peak = alone()["peak_allocated_bytes"]
    alone(RunSettings(steps=1, warmup=0, memory_bytes=(peak,)))
    layout = layout_of([{"micro_batch": 2, "count": 2}], global_batch=4)
    settings = RunSettings(steps=1, device="cpu", memory_bytes=(peak - 1,), timeout_s=60)
    with pytest.raises(RunFailure, match="oom") as caught:
        run_plan(layout, settings)
    assert caught.value.exit_code == 3 and "largest" in caught.value.memory


def test_slowdown_multiplies_a_units_time() -> None:
    slow = Slowdown(3.0, CPU)
    start = time.perf_counter()
    slow.begin()
    time.sleep(0.05)
    slow.end(1, None)
    assert time.perf_counter() - start >= 3 * 0.05


def test_a_slowed_rank_takes_longer_steps() -> None:
    plain = alone(RunSettings(steps=9), sequence_length=128)
    slow = alone(RunSettings(steps=9, slowdown=(8.0,)), sequence_length=128)
    # Far from 8: other processes may disturb either run.
    assert min(slow["step_times_s"]) > 2 * min(plain["step_times_s"])
    assert slow["losses"] == plain["losses"]


def test_what_cannot_be_run_is_named() -> None:
    layout = layout_of(MIXED, global_batch=5)
    layout = replace(layout, plan=replace(layout.plan, optimizer="lion", precision="fp8"))
    with pytest.raises(UserError, match="precision fp8, optimizer lion"):
        run_plan(layout, RunSettings())


def test_samples_do_not_depend_on_the_split() -> None:
    whole = micro_batches(7, (4,), 16, 50, CPU)
    parts = micro_batches(7, (1, 3), 16, 50, CPU)
    assert torch.equal(whole[0][0], torch.cat([ids for ids, _ in parts]))
    assert torch.equal(whole[0][0][:, 1:], whole[0][1][:, :-1])


def test_rank_work_covers_the_global_batch() -> None:
    work = rank_work(layout_of(MIXED, global_batch=5))
    assert sum(w.micro_batch * w.micro_batches for w in work) == 5
    assert sum(w.state_share for w in work) == pytest.approx(1.0)


NATIVE: dict[str, dict[str, Any]] = {
    "fsdp": {"sharding": "zero3"},
    "tp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "schedule": "1f1b"},
}


def train_native(context: RankContext, names: list[str]) -> dict[str, dict[str, Any]]:
    """Each plan on this rank, one after the other."""
    layouts = {name: uniform_layout(2, global_batch=4, **NATIVE[name]) for name in names}
    return {n: train_rank(context, each, RunSettings(steps=3)) for n, each in layouts.items()}


def test_standard_plans_train_alike_and_hold_their_part() -> None:
    ranks = launch(train_native, (list(NATIVE),), world=2, threads=1, timeout_s=60)
    layout = layout_of([{"micro_batch": 4, "count": 1}], global_batch=4)
    one = train_rank(RankContext(0, 1, CPU), layout, RunSettings(steps=3))
    parameters = total_parameters(layout.model)
    for name in NATIVE:
        assert ranks[0][name]["losses"] == pytest.approx(one["losses"], rel=1e-4), name
        held = sum(rank[name]["state_bytes"] for rank in ranks) / 4
        # fp32 parameters, spread over the ranks; tensor parallelism copies the norms.
        assert held == pytest.approx(parameters, rel=0.02), name
        # Parameters, gradients and both moments are there after a step.
        peak = sum(rank[name]["peak_allocated_bytes"] for rank in ranks)
        assert peak > 16 * parameters, name


def test_a_standard_plan_runs_through_the_launcher() -> None:
    layout = uniform_layout(2, global_batch=4, sharding="zero3")
    measured = run_plan(layout, RunSettings(steps=2, device="cpu", threads=1, timeout_s=60))
    assert measured is not None and measured["world_size"] == 2
    assert [r["first"] for r in measured["ranks"]] == [0, 2]


def test_a_stack_that_the_runner_is_not_is_refused() -> None:
    layout = uniform_layout(2, global_batch=4, stack="megatron-core", tp=2)
    with pytest.raises(UserError, match="stack megatron-core"):
        run_plan(layout, RunSettings())


def test_runs_as_ranks_of_torchrun() -> None:
    script = Path(__file__).with_name("torchrun_job.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    assert [r["state_bytes"] > 0 for r in measured["ranks"]] == [True, False]
    assert measured["tokens_per_s"] == pytest.approx(3 * 32 / measured["step_time_s"])
