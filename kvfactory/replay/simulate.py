"""The simulation: a trace served by the books in virtual time, nothing else behind them.

Requests are served in the order of their arrival. The first in the queue is admitted as soon as
every table can hold it to its end beside what the others may still claim. Prompts are prefilled
in chunks that share ``engine.prefill_chunk_tokens`` a step, and every request that has its prompt
generates one token a step. A step takes ``workload.step_ms``; up to ``engine.steps_in_flight``
are open, the oldest is committed when one more has to be launched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import thread_time_ns
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from kvfactory.books import Books, Segment, Sequence, StepRecord
from kvfactory.books.ids import Int64
from kvfactory.books.shape import books_shape
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.replay.accounts import Accounts, Room
from kvfactory.replay.load import Load
from kvfactory.replay.prefixes import NO_MATCH, NO_PROMPT, Match, Prefixes, Prompt
from kvfactory.replay.record import Record
from kvfactory.replay.traces import BLOCK_TOKENS

P = ParamSpec("P")
R = TypeVar("R")

_NEVER = 2**62


class _Waiting(NamedTuple):
    """A request in the queue: where it is in the trace, and its prompt's blocks."""

    at: int
    prompt: Prompt


class _Flight(NamedTuple):
    """An open step, with the rows int64 [batch] and counts int64 [batch] that it covers."""

    step: StepRecord
    rows: Int64
    counts: Int64


