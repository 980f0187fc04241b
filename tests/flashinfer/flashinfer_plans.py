"""What FlashInfer's planners take from their workspaces, from their own arithmetic (scheduler.cuh).

Used where no FlashInfer is: the double refuses plans that the real one would refuse.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfactory.flashinfer_runtime.calls import Sizes
from kvfactory.flashinfer_runtime.partials import query_tile

INDEX, FLOAT = 4, 4


class Taken(NamedTuple):
    """Bytes of the float and the integer workspace, and whether requests were split."""

    floats: int
    ints: int
    split: bool


def prefill_plan(sizes: Sizes, sms: int) -> Taken:
    """``PrefillPlan`` of fa2."""
    q_tokens, pages = np.diff(sizes.q_indptr.numpy()), np.diff(sizes.kv_indptr.numpy())
    group, batch = sizes.q_heads // sizes.kv_heads, len(q_tokens)
    packed = q_tokens.astype(np.int64) * group
    longest = (sizes.rows - batch + 1) * group if sizes.graph else int(packed.sum()) // batch
    tile = query_tile(longest, sizes.v_dim)
    tiles = -(-packed // tile)
    most = (2 * sms - sizes.idle_blocks) // sizes.kv_heads
    if sizes.window_left >= 0:
        pages = np.minimum(pages, -(-(sizes.window_left + tile) // sizes.page_tokens))
    split, chunk = False, int(pages.max(initial=1))
    if sizes.split:
        split, chunk = _chunk(tiles, pages, most, max(128 // sizes.page_tokens, 1))
        split = split or sizes.graph
    works = int((tiles * -(-np.maximum(pages, 1) // max(chunk, 1))).sum()) if sizes.split else 0
    works = works or int(tiles.sum())
    if sizes.graph:
        works = max(most, -(-sizes.rows * group // tile) + batch - 1)
    floats = sizes.q_heads * works * tile * FLOAT * (sizes.v_dim + 1) if split else 0
    ints = 3 * _aligned(INDEX * works) + _aligned(INDEX * (batch + 1)) + 2 * 16
    if split:
        ints += _aligned(INDEX * (sizes.rows + 1)) + _aligned(works)
    return Taken(floats, ints, split)


def _chunk(
    tiles: NDArray[np.int64], pages: NDArray[np.int64], most: int, low: int
) -> tuple[bool, int]:
    """``PrefillBinarySearchKVChunkSize``."""
    high = longest = max(1, int(pages.max(initial=1)))
    while low < high:
        middle = (low + high) // 2
        if (tiles * -(-np.maximum(pages, 1) // middle)).sum() > most:
            low = middle + 1
        else:
            high = middle
    return low < longest, low


def decode_plan(sizes: Sizes, sms: int, blocks_per_sm: int) -> Taken:
    """``DecodePlan`` of the CUDA-core kernel, at an occupancy of ``blocks_per_sm``."""
    pages = np.diff(sizes.kv_indptr.numpy())
    batch, most = len(pages), blocks_per_sm * sms
    works, split = batch, False
    if batch * sizes.kv_heads < most:
        low, high = max(128 // sizes.page_tokens, 1), max(1, int(pages.max()))
        while low < high:
            middle = (low + high) // 2
            if (-(-pages // middle)).sum() * sizes.kv_heads > most:
                low = middle + 1
            else:
                high = middle
        works = int((-(-np.maximum(pages, 1) // low)).sum())
        split = works > batch or sizes.graph
    if sizes.graph and split:
        works = most // sizes.kv_heads
    floats = sizes.q_heads * works * FLOAT * (sizes.v_dim + 1) if split else 0
    ints = 2 * _aligned(INDEX * works) + _aligned(INDEX * (works + 1)) + 16 + _aligned(works)
    return Taken(floats, ints, split)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
