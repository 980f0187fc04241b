"""``action=explain``: what a plan costs, what was turned down and why, what would admit more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict

from kvfactory.errors import Problem
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.report.explanation import Explanation, Trial, Verdict, explain, needs_fewer_bytes
from kvfactory.report.tables import columns, plan_text, size
from kvfactory.spec import Spec


def run(spec: Spec, output: str) -> int:
    """Print the explanation as tables or as JSON; 0 when there is a plan to explain.

    Raises:
        SpecError, PlanError, CapabilityError: there is none; the problems are the explanation.
    """
    laid = plan(spec)
    found = explain(laid, spec)
    if output == "json":
        plain = {"bytes": laid.bytes, "binding": laid.binding, **asdict(laid.limits)}
        print(json.dumps({"plan": plain, **asdict(found)}, indent=2))
    else:
        print("\n\n".join(_sections(laid, found)))
    return 0


def _sections(laid: CachePlan, found: Explanation) -> Iterator[str]:
    yield plan_text(laid).split("\n\n")[0]
    yield columns(*_stored(found))
    yield columns(*_waste(laid, found))
    yield columns(("group", "backend", "verdict", "why"), list(_backends(found.backends)))
    now = {p for g in laid.groups if g.choice for _, why in g.choice.passed_over for p in why}
    yield columns(("layout", "verdict", "why"), list(_trials(found.layouts, now)))
    yield columns(("quant", "verdict", "why"), list(_trials(found.quants, now)))
    yield _changes(laid, found.changes)


def _stored(found: Explanation) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = ("group", "tensor", "quant", "elements/row", "B/row", "bits/element")
    return head, [
        (
            row.group,
            row.tensor,
            row.quant,
            f"{row.elements:,}",
            f"{row.row_bytes:,.{0 if row.row_bytes.is_integer() else 3}f}",
            f"{row.bits_per_element:.2f}",
        )
        for row in found.stored
    ]


def _waste(laid: CachePlan, found: Explanation) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    tokens = f"{laid.limits.tokens:,}"
    head = ("group", "bytes", "padding", "sink", f"request of {tokens}", "page rounding", "share")
    return head, [
        (
            row.group,
            size(row.num_bytes),
            size(row.padding),
            size(row.sink),
            size(row.request_bytes),
            size(row.rounding),
            f"{row.rounding / row.request_bytes:.2%}",
        )
        for row in found.waste
    ]


def _backends(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, ...]]:
    for verdict in verdicts:
        word = "taken" if verdict.taken else "refused" if verdict.reasons else "passed over"
        kernels = "; ".join(f"{use}: {why}" for use, why in verdict.kernels.items())
        better = "one of higher rank serves" if word == "passed over" else kernels
        yield verdict.group, verdict.backend, word, _reasons(verdict.reasons) or better


def _trials(trials: Iterable[Trial], now: Set[Problem]) -> Iterator[tuple[str, ...]]:
    """What each setting gives; reasons against backends where they are not those of ``now``."""
    for trial in trials:
        part = f"taken by {', '.join(trial.taken_by)}" if trial.taken_by else "possible"
        word = "taken" if trial.taken else "refused" if trial.reasons else part
        served = f"{trial.admitted:,} requests, {size(trial.num_bytes)}"
        by = f", by {', '.join(trial.backends)}" if trial.backends else ""
        new = [problem for problem in trial.passed_over if problem not in now]
        over = f"; {_named(new)}" if new else ""
        yield trial.override, word, _reasons(trial.reasons) or served + by + over


def _reasons(problems: Iterable[Problem]) -> str:
    return "; ".join(dict.fromkeys(f"{each.got}, need {each.need}" for each in problems))


def _named(problems: Iterable[Problem]) -> str:
    return "; ".join(f"{each.path}: {each.got}, need {each.need}" for each in problems)


def _changes(laid: CachePlan, changes: Sequence[Trial]) -> str:
    now = f"now: {laid.limits.admitted:,} requests in {size(laid.bytes)}"
    if not changes:
        return f"{now}; no single change that was tried does better"
    by_bytes = needs_fewer_bytes(laid.spec)
    rows = [
        (
            trial.override,
            f"{trial.admitted:,}",
            f"{_gain(trial, laid, by_bytes):.2f}x",
            size(trial.num_bytes),
            ", ".join(trial.backends) or "-",
        )
        for trial in changes
    ]
    head = (
        "to do better",
        "requests",
        "bytes of now" if by_bytes else "of now",
        "bytes",
        "backends",
    )
    why = "; without a memory.budget fewer bytes for as many requests are better" * by_bytes
    return f"{columns(head, rows)}\n{now}{why}"


def _gain(trial: Trial, laid: CachePlan, by_bytes: bool) -> float:
    return trial.num_bytes / laid.bytes if by_bytes else trial.admitted / laid.limits.admitted
