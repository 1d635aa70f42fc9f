"""A scenario: what is asked, read from a YAML or JSON file, all its faults reported at once.

``python -m simulator.spec.scenario --schema`` prints the JSON Schema that is published beside
this file.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.spec.checks import CHECKS
from simulator.spec.cluster import Cluster
from simulator.spec.fields import shown
from simulator.spec.inputs import GroupInput, ModelInput, PlanInput, WorkloadInput
from simulator.spec.library import find_scenario
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Plan
from simulator.spec.problems import Collector
from simulator.spec.resolve import resolve_model, resolve_stack
from simulator.spec.resolve_cluster import resolve_cluster
from simulator.spec.resolve_plan import Case, default_stack, resolve_plan
from simulator.spec.sections import ScenarioInput, SectionsInput
from simulator.spec.stack import Stack
from simulator.spec.workload import Workload
from simulator.spec.yaml_source import SourceText, load_source

SCHEMA_FILE = "scenario.schema.json"
_REQUIRED = ("model", "workload", "cluster")


@dataclass(frozen=True)
class Scenario:
    """What is asked.

    ``plan`` is None where it is to be searched. ``sweep`` maps a dotted axis (``plan.tp``) to its
    values. ``purchase`` and ``economics`` are plain data that has been checked
    (:func:`~simulator.spec.resolve_purchase.resolve_purchase` reads them), and so is ``replay``
    (see :class:`~simulator.spec.inputs.ReplayInput`); ``outputs`` is checked where it is used.
    ``risk`` is the accepted probability of running out of memory. ``given`` is the input as it
    was written; ``defaults`` has a line for each value that was filled in.
    """

    title: str
    model: ModelSpec
    workload: Workload
    cluster: Cluster
    stack: Stack
    plan: Plan | None = None
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    purchase: Mapping[str, Any] | None = None
    economics: Mapping[str, Any] | None = None
    replay: Mapping[str, Any] | None = None
    risk: float = 0.05
    outputs: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    defaults: tuple[str, ...] = field(default=(), compare=False, repr=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)


def load_scenario(path_or_name: str | Path) -> Scenario:
    """A scenario from a file (YAML or JSON; ``-`` is standard input) or a shipped one by name.

    Raises:
        UserError: every fault found, each with file, line and column.
    """
    name = str(path_or_name)
    is_file = name == "-" or "/" in name or name.endswith((".yaml", ".yml", ".json"))
    if not is_file and not _exists(name):
        name = str(find_scenario(name))
    return scenario_from_source(load_source(name), Path(name).parent)


def scenario_from_mapping(
    data: Mapping[str, Any], source: str = "", folder: str | Path = "."
) -> Scenario:
    """A scenario from plain data; relative paths start at ``folder``. Raises UserError."""
    return scenario_from_source(SourceText(dict(data), source), Path(folder))


def scenario_with(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """The scenario as it was written with some fields changed: ``{"plan.tp": 4}``.

    What the input left out is derived anew. Raises UserError where the result is impossible.
    """
    data = copy.deepcopy(dict(scenario.given))
    for axis, value in changes.items():
        parts = _axis_parts(axis)
        target: Any = data
        for part in parts[:-1]:
            if isinstance(target, dict) and isinstance(target.setdefault(part, {}), str):
                target[part] = {"base": target[part]}  # a field of a model or fabric by name
            target = target[part]
        target[parts[-1]] = value
    folder = Path(scenario.source).parent if scenario.source else Path()
    return scenario_from_mapping(data, scenario.source, folder)


def scenario_from_source(text: SourceText, folder: Path) -> Scenario:
    """A scenario from parsed text; faults carry their positions. Raises UserError."""
    report = Collector(text)
    data = text.data
    _check_top_level(data, report)
    sections = report.validate(
        SectionsInput,
        {k: v for k, v in data.items() if k in SectionsInput.model_fields and v is not None},
        (),
    )
    model = resolve_model(data["model"], folder, report) if data.get("model") is not None else None
    workload = _workload(data["workload"], report) if data.get("workload") is not None else None
    cluster = resolve_cluster(data["cluster"], report) if data.get("cluster") is not None else None
    entry = None
    if data.get("plan") is not None:
        entry = report.validate(PlanInput, data["plan"], ("plan",))
    named = data.get("stack")
    if named is None:
        named = default_stack(cluster, entry)
        report.default(("stack",), named)
    stack = resolve_stack(named, report)
    plan = None
    if model and workload and cluster and stack:
        case = Case(model, workload, cluster, stack)
        plan = _plan(entry, case, report) if entry is not None else None
    sweep = _sweep(data.get("sweep"), report)
    if data.get("purchase") is not None or data.get("economics") is not None:
        _check_money(sections, data, report)
    report.raise_if_any()
    assert model and workload and cluster and stack and sections
    if "risk" not in data:
        report.default(("risk",), sections.risk)
    return Scenario(
        title=sections.title or f"{model.name} on {_cluster_words(cluster)}",
        model=model,
        workload=workload,
        cluster=cluster,
        stack=stack,
        plan=plan,
        sweep=sweep,
        purchase=data.get("purchase"),
        economics=data.get("economics"),
        replay=data.get("replay"),
        risk=sections.risk,
        outputs=sections.outputs,
        source=text.source,
        given=data,
        defaults=tuple(report.defaults),
        warnings=(*model.warnings, *report.warnings),
    )


def plan_from_mapping(
    data: Mapping[str, Any],
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    stack: Stack,
    source: str = "",
) -> Plan:
    """A plan from plain data (the ``plan`` section alone), checked. Raises UserError."""
    report = Collector(SourceText({"plan": dict(data)}, source))
    entry = report.validate(PlanInput, dict(data), ("plan",))
    plan = None
    if entry is not None:
        plan = _plan(entry, Case(model, workload, cluster, stack), report)
    report.raise_if_any()
    assert plan is not None
    return plan


def scenario_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a scenario file, from the input models."""
    schema = ScenarioInput.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "GPUMix scenario",
        **{k: v for k, v in schema.items() if k != "title"},
    }


