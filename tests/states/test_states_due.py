"""Copies that are due out of slots that were freed meanwhile: whoever gets the slot, they are made.

States are numbers here: what a layer would store after a sequence's tokens is one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from states_support import spec_of

from kvfactory.books import Segment, Sequence
from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.errors import BooksError, OutOfPages
from kvfactory.planner import plan
from kvfactory.states.planes import device_ids, fetch, store
from kvfactory.steps.step import Step


def cache_with(mode: str, requests: int = 4) -> Cache:
    workload = {"requests": requests, "tokens": 96}
    return build(plan(spec_of("none", engine={"state_tracking": mode}, workload=workload)))


def write(cache: Cache, slot: int, value: float) -> None:
    """What the layers of a step do to a state."""
    pool = cache.pool(0, "state")[0]
    for index in range(2):
        for tensor in pool.group.tensors:
            shape = [extent for _, extent in tensor.logical.axes]
            store(
                pool, index, device_ids(pool, [slot]), tensor.name, torch.full([1, *shape], value)
            )


def read(cache: Cache, slot: int) -> float:
    pool = cache.pool(0, "state")[0]
    found = {
        float(x)
        for index in range(2)
        for tensor in pool.group.tensors
        for x in fetch(pool, index, device_ids(pool, [slot]), tensor.name).unique()
    }
    assert len(found) == 1
    return found.pop()


def run(cache: Cache, step: Step, values: list[float]) -> None:
    for slot, value in zip(step.host.states["state"].slots.tolist(), values, strict=True):
        write(cache, slot, value)


@pytest.mark.parametrize("mode", ["lazy", "one", "two"])
@pytest.mark.parametrize("heir", ["fork", "hold"])
def test_a_tracked_state_spares_the_source_of_a_copy_that_is_due(mode: str, heir: str) -> None:
    cache = cache_with(mode)
    x, p = cache.open(2)
    step = cache.extend([x, p], 4)
    cache.states.track(x, 4)
    run(cache, step, [1, 2])
    cache.commit(step)
    step = cache.extend([x], 2)
    child = cache.fork(p, 1)[0] if heir == "fork" else None
    held = cache.hold(p, 4) if heir == "hold" else None
    freed = cache.books.state_slots(p)["state"]
    cache.close([p])
    if mode != "lazy":
        cache.states.donate(x)
    tracked = cache.states.track(x, 6)["state"]
    assert tracked == freed
    write(cache, tracked, 99)
    run(cache, step, [3])
    cache.commit(step)
    if held is not None:
        (child,) = cache.open(1, [held])
    assert child is not None
    (slot,) = cache.extend([child], 1).host.states["state"].slots.tolist()
    assert read(cache, slot) == 2


@pytest.mark.parametrize("mode", ["lazy", "one", "two"])
def test_a_position_has_one_tracking_slot(mode: str) -> None:
    cache = cache_with(mode)
    (x,) = cache.open(1)
    step = cache.extend([x], 5)
    first = cache.states.track(x, 4)
    assert cache.states.track(x, 4) == first
    write(cache, first["state"], 7)
    cache.commit(step)
    assert cache.books.capacity()["states.state"].held == (3 if mode == "two" else 2)
    segment = cache.states.donate(x)
    assert segment.slots == first
    now = cache.states.track(x)
    assert cache.states.track(x) == now


# ---- random histories ----------------------------------------------------------------------------


@dataclass(eq=False)
class Live:
    """An open sequence: its tokens, and the number that is its state after them."""

    handle: Sequence
    tokens: int = 0
    state: float = 0
    tracked: dict[int, float] = field(default_factory=dict)


class History:
    """Sequences come and go while a step is open, whose layers have still to run."""

    def __init__(self, mode: str, seed: int) -> None:
        self.cache = cache_with(mode, requests=6)
        self.random = Random(seed)
        self.names = count(1)
        self.live: list[Live] = []
        self.held: list[tuple[Segment, Live]] = []
        self.step: Step | None = None
        self.busy: list[Live] = []

    def attempt(self, operation: Callable[..., Any], *given: Any) -> Any:
        """The result, or None where the books are short or refuse."""
        try:
            return operation(*given)
        except (OutOfPages, BooksError):
            return None

    def any_live(self, busy: bool | None = None) -> Live:
        """An open sequence, in the open step or not, if there is such a one."""
        if not self.live:
            self.turn()
            while self.held:
                self.release()
            self.open()
        able = [live for live in self.live if busy is None or busy == (live in self.busy)]
        return self.random.choice(able or self.live)

    def open(self) -> None:
        found = self.random.choice([None, *self.held])
        prefix, old = ([found[0]], found[1]) if found else ([], None)
        for handle in self.attempt(self.cache.open, 1, prefix) or []:
            self.live.append(Live(handle, old.tokens, old.state) if old else Live(handle))

    def fork(self, leaves: bool = False) -> None:
        """A copy is due; out of a slot of nobody if the parent ``leaves``."""
        parent = self.any_live(busy=False)
        for handle in self.attempt(self.cache.fork, parent.handle, 1) or []:
            self.live.append(Live(handle, parent.tokens, parent.state))
        if leaves:
            self.close(parent)

    def outlive(self) -> None:
        self.fork(leaves=True)

    def close(self, live: Live | None = None) -> None:
        live = live or self.any_live()
        self.live.remove(live)
        self.cache.close([live.handle])

    def own(self) -> None:
        live, states = self.any_live(), self.cache.states
        how = self.random.choice(["hold", "donate", "whole", "last"])
        operation, *given = {
            "hold": (self.cache.hold, live.handle, live.tokens),
            "donate": (states.donate, live.handle),
            "whole": (states.retire, live.handle),
            "last": (states.retire, live.handle, True),
        }[how]
        segment = self.attempt(operation, *given)
        if segment is None:
            return
        state = live.tracked[segment.stop] if how in ("donate", "last") else live.state
        self.held.append((segment, Live(live.handle, segment.stop, state)))
        if how in ("whole", "last"):
            self.live.remove(live)
        elif self.random.random() < 0.5:
            self.close(live)

    def release(self) -> None:
        if self.held:
            self.cache.release(self.held.pop(self.random.randrange(len(self.held)))[0])

    def turn(self) -> None:
        """The open step is done, the next one begins."""
        if self.step is not None:
            slots = self.step.host.states["state"].slots.tolist()
            for live, slot in zip(self.busy, slots, strict=True):
                assert read(self.cache, slot) == live.state
                live.tokens, live.state = live.tokens + 2, next(self.names)
                write(self.cache, slot, live.state)
            self.cache.commit(self.step)
        self.busy = [live for live in self.live if self.random.random() < 0.6]
        self.step = self.attempt(self.cache.extend, [live.handle for live in self.busy], 2)

    def track(self) -> None:
        """The state as it is, or one that the open step is about to make, written at once."""
        live = self.any_live(busy=self.random.random() < 0.7)
        if self.step is None or live not in self.busy:
            if self.attempt(self.cache.states.track, live.handle):
                live.tracked[live.tokens] = live.state
            return
        tokens = live.tokens + self.random.randint(1, 2)
        slots = self.attempt(self.cache.states.track, live.handle, tokens)
        if slots:
            live.tracked[tokens] = next(self.names)
            write(self.cache, slots["state"], live.tracked[tokens])

    def check(self) -> None:
        """Every state is where the books say; copies that are due stay so."""
        due = self.cache.books._ledger.states["state"]._sources
        for segment, held in self.held:
            place = segment.slots["state"]
            assert read(self.cache, due.get(place, place)) == held.state
        for live in self.live:
            place = self.cache.books.state_places(live.handle)["state"]
            if place and not (self.step and live in self.busy):
                assert read(self.cache, place) == live.state


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", ["lazy", "one", "two"])
def test_states_are_where_the_books_say_in_any_order_of_calls(mode: str, seed: int) -> None:
    history = History(mode, seed)
    operations = [history.turn, history.track, history.outlive] * 3 + [history.release] * 2
    operations += [history.open, history.fork, history.close, history.own]
    for _ in range(250):
        history.random.choice(operations)()
        history.check()
