"""What reaches the device and when: arrays of a step when they are read, table changes in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cache_support import CHUNKED, FULL, WINDOW, cache_of
from torch import Tensor

from kvfactory.cache import Cache
from kvfactory.steps.fields import StepSize
from kvfactory.steps.indexing import TorchIndexer
from kvfactory.steps.staging import Stage
from kvfactory.steps.step import Step

TABLES = {
    "full": FULL,
    "local": {**WINDOW, "layers": [2]},
    "chunked": {**CHUNKED, "layers": [3]},
}


@dataclass
class Count:
    """What was asked for since ``taken`` was called last."""

    sends: int = 0
    builds: int = 0
    updates: int = 0

    def taken(self) -> tuple[int, int]:
        """Sends and index builds."""
        found = self.sends, self.builds
        self.sends = self.builds = 0
        return found


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts copies of staged numbers, index builds and entries of device tables written."""
    counted = Count()
    send, build, update = Stage.send, TorchIndexer.build, TorchIndexer.update

    def counted_send(self: Stage, target: Tensor) -> None:
        counted.sends += 1
        send(self, target)

    def counted_build(self: TorchIndexer, number: int, size: StepSize) -> None:
        counted.builds += 1
        build(self, number, size)

    def counted_update(self: TorchIndexer, updates: Tensor, n: int) -> None:
        counted.updates += n
        update(self, updates, n)

    monkeypatch.setattr(Stage, "send", counted_send)
    monkeypatch.setattr(TorchIndexer, "build", counted_build)
    monkeypatch.setattr(TorchIndexer, "update", counted_update)
    return counted


def tables_agree(cache: Cache, step: Step) -> None:
    """Reads arrays of ``step``; the device tables are the books'."""
    for name, arrays in step.tables.items():
        assert np.array_equal(arrays.pages.numpy(), cache.books.rows(name)), name


def test_a_step_that_only_fills_a_graph_costs_one_send(count: Count) -> None:
    cache = cache_of(TABLES)
    sequences = cache.open(3)
    prompt = cache.extend(sequences, 5)
    assert count.taken() == (0, 0), "nothing before its arrays are read"
    tables_agree(cache, prompt)
    assert prompt.positions.tolist() == [*range(5)] * 3
    assert count.taken() == (1, 1)
    cache.commit(prompt)
    graph = cache.graph(4)
    count.taken()
    before = count.updates
    for number in range(40):
        step = cache.extend(sequences, 1)
        cache.fill(graph, step)
        assert count.taken() == (1, 1)
        tables_agree(cache, graph.step)
        assert graph.step.prefix.tolist() == [5 + number] * 3 + [0]
        cache.commit(step)
        assert count.taken() == (0, 0)
    assert count.updates > before + 40, "pages came and left meanwhile"


def test_a_step_that_nobody_reads_still_changes_the_tables(count: Count) -> None:
    cache = cache_of(TABLES)
    sequences = cache.open(2)
    for _ in range(12):
        cache.commit(cache.extend(sequences, 3))
    assert count.taken() == (11, 11), "each made when the next is begun"
    step = cache.extend(sequences, 1)
    tables_agree(cache, step)
    assert count.taken() == (2, 2)


def test_a_graph_is_no_reader_of_other_steps(count: Count) -> None:
    """Two steps open: the first is made when the second begins, and fills the graph as it was."""
    cache = cache_of(TABLES)
    sequences = cache.open(2)
    cache.commit(cache.extend(sequences, 8))
    graph = cache.graph(2)
    first, second = cache.extend(sequences, 1), cache.extend(sequences, 1)
    count.taken()
    cache.fill(graph, first)
    assert count.taken() == (1, 1)
    assert graph.step.positions.tolist() == [8, 8]
    cache.fill(graph, second)
    assert count.taken() == (1, 1)
    tables_agree(cache, graph.step)
    assert first.positions.tolist() == [8, 8]
    assert count.taken() == (0, 0)
    assert second.positions.tolist() == [9, 9]
    assert count.taken() == (1, 1), "a step that filled a graph can be read nevertheless"


