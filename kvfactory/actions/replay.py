"""``action=replay``: a trace of requests through the books of the plan, in virtual time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.replay import Load, Outcome, Simulation, load_of, read_trace, spec_for
from kvfactory.report.progress import track
from kvfactory.report.tables import columns
from kvfactory.spec import Spec


def run(spec: Spec, output: str) -> int:
    """Print what became of the requests; 0 when the books balance at the end, 1 otherwise.

    Raises:
        SpecError: no trace, or one that cannot be read.
        PlanError, CapabilityError: no plan for the longest request.
    """
    load = load_of(read_trace(spec.workload.trace), spec)
    laid = plan(spec_for(load, spec))
    outcome = replay(laid, load)
    if output == "json":
        print(json.dumps(_plain(laid, load, outcome), indent=2))
    else:
        print("\n\n".join(_sections(laid, load, outcome)))
    for path, held in outcome.leaked.items():
        print(f"{path}: {held} still held at the end, need 0", file=sys.stderr)
    return 1 if outcome.leaked else 0


def replay(laid: CachePlan, load: Load) -> Outcome:
    """``load`` served from its first request to its last."""
    simulation, began = Simulation(laid, load), time.perf_counter()
    for number in track(range(len(load.trace)), "replaying"):
        while simulation.done <= number:
            simulation.tick()
    simulation.close()
    return simulation.record.outcome(time.perf_counter() - began)


def _plain(laid: CachePlan, load: Load, outcome: Outcome) -> dict[str, object]:
    return {
        "trace": load.trace.name,
        "model": laid.spec.model.name,
        "step_ms": laid.spec.workload.step_ms,
        "limit": {"tokens": load.limit, "is": load.limit_is},
        "plan": {
            "bytes": laid.bytes,
            "binding": laid.binding,
            "mean_tokens": laid.spec.workload.mean_tokens,
            **asdict(laid.limits),
        },
        **asdict(outcome),
        "fragmentation": {fill.table: fill.fragmentation for fill in outcome.fills},
        "books_tokens_per_s": outcome.books_tokens_per_s,
        "books_requests_per_s": outcome.books_requests_per_s,
        "balanced": not outcome.leaked,
    }


# ---- in words ------------------------------------------------------------------------------


def _sections(laid: CachePlan, load: Load, outcome: Outcome) -> Iterator[str]:
    limits, mean = laid.limits, laid.spec.workload.mean_tokens
    average = f"{mean:,} tokens on average and " if mean else ""
    yield (
        f"{load.trace.name} on {laid.spec.model.name}: {outcome.virtual_s:,.0f} s of virtual time,"
        f" {outcome.steps:,} steps of {laid.spec.workload.step_ms:g} ms\n"
        f"planned for {limits.admitted:,} requests of {average}{limits.tokens:,} at most;"
        f" bound by {laid.binding}\n"
        f"requests are limited to {load.limit_is}"
    )
    yield columns(*_requests(outcome))
    yield columns(*_tokens(outcome))
    yield columns(*_tables(outcome))
    yield columns(*_books(outcome))
    yield "\n".join(_remarks(outcome))


def _requests(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = (
        "requests",
        "finished",
        "refused",
        "cut",
        "running peak",
        "waiting peak",
        "longest wait",
    )
    numbers = (
        outcome.arrivals,
        outcome.finished,
        sum(outcome.refused.values()),
        outcome.cut,
        outcome.running_peak,
        outcome.waiting_peak,
    )
    return head, [(*(f"{n:,}" for n in numbers), f"{outcome.longest_wait_s:.2f} s")]


def _tokens(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("tokens prefilled", "generated", "prefix hits", "prefixes kept", "given up")
    numbers = (
        outcome.prompt_tokens,
        outcome.generated_tokens,
        outcome.prefix_hit_tokens,
        outcome.segments_held,
        outcome.segments_released,
    )
    return head, [tuple(f"{n:,}" for n in numbers)]


def _tables(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("table", "pages", "held at most", "tokens allocated", "used", "fragmentation")
    rows: list[tuple[str, ...]] = [
        (
            fill.table,
            f"{fill.pages:,}",
            f"{fill.peak_pages:,}",
            f"{fill.allocated_tokens:,.0f}",
            f"{fill.used_tokens:,.0f}",
            f"{fill.fragmentation:.2%}",
        )
        for fill in outcome.fills
    ]
    return head, rows


def _books(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("books us/step", "p99", "first quarter", "last quarter", "growth")
    times = outcome.times
    micros = (times.median_us, times.p99_us, times.first_quarter_us, times.last_quarter_us)
    return head, [(*(f"{us:.1f}" for us in micros), f"{times.growth:.2f}")]


def _remarks(outcome: Outcome) -> Iterator[str]:
    for reason, count in outcome.refused.items():
        yield f"refused: {count:,}, {reason}"
    if outcome.window_pages_released:
        yield f"pages released by windows: {outcome.window_pages_released:,}"
    yield (
        "prefixes kept: what later prompts may begin with; given up: those of them whose pages"
        " somebody needed"
    )
    yield (
        "books us/step: what the host's bookkeeping took, medians of all steps and of their first"
        " and last quarter; growth: the quarters at equal batches, 1.00 where steps cost the same"
    )
    yield (
        f"the books alone could serve {outcome.books_tokens_per_s:,.0f} tokens/s,"
        f" {outcome.books_requests_per_s:,.0f} requests/s: no model ran"
    )
    yield (
        f"books: {outcome.books_s:.1f} s of processor time, {outcome.wall_s:.1f} s with the"
        f" simulation; {'NOT balanced' if outcome.leaked else 'balanced'} at the end"
    )
