"""Text of a scenario -> plain data, with the line and column of everything in it.

A narrow YAML, on purpose: one document, a mapping on top, no tags, no merge keys, no duplicate
keys, bounded depth and size, and numbers as people write them (``1e9`` and ``1_000`` are numbers;
``no``, ``on`` and ``12:30:45`` are text). JSON reads through the same path. The tree is built from
parser events, so a hostile file is refused where it becomes hostile, before it costs time.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from simulator.errors import Problem, UserError

FieldPath = tuple[str | int, ...]

#: Refused above these: no scenario by hand or by our own export comes near.
MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 24
MAX_NODES = 50_000
MAX_NUMBER_LENGTH = 64

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(?:inf|infinity|nan)", re.IGNORECASE)
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True)
class SourceText:
    """Parsed input: ``data`` is plain; positions are (line, column) counted from 1.

    ``values`` holds where a value begins, ``keys`` where the key that names it begins, both by
    field path (``("cluster", "groups", 1, "count")``; ``()`` is the whole document).
    """

    data: Any
    source: str = ""
    values: Mapping[FieldPath, tuple[int, int]] = field(default_factory=dict)
    keys: Mapping[FieldPath, tuple[int, int]] = field(default_factory=dict)

    def position(self, path: FieldPath, at_key: bool = False) -> tuple[int | None, int | None]:
        """Position of a field, or of the nearest enclosing one that is in the text."""
        if at_key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                return self.values[path[:end]]
        return None, None


def load_source(path: str | Path) -> SourceText:
    """Read and parse a YAML or JSON file (``-`` is standard input).

    Raises:
        UserError: the file is absent, a directory, too large, not text, or not the narrow YAML.
    """
    return parse_source(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """Text of a small regular file; UserError names what is wrong with any other."""
    name = str(path)
    if name == "-":
        return _decode(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "<stdin>")
    try:
        status = os.stat(name)
        if stat.S_ISDIR(status.st_mode):
            raise _failure(name, "is a directory", "name a scenario file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise _failure(name, "is not a regular file", "name a YAML or JSON file")
        if status.st_size > MAX_FILE_BYTES:
            size_mb = status.st_size / 1e6
            raise _failure(
                name,
                f"is too large for a scenario ({size_mb:.1f} MB)",
                f"at most {MAX_FILE_BYTES / 1e6:g} MB",
            )
        with open(name, "rb") as stream:
            return _decode(stream.read(MAX_FILE_BYTES + 1), name)
    except OSError as error:
        raise _failure(name, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise _failure(ascii(name), "is not a file name") from None


def parse_source(text: str, source: str = "") -> SourceText:
    """Parse YAML or JSON text whose top is a mapping; positions count from 1.

    Raises:
        UserError: with the position of the first thing that is not the narrow YAML.
    """
    builder = _Builder(source)
    try:
        root = builder.build(yaml.parse(text, Loader=_loader()))
    except yaml.YAMLError as error:
        raise _syntax_error(error, source, text) from None
    if root is None or (isinstance(root, _Scalar) and _plain(root) is None):
        raise _failure(
            source, "is empty", "a scenario has model, workload and cluster", line=1, column=1
        )
    if not isinstance(root, _Mapping):
        raise _failure(
            source,
            "expected a mapping (key: value lines) at the top",
            "begin with model:, workload: and cluster:",
            line=root.line,
            column=root.column,
        )
    expander = _Expander(source)
    data = expander.expand(root, (), 0)
    return SourceText(data, source, expander.values, expander.keys)


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_FILE_BYTES:
        limit_mb = MAX_FILE_BYTES / 1e6
        raise _failure(name, "is too large for a scenario", f"at most {limit_mb:g} MB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        head = raw[: error.start]
        raise _failure(
            name,
            "is not UTF-8 text",
            "save it as UTF-8, or name a YAML or JSON file",
            line=head.count(b"\n") + 1,
            column=error.start - head.rfind(b"\n"),
        ) from None
    if "\0" in text:
        raise _failure(name, "is a binary file", "name a YAML or JSON file")
    return text


def _failure(
    source: str, message: str, hint: str = "", line: int | None = None, column: int | None = None
) -> UserError:
    return UserError(Problem("", message, hint, source, line, column))


def _syntax_error(error: yaml.YAMLError, source: str, text: str) -> UserError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "not readable"
    if "cannot start any token" in what:
        what += " (tab characters cannot indent)"
    if mark:
        line, column = mark.line + 1, mark.column + 1
    else:
        head = text[: getattr(error, "position", 0)]
        line, column = head.count("\n") + 1, len(head) - head.rfind("\n")
    return _failure(source, f"not valid YAML: {what}", line=line, column=column)


@dataclass(slots=True)
class _Scalar:
    line: int
    column: int
    text: str
    is_plain: bool


@dataclass(slots=True)
class _Sequence:
    line: int
    column: int
    items: list[_Node] = field(default_factory=list)
    open: bool = True


@dataclass(slots=True)
class _Mapping:
    line: int
    column: int
    pairs: dict[str, tuple[_Scalar, _Node]] = field(default_factory=dict)
    pending: _Scalar | None = None
    open: bool = True


_Node = _Scalar | _Sequence | _Mapping


class _Builder:
    """Parser events -> node tree, without recursion and with every refusal in one place."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.anchors: dict[str, _Node] = {}
        self.stack: list[_Sequence | _Mapping] = []
        self.root: _Node | None = None
        self.documents = 0
        self.nodes = 0

    def build(self, events: Iterator[Any]) -> _Node | None:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise self.refuse(event, "a second document begins", "keep one per file")
            elif isinstance(event, yaml.AliasEvent):
                self.place(self.aliased(event), event)
            elif isinstance(event, yaml.NodeEvent):
                self.open_node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.stack.pop().open = False
        return self.root

    def refuse(self, event: Any, message: str, hint: str = "") -> UserError:
        mark = event.start_mark
        return _failure(self.source, message, hint, mark.line + 1, mark.column + 1)

    def open_node(self, event: Any) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.refuse(event, f"more than {MAX_NODES:,} values", "make it smaller")
        if event.tag is not None:
            tag = _short(event.tag.replace("tag:yaml.org,2002:", "!!"))
            raise self.refuse(event, f"tag {tag} is not allowed", "write the plain value")
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        node: _Node
        if isinstance(event, yaml.ScalarEvent):
            node = _Scalar(line, column, event.value, bool(event.implicit[0]))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = _Sequence(line, column)
        else:
            node = _Mapping(line, column)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        self.place(node, event)
        if not isinstance(node, _Scalar):
            self.stack.append(node)
            if len(self.stack) > MAX_DEPTH:
                raise self.refuse(event, f"nested deeper than {MAX_DEPTH} levels")

    def aliased(self, event: Any) -> _Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            raise self.refuse(event, f"alias *{_short(event.anchor)} has no anchor")
        if not isinstance(node, _Scalar) and node.open:
            raise self.refuse(event, f"alias *{_short(event.anchor)} contains itself")
        return node

    def place(self, node: _Node, event: Any) -> None:
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if isinstance(parent, _Sequence):
            parent.items.append(node)
        elif parent.pending is not None:
            parent.pairs[parent.pending.text] = (parent.pending, node)
            parent.pending = None
        else:
            parent.pending = self.checked_key(parent, node, event)

    def checked_key(self, parent: _Mapping, node: _Node, event: Any) -> _Scalar:
        if not isinstance(node, _Scalar):
            raise self.refuse(event, "a field name must be plain text")
        if node.text == "<<" and node.is_plain:
            raise self.refuse(event, "merge keys (<<) are not allowed", "write the fields out")
        if node.text in parent.pairs:
            first = parent.pairs[node.text][0].line
            raise self.refuse(
                event,
                f"{_short(node.text)}: given twice (first on line {first})",
                "keep one of them",
            )
        return node


