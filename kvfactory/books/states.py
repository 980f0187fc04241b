"""State slots: of each request its own and tracking ones, and one for each held prefix."""

from __future__ import annotations

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.ids import SINK, Bool, Int64, Rows, Tokens
from kvfactory.books.shape import StateShape
from kvfactory.books.step import StateStep
from kvfactory.books.tracking import Tracking


class StateTable:
    """The state slot of each row, which are ``fresh``, and the copies that are still to be made.

    A *place* is where a state may lie: a state slot or, from ``num_slots`` on, a checkpoint. A
    copy is named by its destination and remembers the first source of its bytes, so that all of
    them can be made at once however long the chain of forks behind them is. The source may be
    free by then, or the destination of another copy: all are read before any is written.
    """

    def __init__(self, shape: StateShape, num_rows: int) -> None:
        self.shape = shape
        self.slots = Allocator(shape.num_slots, f"states.{shape.name}")
        self.checkpoints = Allocator(max(1, shape.checkpoints), f"checkpoints.{shape.name}")
        self.slot = np.zeros(num_rows, np.int64)
        self.tracking = Tracking(shape, num_rows)
        self._fresh = np.zeros(num_rows, np.bool_)
        self._sources: dict[int, int] = {}

    @property
    def allocators(self) -> tuple[Allocator, ...]:
        """What hands out places: state slots and, where there are any, checkpoints."""
        return (self.slots, self.checkpoints) if self.shape.checkpoints else (self.slots,)

    @property
    def row_slots(self) -> int:
        """Slots that a row takes when it opens."""
        return 1 + self.tracking.eager

    # ---- rows --------------------------------------------------------------------------

    def assign(self, rows: Rows, source: int = SINK) -> None:
        """Slots for each row: fresh, or a copy of held ``source``. The caller asked for room."""
        self.slot[rows] = taken = self.slots.take(len(rows))
        self.tracking.assign(rows, self.slots)
        self._fresh[rows] = source == SINK
        if source != SINK:
            self._copy(source, taken)

    def inherit(self, row: int, slot: int) -> None:
        """Make ``slot`` of nobody the one of a fresh ``row``; tracking slots are taken."""
        self.slot[row] = slot
        self.tracking.assign(np.array([row]), self.slots)

    def place(self, row: int) -> int:
        """The slot of ``row``, into which a copy may be due: the sink where there is no state."""
        return SINK if self._fresh[row] else int(self.slot[row])

    def source(self, row: int) -> int:
        """Where the state of ``row`` lies now, whoever holds that place: the sink for none yet."""
        place = self.place(row)
        return self._sources.get(place, place)

    def track(self, row: int, tokens: int, copied: bool) -> int:
        """The tracking slot for the state after ``tokens`` tokens, ``copied`` or yet to be made."""
        slot = self.tracking.write(row, tokens, self.slots)
        self._sources.pop(slot, None)
        if copied:
            self._copy(int(self.slot[row]), np.array([slot]))
        return slot

    def decide(self, rows: Rows, committed: Tokens, rejected: Bool) -> None:
        """A step over ``rows`` is decided; some lost tokens, which makes tracked states wrong."""
        self.tracking.forget(rows, committed, rejected)

    def detach(self, row: int) -> int:
        """The slot of ``row``, which is the row's no more."""
        slot = int(self.slot[row])
        self.slot[row] = SINK
        return slot

    def vacate(self, rows: Rows) -> None:
        """Return the slots of rows, tracking ones too."""
        own = self.slot[rows]
        self.give(np.concatenate((own[own != SINK], self.tracking.vacate(rows))))
        self.slot[rows] = SINK
        self._fresh[rows] = False

    # ---- places of nobody's row --------------------------------------------------------

    def take(self) -> int:
        """A slot that belongs to no row. The caller asked for room."""
        return int(self.slots.take(1)[0])

    def duplicate(self, row: int, checkpoint: bool = False) -> int:
        """A place beside the rows, with the state of ``row``. The caller asked for room."""
        place = self._take_checkpoint() if checkpoint else self.take()
        self._copy(int(self.slot[row]), np.array([place]))
        return place

    def _take_checkpoint(self) -> int:
        return self.shape.num_slots + int(self.checkpoints.take(1)[0])

    def bequeath(self, place: int) -> None:
        """Return a place that belongs to no row; a row that waits for a copy of it takes it over.

        A checkpoint cannot be taken over.
        """
        if place >= self.shape.num_slots:
            self.checkpoints.give(np.array([place - self.shape.num_slots]))
            self._sources.pop(place, None)
            return
        self._sources.pop(place, None)  # what is there is what an heir waits for
        heirs = [heir for heir, source in self._sources.items() if source == place]
        for row in np.isin(self.slot, heirs).nonzero()[0][:1]:
            self.slot[row], place = place, int(self.slot[row])
        self.give(np.array([place]))

    def give(self, slots: Int64) -> None:
        """Return slots; a copy into one of them need not be made any more."""
        self.slots.give(slots)
        for slot in slots.tolist():
            self._sources.pop(slot, None)

    # ---- steps -------------------------------------------------------------------------

    def step(self, rows: Rows) -> StateStep:
        """The record of a step over ``rows``: fresh slots and copies are reported once."""
        fresh = self._fresh[rows]
        self._fresh[rows] = False
        return StateStep(self.slot[rows].astype(np.int32), fresh, self.copies())

    def copies(self) -> Int64:
        """The copies to make since the last call: (source, destination) places, int64 [n, 2]."""
        pairs = [(source, place) for place, source in self._sources.items()]
        self._sources = {}
        return np.array(pairs, np.int64).reshape(-1, 2)

    @property
    def due_sources(self) -> Int64:
        """The places that ``copies`` would read now, int64 [n]."""
        return np.array(list(self._sources.values()), np.int64)

    def _copy(self, source: int, places: Int64) -> None:
        """Note copies of held ``source``: what is there now, or will be when its copy is made."""
        origin = self._sources.get(source, source)
        self._sources.update(dict.fromkeys(places.tolist(), origin))
