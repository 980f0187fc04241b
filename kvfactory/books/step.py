"""A step as plain numpy arrays: what the device must know, and what happened at its commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvfactory.books.ids import Bool, Int32, Int64, Positions, Slots, Tokens


class TableStep(NamedTuple):
    """One page table's part of a step.

    ``slots`` int64 [tokens]: write slot of each new token (of an encoder table: of the encoder
    tokens that this step writes, in batch order).
    ``kv_lengths`` int64 [batch]: tokens readable after the writes.
    ``copies`` int64 [n, 2]: (source page, destination page), all planes, to be copied at once
    after the writes of earlier steps and before those of this one.
    ``updates`` int32 [n, 3]: (row, column, page) of every device table entry that changed since
    the last step; a released entry points at the sink 0. No entry is named twice.
    ``first_page`` int32 [batch]: first column still owned; those before it are released. It is
    the one that a query at the tokens committed so far can see, so where all earlier steps are
    decided also the first that this step reads.
    """

    slots: Slots
    kv_lengths: Tokens
    copies: Int64
    updates: Int32
    first_page: Int32


class StateStep(NamedTuple):
    """One state table's part of a step.

    ``slots`` int32 [batch]. ``copies`` int64 [n, 2]: (source place, destination place), read all
    before any is written, and before the slots that are ``fresh`` (bool [batch]) are cleared. A
    place is a state slot or, from the table's ``num_slots`` on, a checkpoint.
    """

    slots: Int32
    fresh: Bool
    copies: Int64


class StepRecord(NamedTuple):
    """An open step of ``batch`` sequences with ``tokens`` new tokens in all.

    ``rows`` int32 [batch], ``q_indptr`` int32 [batch + 1]: new tokens of entry b are
    ``q_indptr[b]:q_indptr[b + 1]``, at most ``most`` of them. ``prefix`` and
    ``lengths`` int64 [batch]: tokens before and after the step. ``positions`` int64 [tokens]: of a
    draft tree, prefix + depth in the tree; ``parents`` int64 [tokens] is that tree, as given.

    ``settled`` bool [batch] is False where an earlier step of the sequence is undecided. The
    host then assumes that all its tokens will be accepted: prefix, lengths, positions and slots
    are upper bounds, exact if that comes true. The pages are there for every outcome, so that
    the device, which knows the exact length, finds the slot of a position in its table row.
    ``since`` is the serial of the oldest undecided step, this one's own if there is none.
    """

    serial: int
    rows: Int32
    q_indptr: Int32
    most: int
    prefix: Tokens
    lengths: Tokens
    positions: Positions
    settled: Bool
    parents: Int64 | None
    tables: Mapping[str, TableStep]
    states: Mapping[str, StateStep]
    since: int


class Committed(NamedTuple):
    """What a commit decided.

    ``accepted`` int64 [batch] tokens, None while their counts are on the device. ``nodes`` int64
    [accepted] which of each sequence's new tokens these are, None where they are its first ones.
    ``moves`` by table, int64 [n, 2]: (source slot, destination slot) that bring the accepted path
    of a tree to the front; all sources are read before any destination is written, before the
    next step writes.
    """

    accepted: Tokens | None
    nodes: Int64 | None
    moves: Mapping[str, Int64]

    @property
    def last_nodes(self) -> Int64 | None:
        """Index of the last accepted token among each sequence's new ones, -1 for none.

        That is the state snapshot to keep, int64 [batch]; None while counts are on the device.
        """
        if self.accepted is None or self.nodes is None:
            return None if self.accepted is None else self.accepted - 1
        padded = np.append(self.nodes, -1)
        return np.where(self.accepted > 0, padded[self.accepted.cumsum() - 1], -1)
