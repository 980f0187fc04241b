"""Kinds of layer groups: what a layer keeps for how long, as one table and pure functions.

Positions and lengths are in tokens. A query at position ``t`` of a window of W sees the keys
``t - W + 1 .. t``, its own included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LifetimeName = Literal["whole", "window", "chunk", "encoder", "state", "row", "checkpoint"]


@dataclass(frozen=True, order=True)
class Lifetime:
    """How long the entries of a table live.

    ``whole``: as long as the request. ``window``: ``tokens`` keys including the query's own.
    ``chunk``: until the chunk of ``tokens`` ends. ``encoder``: written once, whole request.
    ``state``: one slot per request, not per token. ``row``: a slot for each request row.
    ``checkpoint``: a slot for each of so many saved states.
    """

    name: LifetimeName
    tokens: int = 0

    def first_visible(self, position: int) -> int:
        """The earliest position that a query at ``position`` or later can see."""
        if self.name == "window":
            return max(0, position - self.tokens + 1)
        if self.name == "chunk":
            return position // self.tokens * self.tokens
        return 0

    def peak_pages(self, tokens: int, in_flight_tokens: int, page_tokens: int) -> int:
        """Most pages that one request of ``tokens`` holds, with ``in_flight_tokens`` uncommitted.

        The worst alignment of the window against page borders is assumed.
        """
        whole = ceil_div(tokens, page_tokens)
        if self.name == "window":
            reach = self.tokens + in_flight_tokens - 2
            return min(whole, ceil_div(max(reach, 0), page_tokens) + 1)
        if self.name == "chunk":
            reach = self.tokens - 1 + in_flight_tokens
            aligned = self.tokens % page_tokens == 0
            return min(whole, ceil_div(reach, page_tokens) + (not aligned))
        return whole


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is >= ``value``."""
    return ceil_div(value, alignment) * alignment


@dataclass(frozen=True)
class Kind:
    """A row of the kinds table.

    ``granularity`` names the layout family (``tokens``, ``index`` or ``state``) and ``reach`` the
    spec field with the lifetime's length in tokens, empty where there is none.
    """

    lifetime: LifetimeName
    granularity: Literal["tokens", "index", "state"]
    reach: str = ""


KINDS: dict[str, Kind] = {
    "full": Kind("whole", "tokens"),
    "swa": Kind("window", "tokens", reach="window_tokens"),
    "chunked": Kind("chunk", "tokens", reach="chunk_tokens"),
    "cross": Kind("encoder", "tokens", reach="encoder_tokens"),
    "linear": Kind("state", "state"),
    "sparse_index": Kind("whole", "index"),
}
