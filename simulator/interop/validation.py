"""Predicted against measured: one prediction for each measured run, and how far off they are.

Errors are relative: (predicted - measured) / measured. ``mape`` is their mean absolute value,
``bias`` their median; all are fractions (0.05 is 5 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.analysis.predict import Evaluation, evaluate, layout_risk
from simulator.analysis.prediction import Range
from simulator.analysis.uncertainty import layout_time_spread, time_range
from simulator.cost.flops import model_flops_per_token
from simulator.cost.memory import layout_memory
from simulator.cost.pricing import price_layout
from simulator.interop.runs import RunCase
from simulator.spec.layout import Layout, build_layout
from simulator.spec.workload import Workload


@dataclass(frozen=True)
class RunPrediction:
    """One row: what was measured, what is predicted, and why not where it can't be.

    Times in seconds, memory in GiB as the file format has them; ``largest`` is the category of
    time that takes most of the predicted step.
    """

    case: RunCase
    step_time_s: Range | None = None
    tokens_per_s_per_gpu: float | None = None
    measured_step_time_s: float | None = None
    peak_allocated_gib: Range | None = None
    peak_reserved_gib: Range | None = None
    oom_risk: float | None = None
    eighty_percent_rule: bool | None = None
    largest: str = ""
    seconds: dict[str, float] | None = None

    @property
    def time_error(self) -> float | None:
        """Relative error of the median step time."""
        if self.step_time_s is None or self.measured_step_time_s is None:
            return None
        return self.step_time_s.p50 / self.measured_step_time_s - 1.0

    def memory_error(self, column: str) -> float | None:
        """Relative error of ``peak_allocated_gib`` or ``peak_reserved_gib``."""
        predicted: Range | None = getattr(self, column)
        measured = self.case.row.number(column)
        if predicted is None or measured is None:
            return None
        return predicted.p50 / measured - 1.0

    @property
    def failed(self) -> bool | None:
        """Whether the run ran out of memory; None where the outcome isn't known."""
        outcome = self.case.row.text("outcome").lower()
        return {"ok": False, "oom": True, "oom_or_failed": True}.get(outcome)


def predict_run(case: RunCase) -> RunPrediction:
    """Predict one row, choosing the fastest candidate that fits where the row leaves a choice."""
    if case.layout is None:
        return RunPrediction(case)
    layouts = case.candidates or (case.layout,)
    tried = [(_evaluate(layout, case.last_fraction), layout) for layout in layouts]
    risks = [float(layout_risk(la).oom_risk.max()) for _, la in tried]
    best = min(
        range(len(tried)), key=lambda i: (risks[i] > 0.5, _rate_key(tried[i][0], tried[i][1]))
    )
    return _predicted(case, *tried[best])


def _rate_key(evaluation: Evaluation, layout: Layout) -> float:
    return evaluation.step_time_s / layout.workload.tokens_per_step


def _evaluate(layout: Layout, last_fraction: float) -> Evaluation:
    """Step time; a smaller last micro-batch is a step between one count and the next."""
    whole = evaluate(layout, price_layout(layout), "closed form")
    count = layout.classes[0].micro_batches
    if last_fraction >= 1.0 or count < 2:
        return whole
    per_count = layout.workload.global_batch // count
    workload = Workload(layout.workload.sequence_length, per_count * (count - 1))
    less = build_layout(layout.model, workload, layout.cluster, layout.plan, layout.stack)
    shorter = evaluate(less, price_layout(less), "closed form").step_time_s
    step = shorter + last_fraction * (whole.step_time_s - shorter)
    return replace(whole, step_time_s=step)


def _predicted(case: RunCase, evaluation: Evaluation, layout: Layout) -> RunPrediction:
    memory = layout_memory(layout)
    risks = layout_risk(layout, memory)
    fullest = max(range(len(risks)), key=lambda i: memory[i].peak_allocated_bytes)
    riskiest = max(risks, key=lambda r: r.oom_risk)
    step = time_range(evaluation.step_time_s, layout_time_spread(layout))
    lost = 1.0 - case.last_fraction
    count = layout.classes[0].micro_batches
    tokens = layout.workload.tokens_per_step * (1.0 - lost / count)
    seconds = evaluation.seconds[0]
    return RunPrediction(
        case=case,
        step_time_s=step,
        tokens_per_s_per_gpu=tokens / step.p50 / layout.n_gpus,
        measured_step_time_s=measured_step_time_s(case, layout, tokens),
        peak_allocated_gib=risks[fullest].allocated_range_gib,
        peak_reserved_gib=risks[fullest].reserved_range_gib,
        oom_risk=riskiest.oom_risk,
        eighty_percent_rule=all(r.eighty_percent_rule for r in risks),
        largest=max(seconds, key=lambda name: seconds[name]),
        seconds=seconds,
    )


