"""Handing sequences over to another process: where everything that one keeps lies in the arena.

Pages with their scales and index keys and whole states travel; snapshots and replay rings never
do: a ring is folded into its state before, and empty on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvfactory.books import Segment
from kvfactory.books import Sequence as SequenceId
from kvfactory.books.ids import count_of
from kvfactory.cache.parts import Parts
from kvfactory.cache.retraction import SequenceShape, open_empty, page_ids
from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.planning.cacheplan import Annex
from kvfactory.pools import Region
from kvfactory.states import StateStore

Share = tuple[int, int]
"""A rank's part of the heads and channels, and in how many parts they are."""


def regions(
    parts: Parts, states: StateStore, sequence: SequenceId, share: Share | None
) -> Mapping[str, tuple[Region, ...]]:
    """``Cache.regions``."""
    if share is not None:
        share = _checked(share)
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
    tokens = count_of(tokens, "receive(tokens=)")
    cross_tokens = count_of(cross_tokens, "receive(cross_tokens=)")
    if cross_tokens and not tokens:
        got, need = f"{cross_tokens} and no other tokens", "tokens that saw them"
        raise BooksError(Problem("receive(cross_tokens=)", got, need, "open(cross_tokens=)"))
    parts.books.require_room([(tokens, cross_tokens)])
    segments: list[Segment] = []
    sequence = open_empty(parts.books, SequenceShape(tokens, cross_tokens), segments)
    states.copy_due()
    if segments:
        states.receive(sequence)
    return sequence


def _checked(share: Share) -> Share:
    """``share``, two whole numbers of which the first is below the second.

    Raises:
        SpecError: what it is.
    """
    whole = isinstance(share, tuple | list) and all(type(number) is int for number in share)
    if not whole or len(share) != 2 or not 0 <= share[0] < share[1]:
        need = "(part, parts), whole numbers with 0 <= part < parts"
        raise SpecError(Problem("regions(share=)", repr(share)[:80], need))
    return share
