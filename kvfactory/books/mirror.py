"""The host's copy of a device table, and what the device has not heard of yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvfactory.books.ids import SINK, Cells, Columns, Int32, Int64, Pages, Rows

_NOTES = 64


class Entries(NamedTuple):
    """Entries of a device table, each named once.

    ``cells`` int64 [n] are their flat addresses, ``note`` int32 [3, n] their rows, their columns
    and space for what is written to them.
    """

    rows: Rows
    cells: Cells
    note: Int32

    def of(self, indices: list[int]) -> Entries:
        """Some of the entries."""
        return Entries(self.rows[indices], self.cells[indices], self.note[:, indices])


class Mirror:
    """Rows of page ids, end to end: ``pages`` int64 [rows * row_pages], the sink where empty.

    ``shape`` is (rows, row_pages), ``starts`` int64 [rows] the cell at which each row begins.
    """

    def __init__(self, num_rows: int, row_pages: int, pages: Pages | None = None) -> None:
        self.shape = num_rows, row_pages
        self.pages = np.zeros(num_rows * row_pages, np.int64) if pages is None else pages
        self.starts = np.arange(num_rows) * row_pages
        self._notes: list[Int32] = []
        self._repeated = False

    def entries(self, rows: Rows, columns: Columns) -> Entries:
        """The entries at ``columns`` int64 [n] of ``rows`` int64 [n]."""
        note = np.empty((3, rows.size), np.int32)
        note[0], note[1] = rows, columns
        return Entries(rows, self.starts[rows] + columns, note)

    def write(self, entries: Entries, pages: Pages | int) -> None:
        """Put ``pages`` int64 [n] into entries that were not written since the last update."""
        self.pages[entries.cells] = pages
        note = entries.note.copy()
        note[2] = pages
        self._notes.append(note)

    def clear(self, rows: Rows, columns: Columns) -> Pages:
        """Empty entries that were not written since the last update: the pages they had."""
        note = np.zeros((3, rows.size), np.int32)
        note[0], note[1] = rows, columns
        self._notes.append(note)
        cells = self.starts[rows] + columns
        pages: Pages = self.pages[cells]
        self.pages[cells] = SINK
        return pages

    def rewrite(self, entries: Entries, pages: Pages | int) -> None:
        """Put ``pages`` int64 [n] into any entries."""
        self.write(entries, pages)
        self._repeated = True
        if len(self._notes) > _NOTES:
            self._notes = [self._merged()]

    def updates(self) -> Int32:
        """What was written since the last call: (row, column, page) int32 [n, 3].

        No entry is named twice.
        """
        if not self._notes:
            return np.zeros((0, 3), np.int32)
        merged, self._notes, self._repeated = self._merged(), [], False
        return merged.T

    def run(self, row: int, columns: range) -> Pages:
        """The pages of adjoining columns of one row, int64 [n]."""
        start = int(self.starts[row])
        return self.pages[start + columns.start : start + columns.stop].copy()

    def view(self) -> Int64:
        """All rows, int64 [rows, row_pages], read only."""
        rows = self.pages.reshape(self.shape)
        rows.setflags(write=False)
        return rows

    def _merged(self) -> Int32:
        """All notes, the last one of each entry: int32 [3, n]."""
        if len(self._notes) == 1:
            return self._notes[0]
        notes = np.concatenate(self._notes, axis=1)
        if not self._repeated:
            return notes
        backwards = notes[:, ::-1]
        cells = self.starts[backwards[0]] + backwards[1]
        return backwards[:, np.unique(cells, return_index=True)[1]]
