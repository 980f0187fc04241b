"""On a GPU: the same answers, images through pinned memory, gates by events, no waiting.

What a step makes on the device is what the books say; nothing is compiled after ``build``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import MODELS, Driver, Feed, cache_of, close_to, scratch, some_tokens
from gpu_here import no_waiting, this_gpu
from test_cache_lengths import UNDECIDED, check_agreement

from kvfactory.cache import Cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ATTENDING = sorted(
    name
    for name, groups in MODELS.items()
    if not any(group["kind"] == "linear" for group in groups.values())
)


def _here() -> dict[str, Any]:
    return {"device": this_gpu(), "backend": {"name": "torch"}}


def _cache(model: str, **parts: Any) -> Cache:
    return cache_of(model, **_here(), **parts)


@pytest.mark.parametrize("model", ATTENDING)
def test_the_same_answers_as_on_the_host(model: str) -> None:
    cache = _cache(model)
    driver, tokens = Driver(cache), some_tokens(30)
    (sequence,) = driver.open()
    outs = [driver.step({sequence: tokens[a:b]})[sequence] for a, b in ((0, 9), (9, 10), (10, 27))]
    (sequence,) = cache.load(cache.offload([sequence]))
    driver.tokens[sequence] = tokens[:27]
    outs.append(driver.step({sequence: tokens[27:]})[sequence])
    close_to(torch.cat(outs).cpu(), scratch(cache_of(model), tokens))


def test_writing_waits_for_nothing() -> None:
    cache = _cache("pooled")
    feed = Feed(cache)
    step = cache.extend(cache.open(), 9)
    feed.run(step, some_tokens(9))
    k, v = torch.randn(9, 32, device="cuda"), None
    keys = torch.randn(2, 16, device="cuda")
    with no_waiting():
        cache.write(0, step, k=k, v=v, index_k=keys)


def test_steps_are_what_the_books_say() -> None:
    check_agreement(_here())


def test_steps_wait_for_nothing() -> None:
    """New and forked sequences, windows that let go, counts on the device, trees, graphs."""
    cache = _cache("windows", engine={"draft_tokens": 3})
    sequences = cache.open(2)
    graph = cache.graph(3, tokens=2)
    counts = torch.tensor([1, 2], device="cuda")
    with no_waiting():
        cache.commit(cache.extend(sequences, [22, 5]))
        cache.fork(sequences[0], 1)
    for _ in range(6):
        with no_waiting():
            torch.cuda._sleep(1_000_000)
            first = cache.extend(sequences, 3)
            second = cache.extend(sequences, 2)
            cache.commit(first, counts)
            cache.fill(graph, second)
            cache.commit(second)
        torch.cuda.synchronize()  # until the counts have landed no third step may begin
    with no_waiting():
        step = cache.extend(sequences, 4, [-1, 0, 0, 1] * 2)
        cache.commit(step, [[0, 2], [0]])


@pytest.mark.parametrize("model", UNDECIDED)
def test_counts_on_the_device_shorten_open_steps(model: str) -> None:
    cache = _cache(model, engine={"draft_tokens": 3})
    driver, tokens = Driver(cache), some_tokens(13)
    a, b = driver.open(2)
    driver.step({a: tokens, b: tokens[:6]})
    drafts, kept = some_tokens(8, 5), torch.tensor([2, 3], device="cuda")
    first = cache.extend([a, b], 4)
    driver.feed.run(first, drafts)
    second = cache.extend([b, a], 1)
    torch.cuda._sleep(50_000_000)  # the counts have not landed when the next step is made
    cache.commit(first, kept)
    out = driver.feed.run(second, [3, 1])
    cache.commit(second)
    a_tokens, b_tokens = tokens + drafts[:2], tokens[:6] + drafts[4:7]
    third = cache.extend([a], 1)
    last = driver.feed.run(third, [9])
    host = cache_of(model)
    close_to(out.cpu()[1], scratch(host, [*a_tokens, 1])[-1])
    close_to(out.cpu()[0], scratch(host, [*b_tokens, 3])[-1])
    close_to(last.cpu(), scratch(host, [*a_tokens, 1, 9])[-1:])


def test_more_updates_of_tables_than_a_step_has_room_for() -> None:
    cache = _cache(
        "full",
        kv={"page_tokens": 1},
        workload={"requests": 12, "tokens": 64},
        engine={"prefill_chunk_tokens": 64},
    )
    room = next(f for f in cache.plan.fields if f.name == "updates").elements // 4
    sequences = cache.open(12)
    for sequence in sequences:
        cache.commit(cache.extend([sequence], 60))
    cache.close(sequences[1:])
    step = cache.extend([sequences[0]], 1)
    assert len(step.host.tables["full"].updates) > room
    pages = step.tables["full"].pages.cpu().numpy()
    assert (pages == cache.books.rows("full")).all()


@pytest.mark.parametrize("model", ["dsa", "minimax", "windows"])
def test_after_build_nothing_is_compiled(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with every operation, from the first prefill on; and a layer writes in one launch."""
    import triton

    from kvfactory.kernels.launch import Kernel

    tree = {"draft_tokens": 4, "draft_tree": True}
    cache = _cache(model, engine=tree)
    compiled: list[object] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **found: compiled.append(found["src"])
    )
    driver, tokens = Driver(cache), some_tokens(13)
    (a,) = driver.open()
    driver.step({a: tokens})
    (b,) = driver.fork(a, 1)
    driver.step({a: [1], b: [2, 3]})
    step = cache.extend([a], 5, [-1, 0, 0, 1, 2])
    driver.feed.run(step, some_tokens(5))
    cache.commit(step, [[0, 2, 4]])
    segment = cache.hold(b, 15)
    cache.close([b])
    (c,) = driver.open(prefix=[segment])
    cache.release(segment)
    (a,) = cache.load(cache.offload([a]))
    graph = cache.graph(4)
    step = cache.extend([a, c], 1)
    cache.fill(graph, step)
    driver.feed.run(graph.step, [4, 5, 0, 0])
    cache.commit(step)
    assert not compiled
    launches: list[str] = []
    launch = Kernel.launch

    def counting(kernel: Kernel, programs: int, *values: Any) -> None:
        launches.append(kernel.function.__name__)
        launch(kernel, programs, *values)

    monkeypatch.setattr(Kernel, "launch", counting)
    step = cache.extend([a], 3)
    assert len(step.rows) == 1  # who reads a step first has it sent and indexed
    for layer in range(cache.plan.spec.model.num_layers):
        rows = _rows_of(cache, layer, 3)
        if len(rows) > 2:
            launches.clear()
            cache.write(layer, step, **rows)
            assert launches == ["write_groups"]


