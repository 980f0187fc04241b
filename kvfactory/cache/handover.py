"""Handing sequences over to another process: where everything that one keeps lies in the arena.

Pages with their scales and index keys and whole states travel; snapshots and replay rings never
do: a ring is folded into its state before, and empty on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvfactory.books import Segment
from kvfactory.books import Sequence as SequenceId
from kvfactory.cache.parts import Parts
from kvfactory.cache.retraction import SequenceShape, open_empty, page_ids
from kvfactory.planning.cacheplan import Annex
from kvfactory.pools import Region
from kvfactory.states import StateStore

Share = tuple[int, int]
"""A rank's part of the heads and channels, and in how many parts they are."""


def regions(
    parts: Parts, states: StateStore, sequence: SequenceId, share: Share | None
) -> Mapping[str, tuple[Region, ...]]:
    """``Cache.regions``."""
    states.copy_due()
    states.flush([sequence])
    ids = page_ids([parts.books.view(sequence)])
    found = {}
    for group, pool in parts.stored():
        if group.table in ids and not isinstance(group.work, Annex):
            pages = ids[group.table]
            found[group.name] = (
                pool.transfer_regions(pages) if share is None else pool.slice_regions(pages, *share)
            )
    return found


def receive(parts: Parts, states: StateStore, tokens: int, cross_tokens: int) -> SequenceId:
    """``Cache.receive``."""
    parts.books.require_room([(tokens, cross_tokens)])
    segments: list[Segment] = []
    sequence = open_empty(parts.books, SequenceShape(tokens, cross_tokens), segments)
    states.copy_due()
    if segments:
        states.receive(sequence)
    return sequence
