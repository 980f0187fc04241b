"""Tracking slots: states at chosen positions, which requests keep for a prefix cache."""

from __future__ import annotations

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.ids import SINK, Bool, Int64, Rows, Tokens
from kvfactory.books.shape import StateShape


class Tracking:
    """Up to ``tracking`` slots of each row, written in turn, the oldest state first.

    ``slots`` int64 [rows, tracking], the sink where a row has none yet (or none any more).
    ``tokens`` int64 [rows, tracking]: after how many tokens the state in there is, 0 for none.
    With two slots the last state that is sure to stay outlives the writing of the next.
    """

    def __init__(self, shape: StateShape, num_rows: int) -> None:
        self.lazy = shape.lazy
        self.eager = 1 if shape.lazy else shape.tracking
        self.slots = np.zeros((num_rows, shape.tracking), np.int64)
        self.tokens = np.zeros((num_rows, shape.tracking), np.int64)

    def assign(self, rows: Rows, allocator: Allocator) -> None:
        """Slots for fresh rows, of lazy ones the first. The caller asked for room."""
        taken = allocator.take(len(rows) * self.eager)
        self.slots[rows, : self.eager] = taken.reshape(len(rows), self.eager)

    def turn(self, row: int, tokens: int) -> int:
        """The column for the state after ``tokens`` tokens.

        The one that has it already, else an empty one, else the oldest; a slot that is there
        comes first.
        """
        own, missing = self.tokens[row], self.slots[row] == SINK
        columns = range(len(own))
        return min(columns, key=lambda n: (own[n] != tokens, own[n], missing[n]))

    def missing(self, row: int, tokens: int) -> int:
        """Slots that ``write`` has to take: 0 or 1."""
        return int(self.slots[row, self.turn(row, tokens)] == SINK)

    def write(self, row: int, tokens: int, allocator: Allocator) -> int:
        """The slot for the state after ``tokens`` tokens. The caller asked for room."""
        column = self.turn(row, tokens)
        if self.slots[row, column] == SINK:
            self.slots[row, column] = allocator.take(1)[0]
        self.tokens[row, column] = tokens
        return int(self.slots[row, column])

    def last(self, row: int, committed: int) -> int:
        """The most tokens, of ``committed``, after which there is a state; 0 for none."""
        tokens = self.tokens[row]
        return int(tokens[tokens <= committed].max(initial=0))

    def detach(self, row: int, tokens: int) -> int:
        """The slot with the state after ``tokens`` tokens, which is the row's no more."""
        column = int((self.tokens[row] == tokens).nonzero()[0][0])
        slot = int(self.slots[row, column])
        self.slots[row, column], self.tokens[row, column] = SINK, 0
        return slot

    def replace(self, row: int, allocator: Allocator) -> None:
        """Make up for detached slots, unless they are lazy. The caller asked for room."""
        if not self.lazy:
            for column in (self.slots[row] == SINK).nonzero()[0]:
                self.slots[row, column] = allocator.take(1)[0]

    def forget(self, rows: Rows, committed: Tokens, rejected: Bool) -> None:
        """Rows of which tokens were rejected lose the states beyond ``committed``."""
        if self.tokens.shape[1] and rejected.any():
            rows, limits = rows[rejected], committed[rejected][:, None]
            self.tokens[rows] = np.where(self.tokens[rows] > limits, 0, self.tokens[rows])

    def vacate(self, rows: Rows) -> Int64:
        """Empty rows: the slots to return."""
        slots = self.slots[rows]
        self.slots[rows], self.tokens[rows] = SINK, 0
        held: Int64 = slots[slots != SINK]
        return held
