"""Models by name: ``scenarios/models/*.yaml``, one file per family.

A file has ``defaults`` (ModelSpec fields that the family shares) and ``models`` (name -> fields,
``aliases``, ``source``). Names are compared without case, separators and a vendor's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from simulator.errors import Problem, UserError, nearest
from simulator.spec.model import MlaSpec, ModelSpec, MoeSpec, VisionSpec
from simulator.spec.parameters import active_parameters, total_parameters

_PARTS: dict[str, Any] = {"moe": MoeSpec, "mla": MlaSpec, "vision": VisionSpec}
_FIELDS = frozenset(f.name for f in fields(ModelSpec)) - {"name", "warnings"}
_REQUIRED = ("layers", "hidden", "heads", "source")
_MODEL_KEY = re.compile(r"  (\S+):\s*$")
#: Endings that name a tuning or a file format of the same model.
_VARIANT = re.compile(r"[-_](instruct|chat|base|it|pt|hf)([-_].*)?$", re.IGNORECASE)
_ALIASES = re.compile(r"aliases: \[([^\]]*)\]")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]
    """Safe YAML that refuses a key written twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in mapping:
                raise UserError(f"{key_node.start_mark.name}: the key {key!r} is there twice")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_StrictLoader.add_constructor(
    "tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node)
)


@dataclass(frozen=True)
class PresetRow:
    """One line of ``gpumix models``; parameters in elements, ``active`` per token."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    parameters: int
    active: int
    source: str


def preset(name: str) -> ModelSpec:
    """The model called ``name``, in any of its spellings (``Llama-3.1-8B``, ``llama3.1_8b``).

    Raises:
        UserError: no preset has this name; lists the near ones.
    """
    entry = _index().get(simplified(name)) or _index().get(simplified(_VARIANT.sub("", name)))
    if entry is None:
        names = preset_names()
        close = nearest(name, list(names)) if 0 < len(name) <= 100 else []
        hint = "did you mean " + ", ".join(close) if close else "known: " + ", ".join(names)
        raise UserError(Problem("model", f"no model is called {name[:100]!r}", hint))
    family, canonical = entry
    return _family(family)[canonical]


def preset_names() -> tuple[str, ...]:
    """Canonical names, by family and then as the family's file orders them."""
    return tuple(dict.fromkeys(name for _, name in _index().values()))


def preset_table() -> tuple[PresetRow, ...]:
    """A row for every preset, in the order of :func:`preset_names`."""
    return tuple(_row(preset(name)) for name in preset_names())


def _row(model: ModelSpec) -> PresetRow:
    return PresetRow(
        model.name,
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.vocab,
        total_parameters(model),
        active_parameters(model),
        model.source,
    )


def simplified(name: str) -> str:
    """Without case, separators and vendor: ``meta-llama/Llama-3.1-8B`` -> ``llama3.18b``.

    Dots stay where they part digits, since 1.3b and 13b are two models.
    """
    text = name.strip().lower().rsplit("/", 1)[-1]
    text = re.sub(r"^meta[-_ ]+(?=llama)", "", text)
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)
    return re.sub(r"[-_\s]+", "", text)


@cache
def _texts() -> dict[str, str]:
    folder = files("scenarios") / "models"
    entries = sorted((e for e in folder.iterdir() if e.name.endswith(".yaml")), key=_by_name)
    return {entry.name: entry.read_text(encoding="utf-8") for entry in entries}


def _by_name(entry: Any) -> str:
    return str(entry.name)


@cache
def _index() -> dict[str, tuple[str, str]]:
    """Simplified name -> (file, canonical name), without the cost of parsing every file."""
    index: dict[str, tuple[str, str]] = {}
    for family, text in _texts().items():
        for canonical, spellings in _spellings(text):
            for spelling in (canonical, *spellings):
                key = simplified(spelling)
                if index.setdefault(key, (family, canonical)) != (family, canonical):
                    raise UserError(f"{family}: the name {spelling!r} is taken")
    return index


def _spellings(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each model's name and aliases, in the order of the text."""
    name, block = "", ""
    for line in (*text.partition("\nmodels:")[2].splitlines(), "  :"):
        match = _MODEL_KEY.match(line)
        if match is None and line != "  :":
            block += line + " "
            continue
        if name:
            aliases = _ALIASES.search(block)
            yield name, [a.strip() for a in aliases[1].split(",")] if aliases else []
        name, block = match[1] if match else "", ""


@cache
def _family(file_name: str) -> dict[str, ModelSpec]:
    data = yaml.load(_texts()[file_name], Loader=_StrictLoader)
    defaults = data.get("defaults", {})
    return {
        name: _spec(name, {**defaults, **entry}, file_name)
        for name, entry in data["models"].items()
    }


def _spec(name: str, entry: dict[str, Any], file_name: str) -> ModelSpec:
    """ModelSpec of one entry; absent ffn, kv_heads and head_dim follow from the others."""
    given = {key: value for key, value in entry.items() if key != "aliases"}
    unknown = sorted(given.keys() - _FIELDS)
    absent = [key for key in _REQUIRED if key not in given]
    if unknown or absent:
        raise UserError(f"{file_name}: {name}: unknown fields {unknown}, missing fields {absent}")
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("head_dim", given["hidden"] // given["heads"])
    given.setdefault("ffn", 4 * given["hidden"])
    given.setdefault("vocab", 0)
    for key, cls in _PARTS.items():
        if key in given:
            given[key] = cls(**given[key])
    return ModelSpec(name=name, **given)
