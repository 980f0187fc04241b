# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The kernel behind ``tails``: one program per request and layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clear_tails(
    codes, indptr, last_page, indices,
    LAYER: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, HEAD: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """codes uint8 [layers, pages, SLOTS, HEADS, DIM] with the strides LAYER to HEAD; the rest as
    in ``clear_nans``."""
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    filled = tl.load(last_page + request)
    page = tl.load(indices + tl.load(indptr + request + 1) - 1).to(tl.int64)
    head, byte = tl.arange(0, HEADS_POW2).to(tl.int64)[:, None], tl.arange(0, DIM)[None, :]
    own = codes + layer * LAYER + page * PAGE + head * HEAD + byte
    for slot in range(filled, SLOTS):
        at = own + tl.cast(slot, tl.int64) * SLOT
        found = tl.load(at, mask=head < HEADS, other=0)
        tl.store(at, tl.zeros_like(found), mask=(head < HEADS) & ((found & 0x7F) == 0x7F))
