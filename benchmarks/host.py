"""What a step costs the host: ``python -m benchmarks.host [MODEL ...]``, on a GPU.

Decode steps of 1, 64 and 256 requests; medians in microseconds of extend, of a layer's write and of
commit, while the device runs behind. Attention is left out (``backend=torch`` plans nothing).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise

import torch

import kvfactory

BATCHES = (1, 64, 256)
STEPS, DROPPED, PROMPT = 160, 20, 200
MODELS = {"qwen3": "kv=fp8_hnd", "gemma3_27b": "kv=fp8_hnd"}


def measure(model: str, preset: str) -> dict[str, object]:
    """Build seconds, and per batch the medians [extend, write, commit]."""
    load = (f"workload.requests={BATCHES[-1]}", "workload.tokens=512")
    spec = kvfactory.compose(f"model={model}", preset, "device=h200", "backend=torch", *load)
    began = time.perf_counter()
    cache = kvfactory.build(kvfactory.plan(spec))
    torch.cuda.synchronize()
    found: dict[str, object] = {"build_seconds": time.perf_counter() - began}
    group = cache.plan.groups[0]
    shapes = [[extent for _, extent in tensor.logical.axes] for tensor in group.tensors]
    for batch in BATCHES:
        k, v = (torch.randn(batch, *s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        sequences = cache.open(batch)
        for start in range(0, batch, 8):
            cache.commit(cache.extend(sequences[start : start + 8], PROMPT))
        spans: list[list[float]] = []
        for _ in range(STEPS):
            times = [time.perf_counter()]
            step = cache.extend(sequences, 1)
            times.append(time.perf_counter())
            cache.write(group.layers[0], step, k=k, v=v)
            times.append(time.perf_counter())
            cache.commit(step)
            times.append(time.perf_counter())
            spans.append([1e6 * (b - a) for a, b in pairwise(times)])
        torch.cuda.synchronize()
        parts = zip(*spans[DROPPED:], strict=True)
        found[str(batch)] = [round(statistics.median(part), 1) for part in parts]
        cache.close(sequences)
    return found


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        print(name, json.dumps(measure(name, MODELS.get(name, "kv=fp8_hnd"))), flush=True)
