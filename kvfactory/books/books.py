"""The books: who owns which page, slot and row. The truth on the host, of all tables at once."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable

import numpy as np

from kvfactory.books import checks, prefixes
from kvfactory.books.accept import Accepted, PendingCounts, judge
from kvfactory.books.allocator import Capacity
from kvfactory.books.batch import depths_of
from kvfactory.books.flight import Flights
from kvfactory.books.ids import Int64, Tokens, count_of, int64, whole
from kvfactory.books.ledger import Ledger
from kvfactory.books.requests import NewTokens, Sequence
from kvfactory.books.segments import Segment, Segments
from kvfactory.books.shape import BooksShape
from kvfactory.books.step import Committed, StepRecord

_NONE = np.zeros(0, np.int64)


class Books:
    """Books over page tables and state tables.

    Every operation happens in all tables or, when it raises, in none. Nothing here waits for a
    device; counts that are still there are asked for at the beginning of each operation.
    """

    def __init__(self, shape: BooksShape) -> None:
        self.shape = shape
        self._ledger = Ledger(shape)
        self._flights = Flights(shape.steps_in_flight)
        self._segments = Segments()
        self._leaving = _NONE

    # ---- sequences ---------------------------------------------------------------------

    def open(
        self,
        count: int,
        prefix: Iterable[Segment] = (),
        cross_tokens: abc.Sequence[int] = (),
    ) -> list[Sequence]:
        """Open ``count`` sequences that begin with the tokens of ``prefix``, segments from 0 on.

        ``cross_tokens`` are the encoder tokens of each sequence, for which pages are reserved;
        none behind a prefix, which brings the encoder tokens that it depends on.

        Raises:
            OutOfPages: rows, state slots or encoder pages are short; nothing is taken.
            BooksError: a prefix that is released or has gaps; encoder tokens that do not fit.
        """
        count = count_of(count, "count")
        self.settle()
        chain = self._segments.chain(prefix)
        cross = checks.encoder_tokens(self._ledger, count, chain, cross_tokens)
        return self._ledger.requests.handles(self._ledger.admit(count, chain, cross))

    def fork(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Open ``count`` sequences with the committed tokens of another, pages shared.

        Raises:
            OutOfPages: rows or state slots are short; nothing is taken.
            BooksError: a stale handle; counts on their way; encoder tokens not yet written; or
                an open step of it while there are state tables.
        """
        count = count_of(count, "count")
        row, ledger = self._row(sequence), self._ledger
        checks.fork(ledger, row, self._flights.awaits(row))
        return ledger.requests.handles(ledger.fork(row, count))

    def close(self, sequences: abc.Sequence[Sequence]) -> None:
        """Close sequences: their handles are stale at once, their pages and slots return.

        What an open step still writes to returns when that step is decided.

        Raises:
            BooksError: a stale or foreign handle; nothing is closed then.
        """
        self.settle()
        rows = self._ledger.requests.resolve(sequences)
        self._ledger.requests.retire(rows)
        self._leaving = np.concatenate((self._leaving, rows))
        self._leave()

    def reset(self) -> None:
        """Close everything, segments and open steps included. Generations do not go back."""
        self._flights.reset()
        self._segments.clear()
        self._ledger.reset()
        self._leaving = _NONE

    # ---- steps -------------------------------------------------------------------------

    def extend(
        self,
        sequences: abc.Sequence[Sequence],
        new_tokens: NewTokens,
        parents: abc.Sequence[int] | Int64 | None = None,
    ) -> StepRecord:
        """Open a step that writes new tokens, so many for each sequence or the same for all.

        ``parents`` int64 [tokens] make them draft trees: the parent of each token as an index
        among the sequence's own new tokens, -1 for roots.

        Raises:
            OutOfPages: a problem for each table that is short; nothing is taken.
            BooksError: stale handles, more tokens than a step may have, sequences past the end
                of their row, malformed trees, trees whose states are not all kept, or too many
                steps in flight.
        """
        self.settle()
        self._flights.check_room()
        ledger, requests = self._ledger, self._ledger.requests
        batch = requests.batch(sequences, new_tokens, self.shape.step_tokens)
        tree = None if parents is None else int64(parents, "parents")
        depths = None if tree is None else depths_of(batch, tree)
        if depths is not None and self.shape.states:
            checks.forks(batch, depths, self.shape.states[0].tree_nodes)
        prefix = requests.reserved[batch.rows]
        lengths = prefix + batch.counts
        if requests.may_pass(ledger.row_tokens, batch):
            checks.lengths(ledger, lengths)
        settled = requests.committed[batch.rows] == prefix
        stored = batch.after(prefix)
        tails = requests.tails(batch, settled)
        growths = ledger.growths(batch.of_tokens(batch.rows), stored, tails)
        requests.reserve(batch, lengths, tails)
        tables, states = ledger.step(batch.rows, lengths, growths)
        positions = stored if depths is None else batch.of_tokens(prefix) + depths
        rows, q_indptr, serial = batch.rows32.copy(), batch.q_indptr.copy(), self._flights.serial
        found = (prefix, lengths, positions, settled, tree, tables, states, self._flights.oldest)
        record = StepRecord(serial, rows, q_indptr, batch.most, *found)
        self._flights.start(record, batch)
        return record

    def commit(self, step: StepRecord, accepted: Accepted = None) -> Committed:
        """Decide the oldest open step: which of its tokens stay.

        ``accepted``: None for all; counts [batch], the first tokens of each sequence; paths
        [batch] of nodes in its draft tree, whose tokens ``moves`` brings to the front; or counts
        still on the device, which the first later call that finds them there puts into effect.
        Rejected pages return, and so do those that left a window.

        Raises:
            BooksError: not the oldest open step; counts or paths that it cannot have; paths
                while an earlier step's counts are on their way.
        """
        self.settle()
        flight = self._flights.open(step)
        if accepted is not None and isinstance(accepted, PendingCounts):
            flight.accepted = accepted
            return Committed(None, None, {})
        verdict = judge(flight.batch, step.parents, accepted)
        if verdict.nodes is not None:
            self._flights.check_next(flight)
        moves = self._ledger.moves(flight.batch, verdict)
        flight.accepted = verdict.counts
        self.settle()
        return Committed(verdict.counts.copy(), verdict.nodes, moves)

    def settle(self) -> None:
        """Put into effect what committed steps accepted, as far as their counts have landed."""
        while decided := self._flights.decided():
            self._ledger.decide(*decided)
            if self._leaving.size:
                self._leave()

    # ---- segments ----------------------------------------------------------------------

    def hold(
        self, sequence: Sequence, tokens: int, start: int = 0, checkpoint: bool = False
    ) -> Segment:
        """Own the committed tokens [start, tokens) of a sequence beyond its life.

        State tables give the segment a slot of its own, or a ``checkpoint``; the copy into it is
        due with the next step, or when ``copies`` is asked.

        Raises:
            OutOfPages: state slots or checkpoints are short; nothing is taken.
            BooksError: a stale handle; tokens that are not committed, or have left a window or
                chunk that a query at ``tokens`` sees; a state that is not exactly there.
        """
        tokens, start = whole(tokens, "tokens"), whole(start, "tokens")
        row = self._row(sequence)
        return self._segments.add(prefixes.hold(self._ledger, row, start, tokens, checkpoint))

    def track(self, sequence: Sequence, tokens: int | None = None) -> dict[str, int]:
        """The slot, by state table, for the state after ``tokens`` tokens of a sequence.

        Without an open step that is the state as it is, and its copy is due as those of ``hold``.
        Of an open step whoever computes it writes the state there; if any token of the step is
        rejected, states beyond the committed tokens are forgotten. ``tokens`` default to the
        committed ones, and one position has one slot. Copies that were due before must be made
        (``copies``) before the slot is written.

        Raises:
            OutOfPages: a lazy slot is needed and there is none; nothing is taken.
            BooksError: no tracking slots, a stale handle, tokens that no open step has, or an open
                draft tree, of which nobody knows the path.
        """
        row = self._row(sequence)
        checks.no_tree(self._flights.branches(row))
        return prefixes.track(self._ledger, row, tokens)

    def tracked(self, sequence: Sequence) -> int:
        """The committed tokens after which a tracked state is there; 0 for none.

        Raises:
            BooksError: a stale handle.
        """
        return self._ledger.tracked(self._row(sequence))

    def donate(self, sequence: Sequence) -> Segment:
        """Own the ``tracked`` tokens with the slot of their state; the sequence gets another one.

        A lazy slot is replaced when it is needed.

        Raises:
            OutOfPages: state slots are short; nothing is taken.
            BooksError: a stale handle, nothing tracked, or tokens that have left a window or chunk.
        """
        return self._segments.add(prefixes.donate(self._ledger, self._row(sequence)))

    def retire(self, sequence: Sequence, tracked: bool = False) -> Segment:
        """Close a sequence and own its committed, or ``tracked``, tokens with the state slot.

        No slot is taken and no state copied; the sequence's other slots return.

        Raises:
            BooksError: a stale handle, nothing to own, a step in flight that writes the state, or
                tokens that have left a window or chunk.
        """
        row = self._row(sequence)
        if not tracked:
            checks.settled(self._ledger, row, self._flights.covers(row))
        segment = (prefixes.tracked if tracked else prefixes.whole)(self._ledger, row)
        self.close([sequence])
        return self._segments.add(segment)

    def release(self, segment: Segment) -> None:
        """Give up a segment; pages that nobody else owns return.

        Raises:
            BooksError: the segment was released before, or is none of ours.
        """
        self.settle()
        self._segments.remove(segment)
        for name, table in self._ledger.page_tables.items():
            table.pages.give(segment.parts[name].pages)
        for name, state in self._ledger.states.items():
            state.bequeath(segment.slots[name])

    def view(self, sequence: Sequence) -> Segment:
        """What a sequence owns of its committed tokens, without owning it: for offload.

        Its state slot is where the state is now, also while a copy of it is due; the sink where
        there is none yet. It holds until the next operation on the books.

        Raises:
            BooksError: a stale handle, a step in flight, or encoder tokens not yet written.
        """
        row, ledger = self._row(sequence), self._ledger
        checks.settled(ledger, row, self._flights.covers(row))
        return ledger.view(row, 0, int(ledger.requests.committed[row]))

    def reserve(self, tokens: int, cross_tokens: int = 0) -> Segment:
        """A held segment [0, tokens) of new pages and state slots, to be filled from outside.

        After that ``adopt`` hands it to a sequence: nothing is copied. State copies that were due
        before must be made (``copies``) before the state slots are filled.

        Raises:
            OutOfPages: pages or state slots are short; nothing is taken.
            BooksError: more tokens than a row holds.
        """
        self.settle()
        checks.reserve(self._ledger, tokens, cross_tokens)
        return self._segments.add(self._ledger.reserve(tokens, cross_tokens))

    def require_room(self, sequences: abc.Sequence[tuple[int, int]]) -> None:
        """Check that ``reserve`` and ``adopt``, or ``open``, have room for all of ``sequences``.

        They are (tokens, encoder tokens) each; 0 tokens for an empty one.

        Raises:
            OutOfPages: a problem for everything that is short.
            BooksError: more tokens than a row holds.
        """
        self.settle()
        for tokens, cross_tokens in sequences:
            if tokens:
                checks.reserve(self._ledger, tokens, cross_tokens)
        self._ledger.require_room(len(sequences), sequences, slots=0)

    def adopt(self, segment: Segment) -> Sequence:
        """A sequence that takes a held segment over: its pages and state slots, nothing copied.

        Raises:
            OutOfPages: request rows or tracking slots are short; nothing is taken.
            BooksError: a segment that is released, begins after 0, or has a checkpoint for a slot.
        """
        self.settle()
        chain = self._segments.chain([segment])
        checks.adopt(self._ledger, segment)
        rows = self._ledger.inherit(chain[0])
        self._segments.remove(segment)
        return self._ledger.requests.handles(rows)[0]

    def copies(self) -> dict[str, Int64]:
        """State copies due now, by table: (source place, destination place) int64 [n, 2].

        For clients that read a held segment before the next step, which then has them no more.
        """
        return {name: state.copies() for name, state in self._ledger.states.items()}

    def due_sources(self) -> dict[str, Int64]:
        """Where the state copies that are due now would read, by table: places int64 [n]."""
        return {name: state.due_sources for name, state in self._ledger.states.items()}

    def shared_tails(
        self, sequences: abc.Sequence[Sequence], new_tokens: NewTokens
    ) -> dict[str, Int64]:
        """The pages with other owners that such a step would write to, by table: int64 [n].

        It would copy them first, or all but one of several of its own.

        Raises:
            BooksError: as ``extend``, of its sequences and its tokens.
        """
        self.settle()
        requests = self._ledger.requests
        batch = requests.batch(sequences, new_tokens, self.shape.step_tokens)
        prefix = requests.reserved[batch.rows]
        tails = requests.tails(batch, requests.committed[batch.rows] == prefix)
        rows, positions = batch.of_tokens(batch.rows)[tails], batch.after(prefix)[tails]
        tables = self._ledger.tables.items()
        return {name: table.shared_pages(rows, positions) for name, table in tables}

    # ---- what there is -----------------------------------------------------------------

    def capacity(self) -> dict[str, Capacity]:
        """Free, held and total, by path.

        ``requests``, ``tables.NAME``, ``states.NAME``, and ``checkpoints.NAME`` where there are.
        """
        self.settle()
        return self._ledger.capacity()

    def committed(self, sequences: abc.Sequence[Sequence]) -> Tokens:
        """Decided tokens of each sequence, int64 [batch].

        Raises:
            BooksError: a stale or foreign handle.
        """
        self.settle()
        requests = self._ledger.requests
        return requests.committed[requests.resolve(sequences)]

    def state_slots(self, sequence: Sequence) -> dict[str, int]:
        """The state slot of a sequence, by state table.

        Raises:
            BooksError: a stale or foreign handle.
        """
        row = self._row(sequence)
        return {name: int(state.slot[row]) for name, state in self._ledger.states.items()}

    def state_places(self, sequence: Sequence) -> dict[str, int]:
        """Where the state of a sequence is now, by state table: its slot, or what is yet to be
        copied there from another slot or a checkpoint; the sink where there is no state yet.

        Raises:
            BooksError: a stale or foreign handle.
        """
        row = self._row(sequence)
        return {name: state.source(row) for name, state in self._ledger.states.items()}

    def rows(self, table: str) -> Int64:
        """What the device table must hold after all updates, int64 [rows, row_pages], read only."""
        return self._ledger.page_tables[table].mirror.view()

    def _row(self, sequence: Sequence) -> int:
        self.settle()
        return int(self._ledger.requests.resolve([sequence])[0])

    def _leave(self) -> None:
        busy = self._flights.touch(self._leaving)
        self._ledger.vacate(self._leaving[~busy])
        self._leaving = self._leaving[busy]
