"""States that are copied, saved, moved, or sent to the host and back, with their replay rings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from states_support import REPLAYED, RULES, Loop, compare
from torch import Tensor

from kvfactory.errors import BooksError

LAYOUTS = (
    "state_split",
    "slot_major",
    "layer plane page ...",
    "page layer plane ...",
    "layer page plane ...",
)


@pytest.mark.parametrize("rule", RULES)
def test_forks_and_held_prefixes_go_on_from_their_states(rule: str) -> None:
    loop = Loop(rule)
    (parent,) = loop.open()
    loop.step([parent], [5])
    segment = loop.cache.hold(parent, 5)
    (child,) = loop.cache.fork(parent, 1)
    loop.history[child] = dict(loop.history[parent])
    loop.step([parent], [2])
    loop.step([child], [3])
    (again,) = loop.cache.open(1, [segment])
    loop.history[again] = {i: x.part(0, 5) for i, x in loop.history[parent].items()}
    loop.cache.release(segment)
    loop.step([again, child], [4, 1])
    for sequence in (parent, child, again):
        loop.check(sequence)


@pytest.mark.parametrize("rule", RULES)
def test_tracked_states_are_donated_and_retired(rule: str) -> None:
    loop = Loop(rule, engine={"state_tracking": "two"})
    a, b = loop.open(2)
    loop.step([a, b], [5, 6])
    loop.cache.states.track(a)
    loop.step([a], [2])
    donated = loop.cache.states.donate(a)
    retired = loop.cache.states.retire(b)
    for segment, source in ((donated, a), (retired, b)):
        for layer in loop.layers:
            state = loop.state_at(segment.slots["state"], layer)
            compare(state, loop.replayed(source, layer, segment.stop))
        (again,) = loop.cache.open(1, [segment])
        history = loop.history[source]
        loop.history[again] = {i: x.part(0, segment.stop) for i, x in history.items()}
        loop.step([again], [3])
        loop.check(again)


@pytest.mark.parametrize("rule", ["gdn", "mamba2", "mamba1", "none", "kda"])
def test_checkpoints_are_eight_bit_states_beside_plain_windows(rule: str) -> None:
    loop = Loop(rule, memory={"checkpoints": 2})
    (sequence,) = loop.open()
    loop.step([sequence], [6])
    before = {layer: loop.state(sequence, layer) for layer in loop.layers}
    segment = loop.cache.states.checkpoint(sequence, 6)
    assert loop.cache.books.capacity()["states.state"].held == 1
    loop.step([sequence], [4])
    loop.cache.close([sequence])
    (again,) = loop.cache.open(1, [segment])
    loop.history[again] = {}
    loop.cache.states.copy_due()
    for layer, old in before.items():
        state = loop.state(again, layer)
        for name, value in state.items():
            if name == "recurrent" and rule != "mamba1":
                error = (value - old[name]).norm() / old[name].norm()
                assert 0 < error < 0.012
            else:
                assert torch.equal(value, old[name])
    loop.cache.release(segment)
    assert loop.cache.books.capacity()["checkpoints.state"].held == 0


def test_a_plan_without_checkpoints_says_how_to_get_some() -> None:
    loop = Loop("none")
    (sequence,) = loop.open()
    loop.step([sequence], [4])
    with pytest.raises(BooksError, match=r"checkpoints.state: got none .* memory.checkpoints=16"):
        loop.cache.states.checkpoint(sequence, 4)


def test_saving_restoring_and_copying_at_once_read_before_they_write() -> None:
    """A slot that one copy leaves, another enters: of states and of checkpoints."""
    loop = Loop("none", memory={"checkpoints": 1}, engine={"max_requests": 4})
    a, b = loop.open(2)
    loop.step([a, b], [4, 5])
    saved = loop.cache.states.checkpoint(a, 4)
    loop.cache.states.copy_due()
    (restored,) = loop.cache.open(1, [saved])
    loop.cache.release(saved)
    again = loop.cache.states.checkpoint(b, 5)
    loop.cache.states.copy_due()
    (other,) = loop.cache.open(1, [again])
    loop.cache.states.copy_due()
    for layer in loop.layers:
        compare(loop.state(restored, layer), loop.replayed(a, layer))
        compare(loop.state(other, layer), loop.replayed(b, layer))


# ---- rings -----------------------------------------------------------------------------------

RINGS: dict[str, dict[str, Any]] = {
    "decode_ring": {"state_replay": "decode_ring", "replay_tokens": 4},
    "verify_ring": {"state_replay": "verify_ring", "replay_tokens": 8, "draft_tokens": 2},
}


def _with_records(rule: str, ring: str, **parts: Any) -> Loop:
    """Two sequences, the first with records in its ring."""
    loop = Loop(rule, engine=RINGS[ring], **parts)
    a, b = loop.open(2)
    loop.step([a, b], [7, 5])
    loop.step([a], [1])
    loop.step([a], [1])
    return loop


def _pending(loop: Loop, slot: int) -> list[int]:
    view = loop.cache._parts.pools["state.ring"].bound.planes["cursor"]
    return [int(value) for value in view[:, slot, 0]]


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("rule", REPLAYED)
def test_a_copy_needs_a_flushed_source_and_gives_an_empty_ring(rule: str, ring: str) -> None:
    loop = _with_records(rule, ring)
    a, b = loop.history
    slot = loop.cache.books.state_slots(a)["state"]
    assert _pending(loop, slot) == [2, 2]
    for operation in (
        lambda: loop.cache.fork(a, 1),
        lambda: loop.cache.hold(a, 9),
        lambda: loop.cache.states.retire(a),
    ):
        with pytest.raises(BooksError, match=r"up to 2 tokens .*flush"):
            operation()
    loop.cache.states.flush([a])
    assert _pending(loop, slot) == [0, 0]
    loop.check(a)
    (child,) = loop.cache.fork(a, 1)
    loop.history[child] = dict(loop.history[a])
    loop.step([child, a, b], [1, 1, 1])
    for sequence in (a, b, child):
        loop.check(sequence)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("rule", REPLAYED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_comes_back_from_the_host_bit_for_bit(rule: str, ring: str, layout: str) -> None:
    loop = _with_records(rule, ring, kv={"page_tokens": 4, "layout": {"state": layout}})
    a, b = loop.history
    before = [_planes(loop, sequence) for sequence in (a, b)]
    image = loop.cache.offload([a, b])
    (thief,) = loop.open()
    loop.step([thief], [9])
    c, d = loop.cache.load(image)
    for sequence, planes in zip((c, d), before, strict=True):
        for key, value in _planes(loop, sequence).items():
            assert torch.equal(value, planes[key]), key
    loop.history[c], loop.history[d] = loop.history.pop(a), loop.history.pop(b)
    with pytest.raises(BooksError, match="up to 2 tokens"):
        loop.cache.fork(c, 1)
    for _ in range(3):
        loop.step([c, d], [1, 1])
    for sequence in (c, d):
        loop.check(sequence)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_moved_states_are_the_same_bits(rule: str, layout: str) -> None:
    engine = RINGS["decode_ring"] if rule in REPLAYED else {}
    loop = Loop(rule, engine=engine, kv={"page_tokens": 4, "layout": {"state": layout}})
    a, _ = loop.open(2)
    loop.step([a], [7])
    loop.step([a], [1])
    slot = loop.cache.books.state_slots(a)["state"]
    before = _planes(loop, a)
    for group in loop.cache.plan.groups:
        if group.table == "state":
            loop.cache._parts.pools[group.name].move_pages([4], [slot])
    for key, value in _planes(loop, slot=4).items():
        assert torch.equal(value, before[key]), key


def _planes(loop: Loop, sequence: Any = None, slot: int = 0) -> dict[str, Tensor]:
    """Raw planes of a state slot, of its ring too."""
    found = {}
    slot = slot or loop.cache.books.state_slots(sequence)["state"]
    for group in loop.cache.plan.groups:
        if group.table == "state":
            pool = loop.cache._parts.pools[group.name]
            for key, value in pool.gather(torch.tensor([slot])).items():
                found[f"{group.name}.{key}"] = value
    return found


def test_a_due_state_leaves_for_the_host() -> None:
    """Offload of a sequence whose state is still a checkpoint."""
    loop = Loop("gdn", memory={"checkpoints": 1})
    (sequence,) = loop.open()
    loop.step([sequence], [6])
    segment = loop.cache.states.checkpoint(sequence, 6)
    (again,) = loop.cache.open(1, [segment])
    (loaded,) = loop.cache.load(loop.cache.offload([again]))
    for layer in loop.layers:
        want = loop.state(sequence, layer)
        got = loop.state(loaded, layer)
        torch.testing.assert_close(got["recurrent"], want["recurrent"], rtol=0.05, atol=0.05)
        assert torch.equal(got["conv0"], want["conv0"])
