"""Steps padded to a fixed shape on the sink: row 0, page 0, state slot 0."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfactory.books import StepRecord
from kvfactory.books.ids import SINK
from kvfactory.books.step import StateStep, TableStep
from kvfactory.errors import Problem, SpecError
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.steps.step import GraphShape

Number = TypeVar("Number", bound=np.generic)

NOTHING = np.zeros(0, np.int64)
BLANK_SERIAL = -1
"""The serial of a step of no requests, which padding fills entirely."""


def blank_record(plan: CachePlan) -> StepRecord:
    """A step of no requests."""
    pairs, triples = np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int32)
    none, unset = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    tables = {t.name: TableStep(NOTHING, NOTHING, pairs, triples, none) for t in plan.tables}
    states = {s.name: StateStep(none, unset, pairs) for s in plan.states}
    return StepRecord(
        serial=BLANK_SERIAL,
        rows=none,
        q_indptr=np.zeros(1, np.int32),
        most=0,
        prefix=NOTHING,
        lengths=NOTHING,
        positions=NOTHING,
        settled=unset,
        parents=None,
        tables=tables,
        states=states,
        since=BLANK_SERIAL,
    )


def padded(record: StepRecord, shape: GraphShape, page_tokens: Mapping[str, int]) -> StepRecord:
    """``record`` with padded requests up to ``shape``; ``page_tokens`` by table, encoders left out.

    A padded request is one of the sink's row with ``shape.each`` tokens, which it reads; of an
    encoder table it reads one. Rows of new tokens that belong to no request go to slot 0.

    Raises:
        SpecError: more requests or tokens than ``shape`` has, or others than ``shape.each`` each,
            or encoder tokens to write.
    """
    encoders = record.tables.keys() - page_tokens.keys()
    _check(record, shape, encoders)
    batch, rows, each = shape.batch, shape.rows, shape.each
    missing = batch - len(record.rows)
    if not missing and len(record.positions) == rows:
        return record
    ends = record.q_indptr[-1] + each * np.arange(1, missing + 1)
    positions = _filled(record.positions, rows, 0)
    positions[int(record.q_indptr[-1]) :][: each * missing] = np.tile(np.arange(each), missing)
    tables = {}
    for name, part in record.tables.items():
        slots, least = part.slots, 1
        if name in page_tokens:
            slots, least = _filled(part.slots, rows, SINK), each
            slots[len(part.slots) :] = positions[len(part.slots) :] % page_tokens[name]
        tables[name] = part._replace(
            slots=slots,
            kv_lengths=_filled(part.kv_lengths, batch, least),
            first_page=_filled(part.first_page, batch, 0),
        )
    states = {
        name: StateStep(_filled(p.slots, batch, SINK), _filled(p.fresh, batch, 0), p.copies)
        for name, p in record.states.items()
    }
    return record._replace(
        rows=_filled(record.rows, batch, SINK),
        q_indptr=np.append(record.q_indptr, ends).astype(np.int32),
        most=max(record.most, each),
        prefix=_filled(record.prefix, batch, 0),
        lengths=_filled(record.lengths, batch, each),
        positions=positions,
        settled=_filled(record.settled, batch, 1),
        tables=tables,
        states=states,
    )


def _check(record: StepRecord, shape: GraphShape, encoders: AbstractSet[str]) -> None:
    batch, tokens, each = len(record.rows), int(record.q_indptr[-1]), shape.each
    wrong: list[Problem] = []
    if batch > shape.batch:
        got = f"{batch} requests"
        wrong.append(Problem("fill(step)", got, f"at most the graph's {shape.batch}"))
    if each and batch and (record.most != each or tokens != batch * each):
        got = f"{sorted(set(np.diff(record.q_indptr).tolist()))} new tokens a request"
        wrong.append(Problem("fill(step)", got, f"the graph's {each} each"))
    if tokens > shape.rows:
        got = f"{tokens} new tokens"
        wrong.append(Problem("fill(step)", got, f"at most the graph's {shape.rows}"))
    if any(len(record.tables[name].slots) for name in encoders):
        need = "a step without them: they are written outside of graphs"
        wrong.append(Problem("fill(step)", "encoder tokens to write", need))
    if wrong:
        raise SpecError(*wrong)


def _filled(values: NDArray[Number], length: int, value: int) -> NDArray[Number]:
    found = np.full(length, value, values.dtype)
    found[: len(values)] = values
    return found
