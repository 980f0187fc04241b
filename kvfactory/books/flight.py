"""Steps in flight: extended, and not yet decided. They are committed and decided in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvfactory.books.accept import PendingCounts, check_counts
from kvfactory.books.batch import Batch
from kvfactory.books.ids import Bool, Rows, Tokens, int64
from kvfactory.books.step import StepRecord
from kvfactory.errors import BooksError, Problem


@dataclass
class Flight:
    """A step in flight. ``accepted`` is None while it is open."""

    record: StepRecord
    batch: Batch
    accepted: Tokens | PendingCounts | None = None

    def landed(self) -> Tokens | None:
        """The accepted counts int64 [batch], None while the step is open or they are on their way.

        Raises:
            BooksError: the device counted tokens that the step does not have.
        """
        if self.accepted is None or isinstance(self.accepted, np.ndarray):
            return self.accepted
        counts = self.accepted.poll()
        if counts is None:
            return None
        counts = int64(counts)
        check_counts(self.batch, counts)
        return counts


class Flights:
    """The steps in flight, oldest first, at most ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.serial = 0
        self._queue: deque[Flight] = deque()

    def check_room(self) -> None:
        """Refuse one step too many.

        Raises:
            BooksError: ``limit`` steps are undecided.
        """
        if len(self._queue) >= self.limit:
            got = f"{len(self._queue)} steps whose outcome is open"
            fix = "raise engine.steps_in_flight, or first "
            fix += (
                "commit the oldest step"
                if self._queue[0].accepted is None
                else "wait until the counts of the oldest step have come from the device"
            )
            raise BooksError(Problem("extend", got, f"fewer than {self.limit}", fix))

    @property
    def oldest(self) -> int:
        """The serial of the oldest undecided step; without any, that of the next one."""
        return self._queue[0].record.serial if self._queue else self.serial

    def start(self, record: StepRecord, batch: Batch) -> None:
        """Add the newest step."""
        self.serial += 1
        self._queue.append(Flight(record, batch))

    def open(self, record: StepRecord) -> Flight:
        """The oldest step that is not committed, which ``record`` must be.

        Raises:
            BooksError: ``record`` is committed already, not the oldest, or none of ours.
        """
        oldest = None
        for oldest in self._queue:
            if oldest.accepted is None:
                break
        if oldest is None or oldest.accepted is not None or oldest.record is not record:
            is_open = oldest is not None and oldest.accepted is None
            need = f"step {oldest.record.serial}" if oldest and is_open else "an open step"
            raise BooksError(Problem("step", f"step {record.serial}", need, "commit in order"))
        return oldest

    def check_next(self, flight: Flight) -> None:
        """Refuse paths where the sequences' lengths are not known yet.

        Raises:
            BooksError: the counts of an earlier step are still on their way.
        """
        if self._queue[0] is not flight:
            got = "paths while the counts of an earlier step are on the device"
            raise BooksError(Problem("accepted", got, "counts, or commit when those have landed"))

    def awaits(self, row: int) -> bool:
        """Whether counts of ``row`` are on their way from the device."""
        committed = [flight for flight in self._queue if flight.accepted is not None]
        return any(row in flight.batch.rows for flight in committed)

    def decided(self) -> tuple[Batch, Tokens] | None:
        """Take the oldest step off the queue if its outcome is known: its batch and counts."""
        counts = self._queue[0].landed() if self._queue else None
        return None if counts is None else (self._queue.popleft().batch, counts)

    def touch(self, rows: Rows) -> Bool:
        """Which of ``rows`` some step in flight covers, bool [n]."""
        found = np.zeros(len(rows), np.bool_)
        for flight in self._queue:
            found |= np.isin(rows, flight.batch.rows)
        return found

    def covers(self, row: int) -> bool:
        """Whether some step in flight covers ``row``."""
        return any(row in flight.batch.rows for flight in self._queue)

    def branches(self, row: int) -> bool:
        """Whether some step in flight is a draft tree of ``row``."""
        trees = [flight for flight in self._queue if flight.record.parents is not None]
        return any(row in flight.batch.rows for flight in trees)

    def reset(self) -> None:
        """Forget all steps; their records cannot be committed any more."""
        self._queue.clear()
