"""``action=run``: build the cache here, serve random requests through it, verify every answer.

Requests of different lengths are prefilled in chunks and decoded together, through books, pools
and backends, as an engine would do it. Attention is compared with dense float32 attention over the
unquantized history and, where it is sparse, over the same selection; selections with a dense top-k
over the stored index keys; recurrent outputs and states with all tokens in one go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from kvfactory.actions import Outcome
from kvfactory.builder import build
from kvfactory.errors import Problem, SpecError
from kvfactory.kinds import ceil_div
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.report.progress import track
from kvfactory.report.tables import columns, plan_text
from kvfactory.sizing import chunk_tokens
from kvfactory.spec import Spec
from kvfactory.verify.attention import Verdict
from kvfactory.verify.effort import choose
from kvfactory.verify.loop import Loop

DECODE_TOKENS = 16
PREFILL_STEPS = 3  # at least, so that chunks and decodes mix


@dataclass(frozen=True)
class RunResult:
    """What a run found: a verdict per group, and where the time went, in seconds.

    ``layers`` were verified, and ``attended_tokens`` of ``tokens`` attended: see ``effort``.
    """

    requests: int
    tokens: int
    steps: int
    layers: int
    attended_tokens: int
    build_seconds: float
    cache_seconds: float
    total_seconds: float
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every group stayed within its bound."""
        return all(verdict.passed for verdict in self.verdicts)


def run(spec: Spec, output: str) -> Outcome:
    """Print the plan and the verdicts; 0 when every group passed, 1 otherwise.

    It finds the largest error of a group and the verdict over all of them.

    Raises:
        SpecError, PlanError, CapabilityError: no such plan, or memory that keeps nothing.
        BuildError: the plan does not fit the device that is here.
    """
    torch.set_num_threads(1)  # small products: a second thread mostly waits for the first
    laid = plan(spec)
    _check_memory(laid)
    if output == "table":
        print(plan_text(laid), flush=True)
    result = execute(laid)
    if output == "json":
        print(json.dumps({"plan": laid.to_dict(), "run": asdict(result), "passed": result.passed}))
    else:
        print(f"\n{_text(result, laid)}")
    error = max((verdict.error for verdict in result.verdicts), default=0.0)
    found = {"error": f"{error:.5f}", "verdict": "passed" if result.passed else "FAILED"}
    return Outcome(0 if result.passed else 1, found)


def _check_memory(laid: CachePlan) -> None:
    """Refuse to verify what is counted only.

    Raises:
        SpecError: the memory has no bytes.
    """
    if laid.memory == "meta" or laid.counted_bytes:
        need = "memory with storage, or action=plan"
        raise SpecError(Problem("memory.name", repr(laid.memory), need, "memory=auto"))


def _text(result: RunResult, laid: CachePlan) -> str:
    head = ("group", "error", "bound", "K stored", "V stored", "numbers", "verdict", "")
    rows = [
        (
            verdict.group,
            *(f"{value:.5f}" for value in (verdict.error, verdict.bound)),
            *(f"{value:.5f}" for value in (verdict.key_error, verdict.value_error)),
            f"{verdict.numbers:,}",
            "passed" if verdict.passed else "FAILED",
            verdict.note,
        )
        for verdict in result.verdicts
    ]
    kept = len(laid.owners)
    sampled = result.layers < kept or result.attended_tokens < result.tokens
    share = (
        f"verified: {result.layers} of {kept} layers, {result.attended_tokens:,} tokens attended\n"
        if sampled
        else ""
    )
    times = (
        f"{result.requests} requests, {result.tokens:,} tokens in {result.steps} steps:"
        f" built in {result.build_seconds:.2f} s, cache {result.cache_seconds:.2f} s,"
        f" {result.total_seconds:.2f} s with the dense reference"
    )
    return f"{columns(head, rows)}\n\n{share}{times}"


def execute(laid: CachePlan) -> RunResult:
    """Build ``laid`` on its device, serve the workload, verify, and close everything."""
    started = time.perf_counter()
    cache = build(laid)
    built = time.perf_counter()
    effort = choose(laid)
    loop = Loop(cache, effort)
    most = ceil_div(sum(effort.lengths), PREFILL_STEPS)
    chunk = min(most, chunk_tokens(laid.tables, laid.spec, len(effort.lengths)))
    steps = schedule(effort.lengths, chunk, effort.quiet)
    for counts, attended in track(steps, "verifying"):
        loop.step(counts, attended)
    loop.finish()
    return RunResult(
        requests=len(effort.lengths),
        tokens=sum(effort.lengths),
        steps=len(steps),
        layers=len(effort.layers),
        attended_tokens=sum(sum(counts) for counts, attended in steps if attended),
        build_seconds=built - started,
        cache_seconds=loop.seconds,
        total_seconds=time.perf_counter() - started,
        verdicts=loop.verdicts(),
    )


def schedule(
    lengths: Sequence[int], chunk_tokens: int, quiet: float = 0.0
) -> list[tuple[list[int], bool]]:
    """New tokens of each request in each step: chunks of prompts, then one token a step.

    A step has at most ``chunk_tokens`` prompt tokens; requests decode as soon as their prompt is
    done, while others still prefill. Steps with False come first and cover the share ``quiet`` of
    every prompt, which is written and not attended.
    """
    prompts = [max(1, length - DECODE_TOKENS) for length in lengths]
    done = [0] * len(lengths)
    steps: list[tuple[list[int], bool]] = []
    goals = [int(quiet * prompt) for prompt in prompts]
    for attended in (False, True):
        while any(before < goal for before, goal in zip(done, goals, strict=True)):
            room, counts = chunk_tokens, []
            for before, goal, prompt in zip(done, goals, prompts, strict=True):
                decodes = before >= prompt
                new = min(1 if decodes else room, (goal if decodes else min(goal, prompt)) - before)
                room -= 0 if decodes else new
                counts.append(new)
            done = [before + new for before, new in zip(done, counts, strict=True)]
            steps.append((counts, attended))
        goals = list(lengths)
    return steps
