"""A step as kernels see it: plain device arrays per table, at fixed addresses.

The arrays are views of the arena's step fields (``CachePlan.fields``), made by ``StepBuffers``.
Batch entries follow ``rows``; new tokens of entry b are ``q_indptr[b]:q_indptr[b + 1]``. Lengths
here are exact once earlier steps are committed, also where the host does not know them yet:
``host`` has upper bounds then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from kvfactory.books import StepRecord


@dataclass(frozen=True)
class PageArrays:
    """The page lists of a step, int32, from ``first_page`` on.

    ``indptr`` [batch + 1] and ``last_page`` [batch] as in FlashInfer, ``indices`` the pages and
    room for more.
    """

    indptr: Tensor
    last_page: Tensor
    indices: Tensor


@dataclass(frozen=True)
class GraphShape:
    """The fixed shape of a graph's step: ``batch`` requests with ``rows`` new tokens in all.

    ``each`` are those of every request, or 0 where they spread over the requests as they come.
    """

    batch: int
    rows: int
    each: int


@dataclass(frozen=True)
class TableArrays:
    """One page table's part of a step.

    ``pages`` int32 [max_requests + 1, row_pages] is the device table, shared by all steps: the
    page of position t of a request is ``pages[row, t // page_tokens]``, the sink 0 where it was
    released. ``slots`` int64 [tokens] are write slots (page * page_tokens + offset), ``kv_lengths``
    int32 [batch] the tokens readable after this step's writes, ``first_page`` int32 [batch] the
    first column that a query of the step can see.
    """

    pages: Tensor
    slots: Tensor
    kv_lengths: Tensor
    first_page: Tensor
    lists: PageArrays


@dataclass(frozen=True)
class StateArrays:
    """One set of state slots' part of a step: ``slots`` int32 [batch], ``fresh`` int32 [batch]."""

    slots: Tensor
    fresh: Tensor


class StepArrays(NamedTuple):
    """The arrays of a step: see ``Step``."""

    rows: Tensor
    q_indptr: Tensor
    prefix: Tensor
    positions: Tensor
    tables: Mapping[str, TableArrays]
    states: Mapping[str, StateArrays]


@dataclass(frozen=True, eq=False)
class Step:
    """An open step.

    ``buffer`` numbers the places that steps live in: no two open steps or graphs have the same.
    The arrays of a step that no graph owns are sent and made when one is first read, in the stream
    that is current then: a step that only fills a graph has none of its own.
    """

    host: StepRecord
    make: Callable[[], StepArrays]
    buffer: int = 0
    graph: GraphShape | None = None

    def __repr__(self) -> str:
        host, tokens = self.host, int(self.host.q_indptr[-1])
        return f"Step({host.serial}: {len(host.rows)} sequences, {tokens} new tokens)"

    @cached_property
    def arrays(self) -> StepArrays:
        """All arrays."""
        return self.make()

    @property
    def rows(self) -> Tensor:
        """Rows of the device tables, int32 [batch]."""
        return self.arrays.rows

    @property
    def q_indptr(self) -> Tensor:
        """Where the new tokens of each entry begin, int32 [batch + 1]."""
        return self.arrays.q_indptr

    @property
    def prefix(self) -> Tensor:
        """Tokens before this step, int32 [batch]."""
        return self.arrays.prefix

    @property
    def positions(self) -> Tensor:
        """Of each new token, int64 [tokens]."""
        return self.arrays.positions

    @property
    def tables(self) -> Mapping[str, TableArrays]:
        """By table name."""
        return self.arrays.tables

    @property
    def states(self) -> Mapping[str, StateArrays]:
        """By the name of a set of state slots."""
        return self.arrays.states
