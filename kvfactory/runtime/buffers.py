"""Step buffers: a step's numbers go to the device in one copy, and the rest is made of them there.

A set of fields lives in the arena for every step in flight, and one for all graphs. A set is used
again ``steps_in_flight`` steps later, and its staging too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfactory.books import StepRecord
from kvfactory.books.ids import Int32, Int64
from kvfactory.kinds import ceil_div
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.runtime.fields import StepSize, field_views, table_views
from kvfactory.runtime.indexing import Indexer, TorchIndexer
from kvfactory.runtime.staging import (
    NO_UPDATES,
    Stage,
    depths_of,
    joined_updates,
)
from kvfactory.runtime.steps import GraphShape, PageArrays, StateArrays, Step, TableArrays

MOST_SHAPES = 128
"""Shapes of steps whose views are remembered."""


@dataclass(frozen=True)
class Filled:
    """What a set holds: a step's record, padded in graphs, and its size."""

    record: StepRecord
    size: StepSize


@dataclass(frozen=True)
class Shortened:
    """A committed step of ``batch`` sequences of which not all tokens stayed.

    ``rejected`` int32 [batch], None where they are in the step's field of that name already.
    """

    serial: int
    batch: int
    rejected: Int32 | None


class Arrays(NamedTuple):
    """The views that steps of one size share, in one set."""

    rows: Tensor
    q_indptr: Tensor
    prefix: Tensor
    positions: Tensor
    tables: Mapping[str, TableArrays]
    states: Mapping[str, StateArrays]


def indexer_of(plan: CachePlan, arena: Tensor) -> Indexer:
    """What makes indices of steps: one launch on a GPU, torch elsewhere."""
    if not arena.is_cuda:
        return TorchIndexer(plan, arena)
    from kvfactory.kernels.index import IndexBuild

    return IndexBuild(plan, arena)


