"""Search: the largest number whose size is within a budget."""

from __future__ import annotations

from collections.abc import Callable

from kvfactory.planning.assembly import Sizes

ByteCount = Callable[[Sizes], int]

_STRIDE = 64  # over which the slope is taken: rounding to pages and to alignment evens out


def largest(low: int, size: Callable[[int], int], budget: int, limit: int | None) -> int:
    """The largest number from ``low`` to ``limit`` whose size is within ``budget``.

    That of ``low`` is, and sizes never fall. They grow nearly in proportion, so the search
    starts where a straight line ends.
    """
    good, bad = low, (2**62 if limit is None else limit + 1)
    if bad - good <= 1:
        return good
    base = size(low)
    slope = max(1, (size(low + _STRIDE) - base) // _STRIDE)
    probe, step = low + (budget - base) // slope, 1
    while bad - good > 1:
        probe = min(max(probe, good + 1), bad - 1)
        fits = size(probe) <= budget
        good, bad = (probe, bad) if fits else (good, probe)
        open_ended = bad > (limit or 2**61) if fits else good == low
        probe = probe + (step if fits else -step) if open_ended else (good + bad) // 2
        step *= 4
    return good
