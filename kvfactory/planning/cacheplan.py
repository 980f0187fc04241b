"""The plan: every byte of a cache accounted for, as frozen data without tensors.

Offsets count from the start of the arena. Pages include page 0 of each table and slots include
state slot 0, the sink that padded batch entries read and write.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvfactory.dtypes import itemsize
from kvfactory.errors import Problem
from kvfactory.kinds import Lifetime
from kvfactory.layouts.placement import Strided
from kvfactory.quant.codec import Logical
from kvfactory.spec import Spec


@dataclass(frozen=True)
class PlanePlan:
    """One physical tensor of a group: ``k``, ``k.scale`` ...

    ``place`` has logical axes [layer, page, slot, *axes] ([layer, page, *axes] for states), its
    offset counts from the arena's start.
    """

    key: str
    tensor: str
    part: str
    dtype: str
    place: Strided


@dataclass(frozen=True)
class ConstantPlan:
    """A float32 table [layers, *shape] of static values beside the pool."""

    tensor: str
    name: str
    shape: tuple[int, ...]
    default: float
    offset: int


@dataclass(frozen=True)
class TensorPlan:
    """A logical tensor with the number format that stores it."""

    logical: Logical
    quant: str
    options: tuple[tuple[str, Any], ...]
    planes: tuple[PlanePlan, ...]
    constants: tuple[ConstantPlan, ...]

    @property
    def name(self) -> str:
        """The tensor's name, unique in its group."""
        return self.logical.name


@dataclass(frozen=True)
class Attention:
    """What attend() computes in a group; ``scale`` multiplies the logits, lengths in tokens."""

    geometry: str
    q_heads: int
    scale: float
    soft_cap: float | None
    sinks: bool
    causal: bool
    window_tokens: int | None
    chunk_tokens: int | None


@dataclass(frozen=True)
class Select:
    """What select() computes in a sparse-index group, in the table of group ``selects``."""

    selects: str
    index_heads: int
    topk: int
    block_tokens: int


@dataclass(frozen=True)
class Recurrence:
    """What a recurrent group computes: its update rule, and the axis order of its windows."""

    rule: str
    conv_window_first: bool


@dataclass(frozen=True)
class Annex:
    """What recurrent group ``of`` keeps beside its states, of ``tokens`` tokens.

    ``snapshots``: the state after each draft token, by request row; with ``overlap`` windows of
    convolutions share their columns. ``ring``: what drives the last tokens, by state slot.
    ``checkpoints``: saved states, 0 tokens.
    """

    of: str
    use: Literal["snapshots", "ring", "checkpoints"]
    tokens: int = 0
    overlap: bool = False


@dataclass(frozen=True)
class Choice:
    """The backend of a group, and why the others were passed over (name -> problems)."""

    backend: str
    passed_over: tuple[tuple[str, tuple[Problem, ...]], ...]


@dataclass(frozen=True)
class GroupPlan:
    """Layers that share geometry and formats, with their region of the arena.

    ``group`` is the spec's group; ``name`` adds the recipe (``full.edge``). ``layers`` are model
    layer ids, in the order of the index in the group. A page holds ``page_slots`` entries of
    ``tokens_per_entry`` tokens each. ``layout`` is K's pattern; each plane knows its own place.
    ``work`` says what the group computes.
    """

    name: str
    group: str
    kind: str
    table: str
    layers: tuple[int, ...]
    page_slots: int
    tokens_per_entry: int
    layout: str
    tensors: tuple[TensorPlan, ...]
    work: Attention | Select | Recurrence | Annex
    offset: int
    num_bytes: int
    choice: Choice | None

    @property
    def planes(self) -> tuple[PlanePlan, ...]:
        """All planes of all tensors."""
        return tuple(plane for tensor in self.tensors for plane in tensor.planes)

    def tensor(self, name: str) -> TensorPlan:
        """The tensor called ``name``; a KeyError when the group has none."""
        return {tensor.name: tensor for tensor in self.tensors}[name]

    def has(self, name: str) -> bool:
        """Whether the group stores a tensor called ``name``."""
        return any(tensor.name == name for tensor in self.tensors)


