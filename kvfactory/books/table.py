"""One page table: which page holds which tokens of which row, and which entries changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.ids import (
    SINK,
    Cells,
    Columns,
    Entries,
    Int32,
    Int64,
    Pages,
    Positions,
    Rows,
    Slots,
    Tokens,
    ranges,
)
from kvfactory.books.mirror import Mirror
from kvfactory.books.shape import TableShape
from kvfactory.books.sight import Sight
from kvfactory.books.step import TableStep
from kvfactory.kinds import ceil_div

NO_COPIES, NO_ENTRIES = np.zeros((0, 2), np.int64), np.zeros((3, 0), np.int64)
_ZERO, _ONE = np.array(0), np.array(1)


class Grid(NamedTuple):
    """Where the new tokens of a step fall; the same for all tables of one page size.

    ``cells`` and ``offsets`` int64 [tokens]: the table entry and the place in its page. ``opens``
    are the entries of tokens at offset 0, each of which needs a new page.
    """

    cells: Cells
    offsets: Int64
    opens: Entries


class Part(NamedTuple):
    """A run of pages: ``pages[i]`` int64 [n] holds the tokens of column ``first + i``."""

    first: int
    pages: Pages


class PageTable:
    """The rows of one table. A row owns the pages of columns ``first[row]`` .. its last token's.

    Numbers that whole batches are divided by are arrays: numpy is twice as fast with those.
    """

    def __init__(self, shape: TableShape, num_rows: int) -> None:
        self.shape = shape
        self.path = f"tables.{shape.name}"
        self.pitch = shape.page_tokens, shape.row_pages
        self.pages = Allocator(shape.num_pages, self.path)
        self.mirror = Mirror(num_rows, shape.row_pages)
        self.first = np.zeros(num_rows, np.int32)
        self.sight = Sight(shape.lifetime, shape.page_tokens)
        self._page_tokens = np.array(shape.page_tokens)
        self._due = np.zeros(num_rows, np.int64)
        self._begin(np.arange(num_rows), self.first)

    # ---- growing -----------------------------------------------------------------------

    def grid(self, rows: Rows, positions: Positions) -> Grid:
        """The grid of new tokens at ``positions`` int64 [tokens] of ``rows`` int64 [tokens]."""
        columns = positions // self._page_tokens
        offsets = positions - columns * self._page_tokens
        cells = self.mirror.starts[rows] + columns
        first = (offsets == _ZERO).nonzero()[0]
        opens = np.array((rows[first], columns[first], cells[first]))
        return Grid(cells, offsets, opens)

    def shared_tails(self, grid: Grid, rows: Rows, tokens: Int64) -> Entries:
        """Entries to copy before ``tokens`` int64 [rows], indices into the grid, are written.

        Those are partial pages with several owners; the last of several writers keeps the page.
        """
        cells = grid.cells[tokens]
        owners: dict[int, int] = {}
        copied = np.zeros(len(tokens), np.bool_)
        partial = (grid.offsets[tokens] > 0).nonzero()[0]
        for index, page in zip(partial, self.mirror.pages[cells[partial]].tolist(), strict=True):
            left = owners.get(page, int(self.pages.owners[page]))
            copied[index] = left > 1
            owners[page] = left - 1
        cells = cells[copied]
        return np.array((rows[copied], cells - self.mirror.starts[rows[copied]], cells))

    def pages_for(self, tokens: Tokens) -> Columns:
        """The pages that so many tokens take, and so the column behind the last of them."""
        pages: Columns = -(-tokens // self._page_tokens)
        return pages

    def reserve(self, rows: Rows, tokens: Tokens) -> None:
        """Pages for the first ``tokens`` tokens of fresh rows. The caller asked for room."""
        entries = self._between(rows, np.zeros_like(rows), self.pages_for(tokens))
        self.mirror.write(entries, self.pages.take(entries.shape[1]))

    def step(self, rows: Rows, lengths: Tokens, grid: Grid, shared: Entries) -> TableStep:
        """The record of a step over ``rows`` whose new tokens fall on ``grid``.

        New pages are taken, and copies of the ``shared`` ones. The caller asked for room.
        """
        copies = self._copy(shared) if shared.size else NO_COPIES
        if grid.opens.size:
            self.mirror.write(grid.opens, self.pages.take(grid.opens.shape[1]))
        slots, updates = self._slots(grid), self.mirror.updates()
        return TableStep(slots, lengths, copies, updates, self.first_pages(rows))

    def first_pages(self, rows: Rows) -> Int32:
        """The first column that each row still owns, int32 [batch]."""
        return self.first[rows] if self.sight.ends else np.zeros(rows.size, np.int32)

    # ---- shrinking ---------------------------------------------------------------------

    def age(self, rows: Rows, committed: Tokens) -> None:
        """Release what no query at position ``committed`` or later can see."""
        if not self.sight.ends:
            return
        behind = (committed >= self._due[rows]).nonzero()[0]
        if behind.size:
            rows, seen = rows[behind], self.sight.first_columns(committed[behind])
            self._drop(rows, self.first[rows], seen)
            self._begin(rows, seen)

    def cut(self, rows: Rows, tokens: Tokens, keep: Tokens) -> None:
        """Shorten rows of ``tokens`` to ``keep`` tokens: the pages of the tail return."""
        start, stop = self.pages_for(keep), self.pages_for(tokens)
        cut = (start < stop).nonzero()[0]
        if cut.size:
            self._drop(rows[cut], start[cut], stop[cut])

    def vacate(self, rows: Rows, tokens: Tokens) -> None:
        """Release all pages of rows of ``tokens`` tokens."""
        self._drop(rows, self.first[rows], self.pages_for(tokens))
        self._begin(rows, np.zeros_like(rows))

    # ---- sharing -----------------------------------------------------------------------

    def owned_from(self, row: int) -> int:
        """The first position whose page the row still owns."""
        return int(self.first[row]) * self.shape.page_tokens

    def span(self, start: int, stop: int) -> range:
        """The columns of tokens start .. stop - 1 that a query at ``stop`` can see."""
        first = max(start, self.shape.lifetime.first_visible(stop)) // self.shape.page_tokens
        return range(first, ceil_div(stop, self.shape.page_tokens))

    def part(self, row: int, start: int, stop: int) -> Part:
        """The pages of tokens start .. stop - 1 that a query at ``stop`` can see."""
        span = self.span(start, stop)
        return Part(span.start, self.mirror.run(row, span))

    def fresh_part(self, tokens: int) -> Part:
        """New pages for what a query at ``tokens`` can see. The caller asked for room."""
        span = self.span(0, tokens)
        return Part(span.start, self.pages.take(len(span)))

    def adopt(self, rows: Rows, parts: Iterable[Part], tokens: int) -> None:
        """Give fresh ``rows`` the first ``tokens`` tokens of a chain, whose later parts win."""
        span = self.span(0, tokens)
        line = np.zeros(span.stop, np.int64)
        for part in parts:
            line[part.first : part.first + len(part.pages)] = part.pages
        line = line[span.start :]
        self.pages.share(line, times=len(rows))
        self._begin(rows, np.full_like(rows, span.start))
        columns = np.tile(np.arange(span.start, span.stop), len(rows))
        entries = self.mirror.entries(np.repeat(rows, len(line)), columns)
        self.mirror.write(entries, np.tile(line, len(rows)))

    # ---- entries -----------------------------------------------------------------------

    def slots_at(self, rows: Rows, positions: Positions) -> Slots:
        """The slots of ``positions`` int64 [n] of ``rows`` int64 [n]."""
        return self._slots(self.grid(rows, positions))

    def _slots(self, grid: Grid) -> Slots:
        slots: Slots = self.mirror.pages[grid.cells] * self._page_tokens + grid.offsets
        return slots

    def _begin(self, rows: Rows, first: Columns) -> None:
        """Let rows begin with column ``first``, and note at which length its page is due."""
        self.first[rows] = first
        if self.sight.ends:
            self._due[rows] = self.sight.ends_of(first)

    def _copy(self, entries: Entries) -> Int64:
        old, new = self.mirror.pages[entries[2]], self.pages.take(entries.shape[1])
        self.mirror.write(entries, new)
        self.pages.give(old)
        return np.stack((old, new), axis=1)

    def _between(self, rows: Rows, start: Columns, stop: Columns) -> Entries:
        counts = stop - start
        if np.count_nonzero(counts != _ONE):
            rows, start = np.repeat(rows, counts), ranges(start, counts)
        return self.mirror.entries(rows, start)

    def _drop(self, rows: Rows, start: Columns, stop: Columns) -> None:
        entries = self._between(rows, start, stop)
        self.pages.give_each(self.mirror.pages[entries[2]])
        self.mirror.write(entries, SINK)
