"""Words for a person, the same on the terminal, in figures and on pages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from simulator.units import GIB

if TYPE_CHECKING:
    from simulator.analysis.prediction import ClassPrediction, Prediction

#: Words for the categories of time, in the order in which they are shown.
TIME_LABELS = {
    "compute": "compute",
    "recompute": "recomputation",
    "dispatch": "waiting for the host (dispatch)",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "pipeline communication",
    "dp": "gradient reduction",
    "fsdp": "gathering sharded parameters",
    "optimizer": "optimiser step",
    "overhead": "framework overhead",
    "bubble": "idle (pipeline bubble, slower ranks)",
}

#: Words for the components of memory, in the order in which they are stacked.
MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimiser state",
    "unsharded_units": "gathered layers",
    "activations": "activations",
    "recompute_working_set": "recomputed activations",
    "logits": "logits and loss",
    "temporaries": "buffers and workspaces",
    "fragmentation": "fragmentation",
    "framework": "CUDA context and NCCL",
}


def percent(share: float) -> str:
    """A share for a person: never 0 % or 100 % unless it is."""
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    digits = 1 if 0 < share < 0.1 or 0.95 < share < 1 else 0
    return f"{100 * share:.{digits}f} %"


def probability(risk: float) -> str:
    """A predicted probability for a person: a model is never certain."""
    return percent(min(max(risk, 1e-9), 1.0 - 1e-9))


def signed_percent(gain: float) -> str:
    """A relative change with its sign."""
    return f"{100 * gain:+.1f} %"


def gib(value_bytes: float) -> str:
    """Bytes as GiB with one decimal; the unit is in the column or axis."""
    return f"{value_bytes / GIB:.1f}"


def memory_label(name: str) -> str:
    """Words for a component of memory."""
    return MEMORY_LABELS.get(name, name.replace("_", " "))


def time_label(name: str) -> str:
    """Words for a category of time."""
    return TIME_LABELS.get(name, name.replace("_", " "))


def headline(p: Prediction) -> str:
    """The one line that must not mislead: verdict, probability, fullest GPU."""
    cls = p.classes[p.fullest]
    return (
        f"{p.verdict.upper()}: {probability(p.oom_risk)} risk of running out of memory; fullest is "
        f"{cls.gpu}{stage_suffix(p, cls)}: {gib(cls.device_bytes)} of {gib(cls.usable_bytes)} GiB"
    )


def is_pipeline(p: Prediction) -> bool:
    """Whether ranks differ by pipeline stage."""
    return any(c.stage for c in p.classes)


def stage_suffix(p: Prediction, cls: ClassPrediction) -> str:
    """`` (stage 3)`` where the plan is a pipeline."""
    return f" (stage {cls.stage})" if is_pipeline(p) else ""


def class_names(p: Prediction) -> tuple[str, ...]:
    """A short name for every rank class, no two the same."""
    plain = [f"stage {c.stage}, {c.gpu}" if is_pipeline(p) else c.gpu for c in p.classes]
    with_work = [
        f"{name}, {c.micro_batches} × {c.micro_batch}"
        for name, c in zip(plain, p.classes, strict=True)
    ]
    for choice in (plain, with_work):
        if len(set(choice)) == len(choice):
            return tuple(choice)
    repeated = Counter(with_work)
    return tuple(
        f"{name}, class {c.index}" if repeated[name] > 1 else name
        for name, c in zip(with_work, p.classes, strict=True)
    )


def fullest_by_gpu(p: Prediction) -> list[ClassPrediction]:
    """The fullest rank class of each GPU type, in cluster order."""
    best: dict[str, ClassPrediction] = {}
    for cls in p.classes:
        if cls.gpu not in best or cls.fill > best[cls.gpu].fill:
            best[cls.gpu] = cls
    return [best[name] for name in p.gpus if name in best]


def cluster_words(p: Prediction) -> str:
    """How many GPUs of which type."""
    return " + ".join(f"{count:,} {name}" for name, count in p.gpus.items())
