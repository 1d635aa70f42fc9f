"""CSV tables of a prediction: one row per rank class and thing, SI units in the column names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.analysis.prediction import Prediction
    from simulator.evaluate.timeline import Timeline

#: A timeline of more tasks than this is left to trace.json.
MAX_TIMELINE_ROWS = 200_000

_CLASS_FIELDS = (
    "index", "gpu", "group", "stage", "ranks", "layers", "micro_batch", "micro_batches",
    "state_share", "peak_moment", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes",
    "device_p10_bytes", "device_p90_bytes", "usable_bytes", "oom_risk", "eighty_percent_rule",
)  # fmt: skip
_TIMELINE_FIELDS = (
    "pipeline", "stage", "rank_class", "stream", "start_ns", "end_ns", "label", "category",
    "micro_batch", "chunk",
)  # fmt: skip


def classes_csv(p: Prediction) -> str:
    """One row per rank class: what it holds and how full it gets."""
    rows = ([getattr(c, name) for name in _CLASS_FIELDS] for c in p.classes)
    return _csv(["class", *_CLASS_FIELDS[1:]], rows)


def memory_csv(p: Prediction) -> str:
    """Bytes by rank class and component at the class's fullest moment."""
    rows = (
        [c.index, c.gpu, c.stage, name, size]
        for c in p.classes
        for name, size in c.memory_bytes.items()
    )
    return _csv(["class", "gpu", "stage", "component", "bytes"], rows)


def time_csv(p: Prediction) -> str:
    """Seconds of the step by rank class and category."""
    rows = ([c.index, c.gpu, c.stage, name, s] for c in p.classes for name, s in c.time_s.items())
    return _csv(["class", "gpu", "stage", "category", "seconds"], rows)


def timeline_csv(timeline: Timeline) -> str | None:
    """Every task of the step; None where there are more than MAX_TIMELINE_ROWS."""
    if sum(len(s.tasks) for s in timeline.graph.streams) > MAX_TIMELINE_ROWS:
        return None
    return _csv(_TIMELINE_FIELDS, timeline.records())


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()
