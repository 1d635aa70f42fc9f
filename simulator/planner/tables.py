"""Prices of distinct combinations of a few columns, looked up for many rows.

Kernels depend on few of a plan's fields: each distinct combination is priced once, whatever the
number of plans, and every plan reads its prices by row number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Table:
    """Grows by the combinations it is asked for.

    ``price`` takes one array per key column (equal lengths: distinct combinations) and returns the
    prices, shape (fields, combinations).
    """

    def __init__(self, price: Callable[..., Floats]) -> None:
        self._price = price
        self._ranks: list[Ints] = []
        self._counts: list[int] = []
        self._row_of: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._keys: Ints = np.empty((0, 0), np.int64)
        self.values: Floats = np.empty((0, 0))

    def rows(self, *columns: Ints) -> npt.NDArray[np.int32]:
        """Row numbers (second axis of :attr:`values`) of equal-length key columns."""
        if not self._ranks:
            self._ranks = [np.full(1, -1, np.int64) for _ in columns]
            self._counts = [0] * len(columns)
            self._keys = np.empty((len(columns), 0), np.int64)
        found = [self._ranked(i, column) for i, column in enumerate(columns)]
        if any(ranks is None for ranks in found):
            self._rebuild()
            code = self._code(columns)
        else:
            code = self._joined([ranks for ranks in found if ranks is not None])
        rows = self._row_of[code]
        if len(rows) and rows.min() < 0:
            self._add(columns, code[rows < 0], np.flatnonzero(rows < 0))
            rows = self._row_of[code]
        return rows

    def _ranked(self, index: int, column: Ints) -> Ints | None:
        """Numbers of a column's values; None where there were new ones (they have theirs now)."""
        ranks = self._ranks[index]
        try:
            found = ranks[column]
            if not len(found) or found.min() >= 0:
                return found
        except IndexError:
            more = int(column.max()) + 1 - len(ranks)
            ranks = self._ranks[index] = np.concatenate([ranks, np.full(more, -1, np.int64)])
            found = ranks[column]
        new = np.unique(column[found < 0])
        ranks[new] = self._counts[index] + np.arange(len(new))
        self._counts[index] += len(new)
        return None

    def _code(self, columns: Sequence[Ints]) -> Ints:
        pairs = zip(self._ranks, columns, strict=True)
        return self._joined([ranks[column] for ranks, column in pairs])

    def _joined(self, ranks: Sequence[Ints]) -> Ints:
        """One number for each combination of ranks."""
        code = ranks[0]
        for count, column in zip(self._counts[1:], ranks[1:], strict=True):
            code = code * count + column
        return code

    def _rebuild(self) -> None:
        self._row_of = np.full(int(np.prod(self._counts)), -1, np.int32)
        if self._keys.shape[1]:
            self._row_of[self._code(list(self._keys))] = np.arange(self._keys.shape[1])

    def _add(self, columns: Sequence[Ints], codes: Ints, where: npt.NDArray[np.intp]) -> None:
        _, first = np.unique(codes, return_index=True)
        keys = np.stack([column[where[first]] for column in columns])
        start = self._keys.shape[1]
        self._row_of[self._code(list(keys))] = start + np.arange(keys.shape[1])
        self._keys = np.concatenate([self._keys, keys], axis=1)
        prices = self._price(*keys)
        self.values = np.concatenate([self.values, prices], axis=1) if start else prices


class Tables:
    """Tables by what their prices depend on, shared by all that ask the same of one case."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], Table] = {}

    def get(self, key: tuple[Any, ...], price: Callable[..., Floats]) -> Table:
        """The table of a key, made with ``price`` the first time."""
        if key not in self._tables:
            self._tables[key] = Table(price)
        return self._tables[key]


def stacked(columns: Sequence[Any], rows: int) -> Floats:
    """Scalars and arrays as the fields of a table's prices, shape (columns, rows)."""
    return np.stack([np.broadcast_to(np.asarray(c, float), (rows,)) for c in columns])