@dataclass(frozen=True)
class TablePlan:
    """A page table and its allocator: groups of one lifetime and page size.

    ``row_pages`` is the width of a device row, ``live_pages`` the most that one request owns.
    ``offset`` is the device table, int32 [max_requests + 1, row_pages].
    """

    name: str
    lifetime: Lifetime
    page_tokens: int
    num_pages: int
    row_pages: int
    live_pages: int
    offset: int


@dataclass(frozen=True)
class StatePlan:
    """State slots, ``slots_per_request`` a request; the groups of table ``name`` share slot ids."""

    name: str
    num_slots: int
    slots_per_request: int


@dataclass(frozen=True)
class Field:
    """A fixed device array of an open step; one copy per step in flight.

    ``sent`` are those whose numbers come from the host: they lie side by side, before all that the
    device makes of them.
    """

    name: str
    table: str
    dtype: str
    elements: int
    offset: int
    sent: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return itemsize(self.dtype) * self.elements


@dataclass(frozen=True)
class Workspace:
    """Bytes that a backend keeps beyond the pools, shared by the groups that it serves."""

    backend: str
    use: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Limits:
    """The sizes that the engine's loop must keep to.

    ``admitted`` requests of ``tokens`` each fit at once; a step has at most ``step_tokens`` new
    tokens in at most ``max_requests`` requests.
    """

    admitted: int
    tokens: int
    max_requests: int
    step_tokens: int
    steps_in_flight: int
    draft_tokens: int

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest request while all its steps in flight are open."""
        return self.tokens + self.steps_in_flight * (1 + self.draft_tokens)


@dataclass(frozen=True)
class Row:
    """One line of the account: ``owner`` is a group or table, ``what`` the use of the bytes."""

    owner: str
    what: str
    num_bytes: int


@dataclass(frozen=True)
class CachePlan:
    """Everything that ``build`` will allocate. ``bytes`` is the sum of ``rows``.

    ``counted_bytes`` are those of groups that no memory backs (``memory=null``), which lie in an
    address space of their own.
    ``annexes`` are snapshots and checkpoints of recurrent groups, which no sequence owns.
    ``step_bytes`` apart are the fields of one open step. ``binding`` says in words what limits
    the number of requests; ``warnings`` are why the plan may be of no use, ``notes`` what else a
    reader should know, such as settings that had no effect.
    """

    spec: Spec
    groups: tuple[GroupPlan, ...]
    tables: tuple[TablePlan, ...]
    states: tuple[StatePlan, ...]
    fields: tuple[Field, ...]
    step_bytes: int
    workspaces: tuple[Workspace, ...]
    limits: Limits
    memory: str
    rows: tuple[Row, ...]
    binding: str
    notes: tuple[str, ...]
    annexes: tuple[GroupPlan, ...] = ()
    counted_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """All device bytes that the cache keeps, or a library keeps on its behalf."""
        return sum(row.num_bytes for row in self.rows)

    @cached_property
    def by_name(self) -> Mapping[str, GroupPlan]:
        """Groups and annexes by their plan name."""
        return {group.name: group for group in (*self.groups, *self.annexes)}

    @cached_property
    def owners(self) -> Mapping[int, tuple[tuple[GroupPlan, int], ...]]:
        """Model layer -> (group, index in the group) of everything the layer keeps or reads."""
        found: dict[int, list[tuple[GroupPlan, int]]] = {}
        for group in self.groups:
            for index, layer in enumerate(() if isinstance(group.work, Annex) else group.layers):
                found.setdefault(layer, []).append((group, index))
        for layer, owner in self.spec.model.aliases:
            found[layer] = [*found.get(layer, []), *found[owner]]
        return {layer: tuple(entries) for layer, entries in found.items()}

    def table(self, name: str) -> TablePlan:
        """The page table called ``name``."""
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON types, with the total as ``bytes``."""
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        spec = shallow.pop("spec").model_dump(mode="json")
        plain = {key: _plain(value) for key, value in shallow.items()}
        return {"spec": spec, "bytes": self.bytes, **plain}

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
