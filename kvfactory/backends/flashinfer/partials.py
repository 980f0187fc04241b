"""Partial results: a request that is split over keys leaves one for each part, to be merged.

FlashInfer splits only to fill thread blocks that would idle. ``PrefillPlan`` (fa2) looks for the
shortest run of keys at which the parts of all query tiles number at most ``blocks / kv_heads``,
where ``blocks`` is two per SM less those that the caller keeps for others; where whole requests
are as many, nothing is split. For a part it reserves ``q_heads`` times the rows of a query tile
(``CTA_TILE_Q``) and their sums, so

    bytes <= blocks / kv_heads * q_heads * tile * 4 * (v_dim + 1)

whatever the batch. In a graph FlashInfer reserves a part for every tile that the batch may have,
and merges even what is whole: batches that would not gain from it are planned whole instead
(``Grid.decode_parts``). Where two blocks per SM would leave more than ``MOST_BYTES``, decodes have
one per SM at least, and prefills what fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfactory.backends.flashinfer.choose import Shape
from kvfactory.kinds import ceil_div

BLOCKS_PER_SM = 2
CUDA_CORE_BLOCKS_PER_SM = 16
"""Of 128 threads or more; an SM holds at most 2,048 (DecodePlan asks for the occupancy)."""
MOST_BYTES = 128 * 2**20
"""What FlashInfer's documentation recommends for its float workspace."""


def query_tile(packed_rows: int, v_dim: int) -> int:
    """Rows of fa2's query tile for ``packed_rows`` = tokens times group (FA2DetermineCtaTileQ)."""
    if packed_rows > 64 and v_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def part_bytes(shape: Shape, tile: int) -> int:
    """What PrefillPlan reserves for a part, all heads: float32 rows and their sums."""
    return shape.q_heads * tile * 4 * (shape.v_dim + 1)


def fa2_bytes(shape: Shape, longest: int, sms: int) -> int:
    """Room for the parts of decodes, and of steps of up to ``longest`` tokens a request."""
    most = BLOCKS_PER_SM * sms // shape.kv_heads
    decode, prefill = (
        part_bytes(shape, query_tile(tokens * shape.group, shape.v_dim)) for tokens in (1, longest)
    )
    fewest = min(ceil_div(sms, shape.kv_heads), most)
    decodes = decode * max(min(most, MOST_BYTES // decode), fewest)
    return max(decodes, min(most * prefill, MOST_BYTES))


def cuda_core_bytes(shape: Shape, sms: int) -> int:
    """DecodePlan splits only while all parts of all heads fit the grid; a part has one row."""
    parts = CUDA_CORE_BLOCKS_PER_SM * sms // shape.kv_heads
    return shape.q_heads * parts * 4 * (shape.v_dim + 1)


@dataclass(frozen=True)
class Grid:
    """How requests of one shape may be split, with ``num_bytes`` for what their parts leave."""

    shape: Shape
    sms: int
    num_bytes: int

    def decode_parts(self, batch: int, graph: bool) -> int:
        """Into how many parts fa2 may split ``batch`` requests of one row; 0: they stay whole."""
        group = self.shape.group
        tile = query_tile(group, self.shape.v_dim)
        in_graph = ceil_div(batch * group, tile) + batch - 1
        return self._parts(in_graph if graph else batch * ceil_div(group, tile), tile)

    def parts(self, batch: int, rows: int) -> int:
        """Into how many fa2 may split ``batch`` requests of ``rows`` rows in all; 0: whole."""
        packed = rows * self.shape.group
        tile = query_tile(packed // max(batch, 1), self.shape.v_dim)
        return self._parts(ceil_div(packed, tile), tile)

    def _parts(self, tiles: int, tile: int) -> int:
        most = BLOCKS_PER_SM * self.sms // self.shape.kv_heads
        most = min(most, self.num_bytes // part_bytes(self.shape, tile))
        return most if tiles < most else 0

    def idle_blocks(self, parts: int) -> int:
        """Blocks to keep from FlashInfer, so that it makes ``parts`` parts at most."""
        return max(BLOCKS_PER_SM * self.sms - parts * self.shape.kv_heads, 0)

    def whole_on_cuda_cores(self, batch: int) -> bool:
        """Whether DecodePlan surely splits none of ``batch`` requests."""
        return batch * self.shape.kv_heads >= CUDA_CORE_BLOCKS_PER_SM * self.sms
