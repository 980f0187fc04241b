"""Segments: committed runs of a sequence that somebody else owns, such as a prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvfactory.books.table import Part
from kvfactory.errors import BooksError, Problem


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens ``start`` .. ``stop`` - 1 of a sequence, whose pages the segment owns.

    ``parts`` by table: in window and chunk tables only what a query at ``stop`` can see.
    ``slots`` by state table: the place of the state after ``stop`` tokens, which is a state slot
    or, from the table's ``num_slots`` on, a checkpoint. ``cross_tokens`` are the encoder tokens
    that the run depends on, whose pages the segment owns as well.
    """

    start: int
    stop: int
    parts: Mapping[str, Part]
    slots: Mapping[str, int]
    cross_tokens: int


class Segments:
    """The segments that are held; each of them can be released once."""

    def __init__(self) -> None:
        self._held: set[Segment] = set()

    def add(self, segment: Segment) -> Segment:
        """Enter a new segment."""
        self._held.add(segment)
        return segment

    def remove(self, segment: Segment) -> None:
        """Strike a segment off.

        Raises:
            BooksError: it was released before, or is none of ours.
        """
        if not isinstance(segment, Segment) or segment not in self._held:
            raise BooksError(_unknown("segment", segment))
        self._held.remove(segment)

    def chain(self, prefix: Iterable[Segment]) -> tuple[Segment, ...]:
        """The segments of a prefix, which must adjoin from 0.

        Raises:
            BooksError: a gap, a released segment, or segments of different encoder inputs.
        """
        given: Iterable[Segment] = prefix if isinstance(prefix, Iterable) else (prefix,)
        chain, stop, problems = tuple(given), 0, []
        if not all(isinstance(segment, Segment) for segment in chain):
            raise BooksError(Problem("prefix", repr(chain)[:80], "segments that hold() returned"))
        for index, segment in enumerate(chain):
            path = f"prefix[{index}]"
            if segment not in self._held:
                problems.append(_unknown(path, segment))
            if segment.start != stop:
                problems.append(Problem(path, f"a start at {segment.start}", f"{stop}"))
            if segment.cross_tokens != chain[0].cross_tokens:
                got, need = f"{segment.cross_tokens} encoder tokens", f"{chain[0].cross_tokens}"
                problems.append(Problem(path, got, need))
            stop = segment.stop
        if problems:
            raise BooksError(*problems)
        return chain

    def clear(self) -> None:
        """Forget all segments."""
        self._held.clear()


def _unknown(path: str, segment: Segment) -> Problem:
    got = f"a {type(segment).__name__}"
    if isinstance(segment, Segment):
        got = f"a segment [{segment.start}, {segment.stop}) that is not held"
    return Problem(path, got, "a segment that hold() returned and nobody released")
