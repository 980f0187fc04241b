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
    Int32,
    Int64,
    Pages,
    Positions,
    Rows,
    Slots,
    Tokens,
    ranges,
)
from kvfactory.books.shape import TableShape
from kvfactory.books.step import TableStep
from kvfactory.kinds import Lifetime, ceil_div

NO_COPIES = np.zeros((0, 2), np.int64)
_ZERO = np.array(0)
_NOTES = 64


class Grid(NamedTuple):
    """Where the new tokens of a step fall; the same for all tables of one page size.

    ``cells`` and ``offsets`` int64 [tokens]: the table entry and the place in its page. ``opens``
    int64 [n]: the entries of tokens at offset 0, each of which needs a new page.
    """

    cells: Cells
    offsets: Int64
    opens: Cells


class Part(NamedTuple):
    """A run of pages: ``pages[i]`` int64 [n] holds the tokens of column ``first + i``."""

    first: int
    pages: Pages


def first_visible(lifetime: Lifetime, positions: Positions) -> Positions:
    """``Lifetime.first_visible`` of many positions; below 0 where nothing is out of sight."""
    if lifetime.name == "window":
        return positions - (lifetime.tokens - 1)
    if lifetime.name == "chunk":
        return positions - positions % lifetime.tokens
    return np.zeros_like(positions)


