"""Small books, and the means to compare, to audit and to run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from kvfactory.books import Books, BooksShape, StateShape, TableShape
from kvfactory.kinds import Lifetime

FULL = TableShape("full", Lifetime("whole"), page_tokens=4, num_pages=25, row_pages=10)
LOCAL = TableShape("local", Lifetime("window", 5), page_tokens=2, num_pages=33, row_pages=20)
CHUNKED = TableShape("chunked", Lifetime("chunk", 6), page_tokens=4, num_pages=25, row_pages=10)
CROSS = TableShape("cross", Lifetime("encoder", 7), page_tokens=4, num_pages=9, row_pages=2)
STATE = StateShape("state", num_slots=8)


def books_of(*shapes: TableShape | StateShape, max_requests: int = 6, in_flight: int = 2) -> Books:
    tables = tuple(shape for shape in shapes if isinstance(shape, TableShape))
    states = tuple(shape for shape in shapes if isinstance(shape, StateShape))
    return Books(BooksShape(tables, states, max_requests, in_flight))


def snapshot(value: Any) -> Any:
    """All that an object remembers, as comparable plain values; caches left out."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return [snapshot(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple | list) or type(value).__name__ == "deque":
        return [snapshot(item) for item in value]
    if isinstance(value, set):
        return {id(item) for item in value}
    if type(value).__module__.startswith("kvfactory.books"):
        scratch = ("_last", "_mark", "_any_exposed", "_longest")
        return {key: snapshot(item) for key, item in vars(value).items() if key not in scratch}
    return value


def audit(books: Books) -> None:
    """Every id has exactly the owners that can be found, and free + held = total."""
    ledger = books._ledger
    for name, table in ledger.page_tables.items():
        owners = np.zeros(table.shape.num_pages, np.int64)
        np.add.at(owners, table.mirror.pages, 1)
        for segment in books._segments._held:
            np.add.at(owners, segment.parts[name].pages, 1)
        owners[0] = 0
        np.testing.assert_array_equal(table.pages.owners, owners)
    for name, state in ledger.states.items():
        places = np.array([segment.slots[name] for segment in books._segments._held], np.int64)
        saved = places[places >= state.shape.num_slots] - state.shape.num_slots
        slots = places[places < state.shape.num_slots]
        tracked = state.tracking.slots.ravel()
        for allocator, ids in (
            (state.slots, np.concatenate((state.slot, tracked, slots))),
            (state.checkpoints, saved),
        ):
            owners = np.bincount(ids, minlength=len(allocator.owners))
            owners[0] = 0
            np.testing.assert_array_equal(allocator.owners, owners)
    for allocator in ledger.allocators:
        free, held, total = allocator.capacity
        assert free + held == total
        assert held == np.count_nonzero(allocator.owners)
        stack = allocator._stack[total - free :]
        assert len(set(stack.tolist())) == free
        assert not allocator.owners[stack].any()


def held(books: Books, table: str) -> int:
    return books.capacity()[f"tables.{table}"].held


class Landing:
    """Counts on a device that land when told to."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.there, self.polls = counts, False, 0

    def poll(self) -> np.ndarray | None:
        self.polls += 1
        return np.array(self.counts) if self.there else None


def row_pages_of(books: Books, table: str) -> Iterator[tuple[int, int]]:
    """(row, owned pages) of each row that owns any."""
    rows = books.rows(table)
    for row in range(1, len(rows)):
        if count := int(np.count_nonzero(rows[row])):
            yield row, count
