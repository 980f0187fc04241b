"""Solving: the most requests that a budget holds, and what to do with the bytes left over.

The number is exact: with n requests admitted, n fit the budget and n + 1 do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvfactory.errors import PlanError, Problem
from kvfactory.kinds import ceil_div
from kvfactory.planning.assembly import Sizes, TableDraft
from kvfactory.planning.grouping import TableKey
from kvfactory.sizing.demand import (
    comfortable_pages,
    most_requests,
    pages_for,
    prefill_pages,
    sizes_for,
)
from kvfactory.sizing.explicit import by_table, contradictions, solve_ratios, solve_tokens
from kvfactory.sizing.search import ByteCount, largest
from kvfactory.spec import Spec


def solve(tables: Sequence[TableDraft], spec: Spec, count: ByteCount) -> tuple[Sizes, str]:
    """The sizes to plan with, and what binds the number of requests, in words.

    Raises:
        PlanError: contradictions; a budget, a share or a table below the floor of one request;
            or fewer rows in the engine than requests in the workload.
    """
    wrong = list(contradictions(tables, spec))
    if wrong:
        raise PlanError(*wrong)
    if spec.memory.tokens:
        return solve_tokens(tables, spec)
    if spec.memory.budget is None:
        return _solve_workload(tables, spec)
    return _solve_budget(tables, spec, spec.memory.budget, count)


def _solve_workload(tables: Sequence[TableDraft], spec: Spec) -> tuple[Sizes, str]:
    rows, wanted = spec.engine.max_requests, spec.workload.requests
    if rows is not None and rows < wanted:
        need = f"at least workload.requests={wanted}"
        fix = f"engine.max_requests={wanted}"
        raise PlanError(Problem("engine.max_requests", str(rows), need, fix))
    sizes = sizes_for(wanted, [table.key for table in tables], spec)
    return sizes, f"workload.requests={wanted}, without a budget"


def _solve_budget(
    tables: Sequence[TableDraft], spec: Spec, budget: int, count: ByteCount
) -> tuple[Sizes, str]:
    keys = [table.key for table in tables]
    floor = count(sizes_for(1, keys, spec))
    if floor > budget:
        raise PlanError(_floor_problem(budget, floor, tables, spec))
    shared = by_table(tables, spec.memory.ratios)
    if shared:
        sizes, binding = solve_ratios(tables, spec, budget, count)
        order = _by_need(tables, spec, count, sizes)
    else:
        rows = most_requests(spec)
        fits = largest(1, lambda n: count(sizes_for(n, keys, spec)), budget, rows)
        sizes = sizes_for(fits, keys, spec)
        order = _by_need(tables, spec, count, sizes)
        hungriest = next(table for table in tables if table.key == order[0])
        binding = f"engine.max_requests={rows}"
        if fits < rows:
            binding = f"the budget: {_further(hungriest, sizes, spec, budget, count)}"
    comfort = {key: comfortable_pages(key, sizes.limits.admitted, spec) for key in keys}
    free = [key for key in order if key not in shared]
    return fill(sizes, free, comfort, budget, count), binding


def _further(hungriest: TableDraft, sizes: Sizes, spec: Spec, budget: int, count: ByteCount) -> str:
    """What one more request would take, and what is left once all others have theirs."""
    key, more = hungriest.key, sizes_for(sizes.limits.admitted + 1, sizes.pages, spec)
    number = more.pages[key] - sizes.pages[key]
    unit = "state slot" if key.lifetime.name == "state" else "page"
    taken, wanted = count(sizes), count(more)
    return (
        f"a further request needs {number:,} {unit}{'s' * (number != 1)} of table"
        f" {hungriest.name}, {wanted - taken:,} B in all; {budget - taken:,} B are left"
    )


def fill(
    sizes: Sizes,
    order: Sequence[TableKey],
    comfort: Mapping[TableKey, int],
    budget: int,
    count: ByteCount,
) -> Sizes:
    """The budget's rest as pages: first ``comfort``, then whatever fits, in the given order."""
    limits = [(key, comfort[key] - sizes.pages[key]) for key in order]
    for key, limit in [*limits, *((key, None) for key in order)]:
        if limit != 0:
            sizes = _grow(sizes, key, limit, budget, count)
    return sizes


def _grow(sizes: Sizes, key: TableKey, limit: int | None, budget: int, count: ByteCount) -> Sizes:
    def grown(extra: int) -> Sizes:
        return replace(sizes, pages={**sizes.pages, key: sizes.pages[key] + extra})

    return grown(largest(0, lambda extra: count(grown(extra)), budget, limit))


def _by_need(
    tables: Sequence[TableDraft], spec: Spec, count: ByteCount, sizes: Sizes
) -> list[TableKey]:
    """Tables by the bytes of one more request, the hungriest first."""
    requests = sizes.limits.admitted

    def need(key: TableKey) -> int:
        more = pages_for(key, requests + 100, spec)
        return count(replace(sizes, pages={**sizes.pages, key: more}))

    return sorted((table.key for table in tables), key=need, reverse=True)


def _floor_problem(budget: int, floor: int, tables: Sequence[TableDraft], spec: Spec) -> Problem:
    parts = [f"one request of workload.tokens={spec.workload.tokens}"]
    if spec.engine.max_requests:
        parts.append(f"device tables of engine.max_requests={spec.engine.max_requests}")
    for table in tables:
        extra = prefill_pages(table.key, spec)
        if extra:
            chunk = spec.engine.prefill_chunk_tokens
            parts.append(f"{extra} pages of table {table.name} for prefill chunks of {chunk}")
    need = f"at least {floor} B: {', '.join(parts)}, and the sink of every table"
    mib = ceil_div(floor, 2**20)
    return Problem("memory.budget", f"{budget} B", need, f"memory.budget={mib}MiB")