def out_of_sight(lifetime: Lifetime, positions: Positions) -> Tokens:
    """The committed length at which no query sees ``positions`` of a window or chunk any more."""
    if lifetime.name == "window":
        return positions + lifetime.tokens
    return (positions // lifetime.tokens + 1) * lifetime.tokens


class PageTable:
    """The rows of one table. A row owns the pages of columns ``first[row]`` .. its last token's.

    ``cells`` int64 [rows * row_pages] are the rows end to end, the sink where nothing is owned.
    Numbers that whole batches are divided by are arrays: numpy is twice as fast with those.
    """

    def __init__(self, shape: TableShape, num_rows: int) -> None:
        self.shape = shape
        self.path = f"tables.{shape.name}"
        self.pages = Allocator(shape.num_pages, self.path)
        self.cells = np.zeros(num_rows * shape.row_pages, np.int64)
        self.first = np.zeros(num_rows, np.int64)
        self._due = np.zeros(num_rows, np.int64)
        self._starts = np.arange(num_rows) * shape.row_pages
        self._page_tokens = np.array(shape.page_tokens)
        self._row_pages = np.array(shape.row_pages)
        self._ages = shape.lifetime.name in ("window", "chunk")
        self._changed: list[Cells] = []
        self._begin(np.arange(num_rows), np.zeros(num_rows, np.int64))

    # ---- growing -----------------------------------------------------------------------

    def grid(self, rows: Rows, positions: Positions) -> Grid:
        """The grid of new tokens at ``positions`` int64 [tokens] of ``rows`` int64 [tokens]."""
        columns = positions // self._page_tokens
        offsets = positions - columns * self._page_tokens
        cells = self._starts[rows] + columns
        opens = (offsets == _ZERO).nonzero()[0]
        return Grid(cells, offsets, cells[opens])

    def shared_tails(self, grid: Grid, tokens: Int64) -> Cells:
        """Entries to copy before ``tokens`` (indices into the grid) are written.

        Those are partial pages with several owners; the last of several writers keeps the page.
        """
        cells = grid.cells[tokens[grid.offsets[tokens] > 0]]
        owners: dict[int, int] = {}
        copied = []
        for cell, page in zip(cells.tolist(), self.cells[cells].tolist(), strict=True):
            left = owners.get(page, int(self.pages.owners[page]))
            if left > 1:
                copied.append(cell)
            owners[page] = left - 1
        return np.array(copied, np.int64)

    def reserve(self, rows: Rows, tokens: Tokens) -> None:
        """Pages for the first ``tokens`` tokens of fresh rows. The caller asked for room."""
        counts = ceil_div_all(tokens, self.shape.page_tokens)
        cells = ranges(self._starts[rows], counts)
        self._set(cells, self.pages.take(len(cells)))

    def step(self, rows: Rows, lengths: Tokens, grid: Grid, shared: Cells) -> TableStep:
        """The record of a step over ``rows`` whose new tokens fall on ``grid``.

        New pages are taken, and copies of the ``shared`` ones. The caller asked for room.
        """
        copies = self._copy(shared) if shared.size else NO_COPIES
        if grid.opens.size:
            self._set(grid.opens, self.pages.take(grid.opens.size))
        slots = self._slots(grid)
        return TableStep(slots, lengths, copies, self.updates(), self.first_pages(rows))

    def first_pages(self, rows: Rows) -> Int32:
        """The first column that each row still owns, int32 [batch]."""
        if not self._ages:
            return np.zeros(rows.size, np.int32)
        return self.first[rows].astype(np.int32)

    def updates(self) -> Int32:
        """What changed since the last call: (row, column, page) int32 [n, 3]."""
        changed, self._changed = self._changed, []
        if not changed:
            return np.zeros((0, 3), np.int32)
        cells = np.concatenate(changed) if len(changed) > 1 else changed[0]
        rows = cells // self._row_pages
        columns = cells - self._starts[rows]
        return np.array((rows, columns, self.cells[cells]), np.int32).T

    # ---- shrinking ---------------------------------------------------------------------

    def age(self, rows: Rows, committed: Tokens) -> None:
        """Release what no query at position ``committed`` or later can see."""
        if not self._ages:
            return
        behind = (committed >= self._due[rows]).nonzero()[0]
        if behind.size:
            rows, committed = rows[behind], committed[behind]
            visible = first_visible(self.shape.lifetime, committed) // self._page_tokens
            self._drop(rows, self.first[rows], visible)
            self._begin(rows, visible)

    def cut(self, rows: Rows, tokens: Tokens, keep: Tokens) -> None:
        """Shorten rows of ``tokens`` to ``keep`` tokens: the pages of the tail return."""
        stop = ceil_div_all(tokens, self.shape.page_tokens)
        start = ceil_div_all(keep, self.shape.page_tokens)
        cut = (start < stop).nonzero()[0]
        if cut.size:
            self._drop(rows[cut], start[cut], stop[cut])

    def vacate(self, rows: Rows, tokens: Tokens) -> None:
        """Release all pages of rows of ``tokens`` tokens."""
        self._drop(rows, self.first[rows], ceil_div_all(tokens, self.shape.page_tokens))
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
        span, base = self.span(start, stop), row * self.shape.row_pages
        return Part(span.start, self.cells[base + span.start : base + span.stop].copy())

    def fresh_part(self, tokens: int) -> Part:
        """New pages for what a query at ``tokens`` can see. The caller asked for room."""
        span = self.span(0, tokens)
        return Part(span.start, self.pages.take(len(span)))

    def adopt(self, rows: Rows, parts: Iterable[Part], tokens: int) -> None:
        """Give fresh ``rows`` the first ``tokens`` tokens of a chain, whose later parts win."""
        page_tokens = self.shape.page_tokens
        first = self.shape.lifetime.first_visible(tokens) // page_tokens
        line = np.zeros(ceil_div(tokens, page_tokens), np.int64)
        for part in parts:
            line[part.first : part.first + len(part.pages)] = part.pages
        columns = np.arange(first, len(line))
        self.pages.share(line[first:], times=len(rows))
        self._begin(rows, np.full_like(rows, first))
        cells = (rows[:, None] * self.shape.row_pages + columns).ravel()
        self._set(cells, np.tile(line[first:], len(rows)))

    def view(self) -> Int64:
        """All rows, int64 [rows, row_pages], read only."""
        rows = self.cells.reshape(len(self.first), self.shape.row_pages)
        rows.setflags(write=False)
        return rows

    # ---- entries -----------------------------------------------------------------------

    def slots_at(self, rows: Rows, positions: Positions) -> Slots:
        """The slots of ``positions`` int64 [n] of ``rows`` int64 [n]."""
        return self._slots(self.grid(rows, positions))

    def _slots(self, grid: Grid) -> Slots:
        slots: Slots = self.cells[grid.cells] * self._page_tokens + grid.offsets
        return slots

    def _begin(self, rows: Rows, first: Columns) -> None:
        self.first[rows] = first
        if self._ages:
            last_of_page = (first + 1) * self.shape.page_tokens - 1
            self._due[rows] = out_of_sight(self.shape.lifetime, last_of_page)

    def _copy(self, cells: Cells) -> Int64:
        old, new = self.cells[cells], self.pages.take(len(cells))
        self._set(cells, new)
        self.pages.give(old)
        return np.stack((old, new), axis=1)

    def _set(self, cells: Cells, pages: Pages) -> None:
        self.cells[cells] = pages
        self._note(cells)

    def _drop(self, rows: Rows, start: Columns, stop: Columns) -> None:
        cells = ranges(self._starts[rows] + start, stop - start)
        self.pages.give(self.cells[cells])
        self.cells[cells] = SINK
        self._note(cells)

    def _note(self, cells: Cells) -> None:
        self._changed.append(cells)
        if len(self._changed) > _NOTES:
            self._changed = [np.unique(np.concatenate(self._changed))]


def ceil_div_all(tokens: Tokens, page_tokens: int) -> Columns:
    """Pages of each number of tokens, int64 [n]."""
    return -(-tokens // page_tokens)
