"""The cache from end to end: whatever the schedule, answers are those of one prefill."""

from __future__ import annotations

import pytest
import torch
from cache_support import (
    FULL,
    MODELS,
    WINDOW,
    Driver,
    Feed,
    cache_of,
    close_to,
    same,
    scratch,
    snapshot,
    some_tokens,
)

from kvfactory.errors import BooksError, OutOfPages, SpecError

INT8 = {"quant": {"k": "int8_token_head", "v": "int8_token_head", "latent": "int8_token_head"}}
TREES = sorted(set(MODELS) - {"pooled"})


@pytest.mark.parametrize("quant", [{}, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_chunked_prefill_is_prefill(model: str, quant: dict[str, object]) -> None:
    cache = cache_of(model, kv=quant)
    driver, tokens = Driver(cache), some_tokens(30)
    (sequence,) = driver.open()
    outs, at = [], 0
    for count in (7, 1, 12, 1, 0, 8, 1):
        out = driver.step({sequence: tokens[at : at + count]})[sequence]
        outs += [out] if count else []
        at += count
    close_to(torch.cat(outs), scratch(cache, tokens))


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_is_its_requests(model: str) -> None:
    cache = cache_of(model)
    driver = Driver(cache)
    a, b, c = driver.open(3)
    new = {a: some_tokens(21, 1), b: some_tokens(3, 2), c: some_tokens(14, 3)}
    first = driver.step(new)
    second = driver.step({c: [5], a: [6, 7]})
    for sequence in (a, b, c):
        got = [first[sequence], *([second[sequence]] if sequence in second else [])]
        close_to(torch.cat(got), scratch(cache, driver.tokens[sequence]))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stop", [8, 11])
def test_a_prefix_hit_is_from_scratch(model: str, stop: int) -> None:
    cache = cache_of(model)
    driver, tokens = Driver(cache), some_tokens(25)
    (first,) = driver.open()
    driver.step({first: tokens[:stop]})
    segment = cache.hold(first, stop)
    driver.step({first: some_tokens(9, 7)})  # goes on: the prefix must not change
    cache.close([first])
    a, b = driver.open(2, prefix=[segment])
    outs = driver.step({a: tokens[stop:], b: some_tokens(4, 9)})
    close_to(outs[a], scratch(cache, tokens)[stop:])
    close_to(outs[b], scratch(cache, tokens[:stop] + some_tokens(4, 9))[stop:])
    cache.close([a, b])
    cache.release(segment)
    assert all(not room.held for room in cache.books.capacity().values())


@pytest.mark.parametrize("model", MODELS)
def test_forks_copy_what_they_write(model: str) -> None:
    cache = cache_of(model)
    driver, tokens = Driver(cache), some_tokens(10)
    (first,) = driver.open()
    driver.step({first: tokens})
    second, third = driver.fork(first, 2)
    outs = driver.step({first: [1, 2], second: [3], third: [4, 5, 6]})
    for sequence in (first, second, third):
        close_to(outs[sequence], scratch(cache, driver.tokens[sequence])[10:])
    cache.close([first])
    out = driver.step({second: [8]})[second]
    close_to(out, scratch(cache, driver.tokens[second])[-1:])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_accepted_drafts_are_as_if_alone(model: str, accepted: int) -> None:
    cache = cache_of(model, engine={"draft_tokens": 3})
    driver, tokens = Driver(cache), some_tokens(13)
    (sequence,) = driver.open()
    driver.step({sequence: tokens})
    drafts = some_tokens(4, 5)
    step = cache.extend([sequence], 4)
    close_to(driver.feed.run(step, drafts), scratch(cache, tokens + drafts)[13:])
    cache.commit(step, [accepted])
    driver.tokens[sequence] += drafts[:accepted]
    out = driver.step({sequence: [3, 1, 4]})[sequence]
    close_to(out, scratch(cache, driver.tokens[sequence])[-3:])


@pytest.mark.parametrize("model", TREES)
@pytest.mark.parametrize("path", [[], [0], [0, 2], [0, 2, 4], [0, 1, 3], [0, 1]])
def test_an_accepted_path_is_as_if_alone(model: str, path: list[int]) -> None:
    cache = cache_of(model, engine={"draft_tokens": 4, "draft_tree": True})
    driver, tokens = Driver(cache), some_tokens(10)
    (sequence,) = driver.open()
    driver.step({sequence: tokens})
    nodes, parents = some_tokens(5, 6), [-1, 0, 0, 1, 2]
    step = cache.extend([sequence], 5, parents)
    out = driver.feed.run(step, nodes)
    if path and not _selects(model):
        chain = [nodes[node] for node in path]
        close_to(out[path], scratch(cache, tokens + chain)[10:])
    cache.commit(step, [path])
    driver.tokens[sequence] += [nodes[node] for node in path]
    got = driver.step({sequence: [9, 2]})[sequence]
    close_to(got, scratch(cache, driver.tokens[sequence])[-2:])


def _selects(model: str) -> bool:
    """Selections of draft trees go by storage order, across branches."""
    return any(group["kind"] == "sparse_index" for group in MODELS[model].values())


def test_no_trees_where_entries_span_tokens() -> None:
    cache = cache_of("pooled", engine={"draft_tokens": 4})
    (sequence,) = cache.open()
    with pytest.raises(SpecError, match="4 tokens an entry"):
        cache.extend([sequence], 2, [-1, 0])


def test_two_steps_in_flight() -> None:
    cache = cache_of("all")
    driver, tokens = Driver(cache), some_tokens(22)
    (sequence,) = driver.open()
    feed, outs, open_steps, at = Feed(cache), [], [], 0
    for count in (9, 5, 1, 6, 1):
        step = cache.extend([sequence], count)
        if open_steps:
            cache.commit(open_steps.pop())
        open_steps.append(step)
        outs.append(feed.run(step, tokens[at : at + count]))
        at += count
    cache.commit(open_steps.pop())
    close_to(torch.cat(outs), scratch(cache, tokens))


def test_steps_commit_in_order() -> None:
    cache = cache_of("full")
    (sequence,) = cache.open()
    first, second = cache.extend([sequence], 2), cache.extend([sequence], 2)
    with pytest.raises(BooksError):
        cache.extend([sequence], 1)
    with pytest.raises(BooksError):
        cache.commit(second)
    cache.commit(first)
    cache.commit(second)


def test_windows_release_their_pages() -> None:
    cache = cache_of("windows")
    driver = Driver(cache)
    (sequence,) = driver.open()
    for token in some_tokens(60):
        driver.step({sequence: [token]})
    held = {path: room.held for path, room in cache.books.capacity().items()}
    assert held["tables.full"] == 15
    assert held["tables.local"] <= 4


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"chunked"}))
def test_a_refused_step_changes_nothing(model: str) -> None:
    cache = cache_of(model, workload={"mean_tokens": 8})
    driver = Driver(cache)
    a, b = driver.open(2)
    driver.step({a: some_tokens(9)})
    cache.fork(a, 1)
    before = snapshot(cache)
    with pytest.raises(OutOfPages, match=r"tables\."):
        cache.extend([a, b], [33, 44])
    assert same(before, snapshot(cache))
    out = driver.step({a: [7], b: [8, 9]})
    close_to(out[a], scratch(cache, driver.tokens[a])[-1:])
    close_to(out[b], scratch(cache, driver.tokens[b]))


