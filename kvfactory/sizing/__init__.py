"""Sizing: how many requests fit, how many pages every table gets, and why not more.

One count, ``demand``, answers sizing, admission and allocation.
"""

from kvfactory.sizing.demand import (
    chunk_tokens,
    crowded_chunks,
    draft_tables,
    pages_for,
    prefill_pages,
    request_pages,
    sizes_for,
)
from kvfactory.sizing.solve import solve

__all__ = [
    "chunk_tokens",
    "crowded_chunks",
    "draft_tables",
    "pages_for",
    "prefill_pages",
    "request_pages",
    "sizes_for",
    "solve",
]
