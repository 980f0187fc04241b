"""Step buffers: a step's numbers go to the device in one copy, and the rest is made of them there.

A set of fields lives in the arena for every step in flight, and one for all graphs. A set is used
again ``steps_in_flight`` steps later, and its staging too.

A step is sent when its arrays are first read, or not at all where it only fills a graph. What must
not wait is a change of the device tables: it travels with the step's arrays or with the graph's,
whichever is sent first, and the next step is not begun before. So the tables change in the order
of the steps, and an index is made of them as they were left by its own step; but for one that is
made after the step filled a graph and another was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvfactory.books import StepRecord
from kvfactory.books.ids import Int32, Int64
from kvfactory.kinds import ceil_div
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.pools.ids import sent
from kvfactory.steps.fields import StepSize, field_views, table_views
from kvfactory.steps.indexing import Indexer
from kvfactory.steps.staging import (
    NO_UPDATES,
    Stage,
    joined_updates,
    sent_depths,
)
from kvfactory.steps.step import (
    GraphShape,
    PageArrays,
    StateArrays,
    Step,
    StepArrays,
    TableArrays,
)

MOST_SHAPES = 128
"""Shapes of steps whose views are remembered."""


@dataclass
class Filled:
    """What a set holds: a step's record, padded in graphs, and its size; ``made`` once sent."""

    record: StepRecord
    size: StepSize
    made: bool = False


@dataclass(frozen=True)
class Shortened:
    """The committed step ``record``, of which not all tokens stayed.

    ``lost`` int32 [batch] are those that did not; None where the step's field ``rejected`` has
    them, on the device.
    """

    record: StepRecord
    lost: Int32 | None


