"""Slots of a last page that nothing is written to yet, made harmless for XQA.

XQA reads pages whole and gives what lies behind a request's last token the weight 0, which turns
a NaN into NaN. A slot keeps whatever an earlier owner of its page wrote; as 8-bit NaN codes there
are few, only those are replaced, so memory that an engine shares in its own way stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfactory.backends.flashinfer.calls import Lists

NAN = 0x7F
"""The e4m3 code without its sign."""


def clear_nans(values: Tensor, lists: Lists) -> None:
    """Replace NaN codes behind the last token of each request's last page by 0, in all layers.

    ``values`` e4m3 [layers, pages, slots, heads, dim], any strides, dim innermost; ``lists`` are
    the requests' pages.
    """
    codes = values.view(torch.uint8)
    if codes.is_cuda:
        _launch(codes, lists)
    else:
        _with_torch(codes, lists)


def _with_torch(codes: Tensor, lists: Lists) -> None:
    last = lists.indices[(lists.indptr[1:] - 1).clamp(min=0).long()].long()
    slot = torch.arange(codes.shape[2], device=codes.device)
    behind = slot >= lists.last_page[:, None]
    pages = codes[:, last]
    nan = (pages & NAN == NAN) & behind[:, :, None, None]
    codes[:, last] = pages.masked_fill(nan, 0)


def _launch(codes: Tensor, lists: Lists) -> None:
    from kvfactory.backends.flashinfer.tail_kernel import clear_tails

    layers, _, slots, heads, dim = codes.shape
    strides = codes.stride()
    clear_tails[(len(lists.last_page), layers)](
        *(codes, *lists),
        *strides[:4],
        *(slots, heads, 1 << (heads - 1).bit_length(), dim),
        num_warps=4,
    )
