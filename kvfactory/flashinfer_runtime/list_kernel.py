# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The kernel behind ``lists``: one program per batch entry and run of pages."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_lists(
    pages, rows, tokens, first_page, indptr, last_page, indices,
    batch, width, capacity,
    PAGE: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Arguments as in ``ListJob``; every program sums the page counts before its entry itself."""
    b = tl.program_id(0)
    entry = tl.arange(0, BATCH)
    n = tl.load(tokens + entry, mask=entry < batch, other=0)
    first = tl.load(first_page + entry, mask=entry < batch, other=0)
    counts = tl.maximum((n + PAGE - 1) // PAGE - first, 0)
    start = tl.sum(tl.where(entry < b, counts, 0))
    own = tl.sum(tl.where(entry == b, counts, 0))
    from_column = tl.sum(tl.where(entry == b, first, 0))
    if tl.program_id(1) == 0:
        own_tokens = tl.sum(tl.where(entry == b, n, 0))
        tl.store(indptr + b, start)
        tl.store(last_page + b, (own_tokens + PAGE - 1) % PAGE + 1)
        if b == batch - 1:
            tl.store(indptr + batch, start + own)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < own) & (start + column < capacity)
    row = tl.load(rows + b).to(tl.int64)
    found = tl.load(pages + row * width + from_column + column, mask=inside, other=0)
    tl.store(indices + start + column, found, mask=inside)
