"""Steps from the ids of an engine that schedules and allocates itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cache_support import (
    FULL,
    MODELS,
    STATE,
    Driver,
    Feed,
    cache_of,
    close_to,
    scratch,
    some_tokens,
)

from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.errors import BooksError, SpecError


class Engine:
    """Owns all ids: shuffled pages, and rows and state slots of its own order."""

    def __init__(self, cache: Cache, requests: int) -> None:
        self.cache, self.feed = cache, Feed(cache)
        random = np.random.default_rng(0)
        self.pages = {}
        for table in cache.plan.tables:
            width = min(table.row_pages, (table.num_pages - 1) // requests)
            ids = 1 + random.permutation(table.num_pages - 1)
            self.pages[table.name] = ids[: requests * width].reshape(requests, width)
        self.rows = 1 + random.permutation(requests)
        self.slots = {s.name: 1 + random.permutation(requests) for s in cache.plan.states}
        self.done = np.zeros(requests, np.int64)

    def step(self, new: dict[int, list[int]]) -> list[torch.Tensor]:
        who = list(new)
        before = self.done[who]
        after = before + [len(tokens) for tokens in new.values()]
        step = self.cache.step(
            {name: ids[who] for name, ids in self.pages.items()},
            before,
            after,
            rows=self.rows[who],
            states={name: ids[who] for name, ids in self.slots.items()},
        )
        self.done[who] = after
        out = self.feed.run(step, [token for tokens in new.values() for token in tokens])
        return list(torch.split(out, [len(tokens) for tokens in new.values()]))


@pytest.mark.parametrize("model", MODELS)
def test_foreign_steps_answer_like_our_own(model: str) -> None:
    cache = cache_of(model)
    engine, a, b = Engine(cache, 2), some_tokens(19, 1), some_tokens(14, 2)
    if "local" in engine.pages:  # all pages of the whole length, as nothing is released here
        engine.pages["local"] = engine.pages["local"][:, :8]
    first = engine.step({0: a[:11], 1: b[:3]})
    second = engine.step({1: b[3:], 0: a[11:18]})
    third = engine.step({0: a[18:]})
    close_to(torch.cat([first[0], second[1], third[0]]), scratch(cache, a))
    close_to(torch.cat([first[1], second[0]]), scratch(cache, b))


def test_books_take_over_again() -> None:
    cache = cache_of("hybrid")
    Engine(cache, 4).step({n: some_tokens(9, n) for n in range(4)})
    driver = Driver(cache)
    a, b = driver.open(2)
    outs = driver.step({a: some_tokens(12, 8), b: [1, 2]})
    close_to(outs[a], scratch(cache, driver.tokens[a]))
    close_to(outs[b], scratch(cache, driver.tokens[b]))
    with pytest.raises(BooksError, match="close, release or reset"):
        Engine(cache, 1).step({0: [1]})
    cache.reset()
    Engine(cache, 1).step({0: [1]})


def _batch(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "before": [0, 4],
        "after": [3, 6],
        "tables": {"full": np.array([[1, -7], [2, 3]])},
        "states": {"state": [1, 2]},
    }
    return {**parts, **changes}


def test_bounds_are_checked() -> None:
    cache = build(cache_of({"full": FULL, "state": STATE}).plan)
    step = cache.step(**_batch())
    assert step.tables["full"].slots.tolist() == [4, 5, 6, 12, 13]
    assert step.tables["full"].kv_lengths.tolist() == [3, 6]
    assert step.states["state"].fresh.tolist() == [1, 0]
    pages = cache.plan.tables[0].num_pages
    for changes, error, match in (
        ({"tables": {"full": np.array([[1, 0], [2, pages]])}}, BooksError, f"page {pages}"),
        ({"tables": {"full": np.array([[1, 0], [2, 0]])}}, BooksError, "page 0"),
        ({"tables": {"full": np.array([[1], [2]])}}, BooksError, "6 tokens of request 1"),
        ({"after": [3, 5000]}, SpecError, r"step\(before, after\): got 4999 new tokens"),
        ({"after": [3, 90]}, BooksError, "90 tokens of request 1, need at most 8"),
        ({"states": {"state": [1, 99]}}, BooksError, "99"),
        ({"states": {"state": [1, 1]}}, BooksError, "each one once"),
        ({"states": {}}, SpecError, "nothing"),
        ({"tables": {}}, SpecError, "nothing"),
        ({"tables": {"full": np.array([[1], [2]]), "local": np.array([[1]])}}, SpecError, "local"),
        ({"tables": {"full": np.array([1, 2])}}, SpecError, r"\[2, pages\]"),
        ({"rows": [1, 1]}, SpecError, "each one once"),
        ({"rows": [1, 5]}, SpecError, "1..4"),
        ({"after": [3, 2]}, SpecError, "before <= after"),
        ({"after": [3]}, SpecError, r"step\(before, after, rows\): got different lengths"),
        ({"cross_tokens": [1, 2]}, SpecError, "cross_tokens"),
    ):
        with pytest.raises(error, match=match):
            cache.step(**_batch(**changes))


def test_encoder_tokens_are_written_by_the_first_step() -> None:
    cross = {**FULL, "kind": "cross", "encoder_tokens": 12}
    cache = cache_of({"cross": cross})
    batch = {"tables": {"cross": np.array([[4, 2], [1, 3]])}, "cross_tokens": [5, 8]}
    step = cache.step(before=[0, 3], after=[2, 4], **batch)
    assert step.tables["cross"].slots.tolist() == [16, 17, 18, 19, 8]
    assert step.tables["cross"].kv_lengths.tolist() == [5, 8]
