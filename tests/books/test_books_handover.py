"""Describing what a sequence owns, and reserving what one will own: offload and load."""

from __future__ import annotations

import numpy as np
import pytest
from books_support import CHUNKED, CROSS, FULL, LOCAL, STATE, audit, books_of, snapshot

from kvfactory.errors import BooksError, OutOfPages


def test_a_view_names_what_a_query_at_the_end_sees() -> None:
    books = books_of(FULL, LOCAL, STATE)
    (sequence,) = books.open(1)
    assert books.view(sequence).slots == {"state": 0}
    step = books.extend([sequence], 13)
    with pytest.raises(BooksError, match="outcome is open"):
        books.view(sequence)
    books.commit(step)
    view = books.view(sequence)
    assert (view.start, view.stop, view.cross_tokens) == (0, 13, 0)
    row = sequence.row
    np.testing.assert_array_equal(view.parts["full"].pages, books.rows("full")[row, :4])
    assert view.parts["local"].first == (13 - 4) // 2
    assert view.slots["state"] == step.states["state"].slots[0]
    with pytest.raises(BooksError):
        books.release(view)
    audit(books)


def test_a_view_of_a_fork_names_the_state_before_it_is_copied() -> None:
    books = books_of(FULL, STATE)
    (parent,) = books.open(1)
    books.commit(books.extend([parent], 5))
    (child,) = books.fork(parent, 1)
    assert books.view(child).slots == books.view(parent).slots
    books.copies()
    assert books.view(child).slots != books.view(parent).slots


def test_reserve_hands_over_pages_and_state_without_copies() -> None:
    books = books_of(FULL, LOCAL, CHUNKED, CROSS, STATE)
    segment = books.reserve(13, cross_tokens=5)
    assert len(segment.parts["full"].pages) == 4
    assert len(segment.parts["local"].pages) == 3
    assert len(segment.parts["cross"].pages) == 2
    audit(books)
    (sequence,) = books.open(1, [segment])
    books.release(segment)
    audit(books)
    view = books.view(sequence)
    assert view.slots == segment.slots
    for name, part in segment.parts.items():
        assert view.parts[name].first == part.first
        np.testing.assert_array_equal(view.parts[name].pages, part.pages)
    step = books.extend([sequence], 1)
    assert not any(len(table.copies) for table in step.tables.values())
    assert not len(step.states["state"].copies)
    assert not step.states["state"].fresh.any()
    assert step.states["state"].slots[0] == segment.slots["state"]
    books.commit(step)
    books.close([sequence])
    assert all(capacity.held == 0 for capacity in books.capacity().values())


def test_a_reserved_segment_may_serve_several() -> None:
    books = books_of(FULL, STATE)
    segment = books.reserve(6)
    sequences = books.open(3, [segment])
    books.release(segment)
    audit(books)
    step = books.extend(sequences, 1)
    slots = step.states["state"].slots
    assert segment.slots["state"] in slots
    assert len(set(slots.tolist())) == 3
    assert step.states["state"].copies[:, 0].tolist() == [segment.slots["state"]] * 2
    assert len(step.tables["full"].copies) == 2


@pytest.mark.parametrize(("short", "tokens", "fit"), [("full", 40, 2), ("state", 1, 7)])
def test_a_shortage_in_any_table_reserves_nothing(short: str, tokens: int, fit: int) -> None:
    books = books_of(FULL, STATE)
    for _ in range(fit):
        books.reserve(tokens)
    before = snapshot(books)
    with pytest.raises(OutOfPages, match=short):
        books.reserve(tokens)
    assert snapshot(books) == before
    audit(books)


def test_what_no_row_holds_is_refused() -> None:
    with pytest.raises(BooksError, match=r"1\.\.40"):
        books_of(FULL).reserve(41)
    with pytest.raises(BooksError, match="cross_tokens"):
        books_of(FULL).reserve(4, cross_tokens=1)
