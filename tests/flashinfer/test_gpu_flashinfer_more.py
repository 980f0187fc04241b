"""Further modules on a Hopper GPU: a soft cap, e5m2, heads of 64, XQA in windows.

Apart from the main tests, whose modules are ten: each test compiles one to four more.
"""

from __future__ import annotations

import pytest
import torch
from flashinfer_card import FULL, HYBRID, LOCAL, LONG, on_hopper, scene_of
from flashinfer_scene import FP8, Scene
from test_flashinfer_graphs import captured, replayed

from kvfactory.backends.flashinfer.calls import Library

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="session")
def library() -> Library:
    return on_hopper(())


@pytest.mark.parametrize("deterministic", [False, True])
def test_soft_cap(library: Library, deterministic: bool) -> None:
    backend = {"deterministic": deterministic}
    group = {**FULL, "soft_cap": 5.0}
    scene_of(library, {"full": group}, kv={"page_tokens": 16}, backend=backend).turns(LONG)


def test_e5m2(library: Library) -> None:
    kv = {"page_tokens": 16, "quant": {"k": "fp8_e5m2", "v": "fp8_e5m2"}}
    scene_of(library, {"full": FULL}, kv=kv).turns(LONG)


def test_head_dim_64(library: Library) -> None:
    group = {**FULL, "head_dim": 64}
    scene_of(library, {"full": group}, kv={"page_tokens": 16}, device={"sm": 80}).turns(LONG)


@pytest.mark.parametrize("window_tokens", [1, 16, 24, 64, 65, 1000])
def test_xqa_in_windows(library: Library, window_tokens: int) -> None:
    """Released pages, the sink and slots behind the last token hold NaN."""
    local = {**LOCAL, "layers": "2-3", "window_tokens": window_tokens}
    kv = {"page_tokens": 16, "quant": FP8}
    groups = {"full": FULL, "local": local}
    scene = scene_of(library, groups, kv=kv, backend={"accuracy": "fast"})
    poison_sinks(scene)
    scene.turns(LONG)
    cache = scene.cache
    sequences = cache.open(3)
    scene.advance(sequences, [700, 3, 64])
    graph, model = captured(scene, 4)
    for some in (3, 1, 2, 3):
        step = cache.extend(sequences[:some], 1)
        replayed(scene, graph, model, step, some)
        cache.commit(step)


def poison_sinks(scene: Scene) -> None:
    for pool in scene.pools.values():
        for plane in pool.bound.planes.values():
            plane[:, 0].view(torch.uint8).fill_(0xFF)


def test_xqa_and_two_open_steps(library: Library) -> None:
    kv = {"page_tokens": 16, "quant": FP8}
    scene = scene_of(library, HYBRID, kv=kv, backend={"accuracy": "fast"})
    sequences = scene.cache.open(3)
    scene.advance(sequences, [400, 15, 16])
    for _ in range(20):
        first = scene.cache.extend(sequences, 1)
        scene.check(first, 3)
        second = scene.cache.extend(sequences, 1)
        scene.check(second, 3)
        scene.cache.commit(first)
        scene.cache.commit(second)
