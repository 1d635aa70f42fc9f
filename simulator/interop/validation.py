"""One prediction for each measured run, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.analysis.peaks import layout_peaks
from simulator.analysis.predict import Evaluation, evaluate, layout_risk
from simulator.analysis.prediction import Range
from simulator.analysis.uncertainty import layout_time_spread, time_range
from simulator.cost.flops import model_flops_per_token
from simulator.cost.pricing import price_layout
from simulator.cost.times import CATEGORIES
from simulator.errors import UserError
from simulator.interop.runs import RunCase
from simulator.spec.layout import Layout, build_layout
from simulator.spec.workload import Workload
from simulator.units import GIB

#: Columns of a row's two peaks.
PEAK_COLUMNS = ("peak_allocated_gib", "peak_reserved_gib")


@dataclass(frozen=True)
class RunPrediction:
    """One row: what was measured, what is predicted, and why not where it can't be.

    Times in seconds, memory in GiB as the file format has them. ``peak_allocated_gib`` is what the
    row's column of that name is compared with: torch's count, or the device's memory where the
    row says that its peak is that. ``seconds`` is the mean split of the step over ranks.
    """

    case: RunCase
    reason: str = ""
    step_time_s: Range | None = None
    tokens_per_s_per_gpu: Range | None = None
    measured_step_time_s: float | None = None
    peak_allocated_gib: Range | None = None
    peak_reserved_gib: Range | None = None
    peak_device_gib: Range | None = None
    oom_risk: float | None = None
    eighty_percent_rule: bool | None = None
    seconds: dict[str, float] | None = None

    @property
    def is_expressed(self) -> bool:
        """Whether the row could be predicted."""
        return self.step_time_s is not None

    @property
    def time_error(self) -> float | None:
        """Relative error of the median step time."""
        if self.step_time_s is None or self.measured_step_time_s is None:
            return None
        return self.step_time_s.p50 / self.measured_step_time_s - 1.0

    @property
    def is_time_inside(self) -> bool | None:
        """Whether the measured step time lies between p10 and p90."""
        if self.step_time_s is None or self.measured_step_time_s is None:
            return None
        return self.step_time_s.p10 <= self.measured_step_time_s <= self.step_time_s.p90

    def memory_error(self, column: str) -> float | None:
        """Relative error of one of :data:`PEAK_COLUMNS`."""
        predicted: Range | None = getattr(self, column)
        measured = self.case.row.number(column)
        if predicted is None or measured is None:
            return None
        return predicted.p50 / measured - 1.0

    @property
    def largest(self) -> str:
        """The category that takes most of the predicted step."""
        found = self.seconds or {}
        return max(found, key=lambda name: found[name], default="")

    @property
    def failed(self) -> bool | None:
        """Whether the run ran out of memory; None where the outcome isn't known."""
        outcome = self.case.row.text("outcome").lower()
        return {"ok": False, "oom": True, "oom_or_failed": True}.get(outcome)

    def to_json(self) -> dict[str, Any]:
        """The row's cells, then what is predicted, as plain data."""
        row = self.case.row
        data: dict[str, Any] = {name: _plain(cell) for name, cell in row.cells.items()}
        data |= {
            "file": row.source, "line": row.line, "expressible": self.is_expressed,
            "reason": self.reason, "assumptions": list(self.case.assumptions),
            "measured_step_time_s": self.measured_step_time_s,
        }  # fmt: skip
        for name in ("step_time_s", "tokens_per_s_per_gpu", *PEAK_COLUMNS, "peak_device_gib"):
            spread: Range | None = getattr(self, name)
            data[f"predicted_{name}"] = spread.p50 if spread else None
            data[f"predicted_{name}_p10"] = spread.p10 if spread else None
            data[f"predicted_{name}_p90"] = spread.p90 if spread else None
        data |= {
            "time_error": self.time_error,
            "allocated_error": self.memory_error("peak_allocated_gib"),
            "reserved_error": self.memory_error("peak_reserved_gib"),
            "oom_risk": self.oom_risk, "eighty_percent_rule_fits": self.eighty_percent_rule,
            "largest_component": self.largest or None, "predicted_seconds": self.seconds,
        }  # fmt: skip
        return data


