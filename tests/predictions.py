"""A made-up answer with two GPU types and two stages, and the step that goes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.analysis.prediction import ClassPrediction, Prediction, Range, Suggestion
from simulator.cost.times import CATEGORIES
from simulator.evaluate.engine import simulate_step
from simulator.evaluate.timeline import Timeline
from simulator.graph.build import build_step
from simulator.units import GIB
from tests.synthetic import chunk, class_times, layout


def class_prediction(index: int, gpu: str, stage: int, **changes: Any) -> ClassPrediction:
    """A class that is 50 GiB full of 80 and computes three quarters of a step of 2 s."""
    time_s = dict.fromkeys(CATEGORIES, 0.0) | {"compute": 1.5, "pp": 0.1, "bubble": 0.4}
    base = ClassPrediction(
        index=index, gpu=gpu, group=f"group of {gpu}", stage=stage, ranks=4, layers=16,
        micro_batch=1, micro_batches=8, state_share=0.25,
        memory_bytes={"parameters": 10.0 * GIB, "optimizer": 20.0 * GIB, "activations": 18.0 * GIB,
                      "framework": 2.0 * GIB},
        peak_moment="backward", peak_allocated_bytes=48.0 * GIB, peak_reserved_bytes=48.0 * GIB,
        device_bytes=50.0 * GIB, device_p10_bytes=47.0 * GIB, device_p90_bytes=53.0 * GIB,
        usable_bytes=80.0 * GIB, oom_risk=0.001, eighty_percent_rule=True, time_s=time_s,
    )  # fmt: skip
    return replace(base, **changes)


def prediction(**changes: Any) -> Prediction:
    """Two stages on two GPU types; every number is round."""
    classes = (
        class_prediction(0, "a100", 0),
        class_prediction(1, "h100", 1, device_bytes=60.0 * GIB, oom_risk=0.02),
    )
    base = Prediction(
        title="A made-up run", model="toy", parameters=7_000_000_000, n_gpus=8,
        gpus={"a100": 4, "h100": 4}, stack="megatron-core", evaluator="engine", verdict="fits",
        oom_risk=0.02, accepted_risk=0.05, fullest=1, step_time_s=Range(1.8, 2.0, 2.3),
        tokens_per_s=Range(870.0, 1000.0, 1100.0), tokens_per_step=2000, mfu=0.41, hfu=0.5,
        flops_convention="full attention matrix", time_to_train_s=86400.0,
        shares={name: v / 2.0 for name, v in classes[0].time_s.items()}, classes=classes,
        suggestions=(Suggestion("micro_batch 2", 0.12, 1120.0, 0.04, 0.9),),
        plan={"tp": 1, "pp": 2}, defaults=("plan.tp = 1",), warnings=("a warning",),
        assumptions=("an assumption",), sources=("a source",),
    )  # fmt: skip
    return replace(base, **changes)


def timeline(pipelines: int = 1, micro_batches: int = 8) -> Timeline:
    """A 1F1B step of two stages."""
    plan = layout(micro_batches, pp=2, pipelines=pipelines)
    times = [
        class_times([chunk(0.1, 0.1, 0.05)], send=0.01, optimizer=0.02, overhead=0.01)
        for _ in plan.classes
    ]
    found = simulate_step(build_step(plan, times)).timeline
    assert found is not None
    return found


def uniform_prediction(n_classes: int, **changes: Any) -> Prediction:
    """A pipeline of ``n_classes`` stages, later ones fuller."""
    classes = tuple(
        class_prediction(i, "h100", i, device_bytes=(40.0 + i) * GIB) for i in range(n_classes)
    )
    return prediction(
        classes=classes, gpus={"h100": 4 * n_classes}, fullest=n_classes - 1, **changes
    )
