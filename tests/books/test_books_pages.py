"""Pages of full, window and chunk tables: growing, write slots, release, shortage, device rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from books_support import CHUNKED, FULL, LOCAL, audit, books_of, held, snapshot
from hypothesis import given
from hypothesis import strategies as st

from kvfactory.books import BooksShape, TableShape
from kvfactory.books.sight import Sight
from kvfactory.errors import BooksError, OutOfPages
from kvfactory.kinds import Lifetime


def paged(page_tokens: int, lifetime: Lifetime = FULL.lifetime, pages: int = 100) -> TableShape:
    return TableShape("t", lifetime, page_tokens, pages, row_pages=-(-400 // page_tokens))


def test_extend_finishes_the_page_then_takes_whole_pages_then_a_partial_one() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    assert books.extend([sequence], [2]).tables["full"].slots.tolist() == [4, 5]
    books.settle()
    step = books.extend([sequence], [7])
    assert step.tables["full"].slots.tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert held(books, "full") == 3


def test_a_decode_takes_a_page_at_the_boundary_only() -> None:
    books = books_of(FULL, in_flight=1)
    (sequence,) = books.open(1)
    sizes = []
    for _ in range(9):
        books.commit(books.extend([sequence], 1))
        sizes.append(held(books, "full"))
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_pages_of_one_token() -> None:
    books = books_of(paged(1))
    first, second = books.open(2)
    step = books.extend([first, second], [2, 1])
    assert step.tables["t"].slots.tolist() == [1, 2, 3]


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128, 256, 3])
def test_slots_are_page_times_page_tokens_plus_offset(page_tokens: int) -> None:
    books = books_of(paged(page_tokens, pages=800))
    sequences = books.open(2)
    books.commit(books.extend(sequences, [5, 300]))
    step = books.extend(sequences, [70, 2])
    rows = books.rows("t")
    for b, (start, stop) in enumerate([(5, 75), (300, 302)]):
        positions = np.arange(start, stop)
        span = slice(step.q_indptr[b], step.q_indptr[b + 1])
        assert step.positions[span].tolist() == positions.tolist()
        pages = rows[sequences[b].row, positions // page_tokens]
        expected = pages * page_tokens + positions % page_tokens
        assert step.tables["t"].slots[span].tolist() == expected.tolist()


def test_a_step_record_has_the_promised_types_and_shapes() -> None:
    books = books_of(FULL, LOCAL)
    step = books.extend(books.open(2), [3, 0])
    assert (step.rows.dtype, step.rows.tolist()) == (np.int32, [1, 2])
    assert (step.q_indptr.dtype, step.q_indptr.tolist()) == (np.int32, [0, 3, 3])
    for array in (step.prefix, step.lengths, step.positions):
        assert array.dtype == np.int64
    assert step.settled.dtype == np.bool_
    assert (step.prefix.tolist(), step.lengths.tolist()) == ([0, 0], [3, 0])
    for table in step.tables.values():
        assert (table.slots.dtype, table.slots.shape) == (np.int64, (3,))
        assert (table.kv_lengths.dtype, table.kv_lengths.tolist()) == (np.int64, [3, 0])
        assert (table.copies.dtype, table.copies.shape) == (np.int64, (0, 2))
        assert (table.updates.dtype, table.updates.shape[1]) == (np.int32, 3)
        assert (table.first_page.dtype, table.first_page.shape) == (np.int32, (2,))


def test_a_caller_may_scribble_on_a_record() -> None:
    books = books_of(FULL)
    sequences = books.open(2)
    first = books.extend(sequences, 1)
    for array in (first.rows, first.q_indptr, first.prefix, first.positions):
        array[:] = 77
    books.commit(first).accepted[:] = 77
    second = books.extend(sequences, 1)
    assert (second.rows.tolist(), second.q_indptr.tolist()) == ([1, 2], [0, 1, 2])
    assert second.prefix.tolist() == [1, 1]


@pytest.mark.parametrize("count", [0, 2])
def test_empty_steps_are_legal(count: int) -> None:
    books = books_of(FULL, LOCAL)
    step = books.extend(books.open(count), [0] * count)
    assert len(step.rows) == count
    assert step.tables["full"].slots.tolist() == []
    done = books.commit(step)
    assert done.accepted is not None
    assert done.accepted.tolist() == [0] * count


def test_device_entries_change_when_pages_come_and_go() -> None:
    books = books_of(LOCAL, in_flight=1)
    (sequence,) = books.open(1)
    step = books.extend([sequence], [5])
    assert step.tables["local"].updates.tolist() == [[1, 0, 1], [1, 1, 2], [1, 2, 3]]
    books.commit(step)
    step = books.extend([sequence], [5])
    assert sorted(step.tables["local"].updates.tolist()) == [[1, 3, 4], [1, 4, 5]]
    books.commit(step)
    step = books.extend([sequence], [1])
    assert sorted(step.tables["local"].updates.tolist()) == [
        [1, 0, 0], [1, 1, 0], [1, 2, 0], [1, 5, 1],
    ]  # fmt: skip
    assert step.tables["local"].first_page.tolist() == [3]
    books.commit(step)
    books.close([sequence])
    step = books.extend(books.open(1), [0])
    assert sorted(step.tables["local"].updates.tolist()) == [[1, 3, 0], [1, 4, 0], [1, 5, 0]]
    assert not books.rows("local").any()


def test_an_entry_that_changed_twice_is_named_once_as_it_is_now() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    step = books.extend([sequence], 9)
    books.commit(step, [1])
    updates = books.extend([sequence], 7).tables["full"].updates
    assert sorted(updates.tolist()) == [[1, 1, 2], [1, 2, 0]]


def test_updates_do_not_pile_up_without_steps() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], [33]))
    for _ in range(2000):
        books.close(books.fork(sequence, 1))
    updates = books.extend([sequence], [1]).tables["full"].updates
    assert len(updates) < 1000


def test_a_row_cannot_grow_past_its_end() -> None:
    books = books_of(FULL, LOCAL)
    sequences = books.open(2)
    before = snapshot(books)
    with pytest.raises(BooksError, match=r"new_tokens\[1\]: got a sequence of 41 tokens") as error:
        books.extend(sequences, [1, 41])
    assert error.value.problems[0].fix == "workload.tokens=41"
    assert snapshot(books) == before


# ---- shortage ----------------------------------------------------------------------------------


def test_a_shortage_names_every_short_table_and_changes_nothing() -> None:
    tight = TableShape("tight", Lifetime("whole"), page_tokens=2, num_pages=5, row_pages=20)
    books = books_of(FULL, LOCAL, tight, max_requests=4)
    sequences = books.open(4)
    books.commit(books.extend(sequences, [2, 2, 1, 1]))
    before = snapshot(books)
    with pytest.raises(OutOfPages) as error:
        books.extend(sequences, [30, 30, 30, 30])
    assert [str(problem).split(";")[0] for problem in error.value.problems] == [
        "tables.full: got 20 free of 24, need 28",
        "tables.local: got 28 free of 32, need 60",
        "tables.tight: got 0 free of 4, need 60",
    ]
    assert snapshot(books) == before
    assert books.extend(sequences, [0, 0, 1, 1]).lengths.tolist() == [2, 2, 2, 2]


def test_free_and_held_make_the_total_in_every_table() -> None:
    books = books_of(FULL, LOCAL)
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], [9]))
    assert {path: tuple(capacity) for path, capacity in books.capacity().items()} == {
        "requests": (5, 1, 6),
        "tables.full": (21, 3, 24),
        "tables.local": (29, 3, 32),
    }
    audit(books)


def test_books_without_any_table_keep_lengths() -> None:
    books = books_of()
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], [1000]))
    assert books.committed([sequence]).tolist() == [1000]


# ---- windows and chunks ------------------------------------------------------------------------


def test_pages_outside_every_future_window_return_at_commit() -> None:
    books = books_of(LOCAL, in_flight=1)
    (sequence,) = books.open(1)
    step = books.extend([sequence], [30])
    assert held(books, "local") == 15
    books.commit(step)
    assert held(books, "local") == 2  # tokens 26 .. 29 of the window that ends at 30
    books.commit(books.extend([sequence], [1]))
    assert held(books, "local") == 3
    audit(books)


def test_a_window_of_one_token_keeps_nothing() -> None:
    books = books_of(paged(2, Lifetime("window", 1)))
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], [4]))
    assert held(books, "t") == 0
    books.commit(books.extend([sequence], [1]))
    assert held(books, "t") == 1  # the page of token 4, which token 5 will share


def test_chunks_return_when_they_end() -> None:
    books = books_of(CHUNKED, in_flight=1)
    (sequence,) = books.open(1)
    sizes = []
    for _ in range(13):
        books.commit(books.extend([sequence], 1))
        sizes.append(held(books, "chunked"))
    assert sizes == [1, 1, 1, 1, 2, 1, 1, 1, 2, 2, 2, 0, 1]


@given(
    name=st.sampled_from(["window", "chunk"]),
    reach=st.integers(1, 40),
    page_tokens=st.integers(1, 9),
)
def test_sight_is_that_of_the_kinds_table(name: Any, reach: int, page_tokens: int) -> None:
    lifetime, committed = Lifetime(name, reach), np.arange(200)
    sight = Sight(lifetime, page_tokens)
    first = [lifetime.first_visible(tokens) // page_tokens for tokens in committed.tolist()]
    for column, end in enumerate(sight.ends_of(np.arange(first[-1])).tolist()):
        assert first[end - 1] <= column < first[end]
    seen = sight.first_columns(committed)
    assert np.maximum(seen, 0).tolist() == first


@given(
    name=st.sampled_from(["whole", "window", "chunk"]),
    reach=st.integers(1, 40),
    page_tokens=st.sampled_from([1, 2, 3, 4, 16]),
    steps=st.lists(st.integers(0, 40), max_size=8),
    in_flight=st.integers(1, 3),
)
def test_a_request_never_owns_more_than_the_plan_grants(
    name: str, reach: int, page_tokens: int, steps: list[int], in_flight: int
) -> None:
    lifetime = Lifetime(name, reach)  # type: ignore[arg-type]
    shape = paged(page_tokens, lifetime, pages=1000)
    books = books_of(shape, in_flight=in_flight)
    (sequence,) = books.open(1)
    running: list = []
    for tokens in steps:
        if len(running) == in_flight:
            books.commit(running.pop(0))
        running.append(books.extend([sequence], [tokens]))
        length = int(running[-1].lengths[0])
        most = sum(int(step.lengths[0] - step.prefix[0]) for step in running)
        assert held(books, "t") <= lifetime.peak_pages(length, most, page_tokens)
    for step in running:
        books.commit(step)
    audit(books)


def test_shapes_are_values() -> None:
    assert BooksShape((FULL,), (), 4, 2) == BooksShape((FULL,), (), 4, 2)
    assert FULL.row_tokens == 40


def test_the_end_of_a_row_is_found_however_long_others_were() -> None:
    books = books_of(FULL)
    long, short = books.open(2)
    books.commit(books.extend([long, short], [40, 1]))
    for _ in range(3):
        books.commit(books.extend([long, short], [0, 13]))
    for refused in ([long], [short]):
        with pytest.raises(BooksError, match="a sequence of 41 tokens"):
            books.extend(refused, 1)
    books.close([long, short])
    assert books.extend(books.open(1), 40).lengths.tolist() == [40]
