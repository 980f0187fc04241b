"""Which pages of a window or chunk table are out of sight: ``Lifetime`` for whole batches."""

from __future__ import annotations

import numpy as np

from kvfactory.books.ids import Columns, Tokens
from kvfactory.kinds import Lifetime


class Sight:
    """What queries behind ``committed`` tokens see of a table; ``ends`` is False where all is seen.

    Constants are arrays without axes: numpy is twice as fast with those as with Python integers.
    """

    def __init__(self, lifetime: Lifetime, page_tokens: int) -> None:
        self.ends = lifetime.name in ("window", "chunk")
        self._slides = lifetime.name == "window"
        self._tokens = np.array(lifetime.tokens)
        self._page_tokens = np.array(page_tokens)
        self._before = np.array(lifetime.tokens - 1)
        self._lag = np.array(lifetime.tokens - 1 + page_tokens)

    def first_columns(self, committed: Tokens) -> Columns:
        """The first column that is still seen; all of ``committed`` int64 [n] see an end."""
        if self._slides:
            first: Columns = (committed - self._before) // self._page_tokens
        else:
            first = committed // self._tokens * self._tokens // self._page_tokens
        return first

    def ends_of(self, columns: Columns) -> Tokens:
        """The committed tokens at which the page in each column is out of sight, int64 [n]."""
        if self._slides:
            ends: Tokens = columns * self._page_tokens + self._lag
        else:
            stops = columns * self._page_tokens + self._page_tokens
            ends = -(-stops // self._tokens) * self._tokens
        return ends
