"""Looks entries up by forgiving names, reading as few files as it can.

A canonical name reads one file; any other spelling reads the entries of its kind once. Results
are cached for the process. Directories of the user's own entries (:func:`register_directory`, or
the environment variable ``GPUMIX_HARDWARE_DB``) come before the shipped ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hardware_db.entry import KINDS, Entry, parse_entry
from hardware_db.names import NameIndex
from hardware_db.schema import FabricSpec, Fact, GpuSpec, LinkSpec, NodeSpec, Spec
from simulator.errors import Problem, UserError

#: Environment variable with directories of the user's own entries, separated as in ``PATH``.
DIRECTORIES_VARIABLE = "GPUMIX_HARDWARE_DB"

_registered: list[Path] = []


def gpu(name: str) -> GpuSpec:
    """The GPU that ``name`` means.

    Case, spaces, dashes, the maker's name and, where that is unique, the memory size may vary:
    ``h100``, ``H100-SXM`` and ``NVIDIA H100 SXM5 80GB`` are one entry. A bare generation name is
    an alias of the variant whose entry lists it.

    Raises:
        UserError: the name is unknown or means several; near ones are listed.
    """
    spec = _find("gpu", name).spec
    assert isinstance(spec, GpuSpec)
    return spec


def node(name: str) -> NodeSpec:
    """The node type that ``name`` means; raises as :func:`gpu`."""
    spec = _find("node", name).spec
    assert isinstance(spec, NodeSpec)
    return spec


def fabric(name: str) -> FabricSpec:
    """The fabric that ``name`` means; raises as :func:`gpu`.

    :func:`hardware_db.parse_fabric` also understands descriptions in words.
    """
    spec = _find("fabric", name).spec
    assert isinstance(spec, FabricSpec)
    return spec


def link(name: str) -> LinkSpec:
    """The intra-node link that ``name`` means; raises as :func:`gpu`."""
    spec = _find("link", name).spec
    assert isinstance(spec, LinkSpec)
    return spec


def gpus() -> tuple[str, ...]:
    """Canonical names of all GPUs, sorted."""
    return _names("gpu")


def nodes() -> tuple[str, ...]:
    """Canonical names of all node types, sorted."""
    return _names("node")


def fabrics() -> tuple[str, ...]:
    """Canonical names of all fabrics, sorted."""
    return _names("fabric")


def links() -> tuple[str, ...]:
    """Canonical names of all intra-node links, sorted."""
    return _names("link")


def candidates(kind: str, name: str) -> list[str]:
    """Canonical names that ``name`` may mean: one when it is clear, none when it is unknown."""
    return _index(kind, _directories()).candidates(name)


def provenance(name: str, kind: str | None = None) -> Mapping[str, Fact]:
    """Where each quantity of an entry comes from: field -> (value, source, basis).

    Entries of ``peak_flops`` appear as ``peak_flops.bf16``. ``kind`` (``gpu``, ``node``,
    ``fabric``, ``link``) is needed only where kinds share a name; they are tried in that order.

    Raises:
        UserError: no entry has this name.
    """
    if kind is not None:
        _check_kind(kind)
        return _find(kind, name).facts
    for candidate in ("gpu", "node", "fabric", "link"):
        if len(candidates(candidate, name)) == 1:
            return _find(candidate, name).facts
    return _find("gpu", name).facts


def load_file(path: str | os.PathLike[str]) -> Spec:
    """The description in one YAML file of the database's format (a measured profile, say).

    Raises:
        UserError: the file cannot be read or is not a valid entry.
    """
    return _read(Path(path)).spec


def register_directory(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Add a directory of the user's own entries and return the canonical names found in it.

    Its ``*.yaml`` files, also one folder down, come before shipped entries of the same name. Of
    several directories the one registered last wins.

    Raises:
        UserError: the directory is missing or one of its files is not a valid entry.
    """
    directory = Path(path).resolve()
    found = _directory_entries(directory)
    if directory in _registered:
        _registered.remove(directory)
    _registered.append(directory)
    return tuple(sorted(entry.spec.name for entry in found))


