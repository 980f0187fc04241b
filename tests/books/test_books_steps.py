"""Steps in flight: their order, what is certain of them, speculation, counts on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from books_support import FULL, LOCAL, Landing, audit, books_of, held, snapshot

from kvfactory.books import Sequence, StateShape
from kvfactory.errors import BooksError, OutOfPages


def test_two_steps_are_open_and_commit_in_order() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    first, second = books.extend([sequence], 3), books.extend([sequence], 2)
    assert (second.prefix.tolist(), second.positions.tolist()) == ([3], [3, 4])
    assert (first.settled.tolist(), second.settled.tolist()) == ([True], [False])
    before = snapshot(books)
    with pytest.raises(BooksError, match="commit in order"):
        books.commit(second)
    assert snapshot(books) == before
    books.commit(first)
    assert books.committed([sequence]).tolist() == [3]
    books.commit(second)
    assert books.committed([sequence]).tolist() == [5]
    with pytest.raises(BooksError, match="got step 1, need an open step"):
        books.commit(second)


def test_one_step_too_many_is_refused() -> None:
    books = books_of(FULL, in_flight=2)
    (sequence,) = books.open(1)
    steps = [books.extend([sequence], 1) for _ in range(2)]
    before = snapshot(books)
    with pytest.raises(BooksError, match=r"steps_in_flight"):
        books.extend([sequence], 1)
    assert snapshot(books) == before
    books.commit(steps[0])
    assert books.extend([sequence], 1).serial == 2


def test_a_step_of_other_books_is_none_of_ours() -> None:
    ours, theirs = books_of(FULL), books_of(FULL)
    ours.extend(ours.open(1), 1)
    with pytest.raises(BooksError):
        ours.commit(theirs.extend(theirs.open(1), 1))


def test_rejected_pages_return_and_later_steps_stay_covered() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    first = books.extend([sequence], 9)
    second = books.extend([sequence], 6)
    assert (second.lengths.tolist(), held(books, "full")) == ([15], 4)
    books.commit(first, [1])  # the second step's tokens are 1 .. 6 now: two pages
    assert held(books, "full") == 2
    assert books.rows("full")[sequence.row, :3].tolist()[2] == 0
    books.commit(second, [6])
    assert books.committed([sequence]).tolist() == [7]
    third = books.extend([sequence], 1)
    assert (third.prefix.tolist(), third.settled.tolist()) == ([7], [True])
    audit(books)


def test_nothing_accepted_takes_a_step_back() -> None:
    books = books_of(FULL, LOCAL)
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 11), np.array([0]))
    assert (held(books, "full"), held(books, "local")) == (0, 0)


@pytest.mark.parametrize("wrong", [[3], [-1], [1, 1], [], np.array([4])])
def test_counts_that_a_step_cannot_have(wrong: Any) -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    step = books.extend([sequence], 2)
    before = snapshot(books)
    with pytest.raises(BooksError, match="accepted"):
        books.commit(step, wrong)
    assert snapshot(books) == before
    books.commit(step, [2])


# ---- draft trees -------------------------------------------------------------------------------


def tree_step(books: Any) -> tuple[Sequence, Any]:
    """Six committed tokens, then the tree 0 -> (1, 2), 2 -> (3, 4)."""
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 6))
    return sequence, books.extend([sequence], [5], parents=[-1, 0, 0, 2, 2])


def test_positions_in_a_tree_are_depths_and_slots_follow_the_nodes() -> None:
    _, step = tree_step(books_of(FULL))
    assert step.positions.tolist() == [6, 7, 7, 8, 8]
    assert step.tables["full"].slots.tolist() == [10, 11, 12, 13, 14]
    assert step.parents is not None
    assert step.parents.tolist() == [-1, 0, 0, 2, 2]


def test_the_accepted_path_moves_to_the_front() -> None:
    books = books_of(FULL)
    sequence, step = tree_step(books)
    done = books.commit(step, [[0, 2, 4]])
    assert done.moves["full"].tolist() == [[12, 11], [14, 12]]
    assert done.accepted is not None
    assert (done.accepted.tolist(), done.last_nodes.tolist()) == ([3], [4])
    assert books.committed([sequence]).tolist() == [9]


def test_several_trees_in_a_step() -> None:
    books = books_of(FULL)
    sequences = books.open(3)
    parents = [-1, -1, 0, -1, 0]
    step = books.extend(sequences, [3, 0, 2], parents)
    assert step.positions.tolist() == [0, 0, 1, 0, 1]
    done = books.commit(step, [[1], [], [0, 1]])
    assert done.last_nodes.tolist() == [1, -1, 1]
    assert done.moves["full"].tolist() == [[5, 4]]
    assert books.committed(sequences).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "wrong",
    [[[1]], [[0, 3]], [[0, 1, 2]], [[2]], [[0, 0]], [[5]], [[-1]], [[0], [1]], [5], [2, 0], None],
)
def test_nodes_that_are_no_path(wrong: Any) -> None:
    books = books_of(FULL)
    _, step = tree_step(books)
    before = snapshot(books)
    with pytest.raises(BooksError, match="accepted"):
        books.commit(step, wrong)
    assert snapshot(books) == before


def test_counts_of_a_tree_are_its_first_nodes_if_those_are_a_path() -> None:
    books = books_of(FULL)
    sequence, step = tree_step(books)
    assert not len(books.commit(step, [2]).moves["full"])
    assert books.committed([sequence]).tolist() == [8]


def test_a_chain_may_be_committed_as_a_path() -> None:
    books = books_of(FULL)
    sequences = books.open(2)
    step = books.extend(sequences, [3, 1])
    with pytest.raises(BooksError):
        books.commit(step, [[0, 2], [0]])
    assert not len(books.commit(step, [[0, 1], []]).moves["full"])
    assert books.committed(sequences).tolist() == [2, 0]


@pytest.mark.parametrize("wrong", [[0], [-2], [-1, -1], [], [1]])
def test_parents_that_are_no_tree(wrong: list[int]) -> None:
    books = books_of(FULL)
    sequences = books.open(1)
    before = snapshot(books)
    with pytest.raises(BooksError, match="parents"):
        books.extend(sequences, 1, parents=wrong)
    assert snapshot(books) == before


def test_a_path_moves_within_the_window_too() -> None:
    books = books_of(LOCAL)
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 12))
    step = books.extend([sequence], [4], parents=[-1, -1, 1, 0])
    slots = step.tables["local"].slots
    done = books.commit(step, [[1, 2]])
    assert done.moves["local"].tolist() == [[slots[1], slots[0]], [slots[2], slots[1]]]
    audit(books)


# ---- counts on the device ----------------------------------------------------------------------


def test_until_counts_land_pages_stay_for_every_outcome() -> None:
    books = books_of(FULL, LOCAL)
    (sequence,) = books.open(1)
    books.commit(books.extend([sequence], 8))
    step = books.extend([sequence], 8)
    landing = Landing([3])
    done = books.commit(step, landing)
    assert (done.accepted, done.last_nodes, done.moves) == (None, None, {})
    assert landing.polls == 0, "a commit does not ask at once"
    after = books.extend([sequence], 1)
    assert landing.polls == 1
    assert (after.prefix.tolist(), after.settled.tolist()) == ([16], [False])
    assert held(books, "full") == 5  # 17 tokens
    assert after.tables["local"].first_page.tolist() == [2]  # the window that ends at 8
    landing.there = True
    assert held(books, "full") == 3  # 8 + 3 + 1 tokens
    assert books.committed([sequence]).tolist() == [11]
    assert books.rows("local")[sequence.row, :4].tolist()[:3] == [0, 0, 0]
    books.commit(after)
    assert books.committed([sequence]).tolist() == [12]
    audit(books)


def test_steps_whose_counts_are_on_their_way_are_in_flight() -> None:
    books = books_of(FULL, in_flight=2)
    (sequence,) = books.open(1)
    landings = [Landing([1]), Landing([1])]
    for landing in landings:
        books.commit(books.extend([sequence], 2), landing)
    with pytest.raises(BooksError, match=r"2 steps whose outcome is open.*wait until the counts"):
        books.extend([sequence], 1)
    landings[0].there = True
    assert books.extend([sequence], 1).prefix.tolist() == [3]


def test_counts_take_effect_in_order() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    landings = [Landing([2]), Landing([1])]
    for landing in landings:
        books.commit(books.extend([sequence], 2), landing)
    landings[1].there = True
    assert books.committed([sequence]).tolist() == [0]
    landings[0].there = True
    assert books.committed([sequence]).tolist() == [3]


def test_a_decided_step_waits_for_the_counts_before_it() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    landing = Landing([1])
    books.commit(books.extend([sequence], 2), landing)
    books.commit(books.extend([sequence], 3), [2])
    assert books.committed([sequence]).tolist() == [0]
    landing.there = True
    assert books.committed([sequence]).tolist() == [3]


def test_paths_need_known_lengths() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    landing = Landing([1])
    books.commit(books.extend([sequence], 2), landing)
    step = books.extend([sequence], [2], parents=[-1, -1])
    before = snapshot(books._ledger)
    with pytest.raises(BooksError, match="counts of an earlier step are on the device"):
        books.commit(step, [[1]])
    assert snapshot(books._ledger) == before
    landing.there = True
    done = books.commit(step, [[1]])
    assert done.moves["full"].tolist() == [[6, 5]]


def test_impossible_counts_from_the_device_are_refused() -> None:
    books = books_of(FULL)
    (sequence,) = books.open(1)
    landing = Landing([5])
    books.commit(books.extend([sequence], 2), landing)
    landing.there = True
    with pytest.raises(BooksError, match=r"accepted\[0\]"):
        books.settle()


# ---- handles and closing -----------------------------------------------------------------------


def test_stale_foreign_and_repeated_handles() -> None:
    books = books_of(FULL)
    first, second = books.open(2)
    books.commit(books.extend([first, second], 1))
    books.close([first])
    (again,) = books.open(1)
    assert again.row == first.row
    assert again.generation > first.generation
    before = snapshot(books)
    for wrong in ([first], [first, second], [second, second], [Sequence(5, 0)], [Sequence(0, 1)],
                  [Sequence(-1, 1)], [Sequence(99, 1)]):  # fmt: skip
        with pytest.raises(BooksError, match="sequences"):
            books.extend(wrong, 1)
        with pytest.raises(BooksError, match="sequences"):
            books.close(wrong)
    assert snapshot(books) == before


def test_a_repeated_batch_goes_stale_as_well() -> None:
    books = books_of(FULL)
    sequences = books.open(2)
    for _ in range(2):
        books.commit(books.extend(sequences, [1, 1]))
    books.close(sequences[:1])
    books.open(1)
    with pytest.raises(BooksError, match=r"sequences\[0\]"):
        books.extend(sequences, [1, 1])


def test_a_batch_that_the_caller_changes_is_another_batch() -> None:
    books = books_of(FULL)
    sequences, counts = books.open(2), [1, 1]
    books.commit(books.extend(sequences, counts))
    counts[1] = 2
    books.commit(books.extend(sequences, counts))
    sequences.reverse()
    assert books.extend(sequences, np.array([0, 3])).lengths.tolist() == [3, 5]


@pytest.mark.parametrize("wrong", [[1], [1, -1], [1, 1, 1], -1])
def test_new_tokens_that_make_no_batch(wrong: Any) -> None:
    books = books_of(FULL)
    with pytest.raises(BooksError, match="new_tokens"):
        books.extend(books.open(2), wrong)


def test_fractions_are_no_tokens() -> None:
    books = books_of(FULL)
    with pytest.raises(BooksError, match=r"new_tokens: got .1.5., need a list of integers"):
        books.extend(books.open(1), [1.5])  # type: ignore[list-item]


def test_closing_waits_for_the_steps_that_still_write() -> None:
    books = books_of(FULL, max_requests=2)
    first, second = books.open(2)
    books.commit(books.extend([first, second], [4, 4]))
    running = [books.extend([first, second], 1), books.extend([second], 1)]
    books.close([first])
    assert held(books, "full") == 4
    with pytest.raises(OutOfPages, match="requests: got 0 free of 2, need 1"):
        books.open(1)
    books.commit(running[0])
    assert held(books, "full") == 2
    books.close([second])
    assert held(books, "full") == 2
    books.commit(running[1])
    assert held(books, "full") == 0
    assert len(books.open(2)) == 2
    audit(books)


def test_reset_returns_everything_but_generations() -> None:
    books = books_of(FULL, LOCAL)
    sequences = books.open(3)
    books.commit(books.extend(sequences, [9, 9, 9]))
    segment = books.hold(sequences[0], 9)
    step = books.extend(sequences, 1)
    books.close(sequences[2:])
    books.reset()
    assert all(capacity.held == 0 for capacity in books.capacity().values())
    for refused in (
        lambda: books.commit(step),
        lambda: books.release(segment),
        lambda: books.open(1, [segment]),
        lambda: books.close(sequences[:1]),
    ):
        with pytest.raises(BooksError):
            refused()
    again = books.open(3)
    assert [s.row for s in again] == [s.row for s in sequences]
    assert all(s.generation > t.generation for s, t in zip(again, sequences, strict=True))
    assert books.extend(again, 1).tables["full"].slots.tolist() == [4, 8, 12]
    assert not books.rows("local")[:, 1:].any()


def test_equal_histories_give_equal_records() -> None:
    def history() -> Any:
        books = books_of(FULL, LOCAL)
        sequences = books.open(3)
        records = [books.extend(sequences, [5, 9, 2])]
        books.commit(records[-1])
        books.close(sequences[1:2])
        sequences[1:2] = books.fork(sequences[0], 2)
        records.append(books.extend(sequences, 2))
        books.commit(records[-1], [1, 2, 0, 2])
        records.append(books.extend(sequences, 3))
        return snapshot(records)

    assert history() == history()


@pytest.mark.parametrize(
    ("nodes", "parents", "need"),
    [(0, [-1, 0, 0], "chains"), (3, [-1, 0, 0, 1], "at most 3 nodes"), (3, [-1, -1, 0, 1], "3")],
)
def test_trees_whose_states_are_not_all_kept_are_refused(
    nodes: int, parents: list[int], need: str
) -> None:
    """They could never be committed; chains always can, whatever their length."""
    books = books_of(FULL, StateShape("state", 8, tree_nodes=nodes))
    (sequence,) = books.open(1)
    before = snapshot(books)
    with pytest.raises(BooksError, match=need):
        books.extend([sequence], len(parents), parents)
    assert snapshot(books) == before
    step = books.extend([sequence], 4, [-1, 0, 1, 2])
    assert books.commit(step).accepted.tolist() == [4]
    attention = books_of(FULL)
    (sequence,) = attention.open(1)
    step = attention.extend([sequence], len(parents), parents)
    attention.commit(step, [[0]])
