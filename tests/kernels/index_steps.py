"""Steps whose index is built by the kernel and by torch: afterwards the whole arenas are equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfactory.kernels.index import IndexBuild
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.spec import Spec
from kvfactory.steps.fields import StepSize, field_views, table_views
from kvfactory.steps.indexing import Indexer, TorchIndexer

ATTENTION = {"q_heads": 2, "kv_heads": 1, "head_dim": 16}
FULL = {"kind": "full", "layers": [0]} | ATTENTION
WINDOW = {"kind": "swa", "layers": [1], "window_tokens": 33} | ATTENTION
CHUNK = {"kind": "chunked", "layers": [2], "chunk_tokens": 48} | ATTENTION
CROSS = {"kind": "cross", "layers": [3], "encoder_tokens": 40} | ATTENTION
STATE = {
    "kind": "linear",
    "layers": [4],
    "conv": [[40, 3]],
    "recurrent": {"head": 2, "key": 8, "value": 4},
    "recurrence": "gdn",
}
TABLES = {"full": FULL, "window": WINDOW, "chunk": CHUNK, "cross": CROSS}


def index_plan(groups: dict[str, Any], requests: int, tokens: int) -> CachePlan:
    """Pages of 16 tokens."""
    return plan(
        Spec.parse(
            {
                "model": {"name": "five", "num_layers": 5, "groups": groups},
                "kv": {"page_tokens": 16},
                "workload": {"requests": requests, "tokens": tokens},
                "engine": {"prefill_chunk_tokens": 64, "draft_tokens": 4},
            }
        )
    )


class StepArena:
    """An arena with random device tables, noise in all fields, and steps of given lengths."""

    def __init__(self, laid: CachePlan, device: str) -> None:
        torch.manual_seed(0)
        self.plan = laid
        self.arena = torch.randint(100, (laid.bytes,), dtype=torch.uint8, device=device)
        self.sets = field_views(laid, self.arena)
        for table, view in zip(laid.tables, table_views(laid, self.arena).values(), strict=True):
            view.copy_(torch.randint(1, table.num_pages, view.shape))
            view[0] = 0

    def put(self, number: int, rows: Tensor, prefix: Tensor, new: Tensor) -> None:
        """What the host sends."""
        batch, zero = len(rows), torch.zeros(1, dtype=torch.int64)
        fields = self.sets[number]
        fields["", "rows"][:batch] = rows.to(self.arena.device)
        fields["", "prefix"][:batch] = prefix.to(self.arena.device)
        bounds = torch.cat([zero, new.cumsum(0)])
        fields["", "q_indptr"][: batch + 1] = bounds.to(self.arena.device)
        depths = torch.arange(int(new.sum())) % 3
        fields["", "depths"][: len(depths)] = depths.to(self.arena.device)
        if ("cross", "kv_lengths") in fields:
            lengths = torch.arange(batch) * 11 % 41
            fields["cross", "kv_lengths"][:batch] = lengths.to(self.arena.device)

    def check(self, number: int, size: StepSize) -> None:
        """Kernel and specification make the same of it, and write nothing else."""
        before = self.arena.clone()
        TorchIndexer(self.plan, self.arena).build(number, size)
        want = self.arena.clone()
        self.arena.copy_(before)
        IndexBuild(self.plan, self.arena).build(number, size)
        for (table, name), got in self.sets[number].items():
            wanted = field_views(self.plan, want)[number][table, name]
            assert torch.equal(got, wanted), (table, name)
        assert torch.equal(self.arena, want), "something else was written"


def check_index(device: str) -> None:
    """Linear steps and trees, empty requests, padding of graphs, in every set."""
    steps = StepArena(index_plan(TABLES, 7, 200), device)
    rows = torch.tensor([3, 1, 0, 5, 2, 7])
    prefix = torch.tensor([100, 0, 0, 47, 95, 0])
    new = torch.tensor([1, 40, 3, 3, 0, 0])
    for number, size in (
        (0, StepSize(6, 47, most_tokens=40, most_pages=13)),
        (1, StepSize(6, 47, most_tokens=40, most_pages=13, tree=True)),
        (2, StepSize(6, 60, most_tokens=40, most_pages=1)),
        (2, StepSize(6, 60, most_tokens=1, most_pages=1, tree=True)),
        (0, StepSize(0, 0, 0, 0)),
    ):
        steps.put(number, rows[: size.batch], prefix[: size.batch], new[: size.batch])
        steps.check(number, size)
    for groups in ({"state": STATE}, {"cross": CROSS}):
        steps = StepArena(index_plan(groups, 6, 200), device)
        steps.put(1, rows[:5], prefix[:5], new[:5])
        steps.check(1, StepSize(5, 50, most_tokens=40, most_pages=3))


def check_updates(device: str) -> None:
    """Entries of all tables, in more than one program; nothing else changes."""
    laid = index_plan(TABLES, 20, 400)
    steps = StepArena(laid, device)
    entries = [
        (number, row, column)
        for number, table in enumerate(laid.tables)
        for row in range(1, 21)
        for column in range(table.row_pages)
    ]
    chosen = torch.randperm(len(entries))[:700]
    pages = torch.randint(1, 50, (700, 1))
    updates = torch.cat([torch.tensor(entries)[chosen], pages], 1).int().to(device)
    before = steps.arena.clone()
    makers: list[Indexer] = [TorchIndexer(laid, steps.arena), IndexBuild(laid, steps.arena)]
    results = []
    for made in makers:
        steps.arena.copy_(before)
        made.update(updates, 650)
        results.append(steps.arena.clone())
    assert not torch.equal(results[0], before)
    assert torch.equal(*results)


def check_large_index(device: str) -> None:
    """A batch beyond one block of the prefix sum, and many parts."""
    groups = {"full": FULL, "window": WINDOW, "chunk": CHUNK}
    steps = StepArena(index_plan(groups, 1500, 4096), device)
    rows = torch.randperm(1500) + 1
    prefix = torch.randint(0, 4000, (1500,))
    new = torch.ones(1500, dtype=torch.int64)
    new[7] = 64
    steps.put(0, rows, prefix, new)
    steps.check(0, StepSize(1500, 1563, most_tokens=64, most_pages=256))
