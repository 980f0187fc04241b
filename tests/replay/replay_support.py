"""Small traces, small models, and plans to replay them on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.replay import Load, Outcome, Simulation, Trace, load_of, spec_for
from kvfactory.spec import Spec

FULL = {"kind": "full", "layers": "0-0", "q_heads": 2, "kv_heads": 2, "head_dim": 16}
LOCAL = FULL | {"kind": "swa", "layers": "1-2", "window_tokens": 40}
CHUNKED = FULL | {"kind": "chunked", "layers": "3-3", "chunk_tokens": 64}
LINEAR = {
    "kind": "linear",
    "layers": "4-4",
    "conv": [[8, 3]],
    "recurrent": {"head": 2, "key": 4, "value": 1},
    "recurrence": "gdn",
}
GROUPS = {"full": FULL, "local": LOCAL, "chunked": CHUNKED, "linear": LINEAR}


def small_model(*groups: str, **extra: Any) -> dict[str, Any]:
    """A model of five layers with some of ``GROUPS``."""
    chosen = {name: GROUPS[name] for name in groups}
    return {"name": "small", "num_layers": 5, "groups": chosen, **extra}


def small_spec(*groups: str, model: dict[str, Any] | None = None, **parts: Any) -> Spec:
    """A spec with steps of 32 prompt tokens on pages of 8."""
    engine = {"prefill_chunk_tokens": 32, **parts.pop("engine", {})}
    kv = {"page_tokens": 8, **parts.pop("kv", {})}
    data = {"model": model or small_model(*groups), "kv": kv, "engine": engine, **parts}
    return Spec.parse(data)


def trace_of(
    requests: Sequence[tuple[float, int, int]], blocks: Sequence[tuple[int, ...]] | None = None
) -> Trace:
    """A trace of (arrival in ms, prompt, output)."""
    columns = np.array(requests, np.float64).T
    whole = columns.astype(np.int64)
    return Trace("made", columns[0], whole[1], whole[2], None if blocks is None else tuple(blocks))


def serve(spec: Spec, trace: Trace) -> tuple[Simulation, Outcome]:
    """A replay from the first arrival to the last token."""
    load = load_of(trace, spec)
    return run(plan(spec_for(load, spec)), load)


def run(laid: CachePlan, load: Load) -> tuple[Simulation, Outcome]:
    """``load`` on a given plan."""
    simulation = Simulation(laid, load)
    while simulation.done < len(load.trace):
        simulation.tick()
    simulation.close()
    return simulation, simulation.record.outcome(1.0)


def write_csv(path: Path, rows: Sequence[tuple[object, ...]], header: str = "") -> Path:
    """An Azure trace of (timestamp, context tokens, generated tokens)."""
    lines = [header or "TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A Mooncake trace."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
