"""Plans and lists as text for people: plain columns, whatever the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import StringIO

from kvfactory.layouts import layout_name
from kvfactory.planning.cacheplan import CachePlan, GroupPlan, StatePlan, TablePlan
from kvfactory.sizing import request_pages
from kvfactory.spec.layers import layer_set

_NUMBER = re.compile(r"[\d.,]+(%|x| [KMGT]?i?B| us)?|-")


def plan_text(plan: CachePlan) -> str:
    """A plan in words: what is stored where, for how many requests, and each byte's purpose."""
    num_layers = plan.spec.model.num_layers
    sections = [
        _headline(plan),
        "\n".join(f"warning: {warning}" for warning in plan.warnings),
        columns(_group_head(), [_group_cells(group, num_layers) for group in plan.groups]),
        columns(*_tables(plan)),
        columns(*_account(plan)),
        "\n".join(_reasons(plan)),
        "\n".join(f"note: {note}" for note in plan.notes),
    ]
    return "\n\n".join(section for section in sections if section)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a heading; numbers to the right, nothing cut, no trailing blanks."""
    if not rows:
        return ""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, cells in zip(head, zip(*rows, strict=True), strict=True):
        number = all(_NUMBER.fullmatch(cell) for cell in cells)
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(file=StringIO(), width=10_000, markup=False, highlight=False)
    with console.capture() as shown:
        console.print(table)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    power = min(4, max(0, (int(num_bytes).bit_length() - 1) // 10))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    value = num_bytes / 2 ** (10 * power)
    return f"{value:.0f} {unit}" if power == 0 else f"{value:.2f} {unit}"


# ---- the parts of a plan -------------------------------------------------------------------


def _headline(plan: CachePlan) -> str:
    device, limits = plan.spec.device, plan.limits
    target = f"{device.name} (sm {device.sm}, {device.num_sms} SMs)" if device.sm else device.name
    mean = plan.spec.workload.mean_tokens
    tokens = f"{mean:,} tokens on average, {limits.tokens:,} at most" if mean else ""
    return (
        f"{plan.spec.model.name} on {target}: {size(plan.bytes)} = {plan.bytes:,} B"
        f" of {plan.memory} memory\n"
        f"{limits.admitted:,} requests of {tokens or f'{limits.tokens:,} tokens'};"
        f" bound by {plan.binding}\n"
        f"a step: at most {limits.step_tokens:,} new tokens of {limits.max_requests:,} requests,"
        f" {limits.steps_in_flight} in flight"
    )


def _group_head() -> tuple[str, ...]:
    return (
        "group",
        "kind",
        "layers",
        "layout",
        "quant",
        "bits/element",
        "B/token",
        "page",
        "backend",
    )


def _group_cells(group: GroupPlan, num_layers: int) -> tuple[str, ...]:
    entry_bytes = sum(plane.place.page_bytes for plane in group.planes)
    elements = group.page_slots * sum(tensor.logical.elements for tensor in group.tensors)
    page_tokens = group.page_slots * group.tokens_per_entry
    total = entry_bytes * len(group.layers)
    stateful = group.kind == "linear"
    return (
        group.name,
        group.kind,
        f"{len(group.layers)}: {_layers(group.layers, num_layers)}",
        layout_name(group.layout) or f"'{group.layout}'",
        _quants(group),
        f"{8 * entry_bytes / elements:.2f}",
        "-" if stateful else f"{total / page_tokens:,.0f}",
        size(total),
        group.choice.backend if group.choice else "-",
    )


def _layers(layers: Sequence[int], num_layers: int) -> str:
    """As a config writes them, long lists shortened."""
    found = layer_set(layers, num_layers)
    if isinstance(found, str):
        return found
    shown = ", ".join(map(str, found[:4]))
    return shown if len(found) <= 4 else f"{shown} .. {found[-1]}"


def _quants(group: GroupPlan) -> str:
    by_format: dict[str, list[str]] = {}
    for tensor in group.tensors:
        by_format.setdefault(tensor.quant, []).append(tensor.name)
    return "; ".join(f"{', '.join(names)} {quant}" for quant, names in by_format.items())


def _tables(plan: CachePlan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("table", "lifetime", "page", "pages", "tokens", "pages/request", "groups")
    tables: list[TablePlan | StatePlan] = [*plan.tables, *plan.states]
    rows = [_table_cells(plan, table) for table in tables]
    return head, rows


def _table_cells(plan: CachePlan, table: TablePlan | StatePlan) -> tuple[str, ...]:
    members = ", ".join(group.name for group in plan.groups if group.table == table.name)
    if isinstance(table, StatePlan):
        usable = f"{table.num_slots - 1:,}"
        return (table.name, "state", "-", usable, "-", str(table.slots_per_request), members)
    usable_pages = table.num_pages - 1
    engine, tokens = plan.spec.engine, plan.limits.tokens
    pages = request_pages(table.lifetime, table.page_tokens, tokens, engine)
    reach = f" {table.lifetime.tokens:,}" if table.lifetime.tokens else ""
    return (
        table.name,
        f"{table.lifetime.name}{reach}",
        str(table.page_tokens),
        f"{usable_pages:,}",
        f"{usable_pages * table.page_tokens:,}",
        f"{pages:,}",
        members,
    )


def _account(plan: CachePlan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Bytes by owner and use: every cell of ``plan.rows``, summed both ways."""
    uses = tuple(dict.fromkeys(row.what for row in plan.rows))
    owners = tuple(dict.fromkeys(row.owner for row in plan.rows))
    cells: dict[tuple[str, str], int] = {}
    for row in plan.rows:
        for key in ((row.owner, row.what), (row.owner, ""), ("", row.what), ("", "")):
            cells[key] = cells.get(key, 0) + row.num_bytes
    shown = [
        (owner or "total", *(_count(cells.get((owner, use), 0)) for use in (*uses, "")))
        for owner in (*owners, "")
    ]
    return ("bytes", *uses, "total"), shown


def _count(num_bytes: int) -> str:
    return f"{num_bytes:,}" if num_bytes else "-"


def _reasons(plan: CachePlan) -> Iterator[str]:
    """Why backends of higher rank were passed over, once per reason."""
    said = (
        f"passed over: {problem.path}: got {problem.got}, need {problem.need}"
        for group in plan.groups
        if group.choice
        for _, problems in group.choice.passed_over
        for problem in problems
    )
    yield from dict.fromkeys(said)