def measured_step_time_s(case: RunCase, layout: Layout, tokens: float) -> float | None:
    """The row's step time, from whichever of its columns has it.

    TFLOP/s and MFU count 6 FLOPs per parameter and the whole score matrix per token unless the
    notes say that recomputation was counted (then a third more).
    """
    row = case.row
    step = row.number("step_time_s")
    if step is not None:
        return step
    rate = row.number("tokens_per_s_per_gpu")
    if rate is not None:
        return tokens / (rate * layout.n_gpus)
    flops = row.number("tflops_per_gpu")
    gpu = layout.classes[0].gpu
    if flops is None:
        mfu = row.number("mfu")
        if mfu is None:
            return None
        dtype = layout.stack.recipe(layout.plan.precision).compute_dtype
        flops = mfu * gpu.peak(dtype) / 1e12
    per_token = float(model_flops_per_token(layout.model, layout.workload.sequence_length))
    if "full recomputation" in row.text("notes"):
        per_token *= 4.0 / 3.0
    return per_token * tokens / (flops * 1e12 * layout.n_gpus)


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of one quantity over some rows, as fractions; NaN-free: None where no row counts."""

    n: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    coverage: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.__dict__)


def summarise(errors: Sequence[float], inside: Sequence[bool] = ()) -> ErrorSummary:
    """Summary of relative errors; ``inside`` says which measurements lie in p10 to p90."""
    if not errors:
        return ErrorSummary(0, None, None, None, None)
    absolute = np.abs(errors)
    return ErrorSummary(
        n=len(errors),
        mape=float(absolute.mean()),
        median_ape=float(np.median(absolute)),
        p90_ape=float(np.percentile(absolute, 90)),
        bias=float(np.median(errors)),
        coverage=float(np.mean(inside)) if inside else None,
    )


def time_summary(rows: Iterable[RunPrediction]) -> ErrorSummary:
    """Step-time errors of the rows that have a measured time and trained."""
    chosen = [r for r in rows if r.time_error is not None and not r.failed]
    inside = [
        r.step_time_s.p10 <= r.measured_step_time_s <= r.step_time_s.p90
        for r in chosen
        if r.step_time_s is not None and r.measured_step_time_s is not None
    ]
    return summarise([r.time_error for r in chosen if r.time_error is not None], inside)


def memory_summary(rows: Iterable[RunPrediction], column: str) -> ErrorSummary:
    """Errors of one of the two peaks."""
    errors, inside = [], []
    for r in rows:
        error, predicted = r.memory_error(column), getattr(r, column)
        measured = r.case.row.number(column)
        if error is None or predicted is None or measured is None:
            continue
        errors.append(error)
        inside.append(predicted.p10 <= measured <= predicted.p90)
    return summarise(errors, inside)


def oom_summary(rows: Iterable[RunPrediction]) -> dict[str, Any]:
    """Confusion at 50 % and at 10 % risk, Brier score, and the 80 % rule on the same rows.

    ``false_fits`` failed but were given at most 50 % risk, ``false_ooms`` trained but were given
    more.
    """
    known = [
        (r.oom_risk, bool(r.failed), r.eighty_percent_rule)
        for r in rows
        if r.failed is not None and r.oom_risk is not None
    ]
    result: dict[str, Any] = {"n": len(known), "failed": sum(f for _, f, _ in known)}
    for name, threshold in (("", 0.5), ("_at_10_percent", 0.1)):
        result[f"false_fits{name}"] = sum(f and p <= threshold for p, f, _ in known)
        result[f"false_ooms{name}"] = sum(not f and p > threshold for p, f, _ in known)
    result["brier"] = math.fsum((p - f) ** 2 for p, f, _ in known) / len(known) if known else None
    result["eighty_percent_rule"] = {
        "false_fits": sum(f and bool(ok) for _, f, ok in known),
        "false_ooms": sum(not f and not ok for _, f, ok in known),
    }
    result["calibration"] = _calibration([(p, f) for p, f, _ in known])
    return result


def _calibration(rows: list[tuple[float, bool]]) -> list[dict[str, float]]:
    """Reliability: mean predicted risk and share that failed, in five bins of risk."""
    edges = [0.0, 0.05, 0.25, 0.5, 0.75, 1.0]
    table = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = [(p, f) for p, f in rows if low <= p < high or (high == 1.0 and p == 1.0)]
        if inside:
            table.append({
                "from": low, "to": high, "n": len(inside),
                "predicted": float(np.mean([p for p, _ in inside])),
                "failed": float(np.mean([f for _, f in inside])),
            })  # fmt: skip
    return table
