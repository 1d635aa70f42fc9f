"""A sweep: every combination of some values of some fields, each one priced like a single plan.

Points that are impossible stay, with the reason. One row is plain data, so that it travels between
processes and into JSON Lines as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simulator.errors import Problem, UserError
from simulator.planner.axes import Axis, applied, base_data, count_points, make_axis, points

if TYPE_CHECKING:
    from simulator.planner.executors import Executor
    from simulator.spec.scenario import Scenario

Evaluator = Literal["closed form", "engine"]
Row = dict[str, Any]

#: Figures of a row that was priced, in the order of a table.
FIGURES = (
    "tokens_per_s", "tokens_per_s_per_gpu", "step_time_s", "step_time_s_p10", "step_time_s_p90",
    "mfu", "hfu", "oom_risk", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes",
    "usable_bytes", "n_gpus",
)  # fmt: skip


@dataclass(frozen=True)
class PointTask:
    """One point for a worker: the scenario's data, where it is from, what to change."""

    index: int
    data: Mapping[str, Any]
    source: str
    changes: Mapping[str, Any]
    evaluator: Evaluator


@dataclass(frozen=True)
class Sweep:
    """What is swept over: axes, base data, evaluator; ``notes`` say what was changed in the base.

    ``risk`` is the accepted risk of running out of memory.
    """

    title: str
    axes: tuple[Axis, ...]
    data: Mapping[str, Any]
    source: str
    evaluator: Evaluator
    risk: float
    n_points: int
    notes: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def tasks(self, done: Mapping[int, Row]) -> Iterator[tuple[int, PointTask]]:
        """Points without a result yet."""
        for index, changes in points(self.axes):
            if index not in done:
                yield (
                    index,
                    PointTask(index, self.data, self.source, changes, self.evaluator),
                )

    def question(self) -> dict[str, Any]:
        """What decides the results (for a fingerprint)."""
        axes = {axis.name: list(axis.values) for axis in self.axes}
        return {"data": self.data, "axes": axes, "evaluator": self.evaluator}


def make_sweep(
    scenario: Scenario, axes: Sequence[Axis] = (), evaluator: Evaluator = "closed form"
) -> Sweep:
    """The sweep of a scenario over ``axes``, or over those that its file names.

    Raises:
        UserError: no axes, an unknown field, too many points.
    """
    chosen = {axis.name: axis for axis in axes}
    if not chosen:
        chosen = {a.name: a for a in (make_axis(k, v) for k, v in scenario.sweep.items())}
    if not chosen:
        raise UserError(
            Problem(
                "sweep", "no axes to sweep", "--axis plan.micro_batch=1,2,4, or sweep: in the file"
            )
        )
    ordered = tuple(chosen.values())
    data, notes = base_data(scenario.given, ordered)
    sweep = Sweep(
        title=scenario.title,
        axes=ordered,
        data=data,
        source=scenario.source,
        evaluator=evaluator,
        risk=scenario.risk,
        n_points=count_points(ordered),
        notes=tuple(notes),
        given=scenario.given,
    )
    from simulator.planner.sweep_grid import is_large_grid

    if is_large_grid(sweep):
        told = "priced as a grid of plans: step times of pipelines by formula, within 2 %"
        sweep = replace(sweep, notes=(*sweep.notes, told))
    return sweep


def run_sweep(sweep: Sweep, executor: Executor, done: Mapping[int, Row]) -> Iterator[Row]:
    """Rows of all points that are not in ``done``, as they come.

    Large sweeps over plan fields are priced in vectorised passes in this process.
    """
    from simulator.planner.sweep_grid import grid_rows, is_large_grid

    if is_large_grid(sweep):
        yield from grid_rows(sweep, done)
        return
    for _, row in executor.run(evaluate_point, sweep.tasks(done)):
        yield row


def evaluate_point(task: PointTask) -> Row:
    """Price one point. An impossible one has ``status`` infeasible and a ``reason``."""
    from simulator.analysis.predict import predict
    from simulator.spec.scenario import scenario_from_mapping

    row: Row = {"index": task.index, "values": dict(task.changes)}
    try:
        folder = Path(task.source).parent if task.source else Path()
        data = applied(task.data, task.changes)
        scenario = scenario_from_mapping(data, task.source, folder)
        prediction, _, _ = predict(scenario, evaluator=task.evaluator, with_suggestions=False)
    except UserError as error:
        return row | infeasible(error)
    fullest = prediction.classes[prediction.fullest]
    step = prediction.step_time_s
    return row | {
        "status": prediction.verdict,
        "reason": "",
        "tokens_per_s": prediction.tokens_per_s.p50,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "step_time_s": step.p50,
        "step_time_s_p10": step.p10,
        "step_time_s_p90": step.p90,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "oom_risk": prediction.oom_risk,
        "peak_allocated_bytes": max(c.peak_allocated_bytes for c in prediction.classes),
        "peak_reserved_bytes": max(c.peak_reserved_bytes for c in prediction.classes),
        "device_bytes": fullest.device_bytes,
        "usable_bytes": fullest.usable_bytes,
        "n_gpus": prediction.n_gpus,
        "shares": dict(prediction.shares),
    }


def infeasible(error: UserError) -> Row:
    """Status and reason of a point that can't be."""
    return {"status": "infeasible", "reason": _reason(error)}


def _reason(error: UserError) -> str:
    """What is wrong, without places in the file: the file isn't what is at fault."""
    texts = [f"{p.path}: {p.message}" if p.path else p.message for p in error.problems]
    return "; ".join(dict.fromkeys(texts))


def is_priced(row: Row) -> bool:
    """Whether the point could be laid on the cluster (it may still not fit its memory)."""
    return bool(row["status"] != "infeasible")


def ranked(rows: Sequence[Row], risk: float) -> list[Row]:
    """Best first: what fits at the accepted risk by rate, then the rest by risk, then impossible.

    Equal rates go by lower risk, then by index, so that the order is always the same.
    """

    def key(row: Row) -> tuple[float, ...]:
        if not is_priced(row):
            return (2, 0.0, 0.0, row["index"])
        if row["oom_risk"] <= risk:
            return (0, -row["tokens_per_s"], row["oom_risk"], row["index"])
        return (1, row["oom_risk"], -row["tokens_per_s"], row["index"])

    return sorted(rows, key=key)


def best_row(rows: Sequence[Row], risk: float) -> Row | None:
    """The fastest point that fits at the accepted risk, if any does."""
    first = next(iter(ranked(rows, risk)), None)
    if first is None or not is_priced(first) or first["oom_risk"] > risk:
        return None
    return first


def reasons(rows: Sequence[Row]) -> dict[str, int]:
    """How many points are impossible, by reason, most frequent first."""
    counts: dict[str, int] = {}
    for row in rows:
        if not is_priced(row):
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def differences(sweep: Sweep, best: Row) -> dict[str, tuple[Any, Any]]:
    """Axis -> (value in the scenario as given, value of the best point) where they differ."""
    found = {}
    for axis in sweep.axes:
        before = _given_value(sweep.given, axis)
        after = best["values"][axis.name]
        if before != after:
            found[axis.name] = (before, after)
    return found


def given_values(sweep: Sweep) -> dict[str, Any]:
    """What the scenario's file says about every axis; None where it says nothing."""
    return {axis.name: _given_value(sweep.given, axis) for axis in sweep.axes}


def _given_value(given: Mapping[str, Any], axis: Axis) -> Any:
    """What the scenario's file says about a field; None where it says nothing."""
    target: Any = given
    for part in axis.parts:
        try:
            target = target[part]
        except (KeyError, IndexError, TypeError):
            return None
    return target
