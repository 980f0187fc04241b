"""Timing on a GPU: graphs of calls over rotating buffers, competitors taking turns, medians."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one call: the median of rounds, and their spread."""

    us: float
    low: float
    high: float


def need_gpu() -> None:
    """End with exit code 2 where there is nothing to measure on."""
    if not torch.cuda.is_available():
        print("device: got no CUDA device here, need one to measure on", file=sys.stderr)
        raise SystemExit(2)


def graphed(calls: Sequence[Call], repeat: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` in order, ``repeat`` times over."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    return graph


def race(
    cases: Mapping[str, Sequence[Call]], rounds: int = 9, round_us: float = 1500.0
) -> dict[str, Timed]:
    """Every case's time a call; a case is a list of equal calls over different buffers.

    Each round replays every case's graph once, so that drift of the clocks meets them all.
    """
    graphs, sizes = {}, {}
    for name, calls in cases.items():
        graph = graphed(calls, 1)
        once = _replay_us(graph)
        repeat = max(1, min(200, int(round_us / max(once, 1.0))))
        graphs[name] = graphed(calls, repeat) if repeat > 1 else graph
        sizes[name] = repeat * len(calls)
        _replay_us(graphs[name])
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(_replay_us(graph) / sizes[name])
    return {
        name: Timed(statistics.median(found), min(found), max(found))
        for name, found in samples.items()
    }


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1000.0


def host_us(call: Call, calls: int = 300) -> float:
    """Host microseconds of one launch: the median of batches, the device kept out of the way."""
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls // 9):
            call()
        found.append((time.perf_counter() - begin) / (calls // 9) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def per_step_us(cases: Mapping[str, Call], rounds: int = 11, steps: int = 20) -> dict[str, float]:
    """Wall microseconds of every case's step: the median of rounds, in which they take turns.

    A round is a loop of ``steps`` that never waits but at its end.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-1, rounds):
        for name, one in cases.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                one()
            torch.cuda.synchronize()
            if number >= 0:
                found[name].append((time.perf_counter() - begin) / steps * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}
