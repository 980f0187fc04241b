"""Pages with several owners: forks, held prefixes, copies before writes; state and encoder too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from books_support import (
    CHUNKED,
    CROSS,
    FULL,
    LOCAL,
    STATE,
    Landing,
    audit,
    books_of,
    held,
    snapshot,
)

from kvfactory.books import Books, Sequence, StateShape, TableShape, window_slots
from kvfactory.errors import BooksError, OutOfPages
from kvfactory.kinds import Lifetime


def grown(books: Books, tokens: int) -> Sequence:
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], tokens))
    return sequence


def copies_of(books: Books, *sequences: Sequence, tokens: int = 1) -> list[list[int]]:
    step = books.extend(list(sequences), tokens)
    books.commit(step)
    audit(books)
    copies: list[list[int]] = step.tables["full"].copies.tolist()
    return copies


# ---- forks -------------------------------------------------------------------------------------


def test_a_fork_shares_pages_until_somebody_writes() -> None:
    books = books_of(FULL)
    parent = grown(books, 6)
    (child,) = books.fork(parent, 1)
    assert (books.committed([child]).tolist(), held(books, "full")) == ([6], 2)
    assert copies_of(books, child) == [[2, 3]]
    assert copies_of(books, parent) == []
    assert books.rows("full")[[parent.row, child.row], :3].tolist() == [[1, 2, 0], [1, 3, 0]]


def test_the_parent_copies_too_and_the_last_writer_keeps_the_page() -> None:
    books = books_of(FULL)
    parent = grown(books, 6)
    first, second = books.fork(parent, 2)
    assert copies_of(books, parent) == [[2, 3]]
    assert copies_of(books, second, first) == [[2, 4]]
    assert held(books, "full") == 4


def test_full_pages_are_never_copied() -> None:
    books = books_of(FULL)
    parent = grown(books, 8)
    children = books.fork(parent, 3)
    assert copies_of(books, parent, *children) == []


def test_no_new_tokens_copy_nothing() -> None:
    books = books_of(FULL)
    parent = grown(books, 6)
    (child,) = books.fork(parent, 1)
    assert copies_of(books, parent, child, tokens=0) == []
    assert copies_of(books, child) == [[2, 3]]


def test_a_copy_needs_a_page_like_any_other() -> None:
    tight = TableShape("full", Lifetime("whole"), page_tokens=4, num_pages=3, row_pages=4)
    books = books_of(tight)
    parent = grown(books, 6)
    (child,) = books.fork(parent, 1)
    before = snapshot(books)
    with pytest.raises(OutOfPages, match=r"tables\.full: got 0 free of 2, need 1"):
        books.extend([child], 1)
    assert snapshot(books) == before
    books.close([parent])
    assert copies_of(books, child) == []


def test_who_writes_already_goes_on_in_place() -> None:
    """Pages under an open step's tokens gain only owners of committed ones: no copy in between."""
    books = books_of(FULL)
    sequence = grown(books, 5)
    first = books.extend([sequence], 1)
    segment = books.hold(sequence, 5)
    second = books.extend([sequence], 1)
    assert not len(second.tables["full"].copies)
    assert second.tables["full"].slots.tolist() == [first.tables["full"].slots[0] + 1]
    books.commit(first)
    books.commit(second)
    assert copies_of(books, sequence) == [[2, 3]]
    books.release(segment)
    audit(books)


def test_forks_fall_apart_without_leaving_anything() -> None:
    books = books_of(FULL, LOCAL, CHUNKED)
    parent = grown(books, 13)
    children = books.fork(parent, 4)
    copies_of(books, parent, *children)
    books.close([parent, *children])
    assert all(capacity.held == 0 for capacity in books.capacity().values())


def test_forks_wait_for_counts_on_the_device() -> None:
    books = books_of(FULL)
    sequence = grown(books, 5)
    landing = Landing([1])
    books.commit(books.extend([sequence], 2), landing)
    before = snapshot(books)
    with pytest.raises(BooksError, match="counts are on the device"):
        books.fork(sequence, 1)
    assert snapshot(books) == before
    landing.there = True
    assert books.committed(books.fork(sequence, 1)).tolist() == [6]


