"""Page lists of some requests, or of a step's prefix; those of whole steps come with the step.

They are what FlashInfer calls indptr, indices and last_page_len.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfactory.backends.flashinfer.calls import Lists


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
    """Fill ``job.out``, with torch; nothing waits for the device."""
    tokens, first = job.tokens.long(), job.first_page.long()
    counts = ((tokens + job.page_tokens - 1) // job.page_tokens - first).clamp(min=0)
    ends = counts.cumsum(0)
    job.out.indptr[:1] = 0
    job.out.indptr[1:] = ends
    job.out.last_page.copy_((tokens + job.page_tokens - 1) % job.page_tokens + 1)
    column = torch.arange(job.most_pages, device=tokens.device)
    inside = column < counts[:, None]
    source = (first[:, None] + column).clamp(max=job.pages.shape[1] - 1)
    size = min(len(job.out.indices), len(job.rows) * job.most_pages)
    spots = torch.where(inside, (ends - counts)[:, None] + column, size)
    found = job.pages[job.rows.long()[:, None], source]
    listed = found.new_zeros(size + 1)
    listed[spots] = found
    job.out.indices[:size].copy_(listed[:-1])
