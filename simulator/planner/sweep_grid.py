"""Large sweeps over plan fields in vectorised passes instead of point by point.

Only for clusters of equal GPUs, the closed form and fields that a grid of plans holds; the step
time of pipelines is then the grid's formula (:mod:`simulator.planner.grid`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.analysis.predict import verdict
from simulator.analysis.uncertainty import TimeSpread, layout_time_spread, rate_range, time_range
from simulator.cost.flops import model_flops_per_token
from simulator.errors import UserError
from simulator.planner.axes import applied
from simulator.planner.grid import GridMemory, GridPricer
from simulator.planner.plan_grid import HSDP, INTERLEAVED, LAYERED, PlanGrid
from simulator.planner.space import RULE_TEXTS, Rule, broken_rules, with_shard_degrees
from simulator.planner.sweep import Row, Sweep, infeasible
from simulator.planner.tables import Tables
from simulator.spec.inputs import PlanInput
from simulator.spec.layout import build_layout
from simulator.spec.plan import SCHEDULES, Plan, Recompute
from simulator.spec.resolve_plan import SEQUENCE_PARALLEL_STACKS, Case
from simulator.spec.scenario import Scenario, scenario_from_mapping

Ints = npt.NDArray[np.int64]

#: Sweeps of fewer points are priced one by one, exactly.
LARGE = 2000

_FIELDS = (
    "tp", "pp", "cp", "dp", "vpp", "ep", "micro_batch", "schedule", "sharding", "recompute",
    "sequence_parallel",
)  # fmt: skip
_AXES = frozenset(f"plan.{name}" for name in _FIELDS)
#: Plan fields that a grid doesn't hold and that are the same for all its plans.
_COMMON = ("precision", "optimizer", "attention", "compile", "offload")
_UNSET = -1


def is_large_grid(sweep: Sweep) -> bool:
    """Whether a sweep has many points over fields of a grid, and a plan that a grid can hold."""
    plan = sweep.data.get("plan", {})
    inner = [axis for axis in sweep.axes if axis.name in _AXES]
    return (
        sweep.evaluator == "closed form"
        and sweep.n_points > LARGE
        and bool(inner)
        and sweep.data.get("stack") is not None
        and len(sweep.data.get("cluster", {}).get("groups", ())) == 1
        and not {"assignment", "stage_layers", "shard_degree"} & set(plan)
        and not any(isinstance(v, Mapping) for axis in inner for v in axis.values)
        and not isinstance(plan.get("recompute"), Mapping)
    )


@dataclass(frozen=True)
class _Block:
    """All points of a sweep that share the values of the axes outside of the grid."""

    outer: dict[str, Any]
    indices: Ints
    inner: dict[str, list[Any]]


def grid_rows(sweep: Sweep, done: Mapping[int, Row]) -> Iterator[Row]:
    """Rows of all points that are not in ``done``."""
    for block in _blocks(sweep):
        keep = [n for n, index in enumerate(block.indices) if int(index) not in done]
        if keep:
            rows = _block_rows(sweep, block)
            yield from (rows[n] for n in keep)


def _blocks(sweep: Sweep) -> Iterator[_Block]:
    shape = tuple(len(axis.values) for axis in sweep.axes)
    numbers = np.arange(sweep.n_points).reshape(shape)
    inside = [i for i, axis in enumerate(sweep.axes) if axis.name in _AXES]
    outside = [i for i in range(len(shape)) if i not in inside]
    for place in np.ndindex(*(shape[i] for i in outside)):
        at: list[Any] = [slice(None)] * len(shape)
        for i, n in zip(outside, place, strict=True):
            at[i] = n
        indices = numbers[tuple(at)].reshape(-1)
        positions = np.unravel_index(indices, shape)
        inner = {
            sweep.axes[i].name: [sweep.axes[i].values[n] for n in positions[i]] for i in inside
        }
        outer = {sweep.axes[i].name: sweep.axes[i].values[at[i]] for i in outside}
        yield _Block(outer, indices, inner)


def _block_rows(sweep: Sweep, block: _Block) -> list[Row]:
    points = [
        {axis.name: (block.outer | {k: v[n] for k, v in block.inner.items()})[axis.name]
         for axis in sweep.axes}
        for n in range(len(block.indices))
    ]  # fmt: skip
    bare = [
        {"index": int(index), "values": point}
        for index, point in zip(block.indices, points, strict=True)
    ]
    try:
        data = applied(sweep.data, block.outer)
        plan = {k: v for k, v in data.pop("plan").items() if f"plan.{k}" not in block.inner}
        folder = Path(sweep.source).parent if sweep.source else Path()
        scenario = scenario_from_mapping(data, sweep.source, folder)
        entry = PlanInput.model_validate(plan)
        case = Case(scenario.model, scenario.workload, scenario.cluster, scenario.stack)
        grid = _grid(case, entry, block)
        like = Plan(**{name: getattr(entry, name) for name in _COMMON})
        pricer = GridPricer(case, like, Tables())
    except UserError as error:
        return [row | infeasible(error) for row in bare]
    return _priced_rows(scenario, case, like, pricer, grid, bare)


def _priced_rows(
    scenario: Scenario,
    case: Case,
    like: Plan,
    pricer: GridPricer,
    grid: PlanGrid,
    bare: Sequence[Row],
) -> list[Row]:
    broken = broken_rules(case, grid)
    # A search leaves these out since they gain nothing; a sweep asks for them.
    broken = np.where(broken == Rule.NOTHING_TO_SHARD, 0, broken)
    if like.offload == "activations":
        keeps_more = (broken == 0) & (grid.recompute != Recompute.FULL)
        broken = np.where(keeps_more, int(Rule.OFFLOAD), broken)
    legal = np.flatnonzero(broken == 0)
    rows = [
        row | {"status": "infeasible", "reason": RULE_TEXTS[Rule(int(code))] if code else ""}
        for row, code in zip(bare, broken, strict=True)
    ]
    if not len(legal):
        return rows
    some = with_shard_degrees(case, grid.take(legal))
    memory, step = pricer.memory(some), pricer.step_time_s(some)
    first = build_layout(case.model, case.workload, case.cluster, some.plan(0, like), case.stack)
    spread = layout_time_spread(first)
    for n, at in enumerate(legal):
        rows[at] |= _figures(scenario, pricer, spread, float(step[n]), memory, n)
    return rows


def _figures(
    scenario: Scenario,
    pricer: GridPricer,
    spread: TimeSpread,
    step_s: float,
    memory: GridMemory,
    n: int,
) -> Row:
    """Figures of one plan, under the names that a single point has."""
    step = time_range(step_s, spread)
    workload, gpus = scenario.workload, scenario.cluster.n_gpus
    rate = rate_range(float(workload.tokens_per_step), step)
    flops = float(model_flops_per_token(scenario.model, workload.sequence_length))
    peak = gpus * pricer.gpu.peak(pricer.recipe.compute_dtype)
    risk = float(memory.oom_risk[n])
    return {
        "status": verdict(risk, scenario.risk),
        "reason": "",
        "tokens_per_s": rate.p50,
        "tokens_per_s_per_gpu": rate.p50 / gpus,
        "step_time_s": step.p50,
        "step_time_s_p10": step.p10,
        "step_time_s_p90": step.p90,
        "mfu": flops * rate.p50 / peak,
        "oom_risk": risk,
        "peak_allocated_bytes": float(memory.peak_allocated_bytes[n]),
        "device_bytes": float(memory.device_bytes[n]),
        "usable_bytes": float(pricer.gpu.usable_memory_bytes),
        "n_gpus": gpus,
    }


def _grid(case: Case, entry: PlanInput, block: _Block) -> PlanGrid:
    """Points as plans, with the defaults that a single plan gets."""
    count = len(block.indices)
    columns = {name: _column(name, entry, block, count) for name in _FIELDS}
    columns["pp"] = np.where(columns["pp"] == _UNSET, 1, columns["pp"])
    width = columns["tp"] * columns["pp"] * columns["cp"]
    derived = np.maximum(case.cluster.n_gpus // width, 1)
    columns["dp"] = np.where(columns["dp"] == _UNSET, derived, columns["dp"])
    known = case.stack.schedules
    plain = SCHEDULES.index("1f1b" if "1f1b" in known or not known else known[0])
    alone = LAYERED if "layered" in known else plain
    order = np.where(columns["vpp"] > 1, INTERLEAVED, np.where(columns["pp"] == 1, alone, plain))
    columns["schedule"] = np.where(columns["schedule"] == _UNSET, order, columns["schedule"])
    split = (columns["tp"] > 1) & (case.stack.name in SEQUENCE_PARALLEL_STACKS)
    asked = columns["sequence_parallel"]
    # Asked for without tensor parallelism it has no effect.
    columns["sequence_parallel"] = np.where(asked == _UNSET, split, asked) * (columns["tp"] > 1)
    return PlanGrid(**columns, shard_degree=np.zeros(count, np.int64))


def _column(name: str, entry: PlanInput, block: _Block, count: int) -> Ints:
    """One field of all points as codes; ``_UNSET`` where it is to be derived."""
    values = block.inner.get(f"plan.{name}")
    if values is None:
        return np.full(count, _code(name, getattr(entry, name)), np.int64)
    codes: dict[str, int] = {}
    for value in {repr(v): v for v in values}.values():
        read = getattr(PlanInput.model_validate({name: value}), name)
        codes[repr(value)] = _code(name, read)
    return np.array([codes[repr(value)] for value in values], np.int64)


def _code(name: str, value: Any) -> int:
    if value is None:
        return _UNSET
    if name == "recompute":
        return int(value[0])
    if name == "schedule":
        return SCHEDULES.index(value)
    if name == "sharding":
        return HSDP if value < 0 else int(value)
    return int(value)
