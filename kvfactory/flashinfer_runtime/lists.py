"""Page lists of a step, built on the device: what FlashInfer calls indptr, indices, last_page_len.

Legend: ``b`` batch entry, ``n`` its tokens, pages before ``first_page`` are released.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfactory.flashinfer_runtime.library import Lists
from kvfactory.kinds import ceil_div

BLOCK_PAGES = 1024
MOST_ENTRIES = 4096
"""Batch entries up to which one launch sums the page counts in every program."""


class ListJob(NamedTuple):
    """Lists to build: of requests ``rows`` int32 [batch] in the table ``pages`` [rows, width].

    ``tokens`` int32 [batch] are listed, from column ``first_page`` int32 [batch] on; the widest
    request has at most ``most_pages``. ``out.indptr`` has batch + 1 elements, ``out.last_page``
    batch.
    """

    pages: Tensor
    rows: Tensor
    tokens: Tensor
    first_page: Tensor
    page_tokens: int
    most_pages: int
    out: Lists


def build_lists(job: ListJob) -> None:
    """Fill ``job.out`` in one launch on a GPU; elsewhere, or for huge batches, with torch."""
    if job.rows.is_cuda and len(job.rows) <= MOST_ENTRIES:
        _launch(job)
    else:
        _with_torch(job)


def _with_torch(job: ListJob) -> None:
    tokens, first = job.tokens.long(), job.first_page.long()
    counts = ((tokens + job.page_tokens - 1) // job.page_tokens - first).clamp(min=0)
    ends = counts.cumsum(0)
    job.out.indptr[:1] = 0
    job.out.indptr[1:] = ends
    job.out.last_page.copy_((tokens + job.page_tokens - 1) % job.page_tokens + 1)
    column = torch.arange(max(job.most_pages, 1), device=tokens.device)
    inside = column < counts[:, None]
    source = (first[:, None] + column).clamp(max=job.pages.shape[1] - 1)
    spots = torch.where(inside, (ends - counts)[:, None] + column, len(job.out.indices))
    found = job.pages[job.rows.long()[:, None], source]
    listed = found.new_zeros(len(job.out.indices) + 1)
    listed[spots] = found
    job.out.indices.copy_(listed[:-1])


def _launch(job: ListJob) -> None:
    from kvfactory.flashinfer_runtime.list_kernel import page_lists

    batch = len(job.rows)
    grid = (batch, max(1, ceil_div(job.most_pages, BLOCK_PAGES)))
    page_lists[grid](
        *(job.pages, job.rows, job.tokens, job.first_page, *job.out),
        *(batch, job.pages.stride(0), len(job.out.indices)),
        PAGE=job.page_tokens,
        BATCH=max(2, 1 << (batch - 1).bit_length()),
        BLOCK=BLOCK_PAGES,
        num_warps=4,
    )
