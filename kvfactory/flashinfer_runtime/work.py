"""A step's lengths as numpy, for one table: what host planning looks at."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfactory.flashinfer_runtime.choose import FULL, Shape
from kvfactory.runtime.steps import Step

Counts = NDArray[np.int64]


class Work(NamedTuple):
    """Lengths of a step in one table, int64 [batch] each.

    ``q_tokens`` new tokens, ``tokens`` readable ones from column ``first_page`` on, and ``pages``
    that hold them; ``prefix`` the tokens before the step. ``settled``: the numbers are exact, not
    upper bounds. ``decodes``: one new token each, and in a graph always so.
    """

    q_tokens: Counts
    tokens: Counts
    first_page: Counts
    pages: Counts
    prefix: Counts
    settled: bool
    decodes: bool

    @property
    def rows(self) -> int:
        """Query rows."""
        return int(self.q_tokens.sum())

    @property
    def longest(self) -> int:
        """Most new tokens of a request."""
        return int(self.q_tokens.max(initial=0))

    def only(self, entries: Counts) -> Work:
        """The batch entries ``entries``."""
        q_tokens = self.q_tokens[entries]
        return Work(
            q_tokens=q_tokens,
            tokens=self.tokens[entries],
            first_page=self.first_page[entries],
            pages=self.pages[entries],
            prefix=self.prefix[entries],
            settled=self.settled,
            decodes=bool((q_tokens == 1).all()),
        )

    def before(self, page_tokens: int) -> Work:
        """The same over the tokens before the step only."""
        pages = np.maximum(-(-self.prefix // page_tokens) - self.first_page, 0)
        return self._replace(tokens=self.prefix, pages=pages)

    def ragged(self) -> Work:
        """The new tokens among themselves: each is a page, and their number is exact."""
        none = np.zeros_like(self.prefix)
        new = self.q_tokens
        return Work(new, new, none, new, none, True, self.decodes)


def work_of(step: Step, shape: Shape, exact: bool) -> Work:
    """The lengths of ``step`` for ``shape``; ``exact`` where no undecided step can change them.

    Encoder tables have lengths of their own, and without drafts every token of a step stays. Pages
    are counted as the device lists them, from the first that the step can see; where its prefix is
    not known yet, from the first that the shortest outcome would see.
    """
    host, part, page_tokens = step.host, step.host.tables[shape.table], shape.page_tokens
    first = part.first_page.astype(np.int64)
    if exact and shape.window_left != FULL:
        first = np.maximum(host.prefix - shape.window_left, 0) // page_tokens
    tokens = np.asarray(part.kv_lengths, np.int64)
    q_tokens = np.diff(host.q_indptr).astype(np.int64)
    return Work(
        q_tokens=q_tokens,
        tokens=tokens,
        first_page=first,
        pages=np.maximum(-(-tokens // page_tokens) - first, 0),
        prefix=np.asarray(host.prefix, np.int64),
        settled=exact or bool(host.settled.all()),
        decodes=step.graph.each == 1 if step.graph else bool((q_tokens == 1).all()),
    )


def indptr(counts: Counts) -> NDArray[np.int32]:
    """Begin of each run, and the end of the last: int32 [batch + 1]."""
    found = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=found[1:])
    return found
