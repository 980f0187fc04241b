"""Capacity: how near the plan's number comes to the largest that its pages allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planner_support import CONF, model_files, read_yaml, spec_of

from kvfactory.kinds import ceil_div
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan, TablePlan
from kvfactory.spec import Spec

BUDGET = 80 * 2**30
FP8 = read_yaml(CONF / "kv" / "fp8_hnd.yaml")
H200 = {"name": "h200", "type": "cuda", "sm": 90, "num_sms": 132}


def _most(laid: CachePlan) -> int:
    """The largest number under the plan's page sizes, with sinks and nothing else."""
    in_flight = laid.limits.steps_in_flight
    page: dict[str, int] = {}
    for group in laid.groups:
        places = [plane.place for plane in group.planes]
        own = sum(p.itemsize * math.prod(p.shape) // p.shape[1] for p in places)
        page[group.table] = page.get(group.table, 0) + own
    tokens = laid.limits.tokens
    request = sum(_pages(t, tokens, in_flight) * page[t.name] for t in laid.tables)
    request += sum(page[state.name] * state.slots_per_request for state in laid.states)
    return (BUDGET - sum(page.values())) // request


def _pages(table: TablePlan, tokens: int, in_flight: int) -> int:
    reach, page_tokens = table.lifetime.tokens, table.page_tokens
    if table.lifetime.name == "encoder":
        return ceil_div(reach, page_tokens)
    whole = ceil_div(tokens, page_tokens)
    if table.lifetime.name == "window":
        return min(whole, ceil_div(reach + in_flight - 2, page_tokens) + 1)
    if table.lifetime.name == "chunk":
        return min(whole, ceil_div(reach + in_flight - 1, page_tokens) + (reach % page_tokens > 0))
    return whole


def _specs(model: dict[str, Any]) -> Iterator[Spec]:
    windows = any(group["kind"] in ("swa", "chunked") for group in model["groups"].values())
    parts = {"device": H200, "memory": {"budget": "80GiB"}, "backend": {"name": "torch"}}
    for kv in ({}, FP8) if windows else (FP8,):
        for tokens in [1024 * 2**n for n in range(8)] if windows else [1024, 131072]:
            yield spec_of(model, kv=kv, workload={"tokens": tokens}, **parts)


@pytest.mark.parametrize("path", model_files(), ids=lambda path: path.stem)
def test_capacity_of_every_model(path: Path) -> None:
    """At least 0.99 of the largest number that any allocation on these pages could serve.

    Without the workspaces of kernels, which are not for pages to save.
    """
    for spec in _specs(read_yaml(path)):
        laid = plan(spec)
        most = _most(laid)
        assert laid.limits.admitted <= most
        assert laid.limits.admitted >= 0.99 * most, (spec.workload.tokens, most)


@pytest.mark.parametrize("path", model_files(), ids=lambda path: path.stem)
def test_kernels_keep_little_of_the_budget(path: Path) -> None:
    """The same with what the kernels that ``auto`` picks on an H200 keep; one request is allowed,
    which of fewer than a hundred is more than 0.01."""
    for kv in ({}, FP8):
        for tokens in (1024, 131072):
            parts = {"device": H200, "memory": {"budget": "80GiB"}, "backend": {"name": "auto"}}
            laid = plan(spec_of(read_yaml(path), kv=kv, workload={"tokens": tokens}, **parts))
            most = _most(laid)
            assert laid.limits.admitted >= min(0.99 * most, most - 1), (tokens, most)
