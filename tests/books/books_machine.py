"""Random histories of books and a model device: open, fork, close; extend, launch, commit.

Whatever happens, every sequence reads back its own tokens in every table. Before every operation
that takes something, each table is made one id too short for it, on a copy of the books.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from books_device import Device, Launch, Timeline
from books_support import (
    CHUNKED,
    CROSS,
    FULL,
    LOCAL,
    STATE,
    Landing,
    audit,
    books_of,
    inject_shortages,
    row_pages_of,
    snapshot,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfactory.books import Books, Segment, Sequence, StateShape, TableShape
from kvfactory.errors import BooksError, OutOfPages

MAX_REQUESTS = 5
ROW_TOKENS = 40


@dataclass
class Held:
    """A segment with the tokens that it must hold."""

    segment: Segment
    tokens: list[int]
    cross: list[int]
    writer: Launch | None


class BooksMachine(RuleBasedStateMachine):
    """Drives the books and a model device with the same operations."""

    shapes: tuple[TableShape | StateShape, ...] = (FULL, LOCAL, CHUNKED, CROSS)

    def __init__(self) -> None:
        super().__init__()
        tables = tuple(shape for shape in self.shapes if isinstance(shape, TableShape))
        states = tuple(shape.name for shape in self.shapes if isinstance(shape, StateShape))
        self.books = books_of(*self.shapes, max_requests=MAX_REQUESTS)
        self.device = Device(tables, states, MAX_REQUESTS + 1)
        self.names = count(1)
        self.open_sequences: list[Timeline] = []
        self.launches: list[Launch] = []
        self.segments: list[Held] = []
        self.landings: list[tuple[Landing, Launch]] = []
        self.stale: list[Sequence] = []
        self.crosses = any(shape is CROSS for shape in self.shapes)

    @initialize(number=st.integers(1, 3), cross=st.integers(0, 7))
    def begin(self, number: int, cross: int) -> None:
        self.open(number, [cross] * 3, [])

    # ---- helpers -----------------------------------------------------------------------

    def attempt(self, operation: Any, *arguments: Any) -> Any:
        """The result, or None when the books are short and have not changed at all.

        ``operation`` takes the books first. One id too few in any table: the same.
        """
        self.books.settle()
        self.absorb()
        inject_shortages(self.books, lambda books: operation(books, *arguments))
        before = snapshot(self.books)
        try:
            return operation(self.books, *arguments)
        except OutOfPages as error:
            capacity = self.books.capacity()
            for problem in error.problems:
                assert int(problem.need) > capacity[problem.path].free
            assert snapshot(self.books) == before
            return None

    def refuse(self, operation: Any, *arguments: Any) -> None:
        self.books.settle()
        self.absorb()
        before = snapshot(self.books)
        try:
            operation(*arguments)
        except BooksError:
            assert snapshot(self.books) == before
            return
        raise AssertionError("not refused")

    def absorb(self) -> None:
        """Host lengths follow the counts that have landed, in order."""
        while self.landings and self.landings[0][0].there:
            _, launch = self.landings.pop(0)
            self.decided(launch)

    def decided(self, launch: Launch) -> None:
        for sequence, path in zip(launch.sequences, launch.paths, strict=True):
            sequence.committed += len(path)

    def busy(self, sequence: Timeline) -> bool:
        return any(sequence in launch.sequences for launch in self.undecided)

    @property
    def undecided(self) -> list[Launch]:
        return [launch for _, launch in self.landings] + self.launches

    def pick(self, number: int, items: list[Any]) -> Any:
        return items[number % len(items)]

    # ---- sequences ---------------------------------------------------------------------

    @rule(
        number=st.integers(0, 2),
        cross=st.lists(st.integers(0, 7), min_size=2, max_size=2),
        chain=st.lists(st.integers(0, 20), max_size=2),
    )
    def open(self, number: int, cross: list[int], chain: list[int]) -> None:
        prefix: list[Held] = []
        for choice in chain:
            stop = prefix[-1].segment.stop if prefix else 0
            fitting = [h for h in self.segments if h.segment.start == stop]
            fitting = [h for h in fitting if not prefix or h.cross == prefix[0].cross]
            fitting = [h for h in fitting if not prefix or h.tokens[:stop] == prefix[-1].tokens]
            if fitting:
                prefix.append(self.pick(choice, fitting))
        inherited = prefix[-1].cross if prefix else []
        counts = [len(inherited) or c for c in cross[:number]] if self.crosses else []
        handles = self.attempt(Books.open, number, [h.segment for h in prefix], counts)
        for index, handle in enumerate(handles or []):
            new = [next(self.names) for _ in range(counts[index] if self.crosses else 0)]
            tokens = list(prefix[-1].tokens) if prefix else []
            writer = prefix[-1].writer if prefix and inherited else None
            sequence = Timeline(handle, tokens, inherited or new, len(tokens), writer)
            self.open_sequences.append(sequence)

    @precondition(lambda self: self.open_sequences)
    @rule(which=st.integers(0, 20), number=st.sampled_from([0, 1, 1, 2]))
    def fork(self, which: int, number: int) -> None:
        sequence = self.pick(which, self.open_sequences)
        self.books.settle()
        self.absorb()
        awaited = any(sequence in launch.sequences for _, launch in self.landings)
        unwritten = not self.written(sequence)
        if awaited or unwritten or (STATE in self.shapes and self.busy_tokens(sequence)):
            self.refuse(self.books.fork, sequence.handle, number)
            return
        handles = self.attempt(Books.fork, sequence.handle, number)
        for handle in handles or []:
            tokens = sequence.tokens[: sequence.committed]
            child = Timeline(handle, tokens, sequence.cross, len(tokens), sequence.writer)
            self.open_sequences.append(child)

    def busy_tokens(self, sequence: Timeline) -> bool:
        return any(
            launch.drafts[launch.sequences.index(sequence)]
            for launch in self.undecided
            if sequence in launch.sequences
        )

    def written(self, sequence: Timeline) -> bool:
        """Whether the step that wrote the encoder tokens is decided."""
        if not sequence.cross:
            return True
        return sequence.writer is not None and sequence.writer not in self.undecided

    @precondition(lambda self: self.open_sequences)
    @rule(which=st.integers(0, 2**MAX_REQUESTS - 1), chance=st.integers(0, 2))
    def close(self, which: int, chance: int) -> None:
        if chance:
            return
        chosen = [s for index, s in enumerate(self.open_sequences) if which >> index & 1]
        self.books.close([sequence.handle for sequence in chosen])
        self.absorb()
        self.open_sequences = [s for s in self.open_sequences if s not in chosen]
        self.stale += [sequence.handle for sequence in chosen]
        for sequence in chosen:
            self.refuse(self.books.extend, [sequence.handle], 1)

    @rule(chance=st.integers(0, 15))
    def reset(self, chance: int) -> None:
        if chance:
            return
        self.stale += [sequence.handle for sequence in self.open_sequences]
        orphans = [held.segment for held in self.segments]
        steps = [launch.record for launch in self.launches]
        self.books.reset()
        self.open_sequences, self.launches, self.segments, self.landings = [], [], [], []
        for segment in orphans:
            self.refuse(self.books.release, segment)
        for step in steps:
            self.refuse(self.books.commit, step)
        for path, capacity in self.books.capacity().items():
            assert capacity.held == 0, path

    # ---- steps -------------------------------------------------------------------------

    @precondition(lambda self: self.open_sequences)
    @rule(data=st.data(), skipped=st.integers(0, 2**MAX_REQUESTS - 1))
    def extend_chunk(self, data: st.DataObject, skipped: int) -> None:
        self.extend(data, "chunk", skipped)

    @precondition(lambda self: self.open_sequences)
    @rule(data=st.data(), skipped=st.integers(0, 2**MAX_REQUESTS - 1))
    def extend_draft(self, data: st.DataObject, skipped: int) -> None:
        self.extend(data, data.draw(st.sampled_from(["chain", "tree"])), skipped)

    @precondition(lambda self: self.open_sequences)
    @rule(data=st.data(), skipped=st.sampled_from([0, 0, 1, 2]))
    def decode_and_commit(self, data: st.DataObject, skipped: int) -> None:
        self.extend(data, "decode", skipped)
        self.commit(on_device=False, as_paths=False)

    def extend(self, data: st.DataObject, kind: str, skipped: int) -> None:
        chosen = [s for index, s in enumerate(self.open_sequences) if not skipped >> index & 1]
        most = {"decode": 1, "chunk": 9, "chain": 4, "tree": 5}[kind]
        counts = [1 if kind == "decode" else data.draw(st.integers(0, most)) for _ in chosen]
        counts = [min(c, self.room(s)) for c, s in zip(counts, chosen, strict=True)]
        parents = [data.draw(st.integers(-1, n - 1)) for c in counts for n in range(c)]
        tree = np.array(parents, np.int64) if kind == "tree" else None
        handles = [sequence.handle for sequence in chosen]
        self.books.settle()
        self.absorb()
        if len(self.undecided) == 2 and self.launches and not data.draw(st.integers(0, 4)) == 0:
            self.commit(on_device=False, as_paths=False)
        if len(self.undecided) == 2:
            self.refuse(self.books.extend, handles, counts, tree)
            return
        record = self.attempt(Books.extend, handles, counts, tree)
        if record is None:
            return
        self.device.begin(record)
        for name, rows in self.device.rows.items():
            np.testing.assert_array_equal(rows, self.books.rows(name))
        drafts = [[next(self.names) for _ in range(c)] for c in counts]
        paths = [
            self.path(data, kind, c, tree, s) for c, s in zip(counts, record.q_indptr, strict=False)
        ]
        self.check_positions(record, counts, tree)
        self.check_owners(record)
        launch = Launch(record, chosen, drafts, paths)
        self.launches.append(launch)
        for sequence in chosen:
            sequence.writer = sequence.writer or launch

    def check_owners(self, record: Any) -> None:
        """Nobody else owns a page that a step writes, unless an earlier step writes it already."""
        settled = np.repeat(record.settled, np.diff(record.q_indptr))
        for name, table in self.books._ledger.tables.items():
            pages = record.tables[name].slots[settled] // table.shape.page_tokens
            assert (table.pages.owners[pages] == 1).all()

    def room(self, sequence: Timeline) -> int:
        undecided = sum(
            len(launch.drafts[launch.sequences.index(sequence)])
            for launch in self.undecided
            if sequence in launch.sequences
        )
        return ROW_TOKENS - sequence.committed - undecided

    def path(
        self, data: st.DataObject, kind: str, tokens: int, tree: np.ndarray | None, first: int
    ) -> list[int]:
        """The nodes that the device will accept."""
        if kind in ("decode", "chunk"):
            return list(range(tokens))
        if kind == "chain" or tree is None:
            return list(range(data.draw(st.integers(0, tokens))))
        node = data.draw(st.integers(-1, tokens - 1))
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = int(tree[first + node])
        return path

    def check_positions(self, record: Any, counts: list[int], tree: np.ndarray | None) -> None:
        for b, tokens in enumerate(counts):
            first = int(record.q_indptr[b])
            depths: list[int] = []
            for node in range(tokens):
                parent = node - 1 if tree is None else int(tree[first + node])
                depths.append(0 if parent < 0 else depths[parent] + 1)
            expected = [int(record.prefix[b]) + depth for depth in depths]
            assert record.positions[first : first + tokens].tolist() == expected
            assert record.lengths[b] == record.prefix[b] + tokens

    @rule()
    def launch(self) -> None:
        waiting = [launch for launch in self.launches if not launch.launched]
        earlier = self.launches[: -len(waiting) or None]
        if waiting and not any(launch.is_tree for launch in earlier):
            self.device.launch(waiting[0])

    @rule(on_device=st.booleans(), as_paths=st.booleans())
    def commit(self, on_device: bool, as_paths: bool) -> None:
        if self.landings and not self.landings[0][0].there and not on_device:
            self.landings[0][0].there = True
        if not self.launches:
            return
        launch = self.launches[0]
        if not launch.launched:
            self.device.launch(launch)
        for later in self.launches[1:]:
            self.refuse(self.books.commit, later.record)
        counts = [len(path) for path in launch.paths]
        chain = all(path == list(range(len(path))) for path in launch.paths)
        if on_device and not launch.is_tree:
            self.launches.pop(0)
            landing = Landing(counts)
            self.landings.append((landing, launch))
            done = self.books.commit(launch.record, landing)
            assert done.accepted is None
            self.absorb()
            return
        self.books.settle()
        self.absorb()
        paths: Any = launch.paths if as_paths or not chain else counts
        if all(len(path) == len(d) for path, d in zip(launch.paths, launch.drafts, strict=True)):
            paths = None if chain and not as_paths else paths
        if self.landings and not chain:
            self.refuse(self.books.commit, launch.record, paths)
            self.landings[0][0].there = True
            return
        self.launches.pop(0)
        done = self.books.commit(launch.record, paths)
        landing = Landing(counts)
        landing.there = True
        self.landings.append((landing, launch))
        self.device.finish(done)
        assert done.accepted.tolist() == counts
        assert done.last_nodes.tolist() == [path[-1] if path else -1 for path in launch.paths]
        self.absorb()

    # ---- what always holds -------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.books.settle()
        self.absorb()
        audit(self.books)
        handles = [sequence.handle for sequence in self.open_sequences]
        committed = [sequence.committed for sequence in self.open_sequences]
        assert self.books.committed(handles).tolist() == committed
        for handle in self.stale[-3:]:
            self.refuse(self.books.committed, [handle])

    @invariant()
    def sequences_read_their_own_tokens(self) -> None:
        for sequence in self.open_sequences:
            for name, shape in self.device.shapes.items():
                tokens = np.array(sequence.tokens[: sequence.committed], np.int64)
                seen = np.arange(shape.lifetime.first_visible(len(tokens)), len(tokens))
                if shape is CROSS:
                    if not self.written(sequence):
                        continue
                    tokens, seen = np.array(sequence.cross), np.arange(len(sequence.cross))
                row = sequence.handle.row
                slots = self.device.slots(name, row, seen, self.books.rows(name))
                read = self.device.memory[name][slots]
                np.testing.assert_array_equal(read, tokens[seen])

    @invariant()
    def no_row_owns_more_than_planned(self) -> None:
        requests = self.books._ledger.requests
        for shape in self.shapes:
            if isinstance(shape, StateShape):
                continue
            for row, pages in row_pages_of(self.books, shape.name):
                tokens = int(requests.reserved[row])
                in_flight = tokens - int(requests.committed[row])
                if shape is CROSS:
                    tokens, in_flight = shape.lifetime.tokens, 0
                assert pages <= shape.lifetime.peak_pages(tokens, in_flight, shape.page_tokens)
