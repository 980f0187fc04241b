"""Explanations of a plan: what it costs, what it turned down and why, what would admit more.

Nothing here decides: verdicts are those of the planner, asked again with one setting changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from kvfactory.backends.contract import BACKENDS, ranked, refusals
from kvfactory.errors import KVFactoryError, Problem
from kvfactory.kinds import KINDS, ceil_div
from kvfactory.layouts import LAYOUTS, layout_name
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import (
    Attention,
    CachePlan,
    GroupPlan,
    Select,
    TablePlan,
)
from kvfactory.quant import SCHEMES
from kvfactory.sizing import request_pages
from kvfactory.spec import LayoutFamilies, Layouts, Plugin, Quants, Spec

PAGE_TOKENS = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Stored:
    """A tensor of a group in one layer: its format, scales included in every number.

    ``row_bytes`` are of one entry (one request for states), over all heads.
    """

    group: str
    tensor: str
    role: str
    quant: str
    elements: int
    row_bytes: float
    bits_per_element: float


@dataclass(frozen=True)
class Waste:
    """Bytes of a group that hold nothing.

    ``padding`` and ``sink`` are of the whole region; ``rounding`` of one request at its longest:
    the last page's rest, and in windows the pages beyond what a query sees.
    """

    group: str
    num_bytes: int
    padding: int
    sink: int
    request_bytes: int
    rounding: int


@dataclass(frozen=True)
class Verdict:
    """A backend for a group: taken, passed over although it could, or refused for reasons."""

    group: str
    backend: str
    taken: bool
    reasons: tuple[Problem, ...]
    kernels: Mapping[str, str]


@dataclass(frozen=True)
class Trial:
    """The plan with one override: what it admits and takes, or the reasons why there is none.

    ``taken_by`` are the groups that have it now, ``taken`` whether all that could do.
    ``passed_over`` are the reasons against backends of higher rank.
    """

    override: str
    taken: bool
    taken_by: tuple[str, ...]
    admitted: int
    num_bytes: int
    backends: tuple[str, ...]
    passed_over: tuple[Problem, ...]
    reasons: tuple[Problem, ...]


@dataclass(frozen=True)
class Explanation:
    """Everything that ``action=explain`` says."""

    stored: tuple[Stored, ...]
    waste: tuple[Waste, ...]
    backends: tuple[Verdict, ...]
    layouts: tuple[Trial, ...]
    quants: tuple[Trial, ...]
    changes: tuple[Trial, ...]


def explain(laid: CachePlan, spec: Spec) -> Explanation:
    """What the plan of ``spec`` costs and turned down; other plans are made on the way."""
    return Explanation(
        stored=tuple(row for group in laid.groups for row in _stored(group)),
        waste=tuple(_waste(laid, group) for group in laid.groups),
        backends=tuple(_verdicts(laid)),
        layouts=tuple(_layouts(laid, spec)),
        quants=tuple(_quants(laid, spec)),
        changes=tuple(_changes(laid, spec)),
    )


# ---- bytes -----------------------------------------------------------------------------------


def _stored(group: GroupPlan) -> Iterator[Stored]:
    for tensor in group.tensors:
        row_bytes = sum(plane.place.page_bytes for plane in tensor.planes) / group.page_slots
        elements = tensor.logical.elements
        bits = 8 * row_bytes / elements
        role = tensor.logical.role
        yield Stored(group.name, tensor.name, role, tensor.quant, elements, row_bytes, bits)


def _waste(laid: CachePlan, group: GroupPlan) -> Waste:
    rows = {row.what: row.num_bytes for row in laid.rows if row.owner == group.name}
    page = len(group.layers) * sum(plane.place.page_bytes for plane in group.planes)
    request, useful = _request_bytes(laid, group, page)
    return Waste(
        group=group.name,
        num_bytes=group.num_bytes,
        padding=rows.get("padding", 0),
        sink=rows.get("sink", 0),
        request_bytes=request,
        rounding=request - useful,
    )


def _request_bytes(laid: CachePlan, group: GroupPlan, page_bytes: int) -> tuple[int, int]:
    """What one request of the plan's length takes in a group, and what of it can be seen."""
    tables: dict[str, TablePlan] = {table.name: table for table in laid.tables}
    table = tables.get(group.table)
    if table is None:
        return page_bytes, page_bytes
    lifetime, tokens = table.lifetime, laid.limits.tokens
    pages = request_pages(lifetime, table.page_tokens, tokens, laid.spec.engine)
    seen = tokens if lifetime.name == "whole" else lifetime.tokens
    if lifetime.name != "encoder":
        seen = min(seen, tokens)
    return pages * page_bytes, ceil_div(seen * page_bytes, table.page_tokens)


# ---- backends --------------------------------------------------------------------------------


def _verdicts(laid: CachePlan) -> Iterator[Verdict]:
    spec = laid.spec
    for group in laid.groups:
        if not isinstance(group.work, Attention | Select):
            continue
        for backend in ranked(BACKENDS.working()):
            reasons = refusals(backend.name, backend.needs(spec), group, spec)
            taken = group.choice is not None and group.choice.backend == backend.name
            kernels = backend.kernels(group, spec) if taken else {}
            yield Verdict(group.name, backend.name, taken, reasons, dict(kernels))
        for name, reasons in BACKENDS.faults("backend.name").items():
            yield Verdict(group.name, name, False, reasons, {})


