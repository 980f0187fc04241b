"""Tracking slots, donated and kept prefixes, checkpoints: who owns which state, come what may."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
from books_support import FULL, LOCAL, audit, books_of, snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfactory.books import Segment, Sequence, StateShape, StepRecord, TableShape
from kvfactory.errors import BooksError, OutOfPages

NOTHING: tuple[int, ...] = ()
SLOTS = 9
MODES = {"one": (1, False), "two": (2, False), "lazy": (2, True)}


def states(mode: str, num_slots: int = 20, checkpoints: int = 4) -> StateShape:
    tracking, lazy = MODES[mode]
    return StateShape("state", num_slots, tracking, lazy, checkpoints)


# ---- examples --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_donated_state_is_at_the_tracked_position(mode: str) -> None:
    books = books_of(FULL, LOCAL, states(mode))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 6))
    assert books.tracked(sequence) == 0
    slot = books.track(sequence)["state"]
    assert books.tracked(sequence) == 6
    books.commit(books.extend([sequence], 1))
    segment = books.donate(sequence)
    assert (segment.start, segment.stop, segment.slots["state"]) == (0, 6, slot)
    assert books.tracked(sequence) == 0
    audit(books)
    (other,) = books.open(1, [segment])
    assert books.committed([other]).tolist() == [6]
    books.close([sequence, other])
    books.release(segment)
    audit(books)
    assert all(capacity.held == 0 for capacity in books.capacity().values())


def test_two_slots_take_turns_and_keep_the_last_that_is_sure() -> None:
    books = books_of(FULL, states("two"))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 4))
    first = books.track(sequence)["state"]
    step = books.extend([sequence], 4)
    second = books.track(sequence, 8)["state"]
    assert first != second
    assert books.tracked(sequence) == 4
    books.commit(step, [4])
    assert books.tracked(sequence) == 8
    books.commit(books.extend([sequence], 1))
    assert books.track(sequence)["state"] == first


def test_a_rejected_token_takes_later_states_with_it() -> None:
    books = books_of(FULL, states("two"))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 4))
    books.track(sequence)
    step = books.extend([sequence], 4)
    books.track(sequence, 7)
    books.commit(step, [3])
    assert books.tracked(sequence) == 7
    step = books.extend([sequence], 4)
    books.track(sequence, 11)
    books.commit(step, [2])
    assert books.tracked(sequence) == 7


def test_one_slot_is_written_again_at_once() -> None:
    books = books_of(FULL, states("one"))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 4))
    slot = books.track(sequence)["state"]
    step = books.extend([sequence], 4)
    assert books.track(sequence, 8)["state"] == slot
    assert books.tracked(sequence) == 0
    books.commit(step)
    assert books.tracked(sequence) == 8


def test_a_lazy_slot_is_taken_when_it_is_needed() -> None:
    books = books_of(FULL, states("lazy", num_slots=3))
    (sequence,) = books.open(1)
    assert books.capacity()["states.state"].held == 2
    books.commit(books.extend([sequence], 4))
    books.track(sequence)
    books.commit(books.extend([sequence], 4))
    before = snapshot(books)
    with pytest.raises(OutOfPages, match=r"states\.state"):
        books.track(sequence)
    assert snapshot(books) == before
    books.release(books.donate(sequence))
    books.track(sequence)
    assert books.tracked(sequence) == 8


def test_closing_returns_one_and_two_slots_or_keeps_one() -> None:
    books = books_of(FULL, states("two"))
    a, b, c = books.open(3)
    assert books.capacity()["states.state"].held == 9
    books.commit(books.extend([a, b, c], 4))
    books.track(b)
    books.commit(books.extend([b], 1))
    books.close([a])
    assert books.capacity()["states.state"].held == 6
    tracked = books.retire(b, tracked=True)
    assert (tracked.stop, books.capacity()["states.state"].held) == (4, 4)
    own = books.state_slots(c)
    kept = books.retire(c)
    assert (kept.stop, kept.slots) == (4, own)
    assert books.capacity()["states.state"].held == 2
    audit(books)
    with pytest.raises(BooksError):
        books.committed([c])


def test_checkpoints_have_slots_of_their_own() -> None:
    books = books_of(FULL, states("one", num_slots=3, checkpoints=2))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 5))
    segment = books.hold(sequence, 5, checkpoint=True)
    assert segment.slots["state"] == 3 + 1
    assert books.capacity()["checkpoints.state"] == (0, 1, 1)
    with pytest.raises(OutOfPages, match=r"checkpoints\.state"):
        books.hold(sequence, 5, checkpoint=True)
    assert books.copies()["state"].tolist() == [[books.state_slots(sequence)["state"], 4]]
    books.close([sequence])
    (again,) = books.open(1, [segment])
    assert books.view(again).slots["state"] == 4
    step = books.extend([again], 1)
    assert step.states["state"].copies.tolist() == [[4, step.states["state"].slots[0]]]
    books.release(segment)
    assert books.capacity()["checkpoints.state"] == (1, 0, 1)
    books.reset()
    audit(books)


def test_a_request_that_dies_before_its_first_step_returns_all() -> None:
    books = books_of(FULL, LOCAL, states("two"))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 5))
    segment = books.hold(sequence, 5)
    held = {path: c.held for path, c in books.capacity().items()}
    (dies,) = books.open(1, [segment])
    books.close([dies])
    assert {path: c.held for path, c in books.capacity().items()} == held
    assert len(books.copies()["state"]) == 1


@pytest.mark.parametrize("mode", ["one"])
def test_what_cannot_be_tracked_is_refused(mode: str) -> None:
    books = books_of(FULL, states(mode))
    (sequence,) = books.open(1)
    with pytest.raises(BooksError, match="tokens"):
        books.track(sequence)
    with pytest.raises(BooksError, match="no state tracked"):
        books.donate(sequence)
    books.commit(books.extend([sequence], 5))
    with pytest.raises(BooksError, match="tokens"):
        books.track(sequence, 4)
    step = books.extend([sequence], 2)
    with pytest.raises(BooksError, match=r"6\.\.7"):
        books.track(sequence)
    with pytest.raises(BooksError, match="outcome is open"):
        books.retire(sequence)
    books.commit(step)
    step = books.extend([sequence], 2, [-1, -1])
    with pytest.raises(BooksError, match="draft tree"):
        books.track(sequence, 8)
    books.commit(step, [[1]])
    without = books_of(FULL, StateShape("state", 8))
    (other,) = without.open(1)
    without.commit(without.extend([other], 2))
    with pytest.raises(BooksError, match="state_tracking"):
        without.track(other)


# ---- random histories ------------------------------------------------------------------------


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

    shapes: tuple[TableShape | StateShape, ...] = (FULL, LOCAL, states("two", 14, 3))

    def __init__(self) -> None:
        super().__init__()
        self.books = books_of(*self.shapes, max_requests=4)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.names = count(1)
        self.live: list[Live] = []
        self.steps: list[Open] = []
        self.segments: list[tuple[Segment, tuple[int, ...]]] = []

    def attempt(self, operation: Any, *arguments: Any) -> Any:
        """The result, or None where the books are short or refuse; nothing changed then."""
        before = snapshot(self.books)
        try:
            return operation(*arguments)
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
        for handle in self.attempt(self.books.open, number, prefix) or []:
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
        record = self.attempt(self.books.extend, [live.handle for live in chosen], counts)
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
        slots = self.attempt(self.books.track, live.handle, len(before) + tokens)
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
        self.attempt(self.books.track, self.pick(which, self.live).handle)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["hold", "save", "donate", "whole", "last"]))
    def own(self, which: int, how: str) -> None:
        live = self.pick(which, self.live)
        tokens = len(live.tokens)
        operations: dict[str, Any] = {
            "hold": lambda: self.books.hold(live.handle, tokens),
            "save": lambda: self.books.hold(live.handle, tokens, checkpoint=True),
            "donate": lambda: self.books.donate(live.handle),
            "whole": lambda: self.books.retire(live.handle),
            "last": lambda: self.books.retire(live.handle, tracked=True),
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
        for handle in self.attempt(self.books.fork, live.handle, 1) or []:
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

    shapes = (FULL, states("one", 8, 2))


class LazySlotMachine(TrackingMachine):
    """A second slot on demand, and pages so few that they are short as well."""

    shapes = (
        TableShape("full", FULL.lifetime, page_tokens=4, num_pages=9, row_pages=10),
        LOCAL,
        states("lazy", 8, 2),
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