class StepBuffers:
    """The arena's step fields and device tables, and what the host sends to them.

    All graphs share a set, which is filled and read in the stream's order; its staging takes turns,
    so that it can be filled for every step in flight.
    """

    def __init__(self, plan: CachePlan, arena: Tensor) -> None:
        self._plan, self.indexer = plan, indexer_of(plan, arena)
        self._depth = plan.limits.steps_in_flight
        self._sets = field_views(plan, arena)
        self._tables = table_views(plan, arena)
        base = plan.fields[0].offset
        stop = max(field.offset + field.num_bytes for field in plan.fields if field.sent)
        shifts = [number * plan.step_bytes for number in range(self._depth + 1)]
        self._fronts = [arena[base + shift : stop + shift] for shift in shifts]
        turns = [*range(self._depth), *[self._depth] * self._depth]
        self._stages = [Stage(plan, self._fronts[n]) for n in turns if not arena.is_meta]
        self._graph_turn = 0
        self._graph_source: tuple[StepRecord, GraphShape] | None = None
        self._held: dict[int, Filled] = {}
        self._shortened: dict[int, Shortened] = {}
        self._arrays: dict[tuple[int, ...], Arrays] = {}
        self._encoders = [t.name for t in plan.tables if t.lifetime.name == "encoder"]

    # ---- filling -----------------------------------------------------------------------------

    def fill(self, record: StepRecord) -> Step:
        """The device arrays of ``record``, in the set that its serial number names.

        Device table entries that changed since the last step are written first.
        """
        number = record.serial % self._depth
        numbers = enumerate(self._plan.tables)
        updates = joined_updates({n: record.tables[t.name].updates for n, t in numbers})
        self._send(record, number, number, updates)
        for earlier in range(record.since, record.serial):
            if earlier in self._shortened:
                self._subtract(self._shortened[earlier], number)
        self.indexer.build(number, self._held[number].size)
        return self._step(record, number, number, None)

    def fill_graph(
        self, record: StepRecord, shape: GraphShape, graph: int, source: StepRecord
    ) -> Step:
        """The device arrays of graph number ``graph``: ``record`` is ``source`` in ``shape``.

        Lengths are those that the step's own arrays have by now.
        """
        self._graph_source = source, shape
        turn = self._depth + self._graph_turn
        self._graph_turn = (self._graph_turn + 1) % self._depth
        self._send(record, self._depth, turn, NO_UPDATES)
        if not record.settled.all():
            own = record.serial % self._depth
            batch = self._held[own].size.batch
            exact = self._sets[own]["", "prefix"][:batch]
            self._sets[self._depth]["", "prefix"][:batch].copy_(exact)
        self.indexer.build(self._depth, self._held[self._depth].size)
        return self._step(record, self._depth, self._depth + graph, shape)

    def filled_by(self, source: StepRecord, shape: GraphShape) -> bool:
        """Whether the graphs' arrays are those of ``source`` in ``shape``."""
        held = self._graph_source
        return held is not None and held[0] is source and held[1] == shape

    def hold(self, step: Step) -> bool:
        """Whether the arrays of ``step`` are ours and still its own; of graphs it is not known."""
        if step.graph is not None:
            return True
        held = self._held.get(step.buffer)
        return held is not None and held.record is step.host

    def _send(self, record: StepRecord, number: int, turn: int, updates: Int32) -> None:
        """Numbers of ``record`` and table ``updates`` int32 [n, 4] to set ``number``."""
        stage, fields = self._stages[turn], self._sets[number]
        stage.wait()
        stage.put("", "rows", record.rows)
        stage.put("", "q_indptr", record.q_indptr)
        stage.put("", "prefix", record.prefix)
        for name, state in record.states.items():
            stage.put(name, "slots", state.slots)
            stage.put(name, "fresh", state.fresh)
        if record.parents is not None:
            stage.put("", "depths", depths_of(record))
        for name in self._encoders:
            part = record.tables[name]
            stage.put(name, "kv_lengths", part.kv_lengths)
            if len(part.slots):
                stage.put(name, "slots", part.slots)
        fits = updates.size <= fields["", "updates"].numel()
        if fits and len(updates):
            stage.put("", "updates", updates.reshape(-1))
        stage.send(self._fronts[number])
        if len(updates):
            sent = fields["", "updates"].view(-1, 4) if fits else self._sent_apart(updates)
            self.indexer.update(sent, len(updates))
        self._held[number] = Filled(record, self._size(record))

    def _sent_apart(self, numbers: Int32 | Int64) -> Tensor:
        """``numbers`` on the device, by a copy of their own."""
        host = torch.from_numpy(np.ascontiguousarray(numbers))
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _size(self, record: StepRecord) -> StepSize:
        batch, tokens = len(record.rows), len(record.positions)
        longest = int(record.lengths.max(initial=0))
        return StepSize(
            batch=batch,
            tokens=tokens,
            most_tokens=1 if tokens == batch else int(np.diff(record.q_indptr).max(initial=0)),
            most_pages=max(
                (min(t.live_pages, ceil_div(longest, t.page_tokens)) for t in self._plan.tables),
                default=0,
            ),
            tree=record.parents is not None,
        )

    # ---- lengths that turn out shorter -------------------------------------------------------

    def commit(self, record: StepRecord, accepted: Tensor | Int64 | None) -> None:
        """Of the step ``record`` only ``accepted`` int [batch] tokens stay; None for all.

        The counts may be on the device. Steps that were made before this was known, in the belief
        that all would stay, get shorter there, and so do those yet to come that do not know.
        """
        serial, number = record.serial, record.serial % self._depth
        kept = range(serial - self._depth + 1, serial)
        self._shortened = {n: self._shortened[n] for n in kept if n in self._shortened}
        if accepted is None:
            return
        batch, lost = len(record.rows), None
        if isinstance(accepted, Tensor):
            bounds = self._sets[number]["", "q_indptr"][: batch + 1]
            self._sets[number]["", "rejected"][:batch] = bounds.diff() - accepted
        else:
            lost = (np.diff(record.q_indptr) - accepted).astype(np.int32)
            if not lost.any():
                return
        self._shortened[serial] = shortened = Shortened(serial, batch, lost)
        for later, held in self._held.items():
            if held.record.since <= serial < held.record.serial:
                self._subtract(shortened, later)
                self.indexer.build(later, held.size)

    def _subtract(self, earlier: Shortened, number: int) -> None:
        """Take the rejected tokens of ``earlier`` off the lengths in set ``number``."""
        source, batch = self._sets[earlier.serial % self._depth], earlier.batch
        target, size = self._sets[number], self._held[number].size
        rejected = source["", "rejected"][:batch]
        if earlier.rejected is not None:
            rejected.copy_(self._sent_apart(earlier.rejected))
        by_row = rejected.new_zeros(self._plan.limits.max_requests + 1)
        by_row[source["", "rows"][:batch].long()] = rejected
        rows = target["", "rows"][: size.batch].long()
        target["", "prefix"][: size.batch] -= by_row[rows]

    # ---- arrays ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the arrays live."""
        return self._fronts[0].device

    def _step(self, record: StepRecord, number: int, buffer: int, graph: GraphShape | None) -> Step:
        """``record`` with the views of set ``number`` that it fills."""
        written = [len(record.tables[name].slots) for name in self._encoders]
        key = (number, len(record.rows), len(record.positions), *written)
        arrays = self._arrays.get(key)
        if arrays is None:
            if len(self._arrays) >= MOST_SHAPES:
                self._arrays.clear()
            arrays = self._arrays[key] = self._views(record, number)
        return Step(record, *arrays, buffer, graph)

    def _views(self, record: StepRecord, number: int) -> Arrays:
        fields, batch, tokens = self._sets[number], len(record.rows), len(record.positions)
        tables = {}
        for name, pages in self._tables.items():
            written = len(record.tables[name].slots) if name in self._encoders else tokens
            tables[name] = TableArrays(
                pages=pages,
                slots=fields[name, "slots"][:written],
                kv_lengths=fields[name, "kv_lengths"][:batch],
                first_page=fields[name, "first_page"][:batch],
                lists=PageArrays(
                    indptr=fields[name, "indptr"][: batch + 1],
                    last_page=fields[name, "last_page"][:batch],
                    indices=fields[name, "indices"],
                ),
            )
        states = {
            state.name: StateArrays(
                fields[state.name, "slots"][:batch], fields[state.name, "fresh"][:batch]
            )
            for state in self._plan.states
        }
        return Arrays(
            rows=fields["", "rows"][:batch],
            q_indptr=fields["", "q_indptr"][: batch + 1],
            prefix=fields["", "prefix"][:batch],
            positions=fields["", "positions"][:tokens],
            tables=tables,
            states=states,
        )

    # ---- tables ------------------------------------------------------------------------------

    def set_table(self, name: str, pages: Int64) -> None:
        """Write a device table whole, from ``pages`` int64 [rows, row_pages]."""
        self._tables[name].copy_(self._sent_apart(pages.astype(np.int32)))

    def clear(self) -> None:
        """Point every entry of every device table at the sink."""
        for table in self._tables.values():
            table.zero_()
