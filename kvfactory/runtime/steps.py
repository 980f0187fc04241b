"""A step as kernels see it: plain device arrays per table, at fixed addresses.

The arrays are views of the arena's step fields (``CachePlan.fields``); ``host`` are the same
numbers in numpy. Batch entries follow ``rows``; new tokens of entry b are
``q_indptr[b]:q_indptr[b + 1]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfactory.books import StepRecord
from kvfactory.planning.cacheplan import CachePlan, Field


@dataclass(frozen=True)
class PageArrays:
    """Room for the page lists of a step, int32, which a backend that wants them builds.

    ``indptr`` [batch + 1] and ``last_page`` [batch] as in FlashInfer, ``indices`` the pages.
    """

    indptr: Tensor
    last_page: Tensor
    indices: Tensor


@dataclass(frozen=True)
class GraphShape:
    """The fixed shape of a graph's step: ``batch`` requests with ``rows`` new tokens in all.

    ``each`` are those of every request, or 0 where they spread over the requests as they come.
    """

    batch: int
    rows: int
    each: int


@dataclass(frozen=True)
class TableArrays:
    """One page table's part of a step.

    ``pages`` int32 [max_requests + 1, row_pages] is the device table, shared by all steps: the
    page of position t of a request is ``pages[row, t // page_tokens]``, the sink 0 where it was
    released. ``slots`` int64 [tokens] are write slots (page * page_tokens + offset), ``kv_lengths``
    int32 [batch] the tokens readable after this step's writes, ``first_page`` int32 [batch] the
    first column that is still owned.
    """

    pages: Tensor
    slots: Tensor
    kv_lengths: Tensor
    first_page: Tensor
    lists: PageArrays | None = None


@dataclass(frozen=True)
class StateArrays:
    """One set of state slots' part of a step: ``slots`` int32 [batch], ``fresh`` int32 [batch]."""

    slots: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class Step:
    """An open step.

    ``rows`` int32 [batch], ``q_indptr`` int32 [batch + 1], ``prefix`` int32 [batch] the tokens
    before this step, ``positions`` int64 [tokens]. ``tables`` and ``states`` by table name.
    ``buffer`` numbers the places that steps live in: no two open steps or graphs have the same.
    """

    host: StepRecord
    rows: Tensor
    q_indptr: Tensor
    prefix: Tensor
    positions: Tensor
    tables: Mapping[str, TableArrays]
    states: Mapping[str, StateArrays]
    buffer: int = 0
    graph: GraphShape | None = None


class StepBuffers:
    """The arena's step fields, one set per step in flight and one for graphs, and their staging.

    A set is used again ``steps_in_flight`` steps later; on a CUDA device the copy out of its
    staging has been waited for by then, so planning never overwrites numbers still in transit.
    All graphs share a set, which is filled and read in the stream's order.
    """

    def __init__(self, plan: CachePlan, arena: Tensor) -> None:
        self._depth = plan.limits.steps_in_flight
        self._cuda = arena.device.type == "cuda"
        self._sets = [
            {(f.table, f.name): _view(arena, f, number * plan.step_bytes) for f in plan.fields}
            for number in range(self._depth + 1)
        ]
        turns = [*range(self._depth), *[self._depth] * self._depth]
        self._staging = [_staging(self._sets[number]) for number in turns]
        self._copied = [torch.cuda.Event() if self._cuda else None for _ in turns]  # type: ignore[no-untyped-call]
        self._graph_turn = 0
        self._tables = {
            table.name: arena[table.offset :][
                : 4 * (plan.limits.max_requests + 1) * table.row_pages
            ]
            .view(torch.int32)
            .view(-1, table.row_pages)
            for table in plan.tables
        }

    def update_tables(self, record: StepRecord) -> None:
        """Write the device table entries that changed since the last step."""
        for name, part in record.tables.items():
            if len(part.updates):
                rows, columns, pages = torch.from_numpy(part.updates).to(self.device).unbind(1)
                self._tables[name].index_put_((rows, columns), pages)

    @property
    def device(self) -> torch.device:
        """Where the arrays live."""
        return next(iter(self._sets[0].values())).device

    def fill(self, record: StepRecord) -> Step:
        """The device arrays of ``record``, in the set that its serial number names."""
        number = record.serial % self._depth
        return self._fill(record, number, number, number, None)

    def fill_graph(self, record: StepRecord, shape: GraphShape, graph: int) -> Step:
        """The device arrays of graph number ``graph`` for ``record``, padded to ``shape``."""
        turn = self._depth + self._graph_turn
        self._graph_turn = (self._graph_turn + 1) % self._depth
        return self._fill(record, self._depth, turn, self._depth + graph, shape)

    def _fill(
        self, record: StepRecord, number: int, turn: int, buffer: int, graph: GraphShape | None
    ) -> Step:
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        put = _Put(self._sets[number], self._staging[turn], self._cuda)
        step = Step(
            host=record,
            rows=put("", "rows", record.rows),
            q_indptr=put("", "q_indptr", record.q_indptr),
            prefix=put("", "prefix", record.prefix),
            positions=put("", "positions", record.positions),
            tables={
                name: TableArrays(
                    self._tables[name],
                    put(name, "slots", part.slots),
                    put(name, "kv_lengths", part.kv_lengths),
                    put(name, "first_page", part.first_page),
                    self._lists(number, name, len(record.rows)),
                )
                for name, part in record.tables.items()
            },
            states={
                name: StateArrays(put(name, "slots", part.slots), put(name, "fresh", part.fresh))
                for name, part in record.states.items()
            },
            buffer=buffer,
            graph=graph,
        )
        if event is not None:
            event.record()
        return step

    def _lists(self, number: int, table: str, batch: int) -> PageArrays:
        views = self._sets[number]
        return PageArrays(
            views[table, "indptr"][: batch + 1],
            views[table, "last_page"][:batch],
            views[table, "indices"],
        )

    def clear(self) -> None:
        """Point every entry of every device table at the sink."""
        for table in self._tables.values():
            table.zero_()


@dataclass(frozen=True)
class _Put:
    """Copies host numbers into one set of fields and hands out the filled part."""

    views: Mapping[tuple[str, str], Tensor]
    staging: Mapping[tuple[str, str], Tensor]
    cuda: bool

    def __call__(self, table: str, name: str, values: np.ndarray) -> Tensor:
        view, staged = self.views[table, name][: len(values)], self.staging[table, name]
        staged[: len(values)] = torch.from_numpy(np.ascontiguousarray(values))
        if self.cuda:
            view.copy_(staged[: len(values)], non_blocking=True)
        return view


def _staging(views: Mapping[tuple[str, str], Tensor]) -> Mapping[tuple[str, str], Tensor]:
    """Pinned host memory of the same sizes; on a CPU the views themselves."""
    if not next(iter(views.values())).is_cuda:
        return views
    return {
        key: torch.empty_like(view, device="cpu", pin_memory=True)
        for key, view in views.items()
        if key[1] not in ("indptr", "last_page", "indices")
    }


def _view(arena: Tensor, field: Field, shift: int) -> Tensor:
    dtype = {"int32": torch.int32, "int64": torch.int64}[field.dtype]
    start = field.offset + shift
    return arena[start : start + dtype.itemsize * field.elements].view(dtype)
