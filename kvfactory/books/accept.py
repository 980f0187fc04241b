"""What a commit accepts: everything, counts, counts on the device, or paths of draft trees."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from kvfactory.books.batch import Batch
from kvfactory.books.ids import Int64, Tokens, int64, ranges
from kvfactory.errors import BooksError, Problem


@runtime_checkable
class PendingCounts(Protocol):
    """Accepted counts that are still on their way from the device."""

    def poll(self) -> Int64 | None:
        """The counts int64 [batch] once they have landed, before that None; never waits."""


Counts: TypeAlias = abc.Sequence[int] | Int64
Paths: TypeAlias = abc.Sequence[abc.Sequence[int]]
Accepted: TypeAlias = Counts | Paths | PendingCounts | None


class Verdict(NamedTuple):
    """``counts`` int64 [batch] accepted tokens, ``nodes`` int64 [accepted] their indices among
    each sequence's own new tokens; None where these are simply the first ones.
    """

    counts: Tokens
    nodes: Int64 | None


def judge(batch: Batch, parents: Int64 | None, accepted: Counts | Paths | None) -> Verdict:
    """What ``accepted`` means for a step; chains are trees of which each token has one child.

    Raises:
        BooksError: more tokens than the step has, or nodes that are not a path from the root.
    """
    if accepted is None and parents is None:
        return Verdict(batch.counts, None)
    paths, nodes = _paths(accepted), None
    counts = batch.counts if accepted is None else counts_of(accepted)
    if paths is not None:
        nodes = int64([node for path in paths for node in path], "accepted")
    check_counts(batch, counts)
    if parents is None and nodes is None:
        return Verdict(counts, None)
    firsts = ranges(np.zeros_like(counts), counts)
    nodes = firsts if nodes is None else nodes
    _check_paths(batch, counts, nodes, firsts, parents)
    return Verdict(counts, None if np.array_equal(nodes, firsts) else nodes)


def counts_of(accepted: Counts | Paths) -> Tokens:
    """How many tokens of each sequence counts or paths accept, int64 [batch].

    Raises:
        BooksError: something else.
    """
    paths = _paths(accepted)
    if paths is None:
        return int64(cast("Counts", accepted), "accepted")
    return int64([len(path) for path in paths])


def check_counts(batch: Batch, counts: Tokens) -> None:
    """Refuse counts int64 [batch] that the step cannot have.

    Raises:
        BooksError: a negative count, more than the step has, or not one for each sequence.
    """
    if counts is batch.counts:
        return
    if len(counts) != len(batch.counts):
        need = f"{len(batch.counts)}, one for each sequence"
        raise BooksError(Problem("accepted", f"{len(counts)} counts", need))
    wrong = (counts < 0) | (counts > batch.counts)
    if wrong.any():
        raise BooksError(
            *(
                Problem(f"accepted[{b}]", f"{counts[b]}", f"0..{batch.counts[b]} tokens")
                for b in wrong.nonzero()[0].tolist()
            )
        )


def _paths(accepted: Counts | Paths | None) -> Paths | None:
    if not isinstance(accepted, list | tuple) or not accepted:
        return None
    paths = all(
        isinstance(path, list | tuple) or (isinstance(path, np.ndarray) and path.ndim == 1)
        for path in accepted
    )
    return cast("Paths", accepted) if paths else None


def _check_paths(
    batch: Batch, counts: Tokens, nodes: Int64, ranks: Int64, parents: Int64 | None
) -> None:
    owners = np.repeat(np.arange(len(counts)), counts)
    known = (nodes >= 0) & (nodes < batch.counts[owners])
    before = np.where(ranks > 0, np.roll(nodes, 1), -1)
    if parents is None:
        above = nodes - 1
    else:
        inside = np.where(known, nodes, 0) + batch.q_indptr[owners]
        above = parents[inside] if len(parents) else nodes - 1
    wrong = ~known | (above != before)
    if wrong.any():
        raise BooksError(
            *(
                Problem(
                    f"accepted[{b}]",
                    str(nodes[owners == b].tolist()),
                    "a path of the draft tree, from a root downwards",
                )
                for b in np.unique(owners[wrong]).tolist()
            )
        )
