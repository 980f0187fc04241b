"""Retraction: whole sequences leave for host memory, and come back.

An image holds every plane of every group, bit for bit: pages with their scales and index keys, and
state slots with their replay rings and cursors. Tracked states it does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvfactory.books import Books, Segment
from kvfactory.books import Sequence as SequenceId
from kvfactory.books.ids import Int64
from kvfactory.cache.parts import Parts
from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.pools import PageImage
from kvfactory.states import StateStore


@dataclass(frozen=True)
class SequenceShape:
    """How long a sequence in an image is, its encoder tokens apart."""

    tokens: int
    cross_tokens: int


@dataclass(frozen=True)
class CacheImage:
    """Sequences in host memory: by group, the pages (state slots) of all of them in order.

    Another cache can load it whose groups agree in all but layouts.
    """

    sequences: tuple[SequenceShape, ...]
    pages: Mapping[str, PageImage]

    @property
    def num_bytes(self) -> int:
        """Host bytes that it occupies."""
        return sum(image.num_bytes for image in self.pages.values())


def offload(parts: Parts, sequences: Sequence[SequenceId]) -> CacheImage:
    """An image of ``sequences``, which are closed once everything is on the host.

    Raises:
        BooksError: a stale handle, one twice, a step in flight, or encoder tokens of a sequence
            without tokens; nothing is closed then.
    """
    parts.books.committed(sequences)  # refuses what are no handles, and one that is named twice
    views = [parts.books.view(sequence) for sequence in sequences]
    wrong = [
        Problem(f"sequences[{number}]", "encoder tokens and no other", "a sequence to close")
        for number, view in enumerate(views)
        if view.cross_tokens and not view.stop
    ]
    if wrong:
        raise BooksError(*wrong)
    ids = page_ids(views)
    pages = {g.name: pool.offload(ids[g.table]) for g, pool in parts.stored() if g.table in ids}
    parts.books.close(sequences)
    return CacheImage(tuple(SequenceShape(v.stop, v.cross_tokens) for v in views), pages)


def load(parts: Parts, states: StateStore, image: CacheImage) -> list[SequenceId]:
    """The sequences of ``image``, open again, in its order.

    Raises:
        OutOfPages: too few pages, slots or rows for all of them; nothing was taken.
        BooksError: a sequence that is longer than a row of this cache; nothing was taken.
        SpecError: no image, or one of other groups, formats, page sizes or constants.
    """
    if not isinstance(image, CacheImage):
        need = "the image that offload() returned"
        raise SpecError(Problem("image", f"a {type(image).__name__}", need))
    _check(parts, image)
    parts.books.require_room([(shape.tokens, shape.cross_tokens) for shape in image.sequences])
    segments: list[Segment] = []
    opened = [open_empty(parts.books, shape, segments) for shape in image.sequences]
    try:
        _fill(parts, states, image, page_ids(segments))
    except BaseException:
        parts.books.close(opened)
        raise
    return opened


def _fill(parts: Parts, states: StateStore, image: CacheImage, ids: Mapping[str, Int64]) -> None:
    """Bring ``image`` to pages and state slots ``ids`` by table."""
    states.copy_due()
    for group, pool in parts.stored():
        if group.name in image.pages:
            pool.load(image.pages[group.name], ids[group.table])
    for state in parts.plan.states if ids else ():
        states.adopt(state.name, ids[state.name])


def open_empty(books: Books, shape: SequenceShape, segments: list[Segment]) -> SequenceId:
    """A sequence of ``shape`` whose contents are to be filled in. The caller asked for room.

    What it owns is appended to ``segments``, unless it has no tokens.
    """
    if not shape.tokens:
        return books.open(1)[0]
    segment = books.reserve(shape.tokens, shape.cross_tokens)
    segments.append(segment)
    return books.adopt(segment)


def page_ids(views: Sequence[Segment]) -> dict[str, Int64]:
    """Page ids, or state slots, of all sequences by table, those without tokens left out."""
    filled = [view for view in views if view.stop]
    if not filled:
        return {}
    pages = {
        name: np.concatenate([view.parts[name].pages for view in filled])
        for name in filled[0].parts
    }
    slots = {name: np.array([view.slots[name] for view in filled]) for name in filled[0].slots}
    return {**pages, **slots}


def _check(parts: Parts, image: CacheImage) -> None:
    wrong = list(_mismatches(parts, image))
    if wrong:
        raise SpecError(*wrong)


def _mismatches(parts: Parts, image: CacheImage) -> Iterator[Problem]:
    if not any(shape.tokens for shape in image.sequences):
        return
    pools = {group.name: pool for group, pool in parts.stored()}
    if image.pages.keys() != pools.keys():
        got, need = (", ".join(sorted(names)) or "none" for names in (image.pages, pools))
        yield Problem("image", f"groups {got}", f"groups {need}, as in this cache")
        return
    for name, pool in pools.items():
        for problem in pool.manifest().mismatches(image.pages[name].manifest, same_layout=False):
            yield Problem(f"image.{name}.{problem.path}", problem.got, problem.need, problem.fix)
