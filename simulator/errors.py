"""Errors that a person can act on.

A :class:`UserError` is a mistake in what was asked: the command prints it without a traceback and
exits with code 2. Everything else that escapes is a defect of ours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong in an input: where, what it is, and what would be right.

    ``path`` is the dotted field path (``cluster.groups[1].count``); ``line`` and ``column`` count
    from 1 and are ``None`` where the input has no text position.
    """

    path: str
    message: str
    hint: str = ""
    source: str = ""
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.source, self.line, self.column) if part)
        head = ": ".join(part for part in (place, self.path) if part)
        text = f"{head}: {self.message}" if head else self.message
        return f"{text}; {self.hint}" if self.hint else text


class UserError(ValueError):
    """What was asked is wrong or impossible; ``problems`` lists every fault found."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(
            p if isinstance(p, Problem) else Problem(path="", message=p) for p in problems
        )
        super().__init__("\n".join(str(p) for p in self.problems))


def nearest(name: str, known: list[str], limit: int = 5) -> list[str]:
    """Known names that look like ``name``, best first (for "did you mean")."""
    import difflib

    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=limit, cutoff=0.5)
    contained = [k for low, k in lowered.items() if name.lower() in low]
    ordered = [lowered[c] for c in close] + contained
    return list(dict.fromkeys(ordered))[:limit]