def test_a_shortage_of_rows_opens_nothing() -> None:
    books = books_of(FULL, STATE, max_requests=3)
    parent = grown(books, 5)
    before = snapshot(books)
    for refused in (lambda: books.fork(parent, 3), lambda: books.open(3)):
        with pytest.raises(OutOfPages, match="requests: got 2 free of 3, need 3"):
            refused()
    assert snapshot(books) == before


# ---- held prefixes -----------------------------------------------------------------------------


def test_a_segment_outlives_its_sequence_and_serves_others() -> None:
    books = books_of(FULL)
    sequence = grown(books, 10)
    segment = books.hold(sequence, 6)
    books.close([sequence])
    assert (segment.start, segment.stop, held(books, "full")) == (0, 6, 2)
    first, second = books.open(2, [segment])
    assert books.committed([first, second]).tolist() == [6, 6]
    assert copies_of(books, first, second) == [[2, 3], [2, 4]]
    books.release(segment)
    assert held(books, "full") == 3
    books.close([first, second])
    assert held(books, "full") == 0


def test_segments_chain_and_later_ones_win_where_they_overlap() -> None:
    books = books_of(FULL)
    sequence = grown(books, 6)
    head = books.hold(sequence, 6)
    copies_of(books, sequence, tokens=5)
    tail = books.hold(sequence, 11, start=6)
    (other,) = books.open(1, [head, tail])
    assert head.parts["full"].pages.tolist() == [1, 2]
    assert tail.parts["full"].pages.tolist() == [3, 4]
    assert books.rows("full")[other.row, :3].tolist() == [1, 3, 4]
    books.release(head)
    books.release(tail)
    audit(books)


@pytest.mark.parametrize(("order", "problem"), [((1,), "start at 4"), ((0, 2), "start at 8")])
def test_a_prefix_without_gaps(order: tuple[int, ...], problem: str) -> None:
    books = books_of(FULL)
    sequence = grown(books, 12)
    segments = [books.hold(sequence, stop, stop - 4) for stop in (4, 8, 12)]
    before = snapshot(books)
    with pytest.raises(BooksError, match=problem):
        books.open(1, [segments[index] for index in order])
    assert snapshot(books) == before
    books.open(1, segments)


def test_releasing_twice_or_elsewhere() -> None:
    ours, theirs = books_of(FULL), books_of(FULL)
    segment, other = (books.hold(grown(books, 5), 5) for books in (ours, theirs))
    ours.release(segment)
    before = snapshot(ours)
    for wrong in (segment, other):
        with pytest.raises(BooksError, match="not held"):
            ours.release(wrong)
        with pytest.raises(BooksError, match=r"prefix\[0\]"):
            ours.open(1, [wrong])
    assert snapshot(ours) == before


@pytest.mark.parametrize(("stop", "start"), [(11, 0), (0, 0), (5, 5), (4, 6), (5, -1)])
def test_only_committed_tokens_can_be_held(stop: int, start: int) -> None:
    books = books_of(FULL)
    sequence = grown(books, 10)
    books.extend([sequence], 5)
    with pytest.raises(BooksError, match="the committed tokens"):
        books.hold(sequence, stop, start)


def test_a_window_must_still_be_there() -> None:
    books = books_of(FULL, LOCAL)
    sequence = grown(books, 12)  # a query at 12 sees tokens 8 .. 11
    before = snapshot(books)
    with pytest.raises(BooksError, match=r"tables\.local: .*before token 8 are released"):
        books.hold(sequence, 11)
    assert snapshot(books) == before
    segment = books.hold(sequence, 12)
    assert (segment.parts["local"].first, len(segment.parts["local"].pages)) == (4, 2)
    assert len(segment.parts["full"].pages) == 3
    (other,) = books.open(1, [segment])
    step = books.extend([other], 1)
    assert step.tables["local"].first_page.tolist() == [4]
    assert books.rows("local")[other.row, :4].tolist() == [0, 0, 0, 0]


