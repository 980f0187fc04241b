"""Tracking slots, donated and kept prefixes, checkpoints: who owns which state, come what may."""

from __future__ import annotations

import pytest
from books_support import FULL, LOCAL, MODES, audit, books_of, snapshot, tracked_states

from kvfactory.books import StateShape
from kvfactory.errors import BooksError, OutOfPages

# ---- examples --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_donated_state_is_at_the_tracked_position(mode: str) -> None:
    books = books_of(FULL, LOCAL, tracked_states(mode))
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
    books = books_of(FULL, tracked_states("two"))
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
    books = books_of(FULL, tracked_states("two"))
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
    books = books_of(FULL, tracked_states("one"))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 4))
    slot = books.track(sequence)["state"]
    step = books.extend([sequence], 4)
    assert books.track(sequence, 8)["state"] == slot
    assert books.tracked(sequence) == 0
    books.commit(step)
    assert books.tracked(sequence) == 8


def test_a_lazy_slot_is_taken_when_it_is_needed() -> None:
    books = books_of(FULL, tracked_states("lazy", num_slots=3))
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
    books = books_of(FULL, tracked_states("two"))
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
    books = books_of(FULL, tracked_states("one", num_slots=3, checkpoints=2))
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
    books = books_of(FULL, LOCAL, tracked_states("two"))
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
    books = books_of(FULL, tracked_states(mode))
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
