"""Custom masks as FlashInfer wants them: bits, each request's from a byte of its own.

Legend: request r has ``q_tokens`` queries and ``seen`` keys in its page list, which begins at key
``skipped`` of its storage; bit ``query * seen + key`` of its bytes, lowest first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfactory.backends.flashinfer.work import Counts, Lengths
from kvfactory.pools.ids import sent


class Packed(NamedTuple):
    """``bits`` uint8 [bytes] and ``indptr`` int32 [batch + 1], in bytes."""

    bits: Tensor
    indptr: Tensor


class Cells(NamedTuple):
    """One element per bit, padding included, int64: ``row`` of q, ``key`` in storage, ``entry``.

    ``flat`` is the index in a mask bool [sum of q_tokens * kv_tokens]; ``inside`` leaves padding
    out.
    """

    row: Tensor
    key: Tensor
    entry: Tensor
    flat: Tensor
    inside: Tensor


def custom(
    mask: Tensor, lengths: Lengths, page_tokens: int, window_left: int, positions: Tensor
) -> Packed:
    """``mask`` bool [sum of q_tokens * tokens], as in ``AttendExtra``, packed.

    With ``window_left`` >= 0 keys are also hidden by position (``positions`` int64 [rows] of the
    queries), which in a draft tree is not their place in storage.
    """
    cells, starts = _cells(lengths, page_tokens, mask.device)
    allowed = mask[cells.flat.clamp(max=len(mask) - 1)]
    if window_left >= 0:
        prefix = _on(lengths.prefix, mask.device)[cells.entry]
        first_row = _on(np.cumsum(lengths.q_tokens) - lengths.q_tokens, mask.device)[cells.entry]
        new = (first_row + cells.key - prefix).clamp(min=0, max=len(positions) - 1)
        at = torch.where(cells.key < prefix, cells.key, positions[new])
        allowed = allowed & (positions[cells.row] - at <= window_left)
    return _pack(allowed & cells.inside, starts, mask.device)


def prefix_window(
    lengths: Lengths, page_tokens: int, window_left: int, device: torch.device
) -> Packed:
    """Which keys before the step the window of each new token reaches, of the prefix's lengths."""
    cells, starts = _cells(lengths, page_tokens, device)
    prefix = _on(lengths.prefix, device)[cells.entry]
    first_row = _on(np.cumsum(lengths.q_tokens) - lengths.q_tokens, device)[cells.entry]
    near = prefix + cells.row - first_row - cells.key <= window_left
    return _pack(near & cells.inside, starts, device)


def _cells(lengths: Lengths, page_tokens: int, device: torch.device) -> tuple[Cells, Counts]:
    skipped = lengths.first_page * page_tokens
    keys = np.maximum(lengths.tokens - skipped, 0)
    bits = lengths.q_tokens * keys
    padded = -(-bits // 8) * 8
    starts = np.cumsum(padded) - padded
    total = int(padded.sum())
    entry = torch.repeat_interleave(_on(padded, device), output_size=total)
    local = torch.arange(total, device=device) - _on(starts, device)[entry]
    width = _on(np.maximum(keys, 1), device)[entry]
    query, column = local // width, local % width
    first_row = np.cumsum(lengths.q_tokens) - lengths.q_tokens
    first_bit = np.cumsum(lengths.q_tokens * lengths.tokens) - lengths.q_tokens * lengths.tokens
    key = column + _on(skipped, device)[entry]
    flat = _on(first_bit, device)[entry] + query * _on(lengths.tokens, device)[entry] + key
    inside = local < _on(bits, device)[entry]
    row = (_on(first_row, device)[entry] + query).clamp(max=max(int(lengths.q_tokens.sum()) - 1, 0))
    return Cells(row, key, entry, flat, inside), starts // 8


def _pack(bits: Tensor, starts: Counts, device: torch.device) -> Packed:
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
    packed = (bits.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)
    ends = np.append(starts, len(packed)).astype(np.int32)
    return Packed(packed, sent(torch.from_numpy(ends), device))


def _on(values: Counts, device: torch.device) -> Tensor:
    return sent(torch.from_numpy(np.ascontiguousarray(values, np.int64)), device)
