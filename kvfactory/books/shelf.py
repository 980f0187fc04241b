"""Page tables of one pitch: the same tokens fall on the same entries in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.ids import Cells, Int64, Positions, Rows, Tokens
from kvfactory.books.mirror import Entries, Mirror
from kvfactory.books.shape import TableShape
from kvfactory.books.step import TableStep
from kvfactory.books.table import NO_COPIES, PageTable

_ZERO = np.array(0)


class Growth(NamedTuple):
    """What a step needs of the tables of a shelf.

    ``cells`` and ``offsets`` int64 [tokens] say where the new tokens fall, ``opens`` are the
    entries that need a new page. ``shared``, by table, have to be copied first; None if there are
    none in any of them.
    """

    cells: Cells
    offsets: Int64
    opens: Entries
    shared: list[Entries] | None


class Shelf:
    """Tables of one pitch, whose mirrors lie under one another: a step looks into all at once."""

    def __init__(self, shapes: Sequence[TableShape], num_rows: int) -> None:
        row_pages = shapes[0].row_pages
        self._pages = np.zeros((len(shapes), num_rows * row_pages), np.int64)
        self.tables = [
            PageTable(shape, Mirror(num_rows, row_pages, pages))
            for shape, pages in zip(shapes, self._pages, strict=True)
        ]
        self._mirror = self.tables[0].mirror
        self._page_tokens = np.array(shapes[0].page_tokens)

    def growth(self, rows: Rows, positions: Positions, tails: Int64) -> Growth:
        """What new tokens at ``positions`` int64 [tokens] of ``rows`` int64 [tokens] need.

        ``tails`` are the tokens that may fall on a page with other owners.
        """
        columns = positions // self._page_tokens
        offsets = positions - columns * self._page_tokens
        cells = self._mirror.starts[rows] + columns
        first = (offsets == _ZERO).nonzero()[0]
        opens = self._mirror.entries(rows[first], columns[first])
        if not tails.size:
            return Growth(cells, offsets, opens, None)
        written = self._mirror.entries(rows[tails], columns[tails])
        return Growth(cells, offsets, opens, [table.shared(written) for table in self.tables])

    def has_room(self, growth: Growth) -> bool:
        """Whether every table has the pages; ``demands`` says it at length."""
        if growth.shared is not None:
            return all(count <= pages.free for pages, count in self.demands(growth))
        opened = growth.opens.cells.size
        for table in self.tables:
            if opened > table.pages.free:
                return False
        return True

    def demands(self, growth: Growth) -> list[tuple[Allocator, int]]:
        """The pages that each table would have to give."""
        opened = growth.opens.cells.size
        if growth.shared is None:
            return [(table.pages, opened) for table in self.tables]
        copied = [shared.cells.size for shared in growth.shared]
        return [(t.pages, opened + n) for t, n in zip(self.tables, copied, strict=True)]

    def step(self, rows: Rows, lengths: Tokens, growth: Growth) -> dict[str, TableStep]:
        """Each table's part of a step over ``rows`` that grows so. The caller asked for room."""
        copies = [NO_COPIES] * len(self.tables)
        if growth.shared is not None:
            copies = [t.copy(s) for t, s in zip(self.tables, growth.shared, strict=True)]
        if growth.opens.cells.size:
            for table in self.tables:
                table.open(growth.opens)
        slots = self._pages.take(growth.cells, axis=1)
        slots *= self._page_tokens
        slots += growth.offsets
        return {
            table.shape.name: TableStep(written, lengths, copied, *table.news(rows))
            for table, written, copied in zip(self.tables, slots, copies, strict=True)
        }
