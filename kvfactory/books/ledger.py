"""All tables of a cache together: what one row, or one step, means to each of them."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from kvfactory.books.accept import Verdict
from kvfactory.books.allocator import Allocator, Capacity
from kvfactory.books.batch import Batch
from kvfactory.books.encoder import EncoderTable
from kvfactory.books.ids import SINK, Int64, Positions, Rows, Tokens, ranges
from kvfactory.books.requests import Requests
from kvfactory.books.segments import Segment
from kvfactory.books.shape import BooksShape, TableShape
from kvfactory.books.shelf import Growth, Shelf
from kvfactory.books.states import StateTable
from kvfactory.books.step import StateStep, TableStep
from kvfactory.books.table import NO_COPIES, PageTable
from kvfactory.errors import OutOfPages

_FIX = "close or release something, or plan for more (action=explain says what binds)"


def require(*wanted: tuple[Allocator, int]) -> None:
    """Check that every allocator has as many free ids as are wanted of it.

    Raises:
        OutOfPages: a problem for each one that is short.
    """
    for allocator, count in wanted:
        if count > allocator.free:
            raise OutOfPages(*(a.shortage(n, _FIX) for a, n in wanted if n > a.free))


class Ledger:
    """Rows, page tables, encoder tables and state tables, kept in step with one another."""

    def __init__(self, shape: BooksShape) -> None:
        rows = shape.max_requests + 1
        encoders = [table for table in shape.tables if table.lifetime.name == "encoder"]
        others = [table for table in shape.tables if table.lifetime.name != "encoder"]
        self.requests = Requests(shape.max_requests)
        pitches: dict[tuple[int, int], list[TableShape]] = {}
        for table in others:
            pitches.setdefault((table.page_tokens, table.row_pages), []).append(table)
        self.shelves = [Shelf(shapes, rows) for shapes in pitches.values()]
        self.tables = {table.shape.name: table for shelf in self.shelves for table in shelf.tables}
        self.encoders = {table.name: EncoderTable(table, rows) for table in encoders}
        self.states = {state.name: StateTable(state, rows) for state in shape.states}
        self.row_tokens = min((table.row_tokens for table in others), default=2**62)
        self.encoder_tokens = min((table.row_tokens for table in encoders), default=0)

    @property
    def page_tables(self) -> dict[str, PageTable]:
        """All page tables, the encoders' included."""
        return self.tables | {name: encoder.table for name, encoder in self.encoders.items()}

    @property
    def allocators(self) -> list[Allocator]:
        """Everything that hands out ids."""
        pages = [table.pages for table in self.page_tables.values()]
        places = [places for state in self.states.values() for places in state.allocators]
        return [self.requests.rows, *pages, *places]

    def capacity(self) -> dict[str, Capacity]:
        """What is free and held, by path; see ``Books.capacity``."""
        return {allocator.path: allocator.capacity for allocator in self.allocators}

    # ---- rows --------------------------------------------------------------------------

    def admit(self, count: int, prefix: tuple[Segment, ...], cross_tokens: Tokens) -> Rows:
        """Open rows behind a chain of segments, each with new encoder tokens of its own.

        Raises:
            OutOfPages: rows, state slots or encoder pages are short; nothing is taken then.
        """
        tokens = prefix[-1].stop if prefix else 0
        encoders = [(e.table.pages, e.pages_for(cross_tokens)) for e in self.encoders.values()]
        slots = [(state.slots, count * state.row_slots) for state in self.states.values()]
        require((self.requests.rows, count), *encoders, *slots)
        rows = self.requests.admit(count, tokens)
        for name, table in self.tables.items():
            table.adopt(rows, [segment.parts[name] for segment in prefix], tokens)
        for name, encoder in self.encoders.items():
            if cross_tokens.any():
                encoder.reserve(rows, cross_tokens)
            elif prefix:
                encoder.adopt(rows, prefix[-1].parts[name], prefix[-1].cross_tokens)
        for name, state in self.states.items():
            state.assign(rows, prefix[-1].slots[name] if prefix else SINK)
        return rows

    def fork(self, row: int, count: int) -> Rows:
        """Open rows with the committed tokens and the state of ``row``.

        Raises:
            OutOfPages: rows or state slots are short; nothing is taken then.
        """
        view = self.view(row, 0, int(self.requests.committed[row]))
        places = {name: state.place(row) for name, state in self.states.items()}
        rows = self.admit(count, (replace(view, slots=places),), np.zeros(0, np.int64))
        self.requests.expose(row)
        return rows

    def inherit(self, segment: Segment) -> Rows:
        """Open a row with the pages, state slots and encoder tokens of ``segment``.

        Raises:
            OutOfPages: rows or tracking slots are short; nothing is taken then.
        """
        eager = [(state.slots, state.tracking.eager) for state in self.states.values()]
        require((self.requests.rows, 1), *eager)
        rows = self.requests.admit(1, segment.stop)
        for name, table in self.tables.items():
            table.adopt(rows, [segment.parts[name]], segment.stop)
        for name, encoder in self.encoders.items():
            encoder.adopt(rows, segment.parts[name], segment.cross_tokens)
        for name, table in self.page_tables.items():
            table.pages.give(segment.parts[name].pages)
        for name, state in self.states.items():
            state.inherit(int(rows[0]), segment.slots[name])
        return rows

    def vacate(self, rows: Rows) -> None:
        """Return everything that retired rows hold."""
        for table in self.tables.values():
            table.vacate(rows, self.requests.reserved[rows])
        for encoder in self.encoders.values():
            encoder.vacate(rows)
        for state in self.states.values():
            state.vacate(rows)
        self.requests.vacate(rows)

    def view(self, row: int, start: int, stop: int) -> Segment:
        """Tokens [start, stop) of a row, with the row's own pages and state slots."""
        parts = {name: table.part(row, start, stop) for name, table in self.tables.items()}
        cross_tokens = 0
        for name, encoder in self.encoders.items():
            cross_tokens = int(encoder.tokens[row])
            parts[name] = encoder.table.part(row, 0, cross_tokens)
        slots = {name: state.source(row) for name, state in self.states.items()}
        return Segment(start, stop, parts, slots, cross_tokens)

    def share(self, row: int, start: int, stop: int) -> Segment:
        """``view`` with one more owner of its pages."""
        view = self.view(row, start, stop)
        for name, table in self.page_tables.items():
            table.pages.share(view.parts[name].pages)
        self.requests.expose(row)
        return view

    def tracked(self, row: int) -> int:
        """The most committed tokens after which every state table has tracked the state."""
        committed = int(self.requests.committed[row])
        found = (state.tracking.last(row, committed) for state in self.states.values())
        return min(found, default=0)

    def require_room(self, rows: int, sequences: abc.Iterable[tuple[int, int]], slots: int) -> None:
        """Check for ``rows`` request rows, with ``slots`` more state slots beside those of rows,
        and for the pages of ``sequences``, of (tokens, encoder tokens) each.

        Raises:
            OutOfPages: a problem for everything that is short.
        """
        lengths, tables = list(sequences), self.page_tables
        pages = [
            (table.pages, sum(len(table.span(0, n[name in self.encoders])) for n in lengths))
            for name, table in tables.items()
        ]
        states = [(s.slots, rows * s.row_slots + slots) for s in self.states.values()]
        require((self.requests.rows, rows), *pages, *states)

    def reserve(self, tokens: int, cross_tokens: int) -> Segment:
        """New pages and state slots, of no row, for the first ``tokens`` tokens of a sequence.

        Raises:
            OutOfPages: pages or state slots are short; nothing is taken then.
        """
        self.require_room(0, [(tokens, cross_tokens)], slots=1)
        stops = dict.fromkeys(self.tables, tokens) | dict.fromkeys(self.encoders, cross_tokens)
        tables = self.page_tables
        parts = {name: tables[name].fresh_part(stop) for name, stop in stops.items()}
        slots = {name: state.take() for name, state in self.states.items()}
        return Segment(0, tokens, parts, slots, cross_tokens)

    def reset(self) -> None:
        """Return everything that anybody holds; generations stay."""
        rows = self.requests.rows.owners.nonzero()[0]
        self.requests.retire_all()
        self.vacate(rows)
        for state in self.states.values():
            state.copies()
        for allocator in self.allocators:
            allocator.reset()

    # ---- steps -------------------------------------------------------------------------

    def growths(self, rows: Rows, positions: Positions, tails: Int64) -> list[Growth]:
        """What each shelf needs for new tokens at ``positions`` int64 [tokens] of ``rows``.

        ``tails`` are the tokens that may fall on a page with other owners.

        Raises:
            OutOfPages: a problem for each table that is short.
        """
        growths = [shelf.growth(rows, positions, tails) for shelf in self.shelves]
        if not all(map(Shelf.has_room, self.shelves, growths)):
            require(*chain.from_iterable(map(Shelf.demands, self.shelves, growths)))
        return growths

    def step(
        self, rows: Rows, lengths: Tokens, growths: list[Growth]
    ) -> tuple[dict[str, TableStep], dict[str, StateStep]]:
        """The tables' and states' parts of a step over ``rows`` whose shelves grow so."""
        tables: dict[str, TableStep] = {}
        for shelf, growth in zip(self.shelves, growths, strict=True):
            tables |= shelf.step(rows, lengths, growth)
        for name, encoder in self.encoders.items():
            tables[name] = encoder.step(rows)
        return tables, {name: state.step(rows) for name, state in self.states.items()}

    def decide(self, batch: Batch, accepted: Tokens) -> None:
        """Settle a step of which ``accepted`` int64 [batch] tokens stay."""
        requests, rows = self.requests, batch.rows
        requests.committed[rows] = committed = requests.committed[rows] + accepted
        if accepted is not batch.counts:
            for state in self.states.values():
                state.decide(rows, committed, accepted < batch.counts)
            reserved = requests.reserved[rows]
            requests.reserved[rows] = kept = reserved - batch.counts + accepted
            for table in self.tables.values():
                table.cut(rows, reserved, kept)
        for table in self.tables.values():
            table.age(rows, committed)
        for encoder in self.encoders.values():
            encoder.commit(rows)

    def moves(self, batch: Batch, verdict: Verdict) -> Mapping[str, Int64]:
        """The slot moves that bring the accepted nodes of a decided step to the front."""
        if verdict.nodes is None:
            return dict.fromkeys(self.tables, NO_COPIES)
        ranks = ranges(np.zeros_like(verdict.counts), verdict.counts)
        moved = (verdict.nodes != ranks).nonzero()[0]
        rows = np.repeat(batch.rows, verdict.counts)[moved]
        front = self.requests.committed[rows]
        sources, targets = front + verdict.nodes[moved], front + ranks[moved]
        return {
            name: np.stack((table.slots(rows, sources), table.slots(rows, targets)), axis=1)
            for name, table in self.tables.items()
        }
