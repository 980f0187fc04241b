"""Words for the integers that the books deal in, int64 unless said otherwise, none of them bare.

A *position* counts the tokens of one sequence from 0. A *page* holds ``page_tokens`` of them; a
*slot* is page * page_tokens + offset, the address of one token in its table. A *row* is a
request's line in the device tables, a *column* the index of a page in it, and a *cell* is
row * row_pages + column, the flat address of that entry. 0 is the sink among pages, state slots
and rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvfactory.errors import BooksError, Problem

Int64: TypeAlias = NDArray[np.int64]
Int32: TypeAlias = NDArray[np.int32]
Bool: TypeAlias = NDArray[np.bool_]

Positions: TypeAlias = Int64
Tokens: TypeAlias = Int64
Pages: TypeAlias = Int64
Slots: TypeAlias = Int64
Rows: TypeAlias = Int64
Columns: TypeAlias = Int64 | Int32
Cells: TypeAlias = Int64

SINK: Final = 0


def int64(values: Iterable[int] | NDArray[np.integer], what: str = "ids") -> Int64:
    """The values as int64 [n]; ``what`` names them.

    Raises:
        BooksError: something that is no list of integers.
    """
    try:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError, OverflowError):
        raise BooksError(Problem(what, _shown(values), "a list of integers")) from None
    if array.size and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise BooksError(Problem(what, _shown(values), "a list of integers"))
    return array.astype(np.int64)


def whole(value: int, what: str) -> int:
    """``value`` as a whole number; ``what`` names it.

    Raises:
        BooksError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BooksError(Problem(what, _shown(value), "a whole number"))
    return int(value)


def count_of(value: int, what: str) -> int:
    """``value`` as a number of things, from 0 on; ``what`` names it.

    Raises:
        BooksError: it is none.
    """
    count = whole(value, what)
    if count < 0:
        raise BooksError(Problem(what, str(count), "a whole number from 0 on"))
    return count


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def ranges(starts: Int64 | Int32, counts: Int64) -> Int64:
    """start, start + 1 ... for each pair, one after the other: int64 [sum of counts]."""
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)


def indptr(counts: Int64) -> Int32:
    """Where the things of each count begin in one list, and the end of it: int32 [n + 1]."""
    found = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=found[1:])
    return found


def pages_of(slots: Int64, page_tokens: int) -> Int64:
    """The pages that ``slots`` lie in, each once, ascending: int64 [pages]."""
    return np.unique(slots // page_tokens)
