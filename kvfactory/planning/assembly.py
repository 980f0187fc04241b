"""Assembly: draft groups and a number of pages per table -> the arena, byte by byte.

The arena holds, in this order: one region per group, the constants, one device table per page
table, the fields of each open step, and the workspaces of backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvfactory.dtypes import itemsize
from kvfactory.kinds import align_up, ceil_div
from kvfactory.layouts import Placement, place
from kvfactory.planning.cacheplan import (
    ConstantPlan,
    Field,
    GroupPlan,
    Limits,
    PlanePlan,
    Row,
    StatePlan,
    TablePlan,
    TensorPlan,
)
from kvfactory.planning.grouping import Draft, TableKey
from kvfactory.planning.storage import plane_key

REGION_ALIGN_BYTES = 256


@dataclass(frozen=True)
class Sizes:
    """What sizing decides: ``pages`` by table, sink included (state slots for states)."""

    pages: Mapping[TableKey, int]
    limits: Limits


@dataclass(frozen=True)
class TableDraft:
    """A table before sizing: its spec groups, and the pages that a request can own and address."""

    name: str
    groups: tuple[str, ...]
    key: TableKey
    live_pages: int
    row_pages: int


class Arena:
    """A cursor over the arena that hands out aligned offsets and keeps the account."""

    def __init__(self, align_bytes: int) -> None:
        self.cursor = 0
        self.align_bytes = max(align_bytes, REGION_ALIGN_BYTES)
        self.rows: list[Row] = []

    def take(self, owner: str, what: str, num_bytes: int) -> int:
        """The offset of a fresh block; rounding its end up is a row of its own."""
        offset = self.cursor
        self.cursor = align_up(offset + num_bytes, self.align_bytes)
        self._note(owner, what, num_bytes)
        self._note(owner, "padding", self.cursor - offset - num_bytes)
        return offset

    def region(self, draft: Draft, pages: int, placement: Placement) -> int:
        """The offset of a group's region, its bytes split into data, scales, sink and padding."""
        offset, layers = self.cursor, len(draft.layers)
        self.cursor = align_up(offset + placement.num_bytes, self.align_bytes)
        page_bytes = {plane.key: plane.page_bytes * layers for plane in draft.placed.planes}
        scales = sum(size for key, size in page_bytes.items() if "." in key)
        data = sum(page_bytes.values()) - scales
        self._note(draft.name, "data", data * (pages - 1))
        self._note(draft.name, "scales", scales * (pages - 1))
        self._note(draft.name, "sink", data + scales)
        self._note(draft.name, "padding", self.cursor - offset - (data + scales) * pages)
        return offset

    def _note(self, owner: str, what: str, num_bytes: int) -> None:
        if num_bytes:
            self.rows.append(Row(owner, what, num_bytes))


def placement(draft: Draft, pages: int, align_bytes: int) -> Placement:
    """Where the planes of ``draft`` lie in a region of ``pages`` pages."""
    outer = {"layer": len(draft.layers), "page": pages}
    return place(draft.placed.patterns, draft.placed.planes, outer, align_bytes)


def lay_groups(
    arena: Arena,
    drafts: Sequence[Draft],
    names: Mapping[TableKey, str],
    sizes: Sizes,
    align_bytes: int,
) -> tuple[GroupPlan, ...]:
    """Group plans with regions and constants placed in ``arena``; no backend chosen yet."""
    groups = []
    for draft in drafts:
        pages = sizes.pages[draft.key]
        placed = placement(draft, pages, align_bytes)
        groups.append(_group(draft, names[draft.key], placed, arena.region(draft, pages, placed)))
    return tuple(
        replace(group, tensors=_constants(arena, group, draft))
        for group, draft in zip(groups, drafts, strict=True)
    )


def _group(draft: Draft, table: str, placed: Placement, offset: int) -> GroupPlan:
    tensors = []
    for stored in draft.stored:
        planes = []
        for plane in stored.planes:
            key = plane_key(stored.logical, plane)
            spot = placed.planes[key]
            spot = replace(spot, offset=spot.offset + offset)
            planes.append(PlanePlan(key, stored.logical.name, plane.part, plane.dtype, spot))
        options = tuple(sorted(stored.quant.options.items()))
        tensors.append(TensorPlan(stored.logical, stored.quant.name, options, tuple(planes), ()))
    return GroupPlan(
        name=draft.name,
        group=draft.group,
        kind=draft.kind,
        table=table,
        layers=draft.layers,
        page_slots=draft.page_slots,
        tokens_per_entry=draft.tokens_per_entry,
        layout=draft.placed.layout.text("k"),
        tensors=tuple(tensors),
        work=draft.work,
        offset=offset,
        num_bytes=placed.num_bytes,
        choice=None,
    )