def _plain(cell: str) -> str | float | None:
    """A cell as JSON has it: a number, a text, or null where it is empty."""
    text = cell.strip()
    try:
        value = float(text)
    except ValueError:
        return text or None
    return value if np.isfinite(value) else text


def predict_runs(cases: Iterable[RunCase]) -> list[RunPrediction]:
    """Every case's prediction, in order."""
    return [predict_run(case) for case in cases]


def predict_run(case: RunCase) -> RunPrediction:
    """Predict one row, choosing the fastest candidate that fits where the row leaves a choice."""
    if case.layout is None:
        return RunPrediction(case, case.reason)
    try:
        tried = [(_evaluate(layout, case.last_fraction), layout) for layout in _fitting(case)]
        return _predicted(case, *min(tried, key=_seconds_per_token))
    except UserError as error:
        return RunPrediction(case, "; ".join(p.message for p in error.problems))


def _fitting(case: RunCase) -> Sequence[Layout]:
    """The layouts that a row may stand for: its candidates that fit, or the smallest of them."""
    assert case.layout is not None
    if len(case.candidates) < 2:
        return (case.layout,)
    risks = [float(layout_risk(layout).oom_risk.max()) for layout in case.candidates]
    fits = [layout for layout, r in zip(case.candidates, risks, strict=True) if r <= 0.5]
    return fits or (case.candidates[int(np.argmin(risks))],)


def _seconds_per_token(pair: tuple[Evaluation, Layout]) -> float:
    evaluation, layout = pair
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
    step = time_range(evaluation.step_time_s, layout_time_spread(layout))
    risk = layout_risk(layout)
    found = layout_peaks(layout)
    lost = 1.0 - case.last_fraction
    count = layout.classes[0].micro_batches
    tokens = layout.workload.tokens_per_step * (1.0 - lost / count)
    per_gpu = tokens / layout.n_gpus
    return RunPrediction(
        case=case,
        step_time_s=step,
        tokens_per_s_per_gpu=Range(per_gpu / step.p90, per_gpu / step.p50, per_gpu / step.p10),
        measured_step_time_s=measured_step_time_s(case, layout, tokens),
        peak_allocated_gib=_gib(found.device if case.peaks_of_device else found.allocated),
        peak_reserved_gib=_gib(found.device if case.peaks_of_device else found.reserved),
        peak_device_gib=_gib(found.device),
        oom_risk=float(risk.oom_risk.max()),
        eighty_percent_rule=bool(risk.safe_by_80_percent_rule.all()),
        seconds=_mean_seconds(layout, evaluation),
    )


def _gib(size: Range) -> Range:
    return Range(size.p10 / GIB, size.p50 / GIB, size.p90 / GIB)


def _mean_seconds(layout: Layout, evaluation: Evaluation) -> dict[str, float]:
    """Seconds by category, mean over ranks."""
    ranks = np.array([c.ranks for c in layout.classes], float)
    return {
        name: float(np.dot(ranks, [row[name] for row in evaluation.seconds]) / ranks.sum())
        for name in CATEGORIES
    }


def measured_step_time_s(case: RunCase, layout: Layout, tokens: float) -> float | None:
    """The row's step time, from whichever of its columns has it.

    TFLOP/s and MFU count 6 FLOPs per parameter and the whole score matrix per token unless the
    notes say that recomputation was counted (then a third more for the layers).
    """
    row = case.row
    step = row.number("step_time_s")
    if step is not None:
        return step
    rate = row.number("tokens_per_s_per_gpu")
    if rate is not None:
        return tokens / (rate * layout.n_gpus)
    flops = row.number("tflops_per_gpu")
    if flops is None:
        mfu = row.number("mfu")
        if mfu is None:
            return None
        dtype = layout.stack.recipe(layout.plan.precision).compute_dtype
        flops = mfu * layout.classes[0].gpu.peak(dtype) / 1e12
    per_token = float(model_flops_per_token(layout.model, layout.workload.sequence_length))
    if "full recomputation" in row.text("notes").lower():
        # Layers run forward once more, the head does not (arXiv 2104.04473 equation 3).
        head = 6.0 * layout.model.hidden * layout.model.vocab
        per_token = head + (per_token - head) * 4.0 / 3.0
    return per_token * tokens / (flops * 1e12 * layout.n_gpus)
