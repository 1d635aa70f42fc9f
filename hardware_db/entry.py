"""One entry of the database: a YAML file in, a frozen description and its provenance out.

A file describes one GPU, link, node or fabric. Its ``entry`` key says which; ``sources`` names
the sources once; words (title, architecture, ...) stand as they are; every quantity is a mapping
``{value: ..., source: key or text, basis: ...}``, see :class:`hardware_db.schema.Fact`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml

from hardware_db.schema import BASES, DTYPES, FabricSpec, Fact, GpuSpec, LinkSpec, NodeSpec, Spec
from simulator.errors import Problem, UserError, nearest

#: Entry kinds and what they make.
KINDS: dict[str, type[GpuSpec] | type[LinkSpec] | type[NodeSpec] | type[FabricSpec]] = {
    "gpu": GpuSpec,
    "link": LinkSpec,
    "node": NodeSpec,
    "fabric": FabricSpec,
}

# Fields that are words or names, not quantities: no source needed.
_WORDS = frozenset(
    (
        *("name", "title", "vendor", "architecture", "compute_capability", "form", "kind"),
        *("intra_node", "fabric"),
    )
)
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,79}")
_MAX_FILE_BYTES = 256 * 1024

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Safe YAML in which a repeated key is an error and ``1e9`` is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A description with the provenance of each of its quantities and the file it came from."""

    kind: str
    spec: Spec
    facts: Mapping[str, Fact]
    file: str


def parse_entry(text: str, file: str) -> Entry:
    """Read one entry from YAML ``text``; ``file`` names it in messages.

    Raises:
        UserError: the text is not YAML, a key is repeated, unknown or missing, a value is of the
            wrong kind or has no source: all faults at once.
    """
    data = _yaml(text, file)
    kind = data.pop("entry", None)
    if kind not in KINDS:
        raise UserError(_problem(file, "entry", f"{kind!r} is no entry kind", ", ".join(KINDS)))
    reader = _Reader(data, file)
    spec = reader.make(KINDS[kind])
    return Entry(kind, spec, reader.facts, file)


def _yaml(text: str, file: str) -> dict[str, Any]:
    if len(text) > _MAX_FILE_BYTES:
        raise UserError(_problem(file, "", f"is larger than {_MAX_FILE_BYTES // 1024} KiB"))
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        message = error.problem or "is not valid YAML"
        raise UserError(
            Problem(path="", message=message, source=file, line=line, column=column)
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(_problem(file, "", f"is not valid YAML: {error}")) from None
    if not isinstance(data, dict):
        raise UserError(_problem(file, "", "must hold one mapping", "see hardware_db/gpus/*.yaml"))
    return data


def _problem(file: str, path: str, message: str, hint: str = "") -> Problem:
    return Problem(path=path, message=message, hint=hint, source=file)


class _Reader:
    """Turns the mapping of one file into a description, collecting every fault."""

    def __init__(self, data: dict[str, Any], file: str) -> None:
        self._data = data
        self._file = file
        self._problems: list[Problem] = []
        self.facts: dict[str, Fact] = {}
        sources = data.pop("sources", None) or {}
        if not isinstance(sources, dict) or not all(isinstance(s, str) for s in sources.values()):
            self._fault("sources", "must map short keys to texts")
            sources = {}
        self._sources: dict[str, str] = {str(key): text for key, text in sources.items()}

    def make(self, cls: type[Any]) -> Any:
        """Build ``cls``; raises :class:`UserError` with every fault found."""
        declared = {field.name: str(field.type) for field in fields(cls)}
        for key in self._data:
            if key not in declared:
                close = nearest(str(key), list(declared))
                self._fault(str(key), "is not a field", f"near ones: {', '.join(close)}")
        values = {}
        for name, kind in declared.items():
            if name not in self._data and name == "aliases":
                values[name] = ()
            elif name not in self._data:
                self._fault(name, "is missing")
            else:
                values[name] = self._field(name, kind, self._data[name])
        if self._problems:
            raise UserError(*self._problems)
        return cls(**values)

    def _field(self, name: str, kind: str, given: Any) -> Any:
        if name == "aliases":
            return self._aliases(given)
        if name in _WORDS:
            if given is None and "None" in kind:
                return None
            if not isinstance(given, str) or not given.strip():
                self._fault(name, f"must be a word, got {given!r}", "quote it")
            elif name == "name" and not _NAME.fullmatch(given):
                self._fault(name, f"{given!r} is no canonical name", "write it as h100-sxm-80gb")
            return given
        if name == "peak_flops":
            return self._peaks(given)
        value = self._fact(name, given)
        if name == "gpus":
            return self._slots(value)
        return self._quantity(name, kind, value)

    def _aliases(self, given: Any) -> tuple[str, ...]:
        if not isinstance(given, list) or not all(isinstance(alias, str) for alias in given):
            self._fault("aliases", "must be a list of words", 'quote numbers: ["3090"]')
            return ()
        return tuple(given)

    def _peaks(self, given: Any) -> dict[str, float]:
        if not isinstance(given, dict) or not given:
            self._fault("peak_flops", "must map dtypes to rates", f"dtypes: {', '.join(DTYPES)}")
            return {}
        peaks = {}
        for dtype, entry in given.items():
            path = f"peak_flops.{dtype}"
            if dtype not in DTYPES:
                self._fault(path, "is no dtype", f"dtypes: {', '.join(DTYPES)}")
            peaks[str(dtype)] = self._quantity(path, "float", self._fact(path, entry))
        if "fp32" not in peaks:
            self._fault("peak_flops.fp32", "is missing")
        return peaks

    def _slots(self, value: Any) -> tuple[str, ...]:
        counted = isinstance(value, dict) and all(
            isinstance(name, str) and type(count) is int and 0 < count <= 1024
            for name, count in value.items()
        )
        if not counted or not value:
            self._fault("gpus", "must map GPU names to counts", "value: {h100-sxm-80gb: 8}")
            return ()
        return tuple(name for name, count in value.items() for _ in range(count))

    def _fact(self, path: str, given: Any) -> Any:
        if not isinstance(given, dict) or set(given) != {"value", "source", "basis"}:
            self._fault(path, "needs value, source and basis", "{value: 1, source: ..., basis: ..}")
            return None
        source, basis = given["source"], given["basis"]
        if not isinstance(source, str) or not source.strip():
            self._fault(f"{path}.source", "is empty")
            source = ""
        if basis not in BASES:
            self._fault(f"{path}.basis", f"{basis!r} is no basis", f"choose: {', '.join(BASES)}")
        self.facts[path] = Fact(given["value"], self._sources.get(source, source), str(basis))
        return given["value"]

    def _quantity(self, path: str, kind: str, value: Any) -> Any:
        if value is None and ("None" in kind or path not in self.facts):
            return None
        if kind == "bool":
            if not isinstance(value, bool):
                self._fault(path, f"must be true or false, got {value!r}")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fault(path, f"must be a number, got {value!r}")
            return value
        if not math.isfinite(value) or value < 0:
            self._fault(path, f"must be finite and not negative, got {value!r}")
            return value
        if kind.startswith("int"):
            if value != int(value):
                self._fault(path, f"must be whole, got {value!r}")
            return int(value)
        return float(value)

    def _fault(self, path: str, message: str, hint: str = "") -> None:
        self._problems.append(_problem(self._file, path, message, hint))
