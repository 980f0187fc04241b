"""Shipped models against the measured table of architectures, byte for byte."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from planner_support import model_files, preset_files, read_yaml, spec_of

from kvfactory.errors import PlanError
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Attention, CachePlan, GroupPlan

TABLE = json.loads((Path(__file__).parents[1] / "data" / "models.json").read_text())["models"]
MIMO = "MiMo-V2-Flash"  # the hub's window of 128 excludes the query: W = 129 here


OTHER_NAMES = {  # rows of the table that name two models at once
    "Ring-Hybrid": "Bailing/Ring hybrid (class defaults)",
    "GLM-5.3-Flash": "GLM-5-Next / GLM-5.3-Flash (class defaults)",
    "MiniMax-M1": "MiniMax-Text-01 / M1",
    "MiniMax-M2.5": "MiniMax-M2.5/M2.7",
    "Step-3.7-Flash": "Step-3.5/3.7-Flash",
}


def _plain(name: str) -> str:
    """Letters and digits of a name up to its first remark."""
    return re.sub(r"[^a-z0-9.]", "", re.split(r"[(=]|, ", name)[0].lower())


ROWS = {_plain(row["name"]): row for row in TABLE}


def _row(name: str) -> dict[str, Any]:
    return dict(ROWS[_plain(OTHER_NAMES.get(name, name))])


def slot_bytes(group: GroupPlan) -> float:
    """Bytes of one token (one request for states) in all layers of a group."""
    pages = group.planes[0].place.shape[1]
    total = sum(p.place.itemsize * math.prod(p.place.shape) for p in group.planes)
    return total / pages / (group.page_slots * group.tokens_per_entry)


def request_bytes(laid: CachePlan) -> Counter[str]:
    """Bytes per unbounded token, per window and per request's state, without page rounding."""
    found: Counter[str] = Counter()
    for group in laid.groups:
        size = slot_bytes(group)
        if group.kind == "linear":
            found["state"] += int(size)
        elif group.kind in ("swa", "chunked"):
            assert isinstance(group.work, Attention)
            reach = group.work.window_tokens or group.work.chunk_tokens or 0
            found["window"] += int(size * reach)
        elif group.kind != "cross":
            found["token"] += int(size)
    return found


@pytest.mark.parametrize("path", model_files(), ids=lambda path: path.stem)
def test_bytes_equal_the_table(path: Path) -> None:
    laid = plan(spec_of(read_yaml(path)))
    row = _row(laid.spec.model.name)
    window = row["window_bytes_per_request_bf16"]
    if laid.spec.model.name == MIMO:
        window = 129 * 199_680
    found = request_bytes(laid)
    assert found["token"] == row["bytes_per_token_unbounded_bf16"]
    assert found["window"] == window
    assert found["state"] == row["fixed_state_bytes_per_request"]


# Heads of 80, which blocks of 32 do not divide: refused, with the reason.
BLOCKS_OF_32 = {"int4_hnd", "int4_nhd", "mxfp4_nhd", "mxfp8_fa4", "mxfp8_hnd", "mxfp8_nhd"}
REFUSED = {("hunyuan_large", preset) for preset in BLOCKS_OF_32}


@pytest.mark.parametrize("preset", preset_files(), ids=lambda path: path.stem)
def test_every_model_plans_with_every_preset(preset: Path) -> None:
    """Data and scales are accounted for apart, the sink page and the padding too."""
    storage = read_yaml(preset)
    for path in model_files():
        spec = spec_of(read_yaml(path), kv=storage, workload={"requests": 2, "tokens": 300})
        if (path.stem, preset.stem) in REFUSED:
            with pytest.raises(PlanError, match="dim 80, need a multiple of 32"):
                plan(spec)
            continue
        laid = plan(spec)
        for group in laid.groups:
            assert _account(laid, group.name) == _expected(group), (path.stem, group.name)


def _account(laid: CachePlan, name: str) -> tuple[int, int, int]:
    rows = {row.what: row.num_bytes for row in laid.rows if row.owner == name}
    return rows.get("data", 0), rows.get("scales", 0), rows.get("sink", 0)


def _expected(group: GroupPlan) -> tuple[int, int, int]:
    """Data, scales and sink of a group, from the shapes of its planes alone."""
    pages = group.planes[0].place.shape[1]
    page = Counter({"data": 0, "scales": 0})
    for plane in group.planes:
        count = plane.place.itemsize * math.prod(plane.place.shape) // pages
        page["data" if plane.part == "data" else "scales"] += count
    return page["data"] * (pages - 1), page["scales"] * (pages - 1), page.total()
