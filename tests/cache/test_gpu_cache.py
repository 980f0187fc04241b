"""On a GPU: the same answers, images through pinned memory, gates by events, no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import MODELS, Driver, Feed, cache_of, close_to, scratch, some_tokens

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


def _cache(model: str, **parts: Any) -> Cache:
    card = torch.cuda.get_device_properties(0)
    device = {
        "name": "here",
        "type": "cuda",
        "sm": card.major * 10 + card.minor,
        "num_sms": card.multi_processor_count,
    }
    return cache_of(model, device=device, backend={"name": "torch"}, **parts)


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
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.write(0, step, k=k, v=v, index_k=keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
