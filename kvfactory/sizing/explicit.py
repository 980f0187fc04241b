"""Explicit sizing: tokens per table in place of a budget, or tables' shares of a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvfactory.errors import PlanError, Problem, did_you_mean
from kvfactory.kinds import ceil_div
from kvfactory.planning.assembly import Sizes, TableDraft
from kvfactory.planning.grouping import TableKey
from kvfactory.sizing.demand import limits, most_requests, pages_for, prefill_pages
from kvfactory.sizing.search import ByteCount, largest
from kvfactory.spec import Spec

T = TypeVar("T")
_STRIDE = 2**32  # over which a page is measured: rounding up to any alignment evens out


def contradictions(tables: Sequence[TableDraft], spec: Spec) -> Iterator[Problem]:
    """What the memory section asks for and cannot have at once."""
    memory, workload = spec.memory, spec.workload
    if memory.tokens and memory.budget is not None:
        got = f"tokens of {', '.join(memory.tokens)} beside memory.budget={memory.budget}"
        need = "tokens of tables or a budget, not both"
        yield Problem("memory.tokens", got, need, "memory.budget=null")
    if memory.tokens and memory.ratios:
        got = f"shares of {', '.join(memory.ratios)} beside memory.tokens"
        yield Problem("memory.ratios", got, "shares of a budget or tokens of tables, not both")
    elif memory.ratios and memory.budget is None:
        got = f"shares of {', '.join(memory.ratios)} without a budget"
        yield Problem("memory.ratios", got, "a budget to share", "memory.budget=64GiB")
    total = sum(memory.ratios.values())
    if total > 1 + 1e-9:
        yield Problem("memory.ratios", f"shares that add up to {total:g}", "at most 1")
    yield from _names(tables, memory.tokens, "memory.tokens", states=False)
    yield from _names(tables, memory.ratios, "memory.ratios", states=True)
    if workload.mean_tokens is not None and workload.mean_tokens > workload.tokens:
        need = f"at most workload.tokens={workload.tokens}"
        yield Problem("workload.mean_tokens", str(workload.mean_tokens), need)


def _names(
    tables: Sequence[TableDraft], given: Mapping[str, object], path: str, states: bool
) -> Iterator[Problem]:
    owners = {group: table for table in tables for group in table.groups}
    known = [name for name, t in owners.items() if states or t.key.lifetime.name != "state"]
    seen: dict[str, str] = {}
    for name in given:
        here = f"{path}.{name}"
        if name not in known:
            close = did_you_mean(name, known)
            got = "recurrent states" if name in owners else "a table that the model lacks"
            fix = f"{path}.{close}={given[name]}" if close else ""
            yield Problem(here, got, f"one of {', '.join(known) or 'none'}", fix)
            continue
        other = seen.setdefault(owners[name].name, name)
        if other != name:
            yield Problem(here, f"the table of {other}, named twice", "each table once")


def by_table(tables: Sequence[TableDraft], given: Mapping[str, T]) -> dict[TableKey, tuple[str, T]]:
    """What is ``given`` by group, by table, with the name it was given under."""
    return {
        table.key: (name, given[name]) for table in tables for name in table.groups if name in given
    }


# ---- tokens ----------------------------------------------------------------------------------


def solve_tokens(tables: Sequence[TableDraft], spec: Spec) -> tuple[Sizes, str]:
    """The sizes that ``memory.tokens`` name; other tables get what the same requests need.

    Raises:
        PlanError: fewer tokens than one request needs.
    """
    given = by_table(tables, spec.memory.tokens)
    pages = {key: 1 + ceil_div(tokens, key.page_tokens) for key, (_, tokens) in given.items()}
    wrong = [
        _too_few(key, name, tokens, spec)
        for key, (name, tokens) in given.items()
        if pages_for(key, 1, spec) > pages[key]
    ]
    if wrong:
        raise PlanError(*wrong)
    held = {key: _requests(key, pages[key], spec) for key in given}
    tightest = min(held, key=lambda key: held[key])
    requests, (name, tokens) = held[tightest], given[tightest]
    binding = f"memory.tokens.{name}={tokens}"
    if requests == most_requests(spec):
        binding = f"engine.max_requests={requests}"
    everything = {table.key: pages_for(table.key, requests, spec) for table in tables}
    return Sizes({**everything, **pages}, limits(requests, spec)), binding


def _requests(key: TableKey, pages: int, spec: Spec) -> int:
    return largest(1, lambda n: pages_for(key, n, spec), pages, most_requests(spec))


def _too_few(key: TableKey, name: str, tokens: int, spec: Spec) -> Problem:
    least = (pages_for(key, 1, spec) - 1) * key.page_tokens
    path, extra = f"memory.tokens.{name}", prefill_pages(key, spec)
    parts = [f"one request of workload.tokens={spec.workload.tokens}"]
    if extra:
        parts.append(f"{extra} pages for prefill chunks of {spec.engine.prefill_chunk_tokens}")
    return Problem(path, str(tokens), f"at least {least}: {', '.join(parts)}", f"{path}={least}")


# ---- ratios ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shares:
    """Tables' shares of what device tables, step arrays, workspaces and sinks leave of a budget."""

    tables: Sequence[TableDraft]
    given: Mapping[TableKey, tuple[str, float]]
    spec: Spec
    budget: int
    count: ByteCount

    def pages(self, requests: int) -> dict[TableKey, int]:
        """Pages by table for ``requests``: shares where given, else what they need."""
        bare = {table.key: 1 for table in self.tables}
        base = self._bytes(bare, requests)
        costs = {key: self._bytes({**bare, key: 1 + _STRIDE}, requests) - base for key in bare}
        left = self.budget - base
        while True:
            shares = {
                key: 1 + max(0, int(share * left) * _STRIDE // costs[key])
                for key, (_, share) in self.given.items()
            }
            over = self._bytes(bare | shares, requests) - self.budget
            if over <= 0 or left <= 0:
                return self._needed(requests) | shares
            left -= over

    def _needed(self, requests: int) -> dict[TableKey, int]:
        return {table.key: pages_for(table.key, requests, self.spec) for table in self.tables}

    def lacking(self, requests: int) -> dict[str, int]:
        """By name: pages that a share lacks for ``requests``, and bytes that the rest lacks."""
        have, need = self.pages(requests), self._needed(requests)
        lacking = {name: need[key] - have[key] for key, (name, _) in self.given.items()}
        return lacking | {"": self._bytes(have, requests) - self.budget}

    def _bytes(self, pages: Mapping[TableKey, int], requests: int) -> int:
        return self.count(Sizes(pages, limits(requests, self.spec)))


def solve_ratios(
    tables: Sequence[TableDraft], spec: Spec, budget: int, count: ByteCount
) -> tuple[Sizes, str]:
    """The most requests whose pages fit into every table's share of ``budget``.

    Raises:
        PlanError: shares that are too small for one request, or leave too little to others.
    """
    shares = _Shares(tables, by_table(tables, spec.memory.ratios), spec, budget, count)
    lacking = shares.lacking(1)
    if max(lacking.values()) > 0:
        raise PlanError(*_small_shares(shares, lacking))
    rows = most_requests(spec)
    requests = largest(1, lambda n: max(shares.lacking(n).values()), 0, rows)
    binding = f"engine.max_requests={requests}"
    if requests != rows:
        lacking = shares.lacking(requests + 1)
        name = max(lacking, key=lambda name: (lacking[name] > 0, bool(name)))
        binding = "what memory.ratios leave of the budget"
        if name:
            binding = f"memory.ratios.{name}={spec.memory.ratios[name]:g}"
    return Sizes(shares.pages(requests), limits(requests, spec)), binding


def _small_shares(shares: _Shares, lacking: Mapping[str, int]) -> Iterator[Problem]:
    have = shares.pages(1)
    for key, (name, share) in shares.given.items():
        if lacking[name] > 0:
            pages = have[key] - 1
            got = f"{share:g}, which is {pages} pages of {shares.budget} B"
            need = f"at least {pages + lacking[name]} pages for one request"
            yield Problem(f"memory.ratios.{name}", got, f"{need}, and the sink of every table")
    if lacking[""] > 0:
        named = ", ".join(f"{name} {share:g}" for name, share in shares.given.values())
        got = f"{named}, which leave {lacking['']} B too little to the other tables"
        yield Problem("memory.ratios", got, "smaller shares, or a larger memory.budget")
