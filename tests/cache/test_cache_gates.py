"""Gates: nothing of a layer is read, written or copied before what a load brings is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_support import FULL, INDEX, STATE, Driver, cache_of, close_to, scratch, some_tokens

from kvfactory.books import Sequence as SequenceId
from kvfactory.cache import Cache
from kvfactory.cache.graphs import CallRecorder, Graph, GraphPlace
from kvfactory.errors import BooksError, BuildError
from kvfactory.pools import copies
from kvfactory.steps.step import GraphShape

HELD = 5
"""Tokens that arrive: the second page of 4 has one of them."""


class Sent:
    """A sequence of ``HELD`` tokens on another cache, and its copy that is received and empty."""

    def __init__(self, groups: dict[str, Any]) -> None:
        self.tokens = some_tokens(HELD)
        self._source, self.cache = cache_of(groups), cache_of(groups)
        driver = Driver(self._source)
        (self._sent,) = driver.open()
        driver.step({self._sent: self.tokens})
        self.driver = Driver(self.cache)
        self.received = self.cache.receive(HELD)
        self.driver.tokens[self.received] = list(self.tokens)

    def arrive(self) -> None:
        """Copy everything, over whatever is there."""
        sent, got = self._source.regions(self._sent), self.cache.regions(self.received)
        self.bring(sent, got)

    def bring(self, sent: Any, got: Any) -> None:
        for name, regions in sent.items():
            for begin, to, size in copies(regions, got[name]):
                data = self._source._parts.arena[begin : begin + size]
                self.cache._parts.arena[to : to + size] = data

    def regions(self) -> tuple[Any, Any]:
        return self._source.regions(self._sent), self.cache.regions(self.received)


def behind(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that does ``work``, which had the time to do what it does not wait for."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(0.1)
    return thread, found


GROUPS: dict[str, Any] = {
    "full": {"full": FULL},
    "selected": {"full": FULL, "index": {**INDEX, "selects": "full", "layers": [0, 1]}},
}


@pytest.mark.parametrize("groups", GROUPS)
def test_new_tokens_are_written_behind_what_arrives(groups: str) -> None:
    sent = Sent(GROUPS[groups])
    regions = sent.regions()
    gate = sent.cache.gate()
    step = sent.cache.extend([sent.received], 1)
    thread, outs = behind(lambda: sent.driver.feed.run(step, [7]))
    sent.bring(*regions)
    for layer in (0, 1):
        gate.open(layer)
    thread.join(5)
    close_to(outs[0], scratch(sent.cache, [*sent.tokens, 7])[-1:])


def test_a_write_alone_waits() -> None:
    sent = Sent({"full": FULL})
    regions = sent.regions()
    gate = sent.cache.gate([0])
    step = sent.cache.extend([sent.received], 1)
    k, v = torch.randn(2, 1, 2, 16)
    thread, done = behind(lambda: sent.cache.write(0, step, k=k, v=v))
    assert not done
    sent.bring(*regions)
    gate.open(0)
    thread.join(5)
    pool, index = sent.cache.pool(0)
    assert torch.equal(pool.read(index, step.tables["full"].slots)["k"], k)


def test_what_a_write_refuses_it_refuses_at_once() -> None:
    sent = Sent({"full": FULL})
    sent.cache.gate()
    step = sent.cache.extend([sent.received], 1)
    with pytest.raises(Exception, match="shape"):
        sent.cache.write(0, step, k=torch.randn(1, 2, 15), v=torch.randn(1, 2, 16))


# ---- copies ----------------------------------------------------------------------------------


def _refused(cache: Cache, call: Callable[[], object]) -> None:
    before = cache.books.capacity()
    with pytest.raises(BooksError, match="closed gate still awaits"):
        call()
    assert cache.books.capacity() == before


def test_a_fork_does_not_copy_what_has_not_arrived() -> None:
    sent = Sent({"full": FULL})
    regions = sent.regions()
    (child,) = sent.driver.fork(sent.received, 1)
    gate = sent.cache.gate(sequences=[sent.received])
    _refused(sent.cache, lambda: sent.cache.extend([child], 1))
    gate.open(0)
    _refused(sent.cache, lambda: sent.cache.extend([child], 1))
    sent.bring(*regions)
    gate.open(1)
    outs = sent.driver.step({child: [7]})
    close_to(outs[child], scratch(sent.cache, [*sent.tokens, 7])[-1:])


def _other(driver: Driver) -> tuple[SequenceId, SequenceId]:
    (other,) = driver.open()
    driver.step({other: some_tokens(6, seed=1)})
    return other, driver.fork(other, 1)[0]


def test_other_sequences_are_copied_behind_a_gate_that_names_its_own() -> None:
    sent = Sent({"full": FULL})
    _, child = _other(sent.driver)
    (late,) = sent.driver.fork(child, 1)
    gate = sent.cache.gate(sequences=[sent.received])
    step = sent.cache.extend([child], 1)
    assert len(step.host.tables["full"].copies) == 1
    gate.dismiss()
    out = sent.driver.feed.run(step, [3])
    sent.cache.commit(step)
    close_to(out, scratch(sent.cache, [*sent.driver.tokens[child], 3])[-1:])
    sent.cache.gate()
    _refused(sent.cache, lambda: sent.cache.extend([late], 1))


def test_a_whole_page_that_several_own_is_no_copy() -> None:
    cache = cache_of({"full": FULL})
    received = cache.receive(8)
    children = cache.fork(received, 2)
    cache.gate()
    step = cache.extend([received, *children], 1)
    assert not len(step.host.tables["full"].copies)


def test_states_that_have_not_arrived_are_not_copied() -> None:
    sent = Sent({"state": STATE})
    other, _ = _other(sent.driver)
    gate = sent.cache.gate(sequences=[sent.received])
    _refused(sent.cache, lambda: sent.cache.fork(sent.received, 1))
    _refused(sent.cache, lambda: sent.cache.hold(sent.received, HELD))
    sent.cache.release(sent.cache.hold(other, 6))
    gate.open(0)
    sent.arrive()
    gate.open(2)
    (child,) = sent.driver.fork(sent.received, 1)
    outs = sent.driver.step({child: [7]})
    close_to(outs[child], scratch(sent.cache, [*sent.tokens, 7])[-1:])


def test_a_state_copy_that_was_due_before_the_gate_is_not_made() -> None:
    sent = Sent({"state": STATE})
    (child,) = sent.driver.fork(sent.received, 1)
    sent.cache.gate(sequences=[sent.received])
    _refused(sent.cache, lambda: sent.cache.extend([child], 1))
    sent.cache.close([child])
    sent.cache.extend(sent.cache.open(), 1)


# ---- loads that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["dismiss", "reset"])
def test_a_cache_goes_on_after_a_load_that_failed(end: str) -> None:
    sent = Sent({"full": FULL})
    gate = sent.cache.gate()
    step = sent.cache.extend([sent.received], 1)
    gate.fail("the other side is gone")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"gone, need .*; try .*gate\.dismiss\(\)"):
            sent.driver.feed.run(step, [7])
    assert not gate.done
    if end == "dismiss":
        sent.cache.commit(step)
        sent.cache.close([sent.received])
        gate.dismiss()
    else:
        sent.cache.reset()
    assert gate.done
    driver = Driver(sent.cache)
    (sequence,) = driver.open()
    out = driver.step({sequence: [1, 2, 3]})[sequence]
    close_to(out, scratch(sent.cache, [1, 2, 3]))


def test_who_waits_at_a_gate_goes_on_when_it_is_dismissed() -> None:
    sent = Sent({"full": FULL})
    gate = sent.cache.gate()
    step = sent.cache.extend([sent.received], 1)
    thread, outs = behind(lambda: sent.driver.feed.run(step, [7]))
    assert not outs
    gate.dismiss()
    thread.join(5)
    assert len(outs) == 1


# ---- graphs ------------------------------------------------------------------------------------


class Launched(CallRecorder):
    """Replays of which the host sees nothing, as those of a CUDA graph."""

    captures = True


def test_a_graph_that_is_launched_whole_waits_for_all_layers() -> None:
    sent = Sent({"full": FULL})
    regions = sent.regions()
    cache = sent.cache
    place = GraphPlace(cache.plan, cache._parts.buffers, 0, cache._gates)
    graph = Graph(place, GraphShape(1, 1, 1), (), Launched())
    graph.capture(lambda step: cache.attend(0, q, k, v, step))
    q, (k, v) = torch.randn(1, 4, 16), torch.randn(2, 1, 2, 16)
    gate = cache.gate()
    cache.fill(graph, cache.extend([sent.received], 1))
    gate.open(0)
    thread, outs = behind(graph.replay)
    assert not outs
    sent.bring(*regions)
    gate.open(1)
    thread.join(5)
    assert len(outs) == 1
