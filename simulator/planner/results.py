"""Results of a long run on disk: one JSON line per point, written as it comes, read to resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from simulator.errors import Problem, UserError

_FORMAT = "gpumix sweep 1"


def fingerprint(question: Mapping[str, Any]) -> str:
    """Short digest of what was asked; equal questions have equal digests."""
    text = json.dumps(question, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class ResultLog:
    """Appends rows with an ``index`` to a file; a row that is there isn't written again."""

    path: Path
    asked: str

    def __post_init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._file: TextIO | None = None

    def open(self, *, resume: bool) -> None:
        """Start the file, or go on with the rows that it holds.

        A last line that was cut off is dropped.

        Raises:
            UserError: the rows answer another question.
        """
        if resume and self.path.exists():
            self._read()
        lines = [json.dumps({"format": _FORMAT, "asked": self.asked})]
        lines += [json.dumps(row) for row in self.rows.values()]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        head = _parsed(lines[0]) if lines else None
        if not head or head.get("format") != _FORMAT or head.get("asked") != self.asked:
            raise UserError(
                Problem(
                    "--resume",
                    f"{self.path} holds the results of another sweep",
                    "name another --out, or leave --resume out to start anew",
                )
            )
        for line in lines[1:]:
            row = _parsed(line)
            if row is not None and isinstance(row.get("index"), int):
                self.rows[row["index"]] = row

    def add(self, row: dict[str, Any]) -> bool:
        """Write a row and flush; False where its index was there already."""
        assert self._file is not None
        if row["index"] in self.rows:
            return False
        self.rows[row["index"]] = row
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