class StepBuffers:
    """The arena's step fields and device tables, and what the host sends to them.

    All graphs share a set, which is filled and read in the stream's order; its staging takes turns,
    so that it can be filled for every step in flight.
    """

    def __init__(self, plan: CachePlan, arena: Tensor, indexer: Indexer) -> None:
        self._plan, self.indexer = plan, indexer
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
        self._arrays: dict[tuple[int, ...], StepArrays] = {}
        self._waiting: Filled | None = None
        self._encoders = [t.name for t in plan.tables if t.lifetime.name == "encoder"]

    # ---- filling -----------------------------------------------------------------------------

    def fill(self, record: StepRecord) -> Step:
        """The step of ``record``, in the set that its serial number names.

        It is made at once where lengths are to be corrected that the host does not know yet.
        """
        self._settle()
        number = record.serial % self._depth
        self._held[number] = self._waiting = Filled(record, self._size(record))
        earlier = range(record.since, record.serial)
        if short := [self._shortened[n] for n in earlier if n in self._shortened]:
            self._make(number, short)
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
        held = self._held[self._depth] = Filled(record, self._size(record), made=True)
        self._send(record, self._depth, turn, self._updates_of(source))
        own = source.serial % self._depth
        if not record.settled.all() and self._held[own].made:
            batch = self._held[own].size.batch
            exact = self._sets[own]["", "prefix"][:batch]
            self._sets[self._depth]["", "prefix"][:batch].copy_(exact)
        self.indexer.build(self._depth, held.size)
        return self._step(record, self._depth, self._depth + graph, shape)

    def _settle(self) -> None:
        """Make the step whose changes of the device tables are not there yet, if any."""
        if self._waiting is not None:
            self._make(self._waiting.record.serial % self._depth)

    def _make(self, number: int, earlier: Sequence[Shortened] = ()) -> None:
        """Send the step that set ``number`` holds, unless it is there, and build its index.

        What ``earlier`` steps have lost is taken off its lengths.
        """
        held = self._held[number]
        if held.made and not earlier:
            return
        if not held.made:
            held.made = True
            self._send(held.record, number, number, self._updates_of(held.record))
        for step in earlier:
            self._subtract(step, number)
        self.indexer.build(number, held.size)

    def _updates_of(self, record: StepRecord) -> Int32:
        """Changes of device tables that ``record`` brings, int32 [n, 4]; none if they are there."""
        if self._waiting is None or self._waiting.record is not record:
            return NO_UPDATES
        self._waiting = None
        numbers = enumerate(self._plan.tables)
        return joined_updates({n: record.tables[t.name].updates for n, t in numbers})

    def filled_by(self, source: StepRecord, shape: GraphShape) -> bool:
        """Whether the graphs' arrays are those of ``source`` in ``shape``."""
        held = self._graph_source
        return held is not None and held[0] is source and held[1] == shape

    def holds(self, step: Step) -> bool:
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
            stage.put("", "depths", sent_depths(record))
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
            there = fields["", "updates"].view(-1, 4) if fits else self._sent_apart(updates)
            self.indexer.update(there, len(updates))

    def _sent_apart(self, numbers: Int32 | Int64) -> Tensor:
        """``numbers`` on the device, by a copy of their own."""
        return sent(torch.from_numpy(np.ascontiguousarray(numbers)), self.device)

    def _size(self, record: StepRecord) -> StepSize:
        batch, tokens = len(record.rows), len(record.positions)
        longest = int(record.lengths.max(initial=0))
        return StepSize(
            batch=batch,
            tokens=tokens,
            most_tokens=record.most,
            most_pages=max(
                (min(t.live_pages, ceil_div(longest, t.page_tokens)) for t in self._plan.tables),
                default=0,
            ),
            tree=record.parents is not None,
        )

    # ---- lengths that turn out shorter -------------------------------------------------------

    def shorten(self, record: StepRecord, accepted: Tensor | Int64 | None) -> None:
        """Of the step ``record`` only ``accepted`` int [batch] tokens stay; None for all.

        The counts may be on the device. Steps that were made before this was known, in the belief
        that all would stay, get shorter there, and so do those yet to come that do not know.
        """
        serial = record.serial
        kept = range(serial - self._depth + 1, serial)
        self._shortened = {n: self._shortened[n] for n in kept if n in self._shortened}
        if accepted is None or not len(record.rows):
            return
        counts, lost = np.diff(record.q_indptr), None
        if isinstance(accepted, Tensor):
            self._reject(serial % self._depth, counts, accepted)
        else:
            lost = (counts - accepted).astype(np.int32)
            if not lost.any():
                return
        self._shortened[serial] = shortened = Shortened(record, lost)
        for later, held in self._held.items():
            if held.record.since <= serial < held.record.serial:
                self._make(later, [shortened])

    def _reject(self, number: int, counts: Int32, accepted: Tensor) -> None:
        """Fill ``rejected`` of set ``number``: ``counts`` int32 [batch] without ``accepted``."""
        rejected = self._sets[number]["", "rejected"][: len(counts)]
        if (counts == counts[0]).all():
            rejected.fill_(int(counts[0]))
        else:
            rejected.copy_(self._sent_apart(counts))
        rejected.sub_(accepted)

    def _subtract(self, earlier: Shortened, number: int) -> None:
        """Take what ``earlier`` has lost off the lengths in set ``number``."""
        source, rows = earlier.record.rows, self._held[number].record.rows
        prefix = self._sets[number]["", "prefix"]
        if earlier.lost is not None:
            by_row = np.zeros(self._plan.limits.max_requests + 1, np.int32)
            by_row[source] = earlier.lost
            prefix[: len(rows)].sub_(self._sent_apart(by_row[rows]))
            return
        lost = self._sets[earlier.record.serial % self._depth]["", "rejected"][: len(source)]
        if np.array_equal(rows[: len(source)], source):
            prefix[: len(source)].sub_(lost)
            return
        _, to, of = np.intersect1d(rows, source, return_indices=True)
        place, entry = self._sent_apart(np.stack([to, of]))
        prefix[place] -= lost[entry]

    # ---- arrays ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the arrays live."""
        return self._fronts[0].device

    def _step(self, record: StepRecord, number: int, buffer: int, graph: GraphShape | None) -> Step:
        """``record`` in set ``number``."""
        return Step(record, partial(self._read, record, number), buffer, graph)

    def _read(self, record: StepRecord, number: int) -> StepArrays:
        """The arrays of ``record`` in set ``number``, made unless another step is there by now."""
        if self._held[number].record is record:
            self._make(number)
        written = [len(record.tables[name].slots) for name in self._encoders]
        key = (number, len(record.rows), len(record.positions), *written)
        arrays = self._arrays.get(key)
        if arrays is None:
            if len(self._arrays) >= MOST_SHAPES:
                self._arrays.clear()
            arrays = self._arrays[key] = self._views(record, number)
        return arrays

    def _views(self, record: StepRecord, number: int) -> StepArrays:
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
        return StepArrays(
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
        self._settle()
        self._tables[name].copy_(self._sent_apart(pages.astype(np.int32)))

    def clear(self) -> None:
        """Point every entry of every device table at the sink."""
        self._settle()
        for table in self._tables.values():
            table.zero_()
