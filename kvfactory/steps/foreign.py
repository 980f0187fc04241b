"""Steps of engines with a scheduler of their own: page ids come from outside, bounds are checked.

Such an engine owns all ids; the books of this cache must hold nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfactory.books import Books, StepRecord
from kvfactory.books.ids import Int64, indptr, int64, ranges
from kvfactory.books.step import StateStep, TableStep
from kvfactory.books.table import NO_COPIES
from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.planning.cacheplan import CachePlan, StatePlan, TablePlan

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Integers on the host: a list, or an array [batch] or [batch, pages]."""

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class ForeignBatch:
    """What an engine says about a step of ``batch`` requests.

    ``before`` and ``after`` int [batch]: tokens of each request without and with the new ones.
    ``rows`` int [batch]: a row of the device tables for each, of 1 .. max_requests; two steps in
    flight must not give one row to different requests. ``tables`` by name: page ids [batch, pages]
    from the request's first token on; pages that no query of the step can see may be anything.
    ``states`` by name: state slots [batch], cleared where ``before`` is 0. ``cross_tokens`` int
    [batch]: encoder tokens, which a step with ``before`` 0 writes.
    """

    before: Ids
    after: Ids
    tables: Mapping[str, Ids]
    rows: Ids | None = None
    states: Mapping[str, Ids] = field(default_factory=dict)
    cross_tokens: Ids = ()


def foreign_record(plan: CachePlan, books: Books, batch: ForeignBatch, serial: int) -> StepRecord:
    """The step of ``batch``, the ``serial``-th of its engine.

    Raises:
        BooksError: the books hold something, or ids that are outside of their table.
        SpecError: missing or unknown tables, more than the plan's limits, or wrong shapes.
    """
    held = [path for path, room in books.capacity().items() if room.held]
    if held:
        need = "books that hold nothing: close, release or reset"
        raise BooksError(Problem("step(tables)", f"held {', '.join(held)}", need))
    for what, given in (("tables", batch.tables), ("states", batch.states)):
        if not isinstance(given, Mapping):
            need = "ids by name"
            raise SpecError(Problem(f"step({what}=)", f"a {type(given).__name__}", need))
    before, after = int64(batch.before, "step(before=)"), int64(batch.after, "step(after=)")
    cross = int64(batch.cross_tokens, "step(cross_tokens=)")
    rows = range(1, len(before) + 1) if batch.rows is None else batch.rows
    rows = int64(rows, "step(rows=)")
    wrong = [
        *_shape_problems(plan, batch, len(before)),
        *_count_problems(plan, before, after, rows, cross),
        *_limit_problems(plan, rows, before, after),
    ]
    if wrong:
        raise SpecError(*wrong)
    counts = after - before
    positions = ranges(before, counts)
    tables = [_Table(t, batch, rows, before, after, cross) for t in plan.tables]
    states = [(s, int64(batch.states[s.name])) for s in plan.states]
    wrong = [problem for table in tables for problem in table.problems()]
    wrong += [problem for state, slots in states for problem in _slot_problems(state, slots)]
    if wrong:
        raise BooksError(*wrong)
    return StepRecord(
        serial=serial,
        rows=rows.astype(np.int32),
        q_indptr=indptr(counts),
        most=int(counts.max(initial=0)),
        prefix=before,
        lengths=after,
        positions=positions,
        settled=np.ones(len(rows), np.bool_),
        parents=None,
        tables={table.plan.name: table.step() for table in tables},
        states={
            s.name: StateStep(slots.astype(np.int32), before == 0, NO_COPIES) for s, slots in states
        },
        since=serial,
    )


