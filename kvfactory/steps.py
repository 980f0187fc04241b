"""A step as kernels see it: plain device arrays per table, at fixed addresses.

The arrays are views of the arena's step fields (``CachePlan.fields``); ``host`` are the same
numbers in numpy. Batch entries follow ``rows``; new tokens of entry b are
``q_indptr[b]:q_indptr[b + 1]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvfactory.books import StepRecord


@dataclass(frozen=True)
class TableArrays:
    """One page table's part of a step.

    ``pages`` int32 [max_requests + 1, row_pages] is the device table, shared by all steps: the
    page of position t of a request is ``pages[row, t // page_tokens]``, the sink 0 where it was
    released. ``slots`` int64 [tokens] are write slots (page * page_tokens + offset), ``kv_lengths``
    int32 [batch] the tokens readable after this step's writes, ``first_page`` int32 [batch] the
    first column that is still owned.
    """

    pages: Tensor
    slots: Tensor
    kv_lengths: Tensor
    first_page: Tensor


@dataclass(frozen=True)
class StateArrays:
    """One set of state slots' part of a step: ``slots`` int32 [batch], ``fresh`` bool [batch]."""

    slots: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class Step:
    """An open step.

    ``rows`` int32 [batch], ``q_indptr`` int32 [batch + 1], ``prefix`` int32 [batch] the tokens
    before this step, ``positions`` int64 [tokens]. ``tables`` and ``states`` by table name.
    """

    host: StepRecord
    rows: Tensor
    q_indptr: Tensor
    prefix: Tensor
    positions: Tensor
    tables: Mapping[str, TableArrays]
    states: Mapping[str, StateArrays]