def _rows_of(cache: Cache, layer: int, tokens: int) -> dict[str, torch.Tensor]:
    """Rows of everything that ``layer`` stores per token, by the names that ``write`` takes."""
    rows: dict[str, torch.Tensor] = {}
    for group in cache.groups(layer):
        index = group.kind == "sparse_index"
        if group.kind == "linear" or layer not in group.layers:
            continue
        for name, tensor in zip(
            ("index_k", "index_v") if index else ("k", "v"), group.tensors, strict=False
        ):
            shape = [extent for _, extent in tensor.logical.axes]
            rows[name] = torch.randn(tokens, *shape, device="cuda")
    return rows


def test_a_gate_orders_streams() -> None:
    cache = _cache("full")
    step = cache.extend(cache.open(), 5)
    feed = Feed(cache)
    want = feed.run(step, [1, 2, 3, 4, 5])
    pool, index = cache.pool(0)
    views = list(pool.views(index).values())
    kept = [view.clone() for view in views]
    for view in views:
        view.zero_()
    gate, loader = cache.gate([0]), torch.cuda.Stream()
    loader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(loader):
        torch.cuda._sleep(200_000_000)
        for view, bits in zip(views, kept, strict=True):
            view.copy_(bits)
        gate.open(0)
    assert not gate.done
    group = cache.plan.groups[0]
    q = feed.rows(0, group, "q", torch.tensor([1, 2, 3, 4, 5], device="cuda"))
    out = cache.attend(0, q, None, None, step)
    close_to(out.flatten(1), want[:, : out.flatten(1).shape[1]])
    torch.cuda.synchronize()
    assert gate.done
