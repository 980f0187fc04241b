"""Random histories of tracked, donated and kept states, checkpoints and retractions.

Who owns which state, come what may, and with every table too short for every operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from books_leaving import restore
from books_support import FULL, LOCAL, audit, books_of, inject_shortages, snapshot, tracked_states
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfactory.books import Books, Segment, Sequence, StateShape, StepRecord, TableShape
from kvfactory.errors import BooksError, OutOfPages

NOTHING: tuple[int, ...] = ()


@dataclass(eq=False)
class Live:
    """A sequence with the tokens that are committed."""

    handle: Sequence
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Open:
    """A step with its drafts and what will be accepted; ``tracked`` (place, sequence, tokens)."""

    record: StepRecord
    sequences: list[Live]
    drafts: list[tuple[int, ...]]
    accepts: list[int]


class TrackingMachine(RuleBasedStateMachine):
    """Books and a memory that knows after which tokens the state in every place is."""

    shapes: tuple[TableShape | StateShape, ...] = (FULL, LOCAL, tracked_states("two", 14, 3))

    def __init__(self) -> None:
        super().__init__()
        self.books = books_of(*self.shapes, max_requests=4)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.names = count(1)
        self.live: list[Live] = []
        self.steps: list[Open] = []
        self.segments: list[tuple[Segment, tuple[int, ...]]] = []

    def attempt(self, operation: Any, *arguments: Any) -> Any:
        """The result, or None where the books are short or refuse; nothing changed then.

        ``operation`` takes the books first; every table is made too short for it before.
        """
        inject_shortages(self.books, lambda books: operation(books, *arguments))
        before = snapshot(self.books)
        try:
            return operation(self.books, *arguments)
        except (OutOfPages, BooksError) as error:
            for problem in error.problems if isinstance(error, OutOfPages) else ():
                assert int(problem.need) > self.books.capacity()[problem.path].free
            assert snapshot(self.books) == before
            return None

    def pick(self, number: int, items: list[Any]) -> Any:
        return items[number % len(items)]

    def copy(self, pairs: np.ndarray) -> None:
        read = [self.memory[source] for source in pairs[:, 0].tolist()]
        self.memory.update(zip(pairs[:, 1].tolist(), read, strict=True))

    # ---- rules ---------------------------------------------------------------------------

    @rule(number=st.integers(1, 2), which=st.integers(-3, 9))
    def open(self, number: int, which: int) -> None:
        chosen = self.pick(which, self.segments) if which >= 0 and self.segments else None
        prefix, tokens = ([chosen[0]], chosen[1]) if chosen else ([], NOTHING)
        for handle in self.attempt(Books.open, number, prefix) or []:
            self.live.append(Live(handle, tokens))

    @precondition(lambda self: self.live and len(self.steps) < 2)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        busy = [live for step in self.steps for live in step.sequences]
        exact = all(
            take == len(draft)
            for step in self.steps
            for take, draft in zip(step.accepts, step.drafts, strict=True)
        )
        chosen = [live for live in self.live if exact or live not in busy]
        room = [40 - len(live.tokens) - 8 * busy.count(live) for live in chosen]
        counts = [data.draw(st.integers(0, max(0, min(4, most)))) for most in room]
        record = self.attempt(Books.extend, [live.handle for live in chosen], counts)
        if record is None:
            return
        part = record.states["state"]
        self.copy(part.copies)
        self.memory.update(dict.fromkeys(part.slots[part.fresh].tolist(), NOTHING))
        drafts = [tuple(next(self.names) for _ in range(number)) for number in counts]
        accepts = [data.draw(st.sampled_from([n, n, 0, n // 2])) for n in counts]
        self.steps.append(Open(record, chosen, drafts, accepts))
        for live, slot, draft, take in zip(chosen, part.slots, drafts, accepts, strict=True):
            before = self.memory[int(slot)]
            pending = sum((d for s in self.steps[:-1] for o, d in self.of(s, live)), NOTHING)
            assert before == live.tokens + pending
            self.memory[int(slot)] = before + draft[:take]
            if draft and data.draw(st.booleans()):
                self.track_ahead(live, before, draft, data.draw(st.integers(1, len(draft))))

    def of(self, step: Open, live: Live) -> list[tuple[Live, tuple[int, ...]]]:
        pairs = zip(step.sequences, step.drafts, strict=True)
        return [(owner, draft) for owner, draft in pairs if owner is live]

    def track_ahead(
        self, live: Live, before: tuple[int, ...], draft: tuple[int, ...], tokens: int
    ) -> None:
        slots = self.attempt(Books.track, live.handle, len(before) + tokens)
        for slot in (slots or {}).values():
            self.memory[slot] = before + draft[:tokens]

    @precondition(lambda self: self.steps)
    @rule()
    def commit(self) -> None:
        step = self.steps.pop(0)
        self.books.commit(step.record, step.accepts)
        for live, draft, take in zip(step.sequences, step.drafts, step.accepts, strict=True):
            live.tokens += draft[:take]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def track(self, which: int) -> None:
        self.attempt(Books.track, self.pick(which, self.live).handle)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["hold", "save", "donate", "whole", "last"]))
    def own(self, which: int, how: str) -> None:
        live = self.pick(which, self.live)
        tokens = len(live.tokens)
        operations: dict[str, Any] = {
            "hold": lambda books: books.hold(live.handle, tokens),
            "save": lambda books: books.hold(live.handle, tokens, checkpoint=True),
            "donate": lambda books: books.donate(live.handle),
            "whole": lambda books: books.retire(live.handle),
            "last": lambda books: books.retire(live.handle, tracked=True),
        }
        segment = self.attempt(operations[how])
        if segment is not None:
            assert segment.stop <= tokens
            self.segments.append((segment, live.tokens[: segment.stop]))
            if how in ("whole", "last"):
                self.live.remove(live)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        live = self.pick(which, self.live)
        for handle in self.attempt(Books.fork, live.handle, 1) or []:
            self.live.append(Live(handle, live.tokens))

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        chosen = self.pick(which, self.segments)
        self.segments.remove(chosen)
        self.books.release(chosen[0])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        live = self.pick(which, self.live)
        self.live.remove(live)
        self.books.close([live.handle])

    @precondition(lambda self: self.live and not self.steps)
    @rule(which=st.integers(0, 9))
    def retract(self, which: int) -> None:
        """A sequence leaves for the host with the state that is there, and comes back."""
        live = self.pick(which, self.live)
        self.copies()
        place = self.books.view(live.handle).slots["state"]
        state = self.memory[place] if place else NOTHING
        assert state == live.tokens
        self.books.close([live.handle])
        restored = self.attempt(restore, [(len(live.tokens), 0)])
        if restored is None:
            self.live.remove(live)
            return
        ((live.handle, segment),) = restored
        self.copies()
        if segment is not None:
            self.memory[segment.slots["state"]] = state

    @rule()
    def copies(self) -> None:
        self.copy(self.books.copies()["state"])

    # ---- what always holds ---------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        audit(self.books)

    @invariant()
    def segments_have_their_states(self) -> None:
        due = self.books._ledger.states["state"]._sources
        for segment, tokens in self.segments:
            place = segment.slots["state"]
            assert self.memory[due.get(place, place)] == tokens

    def teardown(self) -> None:
        while self.steps:
            self.commit()
        self.books.close([live.handle for live in self.live])
        for segment, _ in self.segments:
            self.books.release(segment)
        assert all(capacity.held == 0 for capacity in self.books.capacity().values())


class OneSlotMachine(TrackingMachine):
    """One tracking slot, few of everything."""

    shapes = (FULL, tracked_states("one", 8, 2))


class LazySlotMachine(TrackingMachine):
    """A second slot on demand, and pages so few that they are short as well."""

    shapes = (
        TableShape("full", FULL.lifetime, page_tokens=4, num_pages=9, row_pages=10),
        LOCAL,
        tracked_states("lazy", 8, 2),
    )


LIMITS = settings(
    max_examples=60,
    stateful_step_count=35,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
for machine in (TrackingMachine, OneSlotMachine, LazySlotMachine):
    machine.TestCase.settings = LIMITS

TestTwoSlots = TrackingMachine.TestCase
TestOneSlot = OneSlotMachine.TestCase
TestLazySlot = LazySlotMachine.TestCase
