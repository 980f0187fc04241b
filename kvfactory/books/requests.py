"""Request rows: who holds one, how long its sequence is, and handles that go stale."""

from __future__ import annotations

from collections import abc
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from kvfactory.books.allocator import Allocator
from kvfactory.books.batch import Batch, batch_of
from kvfactory.books.ids import Bool, Int64, Rows, Tokens, int64
from kvfactory.errors import BooksError, Problem

NewTokens: TypeAlias = int | abc.Sequence[int] | Int64
_NONE = np.zeros(0, np.int64)


class Sequence(NamedTuple):
    """A handle of an open sequence; it goes stale when the sequence is closed."""

    row: int
    generation: int


class Requests:
    """The rows of all sequences.

    ``committed`` int64 [rows]: tokens that are there in every outcome of the open steps.
    ``reserved`` int64 [rows]: tokens there would be if all open steps were accepted whole.
    ``exposed`` bool [rows]: the last page may have other owners, look before writing to it.

    A row's generation is odd while the row is open, and never goes back.
    """

    def __init__(self, max_requests: int) -> None:
        num_rows = max_requests + 1
        self.num_rows = num_rows
        self.rows = Allocator(num_rows, "requests")
        self.committed = np.zeros(num_rows, np.int64)
        self.reserved = np.zeros(num_rows, np.int64)
        self.exposed = np.zeros(num_rows, np.bool_)
        self._any_exposed = False
        self._longest = 0
        self._generation = np.zeros(num_rows, np.int64)
        self._last: tuple[list[Sequence], int | list[int], Batch] | None = None

    def admit(self, count: int, tokens: int) -> Rows:
        """Fresh rows of ``tokens`` committed tokens. The caller asked for room."""
        rows = self.rows.take(count)
        self._generation[rows] += 1
        self.committed[rows] = self.reserved[rows] = tokens
        self._longest = max(self._longest, tokens)
        if tokens:
            self.expose(rows)
        return rows

    def handles(self, rows: Rows) -> list[Sequence]:
        """The handles of open rows."""
        return [
            Sequence(row, generation)
            for row, generation in zip(rows.tolist(), self._generation[rows].tolist(), strict=True)
        ]

    def resolve(self, sequences: abc.Sequence[Sequence]) -> Rows:
        """The rows of open sequences, int64 [batch]; a handle may come back as a list, from JSON.

        Raises:
            BooksError: a stale or foreign handle, or one that is named twice.
        """
        named = _listed(sequences)
        pairs = int64(_numbers(named), "sequences").reshape(-1, 2)
        rows, generations = pairs[:, 0].copy(), pairs[:, 1]
        inside = (rows > 0) & (rows < self.num_rows)
        known = self._generation[np.where(inside, rows, 0)]
        stale = ~inside | (known != generations) | (generations % 2 == 0)
        if stale.any():
            raise BooksError(*(_stale(named, index) for index in stale.nonzero()[0].tolist()))
        if len(set(rows.tolist())) < len(rows):
            raise BooksError(Problem("sequences", "a sequence named twice", "each one once"))
        return rows

    def batch(self, sequences: abc.Sequence[Sequence], new_tokens: NewTokens, limit: int) -> Batch:
        """The batch of a step; the last one is kept, since decode steps repeat it.

        Raises:
            BooksError: as ``resolve`` and ``batch_of``.
        """
        if isinstance(new_tokens, np.integer):
            new_tokens = int(new_tokens)
        if not isinstance(new_tokens, int | list):
            new_tokens = int64(new_tokens, "new_tokens").tolist()
        named = _listed(sequences)
        if self._last and self._last[0] == named and self._last[1] == new_tokens:
            return self._last[2]
        counts = new_tokens if isinstance(new_tokens, int) else list(new_tokens)
        batch = batch_of(self.resolve(named), counts, limit)
        self._last = named, counts, batch
        return batch

    def expose(self, rows: Rows | int) -> None:
        """The last pages of ``rows`` have other owners now."""
        self.exposed[rows] = True
        self._any_exposed = True

    def tails(self, batch: Batch, settled: Bool) -> Int64:
        """The new tokens that may fall on a page with other owners: int64 [n], indices.

        Where an earlier step of the sequence is open, that step has the page to write to already;
        whoever came to own it since shares only committed tokens, which nobody writes again.
        """
        if not self._any_exposed:
            return _NONE
        exposed = self.exposed[batch.rows]
        if not exposed.any():
            self._any_exposed = bool(self.exposed.any())
            return _NONE
        writers = exposed & settled & (batch.counts > 0)
        return batch.q_indptr[:-1][writers].astype(np.int64)

    def may_pass(self, limit: int, batch: Batch) -> bool:
        """Whether a step may make a sequence longer than ``limit`` tokens; True is no proof.

        The length of the longest sequence is tracked from above, and looked up near the limit.
        """
        if self._longest + batch.most > limit:
            self._longest = int(self.reserved.max())
        return self._longest + batch.most > limit

    def reserve(self, batch: Batch, lengths: Tokens, tails: Int64) -> None:
        """Enter the lengths int64 [batch] after a step; the pages of ``tails`` are its own now."""
        self.reserved[batch.rows] = lengths
        self._longest += batch.most
        if tails.size:
            self.exposed[batch.of_tokens(batch.rows)[tails]] = False

    def retire(self, rows: Rows) -> None:
        """Make the handles of open rows stale; the rows themselves stay taken."""
        self._generation[rows] += 1
        self._last = None

    def retire_all(self) -> None:
        """Make all handles stale."""
        self.retire((self._generation % 2).nonzero()[0])

    def vacate(self, rows: Rows) -> None:
        """Return retired rows."""
        self.committed[rows] = self.reserved[rows] = 0
        self.exposed[rows] = False
        self.rows.give(rows)


def _listed(sequences: abc.Iterable[Sequence]) -> list[Sequence]:
    """The handles as a list of its own; they have an order, so that sets do not do."""
    if not isinstance(sequences, abc.Iterable) or isinstance(sequences, abc.Set | abc.Mapping):
        raise _no_handles(sequences)
    return list(sequences)


def _numbers(sequences: list[Sequence]) -> list[int]:
    """Row and generation of each handle, one after the other."""
    try:
        numbers = list(chain.from_iterable(sequences))
        if len(numbers) == 2 * len(sequences):
            return numbers
    except TypeError:
        pass
    raise _no_handles(sequences)


def _no_handles(sequences: object) -> BooksError:
    need = "a list of handles, as open() returns them"
    return BooksError(Problem("sequences", repr(sequences)[:80], need))


def _stale(sequences: abc.Sequence[Sequence], index: int) -> Problem:
    path = f"sequences[{index}]"
    return Problem(path, str(tuple(sequences[index])), "the handle of an open sequence")
