"""The scenarios that ship with the package (``scenarios/library/*.yaml``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from simulator.errors import Problem, UserError, nearest


@dataclass(frozen=True)
class ScenarioEntry:
    """A shipped scenario: its name, its title and what it shows in one line."""

    name: str
    title: str
    summary: str


def list_scenarios() -> list[ScenarioEntry]:
    """The shipped scenarios, by name."""
    return sorted((_entry(item) for item in _files()), key=lambda entry: entry.name)


def find_scenario(name: str) -> Path:
    """File of the shipped scenario that ``name`` means: case and separators may vary, and a part
    of the name is enough where it is unique.

    Raises:
        UserError: no scenario or several have that name; near ones are listed.
    """
    files = {item.name.removesuffix(".yaml"): item for item in _files()}
    wanted = _key(name)
    found = [known for known in files if _key(known) == wanted]
    found = found or [known for known in files if wanted and wanted in _key(known)]
    if len(found) == 1:
        return Path(str(files[found[0]]))
    near = sorted(found) or nearest(name[:64], list(files)) or sorted(files)
    what = "names several scenarios" if found else "is neither a file nor a ready scenario"
    shown = name if len(name) <= 60 and name.isprintable() else ascii(name[:60])
    raise UserError(
        Problem("", f"{shown!r} {what}", f"choose from {', '.join(near)}, or name a file")
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _files() -> Iterator[Traversable]:
    for item in (resources.files("scenarios") / "library").iterdir():
        if item.name.endswith(".yaml"):
            yield item


def _entry(item: Traversable) -> ScenarioEntry:
    """Title from the file's ``title``, summary from its first comment line; nothing is loaded."""
    text = item.read_text("utf-8")
    first = text.partition("\n")[0]
    summary = first.lstrip("# ").strip() if first.startswith("#") else ""
    title = re.search(r"^title: *(.+?) *$", text, re.MULTILINE)
    name = item.name.removesuffix(".yaml")
    return ScenarioEntry(name, title.group(1).strip("'\"") if title else name, summary)
