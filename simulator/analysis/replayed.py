"""A measured run held against its prediction, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.analysis.emulated import rank_classes
from simulator.cost.kernel_rates import rates

if TYPE_CHECKING:
    from simulator.analysis.emulated import Emulation
    from simulator.analysis.prediction import Prediction
    from simulator.spec.layout import Layout

#: Spread of the measured steps, (longest - shortest) / median, from which a warning is given.
WIDE_SPREAD = 0.2
#: Categories of time that are communication.
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "fsdp")
#: Figures that both sides have; errors are predicted / measured - 1.
COMPARED = (
    "step_time_s",
    "tokens_per_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "exposed_communication_s",
)


def replay_document(
    layout: Layout,
    prediction: Prediction,
    emulation: Emulation,
    measured: Mapping[str, Any] | None,
    failure: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The document of ``gpumix replay --json``.

    ``predicted`` and ``measured`` (None where the run failed), ``errors`` as fractions of the
    measured value (0.05: predicted 5 % too much; none for what the run couldn't measure: reserved
    bytes on a CPU, exposed communication in torch's own runtimes), ``ranks`` with both sides of
    each rank, ``failure`` (rank, cause, message, memory) and ``warnings``.
    """
    predicted = _predicted(prediction)
    document: dict[str, Any] = {
        "title": prediction.title,
        "plan": dict(prediction.plan),
        "emulation": {
            "slowdown": _listed(emulation.slowdown),
            "memory_bytes": _listed(emulation.memory_bytes),
        },
        "predicted": predicted,
        "measured": None,
        "errors": {},
        "ranks": [],
        "failure": None if failure is None else dict(failure),
        "warnings": [],
    }
    if measured is not None:
        document["measured"] = {k: v for k, v in measured.items() if k != "ranks"}
        document["errors"] = {
            key: relative_error(predicted[key], measured[key])
            for key in COMPARED
            if measured.get(key)
        }
        document["ranks"] = _ranks(layout, prediction, measured["ranks"])
        document["warnings"] = warnings(measured["step_times_s"], assumed_gpus(layout))
    return document


def relative_error(predicted: float, measured: float) -> float:
    """Predicted over measured, minus one."""
    return predicted / measured - 1.0


def step_spread(step_times_s: Sequence[float]) -> float:
    """Longest minus shortest step over the median one."""
    ordered = sorted(step_times_s)
    return (ordered[-1] - ordered[0]) / ordered[len(ordered) // 2]


def warnings(step_times_s: Sequence[float], assumed_gpus: Sequence[str] = ()) -> list[str]:
    """What makes the comparison doubtful: unsteady steps, devices that nobody has measured."""
    found = [
        f"{name}: step times are predicted with assumed kernel rates: compare plans, not seconds"
        for name in assumed_gpus
    ]
    spread = step_spread(step_times_s)
    if spread > WIDE_SPREAD:
        found.append(
            f"the measured steps differ by {spread:.0%} of the median: other work on this "
            "machine, or too few steps"
        )
    return found


def assumed_gpus(layout: Layout) -> list[str]:
    """Devices of the layout whose kernel rates are neither measured nor transferred."""
    names = {c.gpu.name: rates(c.gpu).basis for c in layout.classes}
    return [name for name, basis in names.items() if basis == "assumed"]


def _predicted(prediction: Prediction) -> dict[str, Any]:
    step, rate = prediction.step_time_s, prediction.tokens_per_s
    return {
        "step_time_s": step.p50,
        "step_time_s_p10": step.p10,
        "step_time_s_p90": step.p90,
        "tokens_per_s": rate.p50,
        "peak_allocated_bytes": max(c.peak_allocated_bytes for c in prediction.classes),
        "peak_reserved_bytes": max(c.peak_reserved_bytes for c in prediction.classes),
        "exposed_communication_s": max(_communication(c.time_s) for c in prediction.classes),
        "oom_risk": prediction.oom_risk,
        "verdict": prediction.verdict,
    }


def _communication(time_s: Mapping[str, float]) -> float:
    return sum(time_s[name] for name in COMMUNICATION)


def _ranks(
    layout: Layout, prediction: Prediction, measured: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What each rank measured, with its device and what was predicted for it."""
    rows = []
    for rank, index in zip(measured, rank_classes(layout), strict=True):
        cls = prediction.classes[index]
        rows.append(
            {
                **rank,
                "gpu": cls.gpu,
                "stage": cls.stage,
                "predicted_peak_allocated_bytes": cls.peak_allocated_bytes,
                "predicted_exposed_communication_s": _communication(cls.time_s),
                "predicted_oom_risk": cls.oom_risk,
                "peak_allocated_error": relative_error(
                    cls.peak_allocated_bytes, rank["peak_allocated_bytes"]
                ),
            }
        )
    return rows


def _listed(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)