# ---- other plans -----------------------------------------------------------------------------


def _layouts(laid: CachePlan, spec: Spec) -> Iterator[Trial]:
    """Every layout for every granularity that the model has."""
    kv = spec.kv
    for granularity in dict.fromkeys(KINDS[group.kind].granularity for group in laid.groups):
        members = [g for g in laid.groups if KINDS[g.kind].granularity == granularity]
        own = {group.name: {layout_name(group.layout)} for group in members}
        for name in LAYOUTS.names():
            changed = {**dict(kv.layout), granularity: LayoutFamilies(k=name)}
            layout = Layouts.model_construct(**changed)
            override = f"kv.layout.{granularity}={name}"
            yield _taken(_trial(spec, override, kv={"layout": layout}), name, own)


def _quants(laid: CachePlan, spec: Spec) -> Iterator[Trial]:
    """Every format for every role that the model has."""
    kv = spec.kv
    formats: dict[str, dict[str, set[str]]] = {}
    for group in laid.groups:
        for tensor in group.tensors:
            own = formats.setdefault(tensor.logical.role, {})
            own.setdefault(group.name, set()).add(tensor.quant)
    for role, own in formats.items():
        for name in SCHEMES.names():
            quant = Quants.model_construct(**{**dict(kv.quant), role: Plugin(name=name)})
            override = f"kv.quant.{role}={name}"
            yield _taken(_trial(spec, override, kv={"quant": quant}), name, own)


def _taken(trial: Trial, name: str, own: Mapping[str, Set[str]]) -> Trial:
    """``trial`` of setting ``name`` where groups have theirs of ``own``."""
    having = tuple(group for group, names in own.items() if name in names)
    return replace(trial, taken=all(names == {name} for names in own.values()), taken_by=having)


def _changes(laid: CachePlan, spec: Spec) -> Iterator[Trial]:
    """Settings that admit more requests, or without a budget take fewer bytes; the best first."""
    trials = [trial for trial in _candidates(laid, spec) if not trial.reasons]
    if needs_fewer_bytes(spec):
        better = [trial for trial in trials if trial.num_bytes < laid.bytes]
        yield from sorted(better, key=lambda trial: trial.num_bytes)
    else:
        better = [trial for trial in trials if trial.admitted > laid.limits.admitted]
        yield from sorted(better, key=lambda trial: -trial.admitted)


def needs_fewer_bytes(spec: Spec) -> bool:
    """Whether the workload alone decides how large the plan is, so that better means smaller."""
    return spec.memory.budget is None and not spec.memory.tokens


def _candidates(laid: CachePlan, spec: Spec) -> Iterator[Trial]:
    memory, engine, workload = spec.memory, spec.engine, spec.workload
    for name in SCHEMES.names():
        quant = Quants(every=Plugin(name=name))
        yield _trial(spec, f"kv.quant={name}", kv={"quant": quant})
    if any(group.kind == "linear" for group in laid.groups):  # every format above left them plain
        for name in SCHEMES.names():
            quant = Quants.model_construct(**{**dict(spec.kv.quant), "state": Plugin(name=name)})
            yield _trial(spec, f"kv.quant.state={name}", kv={"quant": quant})
    for tokens in PAGE_TOKENS:
        yield _trial(spec, f"kv.page_tokens={tokens}", kv={"page_tokens": tokens})
    if memory.budget is not None:
        budget = memory.budget * 5 // 4
        if laid.memory == spec.device.type and spec.device.memory_bytes is not None:
            budget = min(budget, spec.device.memory_bytes)
        gib = budget // 2**30
        if gib * 2**30 > memory.budget:
            more = {"budget": gib * 2**30}
            yield _trial(spec, f"memory.budget={gib}GiB", memory=more)
    if memory.ratios:
        yield _trial(spec, "memory.ratios={}", memory={"ratios": {}})
    if engine.max_requests is not None:
        yield _trial(spec, "engine.max_requests=null", engine={"max_requests": None})
    if engine.steps_in_flight > 1:
        yield _trial(spec, "engine.steps_in_flight=1", engine={"steps_in_flight": 1})
    if engine.prefill_chunk_tokens > 512:
        chunk = {"prefill_chunk_tokens": 512}
        yield _trial(spec, "engine.prefill_chunk_tokens=512", engine=chunk)
    half = workload.tokens // 2
    if half:
        yield _trial(spec, f"workload.tokens={half}", workload={"tokens": half})


def _trial(spec: Spec, override: str, **changed: Mapping[str, Any]) -> Trial:
    """The plan with sections of its spec updated."""
    parts = dict(spec)
    update = {name: parts[name].model_copy(update=dict(new)) for name, new in changed.items()}
    try:
        other = plan(spec.model_copy(update=update))
    except KVFactoryError as error:
        return Trial(override, False, (), 0, 0, (), (), tuple(error.problems))
    choices = [group.choice for group in other.groups if group.choice]
    over = (problem for c in choices for _, found in c.passed_over for problem in found)
    return Trial(
        override=override,
        taken=False,
        taken_by=(),
        admitted=other.limits.admitted,
        num_bytes=other.bytes,
        backends=tuple(dict.fromkeys(choice.backend for choice in choices)),
        passed_over=tuple(dict.fromkeys(over)),
        reasons=(),
    )
