"""Random histories in which tokens outlive their sequences: held prefixes, and images of the host.

An offloaded sequence gives everything back; a loaded one has other pages, and reads its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from books_device import Timeline
from books_machine import ROW_TOKENS, BooksMachine, Held
from books_support import CROSS
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvfactory.books import Books, Segment, Sequence, StateShape


@dataclass
class Image:
    """A sequence on the host: its tokens, and what its pages and state slots held, by table."""

    timeline: Timeline
    pages: dict[str, np.ndarray]
    states: dict[str, tuple[int, ...]]


def restore(books: Books, shapes: list[tuple[int, int]]) -> list[tuple[Sequence, Segment | None]]:
    """What ``Cache.load`` asks of the books, for sequences of (tokens, encoder tokens)."""
    books.require_room(shapes)
    found: list[tuple[Sequence, Segment | None]] = []
    for tokens, cross_tokens in shapes:
        segment = books.reserve(tokens, cross_tokens) if tokens else None
        found.append((books.adopt(segment) if segment else books.open(1)[0], segment))
    return found


class LeavingMachine(BooksMachine):
    """Holds, releases, offloads and loads besides."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[list[Image]] = []

    # ---- segments ----------------------------------------------------------------------

    @precondition(lambda self: self.open_sequences)
    @rule(
        which=st.integers(0, 20),
        before=st.sampled_from([0, 0, 0, 1, 2, 5]),
        back=st.sampled_from([ROW_TOKENS, ROW_TOKENS, 3, 8, 0]),
    )
    def hold(self, which: int, before: int, back: int) -> None:
        sequence = self.pick(which, self.open_sequences)
        self.books.settle()
        self.absorb()
        stop = sequence.committed - before
        start = max(0, stop - back)
        allowed = self.written(sequence) and 0 <= start < stop
        for shape in self.shapes:
            if isinstance(shape, StateShape):
                whole = not self.busy_tokens(sequence)
                allowed = allowed and stop == sequence.committed and whole
            elif shape is not CROSS and allowed:
                released = shape.lifetime.first_visible(sequence.committed) // shape.page_tokens
                needed = max(start, shape.lifetime.first_visible(stop)) // shape.page_tokens
                allowed = released <= needed
        if not allowed:
            self.refuse(self.books.hold, sequence.handle, stop, start)
            return
        segment = self.attempt(Books.hold, sequence.handle, stop, start)
        if segment:
            tokens = sequence.tokens[:stop]
            self.segments.append(Held(segment, tokens, sequence.cross, sequence.writer))

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 20))
    def release(self, which: int) -> None:
        held = self.pick(which, self.segments)
        self.segments.remove(held)
        self.books.release(held.segment)
        self.absorb()
        self.refuse(self.books.release, held.segment)

    # ---- images ------------------------------------------------------------------------

    @precondition(lambda self: self.open_sequences)
    @rule(which=st.integers(1, 31))
    def offload(self, which: int) -> None:
        chosen = [s for index, s in enumerate(self.open_sequences) if which >> index & 1]
        self.books.settle()
        self.absorb()
        if any(self.busy(s) or not self.written(s) for s in chosen):
            refused = next(s for s in chosen if self.busy(s) or not self.written(s))
            self.refuse(self.books.view, refused.handle)
            return
        self.copy_due()
        views = [self.books.view(sequence.handle) for sequence in chosen]
        self.images.append([self.image(*pair) for pair in zip(chosen, views, strict=True)])
        self.books.close([sequence.handle for sequence in chosen])
        self.open_sequences = [s for s in self.open_sequences if s not in chosen]
        self.stale += [sequence.handle for sequence in chosen]

    def copy_due(self) -> None:
        for name, copies in self.books.copies().items():
            self.device.copy_states(name, copies)

    def image(self, sequence: Timeline, view: Segment) -> Image:
        pages = {name: self.paged(name)[part.pages].copy() for name, part in view.parts.items()}
        states = {
            name: self.device.states[name][slot] if slot else ()
            for name, slot in view.slots.items()
        }
        return Image(sequence, pages, states)

    def paged(self, table: str) -> np.ndarray:
        """The memory of a table, [pages, page_tokens]."""
        return self.device.memory[table].reshape(-1, self.device.shapes[table].page_tokens)

    @precondition(lambda self: self.images)
    @rule(which=st.integers(0, 9), again=st.sampled_from([0, 0, 1]))
    def load(self, which: int, again: int) -> None:
        images = self.pick(which, self.images)
        shapes = [(len(i.timeline.tokens), len(i.timeline.cross)) for i in images]
        restored = self.attempt(restore, shapes)
        if restored is None:
            return
        if not again:
            self.images.remove(images)
        self.copy_due()
        for image, (handle, segment) in zip(images, restored, strict=True):
            if segment is not None:
                for name, part in segment.parts.items():
                    self.paged(name)[part.pages] = image.pages[name]
                for name, slot in segment.slots.items():
                    self.device.states[name][slot] = image.states[name]
            old = image.timeline
            tokens, writer = list(old.tokens), old.writer if segment else None
            cross = old.cross if segment else []
            back = Timeline(handle, tokens, cross, len(tokens), writer)
            self.open_sequences.append(back)

    # ---- what always holds -------------------------------------------------------------

    @invariant()
    def segments_keep_their_tokens(self) -> None:
        for held in self.segments:
            segment = held.segment
            for name, shape in self.device.shapes.items():
                first, pages = segment.parts[name]
                start, stop, tokens = segment.start, segment.stop, held.tokens
                if shape is CROSS:
                    start, stop, tokens = 0, len(held.cross), held.cross
                start = max(start, shape.lifetime.first_visible(stop))
                seen = np.arange(start, stop)
                slots = pages[seen // shape.page_tokens - first] * shape.page_tokens
                read = self.device.memory[name][slots + seen % shape.page_tokens]
                np.testing.assert_array_equal(read, np.array(tokens)[seen])
