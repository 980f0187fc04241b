"""Accounts: what running requests may still claim, so that whoever is admitted completes.

A promise to a request is what ``sizing.request_pages`` says for its length. Free pages that nobody
may still claim are spare: they admit the next request, and widen chunks of prefill.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvfactory.books import Capacity
from kvfactory.books.ids import Int64
from kvfactory.kinds import ceil_div
from kvfactory.planning.cacheplan import CachePlan, TablePlan
from kvfactory.sizing import request_pages


class Accounts:
    """Lengths and promises of every request row.

    ``committed`` and ``reserved`` int64 [rows] mirror the books: tokens decided, and tokens with
    all open steps. ``tables`` are the tables that grow with a request; encoder pages are reserved
    whole when it opens.
    """

    def __init__(self, plan: CachePlan) -> None:
        rows = plan.limits.max_requests + 1
        self.plan = plan
        self.tables = [t for t in plan.tables if t.lifetime.name != "encoder"]
        self.encoders = [t for t in plan.tables if t.lifetime.name == "encoder"]
        self.forgetful = [i for i, t in enumerate(self.tables) if t.lifetime.name != "whole"]
        self.committed = np.zeros(rows, np.int64)
        self.reserved = np.zeros(rows, np.int64)
        self._most = np.zeros((len(self.tables), rows), np.int64)
        self._columns = np.zeros((len(self.tables), rows), np.int64)
        self._shared = np.zeros((len(self.tables), rows), np.int64)
        self._first = np.zeros((len(self.tables), rows), np.int64)

    # ---- one request -----------------------------------------------------------------------

    def claims(self, total: int, prefix: int) -> dict[str, int]:
        """What a new request of ``total`` tokens claims by path, the first ``prefix`` shared."""
        claims = {"requests": 1}
        for table in self.tables:
            left = ceil_div(total, table.page_tokens) - prefix // table.page_tokens
            claims[f"tables.{table.name}"] = min(self._promise(table, total), left)
        for table in self.encoders:
            claims[f"tables.{table.name}"] = 0 if prefix else self._promise(table, total)
        for state in self.plan.states:
            claims[f"states.{state.name}"] = state.slots_per_request
        return claims

    def _promise(self, table: TablePlan, total: int) -> int:
        engine = self.plan.spec.engine
        return request_pages(table.lifetime, table.page_tokens, total, engine)

    def open(self, row: int, total: int, prefix: int) -> None:
        """Enter a request of ``total`` tokens, whose first ``prefix`` are there."""
        self.committed[row] = self.reserved[row] = prefix
        self._advance_windows(np.array([row]))
        for i, table in enumerate(self.tables):
            self._most[i, row] = self._promise(table, total)
            self._columns[i, row] = ceil_div(total, table.page_tokens)
            self._shared[i, row] = prefix // table.page_tokens

    def share(self, row: int) -> None:
        """Somebody else owns what the row has committed, up to a page border."""
        for i, table in enumerate(self.tables):
            self._shared[i, row] = self.committed[row] // table.page_tokens

    # ---- all of them -----------------------------------------------------------------------

    def commit(self, rows: Int64, counts: Int64) -> int:
        """Add ``counts`` int64 [n] decided tokens to ``rows``; pages that left their windows."""
        self.committed[rows] += counts
        return self._advance_windows(rows)

    def _advance_windows(self, rows: Int64) -> int:
        released = 0
        for i in self.forgetful:
            first = self._first_token(i, rows) // self.tables[i].page_tokens
            released += int((first - self._first[i, rows]).sum())
            self._first[i, rows] = first
        return released

    def _first_token(self, i: int, rows: Int64) -> Int64:
        """The first token that each row still sees in table ``i``, int64 [n]."""
        lifetime, committed = self.tables[i].lifetime, self.committed[rows]
        if lifetime.name == "window":
            return np.maximum(committed - (lifetime.tokens - 1), 0)
        if lifetime.name == "chunk":
            return committed - committed % lifetime.tokens
        return np.zeros_like(committed)

    def columns(self, i: int, rows: Int64) -> Int64:
        """Columns that each row has begun in table ``i``, int64 [n]."""
        begun: Int64 = -(-self.reserved[rows] // self.tables[i].page_tokens)
        return begun

    def growth(self, i: int, rows: Int64) -> Int64:
        """Pages of table ``i`` that each row may still claim, int64 [n]."""
        return self._growth(i, rows, self._shared[i, rows])

    def growth_if_shared(self, i: int, rows: Int64) -> Int64:
        """As ``growth``, once somebody else owns all that the rows have committed."""
        return self._growth(i, rows, self.committed[rows] // self.tables[i].page_tokens)

    def _growth(self, i: int, rows: Int64, shared: Int64) -> Int64:
        begun = self.columns(i, rows)
        owned = begun - np.maximum(self._first[i, rows], shared)
        left = self._columns[i, rows] - begun
        growth: Int64 = np.minimum(np.maximum(self._most[i, rows] - owned, 0), left)
        return growth

    def spare(self, rows: Int64, capacity: Mapping[str, Capacity]) -> dict[str, int]:
        """What is free by path and none of ``rows`` may still claim."""
        spare = {path: each.free for path, each in capacity.items()}
        for i, table in enumerate(self.tables):
            spare[f"tables.{table.name}"] -= int(self.growth(i, rows).sum())
        return spare

    def slack(self, i: int, rows: Int64) -> int:
        """Tokens' places on the pages of ``rows`` in table ``i`` that hold nothing of use."""
        page_tokens = self.tables[i].page_tokens
        tail = self.columns(i, rows) * page_tokens - self.reserved[rows]
        head = self._first_token(i, rows) - self._first[i, rows] * page_tokens
        return int(tail.sum() + head.sum())


class Room:
    """Pages for the prompt tokens of one step: each row's own promise, then what is spare."""

    def __init__(self, accounts: Accounts, rows: Int64, capacity: Mapping[str, Capacity]) -> None:
        self._accounts, self._rows = accounts, rows
        self._tables = [
            (accounts.tables[i].page_tokens, accounts.growth(i, rows)) for i in accounts.forgetful
        ]
        free = [capacity[f"tables.{accounts.tables[i].name}"].free for i in accounts.forgetful]
        self._spare = [n - int(g.sum()) for n, (_, g) in zip(free, self._tables, strict=True)]

    def take(self, index: int, wanted: int) -> int:
        """As many of ``wanted`` new tokens of the row at ``index`` as there are pages for."""
        reserved = int(self._accounts.reserved[self._rows[index]])
        for (page_tokens, growth), spare in zip(self._tables, self._spare, strict=True):
            begun = ceil_div(reserved, page_tokens)
            pages = begun + int(growth[index]) + max(0, spare)
            wanted = min(wanted, pages * page_tokens - reserved)
        for at, (page_tokens, growth) in enumerate(self._tables):
            new = ceil_div(reserved + wanted, page_tokens) - ceil_div(reserved, page_tokens)
            self._spare[at] -= max(0, new - int(growth[index]))
        return wanted
