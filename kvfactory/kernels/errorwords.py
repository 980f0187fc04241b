"""Error words: what kernels report without anybody waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfactory.errors import BooksError, Problem


class ErrorWords:
    """One int64 word per table: 0, or an id outside the table's pool that a kernel was given.

    On a GPU the words are pinned host memory that kernels write through the bus, and only in that
    case, so reading them costs no copy and waits for nothing.
    """

    def __init__(self, tables: Sequence[str], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._tables = list(tables)
        self._words = torch.zeros(len(tables), dtype=torch.int64, pin_memory=pinned)
        self._host = self._words.numpy()

    def word(self, table: str) -> Tensor:
        """The word of ``table``, int64 [1]."""
        index = self._tables.index(table)
        return self._words[index : index + 1]

    def check(self) -> None:
        """Report what has arrived so far, and forget it.

        Raises:
            BooksError: the tables whose kernels met foreign ids; nothing was written for those.
        """
        if not self._host.any():
            return
        wrong = [
            Problem(f"table {name}", f"page or slot {found}", "ids in its pool")
            for name, found in zip(self._tables, self._host.tolist(), strict=True)
            if found
        ]
        self._host[:] = 0
        raise BooksError(*wrong)
