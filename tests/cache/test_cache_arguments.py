"""Arguments that are no tensor, no layer or no number: refused in words, with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusal_support import FULL, all_bytes, inputs, plan_of, refused, small_cache

from kvfactory import Cache, build
from kvfactory.errors import BooksError, BuildError, OutOfPages, SpecError


@pytest.fixture
def cache() -> Cache:
    return small_cache()


NONE_OF_IT: list[tuple[str, Any, str]] = [
    ("k", [1.0], "k: got a list"),
    ("v", np.zeros((5, 2, 32)), "v: got a ndarray"),
    ("k", torch.zeros(5, 2, 32, dtype=torch.bfloat16).to_sparse(), "k: got a sparse_coo tensor"),
    ("q", torch.zeros(5, 4, 32, dtype=torch.bfloat16).to_sparse(), "try q.to_dense()"),
    ("q", None, "need a tensor [5, 4, 32]"),
    ("mask", [True], "mask: got a list"),
    ("select", 5, "select: got a int"),
    ("sinks", [0.0], "sinks: got a list"),
]


@pytest.mark.parametrize(("name", "value", "text"), NONE_OF_IT)
def test_what_is_no_dense_tensor(cache: Cache, name: str, value: Any, text: str) -> None:
    step, (q, k, v) = cache.extend(cache.open(), 5), inputs(5)
    given = {"q": q, "k": k, "v": v, name: value}
    before = all_bytes(cache)
    refused(cache, lambda: cache.attend(0, step=step, **given), SpecError, text)
    if name in "kv":
        rows = {name: given[name] for name in "kv"}
        refused(cache, lambda: cache.write(0, step, **rows), SpecError, text)
    assert all(map(torch.equal, before, all_bytes(cache)))


def test_layers_gates_and_counts_are_numbers(cache: Cache) -> None:
    wrong: Any = [0]
    step, (q, k, v) = cache.extend(cache.open(), 5), inputs(5)
    calls: list[Callable[[], object]] = [
        lambda: cache.attend(wrong, q, k, v, step),
        lambda: cache.pool(wrong),
        lambda: cache.groups(wrong),
        lambda: cache.selector_of(wrong),
    ]
    for call in calls:
        refused(cache, call, SpecError, "layer: got [0], need a model layer id")
    zero: Any = 0
    refused(cache, lambda: cache.gate(zero), SpecError, "gate(layers): got 0")
    refused(cache, lambda: cache.open(2**62), OutOfPages, "requests")
    refused(cache, lambda: cache.load(wrong), SpecError, "image: got a list")


@pytest.mark.parametrize("share", ["ab", 5, (0, 1, 2), (0.5, 2), (2, 2), (-1, 2), (True, 2), ()])
def test_a_share_is_a_part_of_parts(cache: Cache, share: Any) -> None:
    sequence = cache.receive(5)
    text = "regions(share=): got "
    refused(cache, lambda: cache.regions(sequence, share), SpecError, text)
    assert cache.regions(sequence, (1, 2))


@pytest.mark.parametrize("cross_tokens", [13, -1, float("nan"), "x", None])
def test_no_encoder_tokens_are_dropped(cache: Cache, cross_tokens: Any) -> None:
    text = "receive(cross_tokens=): got "
    refused(cache, lambda: cache.receive(0, cross_tokens), BooksError, text)
    refused(cache, lambda: cache.receive(5, cross_tokens), BooksError, "cross_tokens")


@pytest.mark.parametrize("tokens", [1.5, "x", None, -1])
def test_received_tokens_are_a_number(cache: Cache, tokens: Any) -> None:
    refused(cache, lambda: cache.receive(tokens), BooksError, "receive(tokens=): got ")


@pytest.mark.parametrize("state", [False, True])
def test_meta_memory_opens_no_step_that_nobody_gets(state: bool) -> None:
    linear = {
        "kind": "linear",
        "layers": "2-2",
        "recurrence": "gdn",
        "conv": [[48, 3]],
        "recurrent": {"head": 2, "key": 8, "value": 8},
    }
    model = {
        "name": "m",
        "num_layers": 3,
        "groups": {"full": FULL} | ({"state": linear} if state else {}),
    }
    cache = build(plan_of(model=model, memory={"name": "meta"}))
    sequences = cache.open()
    for _ in range(3):
        text = "memory.name: got meta, which stores no steps"
        refused(cache, lambda: cache.extend(sequences, 5), BuildError, text)
    refused(cache, lambda: cache.graph(batch=1), BuildError, text)
