"""Attention through the factory against FlashInfer called by hand, in one run, with ratios.

    python -m benchmarks.attention [--only plan decode fast prefill step] [--json FILE]

``plan``: host planning of growing decode steps. ``decode``, ``fast``, ``prefill``: kernels, as
graphs of calls over several layers, taking turns. ``step``: everything that an engine does for a
decode step, host included. 32 query and 8 key heads of 128, pages of 16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_scene import DIM, KV_HEADS, PAGE, Q_HEADS, Scene
from benchmarks.by_hand import HandDecode, hand_prefill, hand_xqa
from benchmarks.timing import Timed, need_gpu, per_step_us, race
from kvfactory.cache.graphs import Graph

SHAPES = [(64, 4096), (8, 32768), (256, 1024)]
WARM_UP = 8
"""Steps that are not counted."""
Row = tuple[str, str, float, float]
"""(what, shape, our microseconds, ratio: theirs over ours unless said otherwise)."""


def plan_rows() -> Iterator[Row]:
    """Microseconds of planning on the host, 1,000 growing steps, replans included."""
    for batch, q_heads, kernel in (
        (256, 32, "fa2"),
        (32, 32, "fa2, split"),
        (256, 8, "CUDA cores"),
    ):
        scene = Scene(requests=batch, tokens=2304, layers=1, q_heads=q_heads)
        sequences = scene.filled(batch, 1000)
        shape = f"B {batch}, 1k to 2k"
        eager = _planning(scene, sequences, 1000)
        graph = _planning(scene, sequences, 200, scene.cache.graph(batch))
        theirs = HandDecode(scene, sequences, graph=False).plan_us()
        for what, us in (
            ("median", statistics.median(eager)),
            ("p99", float(np.quantile(eager, 0.99))),
            ("for a graph, median", statistics.median(graph)),
            ("for a graph, p99", float(np.quantile(graph, 0.99))),
        ):
            yield f"plan {kernel}, {what}", shape, us, theirs / us
        scene.free()


def _planning(
    scene: Scene, sequences: Sequence[Any], steps: int, graph: Graph | None = None
) -> list[float]:
    """Microseconds of each step's planning; waiting for the device is an error meanwhile."""
    taken: list[float] = []
    books, planner = scene.cache.books, scene.runner.scheduler.planner
    made = 0
    for number in range(-WARM_UP, steps):
        if number == 0:
            taken, made = [], planner.made
        step = books.extend(sequences, 1)
        if graph is None:
            filled = scene.buffers.fill(step)
        else:
            filled = scene.buffers.fill_graph(step, graph.shape, 0, step)
        assert len(filled.rows) == len(sequences)  # sent before the clock runs
        torch.cuda.set_sync_debug_mode("error")
        begin = time.perf_counter()
        scene.runner.prepare(filled)
        scene.runner.scheduler.begin(filled)
        taken.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.set_sync_debug_mode("default")
        books.commit(step)
    print(f"  {steps} steps, {planner.made - made} plans made, slowest {max(taken):.0f} us")
    return taken


def decode_rows(quant: str = "plain", accuracy: str = "exact") -> Iterator[Row]:
    """Decode kernels through the factory and called by hand over the same bytes."""
    for batch, tokens in SHAPES:
        layers = max(2, int(2e9 / (batch * tokens * KV_HEADS * DIM * 4)))
        scene = Scene(batch, tokens + 64, min(layers, 8), quant, accuracy)
        sequences = scene.filled(batch, tokens)
        graph, q = scene.cache.graph(batch), scene.normal(batch, Q_HEADS, DIM)
        step = scene.cache.extend(sequences, 1)
        scene.cache.fill(graph, step)
        scene.runner.begin(graph.step)
        hand = HandDecode(scene, sequences, graph=True)
        hand.plan()
        fixed = graph.step
        found = race(
            {
                "ours": [_attend(scene, layer, q, fixed) for layer in range(scene.layers)],
                "hand": [_hand(hand, layer, q) for layer in range(scene.layers)],
                **({"xqa": hand_xqa(scene, hand, q)} if accuracy == "fast" else {}),
            }
        )
        shape, ours = f"B {batch}, {tokens // 1024}k", found["ours"].us
        label = f"decode {quant}{', fast' if accuracy == 'fast' else ''}"
        yield f"{label}, against fa2", shape, ours, found["hand"].us / ours
        if "xqa" in found:
            yield f"{label}, against raw XQA", shape, ours, found["xqa"].us / ours
        scene.free()


