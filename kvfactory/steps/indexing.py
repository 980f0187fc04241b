"""The index of a step: what attention reads, made on the device from what the host has sent.

Given are ``rows``, ``q_indptr``, ``prefix``, the lengths of encoder tables and the device tables.
Made are ``positions``, ``slots``, ``kv_lengths``, ``first_page`` (the first column that a query of
the step can see), and the page lists ``indptr``, ``indices`` and ``last_page``. This is the
specification in torch; on a GPU ``kernels.index`` does the same in one launch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvfactory.kinds import Lifetime
from kvfactory.planning.cacheplan import CachePlan, TablePlan
from kvfactory.steps.fields import FieldViews, StepSize, field_views, table_views


class Indexer(Protocol):
    """Makes the index of the step in set ``number`` of the arena's fields."""

    def update(self, updates: Tensor, count: int) -> None:
        """Write the first ``count`` of ``updates`` int32 [n, 4] to the device tables.

        They are (table, row, column, page); no entry is named twice.
        """
        ...

    def build(self, number: int, size: StepSize) -> None:
        """Fill the fields that the device makes."""
        ...


class TorchIndexer:
    """The index in plain torch, on any device."""

    def __init__(self, plan: CachePlan, arena: Tensor) -> None:
        self._plan, self._sets = plan, field_views(plan, arena)
        self._tables = table_views(plan, arena)

    def update(self, updates: Tensor, count: int) -> None:
        """See ``Indexer``."""
        owner, rows, columns, pages = updates[:count].unbind(1)
        for number, table in enumerate(self._tables.values()):
            own = owner == number
            table.index_put_((rows[own], columns[own]), pages[own])

    def build(self, number: int, size: StepSize) -> None:
        """See ``Indexer``."""
        fields, batch = self._sets[number], size.batch
        write_positions(fields, size)
        entry, stored = stored_tokens(fields, size)
        prefix = fields["", "prefix"][:batch].long()
        lengths = prefix + fields["", "q_indptr"][: batch + 1].long().diff()
        for table in self._plan.tables:
            if table.lifetime.name != "encoder":
                fields[table.name, "kv_lengths"][:batch] = lengths
                slots = self._slots(fields, table, entry, stored)
                fields[table.name, "slots"][: size.tokens] = slots
            seen = first_visible(table.lifetime, prefix) // table.page_tokens
            fields[table.name, "first_page"][:batch] = seen
            self._list(fields, table, batch)

    def _slots(self, fields: FieldViews, table: TablePlan, entry: Tensor, stored: Tensor) -> Tensor:
        """The slots of tokens ``stored`` int64 [tokens] of batch entries ``entry``; 0 for -1."""
        columns, pages = stored // table.page_tokens, self._tables[table.name]
        inside = (entry >= 0) & (columns < table.row_pages)
        rows = fields["", "rows"][entry.clamp(min=0)].long()
        found = pages[rows, columns.clamp(max=table.row_pages - 1)].long().where(inside, 0)
        return found * table.page_tokens + stored % table.page_tokens

    def _list(self, fields: FieldViews, table: TablePlan, batch: int) -> None:
        p, name = table.page_tokens, table.name
        lengths = fields[name, "kv_lengths"][:batch].long()
        first = fields[name, "first_page"][:batch].long()
        counts = ((lengths + p - 1) // p - first).clamp(min=0)
        ends = counts.cumsum(0)
        indptr = fields[name, "indptr"]
        indptr[:1] = 0
        indptr[1 : batch + 1] = ends
        fields[name, "last_page"][:batch] = (lengths + p - 1) % p + 1
        owner = torch.repeat_interleave(torch.arange(batch, device=counts.device), counts)
        column = torch.arange(len(owner), device=counts.device) - (ends - counts - first)[owner]
        inside = column < table.row_pages
        rows = fields["", "rows"][owner].long()
        pages = self._tables[name][rows, column.clamp(max=table.row_pages - 1)]
        fields[name, "indices"][: len(owner)] = pages.where(inside, 0)


def first_visible(lifetime: Lifetime, positions: Tensor) -> Tensor:
    """``Lifetime.first_visible`` of ``positions`` int64 [n]."""
    if lifetime.name == "window":
        return (positions - lifetime.tokens + 1).clamp(min=0)
    if lifetime.name == "chunk":
        return positions // lifetime.tokens * lifetime.tokens
    return torch.zeros_like(positions)


def stored_tokens(fields: FieldViews, size: StepSize) -> tuple[Tensor, Tensor]:
    """Of each row of new tokens its batch entry, and where in the request it is stored.

    Both int64 [tokens]; -1 and 0 for padding. Nothing waits for the device.
    """
    bounds = fields["", "q_indptr"][: size.batch + 1].long()
    token = torch.arange(size.tokens, device=bounds.device)
    own = token < bounds[-1]
    entry = torch.searchsorted(bounds[1:].contiguous(), token, right=True).where(own, -1)
    stored = fields["", "prefix"][entry] + token - bounds[entry]
    return entry, stored.where(own, 0)


def write_positions(fields: FieldViews, size: StepSize) -> None:
    """Fill ``positions``; those of padding are 0."""
    entry, positions = stored_tokens(fields, size)
    if size.tree:
        depths = fields["", "depths"][: size.tokens]
        positions = (fields["", "prefix"][entry] + depths).long().where(entry >= 0, 0)
    fields["", "positions"][: size.tokens] = positions
