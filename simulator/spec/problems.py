"""Collects what is wrong with an input, each with its place in the text, to report all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from simulator.errors import Problem, UserError, nearest
from simulator.spec.fields import shown
from simulator.spec.yaml_source import FieldPath, SourceText

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

T = TypeVar("T")
M = TypeVar("M", bound="BaseModel")

#: Problems that are listed; a file with more is told how many there are.
MAX_PROBLEMS = 20
_MAX_NAME = 64


def path_text(path: FieldPath) -> str:
    """``("cluster", "groups", 1, "count")`` -> ``cluster.groups[1].count``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isprintable() else ascii(part)[1:-1]
            text += ("." if text else "") + name[:_MAX_NAME]
    return text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'tp'?``, or the list of what is known."""
    names = list(known)
    close = nearest(name, names, limit=2) if 2 <= len(name) <= _MAX_NAME else []
    if close:
        return "did you mean " + " or ".join(repr(n) for n in close) + "?"
    return "known: " + ", ".join(names)


class Collector:
    """Problems, warnings and defaults of one input, in the order in which they are found."""

    def __init__(self, text: SourceText) -> None:
        self.text = text
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.defaults: list[str] = []
        self._unlisted = 0

    def error(self, path: FieldPath, message: str, hint: str = "", at_key: bool = False) -> None:
        """Add a problem with the field at ``path``."""
        if len(self.problems) >= MAX_PROBLEMS:
            self._unlisted += 1
            return
        line, column = self.text.position(path, at_key)
        self.problems.append(
            Problem(path_text(path), message, hint, self.text.source, line, column)
        )

    def unknown(
        self, path: FieldPath, known: Iterable[str], message: str = "unknown field"
    ) -> None:
        """Add an unknown name, with the known ones that look like it."""
        is_listed = len(self.problems) < MAX_PROBLEMS
        hint = did_you_mean(str(path[-1]), known) if is_listed else ""
        self.error(path, message, hint, at_key=True)

    def warn(self, path: FieldPath, message: str) -> None:
        """Add a warning; the input stays valid."""
        self.warnings.append(f"{path_text(path)}: {message}")

    def default(self, path: FieldPath, value: Any, why: str = "") -> None:
        """Record a value that was filled in."""
        reason = f" ({why})" if why else ""
        self.defaults.append(f"{path_text(path)} = {value}{reason}")

    def attempt(self, path: FieldPath, make: Callable[[], T]) -> T | None:
        """``make()``, or None with its UserError recorded at ``path``."""
        try:
            return make()
        except UserError as error:
            for problem in error.problems:
                parts = (problem.source, problem.line, problem.column)
                place = ":".join(str(part) for part in parts if part)
                text = f"{place}: {problem.message}" if place else problem.message
                self.error(path, text, problem.hint)
            return None

    def validate(self, model: type[M], data: Any, path: FieldPath) -> M | None:
        """``data`` as the input model, or None with every fault recorded."""
        from pydantic import ValidationError

        if not isinstance(data, dict):
            names = ", ".join(list(model.model_fields)[:6])
            self.error(path, f"expected a mapping, got {shown(data)}", f"with the fields {names}")
            return None
        try:
            return model.model_validate(data)
        except ValidationError as error:
            self.add_validation(error, model, path)
            return None

    def add_validation(
        self, error: ValidationError, model: type[BaseModel], path: FieldPath = ()
    ) -> None:
        """Record each fault that pydantic found, worded for a person."""
        for fault in error.errors(include_url=False):
            where = (*path, *(p for p in fault["loc"] if not str(p).startswith("<")))
            kind, value, context = fault["type"], fault.get("input"), fault.get("ctx", {})
            if kind == "gpumix":
                self.error(where, context["message"], context["hint"])
            elif kind == "extra_forbidden":
                self.unknown(where, known_fields(model, fault["loc"][:-1]))
            elif kind == "missing":
                self.error(where, "is missing", "add it")
            elif kind in ("model_type", "dict_type", "model_attributes_type"):
                self.error(where, f"expected a mapping, got {shown(value)}")
            elif kind == "list_type":
                self.error(where, f"expected a list, got {shown(value)}", "write [a, b]")
            elif kind in ("too_short", "too_long"):
                bound = context.get("min_length", context.get("max_length"))
                relation = "at least" if kind == "too_short" else "at most"
                self.error(where, f"wrong number of entries, got {context['actual_length']}",
                           f"{relation} {bound:,}")  # fmt: skip
            else:
                self.error(where, fault["msg"])

    def raise_if_any(self) -> None:
        """Raise UserError with all problems in the order of their places in the text."""
        if not self.problems:
            return
        ordered = sorted(self.problems, key=lambda p: (p.line or 0, p.column or 0))
        if self._unlisted:
            ordered.append(
                Problem("", f"and {self._unlisted:,} more problems", source=self.text.source)
            )
        raise UserError(*ordered)


def known_fields(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the nested input model at a pydantic error location."""
    from pydantic import BaseModel

    current: Any = model
    for part in loc:
        if isinstance(part, int) or part.startswith("<"):
            continue
        inner = current.model_fields.get(part)
        if inner is None:
            break
        current = next(_models_in(inner.annotation, BaseModel), current)
    return list(current.model_fields)


def _models_in(annotation: Any, base: type) -> Iterator[Any]:
    from typing import get_args

    if isinstance(annotation, type) and issubclass(annotation, base):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner, base)
