"""The work of a step as a whole: opened from the books' record or foreign ids, and committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvfactory.books import Accepted, Committed, StepRecord
from kvfactory.books import Sequence as SequenceId
from kvfactory.books.ids import Int64
from kvfactory.cache.arguments import check_on_host, check_step
from kvfactory.cache.gate import Gates
from kvfactory.cache.parts import Parts, check_storage
from kvfactory.errors import BooksError, Problem
from kvfactory.states import DeviceCounts, StateStore
from kvfactory.steps.foreign import ForeignBatch, foreign_record
from kvfactory.steps.step import Step


class StepWork:
    """What a cache's steps do to its pools, its states and its device tables."""

    def __init__(self, parts: Parts, states: StateStore, gates: Gates) -> None:
        self._parts, self._states, self._gates = parts, states, gates
        self._foreign_steps = 0
        self._foreign = False

    def extend(
        self,
        sequences: Sequence[SequenceId],
        new_tokens: int | Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor | None,
    ) -> Step:
        """``Cache.extend``."""
        check_storage(self._parts)
        check_on_host(new_tokens, "new_tokens")
        check_on_host(parents, "parents")
        counts = new_tokens.tolist() if isinstance(new_tokens, Tensor) else new_tokens
        tree = parents.numpy() if isinstance(parents, Tensor) else parents
        books = self._parts.books
        if self._gates:
            self.check_arrived("extend", books.shared_tails(sequences, counts))
            self.check_arrived("extend", books.due_sources())
        return self._open(books.extend(sequences, counts, tree))

    def check_arrived(self, path: str, ids: Mapping[str, Int64]) -> None:
        """Refuse to copy pages or state slots ``ids``, by table, that a load may still fill.

        Raises:
            BooksError: which table's.
        """
        wrong = [
            Problem(
                f"{path}, table {group.table}",
                "a copy of what a closed gate still awaits",
                f"group {group.name} loaded",
                "wait until the gate is open; gate(sequences=) says which pages it is for",
            )
            for group in self._parts.plan.groups
            if group.table in ids
            and self._gates.awaited(group.layers, group.table, ids[group.table])
        ]
        if wrong:
            raise BooksError(*wrong)

    def check_states(self, path: str, sequence: SequenceId) -> None:
        """Refuse a copy of the states of ``sequence`` that a load may still fill.

        Raises:
            BooksError: which table's, or a stale handle.
        """
        if self._gates:
            places = self._parts.books.state_places(sequence)
            self.check_arrived(path, {name: np.array([at]) for name, at in places.items() if at})

    def _open(self, record: StepRecord) -> Step:
        """Copy shared pages and states that this step writes, clear fresh states, fill arrays."""
        parts = self._parts
        for group, pool in parts.stored():
            if group.table in record.tables:
                if len(copies := record.tables[group.table].copies):
                    self._gates.order(group.layers)
                    pool.copy_pages(copies)
            elif group.table in record.states and len(record.states[group.table].copies):
                self._gates.order(group.layers)
        self._states.begin(record)
        if self._foreign:
            self._foreign = False
            for table in parts.plan.tables:
                parts.buffers.set_table(table.name, parts.books.rows(table.name))
        return self._fill(record)

    def foreign(self, batch: ForeignBatch) -> Step:
        """The step of an engine's own ids; the device tables are the engine's from then on."""
        check_storage(self._parts)
        record = foreign_record(self._parts.plan, self._parts.books, batch, self._foreign_steps)
        self._foreign_steps += 1
        self._foreign = True
        self._states.begin(record)
        return self._fill(record)

    def _fill(self, record: StepRecord) -> Step:
        """The device arrays of ``record``, and what backends plan for it."""
        step = self._parts.buffers.fill(record)
        for runner in self._parts.runners.values():
            runner.prepare(step)
        for runner in self._parts.runners.values():
            runner.begin(step)
        return step

    def commit(self, step: Step, accepted: Accepted | Tensor) -> Committed:
        """``Cache.commit``: books, lengths on the device, states, and rows that move."""
        parts = self._parts
        if parts.errors is not None:
            parts.errors.check()
        check_step(step, parts.buffers)
        if isinstance(accepted, Tensor):
            accepted = _counts(accepted)
        self._states.check(step.host, accepted)
        done = parts.books.commit(step.host, accepted)
        if accepted is not None:
            counts = accepted.counts if isinstance(accepted, DeviceCounts) else done.accepted
            parts.buffers.shorten(step.host, counts)
        self._states.commit(step, done, accepted)
        for group, pool in parts.stored():
            moves = done.moves.get(group.table)
            if moves is not None and len(moves):
                source, target = torch.from_numpy(moves).unbind(1)
                pool.move(target, source)
        return done


def _counts(given: Tensor) -> DeviceCounts | Int64:
    """Accepted counts of a tensor int [batch], without waiting for those on a GPU.

    Raises:
        BooksError: another tensor.
    """
    wrong = given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
    plain = given.layout == torch.strided and given.device.type in ("cpu", "cuda")
    if wrong or not plain or given.dim() != 1:
        got = f"{given.dtype} {list(given.shape)} on {given.device}"
        need = "integers [batch], on the host or a GPU"
        raise BooksError(Problem("accepted", got, need))
    return DeviceCounts(given) if given.is_cuda else given.numpy()
