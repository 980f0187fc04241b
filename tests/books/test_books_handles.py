"""Handles and accepted counts in other forms than the books return them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from books_support import FULL, books_of

from kvfactory.errors import BooksError


def test_handles_come_back_as_lists() -> None:
    """As JSON returns them."""
    books = books_of(FULL)
    first, second = books.open(2)
    pairs: Any = [list(first), list(second)]
    books.commit(books.extend(pairs, 1))
    (child,) = books.fork(pairs[0], 1)
    with pytest.raises(BooksError, match="named twice"):
        books.close([first, pairs[0]])
    books.close([*pairs, child])
    with pytest.raises(BooksError, match="the handle of an open sequence"):
        books.close(pairs)


@pytest.mark.parametrize("wrong", [None, 5, "set", "dict", [None], [(1,)]])
def test_what_are_no_handles(wrong: Any) -> None:
    books = books_of(FULL)
    opened = books.open(2)
    given = {"set": set(opened), "dict": dict.fromkeys(opened)}.get(str(wrong), wrong)
    for operation in (lambda: books.extend(given, 1), lambda: books.close(given)):
        with pytest.raises(BooksError, match="a list of handles"):
            operation()


@pytest.mark.parametrize(
    "accepted", [5, [1.5, 1], [None, None], [True, True], np.array(1), np.ones(2), [[0], 1]]
)
def test_what_are_no_accepted_counts(accepted: Any) -> None:
    books = books_of(FULL)
    step = books.extend(books.open(2), 1)
    with pytest.raises(BooksError, match="accepted: "):
        books.commit(step, accepted)
    assert books.commit(step, [np.array(1), np.array(0)]).accepted.tolist() == [1, 0]
