"""A paged scene for the oracle: shuffled pages, NaN wherever nothing was written, naive answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from kvfactory.backends import AttendExtra
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Attention, GroupPlan
from kvfactory.reference import Oracle
from kvfactory.spec import Spec
from kvfactory.steps.step import Step, StepArrays, TableArrays


def group_plan(page_tokens: int = 4, **group: Any) -> GroupPlan:
    """The plan of a model with one attention group."""
    data = {"kind": "full", "layers": "0-1", "q_heads": 4} | group
    model = {"name": "toy", "num_layers": 2, "dtype": "float32", "groups": {"main": data}}
    return plan(Spec.parse({"model": model, "kv": {"page_tokens": page_tokens}})).groups[0]


@dataclass
class Store:
    """The least that the oracle needs of a pool: values by slot, NaN where never written."""

    group: GroupPlan
    num_pages: int
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.num_pages * self.group.page_slots
        self.tensors = {
            tensor.name: torch.full(
                (2, slots, *(extent for _, extent in tensor.logical.axes)), torch.nan
            )
            for tensor in self.group.tensors
        }

    def read(self, layer_index: int, slots: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: x[layer_index, slots].to(dtype) for name, x in self.tensors.items()}


@dataclass(frozen=True)
class Turn:
    """One request in a step: tokens before, new tokens; rows of its new tokens in the step."""

    prefix: int
    new: int
    kv_tokens: int
    rows: slice
    tensors: dict[str, Tensor]

    @property
    def k(self) -> Tensor:
        if "latent" in self.tensors:
            return torch.cat([self.tensors[n] for n in ("latent", "rope") if n in self.tensors], -1)
        return self.tensors["k"]

    @property
    def v(self) -> Tensor:
        found = self.tensors.get("latent", self.tensors.get("v"))
        return self.tensors["k"] if found is None else found


@dataclass
class Scene:
    """Requests of (prefix, new tokens) on layer 1 of a group, with padding on the sink between."""

    group: GroupPlan
    store: Store
    step: Step
    q: Tensor
    turns: list[Turn]

    @property
    def work(self) -> Attention:
        assert isinstance(self.group.work, Attention)
        return self.group.work

    def oracle(self, dtype: torch.dtype = torch.float64) -> Oracle:
        return Oracle(self.group, self.store, dtype)

    def attend(self, **extra: Tensor) -> Tensor:
        return self.oracle().attend(1, self.q, self.step, AttendExtra(**extra))

    def naive(
        self, sees: Callable[[Turn, int, int], bool] | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE by loops; ``sees(turn, query, entry)`` replaces the rule of the group."""
        sees = sees or self.rule
        width = self.turns[0].v.shape[-1]
        out = torch.zeros(*self.q.shape[:2], width, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        for turn in self.turns:
            ratio = self.q.shape[1] // turn.k.shape[1]
            for number in range(turn.new):
                visible = [e for e in range(len(turn.k)) if sees(turn, number, e)]
                for head in range(self.q.shape[1]):
                    sink = None if sinks is None else float(sinks[head])
                    row = turn.rows.start + number
                    k, v = turn.k[visible, head // ratio], turn.v[visible, head // ratio]
                    found = naive_head(self.q[row, head], k, v, self.work, sink)
                    out[row, head], lse[row, head] = found
        return out, lse

    def rule(self, turn: Turn, number: int, entry: int) -> bool:
        """Visibility in words of the design, by positions."""
        work, at = self.work, turn.prefix + number
        end = (entry + 1) * self.group.tokens_per_entry - 1
        if work.causal and end > at:
            return False
        if work.window_tokens is not None and end <= at - work.window_tokens:
            return False
        if work.chunk_tokens is not None:
            return end // work.chunk_tokens == at // work.chunk_tokens
        return True


def naive_head(
    q: Tensor, k: Tensor, v: Tensor, work: Attention, sink: float | None
) -> tuple[Tensor, float]:
    """One head of one query over the keys that it sees, float64."""
    logits = [work.scale * float(q.double() @ row.double()) for row in k]
    if work.soft_cap is not None:
        logits = [work.soft_cap * math.tanh(x / work.soft_cap) for x in logits]
    total = sum(math.exp(x) for x in logits) + (0.0 if sink is None else math.exp(sink))
    out = torch.zeros(v.shape[-1], dtype=torch.float64)
    for logit, row in zip(logits, v, strict=True):
        out += math.exp(logit) / total * row.double()
    return out, math.log(total) if total else -math.inf


def make_scene(
    requests: Sequence[tuple[int, int]], seed: int = 0, pads: bool = True, **group: Any
) -> Scene:
    """``requests`` are (prefix, new tokens); ``group`` as in the spec, with ``page_tokens``."""
    torch.manual_seed(seed)
    plan_ = group_plan(**group)
    per_entry, page_tokens = plan_.tokens_per_entry, group.get("page_tokens", 4)
    needed = [-(-(p + n) // page_tokens) for p, n in requests]
    store = Store(plan_, sum(needed) + 6)
    ids = (torch.randperm(store.num_pages - 1) + 1).tolist()
    batch = _batch(requests, pads)
    pages = torch.zeros(len(requests) + 1, max([*needed, 1]) + 1, dtype=torch.int32)
    turns, first_pages, token = [], [], 0
    for row, prefix, new, kv in batch:
        first = 0
        if row:
            own = torch.tensor([ids.pop() for _ in range(needed[row - 1])], dtype=torch.int32)
            tensors = _fill(store, own, kv // per_entry)
            first = _released(plan_, prefix, page_tokens)
            pages[row, first : len(own)] = own[first:]
            turns.append(Turn(prefix, new, kv, slice(token, token + new), tensors))
        first_pages.append(first)
        token += new
    step = make_step(plan_.table, batch, pages, first_pages)
    dim = turns[0].k.shape[-1]
    return Scene(plan_, store, step, torch.randn(token, plan_.work.q_heads, dim).double(), turns)


def make_step(
    table: str,
    batch: Sequence[tuple[int, int, int, int]],
    pages: Tensor,
    first_pages: Sequence[int],
) -> Step:
    """A step of ``batch`` entries (row, prefix, new tokens, kv tokens)."""
    rows, prefix, new, kv = (list(column) for column in zip(*batch, strict=True))
    positions = [p + i for p, n in zip(prefix, new, strict=True) for i in range(n)]
    arrays = TableArrays(
        pages=pages,
        slots=torch.zeros(0, dtype=torch.int64),
        kv_lengths=torch.tensor(kv, dtype=torch.int32),
        first_page=torch.tensor(first_pages, dtype=torch.int32),
        lists=cast(Any, None),
    )
    made = StepArrays(
        rows=torch.tensor(rows, dtype=torch.int32),
        q_indptr=torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int(),
        prefix=torch.tensor(prefix, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int64),
        tables={table: arrays},
        states={},
    )
    return Step(cast(Any, None), lambda: made)


def _batch(requests: Sequence[tuple[int, int]], pads: bool) -> list[tuple[int, int, int, int]]:
    found = [(row + 1, p, n, p + n) for row, (p, n) in enumerate(requests)]
    return [(0, 0, 1, 1), *found, (0, 0, 1, 0), (0, 0, 0, 0)] if pads else found


def _fill(store: Store, own: Tensor, entries: int) -> dict[str, Tensor]:
    """Write random entries to the pages ``own`` and return them."""
    index = torch.arange(entries)
    page_slots = store.group.page_slots
    slots = own.long()[index // page_slots] * page_slots + index % page_slots
    written = {}
    for name, x in store.tensors.items():
        written[name] = torch.randn(entries, *x.shape[2:])
        x[1, slots] = written[name]
    return written


def _released(group: GroupPlan, prefix: int, page_tokens: int) -> int:
    """Columns before the first one that a query from ``prefix`` on can still see."""
    work = group.work
    assert isinstance(work, Attention)
    if work.window_tokens is not None:
        return max(0, prefix - work.window_tokens + 1) // page_tokens
    if work.chunk_tokens is not None:
        return prefix // work.chunk_tokens * work.chunk_tokens // page_tokens
    return 0