def schema_text() -> str:
    """The JSON Schema as the published file holds it."""
    return json.dumps(scenario_json_schema(), indent=2, sort_keys=True) + "\n"


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def _check_top_level(data: Mapping[str, Any], report: Collector) -> None:
    for key in data:
        if key not in ScenarioInput.model_fields:
            report.unknown((key,), ScenarioInput.model_fields)
    for key in _REQUIRED:
        if data.get(key) is None:
            where = (key,) if key in data else ()
            report.error(where, f"{key} is missing" if not where else "is empty", f"add {key}:")


def _workload(data: Any, report: Collector) -> Workload | None:
    entry = report.validate(WorkloadInput, data, ("workload",))
    if entry is None:
        return None
    return Workload(entry.sequence_length, entry.global_batch, entry.tokens)


def _plan(entry: PlanInput, case: Case, report: Collector) -> Plan | None:
    plan = resolve_plan(entry, case, report)
    if plan is None:
        return None
    for check in CHECKS:
        check(case, plan, report)
    return plan


def _check_money(
    sections: SectionsInput | None, data: Mapping[str, Any], report: Collector
) -> None:
    """Check candidates and prices; loaded only where a scenario has them."""
    from simulator.spec.resolve_purchase import check_currency, check_purchase

    check_currency(data, report)
    if sections is not None:
        check_purchase(sections.purchase, sections.economics, data, report)


def _sweep(data: Any, report: Collector) -> dict[str, tuple[Any, ...]]:
    """Axes of a sweep: known field names, each with values that the field takes."""
    if data is None:
        return {}
    if not isinstance(data, dict):
        report.error(("sweep",), f"expected a mapping, got {shown(data)}", "plan.tp: [1, 2, 4]")
        return {}
    axes = {}
    for axis, values in data.items():
        if not isinstance(values, list) or not 1 <= len(values) <= 10_000:
            report.error(("sweep", axis), f"expected a list, got {shown(values)}", "[1, 2, 4]")
            continue
        _check_axis(axis, values, report)
        axes[axis] = tuple(values)
    return axes


def _check_axis(axis: str, values: list[Any], report: Collector) -> None:
    parts = _axis_parts(axis)
    section, key = parts[0], parts[-1]
    models: dict[str, Any] = {"plan": PlanInput, "workload": WorkloadInput, "model": ModelInput}
    if section in models and len(parts) == 2 and key in models[section].model_fields:
        checked: Any = models[section]
    elif len(parts) == 4 and parts[:2] == ("cluster", "groups") and key in GroupInput.model_fields:
        checked = GroupInput
    elif axis == "risk":
        checked = SectionsInput
    elif axis in ("model", "stack", "cluster.fabric"):
        return
    else:
        known = [f"{s}.{f}" for s, m in models.items() for f in m.model_fields]
        known += ["cluster.groups[0].count", "cluster.fabric", "model", "stack", "risk"]
        report.unknown(("sweep", axis), known, "is no field that can be swept")
        return
    for index, value in enumerate(values):
        trial = Collector(SourceText({}))
        trial.validate(checked, {key: value}, ())
        for problem in trial.problems:
            if problem.path == key or problem.path.startswith((f"{key}.", f"{key}[")):
                report.error(("sweep", axis, index), problem.message, problem.hint)


def _axis_parts(axis: str) -> tuple[str | int, ...]:
    """``cluster.groups[0].count`` or ``cluster.groups.0.count`` -> its path."""
    parts = re.findall(r"[^.\[\]]+", axis[:200])
    return tuple(int(part) if part.isdigit() else part for part in parts) or ("",)


def _cluster_words(cluster: Cluster) -> str:
    return " + ".join(f"{count} {name}" for name, count in cluster.counts().items())


def _main() -> None:
    import argparse
    import sys

    parser = argparse.ArgumentParser(description="Print the JSON Schema of a scenario file.")
    parser.add_argument("--schema", action="store_true", required=True)
    parser.parse_args()
    sys.stdout.write(schema_text())


if __name__ == "__main__":
    _main()
