"""Sizing: how many requests fit a budget, and how many pages every table gets.

One function answers sizing, admission and allocation: ``pages(n)`` is what n requests need in
every table, bytes follow from assembly, and the largest n that fits is searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvfactory.assembly import Sizes, TableDraft
from kvfactory.cacheplan import Limits
from kvfactory.errors import PlanError, Problem
from kvfactory.grouping import Draft, TableKey
from kvfactory.kinds import ceil_div
from kvfactory.spec import Engine, Spec

ByteCount = Callable[[Sizes], int]


def draft_tables(drafts: Sequence[Draft], spec: Spec) -> tuple[TableDraft, ...]:
    """The tables that the groups need, named after the first group of each."""
    names: dict[TableKey, str] = {}
    for draft in drafts:
        names.setdefault(draft.key, draft.group)
    return tuple(_table(name, key, spec) for key, name in names.items())


def _table(name: str, key: TableKey, spec: Spec) -> TableDraft:
    lifetime, page_tokens = key
    if lifetime.name == "state":
        return TableDraft(name, key, live_pages=1, row_pages=0)
    tokens = table_tokens(key, spec)
    in_flight = max(_prefill_in_flight(spec.engine), _decode_in_flight(spec.engine))
    live = lifetime.peak_pages(tokens, in_flight, page_tokens)
    return TableDraft(name, key, live, ceil_div(tokens, page_tokens))


def table_tokens(key: TableKey, spec: Spec) -> int:
    """Most tokens of one request in a table, rejected drafts included."""
    if key.lifetime.name == "encoder":
        return key.lifetime.tokens
    return spec.workload.tokens + spec.engine.draft_tokens


def _decode_in_flight(engine: Engine) -> int:
    return engine.steps_in_flight * (1 + engine.draft_tokens)


def _prefill_in_flight(engine: Engine) -> int:
    return engine.steps_in_flight * engine.prefill_chunk_tokens


def request_pages(key: TableKey, spec: Spec) -> int:
    """Pages that one decoding request owns at its longest; slots for states."""
    if key.lifetime.name == "state":
        return 1
    tokens = table_tokens(key, spec)
    return key.lifetime.peak_pages(tokens, _decode_in_flight(spec.engine), key.page_tokens)


def prefill_pages(key: TableKey, spec: Spec) -> int:
    """Pages that prefilling in chunks needs on top of ``request_pages``, once per table."""
    if key.lifetime.name == "state":
        return 0
    tokens = table_tokens(key, spec)
    peak = key.lifetime.peak_pages(tokens, _prefill_in_flight(spec.engine), key.page_tokens)
    return max(0, peak - request_pages(key, spec))


def limits(requests: int, spec: Spec) -> Limits:
    """The loop's limits when ``requests`` are admitted."""
    engine = spec.engine
    rows = engine.max_requests or requests
    return Limits(
        admitted=requests,
        tokens=spec.workload.tokens,
        max_requests=rows,
        step_tokens=engine.prefill_chunk_tokens + rows * (1 + engine.draft_tokens),
        steps_in_flight=engine.steps_in_flight,
        draft_tokens=engine.draft_tokens,
    )


def sizes_for(requests: int, keys: Iterable[TableKey], spec: Spec) -> Sizes:
    """Exactly the pages that ``requests`` need: theirs, one prefill's, and the sink."""
    pages = {
        key: 1 + requests * request_pages(key, spec) + prefill_pages(key, spec) for key in keys
    }
    return Sizes(pages, limits(requests, spec))


def solve(tables: Sequence[TableDraft], spec: Spec, count: ByteCount) -> tuple[Sizes, str]:
    """The sizes to plan with, and what binds them, in words.

    Raises:
        PlanError: the budget is below the floor of one request, or the engine has fewer rows than
            the workload has requests.
    """
    keys = [table.key for table in tables]
    rows, budget = spec.engine.max_requests, spec.memory.budget
    if budget is None:
        wanted = spec.workload.requests
        if rows is not None and rows < wanted:
            need = f"at least workload.requests={wanted}"
            raise PlanError(
                Problem("engine.max_requests", str(rows), need, f"engine.max_requests={wanted}")
            )
        return sizes_for(wanted, keys, spec), f"workload.requests={wanted}, without a budget"
    floor = count(sizes_for(1, keys, spec))
    if floor > budget:
        raise PlanError(_floor_problem(budget, floor, tables, spec))
    fits = largest(1, lambda n: count(sizes_for(n, keys, spec)) <= budget, rows)
    sizes = sizes_for(fits, keys, spec)
    order = _by_need(tables, spec, count, sizes)
    names = {table.key: table.name for table in tables}
    if rows is not None and fits >= rows:
        binding = f"engine.max_requests={rows}"
    else:
        binding = f"the budget; table {names[order[0]]} takes most of a further request"
    for key in order:
        sizes = _fill(key, sizes, budget, count)
    return sizes, binding


def _fill(key: TableKey, sizes: Sizes, budget: int, count: ByteCount) -> Sizes:
    def grown(extra: int) -> Sizes:
        return replace(sizes, pages={**sizes.pages, key: sizes.pages[key] + extra})

    return grown(largest(0, lambda extra: count(grown(extra)) <= budget, None))


def _by_need(
    tables: Sequence[TableDraft], spec: Spec, count: ByteCount, sizes: Sizes
) -> list[TableKey]:
    """Tables by the bytes of one more request, the hungriest first."""

    def need(key: TableKey) -> int:
        more = sizes.pages[key] + request_pages(key, spec)
        return count(replace(sizes, pages={**sizes.pages, key: more}))

    return sorted((table.key for table in tables), key=need, reverse=True)


def largest(low: int, fits: Callable[[int], bool], limit: int | None) -> int:
    """The largest number from ``low`` to ``limit`` that fits; ``low`` does, and fits is monotone."""
    step, best = 1, low
    while limit is None or best < limit:
        probe = best + step if limit is None else min(best + step, limit)
        if not fits(probe):
            break
        best, step = probe, step * 2
    while step > 1:
        step //= 2
        probe = best + step
        if (limit is None or probe <= limit) and fits(probe):
            best = probe
    return best


def _floor_problem(budget: int, floor: int, tables: Sequence[TableDraft], spec: Spec) -> Problem:
    parts = [f"one request of workload.tokens={spec.workload.tokens}"]
    for table in tables:
        extra = prefill_pages(table.key, spec)
        if extra:
            chunk = spec.engine.prefill_chunk_tokens
            parts.append(f"{extra} pages of table {table.name} for prefill chunks of {chunk}")
    need = f"at least {floor} B: {', '.join(parts)}, and the sink of every table"
    mib = ceil_div(floor, 2**20)
    return Problem("memory.budget", f"{budget} B", need, f"memory.budget={mib}MiB")


def bytes_of_request(tables: Iterable[TableDraft], spec: Spec) -> Mapping[str, int]:
    """Pages (or state slots) per table that one request needs at its longest."""
    return {table.name: request_pages(table.key, spec) for table in tables}
