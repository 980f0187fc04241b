"""The host's copy of a device table, and what the device has not heard of yet."""

from __future__ import annotations

import numpy as np

from kvfactory.books.ids import Cells, Columns, Entries, Int32, Int64, Pages, Rows

_NOTES = 64


class Mirror:
    """Rows of page ids, end to end: ``pages`` int64 [rows * row_pages], the sink where empty.

    ``shape`` is (rows, row_pages), ``starts`` int64 [rows] the cell at which each row begins.
    """

    def __init__(self, num_rows: int, row_pages: int) -> None:
        self.shape = num_rows, row_pages
        self.pages = np.zeros(num_rows * row_pages, np.int64)
        self.starts = np.arange(num_rows) * row_pages
        self._changed: list[Entries] = []

    def entries(self, rows: Rows, columns: Columns) -> Entries:
        """The entries at ``columns`` int64 [n] of ``rows`` int64 [n]."""
        return np.array((rows, columns, self.starts[rows] + columns))

    def write(self, entries: Entries, pages: Pages | int) -> None:
        """Put ``pages`` int64 [n] into entries, each of which is named once."""
        self.pages[entries[2]] = pages
        self._changed.append(entries)
        if len(self._changed) > _NOTES:
            self._changed = [_once(np.concatenate(self._changed, axis=1))]

    def updates(self) -> Int32:
        """What was written since the last call: (row, column, page) int32 [n, 3].

        An entry that was written twice may be named twice, both times with the page it has now.
        """
        changed, self._changed = self._changed, []
        if not changed:
            return np.zeros((0, 3), np.int32)
        entries = changed[0] if len(changed) == 1 else np.concatenate(changed, axis=1)
        updates = entries.astype(np.int32)
        updates[2] = self.pages[entries[2]]
        return updates.T

    def run(self, row: int, columns: range) -> Pages:
        """The pages of adjoining columns of one row, int64 [n]."""
        start = int(self.starts[row])
        return self.pages[start + columns.start : start + columns.stop].copy()

    def view(self) -> Int64:
        """All rows, int64 [rows, row_pages], read only."""
        rows = self.pages.reshape(self.shape)
        rows.setflags(write=False)
        return rows


def _once(entries: Entries) -> Entries:
    cells: Cells = entries[2]
    return entries[:, np.unique(cells, return_index=True)[1]]
