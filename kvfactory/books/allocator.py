"""Numbered things with owners: the pages of a table, state slots, request rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvfactory.books.ids import Int64
from kvfactory.errors import BooksError, Problem


class Capacity(NamedTuple):
    """What a table has, in pages, slots or rows; free + held = total, the sink not counted."""

    free: int
    held: int
    total: int


class Allocator:
    """Ids 1 .. num_ids - 1, each free or held by a number of owners; id 0 is the sink.

    Free ids lie on a stack, so that taking and giving cost O(ids moved) however many are free,
    and equal histories hand out equal ids. A fresh allocator hands them out in ascending order.

    ``owners`` int64 [num_ids] counts owners, 0 where free; it is for reading only.
    """

    def __init__(self, num_ids: int, path: str) -> None:
        self.path = path
        self.owners: Int64
        self._num_ids = num_ids
        self._mark = np.zeros(num_ids, np.int64)
        self.reset()

    def reset(self) -> None:
        """Take everything back; the order of a fresh allocator returns."""
        self.owners = np.zeros(self._num_ids, np.int64)
        self._stack = np.arange(self._num_ids - 1, 0, -1)
        self.free = len(self._stack)

    @property
    def capacity(self) -> Capacity:
        """Free, held and total ids."""
        total = len(self._stack)
        return Capacity(self.free, total - self.free, total)

    def shortage(self, count: int, fix: str = "") -> Problem | None:
        """Why ``count`` ids cannot be taken, or None when they can."""
        if count <= self.free:
            return None
        return Problem(self.path, f"{self.free} free of {len(self._stack)}", f"{count}", fix)

    def take(self, count: int) -> Int64:
        """``count`` free ids with one owner each, int64 [count].

        The caller has asked ``shortage`` before: nothing is checked here.
        """
        low = self.free - count
        taken = self._stack[low : self.free][::-1].copy()
        self.free = low
        self.owners[taken] = 1
        return taken

    def share(self, ids: Int64, times: int = 1) -> None:
        """Add ``times`` owners to each of ``ids``.

        Raises:
            BooksError: an id that is free or none of ours; nothing is shared then.
        """
        self._check(ids)
        np.add.at(self.owners, ids, times)

    def give(self, ids: Int64) -> None:
        """Take one owner off ``ids``, in any order; an id may be given as often as it has owners.

        Raises:
            BooksError: a double free, or an id that is none of ours; nothing is given then.
        """
        if not ids.size:
            return
        self._check(ids)
        owners = self.owners
        np.subtract.at(owners, ids, 1)
        left = owners[ids]
        freed = ids[left == 0]
        if left.min() < 0:
            np.add.at(owners, ids, 1)
            raise BooksError(self._misuse(ids[left < 0]))
        if freed.size:
            self._push(freed)

    def _push(self, freed: Int64) -> None:
        order = np.arange(len(freed))
        self._mark[freed] = order
        once = freed[self._mark[freed] == order]
        stop = self.free + len(once)
        self._stack[self.free : stop] = once[::-1]
        self.free = stop

    def _check(self, ids: Int64) -> None:
        if ids.size and (ids.min() < 1 or ids.max() >= self._num_ids):
            raise BooksError(self._misuse(ids[(ids < 1) | (ids >= self._num_ids)]))
        if np.count_nonzero(self.owners[ids]) < ids.size:
            raise BooksError(self._misuse(ids[self.owners[ids] == 0]))

    def _misuse(self, ids: Int64) -> Problem:
        named = ", ".join(str(number) for number in np.unique(ids)[:8])
        need = f"ids in 1..{self._num_ids - 1}, given once by each owner"
        return Problem(self.path, f"free or foreign ids {named}", need)


def pages_of(slots: Int64, page_tokens: int) -> Int64:
    """The pages that ``slots`` lie in, each once, ascending: int64 [pages]."""
    return np.unique(slots // page_tokens)