def test_short_segments_of_a_window_lean_on_those_before() -> None:
    books = books_of(LOCAL)
    (sequence,) = books.open(1)
    chain = []
    for stop in range(2, 12, 2):
        books.commit(books.extend([sequence], 2))
        chain.append(books.hold(sequence, stop, stop - 2))
    books.close([sequence])
    (other,) = books.open(1, chain)
    pages = [segment.parts["local"].pages[0] for segment in chain]
    assert books.rows("local")[other.row, :5].tolist() == [0, 0, 0, *pages[3:]]
    for segment in chain:
        books.release(segment)
    audit(books)


# ---- states ------------------------------------------------------------------------------------


def test_states_are_fresh_once() -> None:
    books = books_of(FULL, STATE)
    sequences = books.open(2)
    steps = [books.extend(sequences, 1) for _ in range(2)]
    assert [step.states["state"].fresh.tolist() for step in steps] == [[True] * 2, [False] * 2]
    assert steps[1].states["state"].slots.tolist() == [1, 2]
    assert steps[0].states["state"].slots.dtype == np.int32


def test_forks_and_prefixes_copy_the_state() -> None:
    books = books_of(FULL, STATE)
    sequence = grown(books, 5)
    segment = books.hold(sequence, 5)
    assert books.copies()["state"].tolist() == [[1, 2]]
    (fork,) = books.fork(sequence, 1)
    (other,) = books.open(1, [segment])
    step = books.extend([sequence, fork, other], 1)
    assert step.states["state"].copies.tolist() == [[1, 3], [2, 4]]
    assert step.states["state"].slots.tolist() == [1, 3, 4]
    assert not step.states["state"].fresh.any()
    books.commit(step)
    assert not len(books.extend([sequence], 1).states["state"].copies)


def test_copies_of_copies_name_the_first_source() -> None:
    books = books_of(FULL, STATE)
    sequence = grown(books, 5)
    (child,) = books.fork(sequence, 1)
    (grandchild,) = books.fork(child, 1)
    books.close([child])
    step = books.extend([grandchild], 1)
    assert step.states["state"].copies.tolist() == [[1, 3]]


def test_a_fork_of_nothing_is_fresh() -> None:
    books = books_of(FULL, STATE)
    (sequence,) = books.open(1)
    step = books.extend(books.fork(sequence, 2), 1)
    assert step.states["state"].fresh.tolist() == [True, True]
    assert not len(step.states["state"].copies)


def test_a_state_is_held_where_it_is() -> None:
    books = books_of(FULL, STATE)
    sequence = grown(books, 8)
    with pytest.raises(BooksError, match=r"states\.state: got a state after 8 tokens, need 4"):
        books.hold(sequence, 4)
    step = books.extend([sequence], 1)
    for refused in (lambda: books.hold(sequence, 8), lambda: books.fork(sequence, 1)):
        with pytest.raises(BooksError, match=r"states\.state"):
            refused()
    books.commit(step)
    assert books.hold(sequence, 9).slots == {"state": 2}


def test_a_shortage_of_states_holds_nothing() -> None:
    books = books_of(FULL, StateShape("state", num_slots=2))
    sequence = grown(books, 8)
    before = snapshot(books)
    for refused in (lambda: books.hold(sequence, 8), lambda: books.fork(sequence, 1)):
        with pytest.raises(OutOfPages, match=r"states\.state: got 0 free of 1, need 1"):
            refused()
    assert snapshot(books) == before


# ---- encoder tokens ----------------------------------------------------------------------------


def test_encoder_tokens_are_written_by_the_first_step() -> None:
    books = books_of(FULL, CROSS)
    sequences = books.open(3, cross_tokens=[5, 0, 2])
    assert held(books, "cross") == 3
    first = books.extend(sequences[:2], 1).tables["cross"]
    assert (first.slots.tolist(), first.kv_lengths.tolist()) == ([4, 5, 6, 7, 8], [5, 0])
    assert first.updates.tolist() == [[1, 0, 1], [1, 1, 2], [3, 0, 3]]
    second = books.extend(sequences, 1).tables["cross"]
    assert (second.slots.tolist(), second.kv_lengths.tolist()) == ([12, 13], [5, 0, 2])


