"""Plans of latent attention carry lengths; those of decodes are used again with new ones put in.

MLAPlan (scheduler.cuh) cuts each request's keys into runs and deals these to thread blocks. Three
numbers of a run follow from lengths: where the request's pages begin in the list, how long it is,
and where the run ends if it is the request's last. The kernels (mla.cuh, mla_hopper.cuh) take any
end behind a run's start, which they need at a multiple of their tile. So a plan serves requests
that have grown since: their last runs get longer, the others stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.backends.flashinfer.work import Counts

Ints = NDArray[np.int32]

TILE = 64
"""Keys that the kernels take at once, or a multiple of it."""
GROWTH = 8
"""A request may grow by an eighth of the longest run before runs are dealt anew."""


@dataclass(frozen=True)
class RunFields:
    """Byte offsets of a plan's arrays in its integer workspace, and ``count`` runs in each.

    int32 [count]: the first query row of a run's request, where the request's pages begin, its
    ``length``, and the run's ``start`` and ``end`` in tokens.
    """

    row: int
    pages: int
    length: int
    start: int
    end: int
    count: int

    def of(self, workspace: Tensor, offset: int) -> Ints:
        """An array in ``workspace`` uint8 on the host."""
        found: Ints = workspace.numpy()[offset : offset + 4 * self.count].view(np.int32)
        return found


@dataclass(frozen=True)
class Runs:
    """The runs of a decode plan for requests of ``tokens`` int64 [batch], each with one query row.

    ``entries`` int64 [count] are the batch entries that they read, ``ends`` int32 [count] where
    they end, ``last`` bool [count] whether that is the request's end.
    """

    fields: RunFields
    tokens: Counts
    entries: Counts
    ends: Ints
    last: NDArray[np.bool_]
    spare_tokens: int

    def fits(self, tokens: Counts) -> bool:
        """Whether no request of ``tokens`` int64 [batch] is shorter, or has grown too far."""
        grown = tokens - self.tokens
        return bool(grown.min() >= 0 and grown.max() <= self.spare_tokens)

    def write(self, pinned: Tensor, ints: Tensor, first: Ints, tokens: Counts) -> None:
        """Put lengths ``tokens`` int64 [batch] into the plan in ``ints``, by way of ``pinned``.

        ``first`` int32 [batch] is where each request's pages begin in the list.
        """
        lengths = tokens[self.entries]
        fields, whole = self.fields, pinned.numpy()
        for offset, values in (
            (fields.pages, first[self.entries]),
            (fields.length, lengths),
            (fields.end, np.where(self.last, lengths, self.ends)),
        ):
            stop = offset + 4 * fields.count
            whole[offset:stop].view(np.int32)[:] = values
            ints[offset:stop].copy_(pinned[offset:stop], non_blocking=True)


def fields_of(info: Sequence[int], pinned: Tensor) -> RunFields:
    """Where the plan is that was just written to ``pinned``; ``info`` as MLAPlanInfo lists it."""
    blocks, work_indptr = int(info[1]), int(info[15])
    total = int(pinned.numpy()[work_indptr + 4 * blocks :][:4].view(np.int32)[0])
    row, pages, length, start, end = (int(info[number]) for number in (2, 3, 11, 13, 14))
    return RunFields(row, pages, length, start, end, total)


def runs_of(fields: RunFields, pinned: Tensor, tokens: Counts) -> Runs | None:
    """The runs of a plan for decodes of ``tokens`` int64 [batch] that was just written to
    ``pinned``; None where it serves no other lengths.
    """
    starts = fields.of(pinned, fields.start)
    if not fields.count or (starts % TILE).any():
        return None
    ends, entries = fields.of(pinned, fields.end).copy(), fields.of(pinned, fields.row).astype(int)
    last = ends == tokens[entries]
    return Runs(fields, tokens, entries, ends, last, int((ends - starts).max()) // GROWTH)
