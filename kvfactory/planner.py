"""``plan``: a spec becomes a cache plan, every byte accounted for, before any memory exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvfactory.backends.contract import BACKENDS
from kvfactory.errors import Problem, SpecError
from kvfactory.memory import MEMORIES
from kvfactory.planning.annexes import draft_annexes, fixed_slots
from kvfactory.planning.assembly import Arena, Sizes, TableDraft, lay_groups, lay_steps, lay_tables
from kvfactory.planning.cacheplan import CachePlan, Choice, GroupPlan, Workspace
from kvfactory.planning.choice import check_options, choose, confirm, slow
from kvfactory.planning.drafts import with_draft
from kvfactory.planning.grouping import Draft, Findings, draft_groups
from kvfactory.planning.remarks import remarks, warnings
from kvfactory.sizing import crowded_chunks, draft_tables, sizes_for, solve
from kvfactory.spec import Spec


def plan(spec: Spec) -> CachePlan:
    """The plan of ``spec`` for its device. Pure: no torch, no memory, no device is touched.

    Raises:
        SpecError: no spec, or one with an unknown plugin or option.
        PlanError: geometry, layout or quant that cannot be stored, or a budget below its floor.
        CapabilityError: no backend serves a group; the problems are the reasons.
    """
    if not isinstance(spec, Spec):
        fix = "plan(compose(...)) or plan(Spec.parse(...))"
        raise SpecError(Problem("plan(spec)", f"a {type(spec).__name__}", "a Spec", fix))
    spec, findings = with_draft(spec), Findings()
    memory = _memory(spec, findings)
    drafts = draft_groups(spec, findings)
    findings.notes += remarks(spec, drafts)
    tables = draft_tables(drafts, spec)
    drafts = (*drafts, *draft_annexes(spec, drafts, findings))
    findings.problems += _twice(drafts)
    findings.check()
    check_options(spec)
    stores = MEMORIES.get(memory, "memory.name").stores
    planner = _Planner(spec, drafts, tables, {}, stores)
    first = sizes_for(1, [table.key for table in tables], spec)
    choices = choose(planner.lay(first).groups, spec) if stores else {}
    planner = _Planner(spec, drafts, tables, choices, stores)
    sizes, binding = solve(tables, spec, planner.count)
    laid = replace(planner.lay(sizes), memory=memory, binding=binding)
    confirm(laid)
    notes = (*findings.notes, *slow(laid), *_crowded(laid), *_counted(laid))
    return replace(laid, notes=notes, warnings=(*_too_large(laid), *warnings(spec)))


def _twice(drafts: Sequence[Draft]) -> Iterator[Problem]:
    """Names of groups that parts of other groups, by recipe or as annexes, have too."""
    for name, count in Counter(draft.name for draft in drafts).items():
        if count > 1:
            need = "a name that no group with a recipe, snapshots, ring or checkpoints makes"
            yield Problem("model.groups", f"{count} groups called {name}", need)


def _counted(laid: CachePlan) -> Iterator[str]:
    """That nothing is stored, where it is so."""
    if laid.counted_bytes:
        yield (
            f"memory={laid.memory} stores nothing: {laid.counted_bytes:,} B of groups are counted,"
            " not allocated"
        )


def _too_large(laid: CachePlan) -> Iterator[str]:
    """That the device is too small for the plan, where it is known to be."""
    device = laid.spec.device
    if device.memory_bytes is not None and laid.memory == device.type:
        if laid.bytes > device.memory_bytes:
            has = f"{device.name} has {device.memory_bytes:,} B"
            yield f"the plan is larger than its device: {laid.bytes:,} B, {has}"


def _crowded(laid: CachePlan) -> Iterator[str]:
    """Where the pages do not always do for whole chunks of prefill."""
    chunks = crowded_chunks(laid.tables, laid.spec, laid.limits.admitted)
    for name, tokens in chunks.items():
        yield (
            f"with {laid.limits.admitted} requests at their longest, table {name} has pages for"
            f" prefill chunks of {tokens:,} tokens, not {laid.spec.engine.prefill_chunk_tokens:,}"
        )


class _Planner:
    """Assembles the arena for given sizes; the one place where bytes are counted."""

    def __init__(
        self,
        spec: Spec,
        drafts: Sequence[Draft],
        tables: Sequence[TableDraft],
        choices: Mapping[str, Choice],
        stores: bool,
    ) -> None:
        self.spec, self.drafts, self.tables, self.choices = spec, drafts, tables, choices
        self.stores = stores
        self.names = {table.key: table.name for table in tables}

    def count(self, sizes: Sizes) -> int:
        return self.lay(sizes).bytes

    def lay(self, sizes: Sizes) -> CachePlan:
        align = self.spec.kv.align_bytes
        arena = Arena(align)
        fixed = fixed_slots(self.drafts, sizes.limits, self.spec)
        full = replace(sizes, pages={**sizes.pages, **fixed})
        names = {**self.names, **{key: f"by {key.lifetime.name}" for key in fixed}}
        regions = arena if self.stores else Arena(align)
        laid = lay_groups(regions, self.drafts, names, full, align)
        beside = set(names.values()) - set(self.names.values())
        groups = tuple(
            replace(g, choice=self.choices.get(g.name)) for g in laid if g.table not in beside
        )
        pages, states = lay_tables(arena, self.tables, sizes)
        fields, step_bytes = lay_steps(arena, self.tables, sizes.limits)
        workspaces = self._workspaces(arena, groups, sizes)
        return CachePlan(
            spec=self.spec,
            groups=groups,
            tables=pages,
            states=states,
            fields=fields,
            step_bytes=step_bytes,
            workspaces=workspaces,
            limits=sizes.limits,
            memory="",
            rows=tuple(arena.rows),
            binding="",
            notes=(),
            annexes=tuple(group for group in laid if group.table in beside),
            counted_bytes=0 if self.stores else regions.cursor,
        )

    def _workspaces(
        self, arena: Arena, groups: Sequence[GroupPlan], sizes: Sizes
    ) -> tuple[Workspace, ...]:
        found = []
        for name in dict.fromkeys(group.choice.backend for group in groups if group.choice):
            served = tuple(g for g in groups if g.choice and g.choice.backend == name)
            backend = BACKENDS.get(name, "backend.name")
            wanted = backend.workspace(served, sizes.limits, self.spec)
            for use, num_bytes in wanted.items():
                offset = arena.take(name, f"workspace {use}", num_bytes)
                found.append(Workspace(name, use, offset, num_bytes))
        return tuple(found)


def _memory(spec: Spec, findings: Findings) -> str:
    """The memory plugin's name, ``auto`` resolved to the device's own."""
    device = spec.device
    if device.type == "auto":
        need = "a resolved device: device=cpu, device=h200, or compose(), which looks"
        findings.problems.append(Problem("device.type", "auto", need, "device=cpu"))
        return ""
    name = spec.memory.name if spec.memory.name != "auto" else device.type
    memory = MEMORIES.get(name, "memory.name")
    if device.type not in memory.device_types:
        need = f"memory for a device of type {device.type}"
        findings.problems.append(Problem("memory.name", repr(name), need, "memory=auto"))
    if not memory.stores and spec.memory.budget is not None:
        got, need = f"{spec.memory.budget} B beside memory={name}", "a workload or memory.tokens"
        findings.problems.append(Problem("memory.budget", got, need, "memory.budget=null"))
    return name
