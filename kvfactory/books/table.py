"""One page table: which page holds which tokens of which row, and which entries changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.ids import (
    SINK,
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
from kvfactory.books.mirror import Entries, Mirror
from kvfactory.books.shape import TableShape
from kvfactory.books.sight import Sight
from kvfactory.kinds import ceil_div

NO_COPIES = np.zeros((0, 2), np.int64)
_ONE = np.array(1)


class Part(NamedTuple):
    """A run of pages: ``pages[i]`` int64 [n] holds the tokens of column ``first + i``."""

    first: int
    pages: Pages


class PageTable:
    """The rows of one table. A row owns the pages of columns ``first[row]`` .. its last token's.

    Numbers that whole batches are divided by are arrays: numpy is twice as fast with those.
    """

    def __init__(self, shape: TableShape, mirror: Mirror) -> None:
        num_rows = len(mirror.starts)
        self.shape = shape
        self.path = f"tables.{shape.name}"
        self.pages = Allocator(shape.num_pages, self.path)
        self.mirror = mirror
        self.first = np.zeros(num_rows, np.int32)
        self.sight = Sight(shape.lifetime, shape.page_tokens)
        self._page_tokens = np.array(shape.page_tokens)
        self._due = np.zeros(num_rows, np.int64)
        self._begin(np.arange(num_rows), self.first)

    # ---- growing -----------------------------------------------------------------------

    def shared(self, tails: Entries) -> Entries:
        """Those of ``tails``, entries about to be written, whose page is to be copied before.

        It has several owners; the last of several writers keeps it.
        """
        pages = self.mirror.pages[tails.cells].tolist()
        left = {page: int(self.pages.owners[page]) for page in pages}
        copied = []
        for index, page in enumerate(pages):
            if left[page] > 1:
                copied.append(index)
                left[page] -= 1
        return tails.of(copied)

    def shared_pages(self, rows: Rows, positions: Positions) -> Pages:
        """The pages of several owners that have room at ``positions`` int64 [n] of ``rows``."""
        inside = (positions % self._page_tokens).nonzero()[0]
        pages: Pages = self.slots(rows[inside], positions[inside]) // self._page_tokens
        return pages[self.pages.owners[pages] > 1]

    def pages_for(self, tokens: Tokens) -> Columns:
        """The pages that so many tokens take, and so the column behind the last of them."""
        pages: Columns = -(-tokens // self._page_tokens)
        return pages

    def reserve(self, rows: Rows, tokens: Tokens) -> None:
        """Pages for the first ``tokens`` tokens of fresh rows. The caller asked for room."""
        entries = self.mirror.entries(*_between(rows, np.zeros_like(rows), self.pages_for(tokens)))
        self.mirror.rewrite(entries, self.pages.take(entries.cells.size))

    def open(self, entries: Entries) -> None:
        """A new page in each entry behind those of its row. The caller asked for room."""
        self.mirror.write(entries, self.pages.take(entries.cells.size))

    def copy(self, entries: Entries) -> Int64:
        """A page of its own in each entry: (old page, new page) int64 [n, 2], to be copied."""
        old, new = self.mirror.pages[entries.cells], self.pages.take(entries.cells.size)
        self.mirror.rewrite(entries, new)
        self.pages.give(old)
        return np.stack((old, new), axis=1)

    def news(self, rows: Rows) -> tuple[Int32, Int32]:
        """What a step over ``rows`` has to tell: device updates, and each row's first column."""
        first = self.first[rows] if self.sight.ends else np.zeros(rows.size, np.int32)
        return self.mirror.updates(), first

    # ---- shrinking ---------------------------------------------------------------------

    def age(self, rows: Rows, committed: Tokens) -> None:
        """Release what no query at position ``committed`` or later can see."""
        if not self.sight.ends:
            return
        behind = (committed >= self._due[rows]).nonzero()[0]
        if behind.size:
            rows, seen = rows[behind], self.sight.first_columns(committed[behind])
            self.pages.give_each(self.mirror.clear(*_between(rows, self.first[rows], seen)))
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
        self.mirror.rewrite(entries, np.tile(line, len(rows)))

    # ---- entries -----------------------------------------------------------------------

    def slots(self, rows: Rows, positions: Positions) -> Slots:
        """The slots of ``positions`` int64 [n] of ``rows`` int64 [n]."""
        columns = positions // self._page_tokens
        pages = self.mirror.pages[self.mirror.starts[rows] + columns]
        slots: Slots = pages * self._page_tokens + positions % self._page_tokens
        return slots

    def _begin(self, rows: Rows, first: Columns) -> None:
        """Let rows begin with column ``first``, and note at which length its page is due."""
        self.first[rows] = first
        if self.sight.ends:
            self._due[rows] = self.sight.ends_of(first)

    def _drop(self, rows: Rows, start: Columns, stop: Columns) -> None:
        entries = self.mirror.entries(*_between(rows, start, stop))
        self.pages.give_each(self.mirror.pages[entries.cells])
        self.mirror.rewrite(entries, SINK)


def _between(rows: Rows, start: Columns, stop: Columns) -> tuple[Rows, Columns]:
    """The entries from column ``start`` to before ``stop`` of each row: their rows and columns."""
    counts = stop - start
    if np.count_nonzero(counts != _ONE):
        return np.repeat(rows, counts), ranges(start, counts)
    return rows, start
