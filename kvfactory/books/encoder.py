"""Encoder tables: pages reserved whole when a sequence opens, written once by its first step."""

from __future__ import annotations

import numpy as np

from kvfactory.books.ids import Rows, Tokens, ranges
from kvfactory.books.mirror import Mirror
from kvfactory.books.shape import TableShape
from kvfactory.books.step import TableStep
from kvfactory.books.table import NO_COPIES, PageTable, Part

_RESERVED, _WRITING, _WRITTEN = range(3)


class EncoderTable:
    """The encoder tokens of each row, in a page table, and how far their writing has come."""

    def __init__(self, shape: TableShape, num_rows: int) -> None:
        self.table = PageTable(shape, Mirror(num_rows, shape.row_pages))
        self.tokens = np.zeros(num_rows, np.int64)
        self._stage = np.full(num_rows, _WRITTEN, np.int8)

    def pages_for(self, tokens: Tokens) -> int:
        """Pages that sequences of ``tokens`` encoder tokens reserve in all."""
        return int(self.table.pages_for(tokens).sum())

    def reserve(self, rows: Rows, tokens: Tokens) -> None:
        """Pages for the encoder tokens of fresh rows. The caller asked for room."""
        self.table.reserve(rows, tokens)
        self.tokens[rows] = tokens
        self._stage[rows] = np.where(tokens > 0, _RESERVED, _WRITTEN)

    def adopt(self, rows: Rows, part: Part, tokens: int) -> None:
        """Share written encoder pages with fresh rows."""
        self.table.adopt(rows, (part,), tokens)
        self.tokens[rows] = tokens

    def is_written(self, row: int) -> bool:
        """Whether the step that wrote the row's encoder tokens has been committed."""
        return bool(self._stage[row] == _WRITTEN)

    def step(self, rows: Rows) -> TableStep:
        """The record of a step over ``rows``, which writes what no step before it did."""
        first = self._stage[rows] == _RESERVED
        writers = rows[first]
        counts = self.tokens[writers]
        positions = ranges(np.zeros_like(counts), counts)
        slots = self.table.slots(np.repeat(writers, counts), positions)
        self._stage[writers] = _WRITING
        return TableStep(slots, self.tokens[rows], NO_COPIES, *self.table.news(rows))

    def commit(self, rows: Rows) -> None:
        """The step over ``rows`` is decided: what it wrote is there."""
        self._stage[rows] = _WRITTEN

    def vacate(self, rows: Rows) -> None:
        """Release the encoder pages of rows."""
        self.table.vacate(rows, self.tokens[rows])
        self.tokens[rows] = 0
        self._stage[rows] = _WRITTEN
