"""Numbered things with owners: the pages of a table, state slots, request rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvfactory.books.ids import Bool, Int64
from kvfactory.errors import BooksError, Problem

_ONE = np.array(1)


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
        self._num_ids = num_ids
        self._mark = np.zeros(num_ids, np.int64)
        self.reset()

    def reset(self) -> None:
        """Take everything back; the order of a fresh allocator returns."""
        self.owners: Int64 = np.zeros(self._num_ids, np.int64)
        self._top = 0
        self._stack = np.arange(1, self._num_ids)

    @property
    def free(self) -> int:
        """How many ids can be taken."""
        return self._stack.size - self._top

    @property
    def capacity(self) -> Capacity:
        """Free, held and total ids."""
        return Capacity(self.free, self._top, self._stack.size)

    def shortage(self, count: int, fix: str = "") -> Problem:
        """That ``count`` ids are more than there are."""
        return Problem(self.path, f"{self.free} free of {self._stack.size}", f"{count}", fix)

    def take(self, count: int) -> Int64:
        """``count`` free ids with one owner each, int64 [count].

        The caller has compared with ``free``: nothing is checked here.
        """
        taken = self._stack[self._top : self._top + count].copy()
        self._top += count
        self.owners[taken] = 1
        return taken

    def share(self, ids: Int64, times: int = 1) -> None:
        """Add ``times`` owners to each of ``ids``.

        Raises:
            BooksError: an id that is free or none of ours; nothing is shared then.
        """
        if np.count_nonzero(self._owners_of(ids)) < ids.size:
            raise BooksError(self._misuse(ids[self.owners[ids] == 0]))
        np.add.at(self.owners, ids, times)

    def give(self, ids: Int64) -> None:
        """Take one owner off ``ids``, in any order; an id may be given as often as it has owners.

        Raises:
            BooksError: a double free, or an id that is none of ours; nothing is given then.
        """
        single = self._owners_of(ids) == _ONE
        if np.count_nonzero(single & self._is_last(ids)) == ids.size:
            self.owners[ids] = 0
            self._push(ids)
            return
        np.subtract.at(self.owners, ids, 1)
        left = self.owners[ids]
        if np.count_nonzero(left < 0):
            np.add.at(self.owners, ids, 1)
            raise BooksError(self._misuse(ids[left < 0]))
        freed = ids[left == 0]
        self._push(freed[self._is_last(freed)])

    def give_each(self, ids: Int64) -> None:
        """``give`` for ids that were read from as many owners: two of them are equal only where
        an id has two owners, so that ids of one owner need no search for repetitions.
        """
        if np.count_nonzero(self.owners[ids] == _ONE) == ids.size:
            self.owners[ids] = 0
            self._push(ids)
        else:
            self.give(ids)

    def _push(self, freed: Int64) -> None:
        top, self._top = self._top, self._top - freed.size
        self._stack[self._top : top] = freed

    def _is_last(self, ids: Int64) -> Bool:
        """Of each id, the last mention in ``ids``: bool [n]. It takes no sorting."""
        order = np.arange(ids.size)
        self._mark[ids] = order
        last: Bool = self._mark[ids] == order
        return last

    def _owners_of(self, ids: Int64) -> Int64:
        if np.count_nonzero(ids < _ONE):
            raise BooksError(self._misuse(ids[ids < 1]))
        try:
            return self.owners[ids]
        except IndexError:
            raise BooksError(self._misuse(ids[ids >= self._num_ids])) from None

    def _misuse(self, ids: Int64) -> Problem:
        named = ", ".join(str(number) for number in np.unique(ids)[:8])
        need = f"ids in 1..{self._num_ids - 1}, given once by each owner"
        return Problem(self.path, f"free or foreign ids {named}", need)
