"""Steps whose index is built by the kernel and by torch, field by field."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfactory.kernels.index import IndexBuild, reference_index
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.spec import Spec

ATTENTION = {"q_heads": 2, "kv_heads": 1, "head_dim": 16}


def index_plan(requests: int, tokens: int, page_tokens: int = 16) -> CachePlan:
    """Three tables: all tokens, a window, chunks."""
    groups = {
        "full": {"kind": "full", "layers": [0]} | ATTENTION,
        "window": {"kind": "swa", "layers": [1], "window_tokens": 33} | ATTENTION,
        "chunk": {"kind": "chunked", "layers": [2], "chunk_tokens": 48} | ATTENTION,
    }
    return plan(
        Spec.parse(
            {
                "model": {"name": "three", "num_layers": 3, "groups": groups},
                "kv": {"page_tokens": page_tokens},
                "workload": {"requests": requests, "tokens": tokens},
                "engine": {"prefill_chunk_tokens": 64},
            }
        )
    )


class StepArena:
    """An arena with random device tables and steps of random lengths."""

    def __init__(self, laid: CachePlan, device: str) -> None:
        torch.manual_seed(0)
        self.plan = laid
        self.arena = torch.zeros(laid.bytes, dtype=torch.uint8, device=device)
        for table in laid.tables:
            size = (laid.limits.max_requests + 1) * table.row_pages
            ids = torch.randint(1, table.num_pages, (size,), dtype=torch.int32, device=device)
            self.arena[table.offset : table.offset + 4 * size].view(torch.int32).copy_(ids)

    def field(self, table: str, name: str, number: int) -> Tensor:
        """The whole field of the step with serial ``number``."""
        found = next(f for f in self.plan.fields if (f.table, f.name) == (table, name))
        dtype = {"int32": torch.int32, "int64": torch.int64}[found.dtype]
        start = found.offset + number % self.plan.limits.steps_in_flight * self.plan.step_bytes
        return self.arena[start : start + dtype.itemsize * found.elements].view(dtype)

    def put(self, number: int, rows: Tensor, prefix: Tensor, new: Tensor) -> None:
        """What the host sends: rows, lengths, and the first pages that are still owned."""
        batch, zero = len(rows), torch.zeros(1, dtype=torch.int64)
        self.field("", "rows", number)[:batch] = rows.int().to(self.arena.device)
        self.field("", "prefix", number)[:batch] = prefix.int().to(self.arena.device)
        bounds = torch.cat([zero, new.cumsum(0)]).int()
        self.field("", "q_indptr", number)[: batch + 1] = bounds.to(self.arena.device)
        for table in self.plan.tables:
            owned = prefix // 64 if table.lifetime.name == "window" else torch.zeros_like(prefix)
            self.field(table.name, "first_page", number)[:batch] = owned.int().to(self.arena.device)

    def check(self, number: int, batch: int, want: dict[tuple[str, str], Tensor]) -> None:
        """The fields hold ``want``."""
        for (table, name), values in want.items():
            got = self.field(table, name, number)[: len(values)].long()
            assert torch.equal(got, values), (table, name)


def check_index(device: str) -> None:
    """Linear steps and a tree, empty requests, padded rows, two open steps; nothing else moves."""
    laid = index_plan(5, 200)
    steps = StepArena(laid, device)
    build = IndexBuild(laid, steps.arena)
    rows = torch.tensor([3, 1, 0, 5, 2])
    prefix = torch.tensor([100, 0, 0, 47, 95])
    new = torch.tensor([1, 40, 0, 3, 1])
    for number, tree in ((0, False), (1, False), (2, True)):
        steps.put(number, rows, prefix, new)
        want = dict(reference_index(laid, steps.arena, number, 5, tree))
        before = steps.arena.clone()
        build.build(number, 5, most_tokens=40, most_pages=13, tree=tree)
        steps.check(number, 5, want)
        after = steps.arena.clone()
        steps.arena.copy_(before)
        for (table, name), values in want.items():
            steps.field(table, name, number)[: len(values)] = values
        assert torch.equal(steps.arena, after), "something else was written"


def check_large_index(device: str) -> None:
    """A batch beyond one block of the prefix sum, and many parts."""
    laid = index_plan(1500, 4096)
    steps = StepArena(laid, device)
    build = IndexBuild(laid, steps.arena)
    rows = torch.randperm(1500) + 1
    prefix = torch.randint(0, 4000, (1500,))
    new = torch.ones(1500, dtype=torch.int64)
    new[7] = 64
    steps.put(0, rows, prefix, new)
    want = dict(reference_index(laid, steps.arena, 0, 1500))
    build.build(0, 1500, most_tokens=64, most_pages=256)
    steps.check(0, 1500, want)
