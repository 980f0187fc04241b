"""Random histories of a whole cache, every byte of which is known beforehand.

Sequences open on prefixes, fork, and grow by chunks, decodes, drafts and draft trees with two steps
in flight and counts that land late. Before each operation every table is made too short for it: it
is refused then, and not one byte or number changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from books_support import audit, refusal
from books_support import snapshot as books_snapshot
from cache_oracle import Life, Oracle
from cache_support import FULL, INDEX, STATE, VOCABULARY, WINDOW, cache_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfactory.books import Books, Segment, Sequence
from kvfactory.cache.retraction import CacheImage
from kvfactory.errors import BooksError, OutOfPages
from kvfactory.states import DeviceCounts
from kvfactory.steps.step import Step

ROW_TOKENS = 40
DRAFTS = 3
HEAD = {"q_heads": 1, "kv_heads": 1, "head_dim": 16}
GROUPS = {
    "full": {**FULL, **HEAD, "layers": [0]},
    "local": {**WINDOW, **HEAD, "v_head_dim": 8, "layers": [1], "window_tokens": 6},
    "index": {**INDEX, "layers": [0], "selects": "full"},
    "state": {**STATE, "layers": [1, 2]},
}
QUANT = {"k": "int8_token_head", "index_k": "int8_token_head"}


class LateCounts(DeviceCounts):
    """Accepted counts that are known to the device, and to the host when told so."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.there = torch.tensor(counts), False

    def poll(self) -> Any:
        return self.counts.numpy() if self.there else None


@dataclass(eq=False)
class Live:
    """An open sequence and what it must be once everything decided is known."""

    handle: Sequence
    life: Life


