"""What a step costs the host: ``python -m benchmarks.host [MODEL ...]``, on a GPU.

Decode steps of 1, 64 and 256 requests; median and 99th percentile in microseconds of each call,
while the device runs behind:

- ``eager``: extend, a layer's write, commit. ``backend=torch`` plans nothing.
- ``graph``: extend, fill, commit of steps that only feed a graph; fill holds their host plans.
- ``drafts``: extend, and commit of the step before, of whose four tokens the device keeps two.

Without a GPU it runs small batches on the CPU, to see that it runs.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import kvfactory
from kvfactory.cache import Cache

CARD = torch.cuda.is_available()
BATCHES = (1, 64, 256) if CARD else (1, 4)
STEPS, DROPPED, PROMPT, DRAFTS = 400 if CARD else 60, 20, 200, 3
MODELS = {"qwen3": "kv=fp8_hnd", "gemma3_27b": "kv=fp8_hnd", "deepseek_v3": "kv=bf16_nhd"}
Times = list[float]
Loop = Callable[[Cache, list[Any]], Callable[[], Times]]


def clocked(call: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, float]:
    """What ``call`` returns, and its microseconds."""
    began = time.perf_counter()
    found = call(*given, **named)
    return found, 1e6 * (time.perf_counter() - began)


def eager(cache: Cache, sequences: list[Any]) -> Callable[[], Times]:
    """A step that writes one layer."""
    group, device = cache.plan.groups[0], "cuda" if CARD else "cpu"
    shapes = [[extent for _, extent in tensor.logical.axes] for tensor in group.tensors]
    k, v = (torch.randn(len(sequences), *s, device=device, dtype=torch.bfloat16) for s in shapes)

    def one() -> Times:
        step, extend = clocked(cache.extend, sequences, 1)
        _, write = clocked(cache.write, group.layers[0], step, k=k, v=v)
        return [extend, write, clocked(cache.commit, step)[1]]

    return one


def graph(cache: Cache, sequences: list[Any]) -> Callable[[], Times]:
    """A step that fills a graph."""
    fixed = cache.graph(len(sequences))

    def one() -> Times:
        step, extend = clocked(cache.extend, sequences, 1)
        _, fill = clocked(cache.fill, fixed, step)
        return [extend, fill, clocked(cache.commit, step)[1]]

    return one


def drafts(cache: Cache, sequences: list[Any]) -> Callable[[], Times]:
    """A step that is begun before the counts of the last one are known."""
    kept = torch.full((len(sequences),), 2, device="cuda" if CARD else "cpu")
    last = [cache.extend(sequences, 1 + DRAFTS)]

    def one() -> Times:
        step, extend = clocked(cache.extend, sequences, 1 + DRAFTS)
        _, commit = clocked(cache.commit, last.pop(), kept)
        last.append(step)
        torch.cuda.synchronize() if CARD else None  # the counts land, as they would meanwhile
        return [extend, commit]

    return one


def measure(model: str, preset: str) -> dict[str, object]:
    """Build seconds, and per loop and batch the calls' [median, p99]."""
    found: dict[str, object] = {}
    for loop, backend in ((eager, "torch"), (graph, "flashinfer"), (drafts, "torch")):
        drafted = DRAFTS * (loop is drafts)
        found |= _batches(loop, _cache(model, preset, backend if CARD else "torch", drafted))
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _batches(loop: Loop, cache: Cache) -> dict[str, object]:
    found: dict[str, object] = {}
    for batch in BATCHES:
        sequences = cache.open(batch)
        for start in range(0, batch, 8):
            cache.commit(cache.extend(sequences[start : start + 8], PROMPT))
        one = loop(cache, sequences)
        spans = np.array([one() for _ in range(STEPS)][DROPPED:])
        if CARD:
            torch.cuda.synchronize()
        parts = np.quantile(spans, [0.5, 0.99], axis=0).T.round(1)
        found[f"{loop.__name__} {batch}"] = parts.tolist()
        cache.reset()
    return found


def _cache(model: str, preset: str, backend: str, draft_tokens: int) -> Cache:
    spec = kvfactory.compose(
        *(f"model={model}", preset, f"backend={backend}"),
        *(f"device={'h200' if CARD else 'cpu'}", f"engine.draft_tokens={draft_tokens}"),
        *(f"workload.requests={BATCHES[-1]}", f"workload.tokens={PROMPT + 3 * STEPS + 64}"),
    )
    cache, seconds = clocked(kvfactory.build, kvfactory.plan(spec))
    print(f"  {model}, {backend}: built in {seconds / 1e6:.1f} s", flush=True)
    return cache  # type: ignore[no-any-return]


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        print(name, json.dumps(measure(name, MODELS.get(name, "kv=fp8_hnd"))), flush=True)
