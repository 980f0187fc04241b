"""The index of a step: what attention reads, from lengths that may live on the device alone.

Given are the step's ``rows``, ``q_indptr``, ``prefix`` and the device tables. Built, for all tables
in one launch and without looking at the host: ``positions``, ``slots``, ``kv_lengths``,
``first_page`` (moved up to what a window or chunk still shows), and the page lists ``indptr``,
``indices`` and ``last_page``. All are fixed buffers of the plan, so a graph can replay it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvfactory.kernels.baked import Baked
from kvfactory.kernels.index_kernel import build_index
from kvfactory.kernels.launch import Argument, Kernel
from kvfactory.kinds import ceil_div
from kvfactory.planning.cacheplan import CachePlan, TablePlan

PAGES, TOKENS = 256, 128
"""Pages and new tokens of an entry that a program takes at once."""

MOST_PARTS = 64


@dataclass(frozen=True, repr=False, eq=False)
class TableIndex(Baked):
    """One table: its lifetime (``reach`` in tokens) and byte offsets of its arrays."""

    page_tokens: int
    row_pages: int
    lifetime: str
    reach: int
    pages: int
    slots: int
    kv_lengths: int
    first_page: int
    indptr: int
    last_page: int
    indices: int
    capacity: int


@dataclass(frozen=True, repr=False, eq=False)
class IndexSpec(Baked):
    """All tables, and byte offsets of the arrays that they share.

    ``positions_table`` is the table whose programs also write the positions.
    """

    rows: int
    q_indptr: int
    prefix: int
    positions: int
    positions_table: int
    tables: tuple[TableIndex, ...]


class IndexBuild:
    """Builds the index of ``plan``'s steps on ``arena``, on a GPU (or under the interpreter)."""

    def __init__(self, plan: CachePlan, arena: Tensor) -> None:
        self._arena, self._step_bytes = arena, plan.step_bytes
        self._depth = plan.limits.steps_in_flight
        self._spec = index_spec(plan)
        self._batch_block = min(1024, max(16, 1 << (plan.limits.max_requests - 1).bit_length()))
        self._kernel = cache(self._make)

    def warm(self) -> None:
        """Compile and load both forms: linear steps and draft trees."""
        self._kernel(True).warm()
        self._kernel(False).warm()

    def build(
        self, number: int, batch: int, most_tokens: int, most_pages: int, tree: bool = False
    ) -> None:
        """Fill the fields of the open step with serial ``number``, of ``batch`` entries.

        ``most_tokens`` and ``most_pages`` are the most new tokens and listed pages of an entry, or
        more: they only spread the work. A ``tree`` step keeps the positions that it was given.
        """
        wanted = max(1, ceil_div(most_tokens, TOKENS), ceil_div(most_pages, PAGES))
        parts = min(MOST_PARTS, wanted)
        programs = parts * batch * len(self._spec.tables)
        shift = number % self._depth * self._step_bytes
        self._kernel(not tree).launch(programs, self._arena, shift, batch, parts)

    def _make(self, positions: bool) -> Kernel:
        arguments = {
            "arena": Argument("*u8", aligned=True),
            "shift": Argument("i64", aligned=True),
            "batch": Argument("i32"),
            "parts": Argument("i32"),
        }
        baked = {
            "SPEC": self._spec,
            "POSITIONS": positions,
            "BATCH": self._batch_block,
            "BLOCK": PAGES,
            "TOKENS": TOKENS,
        }
        return Kernel(build_index, arguments, baked)


def index_spec(plan: CachePlan) -> IndexSpec:
    """What the kernel bakes in."""
    offsets = {(field.table, field.name): field for field in plan.fields}
    written = [i for i, table in enumerate(plan.tables) if table.lifetime.name != "encoder"]
    return IndexSpec(
        positions_table=written[0] if written else -1,
        **{name: offsets["", name].offset for name in ("rows", "q_indptr", "prefix", "positions")},
        tables=tuple(_table(plan, table) for table in plan.tables),
    )


def _table(plan: CachePlan, table: TablePlan) -> TableIndex:
    own = {field.name: field for field in plan.fields if field.table == table.name}
    names = ("slots", "kv_lengths", "first_page", "indptr", "last_page", "indices")
    return TableIndex(
        page_tokens=table.page_tokens,
        row_pages=table.row_pages,
        lifetime=table.lifetime.name,
        reach=table.lifetime.tokens,
        pages=table.offset,
        capacity=own["indices"].elements,
        **{name: own[name].offset for name in names},
    )


def reference_index(
    plan: CachePlan, arena: Tensor, number: int, batch: int, tree: bool = False
) -> Mapping[tuple[str, str], Tensor]:
    """What ``IndexBuild.build`` fills, computed with torch from the same inputs.

    (table, field) -> the filled part; fields without a table have the name "" for it.
    """
    shift = number % plan.limits.steps_in_flight * plan.step_bytes
    fields = {(f.table, f.name): f for f in plan.fields}

    def given(table: str, name: str, elements: int) -> Tensor:
        start = fields[table, name].offset + shift
        return arena[start : start + 4 * elements].view(torch.int32).long()

    rows, bounds = given("", "rows", batch), given("", "q_indptr", batch + 1)
    prefix = given("", "prefix", batch)
    entry = torch.repeat_interleave(torch.arange(batch, device=arena.device), bounds.diff())
    token = torch.arange(len(entry), device=arena.device) - bounds[entry]
    positions = prefix[entry] + token
    found = {} if tree else {("", "positions"): positions}
    for table in plan.tables:
        size = (plan.limits.max_requests + 1) * table.row_pages
        pages = arena[table.offset :][: 4 * size].view(torch.int32).view(-1, table.row_pages).long()
        p, name = table.page_tokens, table.name
        lengths = prefix + bounds.diff()
        if table.lifetime.name == "encoder":
            lengths = given(name, "kv_lengths", batch)
        else:
            page = pages[rows[entry], positions // p]
            found[name, "slots"] = page * p + positions % p
        seen = [table.lifetime.first_visible(n) // p for n in prefix.tolist()]
        first = given(name, "first_page", batch).maximum(torch.tensor(seen, device=arena.device))
        counts = (ceil_div_tensor(lengths, p) - first).clamp(min=0)
        listed = [
            pages[row, start : start + many]
            for row, start, many in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True)
        ]
        found[name, "kv_lengths"], found[name, "first_page"] = lengths, first
        found[name, "indptr"] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        found[name, "last_page"] = (lengths + p - 1) % p + 1
        found[name, "indices"] = torch.cat(listed)
    return found


def ceil_div_tensor(a: Tensor, b: int) -> Tensor:
    """a / b rounded up, for a >= 0."""
    return (a + b - 1) // b
