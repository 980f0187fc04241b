"""``action=run``: build the cache here, serve random requests through it, verify every answer.

Requests of different lengths are prefilled in chunks and decoded together, through books, pools
and backends, as an engine would do it; each attention output is compared with dense float32
attention over the unquantized history.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.cacheplan import Attention, CachePlan
from kvfactory.kinds import ceil_div
from kvfactory.planner import plan
from kvfactory.progress import track
from kvfactory.report import columns, plan_text
from kvfactory.spec import Spec
from kvfactory.steps import Step
from kvfactory.verify import Verdict, Verifier

DECODE_TOKENS = 16
PREFILL_STEPS = 3  # at least, so that chunks and decodes mix


@dataclass(frozen=True)
class RunResult:
    """What a run found: a verdict per group, and where the time went, in seconds."""

    requests: int
    tokens: int
    steps: int
    build_seconds: float
    cache_seconds: float
    total_seconds: float
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every group stayed within its bound."""
        return all(verdict.passed for verdict in self.verdicts)


def run(spec: Spec, output: str) -> int:
    """Print the plan and the verdicts; 0 when every group passed, 1 otherwise.

    Raises:
        SpecError, PlanError, CapabilityError: no such plan.
        BuildError: the plan does not fit the device that is here.
    """
    torch.set_num_threads(1)  # small products: a second thread mostly waits for the first
    laid = plan(spec)
    if output == "table":
        print(plan_text(laid), flush=True)
    result = execute(laid)
    if output == "json":
        print(json.dumps({"plan": laid.to_dict(), "run": asdict(result), "passed": result.passed}))
    else:
        print(f"\n{_text(result)}")
    return 0 if result.passed else 1


def _text(result: RunResult) -> str:
    head = ("group", "error", "bound", "K stored", "V stored", "numbers", "verdict")
    rows = [
        (
            verdict.group,
            *(f"{value:.5f}" for value in (verdict.error, verdict.bound)),
            *(f"{value:.5f}" for value in (verdict.key_error, verdict.value_error)),
            f"{verdict.numbers:,}",
            "passed" if verdict.passed else "FAILED",
        )
        for verdict in result.verdicts
    ]
    times = (
        f"{result.requests} requests, {result.tokens:,} tokens in {result.steps} steps:"
        f" built in {result.build_seconds:.2f} s, cache {result.cache_seconds:.2f} s,"
        f" {result.total_seconds:.2f} s with the dense reference"
    )
    return f"{columns(head, rows)}\n\n{times}"


def execute(laid: CachePlan) -> RunResult:
    """Build ``laid`` on its device, serve the workload, verify, and close everything."""
    started = time.perf_counter()
    cache = build(laid)
    built = time.perf_counter()
    loop = _Loop(cache, Verifier(laid, device=laid.spec.device.type))
    lengths = request_lengths(laid)
    chunk = min(laid.spec.engine.prefill_chunk_tokens, ceil_div(sum(lengths), PREFILL_STEPS))
    steps = schedule(lengths, chunk)
    for counts in track(steps, "verifying"):
        loop.step(counts)
    loop.finish()
    return RunResult(
        requests=len(lengths),
        tokens=sum(lengths),
        steps=len(steps),
        build_seconds=built - started,
        cache_seconds=loop.seconds,
        total_seconds=time.perf_counter() - started,
        verdicts=loop.verifier.verdicts(),
    )


def request_lengths(laid: CachePlan) -> list[int]:
    """Final lengths of the requests, from short to ``workload.tokens``."""
    count = min(laid.limits.admitted, laid.spec.workload.requests)
    return [max(1, laid.limits.tokens * (number + 1) // count) for number in range(count)]


def schedule(lengths: Sequence[int], chunk_tokens: int) -> list[list[int]]:
    """New tokens of each request in each step: chunks of prompts, then one token a step.

    A step has at most ``chunk_tokens`` prompt tokens; requests decode as soon as their prompt is
    done, while others still prefill.
    """
    prompts = [max(1, length - DECODE_TOKENS) for length in lengths]
    done = [0] * len(lengths)
    steps = []
    while done != list(lengths):
        room, counts = chunk_tokens, []
        for number, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            if done[number] < prompt:
                new = min(room, prompt - done[number])
                room -= new
            else:
                new = min(1, length - done[number])
            counts.append(new)
        done = [before + new for before, new in zip(done, counts, strict=True)]
        steps.append(counts)
    return steps


class _Loop:
    """An engine's loop in small: the next step is opened before the last one is committed."""

    def __init__(self, cache: Cache, verifier: Verifier) -> None:
        self.cache, self.verifier = cache, verifier
        self.seconds = 0.0
        self._open: list[Step] = []
        count = min(cache.plan.limits.admitted, cache.plan.spec.workload.requests)
        encoder = [t.lifetime.tokens for t in cache.plan.tables if t.lifetime.name == "encoder"]
        self._sequences = cache.open(count, cross_tokens=encoder[:1] * count)

    def step(self, counts: Sequence[int]) -> None:
        began = time.perf_counter()
        step = self.cache.extend(self._sequences, counts)
        if self._open:
            self.cache.commit(self._open.pop())
        self._open.append(step)
        self.seconds += time.perf_counter() - began
        for layer, group in self._attention_layers():
            self._attend(layer, group, step)

    def finish(self) -> None:
        self.cache.commit(self._open.pop())
        self.cache.close(self._sequences)

    def _attention_layers(self) -> Iterator[tuple[int, str]]:
        for layer in range(self.cache.plan.spec.model.num_layers):
            for group in self.cache.groups(layer):
                if isinstance(group.work, Attention):
                    yield layer, group.name

    def _attend(self, layer: int, name: str, step: Step) -> None:
        group = self.cache.plan.by_name[name]
        inputs = self.verifier.inputs(group, layer, step)
        sinks = self.verifier.workload.sinks(group, layer)
        k, v = inputs.kv
        began = time.perf_counter()
        out = self.cache.attend(layer, inputs.q, k, v, step, group=group.group, sinks=sinks)
        self.seconds += time.perf_counter() - began
        self.verifier.compare(group, layer, step, inputs, out)