def test_encoder_tokens_are_shared_once_they_are_written() -> None:
    books = books_of(FULL, CROSS)
    (sequence,) = books.open(1, cross_tokens=[5])
    step = books.extend([sequence], 3)
    for refused in (lambda: books.fork(sequence, 1), lambda: books.hold(sequence, 3)):
        with pytest.raises(BooksError, match=r"tables\.cross: got encoder tokens not yet written"):
            refused()
    books.commit(step)
    segment = books.hold(sequence, 3)
    others = [*books.fork(sequence, 1), *books.open(1, [segment]), *books.open(1, [segment], [5])]
    part = books.extend(others, 1).tables["cross"]
    assert (part.slots.tolist(), part.kv_lengths.tolist()) == ([], [5, 5, 5])
    assert held(books, "cross") == 2
    audit(books)


@pytest.mark.parametrize("wrong", [[1], [1, 9], [-1, 0], [1, 2, 3]])
def test_encoder_tokens_that_do_not_fit(wrong: list[int]) -> None:
    books = books_of(FULL, CROSS)
    before = snapshot(books)
    with pytest.raises(BooksError, match="cross_tokens"):
        books.open(2, cross_tokens=wrong)
    assert snapshot(books) == before


def test_encoder_tokens_need_an_encoder_table() -> None:
    with pytest.raises(BooksError, match=r"need 0\.\.0 encoder tokens"):
        books_of(FULL).open(1, cross_tokens=[1])


def test_a_prefix_brings_the_encoder_tokens_it_depends_on() -> None:
    books = books_of(FULL, CROSS)
    sequences = books.open(2, cross_tokens=[5, 3])
    books.commit(books.extend(sequences, 4))
    first, second = (books.hold(sequence, 4) for sequence in sequences)
    books.commit(books.extend(sequences, 4))
    tail = books.hold(sequences[1], 8, start=4)
    with pytest.raises(BooksError, match="prefix's own 5"):
        books.open(1, [first], cross_tokens=[3])
    with pytest.raises(BooksError, match=r"prefix\[1\]: got 3 encoder tokens, need 5"):
        books.open(1, [first, tail])
    assert len(books.open(1, [second, tail])) == 1


def test_a_shortage_of_encoder_pages_opens_nothing() -> None:
    books = books_of(FULL, STATE, CROSS)
    before = snapshot(books)
    with pytest.raises(OutOfPages, match=r"tables\.cross: got 8 free of 8, need 10"):
        books.open(5, cross_tokens=[5] * 5)
    assert snapshot(books) == before


# ---- the derived view of a window table --------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [1, 2, 4, 3])
def test_window_slots_hold_the_tokens_of_full_slots(page_tokens: int) -> None:
    local = TableShape("local", LOCAL.lifetime, page_tokens, num_pages=64, row_pages=40)
    books = books_of(FULL, local)
    sequence = grown(books, 13)
    rows: Any = {name: books.rows(name)[sequence.row] for name in ("full", "local")}
    positions = np.arange(13)
    slots = rows["full"][positions // 4] * 4 + positions % 4
    mapped = window_slots(slots[::-1], FULL, rows["full"], local, rows["local"])[::-1]
    owned = local.lifetime.first_visible(13) // page_tokens * page_tokens
    assert (mapped[:owned] < page_tokens).all(), "the sink"
    pages = rows["local"][positions[owned:] // page_tokens]
    assert (
        mapped[owned:].tolist() == (pages * page_tokens + positions[owned:] % page_tokens).tolist()
    )


@pytest.mark.parametrize("slot", [0, 3, 60, 1000])
def test_window_slots_of_others_are_refused(slot: int) -> None:
    books = books_of(FULL, LOCAL)
    row = grown(books, 6).row
    rows = books.rows("full")[row], books.rows("local")[row]
    with pytest.raises(BooksError, match=r"tables\.full"):
        window_slots(np.array([slot]), FULL, rows[0], LOCAL, rows[1])
