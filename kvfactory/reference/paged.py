"""Reading what a request has stored, through its page table.

An *entry* covers ``tokens_per_entry`` tokens: entry e those from e * r to (e + 1) * r - 1, and it
exists once the last of them does. Its slot is page * page_slots + offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvfactory.errors import BooksError, Problem

if TYPE_CHECKING:
    from kvfactory.planning.cacheplan import GroupPlan
    from kvfactory.steps.step import Step, TableArrays

SINK = 0
"""Row and page that padded batch entries read and write."""


class Reader(Protocol):
    """What the oracle needs of a pool."""

    def read(self, layer_index: int, slots: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Decoded tensors by name, [n, *axes] in ``dtype``, at ``slots`` int64 [n]."""
        ...


@dataclass(frozen=True)
class Request:
    """One batch entry of a step, as numbers on the host.

    Its new tokens are ``start:stop`` of the step's; ``prefix`` tokens came before them and
    ``kv_tokens`` are readable. Columns before ``first_page`` are released. Its part of a custom
    mask begins at ``mask_start``.
    """

    row: int
    start: int
    stop: int
    prefix: int
    kv_tokens: int
    first_page: int
    mask_start: int


def live_requests(step: Step, table: TableArrays) -> Iterator[Request]:
    """Batch entries with new tokens and something to read; padding on the sink is left out."""
    indptr = step.q_indptr.tolist()
    columns = (step.rows, step.prefix, table.kv_lengths, table.first_page)
    mask_start = 0
    for number, (row, prefix, kv_tokens, first_page) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        start, stop = indptr[number], indptr[number + 1]
        if row != SINK and stop > start and kv_tokens > 0:
            yield Request(row, start, stop, prefix, kv_tokens, first_page, mask_start)
        mask_start += (stop - start) * kv_tokens


def entry_slots(table: TableArrays, request: Request, group: GroupPlan, first: int) -> Tensor:
    """Slots of a request's entries from ``first`` on, int64 [entries].

    Raises:
        BooksError: an entry that a query can see lies in a page that was released.
    """
    stop = request.kv_tokens // group.tokens_per_entry
    entries = torch.arange(first, stop, device=table.pages.device)
    pages = table.pages[request.row].long()[entries // group.page_slots]
    if entries.numel() and (first < request.first_page * group.page_slots or not pages.all()):
        got = f"row {request.row} with released pages from entry {first} to {stop}"
        raise BooksError(Problem(f"table {group.table}", got, "pages of all visible entries"))
    return pages * group.page_slots + entries % group.page_slots
