"""What a replay measures while it runs, and the result that it ends in."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfactory.books import Capacity
from kvfactory.books.ids import Int64
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.replay.accounts import Accounts
from kvfactory.replay.load import Load

SAMPLE_STEPS = 64


@dataclass(frozen=True)
class Fill:
    """How full the pages of a table were: tokens allocated and of use, means over samples.

    ``peak_pages`` is the most pages held at a sample, of ``pages`` in all.
    """

    table: str
    pages: int
    peak_pages: int
    allocated_tokens: float
    used_tokens: float

    @property
    def fragmentation(self) -> float:
        """Share of the allocated tokens that held nothing of use."""
        return 1 - self.used_tokens / self.allocated_tokens if self.allocated_tokens else 0.0


@dataclass(frozen=True)
class Times:
    """Microseconds that the books took a step: all of it, and the first and last quarter.

    ``growth`` compares the quarters at equal batches: 1 where a step costs what it did before.
    """

    median_us: float
    p99_us: float
    first_quarter_us: float
    last_quarter_us: float
    growth: float


@dataclass(frozen=True)
class Outcome:
    """A whole replay. Tokens are counted where they were computed: prefix hits are apart.

    ``segments_held`` are prefixes that were kept for later prompts, ``segments_released`` those
    of them that were given up because somebody needed their pages.
    ``leaked`` names what did not come back, by path; empty where the books balance.
    """

    arrivals: int
    finished: int
    refused: Mapping[str, int]
    cut: int
    running_peak: int
    waiting_peak: int
    longest_wait_s: float
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    steps: int
    virtual_s: float
    window_pages_released: int
    segments_held: int
    segments_released: int
    fills: tuple[Fill, ...]
    times: Times
    books_s: float
    wall_s: float
    leaked: Mapping[str, int]

    @property
    def books_tokens_per_s(self) -> float:
        """Tokens that the books can serve a second, if nothing else took time."""
        return (self.prompt_tokens + self.generated_tokens) / max(self.books_s, 1e-9)

    @property
    def books_requests_per_s(self) -> float:
        """Requests that the books can serve a second, if nothing else took time."""
        return self.finished / max(self.books_s, 1e-9)


class Record:
    """Counters of a running replay."""

    def __init__(self, plan: CachePlan, load: Load) -> None:
        self.plan, self.load = plan, load
        self.busy_ns = 0
        self.finished = self.window_pages = 0
        self.held_segments = self.released_segments = 0
        self._hits = self._tokens = 0
        self._running_peak = self._waiting_peak = 0
        self._longest_wait_ms = self._virtual_ms = 0.0
        self._step_ns, self._batches = array("q"), array("q")
        self._noted_ns = 0
        self._samples: dict[str, list[tuple[int, int]]] = {}
        self._leaked: dict[str, int] = {}

    def waiting(self, count: int) -> None:
        """``count`` requests are in the queue."""
        self._waiting_peak = max(self._waiting_peak, count)

    def admitted(self, running: int, hits: int, wait_ms: float) -> None:
        """One more request runs, ``running`` with it; ``hits`` tokens of its prompt were there."""
        self._running_peak = max(self._running_peak, running)
        self._hits += hits
        self._longest_wait_ms = max(self._longest_wait_ms, wait_ms)

    def launched(self, counts: Int64) -> bool:
        """A step of new tokens ``counts`` int64 [batch]; whether a sample of the tables is due."""
        self._step_ns.append(self.busy_ns - self._noted_ns)
        self._noted_ns = self.busy_ns
        self._batches.append(len(counts))
        self._tokens += int(counts.sum())
        return len(self._step_ns) % SAMPLE_STEPS == 1

    def sample(self, accounts: Accounts, rows: Int64, capacity: Mapping[str, Capacity]) -> None:
        """Note how full every table is while ``rows`` int64 [n] run."""
        for i, table in enumerate(accounts.tables):
            held = capacity[f"tables.{table.name}"].held
            pair = (held, held * table.page_tokens - accounts.slack(i, rows))
            self._samples.setdefault(table.name, []).append(pair)

    def close(self, now_ms: float, capacity: Mapping[str, Capacity]) -> None:
        """The end, at which nothing should be held any more."""
        self._virtual_ms = now_ms
        self._leaked = {path: each.held for path, each in capacity.items() if each.held}

    def outcome(self, wall_s: float) -> Outcome:
        """The result, after ``wall_s`` seconds of real time."""
        trace, accepted = self.load.trace, self.load.accepted
        prompts = int(trace.prompt[accepted].sum()) - self._hits
        return Outcome(
            arrivals=len(trace),
            finished=self.finished,
            refused=self.load.refused,
            cut=self.load.cut,
            running_peak=self._running_peak,
            waiting_peak=self._waiting_peak,
            longest_wait_s=self._longest_wait_ms / 1e3,
            prompt_tokens=prompts,
            prefix_hit_tokens=self._hits,
            generated_tokens=self._tokens - prompts,
            steps=len(self._step_ns),
            virtual_s=self._virtual_ms / 1e3,
            window_pages_released=self.window_pages,
            segments_held=self.held_segments,
            segments_released=self.released_segments,
            fills=tuple(self._fills()),
            times=_times(np.array(self._step_ns) / 1e3, np.array(self._batches, np.float64)),
            books_s=self.busy_ns / 1e9,
            wall_s=wall_s,
            leaked=self._leaked,
        )

    def _fills(self) -> Sequence[Fill]:
        found = []
        for table in self.plan.tables:
            pairs = np.array(self._samples.get(table.name, [(0, 0)]), np.float64)
            held, used = pairs[:, 0], pairs[:, 1]
            allocated = float(held.mean()) * table.page_tokens
            peak, pages = int(held.max()), table.num_pages - 1
            found.append(Fill(table.name, pages, peak, allocated, float(used.mean())))
        return found


def _times(us: NDArray[np.float64], batches: NDArray[np.float64]) -> Times:
    if not us.size:
        return Times(0.0, 0.0, 0.0, 0.0, 1.0)
    quarter = max(1, len(us) // 4)
    expected = np.maximum(_line(us, batches), us.min())
    ratio = us / expected
    growth = float(np.median(ratio[-quarter:]) / np.median(ratio[:quarter]))
    return Times(
        median_us=float(np.median(us)),
        p99_us=float(np.percentile(us, 99)),
        first_quarter_us=float(np.median(us[:quarter])),
        last_quarter_us=float(np.median(us[-quarter:])),
        growth=growth,
    )


def _line(us: NDArray[np.float64], batches: NDArray[np.float64]) -> NDArray[np.float64]:
    """The straight line through the times by batch, at every step."""
    if batches.min() == batches.max():
        return np.full_like(us, np.median(us))
    slope, base = np.polyfit(batches, us, 1)
    line: NDArray[np.float64] = slope * batches + base
    return line
