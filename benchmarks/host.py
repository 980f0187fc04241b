"""What a step costs the host: ``python -m benchmarks.host [MODEL ...]``, on a GPU.

Decode steps of 1, 64 and 256 requests; a table of the median and the 99th percentile of each call,
in microseconds, while the device runs behind:

- ``eager``: extend, a layer's write, commit. ``backend=torch`` plans nothing.
- ``graph``: extend, fill, commit of steps that only feed a graph; fill holds their host plans.
- ``drafts``: extend, and commit of the step before, of whose four tokens the device keeps two.

Without a GPU it runs small batches on the CPU, to see that it runs.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import kvfactory
from kvfactory.cache import Cache
from kvfactory.report.tables import columns

CARD = torch.cuda.is_available()
BATCHES = (1, 64, 256) if CARD else (1, 4)
STEPS, DROPPED, PROMPT, DRAFTS = 400 if CARD else 60, 20, 200, 3
MODELS = {"qwen3": "kv=fp8_hnd", "gemma3_27b": "kv=fp8_hnd", "deepseek_v3": "kv=bf16_nhd"}
Times = dict[str, float]
Row = tuple[str, ...]
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
        return {"extend": extend, "write": write, "commit": clocked(cache.commit, step)[1]}

    return one


def graph(cache: Cache, sequences: list[Any]) -> Callable[[], Times]:
    """A step that fills a graph."""
    fixed = cache.graph(len(sequences))

    def one() -> Times:
        step, extend = clocked(cache.extend, sequences, 1)
        _, fill = clocked(cache.fill, fixed, step)
        return {"extend": extend, "fill": fill, "commit": clocked(cache.commit, step)[1]}

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
        return {"extend": extend, "commit": commit}

    return one


def measure(model: str, preset: str) -> Iterator[Row]:
    """Rows of the table: loop, requests, call, and its median and p99 in microseconds."""
    for loop, backend in ((eager, "torch"), (graph, "flashinfer"), (drafts, "torch")):
        drafted = DRAFTS * (loop is drafts)
        yield from _batches(loop, _cache(model, preset, backend if CARD else "torch", drafted))
        gc.collect()
        torch.cuda.empty_cache()


def _batches(loop: Loop, cache: Cache) -> Iterator[Row]:
    for batch in BATCHES:
        sequences = cache.open(batch)
        for start in range(0, batch, 8):
            cache.commit(cache.extend(sequences[start : start + 8], PROMPT))
        one = loop(cache, sequences)
        times = [one() for _ in range(STEPS)][DROPPED:]
        if CARD:
            torch.cuda.synchronize()
        for call in times[0]:
            median, p99 = np.quantile([each[call] for each in times], [0.5, 0.99])
            yield loop.__name__, f"{batch}", call, f"{median:.1f}", f"{p99:.1f}"
        cache.reset()


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
        head = (name, "requests", "call", "median us", "p99 us")
        print(columns(head, list(measure(name, MODELS.get(name, "kv=fp8_hnd")))), flush=True)
