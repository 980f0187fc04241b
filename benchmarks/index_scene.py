"""The index benchmark's step: 256 decodes at 4,096 tokens in three tables."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Call
from kvfactory.kernels.index import IndexBuild
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.spec import Spec
from kvfactory.steps.fields import StepSize

BATCH, CONTEXT, PAGE = 256, 4096, 16


def _plan() -> CachePlan:
    heads = {"q_heads": 8, "kv_heads": 1, "head_dim": 16}
    groups = {
        "full": {"kind": "full", "layers": [0]} | heads,
        "window": {"kind": "swa", "layers": [1], "window_tokens": CONTEXT} | heads,
        "chunk": {"kind": "chunked", "layers": [2], "chunk_tokens": CONTEXT} | heads,
    }
    return plan(
        Spec.parse(
            {
                "model": {"name": "three", "num_layers": 3, "groups": groups},
                "kv": {"page_tokens": PAGE},
                "workload": {"requests": BATCH, "tokens": CONTEXT + 64},
                "engine": {"prefill_chunk_tokens": 64},
            }
        )
    )


def _array(arena: Tensor, offset: int, elements: int) -> Tensor:
    return arena[offset : offset + 4 * elements].view(torch.int32)


def index_calls() -> list[Call]:
    """Builds of the two open steps, every page listed in every table."""
    laid = _plan()
    arena = torch.zeros(laid.bytes, dtype=torch.uint8, device="cuda")
    fields = {(f.table, f.name): f for f in laid.fields}
    for table in laid.tables:
        elements = (laid.limits.max_requests + 1) * table.row_pages
        ids = torch.randint(1, table.num_pages, (elements,), device="cuda")
        _array(arena, table.offset, elements).copy_(ids)
    rows = torch.randperm(BATCH, device="cuda") + 1
    for number in range(laid.limits.steps_in_flight):
        shift = number * laid.step_bytes
        given = {
            "rows": rows,
            "prefix": torch.full((BATCH,), CONTEXT - 1, device="cuda"),
            "q_indptr": torch.arange(BATCH + 1, device="cuda"),
        }
        for name, values in given.items():
            _array(arena, fields["", name].offset + shift, len(values)).copy_(values)
    build = IndexBuild(laid, arena)
    for kernel in build.kernels():
        kernel.warm()
    size = StepSize(BATCH, BATCH, most_tokens=1, most_pages=CONTEXT // PAGE)
    return [partial(build.build, number, size) for number in range(laid.limits.steps_in_flight)]
