"""The table of architectures beside what shipped models plan; run this file to print it.

Bytes are those of one token that is kept for good, of one request's windows and of one request's
states, in bfloat16 with float32 recurrent states, without page rounding.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_support import model_files, read_yaml, spec_of

from kvfactory.errors import SpecError
from kvfactory.huggingface.mapping import model_from_values
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Attention, CachePlan, GroupPlan
from kvfactory.report.tables import columns

TABLE = json.loads((Path(__file__).parents[1] / "data" / "models.json").read_text())["models"]

OTHER_NAMES = {  # rows of the table that name two models at once
    "Ring-Hybrid": "Bailing/Ring hybrid (class defaults)",
    "GLM-5.3-Flash": "GLM-5-Next / GLM-5.3-Flash (class defaults)",
    "MiniMax-M1": "MiniMax-Text-01 / M1",
    "MiniMax-M2.5": "MiniMax-M2.5/M2.7",
    "Step-3.7-Flash": "Step-3.5/3.7-Flash",
}
WINDOWS = {"MiMo-V2-Flash": 129}  # the hub's 128 exclude the query: W = 129 here
REFUSED = {
    "DeepSeek-V4-Flash": {"model_type": "deepseek_v4", "compress_ratios": [0, 0, 4, 128]},
    "DeepSeek-V4-Pro": {"model_type": "deepseek_v4", "compress_ratios": [128, 4, 128]},
}
"""Rows that no spec can say, with what their configs have that is read and refused."""


def plain(name: str) -> str:
    """Letters and digits of a name up to its first remark."""
    return re.sub(r"[^a-z0-9.]", "", re.split(r"[(=]|, ", name)[0].lower())


ROWS = {plain(row["name"]): row for row in TABLE}


@dataclass(frozen=True)
class Bytes:
    """What a model keeps: bytes a token, of a request's windows, and of its states."""

    token: int
    window: int
    state: int


State = tuple[tuple[tuple[int, int], ...], tuple[int, ...] | None]
"""Of one layer: its convolutions (channels, taps - 1), sorted, and its recurrent state."""


def slot_bytes(group: GroupPlan) -> float:
    """Bytes of one token (one request for states) in all layers of a group."""
    pages = group.planes[0].place.shape[1]
    total = sum(p.place.itemsize * math.prod(p.place.shape) for p in group.planes)
    return total / pages / (group.page_slots * group.tokens_per_entry)


def planned_bytes(laid: CachePlan) -> Bytes:
    """From the planes of a plan alone."""
    token = window = state = 0
    for group in laid.groups:
        size = slot_bytes(group)
        if group.kind == "linear":
            state += int(size)
        elif group.kind in ("swa", "chunked"):
            assert isinstance(group.work, Attention)
            window += int(size * (group.work.window_tokens or group.work.chunk_tokens or 0))
        elif group.kind != "cross":
            token += int(size)
    return Bytes(token, window, state)


def wanted_bytes(row: dict[str, Any]) -> Bytes:
    """As the table gives them."""
    window = row["window_bytes_per_request_bf16"]
    if row["name"] in WINDOWS:
        sizes = [g["bytes_per_token_group_bf16"] for g in row["kv_groups"] if "window" in g]
        window = WINDOWS[row["name"]] * sum(sizes)
    token = row["bytes_per_token_unbounded_bf16"]
    return Bytes(int(token), int(window), int(row["fixed_state_bytes_per_request"]))


def planned_states(laid: CachePlan) -> dict[int, State]:
    """Layer -> the states that it keeps."""
    found: dict[int, State] = {}
    for group in (g for g in laid.groups if g.kind == "linear"):
        axes = {t.name: dict(t.logical.axes) for t in group.tensors}
        convs = [(a["channel"], a["tap"]) for name, a in axes.items() if name != "recurrent"]
        own = tuple(axes["recurrent"].values()) if "recurrent" in axes else None
        for layer in group.layers:
            before, recurrent = found.get(layer, ((), None))
            found[layer] = tuple(sorted([*before, *convs])), recurrent or own
    return found


def wanted_states(row: dict[str, Any]) -> dict[int, State]:
    """Layer -> the states that the table gives it."""
    found: dict[int, State] = {}
    for group in row["state_groups"]:
        shape, own = group["conv_state_shape_engine"], group["recurrent_state_shape"]
        convs = [(shape[0], shape[1])] * group["n_conv_states"] if shape else []
        for layer in group["layers"]:
            before, recurrent = found.get(layer, ((), None))
            both = tuple(sorted([*before, *convs]))
            found[layer] = both, recurrent or (tuple(own) if own else None)
    return found


@dataclass(frozen=True)
class Found:
    """A row of the table with the model that is shipped for it, or the reason why there is none."""

    row: dict[str, Any]
    file: str
    laid: CachePlan | None
    reason: str


def found() -> Iterator[Found]:
    """Every row of the table, in its order, once for each model that is shipped for it."""
    laid = {path.stem: plan(spec_of(read_yaml(path))) for path in model_files()}
    by_name: dict[str, list[str]] = {}
    for stem, each in laid.items():
        name = each.spec.model.name
        by_name.setdefault(plain(OTHER_NAMES.get(name, name)), []).append(stem)
    for row in TABLE:
        stems = by_name.get(plain(row["name"]), [])
        for stem in stems or [""]:
            yield Found(row, stem, laid.get(stem), refusal(row["name"]))


def refusal(name: str) -> str:
    """Why a model of the table cannot be read; empty where it can."""
    if name not in REFUSED:
        return ""
    try:
        model_from_values(REFUSED[name])
    except SpecError as error:
        return "; ".join(f"{p.path}: need {p.need}" for p in error.problems)
    return ""


def text() -> str:
    """The whole comparison as a table."""
    rows = []
    for each in found():
        want = wanted_bytes(each.row)
        have = planned_bytes(each.laid) if each.laid else None
        told = [
            f"{w:,}" + ("" if have is None or h == w else f" != {h:,}")
            for w, h in zip(vars(want).values(), vars(have or want).values(), strict=True)
        ]
        rows.append((each.row["name"], each.file or "refused", *told, each.reason))
    head = ("model", "model=", "bytes a token", "window bytes", "state bytes", "why not")
    return columns(head, rows)


if __name__ == "__main__":
    print(text())
