"""What the host sends of a step: numbers side by side, in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.books import StepRecord
from kvfactory.books.ids import Int32
from kvfactory.planning.cacheplan import CachePlan

Numbers = NDArray[Any]
"""Integers or flags."""

NO_UPDATES = np.zeros((0, 4), np.int32)


class Stage:
    """Host memory in the shape of a set's sent fields; on a CPU those fields themselves.

    On a GPU it is pinned. ``sent`` uint8 is the front of a set; ``wait`` before writing again.
    """

    def __init__(self, plan: CachePlan, sent: Tensor) -> None:
        self._host, self._copied = sent, None
        if sent.is_cuda:
            self._host = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        whole, base = self._host.numpy(), plan.fields[0].offset
        self._fields: dict[tuple[str, str], Numbers] = {}
        self._starts: dict[tuple[str, str], int] = {}
        for field in plan.fields:
            if field.sent:
                start = field.offset - base
                own = whole[start : start + field.num_bytes]
                self._fields[field.table, field.name] = own.view(field.dtype)
                self._starts[field.table, field.name] = start
        self._end = 0

    def wait(self) -> None:
        """Return when the last copy out of it has run: planning never overwrites what is sent."""
        if self._copied is not None:
            self._copied.synchronize()
        self._end = 0

    def put(self, table: str, name: str, values: Numbers) -> None:
        """Write the front of a field."""
        field = self._fields[table, name]
        field[: values.size] = values
        self._end = max(self._end, self._starts[table, name] + values.size * field.itemsize)

    def send(self, target: Tensor) -> None:
        """Copy what was written to ``target``, the front of a set, in the current stream."""
        if self._copied is not None:
            target[: self._end].copy_(self._host[: self._end], non_blocking=True)
            self._copied.record()


def sent_depths(record: StepRecord) -> Int32:
    """How far each new token of a draft tree is from the end of the prefix, int32 [tokens]."""
    found = np.zeros(len(record.positions), np.int32)
    counts = np.diff(record.q_indptr)
    own = int(record.q_indptr[-1])
    found[:own] = record.positions[:own] - np.repeat(record.prefix, counts)
    return found


def joined_updates(parts: Mapping[int, Int32]) -> Int32:
    """Changes of device tables as (table, row, column, page) int32 [n, 4]; ``parts`` by table."""
    size = sum(len(part) for part in parts.values())
    if not size:
        return NO_UPDATES
    found = np.empty((size, 4), np.int32)
    start = 0
    for table, part in parts.items():
        stop = start + len(part)
        found[start:stop, 0] = table
        found[start:stop, 1:] = part
        start = stop
    return found
