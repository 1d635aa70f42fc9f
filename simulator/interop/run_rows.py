"""CSV files of measurements as checked text rows: what is malformed is refused with its place.

A mistake in the file itself (unreadable, no usable header, a cell that should be a number and is
not, or one that no run can have) is an error that names file, line and column. What a well-formed
row lacks or leaves open is for :mod:`simulator.interop.runs` to judge, row by row.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simulator.errors import Problem, UserError

TableKind = Literal["runs", "layers"]

#: Larger files are not tables of measured runs.
MAX_FILE_BYTES = 64 * 2**20
#: Faults listed at once.
MAX_PROBLEMS = 20
_MAX_CELL = 80

#: Columns that make a table one of measured layers.
LAYER_COLUMNS = frozenset({"fwd_ms", "bwd_ms"})
#: Columns without which nothing is a table of runs or of layers.
_NEEDED: Mapping[TableKind, tuple[str, ...]] = {
    "runs": ("gpu", "seq_len"),
    "layers": ("gpu", "hidden", "ffn_hidden", "seq_len", "dtype", "micro_batch"),
}

#: Numeric columns with the least and the greatest value that a real run can have.
LIMITS: Mapping[str, tuple[float, float]] = {
    "layers": (1, 10_000), "hidden": (1, 10**6), "ffn_hidden": (1, 10**7), "heads": (1, 10**5),
    "kv_heads": (1, 10**5), "vocab": (1, 10**8), "num_experts": (0, 10**5), "topk": (0, 10**4),
    "seq_len": (1, 10**8), "gpus_per_node": (1, 1024), "n_gpus": (1, 10**6),
    "tp": (1, 10**4), "pp": (1, 10**4), "vpp": (1, 1000), "cp": (1, 10**4), "ep": (1, 10**4),
    "dp": (1, 10**6), "micro_batch": (1, 10**6), "grad_accum": (1, 10**5),
    "global_batch": (1, 10**8), "sp": (0, 1), "compile": (0, 1),
    "tokens_per_s_per_gpu": (1e-6, 1e12), "step_time_s": (1e-9, 1e9),
    "tflops_per_gpu": (1e-9, 1e6), "mfu": (1e-9, 1.0), "peak_allocated_gib": (1e-6, 1e6),
    "peak_reserved_gib": (1e-6, 1e6), "fwd_ms": (1e-9, 1e9), "bwd_ms": (1e-9, 1e9),
}  # fmt: skip


@dataclass(frozen=True)
class RunRow:
    """One line of a file: its number (the header is line 1) and its cells as text."""

    line: int
    cells: Mapping[str, str]
    source: str = ""

    def text(self, name: str) -> str:
        """The cell, stripped; empty where the column or the value is missing."""
        return (self.cells.get(name) or "").strip()

    def problem(self, name: str, message: str, hint: str = "") -> Problem:
        """A fault of one cell, with its place in the file."""
        columns = list(self.cells)
        column = columns.index(name) + 1 if name in columns else None
        return Problem(name, message, hint, self.source, self.line, column)

    def number(self, name: str) -> float | None:
        """The cell as a finite number, None where empty.

        Raises:
            UserError: not a number, or not finite.
        """
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or "_" in text:
            raise UserError(self.problem(name, f"{_cut(text)} isn't a finite number"))
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """The cell as a positive whole number.

        Raises:
            UserError: missing without a default, not whole or below 1.
        """
        value = self.number(name)
        if value is None:
            if default is None:
                raise UserError(self.problem(name, "missing", "give it in the row"))
            return default
        if value < 1 or value % 1:
            raise UserError(self.problem(name, f"{self.text(name)} isn't a whole number above 0"))
        return int(value)

    def choice(self, name: str, known: Mapping[str, Any], default: str | None = None) -> Any:
        """What a word stands for.

        Raises:
            UserError: unknown word, or missing without a default.
        """
        text = self.text(name).lower() or (default if default is not None else "")
        if text not in known:
            hint = f"one of {', '.join(k for k in known if k)}"
            raise UserError(self.problem(name, _cut(text) if text else "missing", hint))
        return known[text]


@dataclass(frozen=True)
class Table:
    """A checked file: which of the two formats it has, and its rows in file order."""

    path: Path
    kind: TableKind
    rows: tuple[RunRow, ...]


def read_table(path: Path) -> Table:
    """Rows of a CSV file in either format, every numeric cell within its limits.

    Raises:
        UserError: no such file, a directory, too large, not text, no or duplicate header, no rows,
            rows of another width, cells that aren't numbers or that no run can have.
    """
    source = str(path)
    header, lines = _split(_text(path), source)
    kind: TableKind = "layers" if set(header) >= LAYER_COLUMNS else "runs"
    absent = [name for name in _NEEDED[kind] if name not in header]
    if absent:
        found = ", ".join(_cut(name) for name in header[:6])
        raise UserError(
            Problem(
                "", f"line 1 isn't the header of a table of measured {kind}: found {found}",
                f"missing columns {', '.join(absent)}", source, 1,
            )
        )  # fmt: skip
    _check_unique(header, source)
    if not lines:
        raise UserError(Problem("", "has a header but no rows", source=source))
    rows = tuple(
        RunRow(line, dict(zip(header, [*cells, *[""] * (len(header) - len(cells))], strict=True)),
               source)
        for line, cells in lines
    )  # fmt: skip
    _check(rows, [name for name in header if name in LIMITS])
    return Table(path, kind, rows)


def read_tables(paths: Sequence[Path]) -> list[Table]:
    """Every table named; of a directory all ``*.csv`` below it in either format, by name.

    Raises:
        UserError: as :func:`read_table`; nothing named, or a directory without a table.
    """
    tables = []
    for path in paths:
        if path.is_dir():
            files = [f for f in sorted(path.rglob("*.csv")) if f.is_file() and _is_known(f)]
            if not files:
                raise UserError(
                    Problem("", "there is no table of measured runs or layers",
                            "a *.csv with the columns gpu, seq_len, ...", str(path))
                )  # fmt: skip
            tables += [read_table(file) for file in files]
        else:
            tables.append(read_table(path))
    return tables


def _is_known(path: Path) -> bool:
    """Whether a file of a directory claims to be one of our tables by its header."""
    with path.open("rb") as handle:
        first = handle.readline(100_000)
    names = {n.strip().strip('"') for n in first.decode("utf-8-sig", "replace").split(",")}
    return names >= {"gpu", "seq_len"}


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise UserError(Problem("", f"can't be read: {error.strerror}", source=str(path))) from None
    if size > MAX_FILE_BYTES:
        raise UserError(
            Problem("", f"has {size / 2**20:,.0f} MiB", f"at most {MAX_FILE_BYTES // 2**20} MiB",
                    str(path))
        )  # fmt: skip
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(Problem("", "isn't a CSV file: not UTF-8 text", source=str(path)))
    if not text.strip():
        raise UserError(Problem("", "empty", "a header row and one row per run", str(path)))
    return text


def _split(text: str, source: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header and rows with their line numbers; blank lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    found: list[tuple[int, list[str]]] = []
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                found.append((reader.line_num, cells))
    except csv.Error as error:
        raise UserError(
            Problem("", f"isn't a CSV file: {error}", source=source, line=reader.line_num or 1)
        ) from None
    header = [cell.strip() for cell in found[0][1]]
    while header and not header[-1]:
        header.pop()
    for line, cells in found[1:]:
        if any(cell.strip() for cell in cells[len(header) :]):
            raise UserError(
                Problem("", f"has {len(cells)} cells, the header has {len(header)}",
                        "quote cells that hold commas", source, line, len(header) + 1)
            )  # fmt: skip
    return header, [(line, cells[: len(header)]) for line, cells in found[1:]]


def _check_unique(header: list[str], source: str) -> None:
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        names = ", ".join(_cut(n) if n else "(no name)" for n in twice[:5])
        column = len(header) - header[::-1].index(twice[0])
        raise UserError(Problem(names, "column named twice in the header", "", source, 1, column))


def _check(rows: Sequence[RunRow], numeric: Sequence[str]) -> None:
    problems: list[Problem] = []
    for row in rows:
        for name in numeric:
            try:
                value = row.number(name)
            except UserError as error:
                problems += error.problems
                continue
            low, high = LIMITS[name]
            if value is not None and not low <= value <= high:
                text = f"{_cut(row.text(name))} isn't between {low:g} and {high:g}"
                problems.append(row.problem(name, text))
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise UserError(*problems[:MAX_PROBLEMS])


def _cut(text: str) -> str:
    """A cell as shown in a message."""
    return repr(text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 3] + "...")
