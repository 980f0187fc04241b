"""Whole sequences leave for the host and come back: every plane, bit for bit, and they go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import (
    FULL,
    MODELS,
    STATE,
    WINDOW,
    Driver,
    cache_of,
    close_to,
    same,
    scratch,
    snapshot,
    some_tokens,
)

from kvfactory.errors import BooksError, OutOfPages, SpecError

LAYOUTS = ("nhd", "hnd", "paged_kv", "page_major", "token_major", "record", "vectorized")
QUANTS = {
    "plain": {},
    "int8_token_head": {"k": "int8_token_head", "v": "int8_token_head"},
}


def _kv(layout: str, quant: str) -> dict[str, Any]:
    layouts = {"tokens": layout, "state": "slot_major"} if layout != "nhd" else {"tokens": layout}
    page = {"page_tokens": 16} if layout == "vectorized" else {}
    return {"layout": layouts, "quant": QUANTS[quant], **page}


@pytest.mark.parametrize("quant", ["plain", "int8_token_head"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_planes_come_back(layout: str, quant: str) -> None:
    cache = cache_of("all", kv=_kv(layout, quant))
    driver = Driver(cache)
    a, b, c = driver.open(3)
    driver.step({a: some_tokens(22, 1), b: some_tokens(5, 2), c: some_tokens(13, 3)})
    driver.step({c: [1], a: [2]})
    image = cache.offload([a, c])
    with pytest.raises(BooksError):
        cache.extend([a], 1)
    _overwrite(driver)
    a2, c2 = cache.load(image)
    again = cache.offload([c2, a2])
    _same_bits(image, again, cache)
    c3, a3 = cache.load(again)
    driver.tokens |= {a3: driver.tokens[a], c3: driver.tokens[c]}
    outs = driver.step({a3: [4, 5], b: [6], c3: [7]})
    for sequence in (a3, b, c3):
        close_to(outs[sequence], scratch(cache, driver.tokens[sequence])[-len(outs[sequence]) :])


def _overwrite(driver: Driver) -> None:
    """Others use what the offloaded sequences left."""
    others = driver.open(2)
    driver.step({sequence: some_tokens(30, 11) for sequence in others})
    driver.cache.close(others)


def _same_bits(image: Any, again: Any, cache: Any) -> None:
    """Pages of two sequences, which the second image has in the other order."""
    assert image.sequences == again.sequences[::-1]
    for name, pages in image.pages.items():
        first, second = pages.data, again.pages[name].data
        counts = _pages_of_first(image, cache, name)
        assert torch.equal(first[:counts], second[len(second) - counts :]), name
        assert torch.equal(first[counts:], second[: len(second) - counts]), name


def _pages_of_first(image: Any, cache: Any, name: str) -> int:
    table = cache.plan.by_name[name].table
    if table not in {t.name for t in cache.plan.tables}:
        return 1
    part = cache.plan.table(table)
    tokens = image.sequences[0].tokens
    first = part.lifetime.first_visible(tokens) // part.page_tokens
    return -(-tokens // part.page_tokens) - first


@pytest.mark.parametrize("model", MODELS)
def test_every_model_goes_on(model: str) -> None:
    cache = cache_of(model)
    driver = Driver(cache)
    a, b = driver.open(2)
    driver.step({a: some_tokens(19, 1), b: some_tokens(10, 2)})
    image = cache.offload([b])
    _overwrite(driver)
    driver.step({a: [9]})
    (back,) = cache.load(image)
    driver.tokens[back] = driver.tokens[b]
    outs = driver.step({back: [3, 4], a: [5]})
    close_to(outs[back], scratch(cache, driver.tokens[back])[-2:])
    close_to(outs[a], scratch(cache, driver.tokens[a])[-1:])


def test_another_layout_loads_the_image() -> None:
    source, target = cache_of("all"), cache_of("all", kv=_kv("page_major", "plain"))
    driver, other = Driver(source), Driver(target)
    (a,) = driver.open()
    driver.step({a: some_tokens(20)})
    (back,) = target.load(source.offload([a]))
    other.tokens[back] = driver.tokens[a]
    close_to(other.step({back: [1]})[back], scratch(target, other.tokens[back])[-1:])


def test_a_full_cache_comes_back_whole() -> None:
    """As many sequences as there are rows and slots: nothing more is needed for a moment."""
    cache = cache_of("all")
    driver = Driver(cache)
    sequences = driver.open(4)
    driver.step({s: some_tokens(40, n) for n, s in enumerate(sequences)})
    back = cache.load(cache.offload(sequences))
    for old, new in zip(sequences, back, strict=True):
        driver.tokens[new] = driver.tokens[old]
    outs = driver.step({sequence: [1] for sequence in back})
    for sequence in back:
        close_to(outs[sequence], scratch(cache, driver.tokens[sequence])[-1:])


@pytest.mark.parametrize("short", ["requests", "tables", "states"])
def test_a_refused_load_changes_nothing(short: str) -> None:
    cache = cache_of("windows" if short == "requests" else "all", workload={"mean_tokens": 16})
    driver = Driver(cache)
    a, b = driver.open(2)
    driver.step({a: some_tokens(20, 1), b: some_tokens(6, 2)})
    image = cache.offload([b, a])
    if short == "requests":
        driver.open(3)
    elif short == "states":
        (c,) = driver.open()
        driver.step({c: [1, 2]})
        for _ in range(2):
            cache.hold(c, 2)
    else:
        (c,) = driver.open()
        driver.step({c: some_tokens(44, 3)})
    before = snapshot(cache)
    with pytest.raises(OutOfPages, match=short):
        cache.load(image)
    assert same(before, snapshot(cache))


def test_an_image_of_another_model_is_refused() -> None:
    source, target = cache_of("all"), cache_of("all", kv={"page_tokens": 8})
    driver = Driver(source)
    (a,) = driver.open()
    driver.step({a: some_tokens(9)})
    image = source.offload([a])
    with pytest.raises(SpecError, match="page_slots"):
        target.load(image)
    with pytest.raises(SpecError, match="groups full"):
        cache_of("full").load(image)
    with pytest.raises(SpecError, match="k"):
        cache_of("all", kv={"quant": {"k": "int8_token_head"}}).load(image)
    source.load(image)


def test_what_cannot_leave_yet_stays() -> None:
    cache = cache_of("all")
    driver = Driver(cache)
    a, b = driver.open(2)
    driver.step({a: some_tokens(9), b: [1]})
    step = cache.extend([b], 1)
    before = snapshot(cache)
    for wrong in ([a, b], [a, a]):
        with pytest.raises(BooksError):
            cache.offload(wrong)
    assert same(before, snapshot(cache))
    cache.commit(step)


def test_empty_sequences_travel_too() -> None:
    cache = cache_of("all")
    driver = Driver(cache)
    a, b = driver.open(2)
    driver.step({b: some_tokens(7)})
    image = cache.offload([a, b])
    a2, b2 = cache.load(image)
    driver.tokens |= {a2: [], b2: driver.tokens[b]}
    outs = driver.step({a2: some_tokens(5, 4), b2: [2]})
    close_to(outs[a2], scratch(cache, driver.tokens[a2]))
    close_to(outs[b2], scratch(cache, driver.tokens[b2])[-1:])


def test_encoder_tokens_travel_too() -> None:
    cross = {**FULL, "kind": "cross", "encoder_tokens": 12}
    cache = cache_of({"cross": cross, "local": {**WINDOW, "layers": [3]}})
    (a,) = cache.open(1, cross_tokens=[7])
    step = cache.extend([a], 2)
    k, v, q = torch.randn(7, 2, 16), torch.randn(7, 2, 16), torch.randn(2, 4, 16)
    out = cache.attend(0, q, k, v, step, group="cross")
    cache.commit(step)
    image = cache.offload([a])
    assert image.num_bytes
    (b,) = cache.load(image)
    step = cache.extend([b], 2)
    close_to(cache.attend(0, q, None, None, step, group="cross"), out)


@pytest.mark.parametrize("replay", ["decode_ring", "verify_ring"])
def test_rings_travel_with_their_cursors(replay: str) -> None:
    engine = {"state_replay": replay, "replay_tokens": 8, "draft_tokens": 3 * (replay[0] == "v")}
    cache = cache_of({"full": FULL, "state": STATE}, engine=engine)
    driver = Driver(cache)
    (a,) = driver.open()
    driver.step({a: some_tokens(9)})
    for token in (1, 2, 3):
        driver.step({a: [token]})
    image = cache.offload([a])
    assert any("ring" in name for name in image.pages)
    _overwrite(driver)
    (b,) = cache.load(image)
    driver.tokens[b] = driver.tokens[a]
    outs = torch.cat([driver.step({b: [token]})[b] for token in (4, 5, 6, 7, 8, 9)])
    close_to(outs, scratch(cache, driver.tokens[b])[-6:])