def test_a_refused_open_changes_nothing() -> None:
    cache = cache_of("all")
    cache.open(3)
    before = snapshot(cache)
    with pytest.raises(OutOfPages, match="requests"):
        cache.open(2)
    assert same(before, snapshot(cache))


def test_close_and_reset() -> None:
    cache = cache_of("all")
    driver = Driver(cache)
    a, b = driver.open(2)
    driver.step({a: some_tokens(20), b: some_tokens(5)})
    cache.close([a])
    with pytest.raises(BooksError):
        cache.extend([a], 1)
    cache.hold(b, 5)
    cache.reset()
    assert all(not room.held for room in cache.books.capacity().values())
    with pytest.raises(BooksError):
        cache.extend([b], 1)
    (c,) = driver.open()
    close_to(driver.step({c: some_tokens(9)})[c], scratch(cache, some_tokens(9)))


def test_cross_attention_reads_what_the_first_step_wrote() -> None:
    cross = {**FULL, "kind": "cross", "encoder_tokens": 12}
    cache = cache_of({"full": FULL, "cross": cross, "local": {**WINDOW, "layers": [3]}})
    a, b = cache.open(2, cross_tokens=[5, 12])
    step = cache.extend([a, b], [2, 3])
    k, v, q = torch.randn(17, 2, 16), torch.randn(17, 2, 16), torch.randn(5, 4, 16)
    first = cache.attend(0, q, k, v, step, group="cross")
    cache.commit(step)
    step = cache.extend([b, a], 1)
    again = cache.attend(0, q[[4, 1]], None, None, step, group="cross")
    close_to(again, first[[4, 1]])
    logits = torch.einsum("hd,khd->hk", q[1], k[:5].repeat_interleave(2, 1)) / 4
    want = torch.einsum("hk,khd->hd", logits.softmax(-1), v[:5].repeat_interleave(2, 1))
    close_to(first[1], want)