class _Table:
    """One table's part of a foreign step."""

    def __init__(
        self,
        plan: TablePlan,
        batch: ForeignBatch,
        rows: Int64,
        before: Int64,
        after: Int64,
        cross: Int64,
    ) -> None:
        self.plan, self.rows = plan, rows
        self.encoder = plan.lifetime.name == "encoder"
        self.pages = np.asarray(batch.tables[plan.name]).astype(np.int64)
        if self.encoder:
            after = cross
            before = np.where(before == 0, 0, after)
        self.before, self.after = before, after
        seen = [plan.lifetime.first_visible(int(position)) for position in before]
        self.first = int64(seen) // plan.page_tokens
        self.stop = -(-after // plan.page_tokens)

    def problems(self) -> Iterator[Problem]:
        path, limit = f"step(tables[{self.plan.name!r}])", self.plan.num_pages
        width = self.pages.shape[1]
        over = np.flatnonzero((self.stop > width) | (self.stop > self.plan.row_pages))
        for request in over.tolist():
            most = min(width, self.plan.row_pages)
            got = f"{self.after[request]} tokens of request {request}"
            yield Problem(path, got, f"at most {most * self.plan.page_tokens}, in {most} pages")
        if not len(over):
            pages = self._owned()[2]
            bad = pages[(pages < 1) | (pages >= limit)]
            if len(bad):
                yield Problem(path, f"page {bad[0]}", f"1..{limit - 1}")

    def _owned(self) -> tuple[Int64, Int64, Int64]:
        """Request, column and page of everything that the step may read or write, int64 [n]."""
        counts = np.maximum(self.stop - self.first, 0)
        requests = np.repeat(np.arange(len(counts)), counts)
        columns = ranges(self.first, counts)
        return requests, columns, self.pages[requests, columns]

    def step(self) -> TableStep:
        requests, columns, pages = self._owned()
        counts = self.after - self.before
        positions, owners = ranges(self.before, counts), np.repeat(np.arange(len(counts)), counts)
        column, offset = np.divmod(positions, self.plan.page_tokens)
        return TableStep(
            slots=self.pages[owners, column] * self.plan.page_tokens + offset,
            kv_lengths=self.after,
            copies=NO_COPIES,
            updates=np.stack((self.rows[requests], columns, pages), axis=1).astype(np.int32),
            first_page=self.first.astype(np.int32),
        )


def _shape_of(given: Ids) -> tuple[int, ...] | None:
    """The shape of ids, None for what is no array of integers."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):  # rows of unequal lengths, a tensor on a device
        return None
    return array.shape if array.dtype.kind in "iu" or not array.size else None


def _shape_problems(plan: CachePlan, batch: ForeignBatch, size: int) -> Iterator[Problem]:
    wanted = {t.name: "tables" for t in plan.tables} | {s.name: "states" for s in plan.states}
    for name, what in wanted.items():
        given = batch.tables if what == "tables" else batch.states
        path = f"step({what}[{name!r}])"
        if name not in given:
            yield Problem(path, "nothing", f"ids of {size} requests")
            continue
        shape, need = _shape_of(given[name]), f"[{size}{', pages' * (what == 'tables')}]"
        if shape is None:
            yield Problem(path, "rows of unequal lengths, or no integers", f"integers {need}")
        elif len(shape) != (2 if what == "tables" else 1) or shape[0] != size:
            yield Problem(path, f"shape {list(shape)}", need)
    for name in (*batch.tables, *batch.states):
        if name not in wanted:
            yield Problem("step(tables)", f"table {name!r}", f"one of {', '.join(wanted)}")


def _count_problems(
    plan: CachePlan, before: Int64, after: Int64, rows: Int64, cross: Int64
) -> Iterator[Problem]:
    """Numbers of numbers, and encoder tokens below none."""
    size = len(before)
    encoders = any(t.lifetime.name == "encoder" for t in plan.tables)
    if len(cross) != (size if encoders else 0):
        got, need = f"{len(cross)} numbers", str(size if encoders else 0)
        yield Problem("step(cross_tokens)", got, need)
    if (cross < 0).any():
        yield Problem("step(cross_tokens)", str(cross.tolist()), "numbers from 0 on")
    if len(after) != size or len(rows) != size:
        yield Problem("step(before, after, rows)", "different lengths", f"{size} of each")


def _limit_problems(plan: CachePlan, rows: Int64, before: Int64, after: Int64) -> Iterator[Problem]:
    limits = plan.limits
    if len(rows) > limits.max_requests:
        fix = f"engine.max_requests={len(rows)}"
        yield Problem("step(rows)", f"{len(rows)} requests", f"at most {limits.max_requests}", fix)
    inside = (rows >= 1) & (rows <= limits.max_requests)
    if not inside.all() or len(np.unique(rows)) < len(rows):
        need = f"each one once, of 1..{limits.max_requests}"
        yield Problem("step(rows)", str(rows.tolist()), need)
    if len(after) == len(before):
        new = sum(after.tolist()) - sum(before.tolist())  # of Python: int64 wraps around
        if (before < 0).any() or (after < before).any() or new > limits.step_tokens:
            need = f"0 <= before <= after, at most {limits.step_tokens} new tokens in all"
            yield Problem("step(before, after)", f"{new} new tokens", need)
        elif (after > MOST_TOKENS).any():
            got = f"{after.max()} tokens of a request"
            yield Problem("step(after)", got, f"at most {MOST_TOKENS}: lengths are int32")


def _slot_problems(state: StatePlan, slots: Int64) -> Iterator[Problem]:
    bad = slots[(slots < 1) | (slots >= state.num_slots)]
    if len(bad) or len(np.unique(slots)) < len(slots):
        got, need = str(slots.tolist()), f"each one once, of 1..{state.num_slots - 1}"
        yield Problem(f"step(states[{state.name!r}])", got, need)
