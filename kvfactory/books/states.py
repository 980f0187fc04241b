"""State slots: one for each request, and one for each held prefix."""

from __future__ import annotations

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.ids import SINK, Int64, Rows
from kvfactory.books.shape import StateShape
from kvfactory.books.step import StateStep


class StateTable:
    """The state slot of each row, which are ``fresh``, and the copies that are still to be made.

    A copy is named by its destination and remembers the first source of its bytes, so that all
    of them can be made at once however long the chain of forks behind them is.
    """

    def __init__(self, shape: StateShape, num_rows: int) -> None:
        self.shape = shape
        self.slots = Allocator(shape.num_slots, f"states.{shape.name}")
        self.slot = np.zeros(num_rows, np.int64)
        self._fresh = np.zeros(num_rows, np.bool_)
        self._sources: dict[int, int] = {}

    def assign(self, rows: Rows, source: int = SINK) -> None:
        """A slot for each row: fresh, or a copy of slot ``source``. The caller asked for room."""
        self.slot[rows] = taken = self.slots.take(len(rows))
        self._fresh[rows] = source == SINK
        if source != SINK:
            self._copy(source, taken)

    def source(self, row: int) -> int:
        """Where the state of ``row`` is: the sink where there is none yet."""
        slot = int(self.slot[row])
        return SINK if self._fresh[row] else self._sources.get(slot, slot)

    def take(self) -> int:
        """A slot that belongs to no row. The caller asked for room."""
        return int(self.slots.take(1)[0])

    def duplicate(self, row: int) -> int:
        """A slot beside the rows, with the state of ``row``."""
        taken = self.slots.take(1)
        self._copy(int(self.slot[row]), taken)
        return int(taken[0])

    def vacate(self, rows: Rows) -> None:
        """Return the slots of rows."""
        self.give(self.slot[rows])
        self.slot[rows] = SINK
        self._fresh[rows] = False

    def give(self, slots: Int64) -> None:
        """Return slots; a copy into one of them need not be made any more."""
        self.slots.give(slots)
        for slot in slots.tolist():
            self._sources.pop(slot, None)

    def bequeath(self, slot: int) -> None:
        """Return a slot that belongs to no row; a row that waits for a copy of it takes it over."""
        heirs = [heir for heir, source in self._sources.items() if source == slot]
        for row in np.isin(self.slot, heirs).nonzero()[0][:1]:
            self.slot[row], slot = slot, int(self.slot[row])
        self.give(np.array([slot]))

    def step(self, rows: Rows) -> StateStep:
        """The record of a step over ``rows``: fresh slots and copies are reported once."""
        fresh = self._fresh[rows]
        self._fresh[rows] = False
        return StateStep(self.slot[rows].astype(np.int32), fresh, self.copies())

    def copies(self) -> Int64:
        """The copies to make since the last call: (source, destination) int64 [n, 2]."""
        pairs = [(source, slot) for slot, source in self._sources.items()]
        self._sources = {}
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _copy(self, source: int, slots: Int64) -> None:
        origin = self._sources.get(source, source)
        self._sources.update(dict.fromkeys(slots.tolist(), origin))
