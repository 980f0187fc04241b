"""Which sequences a step covers, with how many new tokens each, and in which tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvfactory.books.ids import Int32, Int64, Positions, Rows, Tokens, indptr, int64, ranges
from kvfactory.errors import BooksError, Problem


class Batch(NamedTuple):
    """The plain numbers of a step that do not depend on how long its sequences are.

    ``rows`` and ``counts`` int64 [batch]. Of each new token, ``owners`` int64 [tokens] is its
    index in the batch and ``nodes`` int64 [tokens] its index among the sequence's own; both are
    None where every sequence has one token, so that tokens and sequences coincide. ``most`` is
    the largest count.
    """

    rows: Rows
    counts: Tokens
    rows32: Int32
    q_indptr: Int32
    owners: Int64 | None
    nodes: Int64 | None
    most: int

    def of_tokens(self, per_sequence: Int64) -> Int64:
        """A value per sequence, repeated for each of its new tokens."""
        return per_sequence if self.owners is None else per_sequence[self.owners]

    def after(self, prefix: Tokens) -> Positions:
        """Where the new tokens are stored, one after the other behind ``prefix``."""
        return prefix if self.nodes is None else self.of_tokens(prefix) + self.nodes


def batch_of(rows: Rows, new_tokens: int | list[int], limit: int) -> Batch:
    """The batch of ``rows`` int64 [batch] with ``new_tokens`` each, or so many for all.

    Raises:
        BooksError: a negative number of tokens, not one for each sequence, or more than ``limit``
            in all.
    """
    if isinstance(new_tokens, int):
        new_tokens = [new_tokens] * len(rows)
    counts = int64(new_tokens, "new_tokens")
    if len(counts) != len(rows) or (counts < 0).any():
        need = f"{len(rows)} numbers of at least 0, one for each sequence"
        raise BooksError(Problem("new_tokens", str(new_tokens), need))
    total = sum(counts.tolist())
    if total > limit:
        need = f"at most {limit} in a step, as planned"
        fix = f"smaller chunks, or engine.prefill_chunk_tokens={total}"
        raise BooksError(Problem("new_tokens", f"{total} new tokens", need, fix))
    owners = nodes = None
    if (counts != 1).any():
        owners = np.repeat(np.arange(len(rows)), counts)
        nodes = ranges(np.zeros_like(counts), counts)
    most = int(counts.max(initial=0))
    return Batch(rows, counts, rows.astype(np.int32), indptr(counts), owners, nodes, most)


def depths_of(batch: Batch, parents: Int64) -> Int64:
    """The depth of each new token in its draft tree, int64 [tokens]; roots have depth 0.

    ``parents`` int64 [tokens] are indices among the sequence's own new tokens, -1 for roots.

    Raises:
        BooksError: a parent that does not come before its child.
    """
    tokens = int(batch.q_indptr[-1])
    nodes = np.zeros(tokens, np.int64) if batch.nodes is None else batch.nodes
    if len(parents) != tokens or (parents < -1).any() or (parents >= nodes).any():
        need = f"{tokens} indices among the sequence's own new tokens, -1 or before the token"
        raise BooksError(Problem("parents", str(parents.tolist()), need))
    first = np.arange(tokens) - nodes
    depths = np.zeros(tokens, np.int64)
    climbing, ancestor = np.arange(tokens), parents
    while climbing.size:
        below = ancestor >= 0
        climbing, ancestor = climbing[below], ancestor[below]
        depths[climbing] += 1
        ancestor = parents[first[climbing] + ancestor]
    return depths
