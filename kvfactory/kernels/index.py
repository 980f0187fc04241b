"""The index of a step on a GPU, for all tables in one launch: see ``steps.indexing``.

It is made of lengths that may live on the device alone, in fixed buffers of the plan, so a graph
can replay it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from kvfactory.kernels.baked import Baked
from kvfactory.kernels.index_kernel import build_index, update_tables
from kvfactory.kernels.launch import Argument, Kernel
from kvfactory.kinds import ceil_div
from kvfactory.planning.cacheplan import CachePlan, TablePlan
from kvfactory.steps.fields import StepSize, field_views
from kvfactory.steps.indexing import write_positions

PAGES, TOKENS = 256, 128
"""Pages and new tokens of an entry that a program takes at once."""

MOST_PARTS = 64

UPDATES = 256
"""Table entries that a program writes."""


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
    depths: int
    positions: int
    positions_table: int
    tables: tuple[TableIndex, ...]


class IndexBuild:
    """Builds the index of ``plan``'s steps on ``arena``, on a GPU (or under the interpreter)."""

    def __init__(self, plan: CachePlan, arena: Tensor) -> None:
        self._arena, self._step_bytes = arena, plan.step_bytes
        self._spec, self._sets = index_spec(plan), field_views(plan, arena)
        self._names = [table.name for table in plan.tables]
        self._batch_block = min(1024, max(16, 1 << (plan.limits.max_requests - 1).bit_length()))
        self._update = self._make_update()
        self._kernel = cache(self._make)

    def kernels(self) -> tuple[Kernel, ...]:
        """All that it launches, for a warm-up: linear steps, draft trees, table updates."""
        return self._kernel(False), self._kernel(True), self._update

    def update(self, updates: Tensor, count: int) -> None:
        """Write the first ``count`` of ``updates`` int32 [n, 4] to the device tables.

        They are (table, row, column, page); no entry is named twice.
        """
        self._update.launch(ceil_div(count, UPDATES), self._arena, updates, count)

    def build(self, number: int, size: StepSize) -> None:
        """Fill the fields that the device makes, of the step in set ``number``."""
        wanted = max(1, ceil_div(size.most_tokens, TOKENS), ceil_div(size.most_pages, PAGES))
        parts = min(MOST_PARTS, wanted)
        programs = parts * size.batch * len(self._spec.tables)
        shift = number * self._step_bytes
        kernel = self._kernel(size.tree)
        kernel.launch(programs, self._arena, shift, size.batch, size.tokens, parts)
        if self._spec.positions_table < 0:
            write_positions(self._sets[number], size)
        if not programs:
            for name in self._names:
                self._sets[number][name, "indptr"][:1].zero_()

    def _make(self, tree: bool) -> Kernel:
        arguments = {
            "arena": Argument("*u8", aligned=True),
            "shift": Argument("i64", aligned=True),
            "batch": Argument("i32"),
            "rows": Argument("i32"),
            "parts": Argument("i32"),
        }
        baked = {
            "SPEC": self._spec,
            "TREE": tree,
            "BATCH": self._batch_block,
            "BLOCK": PAGES,
            "TOKENS": TOKENS,
        }
        return Kernel(build_index, arguments, baked)

    def _make_update(self) -> Kernel:
        arguments = {
            "arena": Argument("*u8", aligned=True),
            "updates": Argument("*i32", aligned=True),
            "n": Argument("i32"),
        }
        return Kernel(update_tables, arguments, {"SPEC": self._spec, "BLOCK": UPDATES})


def index_spec(plan: CachePlan) -> IndexSpec:
    """What the kernel bakes in."""
    offsets = {(field.table, field.name): field for field in plan.fields}
    written = [i for i, table in enumerate(plan.tables) if table.lifetime.name != "encoder"]
    shared = ("rows", "q_indptr", "prefix", "depths", "positions")
    return IndexSpec(
        positions_table=written[0] if written else -1,
        **{name: offsets["", name].offset for name in shared},
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
