"""Random batches up to what a plan may hold, planned without running them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from flashinfer_scene import GROUP, Scene
from numpy.typing import NDArray

from kvfactory.backends.flashinfer.plans import Ask
from kvfactory.backends.flashinfer.runner import Runner
from kvfactory.backends.flashinfer.work import Lengths, Work
from kvfactory.steps.step import GraphShape

HEADS = [(32, 8), (32, 32), (64, 4), (16, 2), (64, 2), (64, 1), (6, 2)]
ROOMY: dict[str, Any] = {
    "engine": {"max_requests": 300, "prefill_chunk_tokens": 2048, "draft_tokens": 3},
    "kv": {"page_tokens": 16},
}


def group_of(heads: tuple[int, int], head_dim: int = 128) -> dict[str, Any]:
    """One full group with so many query and key heads."""
    return {**GROUP, "layers": "0", "q_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}


def plan_batches(scene: Scene, rounds: int) -> int:
    """Plan decodes, prefills and verifications, eager and in graphs; how many plans were made."""
    runner = scene.parts.runners["main"]
    assert isinstance(runner, Runner)
    planner = runner.scheduler.planner
    limits, random = scene.plan.limits, np.random.default_rng(0)
    graphs = len(planner.areas) - 1
    for turn in range(rounds):
        batch = int(random.integers(1, limits.max_requests + 1))
        batch = limits.max_requests if turn == 0 else 1 + batch // 10 if turn % 2 else batch
        tokens = random.integers(1, 40000, batch)
        new = random.multinomial(limits.step_tokens - batch, np.ones(batch) / batch) + 1
        for each, q_tokens in ((1, np.ones(batch)), (4, np.full(batch, 4)), (0, new)):
            q_tokens = q_tokens.astype(np.int64)
            rows = int(q_tokens.sum())
            if rows > limits.step_tokens:
                continue
            work = work_for(q_tokens, tokens + q_tokens, scene.plan.groups[0].page_slots)
            for buffer, graph in ((0, None), (graphs, GraphShape(batch, rows, each))):
                step: Any = SimpleNamespace(buffer=buffer, graph=graph)
                name = planner.kernel_for(work, step)
                planner.plan(step, Ask(name, work, 0, each != 1, planner.shape.window_left))
    return planner.made


def work_for(q_tokens: NDArray[np.int64], tokens: NDArray[np.int64], page_tokens: int) -> Work:
    """Settled lengths, from the first page on."""
    none = np.zeros_like(q_tokens)
    pages = -(-tokens // page_tokens)
    return Work.of(Lengths(q_tokens, tokens, none, pages, tokens - q_tokens), settled=True)
