"""Scenario and plan -> plain data and YAML that load to the same again.

Every value is written out in SI base units under the field name that carries its unit, so that a
round trip changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

import yaml

import hardware_db
from simulator.errors import UserError
from simulator.spec.cluster import NodeGroup
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Assignment, Plan
from simulator.spec.resolve_cluster import NODE_OVERRIDES
from simulator.spec.resolve_plan import recompute_text
from simulator.spec.scenario import Scenario

T = TypeVar("T")


def scenario_to_mapping(scenario: Scenario) -> dict[str, Any]:
    """Plain data that :func:`~simulator.spec.scenario.scenario_from_mapping` takes."""
    workload = scenario.workload
    fabric = scenario.cluster.fabric
    cluster: dict[str, Any] = {"groups": [_group_to_mapping(g) for g in scenario.cluster.groups]}
    if fabric is not None:
        known = _known(hardware_db.fabric, fabric.name) == fabric
        cluster["fabric"] = fabric.name if known else _without(asdict(fabric), ("aliases",))
    data: dict[str, Any] = {
        "title": scenario.title,
        "model": model_to_plain(scenario.model),
        "workload": _without(asdict(workload)),
        "cluster": cluster,
        "stack": scenario.stack.name,
    }
    if scenario.plan is not None:
        data["plan"] = plan_to_mapping(scenario.plan)
    if scenario.sweep:
        data["sweep"] = {axis: list(values) for axis, values in scenario.sweep.items()}
    for key in ("purchase", "economics", "replay", "outputs"):
        if getattr(scenario, key) is not None:
            data[key] = dict(getattr(scenario, key))
    data["risk"] = scenario.risk
    return data


def plan_to_mapping(plan: Plan) -> dict[str, Any]:
    """Plain data of the ``plan`` section, every field explicit."""
    data = {
        f.name: getattr(plan, f.name)
        for f in dataclass_fields(plan)
        if f.name not in ("sharding", "recompute", "recompute_layers", "assignment")
    }
    data["sharding"] = plan.sharding.name.lower()
    data["recompute"] = recompute_text(plan)
    if plan.stage_layers is not None:
        data["stage_layers"] = list(plan.stage_layers)
    if plan.assignment:
        data["assignment"] = [_assignment_to_mapping(a) for a in plan.assignment]
    return _without(data)


def model_to_plain(model: ModelSpec) -> str | dict[str, Any]:
    """A preset's name where the model is that preset, else its fields that are not defaults."""
    from simulator.spec.presets import preset

    if _known(preset, model.name) == model:
        return model.name
    return _changed(model, skip=("warnings",))


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text of plain data, in the order of the keys."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes floats so that any YAML reader takes them as numbers, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text.partition("e")[0]:
        text = text.replace("e", ".0e", 1)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _float)


def _known(find: Callable[[str], T], name: str) -> T | None:
    try:
        return find(name)
    except UserError:
        return None


def _without(data: dict[str, Any], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    return {k: v for k, v in data.items() if v is not None and k not in keys}


def _changed(value: Any, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of a dataclass that have no default or differ from it."""
    data: dict[str, Any] = {}
    for f in dataclass_fields(value):
        item = getattr(value, f.name)
        if f.name in skip or (f.default is not MISSING and item == f.default):
            continue
        data[f.name] = _changed(item) if is_dataclass(item) else item
    return data


def _group_to_mapping(group: NodeGroup) -> dict[str, Any]:
    node = group.node
    named = _known(hardware_db.node, node.name)
    data: dict[str, Any]
    if (
        named is not None
        and named.name == node.name  # a described node's name may read like another's alias
        and named.gpus[: node.n_gpus] == node.gpus
    ):
        data = {"node": node.name}
        if named.gpus != node.gpus:
            data["gpus_per_node"] = node.n_gpus
        data |= {
            key: getattr(node, key)
            for key in NODE_OVERRIDES
            if getattr(node, key) != getattr(named, key)
        }
    elif node.is_mixed:
        data = {"gpus": list(node.gpus), **{key: getattr(node, key) for key in NODE_OVERRIDES}}
    else:
        data = {"gpu": node.gpus[0], "gpus_per_node": node.n_gpus}
        data |= {key: getattr(node, key) for key in NODE_OVERRIDES}
    data["count"] = group.count
    data["name"] = group.name
    if group.zone:
        data["zone"] = group.zone
    return data


def _assignment_to_mapping(entry: Assignment) -> dict[str, Any]:
    data = _without(asdict(entry))
    data.setdefault("state_share", "even")
    return data