def _constants(arena: Arena, group: GroupPlan, draft: Draft) -> tuple[TensorPlan, ...]:
    tensors = []
    for tensor, stored in zip(group.tensors, draft.stored, strict=True):
        tables = []
        for constant in stored.constants:
            num_bytes = 4 * len(group.layers) * constant.elements
            offset = arena.take(group.name, "constants", num_bytes)
            shape = tuple(extent for _, extent in constant.axes)
            tables.append(ConstantPlan(tensor.name, constant.name, shape, constant.default, offset))
        tensors.append(replace(tensor, constants=tuple(tables)))
    return tuple(tensors)


def lay_tables(
    arena: Arena, tables: Sequence[TableDraft], sizes: Sizes
) -> tuple[tuple[TablePlan, ...], tuple[StatePlan, ...]]:
    """Page tables with their device rows in ``arena``, and state slots, which need none."""
    pages: list[TablePlan] = []
    states: list[StatePlan] = []
    for table in tables:
        count = sizes.pages[table.key]
        if table.key.lifetime.name == "state":
            states.append(StatePlan(table.name, count, table.live_pages))
            continue
        num_bytes = 4 * (sizes.limits.max_requests + 1) * table.row_pages
        offset = arena.take(table.name, "table", num_bytes)
        lifetime, page_tokens = table.key
        pages.append(
            TablePlan(
                table.name, lifetime, page_tokens, count, table.row_pages, table.live_pages, offset
            )
        )
    return tuple(pages), tuple(states)


def lay_steps(
    arena: Arena, tables: Sequence[TableDraft], limits: Limits
) -> tuple[tuple[Field, ...], int]:
    """The device arrays of an open step, and the bytes of one step.

    There are ``steps_in_flight`` copies, and one that all graphs share. What the host sends comes
    first, what most steps send before what few do, so that one copy of the front carries it.
    """
    sent, made = _sent(tables, limits), _made(tables, limits)
    fields: list[Field] = []
    cursor, base = 0, arena.cursor
    for name, owner, dtype, elements in (*sent, *made):
        fields.append(Field(name, owner, dtype, elements, base + cursor, len(fields) < len(sent)))
        cursor = align_up(cursor + itemsize(dtype) * elements, 16)
    step_bytes = align_up(cursor, arena.align_bytes)
    arena.take("steps", "step arrays", step_bytes * (limits.steps_in_flight + 1))
    return tuple(fields), step_bytes


_Wanted = tuple[str, str, str, int]
"""Name, table, type and elements of a field."""


def _sent(tables: Sequence[TableDraft], limits: Limits) -> list[_Wanted]:
    """What the host alone knows; draft trees and encoder tokens last."""
    batch, tokens = limits.max_requests, limits.step_tokens
    fields = [
        ("rows", "", "int32", batch),
        ("q_indptr", "", "int32", batch + 1),
        ("prefix", "", "int32", batch),
    ]
    for table in tables:
        if table.key.lifetime.name == "state":
            fields += [("slots", table.name, "int32", batch), ("fresh", table.name, "int32", batch)]
        elif table.key.lifetime.name == "encoder":
            fields.append(("kv_lengths", table.name, "int32", batch))
    updates = sum(_updates(table, limits) for table in tables)
    fields += [("updates", "", "int32", 4 * updates), ("depths", "", "int32", tokens)]
    for table in tables:
        if table.key.lifetime.name == "encoder":
            written = batch * table.key.lifetime.tokens
            fields.append(("slots", table.name, "int64", written))
    return fields


def _updates(table: TableDraft, limits: Limits) -> int:
    """Entries of a device table that an ordinary step changes, and the end of one request.

    A step opens a page at the end of each request and releases one, or writes a whole prefill;
    more changes at once take a copy of their own.
    """
    if table.key.lifetime.name == "state":
        return 0
    prefill = ceil_div(limits.step_tokens, table.key.page_tokens)
    return 2 * limits.max_requests + prefill + table.row_pages


def _made(tables: Sequence[TableDraft], limits: Limits) -> list[_Wanted]:
    """What the device makes of the lengths and its tables, and what it learns at commits."""
    batch, tokens = limits.max_requests, limits.step_tokens
    fields = [("positions", "", "int64", tokens), ("rejected", "", "int32", batch)]
    for table in tables:
        if table.key.lifetime.name == "state":
            continue
        if table.key.lifetime.name != "encoder":
            fields += [
                ("slots", table.name, "int64", tokens),
                ("kv_lengths", table.name, "int32", batch),
            ]
        fields += [
            ("first_page", table.name, "int32", batch),
            ("indptr", table.name, "int32", batch + 1),
            ("last_page", table.name, "int32", batch),
            ("indices", table.name, "int32", batch * table.live_pages),
        ]
    return fields
