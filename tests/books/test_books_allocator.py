"""Ids with owners: order, double frees, foreign ids, cost."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pytest
from books_support import snapshot
from hypothesis import given
from hypothesis import strategies as st

from kvfactory.books import Allocator, Capacity, pages_of
from kvfactory.errors import BooksError


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_hands_out_ascending_ids_without_the_sink() -> None:
    allocator = Allocator(6, "tables.full")
    assert allocator.take(3).tolist() == [1, 2, 3]
    assert allocator.take(2).tolist() == [4, 5]
    assert allocator.capacity == Capacity(free=0, held=5, total=5)


def test_takes_nothing_when_nothing_is_wanted() -> None:
    allocator = Allocator(3, "t")
    assert allocator.take(0).tolist() == []
    allocator.give(ids())
    assert allocator.capacity == Capacity(2, 0, 2)


def test_given_ids_come_back_in_the_order_they_had() -> None:
    allocator = Allocator(6, "t")
    allocator.take(5)
    allocator.give(ids(4, 2, 5))
    assert allocator.take(3).tolist() == [4, 2, 5]


def test_an_id_is_free_when_its_last_owner_gives_it() -> None:
    allocator = Allocator(4, "t")
    taken = allocator.take(2)
    allocator.share(taken, times=2)
    allocator.give(taken)
    assert allocator.capacity.held == 2
    allocator.give(np.concatenate((taken, taken)))
    assert allocator.capacity.held == 0
    assert sorted(allocator.take(3).tolist()) == [1, 2, 3]


def test_more_owners_than_ids_may_give_at_once() -> None:
    allocator = Allocator(3, "t")
    allocator.share(allocator.take(2), times=4)
    allocator.give(ids(*[1, 2] * 5))
    assert allocator.take(2).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [(0,), (-1,), (9,), (2, 2), (3,), (1, 3)])
def test_double_free_and_foreign_ids_change_nothing(wrong: tuple[int, ...]) -> None:
    allocator = Allocator(5, "tables.full")
    allocator.take(2)
    before = snapshot(allocator)
    with pytest.raises(BooksError, match=r"tables\.full: got free or foreign ids"):
        allocator.give(ids(*wrong))
    assert snapshot(allocator) == before


@pytest.mark.parametrize("wrong", [(0,), (-1,), (9,), (3,)])
def test_only_owned_ids_can_be_shared(wrong: tuple[int, ...]) -> None:
    allocator = Allocator(5, "t")
    allocator.take(2)
    before = snapshot(allocator)
    with pytest.raises(BooksError):
        allocator.share(ids(*wrong))
    assert snapshot(allocator) == before


def test_shortage_says_what_is_there_and_what_is_wanted() -> None:
    allocator = Allocator(4, "tables.local")
    allocator.take(1)
    assert str(allocator.shortage(3, "wait")) == "tables.local: got 2 free of 3, need 3; try wait"


def test_reset_restores_the_order_of_a_fresh_allocator() -> None:
    used, fresh = Allocator(9, "t"), Allocator(9, "t")
    used.give(used.take(6)[::2])
    used.reset()
    assert used.take(8).tolist() == fresh.take(8).tolist()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_equal_histories_hand_out_equal_ids(history: list[tuple[bool, int]]) -> None:
    pair = Allocator(20, "t"), Allocator(20, "t")
    held: list[int] = []
    for takes, number in history:
        if takes and number <= pair[0].free:
            first, second = (allocator.take(number).tolist() for allocator in pair)
            assert first == second
            held += first
        elif not takes:
            given_back, held = held[:number], held[number:]
            for allocator in pair:
                allocator.give(ids(*given_back))
        assert pair[0].capacity == Capacity(19 - len(held), len(held), 19)
    assert snapshot(pair[0]) == snapshot(pair[1])


def test_pages_of_slots_in_any_order() -> None:
    assert pages_of(ids(33, 17, 16, 35, 31), page_tokens=16).tolist() == [1, 2]


def test_cost_does_not_grow_with_the_number_of_free_ids() -> None:
    def cost(num_ids: int) -> float:
        allocator, times = Allocator(num_ids, "t"), []
        for _ in range(200):
            start = time.perf_counter()
            allocator.give(allocator.take(64))
            times.append(time.perf_counter() - start)
        return median(times)

    assert cost(2**20) < 3 * cost(2**10)
