"""A progress bar on stderr for long work, where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], label: str) -> Iterator[T]:
    """``items`` one by one, with a bar on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=label, console=Console(stderr=True), transient=True)