def forget_directories() -> None:
    """Undo every :func:`register_directory` and re-read all files on the next look-up."""
    _registered.clear()
    for cached in (_directory_entries, _shipped, _catalogue, _index, _found):
        cached.cache_clear()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UserError(Problem(path="kind", message=f"{kind!r} is none of {', '.join(KINDS)}"))


def _directories() -> tuple[Path, ...]:
    """The user's directories, the strongest last."""
    listed = os.environ.get(DIRECTORIES_VARIABLE, "")
    from_environment = [Path(part).resolve() for part in listed.split(os.pathsep) if part]
    return tuple(dict.fromkeys((*from_environment, *_registered)))


def _read(path: Path) -> Entry:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise UserError(Problem(path="", message=str(reason), source=str(path))) from None
    return parse_entry(text, str(path))


@cache
def _directory_entries(directory: Path) -> tuple[Entry, ...]:
    if not directory.is_dir():
        raise UserError(
            Problem(path=DIRECTORIES_VARIABLE, message=f"no directory {str(directory)!r}")
        )
    found = sorted((*directory.glob("*.yaml"), *directory.glob("*/*.yaml")))
    return tuple(_read(path) for path in found)


def _folder(kind: str) -> Any:
    return files("hardware_db").joinpath(f"{kind}s")


@cache
def _shipped(kind: str, name: str) -> Entry | None:
    file = _folder(kind).joinpath(f"{name}.yaml")
    if not file.is_file():
        return None
    entry = parse_entry(file.read_text(encoding="utf-8"), f"hardware_db/{kind}s/{name}.yaml")
    assert entry.kind == kind and entry.spec.name == name, f"{entry.file} is misnamed"
    return entry


@cache
def _catalogue(kind: str, directories: tuple[Path, ...]) -> dict[str, Entry]:
    """Every entry of a kind by canonical name, the user's own in place of the shipped ones."""
    catalogue = {}
    for file in _folder(kind).iterdir():
        if file.name.endswith(".yaml"):
            entry = _shipped(kind, file.name.removesuffix(".yaml"))
            assert entry is not None
            catalogue[entry.spec.name] = entry
    catalogue.update(_own(kind, directories))
    return dict(sorted(catalogue.items()))


def _own(kind: str, directories: tuple[Path, ...]) -> dict[str, Entry]:
    return {
        entry.spec.name: entry
        for directory in directories
        for entry in _directory_entries(directory)
        if entry.kind == kind
    }


@cache
def _index(kind: str, directories: tuple[Path, ...]) -> NameIndex:
    own = _own(kind, directories)
    spellings: dict[str, tuple[str, ...]] = {name: own[name].spec.aliases for name in own}
    taken = {alias.lower() for aliases in spellings.values() for alias in aliases}
    for name in _catalogue(kind, directories):
        # A user's entry in place of a shipped one keeps the aliases by which that was found.
        shipped = _shipped(kind, name)
        inherited = shipped.spec.aliases if shipped is not None else ()
        free = tuple(alias for alias in inherited if alias.lower() not in taken)
        spellings[name] = spellings.get(name, ()) + free
    return NameIndex(spellings)


def _names(kind: str) -> tuple[str, ...]:
    return tuple(_catalogue(kind, _directories()))


def _find(kind: str, name: str) -> Entry:
    if not isinstance(name, str) or not name.strip():
        raise UserError(Problem(path=kind, message=f"a {kind} name is needed, got {name!r}"))
    return _found(kind, name.strip(), _directories())


@cache
def _found(kind: str, name: str, directories: tuple[Path, ...]) -> Entry:
    own = _own(kind, directories)
    if name in own:
        return own[name]
    # A canonical name is the name of its file: no need to read the others. (Lower case only: some
    # file systems would find the file under any case.)
    if name == name.lower() and all(letter.isalnum() or letter in "-." for letter in name):
        entry = _shipped(kind, name)
        if entry is not None:
            return entry
    canonical = _index(kind, directories).find(name, kind)
    return _catalogue(kind, directories)[canonical]
