"""Axes of a sweep: dotted fields of a scenario and the values that they take."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.errors import Problem, UserError, nearest

#: A sweep of more points than this is a mistake, or a job for ``search``.
MAX_POINTS = 1_000_000

#: Fields that fix how many GPUs a plan needs: with one of them as an axis, dp follows from it.
_SETS_DP = re.compile(r"plan\.(tp|pp|cp)$|cluster\.groups\.\d+\.(count|node|gpu|gpus_per_node)$")


@dataclass(frozen=True)
class Axis:
    """One field of the scenario (``plan.tp``, ``cluster.groups.0.count``) and its values."""

    name: str
    values: tuple[Any, ...]

    @property
    def parts(self) -> tuple[str | int, ...]:
        """Path of the field in the scenario's data."""
        return _parts(self.name)


def parse_axis(text: str) -> Axis:
    """``plan.tp=1,2,4`` as an axis; values are read as YAML. Raises UserError."""
    name, sign, values = text.partition("=")
    if not sign or not values.strip():
        raise UserError(
            Problem("--axis", f"{text!r} isn't FIELD=VALUE,...", "for example plan.tp=1,2,4")
        )
    import yaml

    try:
        read = tuple(yaml.safe_load(value) for value in _split(values))
    except yaml.YAMLError:
        raise UserError(
            Problem("--axis", f"{values!r} can't be read", "for example plan.tp=1,2,4")
        ) from None
    return make_axis(name.strip(), read)


def make_axis(name: str, values: Sequence[Any]) -> Axis:
    """An axis whose field is known and whose values are distinct. Raises UserError."""
    parts = _parts(name)
    axis = ".".join(str(part) for part in parts)
    _check_field(axis, parts)
    distinct = list({repr(value): value for value in values}.values())
    if not distinct:
        raise UserError(Problem(f"sweep.{axis}", "has no values", "plan.tp: [1, 2, 4]"))
    return Axis(axis, tuple(distinct))


def _split(text: str) -> Iterator[str]:
    """Split at commas that are outside of brackets and braces."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _parts(name: str) -> tuple[str | int, ...]:
    found = re.findall(r"[^.\[\]\s]+", name[:200])
    return tuple(int(part) if part.isdigit() else part for part in found)


def _check_field(axis: str, parts: tuple[str | int, ...]) -> None:
    known = _known_fields()
    pattern = ".".join("0" if isinstance(part, int) else part for part in parts)
    if pattern in known:
        return
    near = nearest(axis, sorted(known)) or ["plan.tp", "workload.global_batch", "model.layers"]
    raise UserError(
        Problem(f"sweep.{axis}", "is no field that can be swept", f"did you mean {near[0]}?")
    )


def _known_fields() -> set[str]:
    from simulator.spec import inputs

    sections: dict[str, Any] = {
        "plan": inputs.PlanInput,
        "workload": inputs.WorkloadInput,
        "model": inputs.ModelInput,
        "cluster.groups.0": inputs.GroupInput,
        "cluster.fabric": inputs.FabricInput,
        "plan.assignment.0": inputs.AssignmentInput,
    }
    fields = {f"{s}.{name}" for s, model in sections.items() for name in model.model_fields}
    return fields | {"model", "stack", "risk", "cluster.fabric"}


def points(axes: Sequence[Axis]) -> Iterator[tuple[int, dict[str, Any]]]:
    """All combinations in order, numbered; the last axis varies fastest."""
    names = [axis.name for axis in axes]
    for index, values in enumerate(itertools.product(*(axis.values for axis in axes))):
        yield index, dict(zip(names, values, strict=True))


def count_points(axes: Sequence[Axis]) -> int:
    """Number of combinations. Raises UserError beyond :data:`MAX_POINTS`."""
    total = 1
    for axis in axes:
        total *= len(axis.values)
    if total > MAX_POINTS:
        raise UserError(
            Problem("sweep", f"{total:,} points are too many", f"at most {MAX_POINTS:,}")
        )
    return total


def base_data(given: Mapping[str, Any], axes: Sequence[Axis]) -> tuple[dict[str, Any], list[str]]:
    """The scenario's data to which points are applied, and what was changed in it (for people).

    A fixed ``plan.dp`` is left out where an axis changes how many GPUs a replica takes.
    """
    data = {k: copy.deepcopy(v) for k, v in given.items() if k != "sweep"}
    data["plan"] = dict(data.get("plan") or {})
    names = [axis.name for axis in axes]
    notes = []
    if "plan.dp" not in names and any(_SETS_DP.match(n) for n in names) and "dp" in data["plan"]:
        del data["plan"]["dp"]
        notes.append("plan.dp follows from the GPUs and the other degrees at each point")
    return data, notes


def applied(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a scenario's data with fields set. Raises UserError where a path leads nowhere."""
    result = copy.deepcopy(dict(data))
    for name, value in changes.items():
        parts = _parts(name)
        target: Any = result
        for depth, part in enumerate(parts[:-1]):
            target = _step(target, part, parts[: depth + 1])
        target[parts[-1]] = value
    return result


def _step(target: Any, part: str | int, path: Sequence[str | int]) -> Any:
    """The mapping or list at ``part``; a name (of a model, a fabric) becomes its ``base``."""
    if isinstance(target, list):
        if not isinstance(part, int) or part >= len(target):
            where = ".".join(map(str, path))
            raise UserError(Problem(where, f"there are {len(target)} entries, numbered from 0"))
        return target[part]
    value = target.setdefault(part, {})
    if isinstance(value, str):
        target[part] = value = {"base": value}
    return value