@pytest.mark.parametrize("counts", ["host", "device"])
def test_lost_tokens_cost_the_steps_behind_them_alone(count: Count, counts: str) -> None:
    cache = cache_of(TABLES, engine={"draft_tokens": 3})
    sequences = cache.open(2)
    cache.commit(cache.extend(sequences, 8))
    alone = cache.extend(sequences, 4)
    assert len(alone.rows) == 2
    count.taken()
    cache.commit(alone, [2, 1])
    assert count.taken() == (0, 0), "no step is behind it"
    first = cache.extend(sequences, 4)
    behind = cache.extend(sequences[::-1], 1)
    count.taken()
    if counts == "device":
        cache._parts.buffers.shorten(first.host, torch.tensor([1, 3]))
    else:
        cache.commit(first, [1, 3])
    assert count.taken() == (1, 1), "made once, of the shorter lengths"
    assert behind.prefix.tolist() == [9 + 3, 10 + 1]
    assert behind.tables["full"].kv_lengths.tolist() == [13, 12]


def test_what_was_there_before_a_reset_or_a_foreign_engine_is_gone(count: Count) -> None:
    cache = cache_of({"full": FULL})
    cache.extend(cache.open(2), 9)
    cache.reset()
    assert count.updates, "never later than what comes after"
    step = cache.step({"full": [[3, 4, 5]]}, [5], [9])
    assert step.tables["full"].lists.indices[:3].tolist() == [3, 4, 5]
    unread = cache.step({"full": [[6, 7, 8]]}, [5], [9])
    assert unread.host is not step.host
    step = cache.extend(cache.open(1), 2)
    tables_agree(cache, step)


@pytest.mark.parametrize("seed", range(6))
def test_reading_late_reads_the_same(seed: int) -> None:
    """Two equal caches, one of which reads every step at once: open steps never differ."""
    random = np.random.default_rng(seed)
    engine = {"draft_tokens": 3, "steps_in_flight": 3, "prefill_chunk_tokens": 32}
    workload = {"requests": 4, "tokens": 400}
    late, early = (cache_of(TABLES, engine=engine, workload=workload) for _ in range(2))
    sequences = [cache.open(4) for cache in (late, early)]
    graphs = [cache.graph(4, total=16) for cache in (late, early)]
    flights: list[tuple[Step, Step]] = []
    for _ in range(90):
        if len(flights) < 3 and random.random() < 0.6:
            chosen = [n for n in range(4) if random.random() < 0.8]
            counts = random.integers(0, 5, len(chosen)).tolist()
            first = late.extend([sequences[0][n] for n in chosen], counts)
            second = early.extend([sequences[1][n] for n in chosen], counts)
            everything(second)
            flights.append((first, second))
        elif flights:
            first, second = flights.pop(0)
            taken = [int(random.integers(0, n + 1)) for n in np.diff(first.host.q_indptr)]
            accepted = taken if random.random() < 0.5 else None
            late.commit(first, accepted)
            early.commit(second, accepted)
        if flights and random.random() < 0.5:
            first, second = flights[int(random.integers(len(flights)))]
            late.fill(graphs[0], first)
            early.fill(graphs[1], second)
            assert everything(graphs[0].step) == everything(graphs[1].step)
        if flights and random.random() < 0.3:
            first, second = flights[int(random.integers(len(flights)))]
            assert everything(first) == everything(second)


def everything(step: Step) -> list[list[int]]:
    """All arrays of ``step``, the page lists as far as they go."""
    found = [step.rows, step.q_indptr, step.prefix, step.positions]
    for table in step.tables.values():
        lists = table.lists
        found += [table.slots, table.kv_lengths, table.first_page, lists.indptr, lists.last_page]
        found.append(lists.indices[: int(lists.indptr[-1])])
    return [array.tolist() for array in found]
