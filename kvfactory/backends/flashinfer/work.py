"""A step's numbers for one table: what host planning looks at, lengths only where it needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfactory.backends.flashinfer.choose import FULL, Shape
from kvfactory.steps.step import Step

Counts = NDArray[np.int64]


class Lengths(NamedTuple):
    """Lengths of a step in one table, int64 [batch] each.

    ``q_tokens`` new tokens, ``tokens`` readable ones from column ``first_page`` on, and ``pages``
    that hold them; ``prefix`` the tokens before the step.
    """

    q_tokens: Counts
    tokens: Counts
    first_page: Counts
    pages: Counts
    prefix: Counts


@dataclass(frozen=True)
class Work:
    """``batch`` requests with ``rows`` query rows in all; ``measure`` gives their lengths.

    ``readable`` int64 [batch] are the tokens that attention may read, those before a window too.
    ``settled``: lengths are exact, not upper bounds. ``decodes``: one new token each, and in a
    graph always so.
    """

    batch: int
    rows: int
    readable: Counts
    settled: bool
    decodes: bool
    measure: Callable[[], Lengths]

    @classmethod
    def of(cls, lengths: Lengths, settled: bool) -> Work:
        """The work of ``lengths`` that are known already."""
        q_tokens = lengths.q_tokens
        decodes = bool((q_tokens == 1).all())
        rows = int(q_tokens.sum())
        return cls(len(q_tokens), rows, lengths.tokens, settled, decodes, lambda: lengths)

    @cached_property
    def lengths(self) -> Lengths:
        """The lengths, measured when first asked for."""
        return self.measure()

    @property
    def longest(self) -> int:
        """Most new tokens of a request."""
        return int(self.lengths.q_tokens.max(initial=0))

    def only(self, entries: Counts) -> Work:
        """The batch entries ``entries``."""
        return Work.of(Lengths(*(values[entries] for values in self.lengths)), self.settled)

    def before(self, page_tokens: int) -> Work:
        """The same over the tokens before the step only."""
        lengths = self.lengths
        pages = np.maximum(-(-lengths.prefix // page_tokens) - lengths.first_page, 0)
        return Work.of(lengths._replace(tokens=lengths.prefix, pages=pages), self.settled)

    def ragged(self) -> Work:
        """The new tokens among themselves: each is a page, and their number is exact."""
        new = self.lengths.q_tokens
        none = np.zeros_like(new)
        return Work.of(Lengths(new, new, none, new, none), settled=True)


def work_of(step: Step, shape: Shape, exact: bool) -> Work:
    """The work of ``step`` for ``shape``; ``exact`` where no undecided step can change lengths.

    Encoder tables have lengths of their own, and without drafts every token of a step stays.
    """
    host = step.host
    batch, rows = len(host.rows), len(host.positions)
    return Work(
        batch=batch,
        rows=int(host.q_indptr[-1]) if step.graph else rows,
        readable=host.tables[shape.table].kv_lengths,
        settled=exact or bool(host.settled.all()),
        decodes=step.graph.each == 1 if step.graph else rows == batch and host.most <= 1,
        measure=lambda: _measured(step, shape, exact),
    )


def _measured(step: Step, shape: Shape, exact: bool) -> Lengths:
    """Pages are counted as the device lists them, from the first that the step can see; where its
    prefix is not known yet, from the first that the shortest outcome would see.
    """
    host, part, page_tokens = step.host, step.host.tables[shape.table], shape.page_tokens
    first = part.first_page.astype(np.int64)
    if exact and shape.window_left != FULL:
        first = np.maximum(host.prefix - shape.window_left, 0) // page_tokens
    tokens = np.asarray(part.kv_lengths, np.int64)
    return Lengths(
        q_tokens=np.diff(host.q_indptr).astype(np.int64),
        tokens=tokens,
        first_page=first,
        pages=np.maximum(-(-tokens // page_tokens) - first, 0),
        prefix=np.asarray(host.prefix, np.int64),
    )
