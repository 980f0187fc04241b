"""Lengths of steps that were made before it was known what of earlier ones stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cache_support import (
    CHUNKED,
    FULL,
    MODELS,
    STATE,
    WINDOW,
    Driver,
    cache_of,
    close_to,
    scratch,
    some_tokens,
)

from kvfactory.cache import Cache
from kvfactory.errors import BooksError, SpecError
from kvfactory.states import DeviceCounts
from kvfactory.steps.step import Step

CROSS = {**FULL, "kind": "cross", "layers": [4], "encoder_tokens": 12}
TABLES = {
    "full": FULL,
    "local": {**WINDOW, "layers": [2]},
    "chunked": {**CHUNKED, "layers": [3]},
    "cross": CROSS,
    "state": {**STATE, "layers": [5]},
}
UNDECIDED = sorted(set(MODELS) - {"pooled", "hybrid", "all"})  # states need the commit first


def agree(cache: Cache, step: Step) -> None:
    """The device's arrays are what the books have said, and the lists what tables and lengths say.

    Of a step behind decided ones only: the books know no other lengths exactly.
    """
    host = step.host
    assert host.settled.all()
    assert step.positions.tolist() == host.positions.tolist()
    assert step.prefix.tolist() == host.prefix.tolist()
    for name, part in host.tables.items():
        arrays = step.tables[name]
        page_tokens = cache.plan.table(name).page_tokens
        assert arrays.slots.tolist() == part.slots.tolist(), name
        assert arrays.kv_lengths.tolist() == part.kv_lengths.tolist(), name
        assert arrays.first_page.tolist() == part.first_page.tolist(), name
        assert np.array_equal(arrays.pages.cpu().numpy(), cache.books.rows(name))
        listed: list[int] = []
        ends = [0]
        for row, tokens, first in zip(
            host.rows.tolist(), part.kv_lengths.tolist(), part.first_page.tolist(), strict=True
        ):
            listed += arrays.pages[row, first : -(-tokens // page_tokens)].tolist()
            ends.append(len(listed))
        assert arrays.lists.indptr.tolist() == ends, name
        assert arrays.lists.indices[: len(listed)].tolist() == listed, name
        last = [(tokens - 1) % page_tokens + 1 for tokens in part.kv_lengths.tolist()]
        assert arrays.lists.last_page.tolist() == last, name


def test_what_the_device_makes_is_what_the_books_say() -> None:
    check_agreement({})


def check_agreement(parts: dict[str, Any]) -> None:
    """Prefills, decodes, trees, encoders, forks and closed rows; then graphs padded on the sink."""
    cache = cache_of(TABLES, engine={"draft_tokens": 3, "draft_tree": True}, **parts)
    a, b, c = cache.open(3, cross_tokens=[5, 12, 7])
    for sequences, counts in (([a, b], [21, 3]), ([b, c, a], [9, 1, 0]), ([c, b, a], 1)):
        step = cache.extend(sequences, counts)
        agree(cache, step)
        cache.commit(step)
    step = cache.extend([a, c], [4, 2], [-1, 0, 0, 1, -1, 0])
    agree(cache, step)
    graph = cache.graph(3, tokens=4)
    cache.commit(step, [[0, 2], [0]])
    (d,) = cache.fork(a, 1)
    cache.close([b])
    step = cache.extend([d, a], [1, 2])
    agree(cache, step)
    cache.commit(step)
    step = cache.extend([a, c], 4)
    cache.fill(graph, step)
    agree_padded(graph.step)
    cache.commit(step)
    step = cache.extend([c, a], 4, [-1, 0, 0, 1] * 2)
    cache.fill(graph, step)
    agree_padded(graph.step)
    cache.commit(step, [[0], [0, 2]])
    whole = cache.graph(4, total=30)
    step = cache.extend([c, d], [11, 3])
    cache.fill(whole, step)
    agree_padded(whole.step)
    cache.commit(step)
    agree(cache, cache.extend([], 0))


def agree_padded(step: Step) -> None:
    """As ``agree``, and padding is on the sink: row, pages and slots."""
    host = step.host
    live = int(np.count_nonzero(host.rows))
    tokens = int(host.q_indptr[live])
    assert step.rows.tolist() == host.rows.tolist()
    assert step.positions.tolist() == host.positions.tolist()
    for name, part in host.tables.items():
        arrays = step.tables[name]
        assert arrays.slots.tolist() == part.slots.tolist(), name
        assert arrays.kv_lengths.tolist() == part.kv_lengths.tolist(), name
        assert arrays.first_page.tolist() == part.first_page.tolist(), name
        assert name == "cross" or (arrays.slots[tokens:] < 4).all()
        bounds = arrays.lists.indptr.tolist()
        assert not arrays.lists.indices[bounds[live] : bounds[-1]].any(), "padding reads the sink"


@pytest.mark.parametrize("model", UNDECIDED)
@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
@pytest.mark.parametrize("order", ["extend first", "graph too"])
def test_a_step_made_before_the_last_one_is_decided(model: str, accepted: int, order: str) -> None:
    cache = cache_of(model, engine={"draft_tokens": 3})
    driver, tokens, drafts = Driver(cache), some_tokens(13), some_tokens(4, 5)
    (sequence,) = driver.open()
    driver.step({sequence: tokens})
    first = cache.extend([sequence], 4)
    driver.feed.run(first, drafts)
    second = cache.extend([sequence], 2)
    assert second.prefix.tolist() == [17]
    graph = cache.graph(2, tokens=2)
    if order == "graph too":
        cache.fill(graph, second)
    cache.commit(first, [accepted])
    if order == "extend first":
        cache.fill(graph, second)
    kept = tokens + drafts[:accepted]
    assert second.prefix.tolist() == [13 + accepted]
    assert graph.step.prefix.tolist() == [13 + accepted, 0]
    out = driver.feed.run(second, [3, 1])
    close_to(out, scratch(cache, [*kept, 3, 1])[-2:])
    padded = driver.feed.run(graph.step, [3, 1, 0, 0])
    close_to(padded[:2], out)
    cache.commit(second)
    driver.tokens[sequence] = [*kept, 3, 1]
    close_to(driver.step({sequence: [8]})[sequence], scratch(cache, [*kept, 3, 1, 8])[-1:])


def test_host_and_device_begin_windows_at_the_same_page() -> None:
    """Where the prefix is decided; before, the host's first page is the earliest possible one."""
    cache = cache_of("windows", engine={"draft_tokens": 7})
    (sequence,) = cache.open()
    cache.commit(cache.extend([sequence], 31))
    first, second = cache.extend([sequence], 8), cache.extend([sequence], 1)
    local = second.tables["local"]
    assert int(second.host.tables["local"].first_page[0]) == (31 - 8) // 4
    assert local.first_page.tolist() == [(39 - 8) // 4]
    cache.commit(first, [2])
    assert local.first_page.tolist() == [(33 - 8) // 4]
    cache.commit(second)
    third = cache.extend([sequence], 1)
    agree(cache, third)
    assert third.tables["local"].first_page.tolist() == [(34 - 8) // 4]


def test_no_entries_of_several_tokens_behind_open_drafts() -> None:
    cache = cache_of("pooled", engine={"draft_tokens": 3})
    (sequence,) = cache.open()
    cache.commit(cache.extend([sequence], 5))
    first = cache.extend([sequence], 4)
    second = cache.extend([sequence], 2)
    rows = {"k": torch.zeros(2, 32), "index_k": torch.zeros(1, 16)}
    with pytest.raises(BooksError, match="commit that step first"):
        cache.write(0, second, **rows)
    cache.commit(first)


def test_more_tokens_than_a_step_may_have() -> None:
    cache = cache_of("windows", engine={"prefill_chunk_tokens": 16})
    most = cache.plan.limits.step_tokens
    sequences = cache.open(2)
    with pytest.raises(BooksError, match=f"need at most {most} in a step") as caught:
        cache.extend(sequences, [most, 1])
    assert caught.value.problems[0].path == "new_tokens"
    assert f"engine.prefill_chunk_tokens={most + 1}" in caught.value.problems[0].fix
    cache.commit(cache.extend(sequences, [most, 0]))


def test_the_longest_request_ends_with_steps_open() -> None:
    """An overlapped engine learns that a request is done when the next steps are open already."""
    cache = cache_of("full", engine={"draft_tokens": 2}, workload={"tokens": 64, "requests": 2})
    sequence, _ = cache.open(2)
    cache.commit(cache.extend([sequence], 63))
    first, second = cache.extend([sequence], 3), cache.extend([sequence], 3)
    cache.commit(first, [1])
    cache.commit(second, [0])
    assert cache.books.committed([sequence]).tolist() == [64]
    with pytest.raises((BooksError, SpecError), match="a sequence of 1064 tokens"):
        cache.extend([sequence], 1000)


class Late(DeviceCounts):
    """Counts that the host sees when it is told to; the device has them at once."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.landed = torch.tensor(counts), False

    def poll(self) -> np.ndarray | None:
        return self.counts.numpy() if self.landed else None


@pytest.mark.parametrize("seed", range(8))
def test_three_steps_in_flight_in_any_order(seed: int) -> None:
    """Counts from the host or late from the device: open steps have the lengths that come true."""
    random = np.random.default_rng(seed)
    groups = {name: TABLES[name] for name in ("full", "local", "chunked")}
    engine = {"draft_tokens": 3, "steps_in_flight": 3, "prefill_chunk_tokens": 32}
    workload = {"requests": 4, "tokens": 200}
    cache = cache_of(groups, engine=engine, workload=workload)
    sequences = cache.open(4)
    lengths = dict.fromkeys(sequences, 0)
    flights: list[tuple[Step, list[Any], list[int]]] = []
    committed: list[Late] = []  # in order; the books decide them as far as counts have landed
    graph = cache.graph(4, total=16)
    for _ in range(60):
        for known in committed:
            known.landed |= random.random() < 0.3
        while committed and committed[0].landed:
            committed.pop(0)
        if len(flights) + len(committed) < 3 and random.random() < 0.6:
            chosen = [s for s in sequences if random.random() < 0.7]
            counts = random.integers(0, 5, len(chosen)).tolist()
            step = cache.extend(chosen, counts)
            flights.append((step, chosen, counts))
            if random.random() < 0.5:
                cache.fill(graph, step)
        elif flights:
            step, chosen, counts = flights.pop(0)
            taken = [int(random.integers(0, n + 1)) for n in counts]
            committed.append(Late(taken))
            committed[-1].landed = bool(random.random() < 0.5)
            cache.commit(step, taken if committed[-1].landed else committed[-1])
            for sequence, count in zip(chosen, taken, strict=True):
                lengths[sequence] += count
        for step, chosen, counts in flights[:1]:  # what later ones begin with is open
            expect(cache, step, [lengths[s] for s in chosen], counts)
            if graph.step.host.serial == step.host.serial:
                live = len(chosen)
                assert graph.step.prefix[:live].tolist() == step.prefix.tolist()
                assert graph.step.positions[: sum(counts)].tolist() == step.positions.tolist()


def expect(cache: Cache, step: Step, before: list[int], counts: list[int]) -> None:
    """The step begins at ``before`` tokens of each sequence, in all its arrays."""
    assert step.prefix.tolist() == before
    positions = [
        t for start, n in zip(before, counts, strict=True) for t in range(start, start + n)
    ]
    assert step.positions.tolist() == positions
    rows = [row for row, n in zip(step.rows.tolist(), counts, strict=True) for _ in range(n)]
    for table in cache.plan.tables:
        arrays, p = step.tables[table.name], table.page_tokens
        slots = [
            int(arrays.pages[row, t // p]) * p + t % p
            for row, t in zip(rows, positions, strict=True)
        ]
        assert arrays.slots.tolist() == slots
        assert all(slot >= p for slot in slots)
        assert arrays.kv_lengths.tolist() == [a + n for a, n in zip(before, counts, strict=True)]
        first = [table.lifetime.first_visible(start) // p for start in before]
        assert arrays.first_page.tolist() == first
        bounds = arrays.lists.indptr.tolist()
        for b, (row, start) in enumerate(zip(step.rows.tolist(), first, strict=True)):
            listed = arrays.lists.indices[bounds[b] : bounds[b + 1]].tolist()
            assert listed == arrays.pages[row, start : start + len(listed)].tolist()
            assert all(listed)
