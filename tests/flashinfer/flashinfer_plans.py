"""What FlashInfer's planners take from their workspaces, from their own arithmetic (scheduler.cuh).

Used where no FlashInfer is: the double refuses plans that the real one would refuse.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.backends.flashinfer.calls import Sizes
from kvfactory.backends.flashinfer.latent import RunFields
from kvfactory.backends.flashinfer.partials import query_tile

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


MOST_RUNS = 16384


class LatentPlan(NamedTuple):
    """``MLAPlan`` of decodes: bytes as it lays them, and where."""

    ints: NDArray[np.uint8]
    fields: RunFields


def latent_plan(sizes: Sizes, sms: int) -> LatentPlan:
    """Runs of at most an even share of all keys, dealt to the block with the least to do."""
    cluster = 2 if sizes.q_heads > 64 else 1
    blocks, tile = sms // cluster, 64 * cluster
    tokens, first = sizes.kv_tokens.tolist(), sizes.kv_indptr.tolist()
    share = -(-sum(tokens) * -(-sizes.q_heads // tile) // blocks)
    limits = {8: 32, 16: 64, 32: 128, 64: 192}
    limit = next((n for most, n in limits.items() if share <= most), -(-share // 256) * 256)
    costs = [(0.0, block) for block in range(blocks)]
    work: list[list[tuple[int, ...]]] = [[] for _ in range(blocks)]
    for row, length in enumerate(tokens):
        for _ in range(-(-sizes.q_heads // tile)):
            for start in range(0, max(length, 1), limit):
                end = min(start + limit, length)
                cost, block = heappop(costs)
                heappush(costs, (cost + 2 * tile + end - start, block))
                work[block].append((row, first[row], length, start, end))
    runs = np.array([run for own in work for run in own], np.int32).reshape(-1, 5)
    ints = np.zeros(5 * 4 * MOST_RUNS, np.uint8)
    offsets = [4 * MOST_RUNS * number for number in range(5)]
    fields = RunFields(*offsets, len(runs))
    for offset, values in zip(offsets, runs.T, strict=True):
        ints[offset : offset + 4 * len(runs)] = np.ascontiguousarray(values).view(np.uint8)
    return LatentPlan(ints, fields)


def latent_lengths(workspace: Tensor, fields: RunFields, batch: int) -> tuple[Tensor, Tensor]:
    """What the runs in ``workspace`` cover: first page and tokens of each request, int32 [batch].

    Every request is covered from its first key to its last, once for each tile of heads.
    """
    columns = (fields.row, fields.pages, fields.length, fields.start, fields.end)
    runs = np.stack([fields.of(workspace, offset) for offset in columns], axis=1)
    found = np.zeros((batch, 2), np.int32)
    for row in range(batch):
        own = np.unique(runs[runs[:, 0] == row], axis=0)
        own = own[np.argsort(own[:, 3])]
        assert len({tuple(run[1:3]) for run in own.tolist()}) == 1, "one length a request"
        assert own[0, 3] == 0
        assert own[-1, 4] == own[0, 2]
        assert (own[1:, 3] == own[:-1, 4]).all(), "runs adjoin"
        found[row] = own[0, 1:3]
    return torch.from_numpy(found[:, 0].copy()), torch.from_numpy(found[:, 1].copy())
