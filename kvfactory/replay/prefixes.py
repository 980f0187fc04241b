"""Shared beginnings of prompts: a tree of seen blocks, some of its nodes held as segments.

A segment is held where a prompt ends, since the next turn of a conversation goes on there, and
where two prompts were seen to part. Those used least recently are released first; a segment that
others adjoin is always more recent than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvfactory.books import Segment

ROOT = 0


@dataclass(frozen=True)
class Held:
    """A segment and the node that it follows, whose own segment it adjoins."""

    segment: Segment
    base: int


class Prompt(NamedTuple):
    """A prompt's whole blocks as nodes of the tree, ``seen`` of which were there before it."""

    nodes: tuple[int, ...]
    seen: int


class Match(NamedTuple):
    """The deepest held node of a prompt, and the chain of segments that ends there."""

    node: int
    chain: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.chain[-1].stop if self.chain else 0


NO_MATCH = Match(ROOT, ())
NO_PROMPT = Prompt((), 0)


class Prefixes:
    """Which blocks follow which, and the segments held, the least recently used first."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, node: int) -> bool:
        return node in self._held

    def enter(self, blocks: Sequence[int]) -> Prompt:
        """Add the whole blocks of a prompt to the tree."""
        nodes, seen, node = [], 0, ROOT
        for block in blocks:
            fresh = len(self._children) + 1
            node = self._children.setdefault((node, block), fresh)
            seen += node != fresh
            nodes.append(node)
        return Prompt(tuple(nodes), seen)

    def match(self, nodes: Sequence[int]) -> Match:
        """The longest held beginning of ``nodes``, whose segments are the most recent now."""
        node = self.deepest(nodes)
        return Match(node, self._chain(node))

    def deepest(self, nodes: Sequence[int]) -> int:
        """The last of ``nodes`` that is held, the root if none is."""
        return next((node for node in reversed(nodes) if node in self._held), ROOT)

    def stop(self, node: int) -> int:
        """Where the segment at ``node`` ends, in tokens."""
        return self._held[node].segment.stop if node != ROOT else 0

    def _chain(self, node: int) -> tuple[Segment, ...]:
        chain: list[Segment] = []
        while node != ROOT:
            held = self._held[node] = self._held.pop(node)
            chain.append(held.segment)
            node = held.base
        return tuple(reversed(chain))

    def add(self, node: int, base: int, segment: Segment) -> None:
        """Hold ``segment`` at ``node``, behind ``base``; the most recently used now."""
        self._held[node] = Held(segment, base)
        self._chain(node)

    def pop(self, spared: int = ROOT) -> Segment | None:
        """Take out the least recently used segment that is not on the way to ``spared``."""
        keep = set()
        while spared != ROOT:
            keep.add(spared)
            spared = self._held[spared].base
        node = next((node for node in self._held if node not in keep), ROOT)
        return self._held.pop(node).segment if node != ROOT else None