@dataclass(eq=False)
class Open:
    """A step in flight: drafts and accepted paths of each sequence; ``counts`` on their way."""

    step: Step
    lives: list[Live]
    drafts: list[tuple[int, ...]]
    paths: list[list[int]]
    launched: bool = False
    counts: LateCounts | None = None


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache and compares it with the oracle after every operation."""

    engine: ClassVar[dict[str, Any]] = {"draft_tokens": DRAFTS, "state_tracking": "two"}
    layout: ClassVar[dict[str, str]] = {}
    trees = False

    def __init__(self) -> None:
        super().__init__()
        limits = {"prefill_chunk_tokens": 24, **self.engine}
        self.cache = cache_of(
            GROUPS,
            model={"num_layers": 3},
            engine=limits,
            kv={"quant": QUANT, "layout": self.layout},
            memory={"checkpoints": 2},
            workload={"requests": 4, "tokens": ROW_TOKENS, "mean_tokens": 18},
        )
        self.oracle = Oracle(self.cache)
        drafts = self.engine.get("draft_tokens", 0)
        self.nodes = drafts + 1 if drafts else 0
        self.live: list[Live] = []
        self.steps: list[Open] = []
        self.segments: list[tuple[Segment, Life]] = []
        self.images: list[tuple[CacheImage, list[Life], list[dict[str, torch.Tensor]]]] = []
        self.seed = 0

    # ---- helpers -------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        """Tokens that nobody else has in this order."""
        self.seed += 1
        random = torch.Generator().manual_seed(self.seed)
        return torch.randint(VOCABULARY, (count,), generator=random).tolist()

    def pick(self, number: int, items: list[Any]) -> Any:
        return items[number % len(items)]

    def snapshot(self) -> Any:
        """All that the cache remembers, and all its memory."""
        mirrors = {
            name: (mirror.pending.tobytes(), mirror.exact.tobytes())
            for name, mirror in self.cache.states._mirrors.items()
        }
        arena = self.cache._parts.arena.numpy().tobytes()
        return books_snapshot(self.cache.books), mirrors, arena

    def attempt(self, taken: Callable[[Books], Any], operation: Callable[[], Any]) -> Any:
        """The result of ``operation``, or None where something is short.

        ``taken`` is its part in the books, which tells on copies how many ids of each table it
        takes; with one less in any of them the cache refuses and does not change at all.
        """
        self.cache.books.settle()
        for allocator in self.cache.books._ledger.allocators:
            need = refusal(self.cache.books, taken, allocator.path, 0)
            if need:
                top = allocator._top
                allocator._top = max(top, allocator._stack.size - need + 1)
                self.refused(operation, OutOfPages, allocator.path)
                allocator._top = top
        before = self.snapshot()
        try:
            return operation()
        except OutOfPages as error:
            capacity = self.cache.books.capacity()
            for problem in error.problems:
                assert int(problem.need) > capacity[problem.path].free
            assert self.snapshot() == before
            return None

    def refused(self, operation: Callable[[], Any], kind: type[Exception], path: str = ":") -> None:
        before = self.snapshot()
        with pytest.raises(kind, match=re.escape(path)):
            operation()
        assert self.snapshot() == before

    def busy(self, live: Live) -> bool:
        """Whether a step of ``live`` is open, or its counts are on their way."""
        return any(live in opened.lives for opened in self.steps)

    def idle(self, which: int) -> Live | None:
        """A sequence that nothing is in flight for."""
        self.absorb()
        idle = [live for live in self.live if not self.busy(live)]
        return self.pick(which, idle) if idle else None

    def absorb(self) -> None:
        """Forget committed steps whose counts have landed."""
        self.cache.books.settle()
        while self.steps and self.steps[0].counts is not None and self.steps[0].counts.there:
            self.steps.pop(0)

    def flushed(self, live: Live, operation: Callable[[], Any]) -> None:
        """Fold the ring of ``live``; before, what copies its state is refused."""
        ring = any(
            mirror.at(place)
            for mirror in self.cache.states._mirrors.values()
            for place in self.cache.books.state_places(live.handle).values()
        )
        if ring:
            self.refused(operation, BooksError, "replay ring")
            self.cache.states.flush([live.handle])

    # ---- sequences -----------------------------------------------------------------------------

    @rule(number=st.integers(1, 2), which=st.integers(-3, 9))
    def open(self, number: int, which: int) -> None:
        chosen = self.pick(which, self.segments) if which >= 0 and self.segments else None
        prefix, life = ([chosen[0]], chosen[1]) if chosen else ([], Life())
        opened = self.attempt(
            lambda books: books.open(number, prefix), lambda: self.cache.open(number, prefix)
        )
        self.live += [Live(handle, life) for handle in opened or []]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        if (live := self.idle(which)) is None:
            writing = [live for live in self.live if self.drafted(live)]
            for live in writing[:1]:
                self.refused(lambda live=live: self.cache.fork(live.handle, 1), BooksError)
            return
        self.flushed(live, lambda: self.cache.fork(live.handle, 1))
        forks = self.attempt(
            lambda books: books.fork(live.handle, 1), lambda: self.cache.fork(live.handle, 1)
        )
        self.live += [Live(handle, live.life) for handle in forks or []]

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        live = self.pick(which, self.live)
        self.live.remove(live)
        self.cache.close([live.handle])
        self.refused(lambda: self.cache.close([live.handle]), BooksError, "handle")

    # ---- steps ---------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(data=st.data(), skipped=st.integers(0, 7))
    def extend_chunk(self, data: st.DataObject, skipped: int) -> None:
        self.extend(data, "chunk", skipped)

    @precondition(lambda self: self.live and self.nodes)
    @rule(data=st.data(), skipped=st.integers(0, 7))
    def extend_draft(self, data: st.DataObject, skipped: int) -> None:
        self.extend(data, "tree" if self.trees and data.draw(st.booleans()) else "chain", skipped)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), skipped=st.sampled_from([0, 0, 1, 2]))
    def decode(self, data: st.DataObject, skipped: int) -> None:
        self.extend(data, "decode", skipped)
        self.commit(late=False)

    def extend(self, data: st.DataObject, kind: str, skipped: int) -> None:
        self.absorb()
        lives = [live for n, live in enumerate(self.live) if not skipped >> n & 1]
        handles = [live.handle for live in lives]
        if len(self.steps) == 2:
            self.refused(lambda: self.cache.extend(handles, 1), BooksError, "open")
            return
        most = {"decode": 1, "chunk": 9, "chain": self.nodes, "tree": self.nodes}[kind]
        room = [ROW_TOKENS - len(live.life.tokens) - self.drafted(live) for live in lives]
        least = 1 if kind == "decode" else 0
        counts = [min(data.draw(st.integers(least, most)), n) for n in room]
        parents = [data.draw(st.integers(-1, n - 1)) for c in counts for n in range(c)]
        tree = np.array(parents, np.int64) if kind == "tree" else None
        step = self.attempt(
            lambda books: books.extend(handles, counts, tree),
            lambda: self.cache.extend(handles, counts, tree),
        )
        if step is None:
            return
        drafts = [tuple(self.tokens(count)) for count in counts]
        starts = step.host.q_indptr.tolist()
        paths = [self.path(data, kind, c, tree, s) for c, s in zip(counts, starts, strict=False)]
        self.steps.append(Open(step, lives, drafts, paths))

    def drafted(self, live: Live) -> int:
        """Tokens of ``live`` in steps whose outcome the books do not know, the known ones less."""
        found = 0
        for opened in self.steps:
            for other, draft, path in zip(opened.lives, opened.drafts, opened.paths, strict=True):
                if other is live:
                    found += len(draft) - (len(path) if opened.counts else 0)
        return found

    def path(self, data: st.DataObject, kind: str, count: int, tree: Any, first: int) -> list[int]:
        """The nodes that will be accepted: all of what no snapshot keeps."""
        if kind == "tree":
            node, path = data.draw(st.integers(-1, count - 1)), list[int]()
            while node >= 0:
                path.insert(0, node)
                node = int(tree[first + node])
            return path
        if kind == "decode" or count > self.nodes or not self.nodes:
            return list(range(count))
        return list(range(data.draw(st.integers(0, count))))

    def launch(self, opened: Open) -> None:
        """The device's part of a step, with the lengths that its arrays have by now."""
        flat = [token for draft in opened.drafts for token in draft]
        self.oracle.write(opened.step, flat)
        opened.launched = True

    @precondition(lambda self: self.steps)
    @rule(late=st.booleans())
    def commit(self, late: bool) -> None:
        waiting = [opened for opened in self.steps if opened.counts is None]
        if not waiting:
            self.land()
            return
        opened = waiting[0]
        for later in waiting[1:]:
            self.refused(lambda later=later: self.cache.commit(later.step), BooksError, "in order")
        tree = opened.step.host.parents is not None
        if self.steps[0].counts is not None and tree:
            self.land()
        if not opened.launched:
            self.launch(opened)
        counts: Any = [len(path) for path in opened.paths]
        self.impossible(opened, counts)
        if late and not tree:
            opened.counts = LateCounts(counts)
            self.cache.commit(opened.step, opened.counts)
        else:
            self.land()
            self.steps.remove(opened)
            self.cache.commit(opened.step, opened.paths if tree else counts)
        for live, draft, path in zip(opened.lives, opened.drafts, opened.paths, strict=True):
            live.life = live.life.then([draft[node] for node in path])
        self.absorb()

    def impossible(self, opened: Open, counts: list[int]) -> None:
        """Tokens that recurrent states cannot forget, and more than there are, are refused."""
        new = [len(draft) for draft in opened.drafts]
        if opened.step.host.parents is None and counts and not self.steps[0].counts:
            self.refused(
                lambda: self.cache.commit(opened.step, [n + 1 for n in new]), BooksError, "accepted"
            )
        over = [n > self.nodes for n in new]
        if any(over):
            less = [n - 1 if too_many else n for n, too_many in zip(new, over, strict=True)]
            self.refused(lambda: self.cache.commit(opened.step, less), BooksError, "of a state")

    @precondition(lambda self: any(opened.counts for opened in self.steps))
    @rule()
    def land(self) -> None:
        for opened in self.steps:
            if opened.counts is not None:
                opened.counts.there = True
        self.absorb()

    # ---- what always holds ---------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.absorb()
        audit(self.cache.books)

    @invariant()
    def every_byte_is_there(self) -> None:
        self.cache.states.copy_due()
        for live in self.live:
            if not self.busy(live):
                self.oracle.check(self.cache.books.view(live.handle), live.life)
        for segment, life in self.segments:
            self.oracle.check(segment, life)

    def teardown(self) -> None:
        self.land()
        while self.steps:
            self.commit(late=False)
        self.cache.close([live.handle for live in self.live])
        for segment, _ in self.segments:
            self.cache.release(segment)
        assert all(capacity.held == 0 for capacity in self.cache.books.capacity().values())
