"""Where steps live: views of the arena's step fields and device tables, as the plan lays them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import CachePlan, Field

FieldViews = Mapping[tuple[str, str], Tensor]
"""(table, name) -> the whole field of one set; fields without a table have "" for it."""

DTYPES = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class StepSize:
    """How much of its fields a step fills.

    ``batch`` entries; ``tokens`` rows of new tokens, of which those behind the last entry's are
    padding. No entry has more than ``most_tokens`` new tokens, or ``most_pages`` pages listed in a
    table: these two only spread work. In a ``tree`` positions follow ``depths``.
    """

    batch: int
    tokens: int
    most_tokens: int
    most_pages: int
    tree: bool = False


def field_views(plan: CachePlan, arena: Tensor) -> list[FieldViews]:
    """The fields of every set: one per step in flight, then the one of all graphs."""
    return [
        {(f.table, f.name): _view(arena, f, number * plan.step_bytes) for f in plan.fields}
        for number in range(plan.limits.steps_in_flight + 1)
    ]


def table_views(plan: CachePlan, arena: Tensor) -> dict[str, Tensor]:
    """The device tables by name, int32 [max_requests + 1, row_pages]."""
    rows = plan.limits.max_requests + 1
    return {
        table.name: arena[table.offset :][: 4 * rows * table.row_pages]
        .view(torch.int32)
        .view(rows, table.row_pages)
        for table in plan.tables
    }


def _view(arena: Tensor, field: Field, shift: int) -> Tensor:
    start = field.offset + shift
    return arena[start : start + field.num_bytes].view(DTYPES[field.dtype])