class Simulation:
    """A trace on its way through the books. ``tick`` is one step of the engine."""

    def __init__(self, plan: CachePlan, load: Load) -> None:
        rows = plan.limits.max_requests + 1
        self.plan, self.load = plan, load
        self.books = Books(books_shape(plan))
        self.accounts = Accounts(plan)
        self.prefixes = Prefixes()
        self.record = Record(plan, load)
        self.now_ms = 0.0
        self._arrivals = load.accepted.nonzero()[0].tolist()
        self._arrived = 0
        self._queue: deque[_Waiting] = deque()
        self._stuck = False
        self._rows = np.zeros(0, np.int64)
        self._handles: list[Sequence] = []
        self._flights: deque[_Flight] = deque()
        self._prompt, self._total = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._stop = np.full(rows, _NEVER)
        self._holds: dict[int, tuple[Prompt, list[int]]] = {}
        self._unit = math.lcm(BLOCK_TOKENS, *(t.page_tokens for t in plan.tables))

    @property
    def done(self) -> int:
        """Requests that are finished or were refused."""
        return self.record.finished + sum(self.load.refused.values())

    def tick(self) -> None:
        """Commit what is due, admit who fits, launch a step; or wait for the next arrival."""
        if len(self._flights) == self.plan.limits.steps_in_flight:
            self._commit()
        self._arrive()
        self._admit()
        if not self._launch():
            if self._flights:
                self._commit()
            else:
                assert not self._queue, "a request that the plan has room for was not admitted"
                self.now_ms = float(self.load.trace.arrival_ms[self._arrivals[self._arrived]])
                return
        self.now_ms += self.plan.spec.workload.step_ms

    def close(self) -> None:
        """Release what the prefix cache holds; the books are empty then, or wrong."""
        while segment := self.prefixes.pop():
            self.books.release(segment)
        self.record.close(self.now_ms, self.books.capacity())

    def _timed(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        began = thread_time_ns()
        try:
            return call(*args, **kwargs)
        finally:
            self.record.busy_ns += thread_time_ns() - began

    # ---- arrival and admission -------------------------------------------------------------

    def _arrive(self) -> None:
        arrival_ms, blocks = self.load.trace.arrival_ms, self.load.trace.blocks
        while self._arrived < len(self._arrivals):
            index = self._arrivals[self._arrived]
            if arrival_ms[index] > self.now_ms:
                break
            self._arrived += 1
            prompt = NO_PROMPT
            if blocks is not None and not self.accounts.encoders:
                whole = int(self.load.trace.prompt[index]) // BLOCK_TOKENS
                prompt = self.prefixes.enter(blocks[index][:whole])
            self._queue.append(_Waiting(index, prompt))
        self.record.waiting(len(self._queue))

    def _admit(self) -> None:
        if not self._queue or self._stuck:
            return
        spare = self._spare()
        while self._queue:
            waiting = self._queue[0]
            match = self._match(waiting)
            total = int(self.load.total[waiting.at])
            if not self._make_room(self.accounts.claims(total, match.tokens), spare, match):
                self._stuck = bool(self._rows.size) or not match.chain
                if self._stuck:
                    break
                match = NO_MATCH  # nobody will make room any more, and the prefix is in the way
                self._make_room(self.accounts.claims(total, 0), spare, match)
            self._queue.popleft()
            self._open(waiting, match, total)
            for path, claim in self.accounts.claims(total, match.tokens).items():
                spare[path] -= claim

    def _spare(self) -> dict[str, int]:
        return self.accounts.spare(self._rows, self._timed(self.books.capacity))

    def _match(self, waiting: _Waiting) -> Match:
        """The longest held beginning that leaves a token of the prompt to compute."""
        usable = (int(self.load.trace.prompt[waiting.at]) - 1) // BLOCK_TOKENS
        return self.prefixes.match(waiting.prompt.nodes[:usable])

    def _make_room(self, claims: dict[str, int], spare: dict[str, int], match: Match) -> bool:
        """Whether ``claims`` fit, segments of others released as far as that takes."""
        while any(claim > spare[path] for path, claim in claims.items()):
            segment = self.prefixes.pop(spared=match.node)
            if segment is None:
                return False
            self._timed(self.books.release, segment)
            self.record.released_segments += 1
            spare.update(self._spare())
        return True

    def _open(self, waiting: _Waiting, match: Match, total: int) -> None:
        encoder = [table.lifetime.tokens for table in self.accounts.encoders[:1]]
        (sequence,) = self._timed(self.books.open, 1, match.chain, encoder)
        row, prompt = sequence.row, int(self.load.trace.prompt[waiting.at])
        self.accounts.open(row, total, match.tokens)
        self._rows = np.append(self._rows, row)
        self._handles.append(sequence)
        self._prompt[row], self._total[row] = prompt, total
        self._plan_holds(row, waiting.prompt, match.tokens)
        wait_ms = self.now_ms - float(self.load.trace.arrival_ms[waiting.at])
        self.record.admitted(len(self._handles), match.tokens, wait_ms)

    def _plan_holds(self, row: int, prompt: Prompt, start: int) -> None:
        """Where the row's prefill stops to be held: where prompts part, and where this one ends."""
        wanted = {prompt.seen * BLOCK_TOKENS, len(prompt.nodes) * BLOCK_TOKENS}
        aligned = {stop // self._unit * self._unit for stop in wanted}
        stops = sorted((stop for stop in aligned if stop > start), reverse=True)
        self._holds[row] = prompt, stops
        self._stop[row] = stops[-1] if stops else _NEVER

    # ---- steps -----------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Open the next step; False when no request has anything to do."""
        rows = self._rows
        if not rows.size:
            return False
        reserved = self.accounts.reserved[rows]
        settled = self.accounts.committed[rows] >= self._prompt[rows]
        counts = (settled & (reserved < self._total[rows])).astype(np.int64)
        if not settled.all():
            self._prefill(np.flatnonzero(~settled).tolist(), counts)
        handles = self._handles
        if not counts.all():
            chosen = counts.nonzero()[0]
            if not chosen.size:
                return False
            rows, counts = rows[chosen], counts[chosen]
            handles = [handles[at] for at in chosen.tolist()]
        step = self._timed(self.books.extend, handles, counts.tolist())
        self.accounts.reserved[rows] += counts
        self._flights.append(_Flight(step, rows, counts))
        if self.record.launched(counts):
            self.record.sample(self.accounts, self._rows, self.books.capacity())
        return True

    def _prefill(self, indices: list[int], counts: Int64) -> None:
        """Chunks for rows whose prompt is not committed yet, the oldest first."""
        left = self.plan.spec.engine.prefill_chunk_tokens
        room = Room(self.accounts, self._rows, self._timed(self.books.capacity))
        for index in indices:
            row = self._rows[index]
            reserved, prompt = int(self.accounts.reserved[row]), int(self._prompt[row])
            if reserved >= prompt:  # the last chunk is in flight: this one generates
                counts[index] = room.take(index, min(1, int(self._total[row]) - reserved))
                continue
            if not left:
                continue
            if reserved == self._stop[row] and self.plan.states:
                continue  # a state is held before it goes on
            stops = [stop for stop in self._holds[row][1] if stop > reserved]
            wanted = min(left, min(stops, default=prompt) - reserved)
            counts[index] = room.take(index, wanted)
            left -= int(counts[index])

    def _commit(self) -> None:
        """Decide the oldest step: windows move on, prompts are held, the finished leave."""
        step, rows, counts = self._flights.popleft()
        self._timed(self.books.commit, step)
        self.record.window_pages += self.accounts.commit(rows, counts)
        committed = self.accounts.committed[rows]
        for row in rows[committed == self._stop[rows]].tolist():
            self._hold(row)
        finished = rows[committed == self._total[rows]]
        if finished.size:
            self._finish(finished)

    def _finish(self, rows: Int64) -> None:
        gone = set(rows.tolist())
        leaving = np.array([row in gone for row in self._rows.tolist()])
        handles = [self._handles[at] for at in leaving.nonzero()[0].tolist()]
        self._timed(self.books.close, handles)
        self._handles = [self._handles[at] for at in (~leaving).nonzero()[0].tolist()]
        self._rows = self._rows[~leaving]
        self.record.finished += len(handles)
        self._stuck = False

    # ---- prefixes --------------------------------------------------------------------------

    def _hold(self, row: int) -> None:
        """Hold what the row has committed, if its pages can be spared."""
        prompt, stops = self._holds[row]
        tokens = stops.pop()
        self._stop[row] = stops[-1] if stops else _NEVER
        nodes = prompt.nodes[: tokens // BLOCK_TOKENS]
        if nodes[-1] in self.prefixes:
            return
        base = self.prefixes.deepest(nodes)
        if not self._make_room(self._cost_of_hold(row), self._spare(), Match(base, ())):
            return
        start = self.prefixes.stop(base)
        handle = self._handles[int(np.flatnonzero(self._rows == row)[0])]
        segment: Segment = self._timed(self.books.hold, handle, tokens, start)
        self.prefixes.add(nodes[-1], base, segment)
        self.accounts.share(row)
        self.record.held_segments += 1

    def _cost_of_hold(self, row: int) -> dict[str, int]:
        """Further claims of a row that does not get back what it forgets."""
        one = np.array([row])
        indices = self.accounts.forgetful
        before = [int(self.accounts.growth(i, one)[0]) for i in indices]
        after = [int(self.accounts.growth_if_shared(i, one)[0]) for i in indices]
        cost = {f"states.{state.name}": 1 for state in self.plan.states}
        for i, old, new in zip(indices, before, after, strict=True):
            cost[f"tables.{self.accounts.tables[i].name}"] = new - old
        return cost
