"""What recurrent groups keep beside their states, at its physical size."""

from __future__ import annotations

from typing import Any

import pytest
from planner_support import CONF, read_yaml, spec_of

from kvfactory.errors import PlanError
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan

STATE_BYTES = 2 * 8192 * 3 + 4 * 32 * 128 * 128  # a layer of Qwen3-Next: window and recurrent
LAYERS, REQUESTS = 36, 4


def laid(
    name: str = "qwen3_next", memory: dict[str, Any] | None = None, **engine: Any
) -> CachePlan:
    model = read_yaml(CONF / "model" / f"{name}.yaml")
    load = {"requests": REQUESTS, "tokens": 64}
    return plan(spec_of(model, engine=engine, memory=memory or {}, workload=load))


def used(found: CachePlan, owner: str) -> int:
    """Bytes of a group, its sink included, without padding."""
    rows = [row for row in found.rows if row.owner == owner and row.what != "padding"]
    assert rows
    return sum(row.num_bytes for row in rows)


def test_snapshots_of_a_chain_store_overlapping_windows_once() -> None:
    drafts, taps = 5, 4
    found = laid(draft_tokens=drafts)
    steps = 1 + drafts
    layer = 2 * 8192 * (steps + taps - 2) + steps * 4 * 32 * 128 * 128
    assert used(found, "state.snapshots") == (REQUESTS + 1) * LAYERS * layer


def test_snapshots_of_a_tree_are_dense() -> None:
    found = laid(draft_tokens=5, draft_tree=True)
    assert used(found, "state.snapshots") == (REQUESTS + 1) * LAYERS * 6 * STATE_BYTES


def test_snapshots_follow_the_rows_and_not_the_slots() -> None:
    few, many = laid(draft_tokens=2), laid(draft_tokens=2, state_tracking="two")
    assert used(few, "state.snapshots") == used(many, "state.snapshots")
    rows = laid(draft_tokens=2, max_requests=9)
    assert used(rows, "state.snapshots") == used(few, "state.snapshots") * 10 // (REQUESTS + 1)


@pytest.mark.parametrize(("tracking", "slots"), [("none", 1), ("one", 2), ("two", 3), ("lazy", 2)])
def test_slots_of_a_request(tracking: str, slots: int) -> None:
    found = laid(state_tracking=tracking)
    (state,) = found.states
    assert (state.slots_per_request, state.num_slots) == (slots, 1 + REQUESTS * slots)
    assert used(found, "state") == state.num_slots * LAYERS * STATE_BYTES


def test_a_fold_replaces_snapshots_of_the_recurrent_state() -> None:
    found, steps = laid(draft_tokens=3, state_replay="verify_fold"), 4
    assert used(found, "state.snapshots") == (REQUESTS + 1) * LAYERS * 2 * 8192 * (steps + 2)
    value, key, gate = 2 * 32 * 128, 2 * 16 * 128, 4 * 32
    token = value + key + gate + gate
    assert used(found, "state.ring") == (REQUESTS + 1) * LAYERS * steps * token


def test_a_ring_of_decodes_is_in_the_type_of_the_state() -> None:
    found = laid(state_replay="decode_ring", replay_tokens=8)
    token = 4 * 32 * 128 + 4 * 16 * 128 + 4 * 32
    assert used(found, "state.ring") == (REQUESTS + 1) * LAYERS * (8 * token + 12)
    assert not found.annexes


def test_the_ring_of_kda_stays_a_ring() -> None:
    found = laid("kimi_linear", draft_tokens=3, state_replay="verify_fold", replay_tokens=8)
    value, key, gate, beta = 2 * 32 * 128, 2 * 32 * 128, 4 * 32 * 128, 4 * 32
    token = value + key + gate + beta
    assert used(found, "state.ring") == (REQUESTS + 1) * 20 * (8 * token + 12)
    with pytest.raises(PlanError, match="replay_tokens=16"):
        laid("kimi_linear", draft_tokens=4, state_replay="verify_ring", replay_tokens=8)


def test_checkpoints_are_inside_the_budget() -> None:
    found = laid(memory={"checkpoints": 7})
    layer = 2 * 8192 * 3 + 32 * 128 * 128 + 4 * 32 * 128
    assert used(found, "state.checkpoints") == (7 + 1) * LAYERS * layer
    assert found.bytes == sum(row.num_bytes for row in found.rows)
    budget = {"budget": "4GiB"}
    without, beside = laid(memory=budget), laid(memory={**budget, "checkpoints": 16})
    assert beside.bytes <= 2**32
    assert without.limits.admitted > beside.limits.admitted


def test_the_sizing_inequality_holds_with_annexes() -> None:
    engine = {"draft_tokens": 3, "state_tracking": "two", "state_replay": "verify_ring"}
    model = read_yaml(CONF / "model" / "qwen3_next.yaml")
    memory, tokens = {"budget": "24GiB", "checkpoints": 5}, 4096

    def bytes_for(requests: int) -> int:
        load = {"requests": requests, "tokens": tokens}
        exact = {"checkpoints": 5}
        return plan(spec_of(model, engine=engine, memory=exact, workload=load)).bytes

    found = plan(spec_of(model, engine=engine, memory=memory, workload={"tokens": tokens}))
    admitted = found.limits.admitted
    assert bytes_for(admitted) <= 24 * 2**30 < bytes_for(admitted + 1)
    assert found.bytes <= 24 * 2**30


def test_settings_without_effect_are_noted() -> None:
    found = laid("qwen3", memory={"checkpoints": 2}, state_tracking="one", draft_tree=True)
    text = "\n".join(found.notes)
    for path in ("engine.state_tracking", "memory.checkpoints", "engine.draft_tree"):
        assert f"{path} is unused" in text
