"""States on a GPU: accepted counts that never leave it, and nothing that waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_here import no_waiting, this_gpu
from states_support import REPLAYED, RULES, Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

DRAFTS = 3


def _ways(rule: str) -> list[dict[str, Any]]:
    replays = ("verify_fold", "verify_ring") if rule in REPLAYED else ()
    return [{}, *({"state_replay": way, "replay_tokens": 8} for way in replays)]


CELLS = [
    pytest.param(rule, way, id=f"{rule}-{way.get('state_replay', 'snapshots')}")
    for rule in RULES
    for way in _ways(rule)
]


@pytest.mark.parametrize(("rule", "way"), CELLS)
def test_counts_on_the_device_decide_without_waiting(rule: str, way: dict[str, Any]) -> None:
    loop = Loop(rule, engine={"draft_tokens": DRAFTS, **way}, device=this_gpu())
    sequences = loop.open(2)
    loop.step(sequences, [7, 1])
    for taken in ([3, 1], [0, 4], [4, 2], [1, 0], [2, 3]):
        step = loop.cache.extend(sequences, [4, 4])
        _, inputs = loop.forward(step)
        counts = torch.tensor(taken, device="cuda")
        with no_waiting():
            loop.cache.commit(step, counts)
        torch.cuda.synchronize()
        for number, (sequence, accepted) in enumerate(zip(sequences, taken, strict=True)):
            for layer, new in inputs.items():
                part = new.part(4 * number, 4 * number + accepted)
                loop.history[sequence][layer] = loop.history[sequence][layer].join(part)
            loop.check(sequence)


@pytest.mark.parametrize("rule", RULES)
def test_the_loop_runs_on_a_gpu(rule: str) -> None:
    ring = {"state_replay": "decode_ring", "replay_tokens": 4} if rule in REPLAYED else {}
    engine = {"state_tracking": "two", **ring}
    loop = Loop(rule, engine=engine, memory={"checkpoints": 2}, device=this_gpu())
    a, b = loop.open(2)
    loop.step([a, b], [9, 3])
    for _ in range(5):
        loop.step([a, b], [1, 1])
    loop.cache.states.flush([a, b])
    (child,) = loop.cache.fork(a, 1)
    loop.history[child] = dict(loop.history[a])
    loop.cache.states.track(b)
    loop.cache.release(loop.cache.states.checkpoint(b, 8))
    loop.step([child, b], [2, 1])
    segment = loop.cache.states.donate(b)
    assert segment.stop == 8
    loop.cache.states.flush([child])
    (again,) = loop.cache.load(loop.cache.offload([child]))
    loop.history[again] = loop.history.pop(child)
    for sequence in (a, b, again):
        loop.check(sequence)
