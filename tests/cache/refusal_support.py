"""A small cache, and calls that it must refuse with nothing written, taken or closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvfactory import Cache, CachePlan, build, plan
from kvfactory.errors import KVFactoryError
from kvfactory.spec import Spec

FULL = {"kind": "full", "layers": "0-1", "q_heads": 4, "kv_heads": 2, "head_dim": 32}
SINKS = FULL | {"layers": "2-2", "sinks": True}
SPEC = Spec.parse({"model": {"name": "m", "num_layers": 2, "groups": {"full": FULL}}})


def small_cache() -> Cache:
    return build(plan_of())


def plan_of(**changes: Any) -> CachePlan:
    model = {"name": "m", "num_layers": 3, "groups": {"full": FULL, "sunk": SINKS}}
    engine = {"prefill_chunk_tokens": 16}
    parts = {"kv": {"page_tokens": 4}, "workload": {"requests": 4, "tokens": 32}}
    return plan(Spec.parse({"model": model, "engine": engine, **parts, **changes}))


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, tokens, 2, 32, dtype=torch.bfloat16)
    return torch.randn(tokens, 4, 32, dtype=torch.bfloat16), k, v


def all_bytes(cache: Cache) -> list[torch.Tensor]:
    places = [cache.pool(layer) for layer in range(3)]
    return [view.clone() for pool, at in places for view in pool.views(at).values()]


def refused(
    cache: Cache, call: Callable[[], object], kind: type[KVFactoryError], text: str
) -> None:
    """``call`` raises ``kind`` with ``text`` in it, and the books stay as they are."""
    before = cache.books.capacity()
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)
    assert cache.books.capacity() == before
