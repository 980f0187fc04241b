"""Small books, and the means to compare, to audit and to run them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from kvfactory.books import Books, BooksShape, StateShape, TableShape
from kvfactory.books.allocator import Allocator
from kvfactory.errors import BooksError, OutOfPages
from kvfactory.kinds import Lifetime

FULL = TableShape("full", Lifetime("whole"), page_tokens=4, num_pages=25, row_pages=10)
LOCAL = TableShape("local", Lifetime("window", 5), page_tokens=2, num_pages=33, row_pages=20)
CHUNKED = TableShape("chunked", Lifetime("chunk", 6), page_tokens=4, num_pages=25, row_pages=10)
CROSS = TableShape("cross", Lifetime("encoder", 7), page_tokens=4, num_pages=9, row_pages=2)
TREE_NODES = 8
STATE = StateShape("state", num_slots=8, tree_nodes=TREE_NODES)


MODES = {"one": (1, False), "two": (2, False), "lazy": (2, True)}


def tracked_states(mode: str, num_slots: int = 20, checkpoints: int = 4) -> StateShape:
    tracking, lazy = MODES[mode]
    return StateShape("state", num_slots, tracking, lazy, checkpoints, TREE_NODES)


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


def twin(books: Books) -> Books:
    """Books in the same state that know the same segments and steps."""
    known = [*books._segments._held, *(flight.record for flight in books._flights._queue)]
    return copy.deepcopy(books, {id(item): item for item in known})


def starve(allocator: Allocator, left: int) -> None:
    """Let an allocator have at most ``left`` free ids, as if others held the rest."""
    allocator._top = max(allocator._top, allocator._stack.size - left)


def inject_shortages(books: Books, operation: Callable[[Books], Any]) -> None:
    """Make every table too short for ``operation``, each on a copy; the books are left alone.

    With no free id, and with one less than it takes, it is refused, names the table and changes
    nothing; with as many as it says that it takes, the table is not short.
    """
    for allocator in books._ledger.allocators:
        need = refusal(books, operation, allocator.path, 0)
        if need > 1:
            assert refusal(books, operation, allocator.path, need - 1) == need
        if 0 < need <= allocator.free:
            assert not refusal(books, operation, allocator.path, need)


def refusal(books: Books, operation: Callable[[Books], Any], path: str, left: int) -> int:
    """What ``operation`` says that it takes of the table at ``path``, which has ``left`` ids; 0
    where it is not refused for that, or refused whatever there is.
    """
    trial = twin(books)
    (short,) = (a for a in trial._ledger.allocators if a.path == path)
    starve(short, left)
    before = snapshot(trial)
    try:
        operation(trial)
    except OutOfPages as error:
        needs = {problem.path: int(problem.need) for problem in error.problems}
    except BooksError:
        needs = {}
    else:
        return 0
    assert snapshot(trial) == before
    return needs.get(path, 0)


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