def _attend(scene: Scene, layer: int, q: Tensor, step: Any) -> Callable[[], object]:
    return lambda: scene.cache.attend(layer, q, None, None, step)


def _hand(hand: HandDecode, layer: int, q: Tensor) -> Callable[[], object]:
    return lambda: hand.run(layer, q)


def prefill_rows() -> Iterator[Row]:
    """The fa3 that Hopper gets, against the fa2 path, and against FlashInfer's own fa3."""
    for batch, new, prefix in ((1, 8192, 0), (4, 2048, 0), (4, 2048, 8192)):
        tokens = new + prefix
        scenes = {
            name: Scene(requests=batch, tokens=tokens + 64, layers=2, sm=sm)
            for name, sm in (("fa3", 90), ("fa2", 89))
        }
        q = scenes["fa3"].normal(batch * new, Q_HEADS, DIM)
        cases: dict[str, Sequence[Callable[[], object]]] = {}
        for name, scene in scenes.items():
            sequences = scene.filled(batch, prefix)
            step = scene.cache.extend(sequences, new)
            cases[name] = [_attend(scene, layer, q, step) for layer in range(2)]
            if name == "fa3":
                cases["hand"] = hand_prefill(scene, sequences, new, q)
        found = race(cases, rounds=5, round_us=4000)
        shape = f"{batch} x {new} after {prefix}"
        pairs = new * prefix + new * (new + 1) / 2
        flops = 4 * batch * pairs * Q_HEADS * DIM
        ours = found["fa3"].us
        print(f"  {shape}: " + ", ".join(_tflops(n, t, flops) for n, t in found.items()))
        yield "prefill fa3, against fa2", shape, ours, found["fa2"].us / ours
        yield "prefill fa3, against raw fa3", shape, ours, found["hand"].us / ours
        for scene in scenes.values():
            scene.free()


def _tflops(name: str, timed: Timed, flops: float) -> str:
    return f"{name} {timed.us:.0f} us = {flops / timed.us / 1e6:.0f} TFLOP/s"


def step_rows() -> Iterator[Row]:
    """A whole decode step: pages, page lists, plan, four layers of writing and attending."""
    for batch in (1, 64, 256):
        scene = Scene(requests=batch, tokens=2048, layers=4)
        sequences = scene.filled(batch, 1024)
        hands = {
            "plan()": HandDecode(scene, sequences, graph=True).step(fast=False),
            "fast_decode_plan()": HandDecode(scene, sequences, graph=True).step(fast=True),
        }
        found = per_step_us({"ours": _our_step(scene, sequences, batch), **hands})
        for name in hands:
            ours = found["ours"]
            yield f"step, against {name} by hand", f"B {batch}, 1k", ours, found[name] / ours
        scene.free()


def _our_step(scene: Scene, sequences: Sequence[Any], batch: int) -> Callable[[], None]:
    graph = scene.cache.graph(batch)
    q = scene.normal(batch, Q_HEADS, DIM)
    k, v = scene.normal(batch, KV_HEADS, DIM), scene.normal(batch, KV_HEADS, DIM)
    layers = range(scene.layers)
    graph.capture(lambda step: [scene.cache.attend(n, q, k, v, step) for n in layers])

    def one() -> None:
        step = scene.cache.extend(sequences, 1)
        scene.cache.fill(graph, step)
        graph.replay()
        scene.cache.commit(step)

    return one


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "plan": plan_rows,
    "decode": decode_rows,
    "fast": lambda: decode_rows("fp8_e4m3", "fast"),
    "prefill": prefill_rows,
    "step": step_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    need_gpu()
    rows: list[Row] = []
    for name in chosen.only:
        for row in SECTIONS[name]():
            rows.append(row)
            what, shape, us, ratio = row
            print(f"{what:<42} {shape:<24} {us:>9.1f} us  theirs / ours {ratio:.3f}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({"page_tokens": PAGE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
