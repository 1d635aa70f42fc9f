"""The answer to a scenario, as plain frozen data that tables, reports and JSON are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["fits", "risky", "does not fit"]


@dataclass(frozen=True)
class Range:
    """Tenth, fiftieth and ninetieth percentile of a predicted quantity."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class ClassPrediction:
    """One rank class: what it holds, how full it gets, where its step time goes.

    ``memory_bytes`` are the components at the moment of the peak; ``peak_moment`` says when that
    is. ``time_s`` splits the whole step by category and sums to the step time.
    """

    index: int
    gpu: str
    group: str
    stage: int
    ranks: int
    layers: int
    micro_batch: int
    micro_batches: int
    state_share: float
    memory_bytes: Mapping[str, float]
    peak_moment: str
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    device_bytes: float
    device_p10_bytes: float
    device_p90_bytes: float
    usable_bytes: float
    oom_risk: float
    eighty_percent_rule: bool
    time_s: Mapping[str, float]

    @property
    def fill(self) -> float:
        """Median peak device memory over usable memory."""
        return self.device_bytes / self.usable_bytes


@dataclass(frozen=True)
class Suggestion:
    """A changed plan that was priced: what to change and what it gives.

    ``gain`` is the relative change of tokens per second (0.1 is 10 % more).
    """

    change: str
    gain: float
    tokens_per_s: float
    oom_risk: float
    fill: float


@dataclass(frozen=True)
class Prediction:
    """Everything that ``simulate`` and ``estimate`` report.

    Rates are of the whole cluster. ``mfu`` takes ``flops_convention`` FLOPs without recomputation
    over the dense peaks of all GPUs at the plan's compute type, ``hfu`` adds recomputation.
    ``shares`` is the mean split of the step over ranks and sums to 1.
    """

    title: str
    model: str
    parameters: int
    n_gpus: int
    gpus: Mapping[str, int]
    stack: str
    evaluator: str
    verdict: Verdict
    oom_risk: float
    accepted_risk: float
    fullest: int
    step_time_s: Range
    tokens_per_s: Range
    tokens_per_step: int
    mfu: float
    hfu: float
    flops_convention: str
    time_to_train_s: float | None
    shares: Mapping[str, float]
    classes: tuple[ClassPrediction, ...]
    suggestions: tuple[Suggestion, ...]
    plan: Mapping[str, Any]
    defaults: tuple[str, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Median rate divided by the GPUs used."""
        return self.tokens_per_s.p50 / self.n_gpus

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``: medians under the plain names, ranges beside them."""
        data = asdict(self)
        for name in ("step_time_s", "tokens_per_s"):
            spread = getattr(self, name)
            data[name] = spread.p50
            data[f"{name}_p10"], data[f"{name}_p90"] = spread.p10, spread.p90
        data["tokens_per_s_per_gpu"] = self.tokens_per_s_per_gpu
        data["peak_allocated_bytes"] = max(c.peak_allocated_bytes for c in self.classes)
        data["peak_reserved_bytes"] = max(c.peak_reserved_bytes for c in self.classes)
        for row, cls in zip(data["classes"], self.classes, strict=True):
            row["fill"] = cls.fill
        return data