class _Expander:
    """Node tree -> plain data and positions; aliases are expanded and paid for by node count."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.values: dict[FieldPath, tuple[int, int]] = {}
        self.keys: dict[FieldPath, tuple[int, int]] = {}

    def expand(self, node: _Node, path: FieldPath, depth: int) -> Any:
        if len(self.values) >= MAX_NODES or depth > MAX_DEPTH:
            raise _failure(
                self.source,
                f"aliases expand to more than {MAX_NODES:,} values or {MAX_DEPTH} levels",
                "write the values out",
                node.line,
                node.column,
            )
        self.values[path] = (node.line, node.column)
        if isinstance(node, _Scalar):
            return _plain(node)
        if isinstance(node, _Sequence):
            return [self.expand(item, (*path, i), depth + 1) for i, item in enumerate(node.items)]
        data = {}
        for name, (key, value) in node.pairs.items():
            self.keys[(*path, name)] = (key.line, key.column)
            data[name] = self.expand(value, (*path, name), depth + 1)
        return data


def _plain(node: _Scalar) -> Any:
    """Value of a scalar by YAML 1.2's core schema, plus digit groups (``1_000``)."""
    text = node.text
    if not node.is_plain:
        return text
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if len(text) <= MAX_NUMBER_LENGTH:
        if _INTEGER.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
        if _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", "").lower())
    return text


def _short(text: str, limit: int = 40) -> str:
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
