"""Words for the integers that the books deal in; all of them are int64, none is a bare number.

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


def int64(values: Iterable[int] | NDArray[np.integer]) -> Int64:
    """The values as int64 [n].

    Raises:
        TypeError: something that is no integer.
    """
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"integers, not {array.dtype}")
    return array.astype(np.int64)


def ranges(starts: Int64 | Int32, counts: Int64) -> Int64:
    """start, start + 1 ... for each pair, one after the other: int64 [sum of counts]."""
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)
