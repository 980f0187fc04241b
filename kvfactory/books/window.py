"""A derived view for clients that address a window table by the slots of a full one."""

from __future__ import annotations

import numpy as np

from kvfactory.books.ids import Int64, Slots
from kvfactory.books.shape import TableShape
from kvfactory.errors import BooksError, Problem


def window_slots(
    slots: Slots, full: TableShape, full_row: Int64, window: TableShape, window_row: Int64
) -> Slots:
    """The slots of the window table that hold the same tokens as ``slots`` of the full table.

    ``full_row`` int64 [full.row_pages] and ``window_row`` int64 [window.row_pages] are the pages
    of one request in both tables. Tokens that the window has released map into its sink: slots
    below ``window.page_tokens``.

    Raises:
        BooksError: slots that are not the request's own.
    """
    by_page = np.argsort(full_row, kind="stable")
    pages = slots // full.page_tokens
    columns = by_page[np.searchsorted(full_row, pages, sorter=by_page).clip(max=len(by_page) - 1)]
    foreign = (full_row[columns] != pages) | (pages == 0)
    if foreign.any():
        got = f"slots {slots[foreign][:8].tolist()}"
        raise BooksError(Problem(f"tables.{full.name}", got, "slots of the request's own pages"))
    positions = columns * full.page_tokens + slots % full.page_tokens
    pages = window_row[positions // window.page_tokens]
    mapped: Slots = pages * window.page_tokens + positions % window.page_tokens
    return mapped
